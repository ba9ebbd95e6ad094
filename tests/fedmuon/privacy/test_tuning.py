"""What choosing among private runs spends, against the exact law of the best of K."""

import json
import math
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.privacy.accounting import renyi, tuning
from fedmuon.privacy.accounting.composition import epsilon, event

ORDERS = (1.3, 2.0, 5.0, 20.0)


def generating(shape: str, gamma: float, x: np.ndarray) -> np.ndarray:
    """E x^K, by its closed form."""
    if shape == "geometric":
        return gamma * x / (1 - (1 - gamma) * x)
    return np.log1p(-(1 - gamma) * x) / math.log(gamma)


def best(shape: str, gamma: float, masses: np.ndarray) -> np.ndarray:
    """The law of the best of K outcomes, scores rising with the index: f(F(y)) - f(F(y-))."""
    return np.diff(generating(shape, gamma, np.append(0.0, np.cumsum(masses))))


def apart(p: np.ndarray, q: np.ndarray, order: float) -> float:
    """The larger Renyi divergence of the two directions, term by term."""
    terms = (order * np.log(one) + (1 - order) * np.log(other) for one, other in ((p, q), (q, p)))
    return max(float(np.logaddexp.reduce(term)) for term in terms) / (order - 1)


@pytest.mark.parametrize("shape", tuning.SHAPES)
@pytest.mark.parametrize(
    "gamma", [0.05, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.5, 1e-3))]
)
def test_the_best_of_k_runs_outcome_by_outcome(shape: str, gamma: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        p = rng.dirichlet(np.full(6, 3.0))
        q = p * np.exp(rng.uniform(-0.5, 0.5, 6))
        worst = np.argsort(q / p)  # scores that tell the most
        p, q = p[worst], q[worst] / q.sum()
        ends = best(shape, gamma, p), best(shape, gamma, q)
        for order in ORDERS:
            exact = apart(*ends, order)
            bound = tuning.divergence(partial(apart, p, q), order, shape, gamma)
            assert exact <= bound * (1 + 1e-9)


@pytest.mark.parametrize("shape", tuning.SHAPES)
@pytest.mark.parametrize("gamma", [0.05, 1e-3])
def test_one_run_s_epsilon_does_not_cover_the_choice(shape: str, gamma: float) -> None:
    """The best outcome is so rare that many runs must be made to see it."""
    p, q = (np.array([1 - top, top]) for top in (gamma, gamma * math.exp(0.2)))
    chosen = apart(best(shape, gamma, p), best(shape, gamma, q), 5.0)
    assert chosen > 2 * apart(p, q, 5.0)
    assert chosen <= tuning.divergence(partial(apart, p, q), 5.0, shape, gamma)


@pytest.mark.parametrize("shape", tuning.SHAPES)
@pytest.mark.parametrize("runs", [1.5, 10.0, pytest.param(500.0, marks=pytest.mark.slow)])
def test_the_number_of_runs_is_what_was_asked_for(shape: str, runs: float) -> None:
    gamma, small = tuning.gamma_for(shape, runs), 1e-5
    slope = (
        generating(shape, gamma, np.array(1.0))
        - generating(shape, gamma, np.array(1 - small / runs))
    ) / (small / runs)
    assert tuning.mean_runs(shape, gamma) == pytest.approx(runs, rel=1e-6)
    assert slope == pytest.approx(runs, rel=1e-3)  # f'(1) = E K
    drawn = [tuning.draw(runs, shape) for _ in range(4000)]
    x = 1 - 1 / runs  # E x^K, whose deviation is at most 1/2
    assert np.mean(x ** np.array(drawn)) == pytest.approx(
        float(generating(shape, gamma, np.array(x))), abs=5 * 0.5 / math.sqrt(4000)
    )


def test_choosing_spends_more_than_one_run_and_less_than_all() -> None:
    spent = [event(2.0, 0.01, 1000)]
    single, delta = renyi.epsilon(spent, 1e-5), 1e-5
    chosen = [
        tuning.epsilon(spent, delta, runs, shape)
        for runs in (2.0, 20.0, 200.0)
        for shape in tuning.SHAPES
    ]
    assert single < min(chosen)
    assert chosen[2] < epsilon(2.0, 0.01, 20 * 1000, delta).upper
    assert chosen[4] > chosen[2] > chosen[0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="but it must be logarithmic or geometric"):
        tuning.gamma_for("fixed", 10)
    for runs in (1.0, 0.0, math.nan, math.inf):
        with pytest.raises(InputError, match=r"is out of range\. Use a number above 1"):
            tuning.gamma_for("geometric", runs)


def asked(*more: str) -> dict:
    given = ["--lot", "64", "--population", "6400", "--steps", "1000", "--delta", "1e-5"]
    command = ["privacy", "tuned", "--runs", "20", "--noise", "2", *given, "--json", *more]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output + str(done.exception)
    return json.loads(done.output)


@pytest.mark.slow
def test_the_command() -> None:
    found = asked("--draw")
    assert found["of_one_run"] < found["epsilon"] < found["of_all_published"]
    assert found["epsilon"] == pytest.approx(tuning.epsilon([event(2.0, 0.01, 1000)], 1e-5, 20.0))
    assert found["runs_drawn"] >= 1 and found["adjacency"] == "zero-out"
    assert asked("--adjacency", "replace-one")["epsilon"] > found["epsilon"]
