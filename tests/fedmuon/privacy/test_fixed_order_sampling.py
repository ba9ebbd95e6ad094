"""Lots that take turns, and noise that cancels: what is drawn, and what it spends."""

import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from cut_off import broken_off
from test_accounting import gaussian_epsilon
from torch import Tensor

from fedmuon.config.load import Config
from fedmuon.core.arrays import read_tensors
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw
from fedmuon.experiments.run import execute
from fedmuon.experiments.spending import spent
from fedmuon.federated.build import build_experiment, build_worker, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import begin, broadcast, client_updates, run_rounds
from fedmuon.optim.stage import Broadcast
from fedmuon.privacy.accounting.composition import account
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.audit import Statistics, counted
from fedmuon.privacy.mechanisms.buffered import Buffers
from fedmuon.privacy.mechanisms.fixed_order import (
    FixedOrderSampling,
    Past,
    noise_of_momentum,
    participations,
    sensitivity,
    square_root,
)
from fedmuon.runs.prepare import prepare
from fedmuon.tasks.per_example.clipping import slack


def private(
    clients: int = 1, rounds: int = 4, local: dict[str, Any] | None = None, **privacy: Any
) -> Config:
    """40 samples of each client in lots of 12 and 4: epochs of 4 lots, each round 3 of them."""
    return small(
        data={"train": 40 * clients},
        federation={"rounds": rounds, "clients": clients, "per-round": min(2, clients),
                    "partition": "iid"},
        local={"recipe": "dp-sgd", "lr": 0.1, "steps": 3} | (local or {}),
        privacy={"noise": 2.0, "lot": 12.0, "bound": 0.2, "delta": 1e-3, "sampling": "cyclic"}
        | privacy,
    )  # fmt: skip


CORRELATED = {"noise-correlation": "sqrt-toeplitz", "band": 3}


def toeplitz(coefficients: np.ndarray, steps: int) -> np.ndarray:
    """C [n, n], entry by entry."""
    matrix = np.zeros((steps, steps))
    for row, column in itertools.product(range(steps), repeat=2):
        if 0 <= row - column < len(coefficients):
            matrix[row, column] = coefficients[row - column]
    return matrix


def prefix_sums(steps: int) -> np.ndarray:
    return np.tril(np.ones((steps, steps)))


def patterns(steps: int, apart: int) -> list[tuple[int, ...]]:
    """All sets of steps that are so far apart."""
    every = itertools.chain.from_iterable(
        itertools.combinations(range(steps), many) for many in range(1, steps + 1)
    )
    return [one for one in every if all(b - a >= apart for a, b in itertools.pairwise(one))]


def test_coefficients_are_the_root_of_the_prefix_sums() -> None:
    found = square_root(40)
    exact = [math.comb(2 * j, j) / 4**j for j in range(40)]
    np.testing.assert_allclose(found, exact, rtol=1e-14)
    root = toeplitz(found, 40)
    np.testing.assert_allclose(root @ root, prefix_sums(40), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("band", [1, 3, 12])
def test_noise_is_the_dense_solution_and_its_sums_are_b_z(band: int) -> None:
    """W = C^-1 Z row by row, for two blocks at once, and A W = B Z with A = B C."""
    steps, rng = 12, np.random.default_rng(0)
    fresh = torch.from_numpy(rng.standard_normal((steps, 2, 3, 4)))  # step, block, entries
    past = Past(square_root(band))
    found = np.zeros(fresh.shape)
    for step, drawn in enumerate(fresh):
        row = past.at(step, lambda shape, block, drawn=drawn: drawn[block])
        found[step] = [row((3, 4), block).numpy() for block in range(2)]
    matrix, flat = toeplitz(square_root(band), steps), fresh.reshape(steps, -1).numpy()
    exact = np.linalg.solve(matrix, flat)
    np.testing.assert_allclose(found.reshape(steps, -1), exact, rtol=1e-12, atol=1e-13)
    decoder = prefix_sums(steps) @ np.linalg.inv(matrix)
    np.testing.assert_allclose(np.cumsum(exact, 0), decoder @ flat, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("apart", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("band", [1, 2, 4, 9])
def test_sensitivity_is_the_most_of_all_patterns(apart: int, band: int) -> None:
    steps, coefficients = 9, square_root(band)
    matrix = toeplitz(coefficients, steps)
    most = max(np.linalg.norm(matrix[:, one].sum(1)) for one in patterns(steps, apart))
    assert sensitivity(coefficients, steps, apart) == pytest.approx(most, rel=1e-13)
    # Vectors of norm 1 in any directions add up to no more.
    rng = np.random.default_rng(band)
    for one in patterns(steps, apart)[::7]:
        given = rng.standard_normal((len(one), 3))
        given /= np.linalg.norm(given, axis=1)[:, None]
        assert np.linalg.norm(matrix[:, one] @ given) <= most * (1 + 1e-12)
    once = float(np.linalg.norm(coefficients))
    assert (once < most) == (apart < steps)  # negative control: one participation is not enough


def test_growing_coefficients_have_no_such_sensitivity() -> None:
    """Nor does the formula hold for them: the control finds a pattern that exceeds it."""
    growing = np.array([0.1, 1.0])
    for odd, why in (
        (growing, "coefficients of correlated noise increase"),
        (np.array([1.0, -0.5]), "the last coefficient of correlated noise is -0.5"),
    ):
        with pytest.raises(InputError, match=why):
            sensitivity(odd, 4, 3)
    matrix = toeplitz(growing, 4)
    assert np.linalg.norm(matrix[:, (0, 3)].sum(1)) < np.linalg.norm(matrix[:, 0] + matrix[:, 2])


def error(decoder: np.ndarray, most: float) -> float:
    """The root mean square of a prefix sum's noise, at a joint sensitivity of 1."""
    return most * float(np.sqrt(np.square(decoder).sum(1).mean()))


def test_sums_have_less_noise_than_the_tree_gives_and_than_independent_noise() -> None:
    """Of 256 steps: one epoch, against the binary tree of Dwork et al. 2010, and 8 epochs."""
    steps = 256
    sums = prefix_sums(steps)
    root = toeplitz(square_root(steps), steps)
    ours = error(sums @ np.linalg.inv(root), sensitivity(square_root(steps), steps, steps))
    levels = steps.bit_length()  # an example is in as many nodes; a sum takes those of its bits
    nodes = np.mean([number.bit_count() for number in range(1, steps + 1)])
    tree = math.sqrt(levels * nodes)
    independent = error(sums, 1.0)
    assert ours < 0.45 * tree < tree < 0.7 * independent
    banded = toeplitz(square_root(16), steps)
    decoder = sums @ np.linalg.inv(banded)
    assert error(decoder, sensitivity(square_root(16), steps, 32)) < 0.6 * error(sums, 8**0.5)


def momentum_of(memory: float, ahead: bool, steps: int) -> np.ndarray:
    """A: the momentum of each step from the gradients, by running the recursion [n, n]."""
    state, rows = np.zeros(steps), []
    for gradient in np.eye(steps):
        state = memory * state + (1 - memory) * gradient
        rows.append(memory * state + (1 - memory) * gradient if ahead else state)
    return np.array(rows)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("memory", [0.5, 0.95])
def test_the_root_of_a_momentum(memory: float, ahead: bool) -> None:
    """C C is in proportion to A; the noise is that of dense matrices, and least of all C tried."""
    steps, apart = 60, 20
    weights = momentum_of(memory, ahead, steps)
    root = square_root(steps, memory, ahead)
    matrix = toeplitz(root, steps)
    np.testing.assert_allclose(matrix @ matrix, weights / weights[0, 0], rtol=1e-12, atol=1e-13)

    def dense(c: np.ndarray) -> float:
        return error(weights @ np.linalg.inv(toeplitz(c, steps)), sensitivity(c, steps, apart))

    for c in (np.ones(1), root[:8], square_root(8)):
        assert noise_of_momentum(c, steps, apart, memory, ahead) == pytest.approx(
            dense(c), rel=1e-11
        )
    for tiny in (0.0, 1e-16, 1e-6):  # nothing cancels, and no coefficient is negative
        assert (np.diff(square_root(200, tiny, ahead)) <= 0).all()
        assert sensitivity(square_root(200, tiny, ahead), 200, 20) > 1
    # A long run whose examples take part once: no other root has less, whatever its cut.
    rng, long = np.random.default_rng(0), 2000
    root = square_root(400, memory, ahead)
    least = noise_of_momentum(root, long, long, memory, ahead)
    assert least < noise_of_momentum(square_root(400), long, long, memory, ahead)
    assert least < noise_of_momentum(np.ones(1), long, long, memory, ahead)
    for _ in range(5):
        other = root * np.exp(-np.append(0, rng.exponential(0.05, 399)).cumsum())
        assert least < noise_of_momentum(other, long, long, memory, ahead)


def test_the_noise_of_a_momentum_in_runs_of_the_recursion() -> None:
    """Monte Carlo: what `Past` draws, through the momentum, has the variance that is computed."""
    memory, steps, lots, rng = 0.9, 40, 10, np.random.default_rng(3)
    turns = FixedOrderSampling("cyclic", 6, memory, True)
    past, rows = Past(turns.coefficients(6)), []
    for step in range(steps):
        row = past.at(step, lambda shape, block: torch.from_numpy(rng.standard_normal(shape)))
        rows.append(row((20_000,), 0).numpy())
    seen = momentum_of(memory, True, steps) @ np.stack(rows)
    scale = turns.sensitivity(steps, lots)
    wanted = noise_of_momentum(turns.coefficients(steps), steps, lots, memory, True)
    assert scale * math.sqrt(np.square(seen).mean()) == pytest.approx(wanted, rel=0.01)
    # Negative control: noise that is independent from step to step has a third more.
    alone = noise_of_momentum(np.ones(1), steps, lots, memory, True)
    assert alone > 1.1 * wanted


def test_a_run_with_noise_for_its_momentum(tmp_path: Path) -> None:
    """Its epsilon is that of its own coefficients, which the ledger names, and reads again."""
    local = {"recipe": "dp-muon", "momentum-form": "ema-nesterov"}
    config = private(local=local, **{"noise-correlation": "momentum", "band": 3})
    found = execute(config, tmp_path)["privacy"]
    turns = FixedOrderSampling("cyclic", 3, config.local.momentum, True)
    whole = turns.sensitivity(12, 4) * math.sqrt(found["blocks"])
    assert found["lower"] <= gaussian_epsilon(2.0 / whole, 1e-3) <= found["epsilon"]
    first = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])
    assert first["noise_correlation"] == "momentum" and FixedOrderSampling.of_ledger(first) == turns
    assert spent(tmp_path)["epsilon"] == found["epsilon"]
    other = FixedOrderSampling("cyclic", 3).sensitivity(12, 4)  # negative control: that of sums
    assert other > 1.05 * turns.sensitivity(12, 4)


@pytest.mark.parametrize("recipe", ["dp-sgd", "dp-adam", "disk-sgd", "disk-muon"])
def test_noise_for_a_momentum_is_for_what_adds_nothing_up(recipe: str) -> None:
    with pytest.raises(InputError, match="adds up or filters the released gradients"):
        private(local={"recipe": recipe}, **{"noise-correlation": "momentum", "band": 3})


@pytest.mark.parametrize("turns", [("shuffle", 1), ("cyclic", 4), ("cyclic", 50)])
def test_epsilon_is_that_of_one_gaussian_release(turns: Any) -> None:
    turns = FixedOrderSampling(*turns)
    lots, blocks, noise, delta = 8, 3, 6.0, 1e-5
    spent = turns.spent(noise, blocks, lots, range(10), 3)
    most = max(
        np.linalg.norm(toeplitz(square_root(turns.band), 30)[:, start::lots].sum(1))
        for start in range(lots)
    )
    answer = account([spent], delta)
    exact = gaussian_epsilon(noise / (most * math.sqrt(blocks)), delta)
    assert answer.lower <= exact <= answer.upper < 1.01 * exact
    twice = account([spent], delta, adjacency="replace-one")  # which moves a sum by twice as much
    double = gaussian_epsilon(noise / (2 * most * math.sqrt(blocks)), delta)
    assert twice.lower <= double <= twice.upper < 1.01 * double


def statistics(
    turns: FixedOrderSampling, lots: int, steps: int, noise: float, count: int
) -> Statistics:
    """The log-likelihood ratio of runs with and without a canary in each epoch's first lot, whose
    gradient follows what was released: it points where the last release points."""
    found = []
    for there in (True, False):
        rng, past, rows = np.random.default_rng(int(there)), turns.past(), []
        given: list[Tensor] = []
        for step in range(steps):
            drawn = past.at(step, lambda s, block, r=rng: torch.from_numpy(r.standard_normal(s)))
            last = torch.sign(rows[-1]) if rows else torch.ones(count)
            given.append(torch.where(last == 0, 1.0, last) * (step % lots == 0))
            rows.append(there * given[-1] + noise * drawn((count,), 0))
        mixed = torch.from_numpy(toeplitz(turns.coefficients(steps), steps))
        seen, means = mixed @ torch.stack(rows), mixed @ torch.stack(given).double()
        found.append((((seen - means / 2) * means).sum(0) / noise**2).numpy())
    return Statistics(*found)


@pytest.mark.parametrize("buffers", [None, Buffers((0.9, 0.4), (0.3, 0.3))])
def test_an_audit_holds_the_account_and_fails_one_of_single_participations(
    buffers: Buffers | None,
) -> None:
    lots, steps, noise, delta = 4, 16, 3.0, 1e-3
    turns = FixedOrderSampling("cyclic", 0 if buffers else 3, buffers=buffers)
    bound = counted(statistics(turns, lots, steps, noise, 20_000), delta).epsilon
    true = account([turns.spent(noise, 1, lots, range(4), 4)], delta).upper
    once = float(np.linalg.norm(turns.coefficients(steps)))
    claimed = account([Event(1.0, noise / once, 1)], delta).upper  # negative control
    assert claimed < bound < true


def test_every_sample_has_one_turn_in_each_epoch() -> None:
    for turns, alike in (
        (FixedOrderSampling("shuffle"), False),
        (FixedOrderSampling("cyclic"), True),
    ):
        epochs = [
            [turns.rows(7, 2, 4 * epoch + place, 43, 12.0) for place in range(4)]
            for epoch in range(2)
        ]
        for lots in epochs:
            assert [len(rows) for rows in lots] == [12, 12, 12, 7]
            assert sorted(np.concatenate(lots)) == list(range(43))
        assert np.array_equal(epochs[0][0], epochs[1][0]) == alike
        assert not np.array_equal(epochs[0][0], turns.rows(7, 3, 0, 43, 12.0))


def test_a_clients_turns_go_on_where_its_last_round_ended() -> None:
    plan = RandomnessPlan(0, clients=3, per_round=2, rounds=9, steps=2)
    for client in range(3):
        taken = [number for number in range(9) if client in plan.participants(number)]
        turns = [plan.turn(number, client, step) for number in taken for step in range(2)]
        assert turns == list(range(2 * len(taken)))


def test_participations_with_attempts_are_no_fewer_than_any_order_gives() -> None:
    """Against counts in drawn orders; exactly the most of them where nothing is repeated."""
    rng = np.random.default_rng(0)
    for attempts in ([1, 1, 1, 1], [1, 3, 1], [2, 2], [1, 1, 4]):
        for steps, lots in ((1, 3), (3, 4), (5, 2), (4, 4), (3, 1)):
            most = 0
            for _ in range(40):
                places = rng.integers(lots, size=len(attempts) * steps)  # of the sample, by epoch
                held = [
                    places[turn // lots] == turn % lots for turn in range(len(attempts) * steps)
                ]
                each = np.reshape(held, (-1, steps)).sum(1)
                most = max(most, int(each @ np.array(attempts)))
            bound = participations(attempts, steps, lots)
            assert most <= bound
            assert bound == most or max(attempts) > 1


def require_noise_of(coefficients: np.ndarray, config: Config, folder: Path) -> None:
    """The model after 12 steps has moved by the noise of a Toeplitz matrix, not by fresh noise."""
    run = prepare(resolve(config), folder)
    execute(None, folder, resume=True)
    ends = [
        read_tensors(folder / f"{name}.safetensors")[0]["weight"].numpy()
        for name in ("initial", "model")
    ]
    plan = run.experiment.plan
    fresh = np.stack([
        plan.draws(number, 0, step)(Draw.NOISE, block=0).standard_normal(ends[0].shape)
        for number in range(4) for step in range(3)
    ])  # fmt: skip
    cancelled = np.linalg.solve(toeplitz(coefficients, 12), fresh.reshape(12, -1)).sum(0)
    moved = -0.1 * (1 + slack(torch.float64)) / 12 * cancelled.reshape(ends[0].shape)
    np.testing.assert_allclose(ends[1] - ends[0], moved, rtol=1e-7, atol=1e-9)
    independent = -0.1 / 12 * fresh.sum(0)  # negative control
    assert np.linalg.norm(ends[1] - ends[0] - independent) > 0.2 * np.linalg.norm(independent)


def test_a_run_has_the_noise_of_the_dense_matrices(tmp_path: Path) -> None:
    """With a vanishing bound and the noise that makes up for it, the model is a sum of noise."""
    config = small(
        data={"train": 40}, federation={"rounds": 4, "clients": 1, "per-round": 1},
        local={"recipe": "dp-sgd", "lr": 0.1, "steps": 3, "momentum": 0.0},
        privacy={"noise": 1e9, "lot": 12.0, "bound": 1e-9, "sampling": "cyclic",
                 "insecure-reproducible-noise": True} | CORRELATED,
        engine={"dtype": "float64"},
    )  # fmt: skip
    require_noise_of(square_root(3), config, tmp_path)


@pytest.mark.parametrize("extra", [{"sampling": "shuffle"}, CORRELATED])
def test_a_target_is_met_and_the_ledger_says_by_what(tmp_path: Path, extra: dict) -> None:
    private_run = execute(private(epsilon=2.0, noise=0.0, **extra), tmp_path)["privacy"]
    assert 1.99 < private_run["epsilon"] <= 2.0 and private_run["certified"]
    assert private_run["adjacency"] == "zero-out"
    turns = FixedOrderSampling(extra.get("sampling", "cyclic"), extra.get("band", 1))
    first = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])
    for held in (first, private_run):
        assert {name: held[name] for name in turns.about} == turns.about
    exact = gaussian_epsilon(private_run["noise"] / turns.sensitivity(12, 4), 1e-3)
    assert private_run["lower"] <= exact <= private_run["epsilon"]
    assert spent(tmp_path)["epsilon"] == private_run["epsilon"]


def test_a_repeated_round_of_shuffled_lots_counts_again(tmp_path: Path) -> None:
    whole = execute(private(sampling="shuffle"), tmp_path / "whole")["privacy"]["epsilon"]
    broken_off(private(sampling="shuffle"), tmp_path / "killed", at=3)
    again = execute(None, tmp_path / "killed", resume=True)["privacy"]["epsilon"]
    counts = participations([1, 1, 1, 1], 3, 4), participations([1, 1, 2, 1], 3, 4)
    assert counts == (3, 5)
    for found, count in ((whole, 3), (again, 5)):
        assert found == pytest.approx(gaussian_epsilon(2.0 / math.sqrt(count), 1e-3), rel=2e-3)


def test_correlated_noise_is_not_resumed_and_stays_spent(tmp_path: Path) -> None:
    broken_off(private(**CORRELATED), tmp_path, at=3)
    with pytest.raises(InputError, match="Secret noise is never stored in a file"):
        execute(None, tmp_path, resume=True)
    exact = gaussian_epsilon(2.0 / FixedOrderSampling("cyclic", 3).sensitivity(9, 4), 1e-3)
    assert spent(tmp_path)["epsilon"] == pytest.approx(exact, rel=2e-3)


def test_the_past_is_in_one_process_and_in_order() -> None:
    past = Past(square_root(3))
    past.at(0, lambda shape, block: torch.ones(shape))((2,), 0)
    with pytest.raises(InputError, match="the noise of step 2 must cancel"):
        past.at(2, lambda shape, block: torch.ones(shape))
    with pytest.raises(InputError, match="cannot be copied to another process"):
        pickle.dumps(past)
    assert "tensor" not in repr(past)


@pytest.mark.parametrize("kind", ["turns", "quantile"])
def test_a_worker_does_what_the_engine_in_this_process_does(kind: str) -> None:
    """Two clients of three, client by client: a worker has the turns of shuffled lots. If the bound
    follows a quantile, the server keeps the mean of the logarithms."""
    known: dict[str, Any] = {"insecure-reproducible-noise": True}
    config = resolve(
        private(3, 3, sampling="shuffle", **known)
        if kind == "turns"
        else private(3, 3, sampling="poisson", lot=8.0, clipping="flat", quantile=0.6, **known)
    )
    experiment = build_experiment(config, build_data(config, read_source(config)))
    state = begin(experiment.recipe, experiment.task, config.federation.seed)
    for done in run_rounds(experiment, state):
        sent: Broadcast = broadcast(experiment.recipe, state)
        held, state = [], done.state
        for client in done.participants:
            one = build_worker(config, int(client))
            rules = one.setup.recipe, one.setup.task, one.setup.plan
            held += client_updates(*rules, [(one.client, one.shard)], sent)
        pairs = [(state.params["weight"], [one.params["weight"] for one in held])]
        if kind == "quantile":
            bounds = [one.states["gradient"]["log-bound"] for one in held]
            pairs.append((state.states["gradient"]["log-bound"], bounds))
        for after, values in pairs:
            assert torch.allclose(torch.stack(values).mean(0), after, rtol=1e-12, atol=1e-12)
    if kind == "quantile":
        assert float(state.states["gradient"]["log-bound"][0]) != math.log(0.2)
