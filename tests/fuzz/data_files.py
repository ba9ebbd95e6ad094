"""Files of samples, words and weights as no program should have written them."""

import csv
import gzip
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.fuzz import base, mutations, values
from tests.fuzz.calls import call, judged, snapshot
from tests.fuzz.outcome import Case, Outcome

KIND = "files"
FORMS: dict[str, dict[str, Any]] = {  # [data]
    "idx": {"name": "idx"}, "mnist": {"name": "mnist"}, "cifar-bin": {"name": "cifar10"},
    "cifar-py": {"name": "cifar10"}, "e2e": {"name": "e2e", "context": 40},
    "dart": {"name": "dart", "context": 40}, "text": {"name": "text", "context": 4},
    "weights": {"name": "text", "context": 4}, "tokenizer": {"name": "e2e", "context": 40},
}  # fmt: skip
DECODER = {"name": "network", "model": "gpt", "width": 8, "depth": 1, "heads": 1}
OF_TEXT = ("e2e", "dart", "text", "weights", "tokenizer")
CODES = (0x08, 0x09, 0x0B, 0x0C, 0x0D, 0x0E, 0x0F, 0)
ENDS = (0, 1, 127, 128, 255, -1, -128, 32767, -32768, 2**31 - 1, -(2**31))


def draw(rng: Random) -> Case:
    """A form, with headers, labels or bytes that are not as they should be."""
    form = rng.choice(list(FORMS))
    suffix = {"e2e": ".csv", "dart": ".json", "tokenizer": ".json"}.get(form, "")
    case: Case = {"kind": KIND, "form": form, "gzip": rng.random() < 0.2, "header": {}}
    if form in ("idx", "mnist") and rng.random() < 0.6:
        case["header"] = _header(rng)
    elif rng.random() < 0.3:
        case["text"] = values.text(rng) * rng.choice((1, 3, 200))
    count = rng.choice((0, 1, 1, 2)) if case["header"] or "text" in case else rng.choice((1, 1, 2))
    case["mutations"] = [
        {"file": rng.random(), **mutations.drawn(rng, suffix)} for _ in range(count)
    ]
    case["network"] = form in OF_TEXT or rng.random() < 0.3
    return case


def perform(case: Case, place: Path) -> Outcome:
    folder = place / "data"
    folder.mkdir()
    MAKERS[case["form"]](folder, case)
    mutations.spoil(folder, case["mutations"])
    base.write(place / "c.toml", base.toml(base.tables(base.READ, _layer(case, folder))))
    before = snapshot(place)
    return judged(call(["run", "c.toml", "--out", "out"], place), place, before)


def _layer(case: Case, folder: Path) -> dict[str, dict[str, Any]]:
    sizes = {"folder": str(folder), "train": 24, "test": 8, "minimum": 2}
    data = {**FORMS[case["form"]], **sizes}
    found: dict[str, dict[str, Any]] = {"data": data, "federation": {"rounds": 1}}
    if case["network"]:
        found["task"] = DECODER if case["form"] in OF_TEXT else {"name": "network", "model": "mlp"}
        found["local"] = {"batch": 2, "lr": 0.01, "steps": 1}
    if case["form"] == "weights":
        found["task"] = {**DECODER, "weights": str(folder / "weights")}
        data["folder"] = str(folder / "words")
    if case["form"] == "tokenizer":
        data |= {"tokenizer": str(folder / "pieces"), "folder": str(folder / "tables")}
    return found


def _header(rng: Random) -> dict[str, Any]:
    """What an IDX file says of itself, or holds as labels."""
    found: dict[str, Any] = {"of": rng.choice(("images", "labels"))}
    what = rng.choice(("type", "shape", "ends", "ends", "ends", "dimensions", "value"))
    if what == "type":
        found["type"] = rng.choice(CODES)
    elif what == "shape":
        found["shape"] = [rng.choice((0, 1, 60, 2**16, 2**31, 2**32 - 1)) for _ in range(3)]
    elif what == "dimensions":
        found["dimensions"] = rng.choice((0, 1, 2, 4, 33, 64, 255))
    elif what == "value":
        found |= {"of": "images", "type": rng.choice((0x0D, 0x0E))}
        found["value"] = rng.choice(("nan", "inf", "-inf", "3e38", "1e308", "5e-324"))
    else:
        found |= {"of": "labels", "type": rng.choice((0x08, 0x09, 0x0B, 0x0C))}
        found["label"] = rng.choice(ENDS)
    return found


# Small sound files of every form that `[data]` and `[task]` read.

COUNT = 60
TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def _idx(folder: Path, case: Case, prefix: str = "") -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (COUNT, 4, 4)).astype(np.uint8)
    labels = (np.arange(COUNT) % 3).astype(np.uint8)
    for name, array in (("images", images), ("labels", labels)):
        told = case["header"] if case["header"].get("of") == name else {}
        content = _idx_bytes(array, told)
        path = folder / f"{prefix}{name}-idx{array.ndim}-ubyte"
        path.write_bytes(gzip.compress(content, mtime=0) if case["gzip"] else content)


def _idx_bytes(array: np.ndarray, told: dict) -> bytes:
    kind = told.get("type", 0x08)
    held = array.astype(TYPES.get(kind, "u1"))
    if "label" in told:
        ends = np.iinfo(held.dtype)
        held[0] = min(max(told["label"], int(ends.min)), int(ends.max))
    if "value" in told:
        with np.errstate(over="ignore"):
            held[0, 0, 0] = float(told["value"])
    shape = told.get("shape", array.shape)[: array.ndim]
    count = told.get("dimensions", array.ndim)
    return struct.pack(f">4B{len(shape)}I", 0, 0, kind, count, *shape) + held.tobytes()


def _mnist(folder: Path, case: Case) -> None:
    for prefix in ("train-", "t10k-"):
        _idx(folder, case, prefix)


def _batches() -> list[tuple[str, np.ndarray, list[int]]]:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return [
        (name, rng.integers(0, 256, (10, 3072)).astype(np.uint8), list(range(10))) for name in names
    ]


def _cifar_bin(folder: Path, case: Case) -> None:
    for name, images, labels in _batches():
        rows = np.concatenate([np.array(labels, np.uint8)[:, None], images], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def _cifar_py(folder: Path, case: Case) -> None:
    for name, images, labels in _batches():
        content = {b"data": images, b"labels": labels, b"text": case.get("text", "")}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def _e2e(folder: Path, case: Case) -> None:
    words = case.get("text", "It is fine").replace("\0", "")
    for part in ("train", "test"):
        with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("mr", "ref"))
            rows.writerows((f"name[A {i}]" + ", food[B]" * (i % 2), f"It {i}.") for i in range(40))
            rows.writerow(("name[A]", words))


def _dart(folder: Path, case: Case) -> None:
    words = case.get("text", "It is fine")
    entries = [
        {"tripleset": [["A", "is", str(i)]] * (1 + i % 2), "annotations": [{"text": f"It {i}."}]}
        for i in range(40)
    ]
    entries.append({"tripleset": [["A", "is", "B"]], "annotations": [{"text": words}]})
    for part in ("train", "test"):
        (folder / f"{part}.json").write_text(json.dumps(entries), encoding="utf-8")


def _text(folder: Path, case: Case) -> None:
    words = case.get("text", "").encode("utf-8", "replace")
    (folder / "words.txt").write_bytes(b"The quick brown fox jumps. " * 200 + words)


def _weights(folder: Path, case: Case) -> None:
    """Words to learn, and weights of the decoder that reads them."""
    from safetensors.numpy import save_file

    from fedmuon.tasks.decoder import Form, decoder

    for name in ("words", "weights"):
        (folder / name).mkdir()
    _text(folder / "words", case)
    module = decoder(Form(256, 4, 8, 1, 1))
    held = {
        name: np.full(tuple(one.shape), 0.01, np.float32) for name, one in module.named_parameters()
    }
    odd = {case["text"]: np.ones(3, np.float32)} if case.get("text") else {}
    save_file({**held, **odd}, folder / "weights" / "model.safetensors")


def _tokenizer(folder: Path, case: Case) -> None:
    """Tables, and a tokenizer of single bytes as GPT-2's files keep one."""
    for name in ("tables", "pieces"):
        (folder / name).mkdir()
    _e2e(folder / "tables", {**case, "text": "It is fine"})
    letters = {chr(code): code - 33 for code in range(33, 127)} | {"Ġ": 94, "<|endoftext|>": 95}
    ends = {"id": 95, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True}  # fmt: skip
    model = {"type": "BPE", "vocab": letters, "merges": []}
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    about = {"version": "1.0", "added_tokens": [ends], "pre_tokenizer": split, "model": model}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    for name, content in (("tokenizer", about), ("tokenizer_config", config)):
        (folder / "pieces" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


MAKERS: dict[str, Callable[[Path, Case], None]] = {
    "idx": _idx, "mnist": _mnist, "cifar-bin": _cifar_bin, "cifar-py": _cifar_py, "e2e": _e2e,
    "dart": _dart, "text": _text, "weights": _weights, "tokenizer": _tokenizer,
}  # fmt: skip
