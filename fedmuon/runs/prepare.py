"""From a config to a run folder with all files that no longer change once the run has begun."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmuon.config.user_objects import guard, make_named
from fedmuon.core.errors import Guard
from fedmuon.data.federated import FederatedData
from fedmuon.federated.accountant import require_accountable, with_noise
from fedmuon.federated.build import ResolvedConfig, build_experiment
from fedmuon.federated.build_recipe import build_recipe
from fedmuon.federated.client_data import build_data, forget_source, read_source
from fedmuon.federated.client_states import ClientStates
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin
from fedmuon.runs import fingerprints
from fedmuon.runs.callbacks import CALLBACKS, Callback, Listener, as_callback
from fedmuon.runs.directory import CLIENT_STATES, NO_FILES, RunDirectory
from fedmuon.runs.fixed_files import fixed_files


@dataclass(frozen=True)
class Run:
    """An experiment, with its data and its run folder."""

    config: ResolvedConfig
    data: FederatedData
    experiment: Experiment
    directory: RunDirectory
    callbacks: tuple[Callback, ...] = ()


def prepare(
    config: ResolvedConfig,
    out: Path,
    resume: bool = False,
    callbacks: Sequence[Callback | Listener] = (),
    require: Callable[[Experiment], object] = lambda experiment: None,
    more_files: Mapping[str, bytes] = NO_FILES,
) -> Run:
    """Build the experiment, and write all files that no longer change once the run has begun.

    Args:
        config: The resolved config. If it sets a target epsilon and no noise, config.toml of the
            run contains the noise that reaches this epsilon.
        out: The run folder.
        resume: Whether the folder may contain a run to resume.
        callbacks: Callbacks, which are called before the callback that the config names.
        require: A function that may raise an error about the experiment before any file is written.
        more_files: Names of further files that grow during the run, with their first bytes.
    """
    source = read_source(config)
    objects = fingerprints.described(config, out, source, afresh=not resume)
    recorded = fingerprints.require_same(out, objects) if resume else {}
    data = build_data(config, source)
    del source
    if config.engine.name != "inline":
        forget_source()  # clients in other processes read their own source
    experiment = build_experiment(config, data)
    plan, factors = fingerprints.with_factors(experiment.plan, config, recorded)
    experiment = dataclasses.replace(experiment, plan=plan, measured=config.output.clients)
    fresh = begin(experiment.recipe, experiment.task, config.federation.seed)
    if experiment.recipe.private:
        noisy = with_noise(config, experiment, data.sizes, fresh.params)
        if noisy is not config:
            config, recipe = noisy, build_recipe(noisy, experiment.task)
            experiment = dataclasses.replace(experiment, recipe=recipe)
        require_accountable(config, experiment, data.sizes, fresh)
    require(experiment)
    directory = RunDirectory(out)
    if resume:
        directory.require_resumable()
    directory.create(resume)
    contents = fixed_files(config, data, experiment, fresh, directory)
    digests = objects | factors
    if digests and (recorded or not (out / "summary.json").exists()):  # older runs may lack it
        contents[fingerprints.FILE] = (json.dumps(digests, sort_keys=True) + "\n").encode()
    directory.fix(contents, more_files)
    if experiment.recipe.keeps_states:
        memory = ClientStates(out / CLIENT_STATES, directory.run_id)
        experiment = dataclasses.replace(experiment, client_states=memory)
    return Run(config, data, experiment, directory, _callbacks(config, callbacks))


def _callbacks(
    config: ResolvedConfig, callbacks: Sequence[Callback | Listener]
) -> tuple[Callback, ...]:
    """Return these callbacks and the callback that the config names, within guards."""
    of_config = make_named(config, "callback", CALLBACKS, (Callback,))
    with Guard("callbacks", callbacks):
        passed = [*callbacks]
    guarded = [*map(as_callback, passed)]
    if of_config is not None:
        guarded.append(as_callback(of_config, guard(config, "callback")))
    return tuple(guarded)
