"""SignMuon: the votes, their bytes, the coins of ties, and what does not fit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import built, ended, gap, problem_of
from conftest import quick, small
from cut_off import killed, same_runs
from reference import methods, rounds
from sentences import one_sentence

from fedmuon import recipes
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import begin, run_round, run_rounds
from fedmuon.optim.sign_muon import Votes
from fedmuon.optim.stage import Broadcast, Reply, ServerState
from fedmuon.orthogonalize import smoothed_polar

LOCAL = {"recipe": "sign-muon", "lr": 0.05, "momentum": 0.8, "steps": 2, "batch": 7}
EVEN = {"clients": 6, "per-round": 4, "rounds": 6}  # four votes can be a tie
DIGITS = {
    "data": {"name": "digits", "train": 120, "test": 20},
    "task": {"name": "network", "model": "mlp"},
}


def table(**tables: Any) -> Any:
    given: dict[str, Any] = {"local": LOCAL, "federation": EVEN, "orthogonalizer": {"lambda": 0.1}}
    return resolve(small(given | tables))


def vote(values: list[list[float]], client: int = 0, seed: int = 0) -> Reply:
    """A reply with a direction [1, m, n] of one matrix and one vector, as the client sends it."""
    model = {"w": torch.tensor([values]), "b": torch.tensor([[0.5]])}
    received = Broadcast(3, model, {})
    stage = Votes(seed, {"w": 1, "b": 0})
    return stage.reply(Reply(client, model, {}, torch.zeros(1)), received, {})


def read(replies: list[Reply], seed: int = 0, round: int = 3) -> torch.Tensor:
    """The signs that the server elects."""
    like = {"w": torch.zeros(1, 2, 3), "b": torch.zeros(1, 1)}
    state, nothing = ServerState(round, like, {}), Broadcast(round, like, {})
    found, _ = Votes(seed, {"w": 1, "b": 0}).read(replies, lambda: nothing, state)
    return torch.stack([reply.params["w"] for reply in found]).mean(0).sign()[0]


def test_result_with_ties_equals_the_reference() -> None:
    """Four votes per entry, so that many entries are tied, and coins decide."""
    config = table()
    state, problem = ended(built(config)), problem_of(config)
    constants = {"lr": 0.05, "momentum": 0.8, "seed": config.federation.seed}
    expected = rounds.run(problem, methods.sign_muon(**constants))
    assert gap(state.params, expected.server["model"]) < 1e-12
    for wrong in ({"ties": False}, {"seed": config.federation.seed + 1}):  # the negative controls
        other = rounds.run(problem, methods.sign_muon(**{**constants, **wrong}))
        assert gap(state.params, other.server["model"]) > 0.04


def test_each_entry_moves_by_the_step_size() -> None:
    made = built(table())
    before = begin(made.recipe, made.task, made.plan.seed)
    after = next(run_rounds(made, before)).state
    moved = (after.params["weight"] - before.params["weight"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.05), rtol=1e-12, atol=1e-15)


def test_the_majority_wins_and_bits_are_packed() -> None:
    replies = [
        vote([[1.0, -2.0, 3.0], [-1.0, 5.0, -6.0]], 0),
        vote([[0.1, -0.2, -3.0], [-1.0, 5.0, -6.0]], 1),
        vote([[1.0, 9.0, 3.0], [-1.0, -5.0, 6.0]], 2),
    ]
    packed = replies[0].params["w"]
    assert packed.dtype == torch.uint8 and packed.shape == (1, 1)
    assert int(packed) == 0b010101  # the first entry is the lowest bit
    assert replies[0].params["b"].tolist() == [[0.5]]
    assert read(replies).tolist() == [[1, -1, 1], [-1, 1, -1]]


def test_coins_decide_ties_and_zeros_in_both_directions() -> None:
    """Each coin depends on the round and the seed, and half of the coins are +1."""
    one = vote([[1.0, -2.0, 3.0], [-1.0, 5.0, -6.0]], 0)
    other = vote([[-1.0, 2.0, -3.0], [1.0, -5.0, 6.0]], 1)
    elected = [read([one, other], round=round) for round in range(200)]
    share = float(torch.stack(elected).double().mean())
    assert abs(share) < 4 / math.sqrt(200 * 6)  # four standard deviations
    assert all(bool((signs.abs() == 1).all()) for signs in elected)
    assert not torch.equal(elected[0], elected[1])
    assert torch.equal(read([one, other]), read([one, other]))
    nothing = [vote([[0.0] * 3] * 2, client, seed) for client in range(2) for seed in range(2)]
    assert len({bytes(reply.params["w"].numpy()) for reply in nothing}) > 2


def test_replicas_have_the_same_coins() -> None:
    stage, tensor = Votes(0), torch.zeros(2, 4, 5, dtype=torch.float64)
    received = Broadcast(0, {"w": tensor}, {})
    sent = stage.reply(Reply(0, {"w": tensor}, {}, torch.zeros(2)), received, {}).params["w"]
    assert torch.equal(sent[0], sent[1]) and int(sent.sum()) > 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_reply_has_one_bit_per_entry(dtype: str) -> None:
    made = built(table(engine={"dtype": dtype}))
    first = next(run_rounds(made, begin(made.recipe, made.task, 0)))
    size = {"float32": 4, "float64": 8}[dtype]
    assert first.bytes_up == 4 * 3  # 21 entries need 3 bytes
    assert first.bytes_down == 4 * 21 * size


def test_vectors_are_sent_uncompressed() -> None:
    made = built(table(**DIGITS, engine={"dtype": "float32"}))
    state = begin(made.recipe, made.task, 0)
    first = next(run_rounds(made, state))
    voted = {name for name, count in (made.recipe.stages[0].routes or {}).items() if count}  # type: ignore[attr-defined]
    assert voted and voted < {*state.params}
    of_client = sum(
        -(-value.numel() // 8) if name in voted else 4 * value.numel()
        for name, value in state.params.items()
    )
    assert first.bytes_up == 4 * of_client


@pytest.mark.parametrize("aux", quick(["sgd", "adamw"], ["adamw"]))
def test_networks_train(aux: str) -> None:
    """Vectors take the auxiliary step on the server, as with EF21-Muon."""
    local = {**LOCAL, "lr": 0.01, "aux": aux}
    states = {}
    for recipe in ("sign-muon", "ef21-muon"):
        made = built(table(**DIGITS, local={**local, "recipe": recipe}))
        clients = [made.client(client) for client in range(4)]
        states[recipe] = run_round(made, begin(made.recipe, made.task, 0), clients)[0]
    signs, full = (states[recipe] for recipe in ("sign-muon", "ef21-muon"))
    assert all(bool(value.isfinite().all()) for value in signs.params.values())
    vectors = [name for name, value in signs.params.items() if value.ndim == 2]
    assert vectors
    for name in vectors:
        torch.testing.assert_close(signs.params[name], full.params[name], rtol=1e-12, atol=1e-15)
    assert ("adamw" in signs.states) == (aux == "adamw")


def test_a_direction_that_is_not_finite_is_not_hidden_by_votes() -> None:
    with pytest.raises(NonFinite, match=r"the direction of client 0 is not finite \(round 3\)"):
        vote([[math.nan, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"federation": {**EVEN, "aggregate": "median"}}, "each client has one vote"),
        ({"compression": {"uplink": "qsgd"}}, "compressed only once"),
        ({"orthogonalizer": {"row-memory": 0.5}}, "a vote is a sign"),
        ({"devices": {"mode": "fedbuff", "buffer": 2, "speeds": "log-normal"}}, "fedbuff"),
        (
            {"privacy": {"level": "client", "noise": 0.5, "bound": 0.3,
                         "insecure-reproducible-noise": True}},
            "stored states",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_rejected(tables: dict[str, Any], words: str) -> None:
    with one_sentence(words):
        build_experiment(table(**tables))


def test_a_model_without_matrices_is_rejected() -> None:
    with pytest.raises(InputError, match=r"`routes` contains no matrix\. Use a model with"):
        recipes.sign_muon(lr=0.1, routes={"scale": 0, "bias": 0})


def test_a_run_resumes_bit_identically_after_20_kills(tmp_path: Path) -> None:
    """One kill after each of 20 rounds, with the clients' stored momenta and with ties."""
    config = table(
        federation={**EVEN, "rounds": 21}, output={"checkpoint-every": 3, "evaluate-every": 7}
    )
    killed(config, tmp_path / "run", range(1, 21))
    execute(config, tmp_path / "whole")
    same_runs(tmp_path / "run", tmp_path / "whole")


def test_a_random_orthogonalizer_runs_on_the_clients() -> None:
    made = built(table(orthogonalizer={"name": "randomized-polar", "rank": 2, "oversample": 1}))
    assert all(bool(value.isfinite().all()) for value in ended(made).params.values())


def test_one_client_takes_the_sign_of_its_own_step() -> None:
    made = built(table(federation={"clients": 1, "per-round": 1, "rounds": 1}))
    start = begin(made.recipe, made.task, made.plan.seed)
    signs = ended(made).params["weight"] - start.params["weight"]
    muon = replace(
        made, recipe=recipes.ef21_muon(0.05, 0.8, lambda matrices: smoothed_polar(matrices, 0.1))
    )
    step = ended(muon).params["weight"] - start.params["weight"]
    assert torch.equal(signs.sign(), step.sign())
