"""The ServerApp for `flwr run`, which runs the experiment that a run config describes."""

import os
import time
from logging import ERROR, INFO, WARNING
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.locks import held
from fedmuon.federated.build import resolve
from fedmuon.runs.config_notes import config_notes
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import prepare
from fedmuon.server import stopping
from fedmuon.server.run_config import OUT, require_noise, unpacked
from fedmuon.server.strategy import FlowerEngine

SIMULATED_PATIENCE = 5.0  # seconds; simulated nodes are available immediately
PAUSE = 0.1

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes, and log an InputError as one line."""
    out = str(context.run_config.get(OUT, ""))
    folder = Path(out or Path(os.environ.get("FEDMUON_RUNS", "runs"), str(context.run_id)))
    try:
        with stopping.on_signals(), held(folder):
            # Set the engine that really runs the experiment.
            kind = "ray" if isinstance(grid, InMemoryGrid) else "deployment"
            config = unpacked(context.run_config, kind)
            require_noise(config, folder)
            fresh = not (folder / "config.toml").exists()
            run = prepare(resolve(config), folder, resume=True)
            for words in config_notes(run.config, run.data, run.experiment) if fresh else ():
                log(WARNING, "fedmuon: %s", words)
            log(INFO, "fedmuon writes %s", run.directory.path.resolve())
            await_nodes(run.config, grid)
            train(run, FlowerEngine(run.config, grid))
    except InputError as error:
        log(ERROR, "fedmuon: %s", error)
        raise
    log(INFO, "fedmuon: the results are in %s", run.directory.path.resolve())


def await_nodes(config: Config, grid: Grid) -> None:
    """With the fault policy `strict`, wait until enough SuperNodes are connected."""
    expected, patience = config.federation.clients, config.faults.patience
    if config.faults.policy != "strict":
        return
    advice = f"Start {expected} SuperNodes"
    if isinstance(grid, InMemoryGrid):
        advice = f"Run with --federation-config num-supernodes={expected}"
        patience = min(patience, SIMULATED_PATIENCE)
    end = time.monotonic() + patience
    while (connected := len(list(grid.get_node_ids()))) < expected:
        if time.monotonic() > end:
            raise InputError(
                f"[federation] clients is {expected}, but only {connected} SuperNodes are "
                f"connected. {advice}, or lower [federation] clients."
            )
        stopping.pause(PAUSE)
