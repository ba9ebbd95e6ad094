"""What EF21-Muon sends, and what does not fit with it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import quick, small
from sentences import one_sentence

from fedmuon import links, recipes
from fedmuon.core.errors import InputError
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import begin, run_rounds, simulate
from fedmuon.optim.stage import ServerState

LOCAL = {"recipe": "ef21-muon", "lr": 0.3, "momentum": 0.8, "steps": 1, "batch": 0}
TOP = {"uplink": "top-k", "share": 0.3, "feedback": "ef21"}
LAMBDA = 0.1


def made_of(compression: dict[str, Any] | None = None, **tables: Any) -> Any:
    given: dict[str, Any] = {"local": LOCAL, "orthogonalizer": {"lambda": LAMBDA}} | tables
    if compression:
        given["compression"] = compression
    return build_experiment(resolve(small({"federation": {"rounds": 8}}, **given)))


def ended(made: Any) -> ServerState:
    return simulate(made, begin(made.recipe, made.task, made.plan.seed))


def test_a_server_step_is_muons() -> None:
    """One client and one step in a round: the centralized optimizer, which keeps its states."""
    alone = {"federation": {"clients": 1, "per-round": 1}}
    for table in ({"lambda": LAMBDA}, {"row-memory": 0.5}, {"shards": 3, "full-every": 3}):
        each = [
            ended(made_of(local={**LOCAL, "recipe": name, "weight-decay": 0.1},
                          orthogonalizer={} if name == "local-muon" else table, **alone))
            for name in ("ef21-muon", "muon", "local-muon")
        ]  # fmt: skip
        ours, muon, afresh = (one.params["weight"] for one in each)
        assert (ours - muon).abs().max() < 1e-13 and (ours - afresh).abs().max() > 1e-3


def test_a_message_has_one_direction_and_its_scale_does_not_vanish() -> None:
    """In float32 the difference of two models would round small momenta away."""
    made = made_of(engine={"dtype": "float32"})
    (first, *_) = run_rounds(made, begin(made.recipe, made.task, 0))
    assert first.bytes_up == first.bytes_down == len(first.participants) * 21 * 4
    made = made_of(TOP)
    sparse = next(run_rounds(made, begin(made.recipe, made.task, 0)))
    assert sparse.bytes_up == len(sparse.participants) * 6 * (8 + 2)


@pytest.mark.parametrize("aux", quick(["sgd", "adamw"], ["adamw"]))
def test_networks_train(aux: str) -> None:
    """Vectors take the auxiliary step on the server."""
    found = ended(
        made_of(
            TOP,
            data={"name": "digits", "train": 60, "test": 20},
            task={"name": "network", "model": "mlp"},
            local={**LOCAL, "aux": aux, "lr": 0.02},
        )
    )
    assert all(bool(value.isfinite().all()) for value in found.params.values())
    assert ("adamw" in found.states) == (aux == "adamw")


def test_what_does_not_fit_is_rejected() -> None:
    for tables, said in (
        ({"orthogonalizer": {"name": "randomized-polar", "rank": 2}}, "draws random numbers"),
        ({"devices": {"mode": "fedbuff", "buffer": 2, "speeds": "log-normal"}}, "fedbuff"),
        ({"privacy": {"level": "client", "noise": 0.5, "bound": 0.3,
                      "insecure-reproducible-noise": True}}, "stored states"),
    ):  # fmt: skip
        with one_sentence(said):
            made_of(**tables)


def test_a_link_that_draws_is_rejected() -> None:
    def update(direction: Any, context: Any) -> Any:
        return {name: one + context.draws[0](1).random() for name, one in direction.items()}

    made = made_of()
    own = recipes.ef21_muon(0.1, orthogonalizer=links.stateless("mine", update))
    with pytest.raises(InputError, match="cannot draw random numbers"):
        ended(replace(made, recipe=own))
    assert torch.isfinite(ended(made).params["weight"]).all()
