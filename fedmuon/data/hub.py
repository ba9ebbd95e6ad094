"""Data sets of the Hugging Face hub, through Flower Datasets where that extra is installed."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from fedmuon.errors import InputError

# Name here -> (name on the hub, column of the images).
HUB = {
    "mnist": ("ylecun/mnist", "image"),
    "fashion-mnist": ("zalando-datasets/fashion_mnist", "image"),
    "cifar10": ("uoft-cs/cifar10", "img"),
}


def installed() -> bool:
    """Whether the extra is there; nothing is imported."""
    return find_spec("flwr_datasets") is not None


def read_hub(name: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Images [n, 28, 28] or [n, 3, 32, 32] uint8, labels [n] int64, start of the test part."""
    dataset, column = HUB[name]
    try:
        federated = import_module("flwr_datasets").FederatedDataset
        # Flower shuffles by default; the source's own order keeps sample indices meaningful.
        splits = federated(dataset=dataset, partitioners={}, shuffle=False)
        parts = [_arrays(splits.load_split(part), column) for part in ("train", "test")]
    except Exception as error:  # offline, proxies, renamed data sets: each library has its own
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise InputError(
            f"{name} could not be had as {dataset} from the Hugging Face hub "
            f"({type(error).__name__}: {reason}): check the network, or set [data] folder to the "
            "downloaded files"
        ) from error
    images, labels = (np.concatenate(values) for values in zip(*parts, strict=True))
    return images, labels, len(parts[0][1])


def _arrays(split: Any, column: str) -> tuple[np.ndarray, np.ndarray]:
    """One split as arrays; colour channels go first, as in CIFAR-10's own files."""
    rows = split.with_format("numpy")[:]
    images, labels = np.asarray(rows[column], np.uint8), np.asarray(rows["label"], np.int64)
    return (images.transpose(0, 3, 1, 2) if images.ndim == 4 else images), labels
