"""An app of plain Flower that knows nothing of us: clients count, misbehave on order, and add."""

import os
import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

ROUNDS, NODES = 3, 7
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """The model and the client's number; how often it was asked, as it remembers."""
    number = int(context.node_config["partition-id"])
    before = int(context.state["asked"]["times"]) if "asked" in context.state else 0  # type: ignore
    context.state["asked"] = MetricRecord({"times": before + 1})
    (model,) = message.content["arrays"].to_numpy_ndarrays()  # type: ignore
    orders = message.content.get("config", {})
    if orders.get("raises") == number:  # type: ignore
        raise RuntimeError("the disk of this client is on fire")
    if orders.get("dies") == number:  # type: ignore
        os._exit(1)
    if orders.get("sleeps") == number:  # type: ignore
        time.sleep(600)
    if orders.get("holds") == number:  # type: ignore
        np.ones(25_000_000).sum()
    if orders.get("forgets") == number:  # type: ignore
        del context.state["asked"]
    if orders.get("echoes") == number:  # type: ignore
        return message
    message.content["arrays"] = ArrayRecord([np.full(3, np.nan)])  # its own copy
    content = RecordDict({
        "arrays": ArrayRecord([model + number * orders.get("scale", run_scale(context))]),  # type: ignore
        "metrics": MetricRecord({"num-examples": number + 1, "times": before}),
    })  # fmt: skip
    return Message(content, reply_to=message)


def run_scale(context: Context) -> float:
    return float(context.run_config.get("scale", 1.0))


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Flower's own FedAvg; the model is left in the context."""
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=NODES)
    result = strategy.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=ROUNDS)
    context.state["arrays"] = result.arrays
    context.state["metrics"] = result.train_metrics_clientapp[ROUNDS]
