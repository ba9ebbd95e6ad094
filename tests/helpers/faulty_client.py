"""A ClientApp that misbehaves on order: the real one, and what a file tells it to do wrong.

The file is `$FEDMUON_FAULTS`/orders.json: {"kind", "client", "round", "times"}; every carried-out
order leaves a mark beside it, so that a fault can pass after so many attempts.
"""

import json
import os
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedmuon.clients.client_app import app as sound
from fedmuon.clients.client_app import key, query
from fedmuon.clients.training import deadline

app = ClientApp()
app.query()(query)
app.query("key")(key)


@app.train()
def train(message: Message, context: Context) -> Message:
    """The sound reply, or what was ordered."""
    order = _order(message, context)
    if order == "raise":
        raise RuntimeError("the disk of this client is on fire")
    if order == "kill":
        os.kill(os.getpid(), 9)
    if order == "silent":
        with deadline(message.metadata.ttl):
            time.sleep(600)
    reply = sound(message, context)
    if order:
        _spoil(reply, order)
    return reply


def _order(message: Message, context: Context) -> str | None:
    folder = Path(os.environ["FEDMUON_FAULTS"])
    if not (folder / "orders.json").exists():
        return None
    order = json.loads((folder / "orders.json").read_text())
    here = int(context.node_config["partition-id"])
    round = message.content.config_records["config"]["round"]
    marks = len(list(folder.glob("done-*")))
    if (here, round) != (order["client"], order["round"]) or marks >= order["times"]:
        return None
    (folder / f"done-{marks}").touch()
    return order["kind"]


def _spoil(reply: Message, order: str) -> None:
    record = reply.content.array_records["arrays"]
    arrays = {name: array.numpy().copy() for name, array in record.items()}
    if order == "nan":
        arrays["model.weight"][0, 0] = float("nan")
    if order == "shape":
        arrays["model.weight"] = arrays["model.weight"][:, :-1]
    if order == "wrong-round":
        who = dict(reply.content.config_records["who"])
        reply.content["who"] = ConfigRecord({**who, "round": 99})
    reply.content["arrays"] = ArrayRecord({name: Array(a) for name, a in arrays.items()})
