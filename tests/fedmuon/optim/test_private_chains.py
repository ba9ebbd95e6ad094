"""Private chains against loops in numpy; without noise and clipping they are the plain ones."""

import itertools
import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from reference.gradients import of_matrix
from test_rounds import trained

from fedmuon.config.load import Config
from fedmuon.config.methods import PRIVATE
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.optim.chain import Context
from fedmuon.optim.links import disk_filter
from fedmuon.orthogonalize import newton_schulz
from fedmuon.privacy import noise
from fedmuon.tasks.base import Params, Points, Released

ALL = 90  # all samples of the one client
BASES = {"dp-sgd": "sgd", "dp-adam": "adamw", "dp-muon": "muon"}
OPEN = {"bound": math.inf, "noise": 0.0, "lot": float(ALL), "clipping": "flat"}


def central(recipe: str, steps: int = 3, privacy: dict | None = None, **local: Any) -> Config:
    """One client with all data; noise from the run's seed, to be repeated here."""
    known = {"insecure-reproducible-noise": True, "lot": 30.0}
    return small(
        {"local": {"momentum": 0.8}, "privacy": known},
        federation={"clients": 1, "per-round": 1, "rounds": 2},
        local={"recipe": recipe, "lr": 0.2, "steps": steps, **local},
        privacy=privacy or {},
    )


def weight(config: Config) -> np.ndarray:
    return trained(config).params["weight"][0].numpy()


@pytest.mark.parametrize(("private", "plain"), BASES.items())
def test_without_noise_and_clipping_nothing_changes(private: str, plain: str) -> None:
    expected = weight(central(plain))
    np.testing.assert_allclose(weight(central(private, privacy=OPEN)), expected, rtol=1e-11)
    moved = weight(central(private, privacy=OPEN | {"bound": 1e-3}))
    assert np.abs(moved - expected).max() > 1e-3  # the control: a clip that bites


@pytest.mark.parametrize("base", ["sgd", "adam", "muon", "muonbc"])
def test_a_gain_of_one_is_no_filter(base: str) -> None:
    privacy = {"noise": 0.5, "bound": 0.1}
    plain = weight(central(f"dp-{base}", privacy=privacy))
    filtered, other = (
        weight(central(f"disk-{base}", privacy={**privacy, "kappa": gain})) for gain in (1.0, 0.5)
    )
    np.testing.assert_allclose(filtered, plain, rtol=1e-10, atol=1e-12)
    assert np.abs(other - plain).max() > 1e-4


class Lots:
    """The samples of the one client, and its keyed lots and noise."""

    def __init__(self, config: Config) -> None:
        source = read_source(config)
        self.config, data = config, build_data(config, source)
        self.inputs, self.labels = data.inputs, data.labels
        self.shape = (data.inputs.shape[1], source.classes)

    def draw(self, what: Draw, number: int, block: int = 0) -> np.random.Generator:
        round, step = divmod(number, self.config.local.steps)
        return generator(3, what, round=round, client=0, step=step, block=block)

    def start(self) -> np.ndarray:
        rng = generator(3, Draw.INITIAL)
        return rng.standard_normal(self.shape) / math.sqrt(self.shape[0])

    def released(self, number: int, points: list[tuple[float, np.ndarray]]) -> np.ndarray:
        """One example at a time: combine, clip, add; then noise over the expected lot."""
        privacy = self.config.privacy
        chosen = self.draw(Draw.LOT, number).random(len(self.labels)) < privacy.lot / ALL
        total = np.zeros(self.shape)
        for u, y in zip(self.inputs[chosen], self.labels[chosen], strict=True):
            g = sum(c * of_matrix({"weight": X}, u[None], y[None])["weight"] for c, X in points)
            scale = privacy.bound / np.linalg.norm(g)
            total += g * (scale if "automatic" in privacy.clipping else min(1.0, scale))
        noise = self.draw(Draw.NOISE, number).standard_normal(self.shape)
        return (total + privacy.noise * privacy.bound * noise) / privacy.lot


@pytest.mark.parametrize(("kappa", "gamma"), [(0.6, 0.5), (0.8, 0.25)])
def test_disk_is_its_algorithm_line_by_line(kappa: float, gamma: float) -> None:
    """DiSK, Algorithm 2 with SGD, over two rounds of three steps. With gamma = (1 - kappa) / kappa,
    its two points are one."""
    privacy = {"noise": 0.7, "bound": 0.15, "kappa": kappa, "lookahead": gamma}
    config = central("disk-sgd", momentum=0.0, privacy=privacy)
    lots, c = Lots(config), (1 - kappa) / (kappa * gamma)
    X, d, smooth = lots.start(), 0.0, None
    for t in range(6):
        g = lots.released(t, [(c, X + gamma * d), (1 - c, X)])
        smooth = g if smooth is None else (1 - kappa) * smooth + kappa * g
        d = -0.2 * smooth
        X = X + d
    np.testing.assert_allclose(weight(config), X, rtol=1e-10, atol=1e-12)


def test_disk_with_the_settings_of_its_experiments_line_by_line() -> None:
    """DiSK, C.1 and C.2: automatic clipping, and a warm-up before a cosine, over three rounds."""
    privacy = {"noise": 0.1, "kappa": 0.7, "clipping": "automatic-flat", "lot": 30.0}
    config = small(
        {"privacy": {"insecure-reproducible-noise": True}},
        federation={"clients": 1, "per-round": 1, "rounds": 3},
        local={"recipe": "disk-sgd", "lr": 0.2, "steps": 2, "momentum": 0.0,
               "schedule": "cosine", "options": {"warm": 1}},
        privacy=privacy,
    )  # fmt: skip
    lots, c = Lots(config), 0.3 / (0.7 * 0.5)

    def end(factors: tuple[float, ...]) -> np.ndarray:
        X, d, smooth = lots.start(), 0.0, None
        for t in range(6):
            g = lots.released(t, [(c, X + 0.5 * d), (1 - c, X)])
            smooth = g if smooth is None else 0.3 * smooth + 0.7 * g
            d = -0.2 * factors[t // 2] * smooth
            X = X + d
        return X

    np.testing.assert_allclose(weight(config), end((0.5, 1.0, 0.5)), rtol=1e-10, atol=1e-12)
    assert np.abs(weight(config) - end((1.0, 1.0, 1.0))).max() > 1e-3  # negative control


@pytest.mark.parametrize(("reach", "wanted"), [(0.5, 2), (0.25, 1), (math.inf, 1), (-1.0, 2)])
def test_disk_keeps_two_buffers_and_takes_one_more_gradient(reach: float, wanted: int) -> None:
    """At kappa = 0.8, where (1 - kappa) / kappa = 0.25 needs one gradient of an example."""
    params = {"a": torch.ones(1, 3, 2), "b": torch.ones(1, 5)}
    link, seen = disk_filter(0.8, reach), []

    def released(points: Points, bound: Any = None) -> Released:
        seen.append(len(points))
        return Released(params)

    state = link.init(params)
    size = sum(value.numel() for value in params.values())
    assert sum(value.numel() for value in state.values()) == 2 * size + 1  # and a count of steps

    def no_gradient(at: Params) -> tuple[torch.Tensor, Params]:
        raise AssertionError("a gradient that is not private")

    context = Context(params, no_gradient, [lambda *_, **__: np.random.default_rng(0)], released)
    for _ in range(2):
        _, state = link.update({}, state, context)
    assert seen == [wanted] * 2


def test_disk_without_a_second_point_is_a_low_pass_filter() -> None:
    """gamma = inf: an exponential mean of what DP-SGD releases, which is DOPPLER of first order."""
    privacy = {"noise": 0.7, "bound": 0.15, "kappa": 0.6, "lookahead": math.inf}
    config = central("disk-sgd", momentum=0.0, privacy=privacy)
    lots = Lots(config)
    X, smooth = lots.start(), None
    for t in range(6):
        g = lots.released(t, [(1.0, X)])
        smooth = g if smooth is None else 0.4 * smooth + 0.6 * g
        X = X - 0.2 * smooth
    np.testing.assert_allclose(weight(config), X, rtol=1e-10, atol=1e-12)
    two = central("disk-sgd", momentum=0.0, privacy=privacy | {"lookahead": 0.5})
    assert abs(weight(two) - X).max() > 1e-6  # negative control


@pytest.mark.parametrize("form", ["polyak", "ema"])
def test_bias_correction_line_by_line(form: str) -> None:
    """000, section 4, with two antithetic pairs and the map of Algorithm 1."""
    mu, privacy = 0.8, {"noise": 0.6, "bound": 0.1, "lot": 30.0, "probes": 2}
    base = central("dp-muonbc", 3, privacy, **{"momentum-form": form})
    table = {"name": "newton-schulz", "normalization": "unit", "steps": 3}
    config = base.model_copy(
        update={"orthogonalizer": base.orthogonalizer.model_copy(update=table)}
    )
    lots, sd = Lots(config), 0.6 * 0.1 / 30
    X, M = lots.start(), np.zeros(lots.shape)

    def Q(A: np.ndarray) -> np.ndarray:
        return newton_schulz(torch.from_numpy(A), 3, normalization="unit").numpy()

    for t in range(6):
        M = mu * M + lots.released(t, [(1.0, X)])
        s = (1 - mu ** (t + 1)) / (1 - mu)
        rho = sd * math.sqrt((1 - mu) / (1 + mu) * (1 + mu ** (t + 1)) / (1 - mu ** (t + 1)))
        probes = [lots.draw(Draw.PROBE, t, j).standard_normal(lots.shape) for j in range(2)]
        pairs = [Q(M / s + sign * rho * U) for U, sign in itertools.product(probes, (1, -1))]
        X = X - 0.2 * (2 * Q(M / s) - np.mean(pairs, axis=0))
    np.testing.assert_allclose(weight(config), X, rtol=1e-9, atol=1e-11)


def test_noise_is_secret_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operating system's entropy, which other tests have a repeatable one for."""
    monkeypatch.setattr(noise, "os", os)
    hidden = central("dp-sgd", privacy={"noise": 0.5, "insecure-reproducible-noise": False})
    assert np.abs(weight(hidden) - weight(hidden)).max() > 1e-4
    shown = central("dp-sgd", privacy={"noise": 0.5})
    assert np.array_equal(weight(shown), weight(shown))


@pytest.mark.parametrize("recipe", PRIVATE)
def test_every_private_recipe_runs_with_several_clients(recipe: str) -> None:
    config = small(
        federation={"rounds": 3},
        local={"recipe": recipe, "lr": 0.02, "steps": 2},
        privacy={"noise": 0.5, "lot": 8.0, "insecure-reproducible-noise": True},
    )
    params = trained(config).params["weight"]
    assert bool(params.isfinite().all())
    again = trained(config, build_data(config, read_source(config)))
    assert torch.equal(again.params["weight"], params)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"privacy": {"level": "client"}}, "adds noise to each step to protect single examples"),
        ({"local": {"batch": 8}}, "shuffled batches of fixed size"),
        ({"privacy": {"bound": math.inf, "noise": 1.0}}, "bound to a finite number"),
        ({"local": {"momentum-form": "nesterov"}}, "no bias correction"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(changes: dict, sentence: str) -> None:
    tables: dict[str, dict] = {"local": {"recipe": "dp-muonbc"}}
    for table, keys in changes.items():
        tables.setdefault(table, {}).update(keys)
    with pytest.raises(InputError, match=sentence):
        small(**tables)
