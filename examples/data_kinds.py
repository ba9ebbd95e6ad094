"""Six kinds of data that `data=` accepts, one run each: `data_kinds.py [inline | ray]`."""

import sys
from typing import Any

import numpy as np
from pandas import DataFrame
from PIL import Image
from sklearn.datasets import load_digits

import fedmuon

CONFIG = {
    "federation": {"clients": 4, "per-round": 4, "rounds": 3},
    "engine": {"name": (*sys.argv, "inline")[1], "dtype": "float64"},
}
DIGITS: Any = load_digits()  # a Bunch of scikit-learn
PIXELS = (DIGITS.images * 15).astype(np.uint8)


def bunch() -> Any:
    return DIGITS


def table() -> Any:
    return DataFrame(DIGITS.data).assign(digit=DIGITS.target)  # needs [data] target = "digit"


def pairs_of_images() -> Any:
    return [(Image.fromarray(x), y) for x, y in zip(PIXELS, DIGITS.target, strict=True)]


def dict_items() -> Any:
    return [{"pixels": x, "label": y} for x, y in zip(DIGITS.data, DIGITS.target, strict=True)]


def hugging_face() -> Any:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    return Dataset.from_dict({"pixels": DIGITS.data, "label": DIGITS.target})


def torchvision() -> Any:
    from torchvision import datasets, transforms  # pyright: ignore[reportMissingImports]

    return datasets.FakeData(300, (1, 8, 8), 3, transforms.ToTensor())


KINDS = (bunch, table, pairs_of_images, dict_items, hugging_face, torchvision)

if __name__ == "__main__":
    found = []
    for kind in KINDS:
        try:
            data = kind()
        except ImportError:  # an optional package is not installed
            continue
        named = {"target": "digit"} if kind is table else {}
        run = fedmuon.run({**CONFIG, "data": named}, data=data)
        found.append(f"{kind.__name__} {run.summary['accuracy']:.2f}")
    print(f"accuracy: {', '.join(found)}")
