"""`fedmuon run`: one experiment on the engine that its config names."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fedmuon.config import load as tables
from fedmuon.config.load import Config
from fedmuon.config.paths import with_files
from fedmuon.core.errors import InputError
from fedmuon.core.locks import held
from fedmuon.federated import build
from fedmuon.federated.rounds import Engine, run_rounds
from fedmuon.optim.recipe_tables import aux_rate
from fedmuon.runs.callbacks import Callback, Heard
from fedmuon.runs.directory import NO_FILES, Record, RunDirectory
from fedmuon.runs.loop import Begin, Watch, drive, prepare

Result = TypeVar("Result")


def execute(
    config: Config | None,
    out: Path,
    resume: bool = False,
    watch: Watch = lambda record: None,
    begun: Begin = lambda done, total: None,
    verbose: bool = False,
    callbacks: Sequence[Callback | Heard] = (),
    beside: Mapping[str, bytes] = NO_FILES,
) -> Record:
    """Run, or go on with, the experiment in `out`, with files `beside` its own that tell what shall
    follow; returns its summary."""
    if config is not None and config.engine.name == "deployment":  # whose processes are elsewhere
        config = with_files(config)
    config = _agreed(config, out) if resume else (config or Config())
    if config.engine.name == "deployment":
        _require_importable(config, callbacks)
        from fedmuon.experiments.engines.deploy import deploy

        return deploy(config, out, True, watch, begun, resume)
    with held(out):
        settled = _as_written(config, build.resolve(config)) if resume else build.resolve(config)
        if settled.engine.name == "ray":
            from fedmuon.experiments.engines.ray_cluster import require_cluster  # for Ray alone

            require_cluster(settled.engine.ray_address)
        prepared = prepare(settled, out, resume, callbacks, beside=beside)
        return on_engine(
            prepared.config, lambda engine: drive(prepared, engine, watch, begun), verbose
        )


def on_engine(config: Config, work: Callable[[Engine], Result], verbose: bool = False) -> Result:
    """Do `work` with the clients in this process or on Ray, as the config names it."""
    if config.engine.name == "inline":
        return work(run_rounds)
    from fedmuon.experiments.engines.ray_engine import engine, on_grid

    return on_grid(config, lambda grid: work(engine(config, grid)), verbose)


def _require_importable(config: Config, callbacks: Sequence[Callback | Heard]) -> None:
    if config.given or callbacks:
        raise InputError(
            "a deployment's processes cannot be handed objects: name them in the config as "
            "package.module:object, installed where they run, or use [engine] name = 'ray'"
        )


def _agreed(config: Config | None, out: Path) -> Config:
    """The config of the run to resume; one that is given must say the same."""
    if config is not None and not (out / "config.toml").exists():
        return config
    file = tables.to_resume(out)
    RunDirectory(out).require_config()
    there = tables.load(file)
    if config is None:
        return there
    there = there.beside(config.given)
    if _as_written(there, _with_noise_of(there, build.resolve(config))) != there:
        raise InputError(
            f"{file} is another experiment than the config given: leave the config out, and give "
            "the same objects if there were any, to resume it, or choose another folder with --out"
        )
    return there


def _as_written(there: Config, given: Config) -> Config:
    """The config with aux-lr = 0 where the run to resume has it: older versions wrote no number."""
    if there.local.aux_lr or given.local.aux_lr != aux_rate(there.local):
        return given
    return given.model_copy(update={"local": given.local.model_copy(update={"aux_lr": 0.0})})


def _with_noise_of(there: Config, given: Config) -> Config:
    """The config with the noise that was found for the epsilon that it asks for."""
    if given.privacy.noise or not given.privacy.epsilon:
        return given
    privacy = given.privacy.model_copy(update={"noise": there.privacy.noise})
    return given.model_copy(update={"privacy": privacy})
