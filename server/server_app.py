"""The ServerApp of `flwr run`: run config -> run directory, round by round."""

import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedmuon.config import unflatten
from fedmuon.federated import setup
from fedmuon.run import Begin, Run, Watch, drive, prepare
from fedmuon.storage import Record
from server.strategy import FedMuonStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes."""
    flat = dict(context.run_config)
    root = Path(os.environ.get("FEDMUON_RUNS", str(flat.pop("out", "") or "runs")))
    config = setup.resolve(unflatten(flat))
    run = prepare(config, root / str(context.run_id), resume=True)
    summary = serve(run, grid)
    print(f"Results are in {run.directory.path}: {summary}")


def serve(
    run: Run,
    grid: Grid,
    watch: Watch = lambda record: None,
    begun: Begin = lambda done, total: None,
) -> Record:
    """Drive a run with the clients behind the grid."""
    return drive(
        run,
        lambda experiment, state: FedMuonStrategy(run.config, experiment, state).rounds(grid),
        watch,
        begun,
    )
