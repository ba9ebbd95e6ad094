"""EF21-Muon against loops of plain arrays, and what it sends."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small

from fedmuon import links, recipes
from fedmuon.core.errors import InputError
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import begin, run_rounds, simulate
from fedmuon.optim.compression import Compression, identity
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


def gradient(made: Any, weight: np.ndarray, client: int) -> np.ndarray:
    shard = made.shards[client]
    _, slope = made.task.gradient({"weight": torch.from_numpy(weight)[None]}, [shard.batch(None)])
    return slope["weight"][0].numpy()


def naive(made: Any, rounds: int, share: float | None) -> np.ndarray:
    """The paper's loop, of which only some clients take part; without a share, g is their mean."""
    x = begin(made.recipe, made.task, made.plan.seed).params["weight"][0].numpy()
    momenta, estimates = {}, {i: np.zeros_like(x) for i in range(made.plan.clients)}
    for r in range(rounds):
        who = made.plan.participants(r).tolist()
        for i in who:
            held = momenta.get(i, np.zeros_like(x))
            momenta[i] = 0.8 * held + 0.2 * gradient(made, x, i)
            change = (momenta[i] - estimates[i]).ravel()
            if share is not None:
                least = np.sort(np.abs(change))[-round(share * x.size)]
                change = np.where(np.abs(change) >= least, change, 0)
                estimates[i] = estimates[i] + change.reshape(x.shape)
        every = [momenta[i] for i in who] if share is None else list(estimates.values())
        left, values, right = np.linalg.svd(sum(every) / len(every), full_matrices=False)
        x = x - 0.3 * (left * (values / np.sqrt(values**2 + LAMBDA))) @ right
    return x


def test_it_is_the_papers_loop() -> None:
    """Also without compression; the control takes the other loop."""
    found = {}
    for share, table in ((None, None), (0.3, TOP)):
        made = made_of(table)
        assert made.plan.per_round < made.plan.clients
        found[share] = ended(made).params["weight"][0].numpy()
        assert np.abs(found[share] - naive(made, 8, share)).max() < 1e-12
        other = 0.3 if share is None else None
        assert np.abs(found[share] - naive(made, 8, other)).max() > 1e-3


def test_identity_is_muon_of_the_mean_momentum_to_the_bit() -> None:
    plain = made_of()
    table = Compression(identity(), identity(), clients=plain.plan.clients, direction=True)
    same = replace(plain, recipe=replace(plain.recipe, stages=(table,)))
    one, other = (ended(made).params["weight"] for made in (plain, same))
    assert (one == other).all()
    assert (one != ended(made_of({"uplink": "qsgd"})).params["weight"]).any()


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


@pytest.mark.parametrize("aux", ["sgd", "adamw"])
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
                      "insecure-reproducible-noise": True}}, "also stores or sends other data"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said) as caught:
            made_of(**tables)
        assert str(caught.value).count("\n") == 0


def test_a_link_that_draws_is_rejected() -> None:
    def update(direction: Any, context: Any) -> Any:
        return {name: one + context.draws[0](1).random() for name, one in direction.items()}

    made = made_of()
    own = recipes.ef21_muon(0.1, orthogonalizer=links.stateless("mine", update))
    with pytest.raises(InputError, match="cannot draw random numbers"):
        ended(replace(made, recipe=own))
    assert torch.isfinite(ended(made).params["weight"]).all()
