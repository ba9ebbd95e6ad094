"""Samples handed over in Python: every kind of array or table has its values read, or is rejected
with one sentence that names it."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from PIL import Image
from sentences import one_sentence
from sklearn.datasets import load_digits
from sklearn.utils import Bunch
from torch.utils.data import TensorDataset

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.data.source import Source
from fedmuon.data.user_data import as_source
from fedmuon.data.user_files import comma_separated

RNG = np.random.default_rng(0)
X = RNG.integers(-8, 8, (12, 12)) / 4  # exact in every float type
Y = np.arange(12) % 3
FRAME, TENSOR, LABELS = pd.DataFrame(X), torch.tensor(X), torch.tensor(Y)
TWICE = pd.DataFrame(X, columns=["a", "a", *map(str, range(10))])


LABELLED = FRAME.rename(columns=str).assign(label=Y)
PAIRS = [*zip(X, Y.tolist(), strict=True)]
ITEMS = [{"x": x, "y": y} for x, y in PAIRS]
IMAGES = [Image.new("RGB", (5, 4))] * 12


class Items:
    """A sequence that is no list, as data sets are."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


class Polars:
    columns = tuple(map(str, range(12)))

    def to_numpy(self) -> np.ndarray:
        return X

    def iter_columns(self) -> Any:
        return (FRAME[k] for k in range(12))


class Arrow:
    column_names = tuple(map(str, range(12)))

    def itercolumns(self) -> Any:
        return (FRAME[k] for k in range(12))


READ: dict[str, Any] = {
    "frame of whole-number columns": (FRAME, Y),
    "frame of names that stand there twice": (TWICE, Y),
    "frame and series": (FRAME.rename(columns=str), pd.Series(Y)),
    "frame and frame": [FRAME, FRAME.assign(label=Y)[["label"]]],
    "nullable types": (FRAME.astype("Float64"), pd.Series(Y, dtype="Int64")),
    "objects that are numbers": (FRAME.astype(object), Y),
    "polars": (Polars(), Y),
    "pyarrow": (Arrow(), Y),
    "Bunch": Bunch(data=X, target=Y, DESCR="", images=X),
    "Bunch of frames": Bunch(data=FRAME, target=pd.Series(Y)),
    "arrays": (X, Y),
    "a list of tensors": [TENSOR, LABELS],
    "lists of lists": (X.tolist(), Y.tolist()),
    "a column of labels": (TENSOR, LABELS[:, None]),
    "bfloat16": (TENSOR.bfloat16(), LABELS),
    "float16": (TENSOR.half(), LABELS),
    "float8": (TENSOR.to(torch.float8_e4m3fn), LABELS),
    "a list of bfloat16": ([*TENSOR.bfloat16()], [*LABELS]),
    "a Dataset of bfloat16": TensorDataset(TENSOR.bfloat16(), LABELS),
    "a conjugate view": (torch.complex(TENSOR, -TENSOR).conj().imag, LABELS),
    "pairs": PAIRS,
    "pairs of lists": [[x.tolist(), y] for x, y in PAIRS],
    "dict items": ITEMS,
    "a Dataset of dicts": Items(ITEMS),
    "a Dataset of pairs": Items(PAIRS),
    "dicts of tensors": [{"x": x, "target": y} for x, y in zip(TENSOR, LABELS, strict=True)],
    "dicts of bfloat16": [
        {"labels": y, "x": TENSOR[k].bfloat16()} for k, (_, y) in enumerate(PAIRS)
    ],
    "dicts of numbers": [
        {"label": y, **dict(zip(FRAME.columns, x, strict=True))} for x, y in PAIRS
    ],
    "dicts of 0-d tensors": [
        {**{str(k): v for k, v in enumerate(x)}, "y": y}
        for x, y in zip(TENSOR, LABELS, strict=True)
    ],
    "with gradients": (TENSOR.clone().requires_grad_(), LABELS),
}


@pytest.mark.parametrize("name", list(READ))
def test_the_values_are_read(name: str) -> None:
    found = as_source(READ[name])
    assert np.array_equal(found.inputs, X) and np.array_equal(found.labels, Y)
    assert found.classes == 3
    held_out = as_source((X, Y), test=READ[name])
    assert np.array_equal(held_out.inputs[12:], X)


def test_other_values_are_read() -> None:
    """Tensors of inference mode, a Bunch of scikit-learn, and columns of several types."""
    with torch.inference_mode():
        found = as_source((TENSOR.clone(), LABELS.clone()))
    assert np.array_equal(found.inputs, X)
    digits: Any = load_digits()
    found = as_source(digits)
    assert np.array_equal(found.inputs, digits.data) and found.classes == 10
    found = as_source((FRAME.assign(flag=True, count=3), Y)).inputs
    assert found.dtype == np.float64 and (found[:, 12:] == [1, 3]).all()


def test_a_run_of_a_frame_is_that_of_its_array() -> None:
    config = {"federation": {"clients": 2, "rounds": 1, "partition": "iid"}}
    frame, array = (fedmuon.run(config, data=(held, Y)) for held in (FRAME, X))
    assert torch.equal(frame.model["weight"], array.model["weight"])


REJECTED: dict[str, tuple[Callable[[], Any], str]] = {
    "frame alone": (lambda: FRAME, "DataFrame with the columns 0, 1, .* and 2 more, .* set .data"),
    "array alone": (lambda: X[:, :2], "data is only a ndarray.*pass data=.inputs, labels"),
    "tensor alone": (lambda: TENSOR[:, :2], "data is only a Tensor"),
    "sparse alone": (lambda: scipy.sparse.csr_array(X), "data is only a csr_array"),
    "dict": (lambda: {"a": X, "b": Y}, "a, b, but without the entries 'data' and 'target'"),
    "words": (lambda: (FRAME.assign(w="a"), Y), "inputs of data have a column 'w' of type"),
    "dates": (lambda: (FRAME.assign(d=pd.Timestamp(0)), Y), "column 'd' of type datetime64"),
    "labels of two columns": (lambda: (X, pd.DataFrame({"w": ["a"] * 12, "v": 1})),
                              "labels of data .*'w'"),
    "words and numbers": (lambda: (X, [*"aabbccddee", 1, 2]), "type int, in sample 10"),
    "an empty label": (lambda: (X, np.array([*"aaaaa", " ", *"bbbbbb"])), "is empty in sample 5"),
    "no word": (lambda: (X, pd.Series(["a", None] * 6)), "the label is empty in sample 1"),
    "no columns": (lambda: (FRAME[[]], Y), "without columns"),
    "missing": (lambda: (FRAME.mask(FRAME > 1), Y), "NaN or infinity"),
    "nullable": (lambda: (FRAME.astype("Float64").mask(FRAME > 1), Y), "NaN or infinity"),
    "sparse matrix": (lambda: (scipy.sparse.csr_matrix(X), Y), "inputs of data .*sparse.*toarray"),
    "sparse tensor": (lambda: (TENSOR.to_sparse(), Y), "inputs of data .*sparse.*to_dense"),
    "sparse rows": (lambda: ([*TENSOR.to_sparse()], Y), "inputs of data .*sparse.*to_dense"),
    "meta": (lambda: (TENSOR.to("meta"), Y), "inputs of data are a tensor on the device meta"),
    "meta labels": (lambda: (X, LABELS.to("meta")), "labels of data are a tensor on the device"),
    "nested": (lambda: (torch.nested.nested_tensor([*TENSOR], layout=torch.jagged), Y),
               "inputs of data are a nested tensor"),
    "quantized": (lambda: (torch.quantize_per_tensor(TENSOR.float(), 1, 0, torch.qint8), Y),
                  "inputs of data are a quantized tensor"),
    "complex": (lambda: (X + 1j, Y), "values of type complex128"),
    "infinite": (lambda: (X * np.inf, Y), "NaN or infinity"),
    "masked": (lambda: (np.ma.masked_greater(X, 1), Y), "inputs of data have masked entries"),
    "rows by key": (lambda: (dict(enumerate(X)), Y), "inputs of data are a dict"),
    "set": (lambda: ({*range(12)}, Y), "inputs of data are a set"),
    "triples": (lambda: TensorDataset(TENSOR, LABELS, LABELS), "3 values, but it must be a pair"),
    "dataset of dicts": (lambda: Items([{"x": x} for x in X]), "entries x, and it is unclear"),
    "two labels": (lambda: [{"x": x, "y": 1, "label": 1} for x in X], "it is unclear which entry"),
    "two inputs": (lambda: [{"x": x, "z": x, "y": 1} for x in X], "entries x, z. Keep one entry"),
    "no input": (lambda: [{"y": 1}] * 3, "entries none. Keep one entry"),
    "text": (lambda: [{"x": "words", "y": 1}] * 3, "data contains values of type str: convert"),
    "dates for labels": (lambda: (X, pd.date_range("2020", periods=12)), "labels have type date"),
    "a dict without": (lambda: [*ITEMS, {"x": X[0]}], "sample 12 of data is a dict of 1"),
    "a pair among dicts": (lambda: [*ITEMS, (X[0], 1)], "sample 12 of data is a tuple of 2 values"),
    "a triple": (lambda: [*PAIRS, (1, 2, 3)], "sample 12 of data is a tuple of 3 values"),
    "splits": (lambda: {"train": ITEMS, "test": ITEMS}, "the entries train, test, but without"),
    "a stream": (lambda: iter(PAIRS), "(generator|iterator), which .*: pass .inputs, labels."),
    "no samples": (lambda: Items([]), "data contains no values"),
    "no rows": (lambda: (X[:0], Y[:0]), "data contains no values"),
    "lengths": (lambda: (X, Y[1:]), "12, 12. but labels of shape .11,.: pass one label for each"),
    "ragged": (lambda: [(x[:k], 0) for k, x in enumerate(X)], "sample 1 has shape .1,.*one shape"),
    "images": (lambda: [(image, 0) for image in (*IMAGES, Image.new("L", (2, 3)))],
               r"sample 0 has shape \(3, 4, 5\), but sample 12 has shape \(1, 3, 2\)\. Bring all"),
    "label NaN": (lambda: (X, np.where(Y == 1, np.nan, 0.5)), "label that is NaN .* in sample 1:"),
    "no label": (lambda: (X, pd.Series(Y, dtype="Int64").mask(Y == 2)), "is NaN .* in sample 2:"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "target", "words"), [
    (LABELLED, "Label", "'Label' matches no column of data, which has 0, 1, "),
    (pd.concat([LABELLED, LABELLED[["label"]]], axis=1), "label", "matches several columns"),
    (LABELLED[["label"]], "label", "without columns"),
    (LABELLED.assign(label=None), "label", "the label is empty in sample 0"),
    (ITEMS, "kind", "'kind' does not exist, because the samples of data contain only x, y"),
    (PAIRS, "y", "no effect, because the samples of data are not dicts"),
    ((X, Y), "y", "no effect, because data is a tuple, which has neither columns nor dict items"),
    (as_source((X, Y)), "y", "no effect, because a Source already has labels"),
])  # fmt: skip
def test_a_target_that_is_not_there_is_named(given: Any, target: str, words: str) -> None:
    with one_sentence(words):
        as_source(given, target=target)


@pytest.mark.parametrize("data", [FRAME, TWICE, LABELLED])
def test_no_table_trains_on_its_column_names(data: pd.DataFrame) -> None:
    with pytest.raises(InputError, match="it is unclear which column is the label"):
        fedmuon.run(data=data)


def test_a_target_of_built_in_data_is_rejected() -> None:
    with pytest.raises(
        InputError, match=r"\[data\] target = 'y' has no effect.* only by tables and"
    ):
        fedmuon.run({"data": {"name": "digits", "target": "y"}})


@pytest.mark.parametrize("kind", [
    lambda x, y: (pd.DataFrame(x, columns=list("abc")).assign(label=y), "label"),
    lambda x, y: ([dict(zip("abc", row, strict=True), label=int(one))
                   for row, one in zip(x.tolist(), y, strict=True)], "label"),
    lambda x, y: ((pd.DataFrame(x, columns=list("abc")), y), ""),
])  # fmt: skip
def test_test_samples_are_aligned_by_name(kind: Callable[..., Any]) -> None:
    """Another order is put right; other names are rejected."""
    train, target = kind(X[:, :3], Y)
    expected = as_source(train, train, target=target)

    def renamed(names: dict[str, str], order: str) -> Any:
        def of(table: pd.DataFrame) -> pd.DataFrame:
            wanted = [*order, *(["label"] if "label" in table else [])]
            return pd.DataFrame({names.get(one, one): table[one] for one in wanted})

        if isinstance(train, tuple):
            return of(train[0]), train[1]
        if isinstance(train, list):
            return of(pd.DataFrame(train)).to_dict("records")
        return of(train)

    found = as_source(train, renamed({}, "cab"), target=target)
    np.testing.assert_array_equal(found.inputs, expected.inputs)
    np.testing.assert_array_equal(found.labels, expected.labels)
    with pytest.raises(
        InputError,
        match="test lack the input b and have the unexpected input z: use the same names",
    ):
        as_source(train, renamed({"b": "z"}, "abc"), target=target)


def test_a_pair_may_test_a_table() -> None:
    table = pd.DataFrame(X[:, :3], columns=list("abc")).assign(label=Y)
    found = as_source(table, (X[:, :3], Y), target="label")
    np.testing.assert_array_equal(found.inputs, np.concatenate([X[:, :3]] * 2))
    with pytest.raises(InputError, match="target = 'label' has no effect, because data is a tuple"):
        as_source((X, Y), table, target="label")


def test_truth_values_are_zeros_and_ones() -> None:
    flags = X[:, :3] > 0
    for given in (flags, torch.tensor(flags), pd.DataFrame(flags)):
        assert as_source((given, Y)).inputs.dtype == np.float32
        np.testing.assert_array_equal(as_source((given, Y)).inputs, flags.astype(float))


@pytest.mark.parametrize("labels", [Y + 0.5, Y.astype(float)])
def test_classifiers_need_whole_numbers(labels: np.ndarray) -> None:
    with pytest.raises(
        InputError, match=r"labels of the data are real numbers, .* from 0 as labels, or"
    ):
        fedmuon.run({"federation": {"clients": 2}}, data=(X, labels))


def test_a_run_by_a_target_is_that_of_its_arrays(tmp_path: Any) -> None:
    config = {"federation": {"clients": 2, "rounds": 1, "partition": "iid"}}
    array = fedmuon.run(config, data=(X, Y), test=(X, Y))
    named = {**config, "data": {"target": "label"}}
    frame = fedmuon.run(named, data=LABELLED, test=LABELLED, out=tmp_path / "run")
    assert torch.equal(frame.model["weight"], array.model["weight"])
    again = fedmuon.run(data=LABELLED, test=LABELLED, out=tmp_path / "run", resume=True)
    assert again.summary == frame.summary


KINDS = runpy.run_path(str(Path(fedmuon.__file__).parents[1] / "examples" / "data_kinds.py"))


@pytest.mark.parametrize("kind", KINDS["KINDS"], ids=lambda kind: kind.__name__)
def test_the_kinds_of_the_example_have_the_same_samples(kind: Callable[[], Any]) -> None:
    try:
        data = kind()
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    found = as_source(data, target="digit" if kind.__name__ == "table" else "")
    if kind.__name__ == "torchvision":
        assert found.inputs.shape == (300, 1, 8, 8) and found.inputs.dtype == np.float32
        return
    digits = KINDS["DIGITS"]
    wanted = KINDS["PIXELS"][:, None] if kind.__name__ == "pairs_of_images" else digits.data
    assert np.array_equal(found.inputs, wanted) and np.array_equal(found.labels, digits.target)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "F", "I;16"])
def test_pixels_have_channels_first(mode: str) -> None:
    """Pixel by pixel, by PIL's own `getpixel` in the mode that shows colours."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 4, 5), dtype=np.uint8).transpose(1, 2, 0)
    image = Image.fromarray(pixels)
    image = Image.fromarray(pixels[:, :, 0].astype("uint16") * 99) if mode == "I;16" else image
    image = image if mode == "I;16" else image.convert(mode)
    plain = image.convert({"P": "RGB", "1": "L"}.get(mode, mode))
    found = as_source([(image, k % 2) for k in range(4)]).inputs
    assert found.shape == (4, len(plain.getbands()), 4, 5)
    for row, column in np.ndindex(4, 5):
        held = plain.getpixel((column, row))
        assert found[1, :, row, column].tolist() == [*(held if isinstance(held, tuple) else [held])]
    assert mode == "F" or mode == "I;16" or found.dtype == np.uint8


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", list(REJECTED))
def test_what_cannot_be_read_is_named(name: str) -> None:
    given, words = REJECTED[name]
    with one_sentence(words):
        as_source(given())


# A public center


def test_a_public_center_is_the_mean_of_samples_that_nobody_trains_on() -> None:
    rng = np.random.default_rng(2)
    pixels = rng.integers(256, size=(30, 2, 3), dtype=np.uint8)
    source = Source("own", pixels, np.arange(30) % 3, 3, 20, "own").with_public_center(4)
    mean = pixels[-4:].reshape(4, 6).astype(float).mean(0) / 255
    assert len(source.labels) == len(source.inputs) == 26 and source.public == 4
    centered = pixels[:26].reshape(26, 6) / 255 - mean
    np.testing.assert_allclose(source.rows("pixels"), centered, atol=1e-7)
    unit = centered / np.linalg.norm(centered, axis=1, keepdims=True)
    np.testing.assert_allclose(source.rows("unit"), unit, atol=1e-14)
    np.testing.assert_allclose(source.rows("unit", np.array([5, 2])), unit[[5, 2]], atol=1e-14)
    assert (np.linalg.norm(source.rows("ball"), axis=1) <= 1).all()
    for count, official in ((10, 20), (4, None)):
        with pytest.raises(InputError, match=f"needs {count} samples from the official test part"):
            Source("own", pixels, np.arange(30) % 3, 3, official, "own").with_public_center(count)


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_run_with_a_public_center_is_that_of_centered_samples(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Samples that were centered and scaled before have the same model; neighbours, too."""
    rng = np.random.default_rng(3)
    x, more = rng.normal(1.0, 1.0, (60, 5)), rng.normal(1.0, 1.0, (25, 5))
    y, other = np.arange(60) % 3, np.arange(25) % 3
    ready = [one - more[-10:].mean(0) for one in (x, more[:15])]
    tables = {"federation": {"clients": 3, "rounds": 4, "partition": "iid"}, "local": {"lr": 0.1},
              "task": {"name": "matrix"}, "engine": {"dtype": "float64"}}  # fmt: skip
    given = {"data": (ready[0], y), "test": (ready[1], other[:15])}
    expected = fedmuon.stability(tables, **given, trials=3)
    centered = tables | {"data": {"center": "public", "center-samples": 10}}
    if engine == "ray":
        place = request.getfixturevalue("cluster")
        centered["engine"] = {"name": "ray", "dtype": "float64", "ray-address": place}
    found = fedmuon.stability(
        centered, data=(x, y), test=(more, other), trials=3, out=tmp_path / "a"
    )
    np.testing.assert_allclose(found.model["weight"], expected.model["weight"], atol=1e-13)
    moved, wanted = ([row["perturbation"] for row in one.neighbours] for one in (found, expected))
    np.testing.assert_allclose(moved, wanted, atol=1e-13)
    with np.load(tmp_path / "a" / "partition.npz") as split:
        assert split["public_index"].tolist() == [*range(75, 85)]
        assert split["test_index"].max() < 75
    assert any("mean of 10 public samples" in one for one in found.bound["assumptions"])
    assert not any("negative entry" in one for one in found.bound["assumptions"])


LARGE = 2**64 - 1


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 2), (4, 2, 3)])
def test_a_label_that_is_too_large_is_named_with_its_sample(shape: tuple[int, ...]) -> None:
    labels = np.zeros(shape, np.uint64)
    labels[2, ...] = LARGE
    with pytest.raises(InputError, match=f"is {LARGE} in sample 2, .* renumber the labels"):
        as_source((np.ones((4, 3)), labels))


@pytest.mark.parametrize(
    "label", [str(LARGE), f" +{LARGE}", str(2**63), str(-(2**63) - 1), "9" * 30]
)
def test_a_label_of_a_csv_file_is_no_float_because_it_is_large(label: str, tmp_path: Path) -> None:
    file = tmp_path / "large.csv"
    file.write_text(f"a,label\n1,0\n2,1\n{LARGE},{label}\n", "utf-8")
    shown = re.escape(f"is {label.strip()} in line 4 of {file}, but labels must be")
    with pytest.raises(InputError, match=f"{shown}.*renumber the labels"):
        comma_separated(str(file))


@pytest.mark.parametrize("labels", [("0.5", str(LARGE)), ("1", "1e20"), ("-1.0", "2.0")])
def test_targets_of_a_csv_file_may_be_large(labels: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "targets.csv"
    file.write_text(f"a,label\n1,{labels[0]}\n{LARGE},{labels[1]}\n", "utf-8")
    source = comma_separated(str(file))
    assert source.labels.tolist() == [*map(float, labels)] and source.inputs[1, 0] == LARGE
