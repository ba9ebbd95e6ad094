"""Partitioners of flwr-datasets: objects with `dataset`, `num_partitions` and `load_partition`."""

import copy
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError

COLUMN = {
    "partition_by": "label"
}  # what a partitioner that goes by a column finds in our data sets


def is_partitioner(found: Any) -> bool:
    """Whether that is a partitioner, or a class of them."""
    return hasattr(found, "load_partition")


def deals_to(found: Any) -> int | None:
    """How many clients a partitioner deals to, None if it is none or cannot say before it deals."""
    if not is_partitioner(found) or isinstance(found, type):
        return None
    count = getattr(found, "_num_partitions", None)  # the public one wants a data set first
    return count if isinstance(count, int) else None


def by_partitioner(partitioner: Any, labels: np.ndarray, clients: int) -> list[np.ndarray]:
    """The indices of each client as a copy of the partitioner deals a data set of `label` and
    `index`: it itself may be used again, with other samples."""
    try:
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("a partitioner needs its package: pip install flwr-datasets") from None
    if partitioner.is_dataset_assigned():
        raise InputError(
            "the partitioner has a data set already, and would not deal the samples of this run: "
            "hand it over before it is given one"
        )
    mine = copy.deepcopy(partitioner)
    try:
        mine.dataset = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
        count = int(mine.num_partitions)
        parts = [mine.load_partition(i).with_format("numpy")["index"] for i in range(count)]
    except Exception as error:  # whatever a partitioner says of what it cannot deal
        raise InputError(
            f"{type(partitioner).__name__} cannot deal these samples ({of_one_line(error)}): give "
            "it other numbers, or a partition of your own"
        ) from error
    if len(parts) != clients:
        raise InputError(
            f"[federation] clients = {clients}, and the partitioner deals to {len(parts)}: make "
            "them the same"
        )
    return [np.asarray(part, np.int64) for part in parts]


def of_one_line(error: Exception) -> str:
    """What an error says, or its name."""
    return " ".join(str(error).split())[:200] or type(error).__name__
