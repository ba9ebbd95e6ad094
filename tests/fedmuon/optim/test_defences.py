"""The ball of honest clients and nearest-neighbour mixing: formulas, limits and errors."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from compared import built, ended
from conftest import small
from test_aggregators import replies

from fedmuon.core.errors import InputError
from fedmuon.federated.rounds import begin, run_round
from fedmuon.optim.ball import Ball
from fedmuon.optim.mixing import Mixing
from fedmuon.optim.stage import Broadcast, Reply, ServerState

pytestmark = pytest.mark.usefixtures("runs_apart")


def message(like: Reply) -> Broadcast:
    drawn = torch.Generator().manual_seed(9)
    params = {name: torch.randn(value.shape, generator=drawn, dtype=torch.float64)
              for name, value in like.params.items()}  # fmt: skip
    return Broadcast(2, params, {"m": {name: -value for name, value in params.items()}})


def with_momenta(given: list[Reply]) -> list[Reply]:
    return [Reply(reply.client, reply.params, {"m": {name: value * (1 + reply.client)
                                                    for name, value in reply.params.items()}},
                  reply.loss) for reply in given]  # fmt: skip


def read(stage: Ball | Mixing, given: list[Reply], received: Broadcast) -> list[Reply]:
    server = ServerState(received.round, received.params, received.states)
    return stage.read(given, lambda: received, server)[0]


@pytest.mark.parametrize("joint", [0.0, 2.0])
@pytest.mark.parametrize("states", [0.0, 1.5])
def test_ball_is_the_loop(joint: float, states: float) -> None:
    """`weight` has a ball, and `bias` is clipped to the median, or belongs to the joint ball."""
    given = with_momenta(replies(5))
    received = message(given[0])
    radii = (("weight", 1.0), ("bias", 0.5)) if joint else (("weight", 1.0),)
    stage = Ball(radii, joint, states=states, factor=lambda round: 0.25 * round)
    found = read(stage, given, received)
    for s in range(2):
        moves = [{name: (reply.params[name] - received.params[name])[s].numpy()
                  for name in reply.params} for reply in given]  # fmt: skip
        norms = [np.linalg.norm(move["bias"]) for move in moves]
        for k, reply in enumerate(found):
            limits = {"weight": 0.5, "bias": float(np.median(norms))}  # factor 0.25 * 2
            lengths = {name: float(np.linalg.norm(value)) for name, value in moves[k].items()}
            if joint:
                whole = math.sqrt(sum(length**2 for length in lengths.values()))
                factors = dict.fromkeys(limits, min(1.0, 1.0 / whole))
            else:
                factors = {name: min(1.0, limits[name] / lengths[name]) for name in limits}
            for name in limits:
                expected = received.params[name][s].numpy() + factors[name] * moves[k][name]
                np.testing.assert_allclose(reply.params[name][s].numpy(), expected, rtol=1e-12)
                assert factors["weight"] < 0.99  # the negative control
        for k, reply in enumerate(found):
            base = {name: 0.0 if states else value[s].numpy()
                    for name, value in received.states["m"].items()}  # fmt: skip
            trees = [{name: value[s].numpy() - base[name]
                      for name, value in one.states["m"].items()} for one in given]  # fmt: skip
            lengths_of = [math.sqrt(sum(float((value**2).sum()) for value in tree.values()))
                          for tree in trees]  # fmt: skip
            limit = states or float(np.median(lengths_of))
            for name, value in trees[k].items():
                expected = base[name] + min(1.0, limit / lengths_of[k]) * value
                np.testing.assert_allclose(reply.states["m"][name][s].numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("hostile", [1, 2])
def test_mixing_is_the_loop(hostile: int) -> None:
    given = with_momenta(replies(5))
    found = read(Mixing(hostile), given, message(given[0]))
    for s in range(2):
        for tree in ("model", "m"):
            rows = [np.concatenate([value[s].numpy().ravel()
                                    for value in reply.trees[tree].values()])
                    for reply in given]  # fmt: skip
            for k, reply in enumerate(found):
                order = sorted(range(5), key=lambda j: float(np.linalg.norm(rows[j] - rows[k])))
                expected = np.mean([rows[j] for j in order[: 5 - hostile]], 0)
                mixed = np.concatenate([value[s].numpy().ravel()
                                        for value in reply.trees[tree].values()])  # fmt: skip
                np.testing.assert_allclose(mixed, expected, rtol=1e-12)
                assert np.abs(mixed - rows[k]).max() > 1e-3  # the negative control


SETTINGS: dict[str, dict[str, Any]] = {
    "fedmuon": {},
    "local-muon": {"local": {"recipe": "local-muon"}},
    "muloco": {"local": {"recipe": "muloco"}},
    "polyak": {"local": {"momentum-form": "polyak", "momentum": 0.5}},
    "schulz": {"orthogonalizer": {"name": "newton-schulz", "coefficients": "jordan"}},
    "decayed": {"local": {"schedule": "cosine"}},
    "clipped sign": {"orthogonalizer": {"name": "clipped-sign", "clip-level": 0.01}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_honest_clients_stay_inside_their_ball(name: str) -> None:
    """The run with a ball is the run without it; a ball of 80% of the radius changes it."""
    base = {"local": {"lr": 0.3, "steps": 3}, "orthogonalizer": {"lambda": 1e-8}}
    tables = {table: {**base.get(table, {}), **SETTINGS[name].get(table, {})}
              for table in {*base, *SETTINGS[name]}}  # fmt: skip
    if "name" in tables["orthogonalizer"]:
        tables["orthogonalizer"].pop("lambda")
    plain = ended(built(small(**tables))).params["weight"]
    inside = built(small(**tables, robust={"ball": "matrix"}))
    torch.testing.assert_close(ended(inside).params["weight"], plain, rtol=0, atol=1e-13)
    stage = inside.recipe.stages[0]
    assert isinstance(stage, Ball)
    smaller = small(**tables, robust={"ball": "matrix", "radius": 0.3 * stage.radii[0][1]})
    assert float((ended(built(smaller)).params["weight"] - plain).abs().max()) > 1e-4


def test_a_hostile_client_moves_the_mean_by_no_more_than_its_share() -> None:
    shared: dict[str, Any] = {
        "federation": {"clients": 4, "per-round": 4, "rounds": 1},
        "local": {"recipe": "local-muon", "lr": 0.2, "steps": 2},
    }
    attack = {"kind": "scaled", "clients": "2", "strength": 1e6}
    honest, radius = ended(built(small(**shared))).params["weight"], 0.2 * 2 * math.sqrt(3)

    def moved(**tables: Any) -> float:
        return float((ended(built(small(**shared, **tables))).params["weight"] - honest).norm())

    assert 0 < moved(attacks=attack, robust={"ball": "model"}) <= 2 * radius / 4
    assert moved(attacks=attack) > 1e3 * radius  # the negative control


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"local": {"recipe": "fedavg"}}, r"\[local\] recipe = 'fedavg'.* Set \[robust\] radius"),
        ({"local": {"weight-decay": 0.1}}, r"weight-decay = 0\.1"),
        ({"local": {"adjust": "polargrad"}}, "adjust = 'polargrad'"),
        ({"local": {"epochs": 2.0, "steps": 5}}, "epochs = 2"),
        ({"local": {"recipe": "fedmuon-aligned", "alignment": 0.5}}, "fedmuon-aligned"),
        ({"orthogonalizer": {"name": "randomized-polar", "rank": 2, "oversample": 0}},
         "randomized-polar"),
        ({"orthogonalizer": {"row-memory": 0.9}}, "row-memory"),
    ],
)  # fmt: skip
def test_a_ball_without_a_known_radius_needs_one(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        built(small(**tables, robust={"ball": "matrix"}))
    built(small(**tables, robust={"ball": "matrix", "radius": 1.0}))


def test_mixing_needs_an_honest_majority() -> None:
    made = built(small(federation={"clients": 4, "per-round": 4}, robust={"mixing": 2}))
    state = begin(made.recipe, made.task, 3)
    with pytest.raises(InputError, match=r"needs more than 4 replies .* Lower mixing to 1,"):
        run_round(made, state, [made.client(k) for k in range(4)])
    attack = {"kind": "sign-flip", "clients": "0, 1"}
    with pytest.raises(InputError, match=r"mixing = 1 tolerates at most 1"):
        built(small(federation={"clients": 5, "per-round": 5}, robust={"mixing": 1},
                    attacks=attack))  # fmt: skip


BALL, MIXING = {"robust": {"ball": "matrix", "radius": 0.5}}, {"robust": {"mixing": 1}}
ATTACKED = [{"attacks": {"kind": kind, "clients": "1"}} for kind in ("gaussian", "mimic")]


@pytest.mark.parametrize(
    ("recipe", "quantile", "changes"),
    [
        *(("dp-sgd", 0.5, changes) for changes in (BALL, MIXING, *ATTACKED)),  # ln C
        *((recipe, 0.0, changes) for recipe in ("dp-adam", "disk-muon")  # the number of steps
          for changes in (BALL, MIXING)),
    ],
)  # fmt: skip
def test_states_of_one_number_are_clipped_mixed_and_attacked(
    recipe: str, quantile: float, changes: dict[str, Any]
) -> None:
    """Such a state has the shape [S], without further axes."""
    privacy = {"noise": 1.0, "lot": 5.0, "bound": 0.1, "delta": 1e-3, "quantile": quantile,
               "insecure-reproducible-noise": True}  # fmt: skip
    run = small(local={"recipe": recipe, "lr": 0.1}, privacy=privacy, **changes)
    assert ended(built(run)).params["weight"].isfinite().all()
