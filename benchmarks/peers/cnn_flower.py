"""The CNN job as a plain Flower app on Flower's Ray simulation, with one CPU per client.

python cnn_flower.py JOB.npz OUT.npy
"""

from __future__ import annotations

# isort: off
from flower_app import average, exchange, node_of_partition  # first: sets variables for flwr

# isort: on
from time import perf_counter

from cnn_flower_client import app as client_app
from cnn_work import Job, Model, cnn, load, put, report
from flwr.app import ArrayRecord, ConfigRecord, Context, MessageType
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from work import paths


def serve(grid: Grid, job: Job, path: str) -> tuple[Model, list[float]]:
    """Run every round, and return the last model and R + 1 clock readings."""
    nodes = node_of_partition(grid, len(job.offsets) - 1, ConfigRecord({"work": path}))
    model = cnn()
    put(model, job.start)
    state, stamps = model.state_dict(), [perf_counter()]
    for round, chosen in enumerate(job.schedule.tolist()):
        config = ConfigRecord({"work": path, "round": round})
        records = {"arrays": ArrayRecord(state), "config": config}
        state = average(exchange(grid, [nodes[i] for i in chosen], MessageType.TRAIN, records))
        stamps.append(perf_counter())
    return state, stamps


def main() -> None:
    """Simulate the job and report it."""
    path, out = paths("usage: cnn_flower.py JOB.npz OUT.npy")
    job, server_app = load(path), ServerApp()

    @server_app.main()
    def run(grid: Grid, context: Context) -> None:
        report(out, *serve(grid, job, path))

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=len(job.offsets) - 1,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    main()
