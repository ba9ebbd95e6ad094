"""Low-rank momenta in messages."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from reference import compressors
from torch import nn

from fedmuon import orthogonalizers, recipes
from fedmuon.config.load import Config
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError
from fedmuon.federated.build import build_experiment
from fedmuon.federated.rounds import begin, broadcast, client_updates, received_message, simulate
from fedmuon.federated.wire import named, pack, unpack
from fedmuon.optim.low_rank import LEFT, RIGHT, EncodedStates, factors, low_rank
from fedmuon.optim.stage import ServerState
from fedmuon.server.message_sizes import on_ray


def config(**local: Any) -> Config:
    """Matrices [7, 3], of which factors of rank 1 or 2 are smaller."""
    given = {"recipe": "fedmuon-svd", "lr": 0.3, "steps": 3, "batch": 7, "rank": 1} | local
    return small({"data": {"classes": 4}}, local=given)


def ended(table: Config) -> ServerState:
    made = build_experiment(table)
    return simulate(made, begin(made.recipe, made.task, table.federation.seed))


def test_factors_of_full_rank_are_exact() -> None:
    draw = torch.Generator().manual_seed(0)
    for shape in ((5, 3), (3, 5), (4, 4)):
        matrix = torch.randn(2, *shape, generator=draw, dtype=torch.float64)
        left, right = factors(matrix, min(shape))
        assert (left @ right - matrix).abs().max() < 1e-14


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_factors_are_the_nearest_matrix_of_their_rank(rank: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    matrix = torch.randn(3, 6, 4, generator=draw, dtype=torch.float64)
    left, right = factors(matrix, rank)
    nearest, rng = compressors.low_rank(rank), np.random.default_rng(0)
    assert left.shape == (3, 6, rank) and right.shape == (3, rank, 4)
    for k in range(3):
        assert np.abs((left @ right)[k].numpy() - nearest(matrix[k].numpy(), rng, {})).max() < 1e-13
    errors = torch.linalg.svdvals(matrix)[:, rank:].square().sum(1).sqrt()  # Eckart and Young
    assert torch.allclose(torch.linalg.matrix_norm(matrix - left @ right), errors)


def test_what_is_sent_as_it_is() -> None:
    """Vectors, and matrices whose factors are no smaller; convolutions are matrices [out, -1]."""
    state = {
        "vector": torch.randn(2, 9),
        "square": torch.randn(2, 4, 4),
        "wide": torch.randn(2, 3, 30),
        "conv": torch.randn(2, 8, 4, 3, 3),
    }
    codec = low_rank(2)
    sent = codec.encode(state)
    factored = {f"{one}{end}" for one in ("wide", "conv") for end in (LEFT, RIGHT)}
    assert set(sent) == {"vector", "square"} | factored
    like = codec.template(state)
    assert {n: one.shape for n, one in sent.items()} == {n: one.shape for n, one in like.items()}
    found = codec.decode(sent, state)
    assert all(found[name].shape == one.shape for name, one in state.items())
    assert (found["vector"] == state["vector"]).all() and (found["square"] == state["square"]).all()
    assert (found["wide"] != state["wide"]).any()
    again = codec.decode(codec.encode(found), state)
    assert all(torch.allclose(again[name], one, atol=1e-5) for name, one in found.items())


def sizes(table: Config) -> tuple[int, int]:
    """Entries of a message to a client, and of one back, as they are packed and unpacked."""
    made = build_experiment(table)
    state = begin(made.recipe, made.task, 0)
    sent, received = broadcast(made.recipe, state), received_message(made.recipe, state)
    (reply,) = client_updates(made.recipe, made.task, made.plan, [(1, made.shards[1])], received)
    for one in (sent, reply):
        unpack(pack(one.params, one.states), one.params, one.states)
    count = [sum(x.numel() for x in named(y.params, y.states).values()) for y in (sent, reply)]
    return count[0], count[1]


def test_messages_are_shorter() -> None:
    assert sizes(config(recipe="fedmuon", rank=8)) == (2 * 28, 2 * 28)
    assert sizes(config(rank=1)) == (28 + 11, 28 + 11)
    assert sizes(config(rank=2)) == (28 + 22, 28 + 22)
    assert sizes(config(rank=3)) == (2 * 28, 2 * 28)

    def bytes_of(recipe: str, rank: int) -> tuple[int, int]:
        """Of all encoded messages of a round, for a matrix [784, 10] of float64."""
        table = small(
            data={"dimension": 784, "classes": 10, "minimum": 5},
            local={"recipe": recipe, **({"rank": rank} if rank else {})},
        )
        made = build_experiment(table)
        found = on_ray(table, made, begin(made.recipe, made.task, 0), 1, 1)
        return found.down, found.up

    whole, small_ = bytes_of("fedmuon", 0), bytes_of("fedmuon-svd", 2)
    model = 8 * 7840
    saved = model - 8 * 2 * 794
    assert whole[1] - small_[1] == pytest.approx(3 * saved, rel=0.02)  # from three clients
    assert whole[0] - small_[0] == pytest.approx(saved, rel=0.02)  # content is shared by a worker


def test_what_it_rejects() -> None:
    with pytest.raises(InputError, match="decoding can undo the clipping"):
        privacy = {"level": "client", "noise": 1.0}
        build_experiment(small(local={"recipe": "fedmuon-svd"}, privacy=privacy))
    for codecs in ({"momentum": low_rank(1)}, {"momentum": 1}):
        with pytest.raises(InputError, match=r"codecs of a Recipe is .* but it must be a mapping"):
            replace(recipes.fedavg(0.1), stages=(EncodedStates(codecs),))  # type: ignore[arg-type]


def test_states_of_other_recipes_may_have_codecs() -> None:
    """A codec belongs to a state's name, also in a recipe with several states."""
    made = build_experiment(config(recipe="fedmuon-aligned", rank=8))
    polar = orthogonalizers.smoothed_polar(0.1)
    base = recipes.fedmuon_aligned(0.3, 0.9, polar, steps=3)
    ends = []
    for codecs in ({}, {"global-direction": low_rank(1)}, {"momentum": low_rank(1)}):
        recipe = replace(base, stages=(EncodedStates(codecs),))
        ends.append(simulate(replace(made, recipe=recipe), begin(recipe, made.task, 3)))
    weights = [one.params["weight"] for one in ends]
    assert all(one.isfinite().all() for one in weights)
    assert (weights[0] != weights[1]).any() and (weights[1] != weights[2]).any()


def test_a_state_may_lack_tensors_of_the_model() -> None:
    """Running statistics have no momentum, nor do the parameters of an auxiliary AdamW."""
    for layers, aux in (((nn.BatchNorm1d(8),), "sgd"), ((), "adamw")):
        module = nn.Sequential(
            nn.Linear(7, 8), *layers, nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 3)
        )
        tables = {
            "task": {"name": "given"},
            "local": {"recipe": "fedmuon-svd", "rank": 1, "aux": aux},
        }
        table = small({}, **tables).with_objects(UserObjects(task=module))
        assert all(one.isfinite().all() for one in ended(table).params.values())
    for rank in (0, -1, 2.5):
        with pytest.raises(
            InputError, match=f"rank of low_rank is {rank}, but it must be an integer"
        ):
            low_rank(rank)  # type: ignore[arg-type]
