"""The shapes and the bytes of the messages in a round."""

from collections.abc import Sequence
from functools import partial

from fedmuon.optim.chain import States
from fedmuon.optim.recipe import Recipe, first_state
from fedmuon.optim.stage import MODEL, Reply, ServerState, Trees, split_model
from fedmuon.tasks.base import Params, split_statistics


def joint(recipe: Recipe, params: Params, states: States) -> Trees:
    """Return the model and the states that a client returns, by name."""
    learned, _ = split_statistics(params)
    returned = {
        name: states[name] if name in states else first_state(recipe, name, learned)
        for name in recipe.returned
    }
    return {MODEL: params, **returned}


def sent_like(recipe: Recipe, params: Params, states: States) -> tuple[Params, States]:
    """Return tensors with the shapes and dtypes that the arrays of a broadcast must have."""
    trees: Trees = {MODEL: params, **{name: states[name] for name in recipe.sent}}
    for stage in recipe.stages:
        trees = stage.sent_like(trees)
    return split_model(trees)


def returned_like(
    recipe: Recipe, params: Params, states: States, client: int | None = None
) -> tuple[Params, States]:
    """Return tensors with the shapes and dtypes that the arrays of a reply must have.

    Args:
        recipe: The recipe.
        params: The server's model.
        states: The server's states.
        client: The number of the client. By default, the tensors are those of the largest reply.
    """
    trees = joint(recipe, params, states)
    for stage in recipe.stages:
        like = stage.returned_like if client is None else partial(stage.returned_by, client=client)
        trees = like(trees)
    return split_model(trees)


def payload_bytes(params: Params, states: States) -> int:
    """Return the bytes of the arrays in a message, without names and shapes."""
    return sum(value.nbytes for tree in (params, *states.values()) for value in tree.values())


def traffic(
    recipe: Recipe, state: ServerState, asked: int, replies: Sequence[Reply]
) -> dict[str, int]:
    """Return the bytes of all models and states that a round sends, in each direction.

    Args:
        recipe: The recipe.
        state: The state before the round.
        asked: Number of clients that received the model, without repeated messages.
        replies: The replies that the server used, in the form that the clients sent.
    """
    down = payload_bytes(*sent_like(recipe, state.params, state.states))
    up = sum(payload_bytes(reply.params, reply.states) for reply in replies)
    return {"bytes_down": asked * down, "bytes_up": up}
