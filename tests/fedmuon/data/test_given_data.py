"""Samples handed over in Python: every kind of array or table has its values read, or is rejected
with one sentence that names it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.datasets import load_digits
from sklearn.utils import Bunch
from torch.utils.data import TensorDataset

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.data.user_data import as_source

RNG = np.random.default_rng(0)
X = RNG.integers(-8, 8, (12, 12)) / 4  # exact in every float type
Y = np.arange(12) % 3
FRAME, TENSOR, LABELS = pd.DataFrame(X), torch.tensor(X), torch.tensor(Y)
TWICE = pd.DataFrame(X, columns=["a", "a", *map(str, range(10))])


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
    "frame alone": (lambda: FRAME, "data is a DataFrame alone.*give data=.frame.drop"),
    "array alone": (lambda: X[:, :2], "data is a ndarray alone.*give data=.inputs, labels"),
    "tensor alone": (lambda: TENSOR[:, :2], "data is a Tensor alone"),
    "sparse alone": (lambda: scipy.sparse.csr_array(X), "data is a csr_array alone"),
    "dict": (lambda: {"a": X, "b": Y}, "dict without the entries 'data' and 'target'"),
    "words": (lambda: (FRAME.assign(w="a"), Y), "inputs of data have a column 'w' of type"),
    "dates": (lambda: (FRAME.assign(d=pd.Timestamp(0)), Y), "column 'd' of type datetime64"),
    "labels in words": (lambda: (X, pd.Series(["a"] * 12)), "number the classes from 0"),
    "label column": (lambda: (X, pd.DataFrame({"w": ["a"] * 12})), "labels of data .*'w'"),
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
    "triples": (lambda: TensorDataset(TENSOR, LABELS, LABELS), "tuple of 3 values, not a pair"),
    "dataset of dicts": (lambda: Dicts(), "sample 0 of data is a dict, not a pair"),
}  # fmt: skip


class Dicts:
    """A dataset like those of the hub."""

    column_names = ("x", "y")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": X[number], "y": Y[number]}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", list(REJECTED))
def test_what_cannot_be_read_is_named(name: str) -> None:
    given, words = REJECTED[name]
    with pytest.raises(InputError, match=words) as rejected:
        as_source(given())
    assert "\n" not in str(rejected.value)
