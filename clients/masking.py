"""A client's masks under distributed trust: a fresh key for each round, used for one reply."""

from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Context, Message

from fedmuon.clients.messages import answer, partition
from fedmuon.core.errors import InputError
from fedmuon.federated.rounds import Reply
from fedmuon.optim.recipe import Recipe
from fedmuon.privacy import masks
from fedmuon.privacy.mechanisms.distributed import masked

KEPT = "fedmuon-key"  # in the node's memory, from the question for the key to the masked reply


def key(message: Message, context: Context) -> Message:
    """A fresh public key; the private one stays with the node, in place of any that is there."""
    private, public = masks.fresh()
    context.state[KEPT] = ConfigRecord({"private": private})
    return answer(message, {"who": ConfigRecord({"partition": partition(context), "key": public})})


def hidden(recipe: Recipe, reply: Reply, message: Message, context: Context) -> Reply:
    """The reply with the client's mask of this round, whose key is forgotten."""
    assert recipe.client_level is not None
    if KEPT not in context.state:
        raise InputError("this client has no key for a mask: ask for its public key first")
    kept: Any = context.state.pop(KEPT)
    private = kept["private"]
    keys = _roster(message, recipe.client_level.cohort)
    if keys.get(reply.client) != masks.public_of(private):
        raise InputError("the message's public keys are not those of this round: ask for new ones")
    vectors = {"model": reply.params, **reply.states}
    count = sum(one.numel() for held in vectors.values() for one in held.values())
    states = masked(vectors, masks.mask(private, reply.client, keys, count))
    return replace(reply, params=states.pop("model"), states=states)


def _roster(message: Message, cohort: int) -> dict[int, bytes]:
    """Who takes part, each with a key of its own: fewer would add fewer shares of noise."""
    held: dict[str, Any] = dict(message.content.config_records["roster"])
    found = dict(zip(held["clients"], held["keys"], strict=True))
    if not len(found) == len(set(found.values())) == len(held["clients"]) == cohort:
        raise InputError(f"the message does not name a public key of each of {cohort} clients")
    return found
