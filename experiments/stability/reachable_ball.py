"""Where a run of the matrix task starts, and the constants that hold as far as it can get."""

from pathlib import Path

import numpy as np

from fedmuon.analysis.theory.trajectories import Reach, Start, reach
from fedmuon.config.load import Config
from fedmuon.config.schema import OrthogonalizerTable
from fedmuon.core.choices import is_own
from fedmuon.core.errors import InputError
from fedmuon.data.source import Source
from fedmuon.experiments.stability.covered_recipes import has_map, method_of
from fedmuon.orthogonalize import Uncertified
from fedmuon.orthogonalize.lipschitz_constants import Growth, growth

IMAGES = ("mnist5k", "mnist", "fashion-mnist", "cifar10", "digits")


def start_of(weight: np.ndarray, source: Source | None) -> Start | None:
    """What is known of X0 [d, c] and, where they are at hand, of the samples; one class is none."""
    if weight.shape[1] < 2:
        return None
    centred = weight - weight.mean(1, keepdims=True, dtype=float)
    unsigned = source is not None and (
        source.inputs.dtype.kind == "u" or bool((source.inputs >= 0).all())
    )
    return Start(weight.shape[1], float(np.linalg.norm(centred, 2)), unsigned)


def start_without_a_run(config: Config) -> Start | None:
    """What the config alone says: X0 = 0, of as many classes as its samples have."""
    classes = {**dict.fromkeys(IMAGES, 10), "synthetic": config.data.classes}.get(config.data.name)
    known = classes and config.task.name == "matrix" and config.task.initial == "zero"
    return Start(classes) if known else None


def source_of(config: Config, folder: Path) -> Source | None:
    """The samples of the run in the folder, if they are none of the user's and still the same."""
    from fedmuon.federated.client_data import read_source
    from fedmuon.runs import fingerprints

    if is_own(config.data.name):
        return None
    try:
        source = read_source(config)
        fingerprints.require_same(folder, fingerprints.described(config, folder, source))
    except InputError:
        return None
    return source


def reached(config: Config, start: Start | None, factors: np.ndarray | None) -> Reach | None:
    """The constants along the way; None where those of all models are asked for, or are all that
    is known: of an unknown start, of alignment, of weight decay (towards 0, not X0), of maps
    without a size, and of what no recursion covers."""
    local = config.local
    size = size_of(config.orthogonalizer) if has_map(config) else float
    if start is None or size is None or config.stability.constants != "ball":
        return None
    try:
        method = method_of(config)
    except Uncertified:
        return None
    if method.alignment or method.decay:
        return None
    steps = local.lr * (np.ones(config.federation.rounds) if factors is None else factors)
    return reach(start, steps, method, size, local.steps)


def size_of(table: OrthogonalizerTable) -> Growth | None:
    """How large the output of the map gets."""
    schulz = table.model_dump(include={"steps", "coefficients", "eps", "normalization"})
    return growth(table.name, lam=table.lambda_, gamma=table.clip_level, **schulz)
