"""Two hundred tables of odd kinds, and what is right for each: its arrays, or an error's words.

The oracle knows how each table was made, and never calls a reader. Each table is a pair (x, label)
of a few rows. A case changes one thing, in one of the forms in which samples are given.
"""

import csv
import io
import itertools
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROWS, CLIENTS = 48, 4
X = np.random.default_rng(3).integers(-8, 8, (ROWS, 3)) / 4
CODES = np.arange(ROWS) % 3
SITES = np.arange(ROWS) // 12
WORDS = np.array(["k1", "k2", "k3"])[CODES]
PLACES = np.array(["Oslo", "Bern", "Rome", "Lima"])[SITES]  # in alphabetical order: 2, 0, 3, 1
ORDER = np.array([2, 0, 3, 1])[SITES]


@dataclass(frozen=True)
class Right:
    """What is right: the inputs, labels and clients of the source, or words of an error."""

    words: tuple[str, ...] = ()
    inputs: np.ndarray | None = None
    labels: np.ndarray | None = None
    owner: np.ndarray | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Odd:
    """One case: how to make the samples, the `[data]` table, and what is right."""

    name: str
    form: str  # csv, npz, parquet, idx, arrays or frame
    make: Callable[[Path], dict[str, Any]]  # arguments of `fedmuon.run`
    right: Right


def fine(
    labels: np.ndarray = CODES, inputs: np.ndarray = X, owner: Any = None, names: Any = ()
) -> Right:
    return Right((), inputs, labels, owner, names)


def error(*words: str) -> Right:
    return Right(words)


# Tables as columns of cells; None is an empty cell.


def _columns(labels: Any = WORDS, **changed: Any) -> dict[str, list[Any]]:
    cells = {f"x{k}": X[:, k].tolist() for k in range(3)}
    return {**cells, "label": list(labels), **changed}


def _spoilt(values: Any, *changes: tuple[int, Any]) -> list[Any]:
    found = list(values)
    for row, value in changes:
        found[row] = value
    return found


def _tables() -> Iterator[tuple[str, dict[str, list[Any]], dict[str, Any], Right, str]]:
    """Yield (name, columns, reader options, what is right, forms) for forms with cells."""
    names = ("Bern", "Lima", "Oslo", "Rome")
    everywhere = "csv parquet frame"
    for kind, labels, codes in (
        ("words", WORDS, CODES), ("integers", CODES, CODES),
        ("integers from 5", CODES + 5, CODES + 5),
        ("negative", CODES - 1, None), ("one class", ["k1"] * ROWS, CODES * 0),
        ("capitals differ", np.where(CODES == 2, "K1", WORDS), np.array([1, 2, 0])[CODES]),
        ("umlauts", np.array(["ä", "é", "猫"])[CODES], CODES),
    ):  # fmt: skip
        right = error("labels from", "renumber") if codes is None else fine(codes)
        yield f"labels: {kind}", _columns(labels), {}, right, everywhere
    for row in (0, 1, 23, ROWS - 1):
        yield (f"empty label {row}", _columns(_spoilt(WORDS, (row, None))), {},
               error("label", "empty", f"@{row}"), everywhere)  # fmt: skip
        yield (f"empty number label {row}", _columns(_spoilt(CODES, (row, None))), {},
               error("label", f"@{row}"), everywhere)  # fmt: skip
        yield (f"spaces in label {row}", _columns(_spoilt(WORDS, (row, f" {WORDS[row]} "))), {},
               fine(), everywhere)  # fmt: skip
        for mark in ("NA", "null"):
            yield (f"label {mark} among numbers {row}",
                   _columns(_spoilt(map(str, CODES), (row, mark))), {},
                   error("label", mark, f"@{row}"), everywhere)  # fmt: skip
        yield (f"empty cell {row}", _columns(x1=_spoilt(X[:, 1], (row, None))), {},
               error(f"@{row}"), everywhere)  # fmt: skip
        yield (f"word in inputs {row}", _columns(x1=_spoilt(map(str, X[:, 1]), (row, "red"))), {},
               error("x1", "'red'", f"@{row}"), everywhere)  # fmt: skip
    for value in (float("nan"), float("inf")):
        yield (f"input {value}", _columns(x2=_spoilt(X[:, 2], (7, value))), {},
               error("@7"), everywhere)  # fmt: skip
    sites = {"site": list(PLACES)}
    client = {"client": "site"}
    yield "clients: words", _columns(**sites), client, fine(owner=ORDER, names=names), everywhere
    yield ("clients: spaces", _columns(site=_spoilt(PLACES, (5, " Oslo"))), client,
           fine(owner=ORDER, names=names), everywhere)  # fmt: skip
    numbers = [10, 20, 30, 40]
    yield ("clients: numbers", _columns(site=[numbers[k] for k in SITES]), client,
           fine(owner=SITES, names=("10", "20", "30", "40")), everywhere)  # fmt: skip
    for kind, ids in (
        ("20 digits", [f"8949020000123456789{k}" for k in range(4)]),
        ("above 2^63", ["8949020000123456788", "8949020000123456789", "9223372036854775808",
                        "9223372036854775809"]),
        ("leading zeros", ["01", "1", "2", "3"]), ("written as floats", ["1", "1.0", "1e0", "2"]),
    ):  # fmt: skip
        yield (f"clients: {kind}", _columns(site=[ids[k] for k in SITES]), client,
               fine(owner=SITES, names=tuple(ids)), everywhere)  # fmt: skip
    for cell in ("1_000", "１２", "1\0"):
        yield (f"input {cell!r}", _columns(x1=_spoilt(map(str, X[:, 1]), (23, cell))), {},
               error("x1", repr(cell), "@23"), everywhere)  # fmt: skip
    for cell in ("nan", "inf"):
        yield (f"label {cell} among numbers", _columns(_spoilt(map(str, CODES), (23, cell))), {},
               error("label", cell, "@23"), "csv")  # fmt: skip
    yield ("label 2^60", _columns(_spoilt(CODES, (23, 2**60))), {},
           error("labels up to", "renumber"), everywhere)  # fmt: skip
    yield ("clients: empty", _columns(site=_spoilt(PLACES, (9, None))), client,
           error("client", "empty", "@9"), everywhere)  # fmt: skip
    yield ("clients: too many asked", _columns(**sites), {**client, "clients": 10},
           error("clients is 10", "clients = 4"), everywhere)  # fmt: skip
    yield ("clients: too few asked", _columns(**sites), {**client, "clients": 3},
           error("clients is 3", "clients = 4"), everywhere)  # fmt: skip
    yield ("clients: no such column", _columns(**sites), {"client": "hospital"},
           error("hospital", "site"), everywhere)  # fmt: skip
    yield "no such label", _columns(), {"label": "kind"}, error("kind", "label"), everywhere


def _csv_text(columns: dict[str, list[Any]]) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(columns)
    every = itertools.zip_longest(*columns.values())
    rows.writerows(["" if one is None else one for one in row] for row in every)
    return out.getvalue()


def _config(data: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose sizes need no default."""
    options = dict(options)
    clients = options.pop("clients", None)
    by_column = "client" in options
    federation: dict[str, Any] = {"rounds": 1}
    federation |= {"partition": "column"} if by_column else {"clients": CLIENTS}
    federation |= {"clients": clients} if clients else {}
    if data["name"] == "given":
        data = {"target": options.pop("label", "label"), **options, **data}
        del data["name"]
    elif options:
        data = {**data, "options": options}
    return {"data": {**data, "minimum": 1}, "federation": federation,
            "local": {"steps": 1}}  # fmt: skip


def _of_text(text: str | bytes, options: dict[str, Any]) -> Callable[[Path], dict[str, Any]]:
    def make(place: Path) -> dict[str, Any]:
        content = text.encode() if isinstance(text, str) else text
        (place / "t.csv").write_bytes(content)
        return {"config": _config({"name": "csv", "folder": str(place / "t.csv")}, options)}

    return make


def _of_parquet(columns: dict[str, list[Any]], options: dict) -> Callable[[Path], dict[str, Any]]:
    def make(place: Path) -> dict[str, Any]:
        import pyarrow  # pyright: ignore[reportMissingImports]
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]

        cells = {name: [getattr(one, "item", lambda one=one: one)() for one in column]
                 for name, column in columns.items()}  # fmt: skip
        parquet.write_table(pyarrow.table(cells), place / "t.parquet")
        return {"config": _config({"name": "parquet", "folder": str(place / "t.parquet")}, options)}

    return make


def _of_frame(columns: dict[str, list[Any]], options: dict) -> Callable[[Path], dict[str, Any]]:
    def make(place: Path) -> dict[str, Any]:
        import pandas as pd

        return {"config": _config({"name": "given"}, options), "data": pd.DataFrame(columns)}

    return make


def _of_npz(arrays: dict[str, Any], options: dict) -> Callable[[Path], dict[str, Any]]:
    def make(place: Path) -> dict[str, Any]:
        np.savez(place / "t.npz", **arrays)
        return {"config": _config({"name": "npz", "folder": str(place / "t.npz")}, options)}

    return make


def _texts() -> Iterator[Odd]:
    """CSV files whose text is odd."""
    plain = _csv_text(_columns())
    rows = plain.splitlines(keepends=True)
    for name, text, right in (
        ("byte order mark", b"\xef\xbb\xbf" + plain.encode(), fine()),
        ("mark before the label", b"\xef\xbb\xbf"
         + _csv_text({"label": list(WORDS), **_columns()}).encode(), fine()),
        ("carriage returns", plain.replace("\n", "\r\n"), fine()),
        ("blank lines", plain.replace("\n", "\n\n"), fine()),
        ("no last line end", plain.rstrip("\n"), fine()),
        ("spaces in header", plain.replace("label", " label ", 1), fine()),
        ("quotes", plain.replace("k1", '"k1"'), fine()),
        ("twice x0", plain.replace("x1", "x0", 1), error("2 columns", "'x0'")),
        ("twice label", plain.replace("x1", "label", 1), error("2 columns", "'label'")),
        ("twice with a space", plain.replace("x1", " x0", 1), error("2 columns", "'x0'")),
        ("two without names", plain.replace("x0,x1", ",", 1), error("2 columns", "no name")),
        ("semicolons", plain.replace(",", ";"), error("comma", "';'")),
        ("tabs", plain.replace(",", "\t"), error("comma")),
        ("short row", "".join([*rows[:5], "1,2\n", *rows[5:]]), error("line 6", "2 values")),
        ("long row", "".join([*rows[:5], "1,2,3,k1,5\n"]), error("line 6", "5 values")),
        ("header alone", rows[0], error("header, but no samples")),
        ("nothing", "", error("empty")),
        ("mark alone", b"\xef\xbb\xbf", error("empty")),
        ("not UTF-8", plain.replace("k1", "kä").encode("latin1"), error("not a readable CSV")),
        ("only labels", "label\nk1\nk2\n", error("at least one column of inputs")),
    ):  # fmt: skip
        yield Odd(f"csv: {name}", "csv", _of_text(text, {}), right)


def _arrays() -> Iterator[tuple[str, dict[str, Any], dict[str, Any], Right]]:
    """Files of arrays."""
    base = {"inputs": X, "labels": CODES}
    names = ("Bern", "Lima", "Oslo", "Rome")
    yield "plain", base, {}, fine()
    yield "words", {**base, "labels": WORDS}, {}, fine()
    yield "spaces", {**base, "labels": np.char.add(WORDS, " ")}, {}, fine()
    yield "bytes", {**base, "labels": np.char.encode(WORDS)}, {}, fine()
    yield "booleans", {**base, "labels": CODES > 0}, {}, fine((CODES > 0).astype(int))
    yield "column", {**base, "labels": CODES[:, None]}, {}, fine()
    yield "word column", {**base, "labels": WORDS[:, None]}, {}, fine()
    yield "one-hot integers", {**base, "labels": np.eye(3, dtype=int)[CODES]}, {}, error("argmax")
    yield "one-hot words", {**base, "labels": np.stack([WORDS, WORDS], 1)}, {}, error("shape")
    yield "one-hot floats", {**base, "labels": np.eye(3)[CODES]}, {}, error("real numbers")
    yield "floats", {**base, "labels": CODES * 1.0}, {}, error("real numbers")
    yield (
        "empty word",
        {**base, "labels": np.where(CODES, WORDS, "")},
        {},
        error("empty", "sample 0"),
    )
    yield "fewer labels", {**base, "labels": CODES[1:]}, {}, error("one label for each sample")
    yield "no labels", {"inputs": X, "y": CODES}, {}, error("'labels'", "inputs, y")
    yield "one array", {"inputs": X}, {}, error("at least one array")
    yield "inputs in words", {**base, "inputs": X.astype(str)}, {}, error("type str")
    yield "NaN", {**base, "inputs": np.where(X[4, 0] == X, np.nan, X)}, {}, error("NaN", "sample")
    yield "complex", {**base, "inputs": X + 1j}, {}, error("complex")
    yield "objects", {**base, "labels": WORDS.astype(object)}, {}, error("not a readable .npz")
    yield "images", {**base, "inputs": X.reshape(-1, 3, 1)}, {}, fine(inputs=X.reshape(-1, 3, 1))
    client = {"client": "site"}
    owned = fine(owner=ORDER, names=names)
    yield "clients", {**base, "site": PLACES}, client, owned
    yield "clients of two columns", {**base, "site": X}, client, error("client", "one value per")
    yield "fewer clients", {**base, "site": PLACES[1:]}, client, error("47 values", "48 labels")
    yield "clients NaN", {**base, "site": X[:, 0] * np.nan}, client, error("empty", "sample 0")
    yield "ten clients", {**base, "site": PLACES}, {**client, "clients": 10}, error("clients = 4")


PIXELS = np.random.default_rng(4).integers(0, 256, (ROWS, 4)).astype(np.uint8)


def _given() -> Iterator[Odd]:
    """Arrays and frames that Python hands over."""
    import pandas as pd

    def odd(name: str, right: Right, form: str = "arrays", **given: Any) -> Odd:
        clients = {} if "partition" in given else {"clients": CLIENTS}
        config = {"data": {"minimum": 1}, "federation": {**clients, "rounds": 1},
                  "local": {"steps": 1}, **given.pop("tables", {})}  # fmt: skip
        return Odd(f"{form}: {name}", form, lambda place: {"config": config, **given}, right)

    for name, labels, right in (
        ("words", WORDS, fine()), ("list of words", WORDS.tolist(), fine()),
        ("objects", WORDS.astype(object), fine()), ("series", pd.Series(WORDS), fine()),
        ("categories", pd.Series(WORDS, dtype="category"), fine()),
        ("frame", pd.DataFrame({"y": WORDS}), fine()),
        ("spaces", np.char.add(" ", WORDS), fine()),
        ("None", [None, *WORDS[1:]], error("empty", "sample 0")),
        ("an empty word", ["", *WORDS[1:]], error("empty", "sample 0")),
        ("mixed", [1, *WORDS[1:]], error("words", "numbers")),
        ("nullable", pd.Series(CODES, dtype="Int64").mask(CODES == 2), error("sample 2")),
        ("matrix", np.eye(3, dtype=int)[CODES], error("one label for each sample")),
        ("float matrix", np.eye(3)[CODES], error("real numbers")),
        ("complex", CODES + 0j, error("complex")),
        ("dates", pd.date_range("2020", periods=ROWS), error("datetime")),
    ):  # fmt: skip
        yield odd(f"labels, {name}", right, data=(X, labels))
    owned = fine(owner=ORDER, names=("Bern", "Lima", "Oslo", "Rome"))
    for name, column, right in (
        ("words", PLACES, owned), ("series", pd.Series(PLACES), owned),
        ("numbers", SITES * 7, fine(owner=SITES, names=("0", "7", "14", "21"))),
        ("short", PLACES[1:], error("47 samples", "48 samples")),
        ("matrix", X, error("one value per sample")),
        ("empty", np.where(SITES == 1, "", PLACES), error("empty", "sample 12")),
    ):  # fmt: skip
        yield odd(f"clients, {name}", right, data=(X, CODES), partition=column)
    network = {"task": {"name": "network", "model": "mlp"}}
    for name, part, right in (
        ("uint8", PIXELS, fine(inputs=np.concatenate([PIXELS, PIXELS]))),
        ("int64", PIXELS.astype(int), fine(inputs=np.concatenate([PIXELS, PIXELS]))),
        ("int16", PIXELS.astype(np.int16), fine(inputs=np.concatenate([PIXELS, PIXELS]))),
        ("float64", PIXELS * 1.0, fine(inputs=np.concatenate([PIXELS, PIXELS]))),
        ("float32", PIXELS.astype("f4"), fine(inputs=np.concatenate([PIXELS, PIXELS]))),
        ("divided", PIXELS / 255, fine(inputs=np.concatenate([PIXELS, PIXELS]) / 255)),
        ("centred", PIXELS / 255 - 0.5, error("uint8", "same type")),
        ("too large", PIXELS.astype(int) + 300, error("uint8", "same type")),
        ("negative", PIXELS.astype(int) - 300, error("uint8", "same type")),
    ):  # fmt: skip
        test = (part, CODES)
        yield odd(f"test of {name}", right, data=(PIXELS, CODES), test=test, tables=network)
    known = (X, np.where(CODES == 2, "k9", WORDS))
    yield odd("test with another class", error("k9", "sample 2"), data=(X, WORDS), test=known)
    yield odd("test with numbers", error("number", "words"), data=(X, WORDS), test=(X, CODES))


def _idx_bytes(array: np.ndarray, code: int) -> bytes:
    head = struct.pack(f">4B{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return head + array.tobytes()


def _idx() -> Iterator[Odd]:
    """Folders of IDX files whose parts differ in type."""
    images, labels = PIXELS.reshape(-1, 2, 2), CODES.astype(np.uint8)
    both = np.concatenate([images, images])
    types = ((0x08, "u1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8"))
    for code, kind in types:

        def make(place: Path, code: int = code, kind: str = kind) -> dict[str, Any]:
            for part, of, name in (("train", 0x08, "u1"), ("t10k", code, kind)):
                content = _idx_bytes(images.astype(name), of)
                (place / f"{part}-images-idx3-ubyte").write_bytes(content)
                (place / f"{part}-labels-idx1-ubyte").write_bytes(_idx_bytes(labels, 0x08))
            config = _config({"name": "idx", "folder": str(place)}, {})
            config["task"] = {"name": "network", "model": "mlp"}
            return {"config": config}

        yield Odd(f"idx: test of {kind}", "idx", make, fine(inputs=both))


def cases() -> list[Odd]:
    """Return all cases."""
    makers = {"csv": lambda c, o: _of_text(_csv_text(c), o), "parquet": _of_parquet,
              "frame": _of_frame}  # fmt: skip
    found = [
        Odd(f"{form}: {name}", form, makers[form](columns, options), right)
        for name, columns, options, right, forms in _tables()
        for form in forms.split()
    ]
    found += _texts()
    found += [Odd(f"npz: {name}", "npz", _of_npz(arrays, options), right)
              for name, arrays, options, right in _arrays()]  # fmt: skip
    return [*found, *_given(), *_idx()]


def _placed(word: str, form: str) -> str:
    """Return a pattern for a word. @7 is the place of sample 7 in messages about this form."""
    if not word.startswith("@"):
        return re.escape(word)
    row = int(word[1:])
    place = {"csv": f"line {row + 2}", "parquet": f"(row|sample) {row}"}.get(form, f"sample {row}")
    return rf"\b{place}\b"


def judge(case: Odd, place: Path) -> str:
    """Run a case up to its data, and return why it ended wrongly, or an empty text."""
    from fedmuon.core.errors import InputError
    from fedmuon.runs.prepare import prepare

    place.mkdir()
    try:
        from fedmuon.experiments import api
        from fedmuon.federated.build import resolve
        from fedmuon.federated.client_data import read_source

        given = case.make(place)
        config = given.pop("config")
        objects = {"data": given.get("data"), "partition": given.get("partition")}
        chosen = api._chosen(config, objects, given.get("test"), False, place / "run")
        run = prepare(resolve(chosen), place / "run")
        source = read_source(run.config)
    except InputError as failure:
        said = str(failure)
        if not case.right.words:
            return f"rejected: {said}"
        wanted = [_placed(word, case.form) for word in case.right.words]
        missing = [word for word in wanted if not re.search(word, said)]
        return f"says {said!r} without {missing}" if missing else ""
    except Exception as failure:
        return f"traceback: {type(failure).__name__}: {failure}"
    if case.right.words:
        return f"accepted, but must say {case.right.words}"
    return _differs(case.right, run, source)


def _differs(right: Right, run: Any, source: Any) -> str:
    assert right.inputs is not None and right.labels is not None
    if source.inputs.shape != right.inputs.shape:
        return f"the inputs have shape {source.inputs.shape}"
    if not np.allclose(source.inputs, right.inputs, rtol=1e-6, atol=0):
        return "the inputs differ"
    labels = right.labels if len(source.labels) == ROWS else np.tile(right.labels, 2)
    if not np.array_equal(source.labels, labels) or run.data.classes != right.labels.max() + 1:
        return f"the labels differ, with {run.data.classes} classes"
    if right.owner is not None:
        if not np.array_equal(run.data.client, right.owner[run.data.train_index]):
            return "the clients differ"
        if tuple(run.data.client_names) != right.names:
            return f"the names are {run.data.client_names}"
    top = 1.0 if source.inputs.max() > 1.5 and source.inputs.dtype == np.uint8 else None
    if top and run.data.inputs.max() > top:
        return "pixels are not divided"
    return ""
