"""The gradient of one convolution of a CifarNet: its norms, its optimizers and its claims."""

from typing import Any

import numpy as np
import pytest
import torch
from study_rows import rows_of, verdicts
from torch.nn import functional

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import validate
from fedmuon.data.readers import read
from fedmuon.experiments.studies import find, layer_rank
from fedmuon.experiments.suites import contents
from fedmuon.tasks.models import cifarnet

SMALL = {"widths": [16, 32], "steps": [1, 2], "seeds": 2, "batch": 4}


def settings(**changes: Any) -> layer_rank.Settings:
    content = contents.read("layer-rank")
    for name in ("kind", "title", "data", "note", "small"):
        content.pop(name)
    return validate(layer_rank.Settings, content | SMALL | changes)


@pytest.fixture(scope="module")
def digits() -> Any:
    return layer_rank.pictures(read("mnist5k"), 2)


def test_images_are_standardized_means_of_pixels(digits: Any) -> None:
    images, labels, classes = digits
    assert images.shape == (5000, 1, 14, 14) and classes == 10 and len(labels) == 5000
    raw = np.asarray(read("mnist5k").inputs, float)
    naive = raw.reshape(5000, 14, 2, 14, 2).mean((2, 4))
    away = (naive - naive.mean()) / naive.std(ddof=1) - images[:, 0].double().numpy()
    assert np.abs(away).max() < 1e-4
    assert abs(float(images.mean())) < 1e-5


def test_the_first_pair_alone_is_wider() -> None:
    wide, usual = (dict(cifarnet((1, 14, 14), 10, width).named_parameters()) for width in (128, 64))
    changed = {name for name in wide if wide[name].shape != usual[name].shape}
    assert wide[layer_rank.LAYER].shape == (128, 24, 3, 3)
    assert all(name.startswith(("pairs.0.", "pairs.1.0.")) for name in changed)


def test_steps_of_sgd_are_those_of_a_loop(digits: Any) -> None:
    """Momentum and step in float64 NumPy, with the gradients that the study yields."""
    images, labels, classes = digits
    asked = settings(steps=[3])
    seen, weights = [], []
    for gradient, loss in layer_rank.trained(asked, images, labels, classes, "sgd-m", 16, 1):
        seen.append(gradient.double().numpy())
        assert np.isfinite(loss)
    # the same start and batches, by hand
    network = cifarnet((1, 14, 14), 10, 16).to_empty(device="cpu")
    law = layer_rank.torch_law(network, generator(1, Draw.INITIAL))
    params = dict(network.named_parameters())
    memory = {name: np.zeros(one.shape) for name, one in params.items()}
    state = {name: np.asarray(value, float) for name, value in law.items()}
    for step in range(3):
        for name, one in params.items():
            one.data.copy_(torch.from_numpy(state[name]))
        rows = generator(1, Draw.BATCH, step=step).integers(5000, size=4)
        logits = network(images[rows])
        share = torch.full((4, 10), 0.02).scatter_(1, labels[rows][:, None], 0.82)
        loss = -(share * functional.log_softmax(logits, 1)).sum(1).mean()
        found = torch.autograd.grad(loss, list(params.values()))
        for (name, _), slope in zip(params.items(), found, strict=True):
            memory[name] = 0.6 * memory[name] + slope.double().numpy()
            ahead = slope.double().numpy() + 0.6 * memory[name]
            filters = name.startswith("pairs.") and slope.ndim == 4
            state[name] = state[name] - 0.05 * (memory[name] if filters else ahead)
        mine = dict(zip(params, found, strict=True))[layer_rank.LAYER].double().numpy()
        assert np.abs(mine - seen[step]).max() < 0.01 * np.abs(mine).max()  # of float32
        weights.append(mine)
    assert np.abs(weights[1] - seen[2]).max() > 0.1 * np.abs(seen[2]).max()


def test_muon_weights_keep_their_norm_and_the_norm_is_that_of_singular_values(digits: Any) -> None:
    weight = [torch.randn(16, 3, 3, 3), torch.zeros(2, 2)]
    layer_rank.renormalize(weight)
    assert float(weight[0].norm()) == pytest.approx(4.0, rel=1e-6)
    assert not weight[1].any()  # nothing to scale
    asked, (images, labels, classes) = settings(steps=[1, 2], seeds=1 + 1), digits
    rows = layer_rank.measure(asked, "mnist5k", "muon-ns-2", 16)["rows"]
    norms = [
        np.linalg.svd(gradient.double().numpy().reshape(16, -1), compute_uv=False).sum()
        for gradient, _ in layer_rank.trained(asked, images, labels, classes, "muon-ns-2", 16, 0)
    ]
    assert [row["mean_nuclear"] for row in rows[:2]] == pytest.approx(
        [norms[0], np.mean(norms)], rel=1e-4
    )
    assert [(row["seed"], row["rank"], row["steps"]) for row in rows] == [
        (0, 16, 1), (0, 16, 2), (1, 16, 1), (1, 16, 2)
    ]  # fmt: skip


def made(sgd: float, muon: float) -> Any:
    return rows_of(
        lambda method, rank, seed, steps: {
            "mean_nuclear": rank ** (sgd if method == "sgd-m" else muon) * (1 + 1e-4 * seed)
        },
        method=layer_rank.METHODS, rank=(16.0, 32.0, 64.0), seed=(0, 1, 2, 3), steps=(4, 8),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sgd", "muon", "said"),
    [(0.5, 0.05, [True, None, True]), (-0.2, 0.0, [False, None, True]),
     (0.5, 0.6, [True, None, False])],
)  # fmt: skip
def test_slopes_decide(sgd: float, muon: float, said: list[bool]) -> None:
    """No step size was tuned, so the comparison of Muon with SGD-M is never decided."""
    assert verdicts(layer_rank.claims(made(sgd, muon))) == said


def test_widths_and_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="multiples of 16"):
        layer_rank.cells(settings(widths=[16, 20]), Any)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leaves images with sides of 7 pixels"):
        layer_rank.pictures(read("mnist5k"), 4)
    with pytest.raises(InputError, match="contains no images"):
        layer_rank.pictures(read("synthetic"), 2)
    work: Any = find.find("layer-rank", "mnist5k", "small", {})
    assert len(work.cells) == 10
