"""Features of images: each transform against a loop over pixels, and runs on features."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedmuon
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.data.features import RIDGE, Features, as_pixels, principal_components
from fedmuon.data.image_features import (
    TRANSFORMS,
    random_filters,
    scattered,
    wavelets,
    window,
)
from fedmuon.data.readers import read
from fedmuon.data.source import Source
from fedmuon.federated.client_data import forget_source, read_source
from fedmuon.tasks.models import network


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
    plain = as_pixels(images(side=14))
    hog = TRANSFORMS["hog"]
    torch.testing.assert_close(hog(plain / 2 + 0.3, 0), hog(plain, 0), atol=0.05, rtol=0)
    assert (hog(plain.flip(-1), 0) - hog(plain, 0)).abs().max() > 0.1  # but not directions


def test_channels_are_transformed_one_by_one() -> None:
    colours = as_pixels(images(channels=3, side=16))
    gray = [TRANSFORMS["hog"](colours[:, c : c + 1], 0) for c in range(3)]
    assert TRANSFORMS["hog"](colours, 0).shape[1] == 3 * gray[0].shape[1]
    assert TRANSFORMS["hog"](colours, 0).sum() == pytest.approx(float(sum(g.sum() for g in gray)))


def naive_wavelet(side: int, j: int, angle: int) -> np.ndarray:
    """A periodic Morlet wavelet [side, side] around pixel (0, 0), from its formula."""
    theta, width = math.pi * angle / 8, 0.8 * 2**j
    waves = np.zeros((side, side), complex)
    envelopes = np.zeros((side, side))
    for y in range(-2 * side, 3 * side):
        for x in range(-2 * side, 3 * side):
            along = x * math.cos(theta) + y * math.sin(theta)
            aside = y * math.cos(theta) - x * math.sin(theta)
            envelope = math.exp(-(along**2 + aside**2 / 4) / (2 * width**2))
            wave = np.exp(1j * 0.75 * math.pi / 2**j * along)
            waves[y % side, x % side] += envelope * wave
            envelopes[y % side, x % side] += envelope
    wavelet = waves - waves.sum() / envelopes.sum() * envelopes
    return wavelet / (4 * math.pi * width**2)


def naive_convolution(image: np.ndarray, wavelet: np.ndarray) -> np.ndarray:
    """The circular convolution, as a sum of shifted images."""
    total = np.zeros(image.shape, complex)
    for y in range(len(image)):
        for x in range(len(image)):
            total += wavelet[y, x] * np.roll(image, (y, x), (0, 1))
    return total


def naive_window(image: np.ndarray, step: int, count: int) -> np.ndarray:
    """Gaussian averages [count, count] of a periodic image with a distance of `step` pixels."""
    side = step * len(image)
    means = np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            total = 0.0
            for r in range(len(image)):
                for c in range(len(image)):
                    dy, dx = abs(step * r - 5.5 - 4 * a), abs(step * c - 5.5 - 4 * b)
                    square = min(dy, side - dy) ** 2 + min(dx, side - dx) ** 2
                    weight = math.exp(-square / (2 * 1.6**2))
                    total, means[a, b] = total + weight, means[a, b] + weight * image[r, c]
            means[a, b] /= total
    return means


def naive_scale(bank: list[np.ndarray]) -> float:
    """The factor for which the squares of all filters add up to at most 1."""
    side = len(bank[0])
    dft = np.exp(-2j * math.pi * np.outer(np.arange(side), np.arange(side)) / side)
    axis = np.minimum(np.arange(side), side - np.arange(side))
    low = np.exp(-(axis[:, None] ** 2 + axis**2) / (2 * 1.6**2))
    power = np.abs(dft @ (low / low.sum()) @ dft) ** 2
    for wavelet in bank:
        squares = np.abs(dft @ wavelet @ dft) ** 2
        mirrored = squares[-np.arange(side)][:, -np.arange(side)]
        power += (squares + mirrored) / 2
    return power.max() ** -0.5


def test_scattering_is_that_of_sums_over_pixels() -> None:
    image = images(1, 8)[0] / 255
    padded = np.pad(image, 4, mode="reflect")
    bank = [[naive_wavelet(16, j, angle) for angle in range(8)] for j in range(2)]
    scale = naive_scale([*bank[0], *bank[1]])
    fine = [scale * np.abs(naive_convolution(padded, wavelet)) for wavelet in bank[0]]
    coarse = [scale * np.abs(naive_convolution(padded, w))[::2, ::2] for w in bank[1]]
    second = [
        scale * np.abs(naive_convolution(field, wavelet))[::2, ::2]
        for field in fine
        for wavelet in bank[1]
    ]
    expected = [naive_window(field, 1, 2) for field in (padded, *fine)]
    expected += [naive_window(field, 2, 2) for field in (*coarse, *second)]
    found = TRANSFORMS["scattering"](as_pixels(image[None]), 0).numpy()[0].reshape(81, 2, 2)
    np.testing.assert_allclose(found, scale * np.array(expected), atol=2e-6)
    unpadded = np.pad(image, 4)
    assert not np.allclose(found[0], scale * naive_window(unpadded, 1, 2), atol=0.01)


def test_scattering_is_non_expansive() -> None:
    rng = np.random.default_rng(5)
    for noise in (1e-3, 0.1, 1.0):
        x = torch.from_numpy(rng.random((20, 1, 36, 36)).astype(np.float32))
        y = x + noise * torch.from_numpy(rng.normal(size=x.shape).astype(np.float32))
        distance = (scattered(x, 7, 7) - scattered(y, 7, 7)).flatten(1).norm(dim=1)
        assert (distance <= (x - y).flatten(1).norm(dim=1)).all()
        assert (distance > 0).all()
    filters, scale = wavelets(36, 36)
    mirrored = filters.flip(-1, -2).roll((1, 1), (-1, -2))
    low = window(36, 9, 1)[0]
    power = (torch.fft.fft(low).abs()[:, None] * torch.fft.fft(low).abs()).square() * scale**2
    power += (filters.square() + mirrored.square()).sum((0, 1)) / 2
    assert float(power.max()) == pytest.approx(1, abs=1e-5)  # so a larger factor would expand


def test_scattering_of_flat_moved_and_turned_images() -> None:
    flat = TRANSFORMS["scattering"](torch.full((1, 1, 28, 28), 0.7), 0).reshape(81, 49)
    assert float(flat[1:].abs().max()) < 1e-6 and float(flat[0].std()) < 1e-6
    shapes = np.zeros((1, 28, 28), np.uint8)
    shapes[0, 8:20, 10:13] = shapes[0, 8:11, 10:20] = 255
    plain, moved = (as_pixels(np.roll(shapes, shift, 2)) for shift in (0, 1))
    scattering = TRANSFORMS["scattering"]
    change = (scattering(moved, 0) - scattering(plain, 0)).norm() / scattering(plain, 0).norm()
    assert change < 0.4 < 0.6 < (moved - plain).norm() / plain.norm()
    turned = scattering(plain.rot90(1, (-2, -1)), 0).reshape(81, 7, 7)[1:9]
    fine = scattering(plain, 0).reshape(81, 7, 7)[1:9]
    torch.testing.assert_close(turned, fine.roll(4, 0).rot90(1, (-2, -1)), atol=1e-5, rtol=0)
    assert (turned - fine.rot90(1, (-2, -1))).abs().max() > 1e-3  # angles are not ignored


@pytest.mark.parametrize("channels", [1, 3])
def test_random_convolutions_are_those_of_a_loop_over_patches(channels: int) -> None:
    pixels = as_pixels(images(2, 12, channels))
    filters = random_filters(channels, 7).numpy()
    np.testing.assert_allclose(filters.sum(0), 0, atol=1e-5)
    np.testing.assert_allclose((filters**2).sum(0), 1, atol=1e-5)
    found = TRANSFORMS["random-conv"](pixels, 7).numpy().reshape(2, 9, 2, 256)
    for image, features in zip(pixels.numpy(), found, strict=True):
        sums, counts = np.zeros((3, 3, 2, 256)), np.zeros((3, 3, 1, 1))
        places = [0, 2, 4, 6]  # 4 x 4 patches; the regions have 2, 1 and 1 of 4
        for row in places:
            for column in places:
                patch = image[:, row : row + 6, column : column + 6].astype(np.float64).ravel()
                response = filters.T @ (patch - patch.mean()) / (patch.std() + 0.1)
                region = row // 2 * 3 // 4, column // 2 * 3 // 4
                sums[region] += np.maximum([response - 1, -response - 1], 0)
                counts[region] += 1
        np.testing.assert_allclose(features, (sums / counts).reshape(9, 2, 256), atol=1e-4)
    other = TRANSFORMS["random-conv"](pixels, 8).numpy().reshape(found.shape)
    assert np.abs(other - found).max() > 0.1  # another seed


@pytest.mark.parametrize("name", [*TRANSFORMS])
def test_features_of_a_sample_depend_on_this_sample_alone(name: str) -> None:
    source = Source("own", images(40, 12), np.arange(40) % 3, 3, None, "own")
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
    matrix = principal_components(rows, 3).matrix.numpy()
    assert (matrix[np.abs(matrix).argmax(0), range(3)] > 0).all()  # so that signs are unique


TABLES: dict[str, Any] = {
    "data": {"train": 40, "test": 15},
    "federation": {"clients": 3, "rounds": 3, "partition": "iid"},
    "task": {"name": "matrix"},
    "local": {"lr": 0.1, "steps": 2},
}


def with_features(**data: Any) -> dict[str, Any]:
    return TABLES | {"data": TABLES["data"] | data}


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize("public", ["none", "digits"])
def test_a_run_on_features_is_a_run_on_vectors(
    engine: str, public: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Features that were computed before have the same model, and the same neighbours."""
    where = {"ray-address": request.getfixturevalue("cluster")} if engine == "ray" else {}
    x, y = images(60, 8), np.arange(60) % 3
    components = 0 if public == "none" else 8
    features = Features("hog", public=public, components=components)
    ready = features.rows(Source("own", x, y, 3, None, "own"))
    keys: dict[str, Any] = {"features": "hog", "public": public}
    keys |= {"components": components} if components else {}
    expected = fedmuon.stability(TABLES, data=(ready, y), trials=2)
    tables = with_features(**keys) | {"engine": {"name": engine, **where}}
    found = fedmuon.stability(tables, data=(x, y), trials=2, out=tmp_path / "a")
    moved, wanted = ([r["perturbation"] for r in run.neighbours] for run in (found, expected))
    assert moved == wanted
    weight, wanted_weight = found.model["weight"], expected.model["weight"]
    # A client alone in its process uses other kernels than a stack of clients.
    np.testing.assert_allclose(weight, wanted_weight, rtol=0, atol=1e-12 if where else 0)


def test_a_certificate_says_on_which_data_features_depend(tmp_path: Path) -> None:
    x, y = images(60, 8), np.arange(60) % 3
    small_steps = TABLES | {"local": {"lr": 1e-5}, "engine": {"dtype": "float64"}}
    for data, words in (
        ({"features": "hog"}, "'hog', which depend only on their own image, so"),
        (
            {"features": "hog", "public": "digits", "components": 5},
            "own image and on the public data digits, so",
        ),
    ):
        tables = small_steps | {"data": TABLES["data"] | data}
        found = fedmuon.stability(tables, data=(x, y), trials=2)
        assert any(words in one for one in found.bound["assumptions"])
        assert max(row["perturbation"] for row in found.neighbours) > 0
    without = fedmuon.stability(small_steps, data=(x.reshape(60, -1), y), trials=1)
    assert not any("features" in one for one in without.bound["assumptions"])


def test_networks_train_on_features_of_norm_one() -> None:
    x, y = images(60, 8), np.arange(60) % 3
    tables = with_features(features="hog", public="digits", components=16)
    network = tables | {"task": {"name": "network", "model": "mlp"}}
    run = fedmuon.run(network, data=(x, y))
    assert run.config.data.normalize == "unit"
    assert run.model["0.weight"].shape[1] == 16 if "0.weight" in run.model else run.model
    with pytest.raises(InputError, match="Set model = 'linear' or 'mlp'"):
        fedmuon.run(tables | {"task": {"name": "network", "model": "cnn"}}, data=(x, y))


def test_a_run_is_resumed_with_the_same_images(tmp_path: Path) -> None:
    x, y = images(60, 8), np.arange(60) % 3
    tables = with_features(features="hog")
    whole = fedmuon.run(tables, data=(x, y), out=tmp_path / "whole")
    longer = fedmuon.run(tables, data=(x, y), out=tmp_path / "whole", resume=True)
    assert np.array_equal(whole.model["weight"], longer.model["weight"])
    other = x.copy()
    other[0, 0, 0] += 1
    with pytest.raises(InputError, match="data"):
        fedmuon.run(tables, data=(other, y), out=tmp_path / "whole", resume=True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "mnist5k", "public": "mnist5k"}, "is also the data set of the run"),
        pytest.param(
            {"name": "digits", "public": "mnist5k", "train": 500, "test": 100},
            "choose public data of the same shape",
            marks=pytest.mark.slow,
        ),
        ({"name": "synthetic"}, "needs images of at least 8 x 8 pixels"),
        ({"name": "mnist5k", "components": 3}, "Set .data. public = 'mnist5k'"),
        ({"name": "mnist5k", "features-seed": 3}, "Set .data. features = 'random-conv'"),
        ({"name": "mnist5k", "features": "none", "components": 3}, "Set .data. features = 'hog'"),
        ({"name": "mnist5k", "features": "sift"}, "hog"),
    ],
)
def test_unsuitable_settings_are_rejected(data: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_source(parse({"data": {"features": "hog"} | data}))


def test_a_network_for_images_names_the_features_and_the_key_of_its_name() -> None:
    with pytest.raises(InputError, match=r"'linear' or 'mlp', or leave out \[data\] features"):
        network("tanh-cnn", (1440,), 10)
    with pytest.raises(InputError, match=r"this is a value of task\.model"):
        parse({"task": {"name": "tanh-cnn"}})


def test_text_has_no_features() -> None:
    text = {
        "data": {"name": "pydoc", "features": "hog"},
        "task": {"name": "network", "model": "gpt"},
    }
    with pytest.raises(InputError, match="only images have these features"):
        parse(text)


def test_public_data_must_not_contain_samples_of_the_run() -> None:
    """As MNIST contains mnist5k: the names differ, and the images show it."""
    public = read("digits").inputs[:40]
    x = np.concatenate([images(20, 8), public[3:5]])
    source = Source("own", x, np.arange(22) % 3, 3, None, "own")
    with pytest.raises(InputError, match="contains 2 images of own"):
        Features("hog", public="digits").of(source)
    apart = Source("own", x[:20], source.labels[:20], 3, None, "own")
    assert Features("hog", public="digits", components=4).of(apart).inputs.shape == (20, 4)
    assert Features("hog", public="digits").of(apart).inputs.shape == (20, 32)
    with pytest.raises(InputError, match="components = 33 exceeds 32"):
        Features("hog", public="digits", components=33).of(apart)


@pytest.mark.slow
def test_worker_processes_share_features_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path))
    config = parse({"data": {"name": "mnist5k", "features": "hog"}})
    plain, mapped = read_source(config), read_source(config, mapped=True)
    assert isinstance(mapped.inputs, np.memmap)
    assert np.array_equal(plain.inputs, mapped.inputs)
    assert read_source(config) is read_source(config) is not plain  # the last source is cached
    (file,) = tmp_path.glob("features-*.npy")
    read_source(parse({"data": {"name": "digits", "train": 500, "features": "scattering"}}))
    assert [*tmp_path.glob("features-*.npy")] == [file]  # only mapped sources are stored
    forget_source()
