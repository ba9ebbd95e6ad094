"""The stage of an optimizer without a server: the graph of its nodes, and what each node stores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedmuon.core.errors import InputError
from fedmuon.optim.chain import States
from fedmuon.optim.graphs import Graph
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import Stage
from fedmuon.tasks.base import Params

MODEL_OF_NODE, TRACKER = "node-model", "node-tracker"


@dataclass(frozen=True)
class Gossip(Stage):
    """A stage that replaces the rounds of a server by rounds of gossip.

    Attributes:
        graph: The graph, with its weights in each round.
        rounds_without_server: The function that runs the rounds in one process.
    """

    graph: Graph
    rounds_without_server: Callable[..., Any] | None = None

    @property
    def stores(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the states that a node stores, in addition to its momentum."""
        return MODEL_OF_NODE, TRACKER

    def adopt(
        self, models: Params, first: Callable[[], Params], memories: Sequence[States]
    ) -> Params:
        """Return each node's own model, or the initial model before the first round."""
        if not any(memories):
            return models
        return joined([memory[MODEL_OF_NODE] for memory in memories], models)


def require_server(recipe: Recipe) -> None:
    """Raise an error if a Flower server would run a recipe that trains without a server."""
    if any(stage.rounds_without_server is not None for stage in recipe.stages):
        raise InputError(
            "this recipe trains without a server, but a Flower server runs the experiment. Use "
            "`fedmuon run` with [engine] name = 'inline' or 'ray', or choose a recipe with a "
            "server, such as ef21-muon."
        )


def joined(trees: Sequence[Params], like: Params) -> Params:
    """Return the tensors of all nodes along the leading axis, on the device of `like`."""
    return {
        name: torch.cat([tree[name].to(value) for tree in trees]).contiguous()
        for name, value in like.items()
    }
