"""Features of images: each transform against a loop over pixels, and runs on features."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedmuon
from fedmuon.data.features import RIDGE, Features, as_pixels, principal_components
from fedmuon.data.image_features import TRANSFORMS
from fedmuon.data.source import Source


def images(count: int = 6, side: int = 14, channels: int = 0, seed: int = 1) -> np.ndarray:
    """Random uint8 images with smooth and flat regions."""
    rng = np.random.default_rng(seed)
    shape = (count, channels, side, side) if channels else (count, side, side)
    rough = rng.integers(0, 256, shape).astype(np.float64)
    smooth = (rough + np.roll(rough, 1, -1) + np.roll(rough, 1, -2)) / 3
    smooth[..., : side // 3] = 40  # no gradient within
    return smooth.astype(np.uint8)


def naive_hog(image: np.ndarray, directions: int = 8) -> np.ndarray:
    """The histograms of one gray image with values from 0 to 1, pixel by pixel."""
    side, features = len(image), []
    for cell in (4, 7):
        count = side // cell
        histograms = np.zeros((count, count, directions))
        for row in range(count * cell):
            for column in range(count * cell):

                def pixel(r: int, c: int) -> float:
                    return image[min(max(r, 0), side - 1), min(max(c, 0), side - 1)]

                across = pixel(row, column + 1) - pixel(row, column - 1)
                down = pixel(row + 1, column) - pixel(row - 1, column)
                angle = math.atan2(down, across) % (2 * math.pi) / (2 * math.pi / directions)
                size, part = math.hypot(across, down) / cell**2, angle - math.floor(angle)
                histogram = histograms[row // cell, column // cell]
                histogram[math.floor(angle) % directions] += size * (1 - part)
                histogram[(math.floor(angle) + 1) % directions] += size * part
        for row in range(count - 1):
            for column in range(count - 1):
                block = histograms[row : row + 2, column : column + 2].transpose(2, 0, 1).ravel()
                block = block / math.sqrt(block @ block + 0.03**2)
                block = np.minimum(block, 0.2)
                features.append(block / math.sqrt(block @ block + 0.03**2))
    return np.concatenate(features)


@pytest.mark.parametrize("side", [8, 14, 16])
def test_hog_is_that_of_a_loop_over_pixels(side: int) -> None:
    if side < 14:  # no block of large cells fits
        expected = [naive_hog(image / 255)[:32] for image in images(side=side)]
    else:
        expected = [naive_hog(image / 255) for image in images(side=side)]
    found = TRANSFORMS["hog"](as_pixels(images(side=side)), 0).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-6)  # float32
    others = [naive_hog(image / 255, 9)[: found.shape[1]] for image in images(side=side)]
    size = min(found.shape[1], len(others[0]))
    assert np.abs(found[:, :size] - np.array(others)[:, :size]).max() > 0.05  # nine directions


def test_hog_ignores_brightness_and_contrast() -> None:
    plain = as_pixels(images(side=28))
    hog = TRANSFORMS["hog"]
    torch.testing.assert_close(hog(plain / 2 + 0.3, 0), hog(plain, 0), atol=0.05, rtol=0)
    assert (hog(plain.flip(-1), 0) - hog(plain, 0)).abs().max() > 0.1  # but not directions


def test_channels_are_transformed_one_by_one() -> None:
    colours = as_pixels(images(channels=3, side=16))
    gray = [TRANSFORMS["hog"](colours[:, c : c + 1], 0) for c in range(3)]
    assert TRANSFORMS["hog"](colours, 0).shape[1] == 3 * gray[0].shape[1]
    assert TRANSFORMS["hog"](colours, 0).sum() == pytest.approx(float(sum(g.sum() for g in gray)))


@pytest.mark.parametrize("name", [*TRANSFORMS])
def test_features_of_a_sample_depend_on_this_sample_alone(name: str) -> None:
    source = Source("own", images(300, 28), np.arange(300) % 3, 3, None, "own")
    rows = Features(name, seed=4).rows(source)
    changed = source.inputs.copy()
    changed[7] = changed[8]
    others = Features(name, seed=4).rows(Source("own", changed, source.labels, 3, None, "own"))
    assert np.array_equal(np.delete(others, 7, 0), np.delete(rows, 7, 0))
    np.testing.assert_allclose(others[7], rows[8], atol=1e-5)
    assert np.abs(rows[7] - rows[8]).max() > 1e-3


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    rng = np.random.default_rng(2)
    rows = (rng.normal(size=(50, 12)) * np.geomspace(5, 0.01, 12) + 3).astype(np.float32)
    centred = rows - rows.mean(0, dtype=np.float64)
    _, values, vectors = np.linalg.svd(centred, full_matrices=False)
    variances = values**2 / 50
    for count in (1, 5, 12):
        found = principal_components(rows, count).of(torch.from_numpy(rows)).numpy()
        scale = np.sqrt(variances[:count] + RIDGE * variances[0])
        expected = centred @ vectors[:count].T / scale
        expected *= np.sign((found * expected).sum(0))  # singular vectors have any sign
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert not np.allclose(found, expected * scale, atol=1e-2)  # without whitening
    ((sign, largest),) = [(np.sign(v[np.abs(v).argmax()]), v) for v in vectors[:1]]
    matrix = principal_components(rows, 1).matrix.numpy()[:, 0]
    assert matrix[np.abs(largest).argmax()] > 0, sign


TABLES: dict[str, Any] = {
    "data": {"train": 40, "test": 15},
    "federation": {"clients": 3, "rounds": 3, "partition": "iid"},
    "task": {"name": "matrix"},
    "local": {"lr": 0.1, "steps": 2},
}


def with_features(**data: Any) -> dict[str, Any]:
    return TABLES | {"data": TABLES["data"] | data}


@pytest.mark.parametrize(
    "engine", ["inline", *(pytest.param(e, marks=pytest.mark.slow) for e in ("ray", "deployment"))]
)
@pytest.mark.parametrize("public", ["none", "mnist5k"])
def test_a_run_on_features_is_a_run_on_vectors(engine: str, public: str, tmp_path: Path) -> None:
    """Features that were computed before have the same model, and the same neighbours."""
    x, y = images(60, 28), np.arange(60) % 3
    keys = {"features": "hog", "public": public} | ({"components": 8} if public != "none" else {})
    if engine == "deployment" and public == "none":
        pytest.skip("one case is enough")
    ready = Features("hog", public=public, components=keys.get("components", 0)).rows(
        Source("own", x, y, 3, None, "own")
    )
    expected = fedmuon.stability(TABLES, data=(ready, y), trials=2)
    tables = with_features(**keys) | {"engine": {"name": engine}}
    if engine == "deployment":
        found = fedmuon.run(tables, data=(x, y), out=tmp_path / "a")
    else:
        found = fedmuon.stability(tables, data=(x, y), trials=2, out=tmp_path / "a")
        moved, wanted = ([r["perturbation"] for r in run.neighbours] for run in (found, expected))
        assert moved == wanted
    assert np.array_equal(found.model["weight"], expected.model["weight"])
