"""Mask the replies of a client, so that the server can read only the sum of a round's replies.

A client creates a pair of keys when the server requests the public key. It stores the private key
until its reply.
"""

from typing import Any

from flwr.app import ConfigRecord, Context, Message

from fedmuon.clients.messages import answer, partition
from fedmuon.core.errors import InputError
from fedmuon.optim.stage import Reply
from fedmuon.privacy.mechanisms import distributed

KEPT = "fedmuon-key"  # name of the record with the private key in the node's context


def key(message: Message, context: Context) -> Message:
    """Create a new pair of keys, store the private key, and reply with the public key."""
    private, public = distributed.key_pair()
    context.state[KEPT] = ConfigRecord({"private": private})
    return answer(message, {"who": ConfigRecord({"partition": partition(context), "key": public})})


def mask_reply(cohort: int, reply: Reply, message: Message, context: Context) -> Reply:
    """Add the client's mask of this round to the reply, and delete the client's private key.

    All public keys of the `cohort` clients must be different. If keys were equal, the sum could
    contain fewer clients, and thus fewer shares of noise.
    """
    if KEPT not in context.state:
        raise InputError(
            "the server requests a masked reply, but this client has no private key for its "
            "mask. The client's node may have restarted during the round. Continue the run on "
            "the server with --resume, which creates new keys."
        )
    keypair: Any = context.state.pop(KEPT)
    private = keypair["private"]
    roster: dict[str, Any] = dict(message.content.config_records["roster"])
    keys = dict(zip(roster["clients"], roster["keys"], strict=True))
    if not len(keys) == len(set(keys.values())) == len(roster["clients"]) == cohort:
        raise InputError(
            f"the server's message must contain one public key for each of the {cohort} clients, "
            "all of them different, but keys are missing or equal. Continue the run on the "
            "server with --resume, which creates new keys."
        )
    if keys.get(reply.client) != distributed.public_of(private):
        raise InputError(
            f"the public key of client {reply.client} in the server's message is not the key that "
            "this client sent for this round. Continue the run on the server with --resume, "
            "which creates new keys."
        )
    count = sum(value.numel() for tree in reply.trees.values() for value in tree.values())
    mask = distributed.mask(private, reply.client, keys, count)
    return reply.with_trees(distributed.masked(reply.trees, mask))
