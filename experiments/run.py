"""`fedmuon run`: run one experiment on the engine that its config names."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from fedmuon.config.load import Config, absolute_paths, flatten, load
from fedmuon.config.methods import has
from fedmuon.config.schema import reads
from fedmuon.core.cores import few_free_cores
from fedmuon.core.errors import InputError, shown
from fedmuon.core.locks import held
from fedmuon.experiments.engines.ray_cluster import quiet_ray, require_cluster
from fedmuon.federated.build import resolve
from fedmuon.federated.experiment import Engine
from fedmuon.federated.rounds import run_rounds
from fedmuon.runs.callbacks import Callback, Listener
from fedmuon.runs.config_notes import config_notes
from fedmuon.runs.data_notes import data_notes
from fedmuon.runs.directory import NO_FILES, Record, RunDirectory
from fedmuon.runs.loop import OnRoundEnd, OnStart, train
from fedmuon.runs.prepare import prepare
from fedmuon.runs.provenance import Others

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


@functools.cache
def warn_once(words: str) -> None:
    """Log a note. Runs of one process that have the same note, as in a sweep, log it once."""
    logger.warning("fedmuon: %s", words)


def execute(
    config: Config | None,
    out: Path,
    resume: bool = False,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
    verbose: bool = False,
    callbacks: Sequence[Callback | Listener] = (),
    more_files: Mapping[str, bytes] = NO_FILES,
    say: Callable[[str], object] = lambda sentence: None,
    warn: Callable[[str], object] = warn_once,
) -> Record:
    """Run the experiment in a folder, or resume it, and return its summary.

    Args:
        config: The config to run, or None for the config of the run that is resumed.
        out: The run folder.
        resume: Whether the folder may contain an unfinished run with the same config.
        on_round_end: A function that is called after each round with the record of the round.
        on_start: A function that is called once, with the number of finished rounds and the number
            of all rounds.
        verbose: Whether to show the logs of Ray and Flower.
        callbacks: Callbacks that are called after each round.
        more_files: Files that later steps add to the run folder. The dictionary `more_files` maps
            the name of a file to its initial content.
        say: A function that is called with each sentence about the data, before the first round.
        warn: A function that is called with each note on the config or the machine.
    """
    if config is not None and config.engine.name == "deployment":  # runs in separate processes
        config = absolute_paths(config)
    config = _config_to_resume(config, out) if resume else (config or Config())
    if config.engine.name == "deployment":
        if config.given or callbacks:
            raise InputError(
                "objects that are passed in Python cannot reach the processes of a deployment. "
                "Install the objects on every node and name them in the config as "
                "package.module:object, or use [engine] name = 'ray'."
            )
        # This import loads cryptography, which only a deployment needs.
        from fedmuon.experiments.engines.deployment import deploy

        return deploy(config, out, True, on_round_end, on_start, resume)
    others = Others()
    with held(out):
        fresh = not (out / "config.toml").exists()
        resolved = resolve(config, resumed=config if resume else None)
        if resolved.engine.name == "ray":
            require_cluster(resolved.engine.ray_address)
        run = prepare(resolved, out, resume, callbacks, more_files=more_files)
        for sentence in data_notes(run.config, run.data):
            say(sentence)
        notes = config_notes(run.config, run.data, run.experiment) if fresh else []
        if run.config.engine.name == "inline":
            notes.append(few_free_cores(torch.get_num_threads(), others.cores()))
        for words in filter(None, notes):
            warn(words)
        return on_engine(
            run.config, lambda engine: train(run, engine, on_round_end, on_start), verbose
        )


def on_engine(config: Config, work: Callable[[Engine], Result], verbose: bool = False) -> Result:
    """Call `work` with the engine of the config, which runs clients in this process or on Ray."""
    if config.engine.name == "inline":
        return work(run_rounds)
    quiet_ray()
    # These modules import Ray and Flower.
    if has(config.local.recipe, "gossip"):
        from fedmuon.experiments.engines.ray_gossip import with_ray_nodes

        return with_ray_nodes(config, work, verbose)
    from fedmuon.experiments.engines import ray_engine
    from fedmuon.server.strategy import FlowerEngine

    return ray_engine.with_ray_grid(config, lambda grid: work(FlowerEngine(config, grid)), verbose)


def _config_to_resume(config: Config | None, out: Path) -> Config:
    """Return the config of the run to resume. A passed config must have the same values."""
    if config is not None and not (out / "config.toml").exists():
        return config
    directory = RunDirectory(out)
    file = directory.config_to_resume()
    directory.require_config()
    written = load(file)
    if config is None:
        return written
    written = written.with_objects(config.given)
    if (passed := resolve(config, resumed=written)) != written:
        if changed := _changed_data(config, written, passed):
            raise InputError(
                f"{changed} Restore the file or folder to resume the run. To train on the new "
                "samples, leave --resume out and choose another folder with --out."
            )
        raise InputError(
            f"the settings in {file} differ from the settings that you passed"
            f"{_first_difference(written, passed)}. To resume the run, leave out the config or "
            "the option that changes the value. If the run uses your "
            "own Python objects, pass the same objects again. To start a new run, leave --resume "
            "out and choose another folder with --out."
        )
    return written


def _changed_data(config: Config, written: Config, passed: Config) -> str:
    """Return a sentence if only values that the samples determine differ, otherwise "".

    Such a value is in no setting, for example the number of samples in the files of `data.folder`.
    """
    if not (reads(passed, "data.folder") and passed.data.folder):
        return ""
    old, new = flatten(written), flatten(passed)
    different = [key for key in new | old if old.get(key) != new.get(key)]  # in config order
    settings, defaults = flatten(config), flatten(Config())
    if any(settings.get(key) != defaults.get(key) for key in different):
        return ""
    key = different[0]
    was, now = (shown(values[key]) if key in values else "not set" for values in (old, new))
    return (
        f"{passed.data.folder} changed since the run started: {key} was {was}, and is {now} with "
        "the present samples."
    )


def _first_difference(written: Config, passed: Config) -> str:
    """Return the first key that differs, with both values, as the end of a clause."""
    old, new = flatten(written), flatten(passed)
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            values = [shown(flat[key]) if key in flat else "not set" for flat in (old, new)]
            return f": {key} is {values[0]} in the file, but {values[1]} in your settings"
    return ""
