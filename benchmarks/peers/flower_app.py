"""FedMuon as a plain Flower app: a ServerApp with the message API, on Flower's Ray simulation.

    python flower_app.py WORK.npz OUT.npz

With RAY_GRID=1, the same app runs through `fedmuon.flower.simulate` instead.

The app uses twenty supernodes, one CPU per client, and Flower's defaults for all other settings.
Node ids are random, so the server asks each node for its partition before the clock starts. This
also starts the workers, which is to Flower's advantage.
"""

from __future__ import annotations

import os

# Flower and Ray read these variables at import. They switch off telemetry and update checks.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from collections.abc import Iterable
from time import perf_counter, sleep

import torch
from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor
from work import Work, load_work, paths, report


def exchange(grid: Grid, nodes: Iterable[int], kind: str, records: dict) -> list[Message]:
    """Send the same records to these nodes, and wait for all replies. Raise on an error reply."""
    outgoing = [Message(RecordDict(records), dst_node_id=node, message_type=kind) for node in nodes]
    replies = list(grid.send_and_receive(outgoing))
    for reply in replies:
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
    return replies


def node_of_partition(grid: Grid, clients: int, config: ConfigRecord) -> dict[int, int]:
    """Wait for all nodes, ask each for its partition, and return the node of each partition."""
    while len(nodes := list(grid.get_node_ids())) < clients:
        sleep(0.1)
    replies = exchange(grid, nodes, MessageType.QUERY, {"config": config})
    return {
        int(reply.content.config_records["node"]["partition"]): reply.metadata.src_node_id  # type: ignore[arg-type]
        for reply in replies
    }


def average(replies: list[Message]) -> dict[str, Tensor]:
    """Return the mean of X and of M over the replies, with weight 1/K each."""
    states = [reply.content.array_records["arrays"].to_torch_state_dict() for reply in replies]
    return {key: torch.stack([state[key] for state in states]).mean(dim=0) for key in states[0]}


def serve(grid: Grid, work: Work, config: ConfigRecord) -> tuple[Tensor, list[float]]:
    """Run every round of the schedule. Return the final X [d, c] and R + 1 clock readings."""
    node = node_of_partition(grid, work.clients, config)
    weight = torch.from_numpy(work.x0.T.copy())
    state = {"weight": weight, "momentum": torch.zeros_like(weight)}
    stamps = [perf_counter()]
    for chosen in work.schedule.tolist():
        records = {"arrays": ArrayRecord(state), "config": config}
        nodes = [node[client] for client in chosen]
        state = average(exchange(grid, nodes, MessageType.TRAIN, records))
        stamps.append(perf_counter())
    return state["weight"].T, stamps


def main() -> None:
    """Simulate the work file's trajectory and report it."""
    path, out = paths("usage: flower_app.py WORK.npz OUT.npz")
    work = load_work(path)
    config = ConfigRecord({"work": path, "lr": work.lr, "lam": work.lam, "beta": work.beta})
    server_app = ServerApp()

    @server_app.main()
    def run(grid: Grid, context: Context) -> None:
        x, stamps = serve(grid, work, config)
        report("flower", out, x.numpy(), stamps)

    if os.environ.get("RAY_GRID"):
        from fedmuon.experiments.engines.flower_simulation import simulate

        simulate(server_app, client_app, work.clients)
        return
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=work.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    main()
