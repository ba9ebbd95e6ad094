"""`fedmuon run`: one experiment on the engine that its config names."""

from pathlib import Path

from fedmuon import config as tables
from fedmuon.config import Config
from fedmuon.errors import InputError
from fedmuon.federated import setup
from fedmuon.federated.simulate import rounds
from fedmuon.locks import held
from fedmuon.run import Begin, Watch, drive, prepare
from fedmuon.storage import Record, RunDirectory


def execute(
    config: Config | None,
    out: Path,
    resume: bool = False,
    watch: Watch = lambda record: None,
    begun: Begin = lambda done, total: None,
    verbose: bool = False,
) -> Record:
    """Run, or go on with, the experiment in `out`; returns its summary."""
    config = _agreed(config, out) if resume else (config or Config())
    if config.engine.name == "deployment":
        from experiments.deploy import deploy

        return deploy(config, out, True, watch, begun, resume)
    with held(out):
        prepared = prepare(setup.resolve(config), out, resume)
        if config.engine.name == "ray":
            from experiments.ray_engine import run_on_ray

            return run_on_ray(prepared, watch, begun, verbose)
        return drive(prepared, rounds, watch, begun)


def _agreed(config: Config | None, out: Path) -> Config:
    """The config of the run to resume; one that is given must say the same."""
    file = out / "config.toml"
    if not file.exists():
        if config is None:
            raise InputError(
                f"{out} holds no config.toml, so there is nothing to resume: begin without --resume"
            )
        return config
    RunDirectory(out).require_config()
    there = tables.load(file)
    if config is not None and _with_noise_of(there, setup.resolve(config)) != there:
        raise InputError(
            f"{file} is another experiment than the config given: leave the config out to resume "
            "it, or choose another folder with --out"
        )
    return there


def _with_noise_of(there: Config, given: Config) -> Config:
    """The config with the noise that was found for the epsilon that it asks for."""
    if given.privacy.noise or not given.privacy.epsilon:
        return given
    privacy = given.privacy.model_copy(update={"noise": there.privacy.noise})
    return given.model_copy(update={"privacy": privacy})
