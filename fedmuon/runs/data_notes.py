"""What a run says about its data: how samples are divided, what is unusual, and clients' names."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedmuon.config.load import Config
from fedmuon.config.user_objects import user_objects
from fedmuon.core.choices import OWN_FILES
from fedmuon.core.files import read_text
from fedmuon.data.federated import FederatedData
from fedmuon.data.source import PIXELS
from fedmuon.data.words import listed
from fedmuon.runs.directory import CLIENT_NAMES

RATIO = 100.0  # the largest spread of an input over the smallest spread, above which a note is due
SHIFT = 10.0  # the mean of an input over its spread, above which a note is due
ROWS = 10_000  # number of samples from which means and spreads are computed


def names_of_clients(data: FederatedData) -> Mapping[str, bytes]:
    """Return the file with the clients' names. The result is empty if no column names them."""
    if not data.client_names:
        return {}
    return {CLIENT_NAMES: (json.dumps(data.client_names, ensure_ascii=False) + "\n").encode()}


def read_client_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the clients of the run in `folder`, or an empty tuple without names."""
    file = folder / CLIENT_NAMES
    return tuple(json.loads(read_text(file))) if file.exists() else ()


def data_notes(config: Config, data: FederatedData) -> list[str]:
    """Return sentences about the data of a run: how they are divided, and what is unusual.

    Args:
        config: The resolved config.
        data: The samples of all clients.
    """
    notes = [divided(config, data)]
    of_user = user_objects(config).data is not None or config.data.name in OWN_FILES
    if of_user and not len(data.test_labels):
        notes.append(
            "Note: no samples are held out, so test loss and accuracy are not measured. Pass test "
            "samples, or leave samples out of the partition."
        )
    if of_user and data.label_names:
        notes.append(
            f"The labels are words, so the classes are numbered in alphabetical order: "
            f"{listed(f'{k} = {name}' for k, name in enumerate(data.label_names))}."
        )
    if of_user and (scales := unequal_scales(config, data)):
        notes.append(scales)
    return notes


def divided(config: Config, data: FederatedData) -> str:
    """Return a sentence that says how the samples are divided among the clients."""
    sizes, partition = data.sizes, config.federation.partition
    ways = {
        "dirichlet": f"Dirichlet label skew with data.alpha = {config.data.alpha:g}",
        "quantity": f"random sizes with data.alpha = {config.data.alpha:g}",
        "iid": "at random in equal numbers",
        "shards": "in shards of the samples sorted by label",
        "column": "by the column of clients",
    }
    way = "by the clients that you passed" if data.client_names else "by your partition"
    low, high = int(sizes.min()), int(sizes.max())
    samples = f"{low}" if low == high else f"{low} to {high}"
    held_out = (
        (len(data.test_labels), "for testing"),
        (len(data.validation_labels), "for validation"),
        (len(data.client_test_labels), "as the clients' own test samples"),
    )
    out = ", ".join(f"{count} {use}" for count, use in held_out if count)
    return (
        f"Data: {len(data.labels)} train samples are divided among {len(sizes)} clients, "
        f"{ways.get(partition, way)}, with {samples} samples per client. "
        f"Held out: {out or 'no samples'}."
    )


def unequal_scales(config: Config, data: FederatedData) -> str:
    """Return a note if the columns of a table have very different scales, or means far from 0.

    Images and text are not checked.
    """
    if data.stored == np.uint8 or data.vocabulary or len(data.shape) != 1:
        return ""
    rows = data.inputs[:: -(-len(data.inputs) // ROWS)]
    spread, mean = rows.std(axis=0, dtype=np.float64), rows.mean(axis=0, dtype=np.float64)
    columns = np.flatnonzero(spread > 1e-9 * np.maximum(np.abs(mean), 1e-300))  # not constant
    if not len(columns):
        return ""
    spread, mean = spread[columns], mean[columns]
    wide, narrow, far = spread.argmax(), spread.argmin(), (np.abs(mean) / spread).argmax()
    if spread[wide] > RATIO * spread[narrow]:
        problem = (
            f"input {columns[wide]} has a standard deviation of {spread[wide]:.3g}, but input "
            f"{columns[narrow]} of {spread[narrow]:.3g}"
        )
    elif abs(mean[far]) > SHIFT * spread[far]:
        problem = (
            f"input {columns[far]} has a mean of {mean[far]:.3g} and a standard deviation of only "
            f"{spread[far]:.3g}"
        )
    else:
        return ""
    scaled = (
        "" if config.data.normalize == PIXELS else ", after each sample was divided by its norm"
    )
    return (
        f"Note: {problem}{scaled} (inputs are counted from 0). The run does not scale inputs "
        "separately. Scale each input to mean 0 and standard deviation 1 before the run."
    )
