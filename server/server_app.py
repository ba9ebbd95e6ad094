"""The ServerApp of `flwr run`: run config -> run directory, round by round."""

import os
import time
from logging import ERROR, INFO
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.locks import held
from fedmuon.federated import build
from fedmuon.runs.loop import drive, prepare
from fedmuon.server import stopping
from fedmuon.server.run_config import OUT, require_noise, unpacked
from fedmuon.server.strategy import engine

SIMULATED_PATIENCE = 5.0  # seconds: simulated nodes are there at once
PAUSE = 0.1

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes; what the user can mend is one line."""
    try:
        with stopping.heard(), held(_folder(context)):
            run = prepare(_config(grid, context), _folder(context), resume=True)
            log(INFO, "fedmuon writes %s", run.directory.path.resolve())
            await_nodes(run.config, grid)
            drive(run, engine(run.config, grid))
    except InputError as error:
        log(ERROR, "fedmuon: %s", error)
        raise
    log(INFO, "fedmuon: results are in %s", run.directory.path.resolve())


def await_nodes(config: Config, grid: Grid) -> None:
    """Under `strict`, refuse a federation that stays smaller than the experiment."""
    wanted, patience = config.federation.clients, config.faults.patience
    if config.faults.policy != "strict":
        return
    end = time.monotonic() + (min(patience, SIMULATED_PATIENCE) if _simulated(grid) else patience)
    while (found := len(list(grid.get_node_ids()))) < wanted:
        if time.monotonic() > end:
            simulated = f"run with --federation-config num-supernodes={wanted}"
            mend = simulated if _simulated(grid) else f"start {wanted} SuperNodes"
            raise InputError(
                f"[federation] clients = {wanted}, but the federation has {found} SuperNodes: "
                f"{mend}, or lower federation.clients"
            )
        stopping.pause(PAUSE)


def _config(grid: Grid, context: Context) -> Config:
    """The experiment, with the engine that in truth runs it."""
    kind = "ray" if _simulated(grid) else "deployment"
    config = unpacked(context.run_config, kind)
    require_noise(config, _folder(context))
    return build.resolve(config)


def _folder(context: Context) -> Path:
    """The run directory: `out`, or a folder named after the run."""
    out = str(context.run_config.get(OUT, ""))
    return Path(out) if out else Path(os.environ.get("FEDMUON_RUNS", "runs"), str(context.run_id))


def _simulated(grid: Grid) -> bool:
    return isinstance(grid, InMemoryGrid)
