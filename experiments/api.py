"""The functions of the Python API, such as `run`, `sweep`, `stability`, `gap` and `compare`.

Each function does the same as the command of that name, and also accepts Python objects in place of
names. Without `out`, a run is written to a temporary folder, which is removed with its result.
`Result.save` copies the folder. `fedmuon` imports this module and torch only when one of these
functions is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedmuon.config.load import Config, load, nested, parse, read
from fedmuon.config.typed import Tables
from fedmuon.config.user_objects import NAMED, NOTHING, UserObjects
from fedmuon.core.choices import GIVEN
from fedmuon.core.errors import Guard, InputError, as_keywords, in_python
from fedmuon.core.files import Temporary
from fedmuon.core.threads import without_autocast
from fedmuon.experiments import settings, unlearning
from fedmuon.experiments.certifying.rows import GUESS
from fedmuon.experiments.cli.show import is_wanted, shown
from fedmuon.experiments.inspect.listing import comparison
from fedmuon.experiments.planning import cost
from fedmuon.experiments.results import (
    Comparison,
    Record,
    Result,
    StabilityResult,
    SweepResult,
)
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates
from fedmuon.experiments.stability.finished_run import from_directory
from fedmuon.experiments.suites.suite import here
from fedmuon.experiments.suites.workers import Workers
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data
from fedmuon.optim.routing import RoutingTable
from fedmuon.runs.callbacks import Callback, Listener
from fedmuon.runs.directory import RunDirectory
from fedmuon.runs.fixed_files import routing
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.peft_model import brought_adapters, is_language_peft

if TYPE_CHECKING:
    from fedmuon.experiments.certifying.groups import GroupCertificates
    from fedmuon.experiments.certifying.rows import RiskCertificates
    from fedmuon.experiments.gap_result import GapResult
    from fedmuon.experiments.suite_result import SuiteResult

BROKEN_OFF: list[Temporary] = []  # temporary folders of runs that ended with an error
Configured = Config | Tables | Mapping[str, Any] | str | Path | None


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Temporarily use torch's default settings.

    The caller may have changed these settings. With the defaults, gradients are on, autocast is
    off, and new tensors are float32 and contain data. Worker processes start with the defaults,
    too.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(without_autocast())
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield


@_plainly()
def run(
    config: Configured = None,
    *,
    data: Any = None,
    test: Any = None,
    partition: Any = None,
    task: Any = None,
    recipe: Any = None,
    orthogonalizer: Any = None,
    aggregate: Any = None,
    stage: Any = None,
    schedule: Any = None,
    callbacks: Sequence[Callback | Listener] = (),
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> Result:
    """Run a federated experiment, or resume one.

    A keyword overrides the value in `config`. A keyword accepts a built-in name or your own object.

    Args:
        config: The settings. Pass the path of a TOML file, a dictionary of tables such as
            `{"local": {"lr": 0.1}}`, or a `fedmuon.Config`. A missing key takes its default.
        data: The samples to use in place of the data set in `[data]`. Pass a pair (inputs, labels)
            of arrays, tensors or tables. Or pass a DataFrame, whose label column `[data] target`
            names. Or pass a torch `Dataset`, a Hugging Face dataset, another sequence of pairs or
            dictionaries, a scikit-learn `Bunch`, or a function that returns such data. Arrays of
            uint8 are read as pixels and divided by 255, so convert other features to floats.
        test: Held-out samples, in the same forms as `data`. If you pass `test`, pass `data` too.
        partition: How samples are divided among clients: a name, a list with one index array per
            client, an array with the client of each sample (its name or number), a function
            `(labels, clients, rng)` that returns such a list or array, or a partitioner of
            flwr-datasets.
        task: The model: a name, an `nn.Module`, a pair (module, loss), or `fedmuon.Task(module,
            loss, metrics)`. Of a language model of the package peft (a `PeftModel`), the adapters
            are trained.
        recipe: The optimizer: a name, a `fedmuon.Recipe`, a `fedmuon.Chain`, or a sequence of
            links.
        orthogonalizer: The orthogonalizer: a name, `fedmuon.Orthogonalizer(apply, lipschitz)`, or a
            function on stacks of matrices `[..., m, n]`.
        aggregate: How the server combines replies: a name, a `fedmuon.Aggregator`, or a function of
            the replies of a round.
        stage: A `fedmuon.Stage`, or a list of stages, that change the messages of the run.
        schedule: How the step size changes over rounds. Pass a name, or a function that takes the
            number of the round (0, 1, ...) and returns a factor for `lr`.
        callbacks: Callbacks that are called after each round, such as
            `fedmuon.callbacks.EarlyStopping()` or a function with the arguments `(record, state)`.
            If a callback returns True, the run ends.
        out: The run folder. Without `out`, the folder is temporary. This folder is removed with the
            last result that uses it, or when Python ends. `result.save(path)` copies the folder.
        resume: Whether `out` may contain an interrupted run, which then continues from its last
            checkpoint.
        progress: Whether to show a progress bar. By default, a terminal and a notebook show it, and
            pipes, files, threads and child processes do not.

    Returns:
        The finished run: its summary, the records of its rounds, its model and its curves.

    Raises:
        InputError: If a setting or an object cannot be used. The message names the setting or
            object, and says what to do.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "per-round": 2, "rounds": 2}}
        >>> result = fedmuon.run(small)
        >>> result.summary["rounds"], sorted(result.model)
        (2, ['weight'])
    """
    objects = {
        "data": data, "partition": partition, "task": task, "recipe": recipe,
        "orthogonalizer": orthogonalizer, "aggregate": aggregate, "stage": stage,
        "schedule": schedule,
    }  # fmt: skip
    run_config = _chosen(config, objects, test, resume, out)
    with _folder(out, resume) as (folder, temporary), in_python(), _bar(progress, "rounds") as bar:
        say = print if is_wanted(progress) else lambda sentence: None
        execute(run_config, folder, resume, *bar, callbacks=callbacks, say=say)
    return Result(folder, run_config.given, temporary)


@_plainly()
def sweep(
    config: Configured = None,
    *,
    grid: Mapping[str, Sequence[Any] | str],
    seeds: int = 1,
    select: str | None = None,
    jobs: int = 1,
    data: Any = None,
    test: Any = None,
    partition: Any = None,
    task: Any = None,
    recipe: Any = None,
    orthogonalizer: Any = None,
    aggregate: Any = None,
    stage: Any = None,
    schedule: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> SweepResult:
    """Run a config at every point of a grid, and choose the best point.

    Args:
        config: The settings. Pass the path of a TOML file, a dictionary of tables such as
            `{"local": {"lr": 0.1}}`, or a `fedmuon.Config`. A missing key takes its default.
        grid: A dictionary that maps `table.key` to a list of values or to a range. For example,
            "0.01:10:log7" stands for seven values on a logarithmic scale, and "0:0.9:lin4" stands
            for four values on a linear scale. An empty grid repeats one run with several seeds.
        seeds: Number of runs per point. The first run uses the seed s of the config, the next run
            uses s + 1, and so on.
        select: The metric that chooses the best point. The default is "validation-loss".
            "validation-loss" and "validation-accuracy" require `[data] validation`, and
            "train-loss" does not. With "test-loss" and "test-accuracy", the best value is
            optimistic. "max:NAME" and "min:NAME" select by your own metric.
        jobs: Number of runs that train at the same time, each in its own process. Your objects must
            then be importable in those processes.
        data: The samples to use in place of the data set in `[data]`. Pass a pair (inputs, labels)
            of arrays, tensors or tables. Or pass a DataFrame, whose label column `[data] target`
            names. Or pass a torch `Dataset`, a Hugging Face dataset, another sequence of pairs or
            dictionaries, a scikit-learn `Bunch`, or a function that returns such data. Arrays of
            uint8 are read as pixels and divided by 255, so convert other features to floats.
        test: Held-out samples, in the same forms as `data`. If you pass `test`, pass `data` too.
        partition: How samples are divided among clients: a name, a list with one index array per
            client, an array with the client of each sample (its name or number), a function
            `(labels, clients, rng)` that returns such a list or array, or a partitioner of
            flwr-datasets.
        task: The model: a name, an `nn.Module`, a pair (module, loss), or `fedmuon.Task(module,
            loss, metrics)`.
        recipe: The optimizer: a name, a `fedmuon.Recipe`, a `fedmuon.Chain`, or a sequence of
            links.
        orthogonalizer: The orthogonalizer: a name, `fedmuon.Orthogonalizer(apply, lipschitz)`, or a
            function on stacks of matrices `[..., m, n]`.
        aggregate: How the server combines replies: a name, a `fedmuon.Aggregator`, or a function of
            the replies of a round.
        stage: A `fedmuon.Stage`, or a list of stages, that change the messages of the run.
        schedule: How the step size changes over rounds. Pass a name, or a function that takes the
            number of the round (0, 1, ...) and returns a factor for `lr`.
        out: The folder of the sweep. Without `out`, the folder is temporary, as for `run`.
        resume: Whether `out` may contain an unfinished part of this sweep, which then continues.
        progress: Whether to show a progress bar. By default, a terminal and a notebook show it, and
            pipes, files, threads and child processes do not.

    Returns:
        The table of all points, the best point of each recipe, and every run.

    Raises:
        InputError: If the grid, the metric, a setting or an object cannot be used.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "per-round": 2, "rounds": 2}}
        >>> found = fedmuon.sweep(small, grid={"local.lr": [0.1, 1.0]}, select="train-loss")
        >>> len(found.runs), sorted(found.best)
        (2, ['fedmuon'])
    """
    from fedmuon.experiments.studies.sweep import grid_search, run_grid  # imports matplotlib

    objects = {
        "data": data, "partition": partition, "task": task, "recipe": recipe,
        "orthogonalizer": orthogonalizer, "aggregate": aggregate, "stage": stage,
        "schedule": schedule,
    }  # fmt: skip
    with in_python():
        _require_counts(seeds=seeds, jobs=jobs)
        base, user_objects = _tables_and_objects(config, objects, test)
        work = grid_search(base, grid, seeds, select, given=user_objects)
    workers = Workers(jobs) if jobs > 1 else contextlib.nullcontext()
    with _folder(out, resume) as (folder, temporary), in_python(), _bar(progress, "rounds") as bar:
        with workers as by:
            summary, _ = run_grid(work, folder, resume, by or here, *bar)
        folders = [folder / "runs" / cell.name for cell in work.cells]
    return SweepResult(folder, summary, folders, user_objects, temporary)


@_plainly()
def suite(
    name: str,
    *,
    data: str | None = None,
    scale: str = "full",
    seeds: int | None = None,
    changes: Tables | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> SuiteResult:
    """Run all experiments of a published table or figure, and check the paper's claims.

    Args:
        name: A suite's name, as listed by `fedmuon list suites`, or the path of a TOML file.
        data: The data set, in place of the suite's default.
        scale: "full" for the published grid, which can take hours, or "small" for a short trial.
        seeds: Number of seeds, in place of the suite's default.
        changes: Settings that override settings of the suite, such as `{"local": {"steps": 2}}`.
        out: The folder of the suite. Without `out`, the folder is temporary, as for `run`.
        resume: Whether `out` may contain an unfinished part of this suite, which then continues.
        progress: Whether to show a progress bar. By default, a terminal and a notebook show it, and
            pipes, files, threads and child processes do not.

    Returns:
        The tables of the suite and its claims with their verdicts.

    Raises:
        InputError: If there is no such suite, or an option has no effect on it.

    Example:
        >>> import fedmuon
        >>> found = fedmuon.suite("dp-muon-printed", scale="small")  # slow: ten seconds
        >>> found.summary["scale"]
        'small'
    """
    # These modules import scipy and matplotlib.
    from fedmuon.experiments.studies.find import find
    from fedmuon.experiments.suite_result import SuiteResult
    from fedmuon.experiments.suites.suite import execute as compute

    with in_python():
        tables = {table: dict(keys) for table, keys in (changes or {}).items()}
        work = find(name, data, scale, tables, None, seeds)
    with (
        _folder(out, resume) as (folder, temporary),
        in_python(),
        _bar(progress, work.counted) as bar,
    ):
        summary = compute(work, folder, resume, here, *bar)
    return SuiteResult(folder, summary, temporary)


@_plainly()
def stability(
    config: Configured = None,
    *,
    setting: str | None = None,
    trials: int | None = None,
    neighbours: str | None = None,
    unit: str | None = None,
    probes: int | None = None,
    replacements: int | None = None,
    data: Any = None,
    test: Any = None,
    partition: Any = None,
    task: Any = None,
    recipe: Any = None,
    orthogonalizer: Any = None,
    aggregate: Any = None,
    stage: Any = None,
    schedule: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> StabilityResult:
    """Train a model and neighbours that differ in one sample or client, and check the bound.

    The bound is Theorem 4.1 of the Stability note. The run uses float64 unless the config names
    another precision, because float32 hides small perturbations in rounding.

    Args:
        config: The settings. Pass the path of a TOML file, a dictionary of tables such as
            `{"local": {"lr": 0.1}}`, or a `fedmuon.Config`. A missing key takes its default.
        setting: Name of a setting that takes the place of `config`: "controlled" or "certified".
            `fedmuon list settings` describes them.
        trials: Number of neighbours, 10 by default. Leave `trials` out with `neighbours="all"`.
        neighbours: How a neighbouring data set is chosen. "own": a random sample of a random client
            is replaced by a held-out sample, whose label is drawn from the client's labels. "any":
            the label is drawn from the labels of all clients. "worst": the pairs of a sample and a
            replacement that change the model most, as estimated from derivatives. "all": each
            sample is replaced once.
        unit: What differs between neighbouring data sets. "samples": one sample (the default).
            "clients": all samples of one client. "removed-clients": one client has no samples, so
            its gradient is 0.
        probes: Number of random probes with which derivatives through the run predict the gap. With
            0, no gap is predicted. The default is 8 for the matrix task, and 0 for networks, where
            a prediction takes many times as long as the run. It is an estimate and no bound.
        replacements: Number of random samples for an exact check of the prediction: the run trains
            again with one sample replaced. 0 by default.
        data: The samples to use in place of the data set in `[data]`. Pass a pair (inputs, labels)
            of arrays, tensors or tables. Or pass a DataFrame, whose label column `[data] target`
            names. Or pass a torch `Dataset`, a Hugging Face dataset, another sequence of pairs or
            dictionaries, a scikit-learn `Bunch`, or a function that returns such data. Arrays of
            uint8 are read as pixels and divided by 255, so convert other features to floats.
        test: Held-out samples, in the same forms as `data`. If you pass `test`, pass `data` too.
        partition: How samples are divided among clients: a name, a list with one index array per
            client, an array with the client of each sample (its name or number), a function
            `(labels, clients, rng)` that returns such a list or array, or a partitioner of
            flwr-datasets.
        task: The model: a name, an `nn.Module`, a pair (module, loss), or `fedmuon.Task(module,
            loss, metrics)`.
        recipe: The optimizer: a name, a `fedmuon.Recipe`, a `fedmuon.Chain`, or a sequence of
            links.
        orthogonalizer: The orthogonalizer: a name, `fedmuon.Orthogonalizer(apply, lipschitz)`, or a
            function on stacks of matrices `[..., m, n]`.
        aggregate: How the server combines replies: a name, a `fedmuon.Aggregator`, or a function of
            the replies of a round.
        stage: A `fedmuon.Stage`, or a list of stages, that change the messages of the run.
        schedule: How the step size changes over rounds. Pass a name, or a function that takes the
            number of the round (0, 1, ...) and returns a factor for `lr`.
        out: The run folder. Without `out`, the folder is temporary. This folder is removed with the
            last result that uses it, or when Python ends. `result.save(path)` copies the folder.
        resume: Whether `out` may contain an interrupted run, which then continues from its last
            checkpoint.
        progress: Whether to show a progress bar. By default, a terminal and a notebook show it, and
            pipes, files, threads and child processes do not.

    Returns:
        The finished run with the perturbation of each neighbour and the bound.

    Raises:
        InputError: If a setting or an object cannot be used.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2},
        ...          "local": {"lr": 0.01, "steps": 1}, "orthogonalizer": {"lambda": 0.1}}
        >>> result = fedmuon.stability(small, trials=2)
        >>> len(result.neighbours), result.bound["status"]
        (2, 'certified')
        >>> all(one["perturbation"] <= one["certificate"] for one in result.neighbours)
        True
    """
    # These modules import scipy.
    from fedmuon.experiments.stability import neighbours as runs
    from fedmuon.experiments.stability import prediction

    config = settings.instead_of(config, setting)
    objects = {
        "data": data, "partition": partition, "task": task, "recipe": recipe,
        "orthogonalizer": orthogonalizer, "aggregate": aggregate, "stage": stage,
        "schedule": schedule,
    }  # fmt: skip
    options = {"trials": trials, "neighbours": neighbours, "unit": unit, "probes": probes,
               "replacements": replacements}  # fmt: skip
    table = {name: value for name, value in options.items() if value is not None}
    extra = {"stability": table} if table else {}
    run_config = _chosen(config, objects, test, resume, out, extra)
    if probes:
        prediction.require_prediction(run_config)
    with (
        _folder(out, resume) as (folder, temporary),
        in_python(),
        _bar(progress, "neighbours") as bar,
    ):
        runs.execute(certificates.in_float64(run_config), folder, resume, *bar)
    return StabilityResult(folder, run_config.given, temporary)


@_plainly()
def gap(
    config: Configured = None,
    *,
    setting: str | None = None,
    grid: Mapping[str, Sequence[Any] | str] | None = None,
    seeds: int = 1,
    together: bool = False,
    probes: int | None = None,
    replacements: int | None = None,
    jobs: int = 1,
    data: Any = None,
    test: Any = None,
    partition: Any = None,
    task: Any = None,
    recipe: Any = None,
    orthogonalizer: Any = None,
    aggregate: Any = None,
    stage: Any = None,
    schedule: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> GapResult:
    """Compare the measured generalization gap with its bound, at every point of a grid.

    The bound is Theorem 4.1 of the Stability note, in each of its proved forms. The runs use
    float64 unless the config names another precision.

    Args:
        config: The settings. Pass the path of a TOML file, a dictionary of tables such as
            `{"local": {"lr": 0.1}}`, or a `fedmuon.Config`. A missing key takes its default.
        setting: Name of a setting that takes the place of `config`: "controlled" or "certified".
            `fedmuon list settings` describes them.
        grid: A dictionary that maps `table.key` to a list of values or to a range, as for
            `fedmuon.sweep`. Without `grid`, there is one setting.
        seeds: Number of runs per setting. The first run uses the seed s of the config, the next run
            uses s + 1, and so on.
        together: Whether to divide δ by the number of bounds, so that all bounds hold together.
        probes: Number of random probes with which derivatives through the run predict the gap. With
            0, no gap is predicted. The default is 8 for the matrix task, and 0 for networks, where
            a prediction takes many times as long as the run. It is an estimate and no bound.
        replacements: Number of random samples for an exact check of the prediction: the run trains
            again with one sample replaced. 0 by default.
        jobs: Number of runs that train at the same time, each in its own process. Your objects must
            then be importable in those processes.
        data: The samples to use in place of the data set in `[data]`. Pass a pair (inputs, labels)
            of arrays, tensors or tables. Or pass a DataFrame, whose label column `[data] target`
            names. Or pass a torch `Dataset`, a Hugging Face dataset, another sequence of pairs or
            dictionaries, a scikit-learn `Bunch`, or a function that returns such data. Arrays of
            uint8 are read as pixels and divided by 255, so convert other features to floats.
        test: Held-out samples, in the same forms as `data`. If you pass `test`, pass `data` too.
        partition: How samples are divided among clients: a name, a list with one index array per
            client, an array with the client of each sample (its name or number), a function
            `(labels, clients, rng)` that returns such a list or array, or a partitioner of
            flwr-datasets.
        task: The model: a name, an `nn.Module`, a pair (module, loss), or `fedmuon.Task(module,
            loss, metrics)`.
        recipe: The optimizer: a name, a `fedmuon.Recipe`, a `fedmuon.Chain`, or a sequence of
            links.
        orthogonalizer: The orthogonalizer: a name, `fedmuon.Orthogonalizer(apply, lipschitz)`, or a
            function on stacks of matrices `[..., m, n]`.
        aggregate: How the server combines replies: a name, a `fedmuon.Aggregator`, or a function of
            the replies of a round.
        stage: A `fedmuon.Stage`, or a list of stages, that change the messages of the run.
        schedule: How the step size changes over rounds. Pass a name, or a function that takes the
            number of the round (0, 1, ...) and returns a factor for `lr`.
        out: The folder of the result. Without `out`, the folder is temporary, as for `run`.
        resume: Whether `out` may contain an unfinished part of this result, which then continues.
        progress: Whether to show a progress bar. By default, a terminal and a notebook show it, and
            pipes, files, threads and child processes do not.

    Returns:
        The gap and the bound of every setting, the picture, and every run.

    Raises:
        InputError: If the grid, a setting or an object cannot be used.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2}, "task": {"initial": "zero"},
        ...          "local": {"steps": 1}, "orthogonalizer": {"lambda": 0.1}}
        >>> found = fedmuon.gap(small, grid={"local.lr": [0.01, 0.1]})
        >>> all(row["gap"] <= row["bound"] for row in found.table)
        True
    """
    # These modules import scipy and matplotlib.
    from fedmuon.experiments.gap_result import GapResult
    from fedmuon.experiments.studies import gap_grid
    from fedmuon.experiments.studies.sweep import grid_search

    objects = {
        "data": data, "partition": partition, "task": task, "recipe": recipe,
        "orthogonalizer": orthogonalizer, "aggregate": aggregate, "stage": stage,
        "schedule": schedule,
    }  # fmt: skip
    with in_python():
        _require_counts(seeds=seeds, jobs=jobs)
        base, user_objects = _tables_and_objects(
            settings.instead_of(config, setting), objects, test
        )
        select = "train-loss" if grid else None  # every run records it; nothing is chosen
        options = {"probes": probes, "replacements": replacements}
        table = {name: value for name, value in options.items() if value is not None}
        base["stability"] = {**base.get("stability", {}), **table}
        search = grid_search(base, {} if grid is None else grid, seeds, select, given=user_objects)
        if probes:
            gap_grid.require_predictions(search)
        work = gap_grid.gap_grid(search, together)
    workers = Workers(jobs) if jobs > 1 else contextlib.nullcontext()
    with (
        _folder(out, resume) as (folder, temporary),
        in_python(),
        _bar(progress, work.counted) as bar,
    ):
        with workers as by:
            summary, _ = gap_grid.run_gaps(work, folder, resume, by or here, *bar)
        folders = [folder / "runs" / cell.name for cell in work.cells]
    return GapResult(folder, summary, folders, user_objects, temporary)


@in_python()
@_plainly()
def plan(
    config: Configured = None,
    *,
    data: Any = None,
    test: Any = None,
    partition: Any = None,
    task: Any = None,
    recipe: Any = None,
    orthogonalizer: Any = None,
    aggregate: Any = None,
    stage: Any = None,
    schedule: Any = None,
) -> Record:
    """Estimate the time, memory and traffic of a run from a short trial.

    The trial takes a few seconds and writes no files.

    Args:
        config: The settings. Pass the path of a TOML file, a dictionary of tables such as
            `{"local": {"lr": 0.1}}`, or a `fedmuon.Config`. A missing key takes its default.
        data: The samples to use in place of the data set in `[data]`. Pass a pair (inputs, labels)
            of arrays, tensors or tables. Or pass a DataFrame, whose label column `[data] target`
            names. Or pass a torch `Dataset`, a Hugging Face dataset, another sequence of pairs or
            dictionaries, a scikit-learn `Bunch`, or a function that returns such data. Arrays of
            uint8 are read as pixels and divided by 255, so convert other features to floats.
        test: Held-out samples, in the same forms as `data`. If you pass `test`, pass `data` too.
        partition: How samples are divided among clients: a name, a list with one index array per
            client, an array with the client of each sample (its name or number), a function
            `(labels, clients, rng)` that returns such a list or array, or a partitioner of
            flwr-datasets.
        task: The model: a name, an `nn.Module`, a pair (module, loss), or `fedmuon.Task(module,
            loss, metrics)`.
        recipe: The optimizer: a name, a `fedmuon.Recipe`, a `fedmuon.Chain`, or a sequence of
            links.
        orthogonalizer: The orthogonalizer: a name, `fedmuon.Orthogonalizer(apply, lipschitz)`, or a
            function on stacks of matrices `[..., m, n]`.
        aggregate: How the server combines replies: a name, a `fedmuon.Aggregator`, or a function of
            the replies of a round.
        stage: A `fedmuon.Stage`, or a list of stages, that change the messages of the run.
        schedule: How the step size changes over rounds. Pass a name, or a function that takes the
            number of the round (0, 1, ...) and returns a factor for `lr`.

    Returns:
        A dictionary with the estimated seconds, the peak memory in bytes, and the message sizes of
        one round in bytes. The page "What a run costs" explains every key.

    Raises:
        InputError: If a setting or an object cannot be used.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "per-round": 2, "rounds": 2}}
        >>> fedmuon.plan(small)["bytes"]["a client up"] > 0
        True
    """
    objects = {
        "data": data, "partition": partition, "task": task, "recipe": recipe,
        "orthogonalizer": orthogonalizer, "aggregate": aggregate, "stage": stage,
        "schedule": schedule,
    }  # fmt: skip
    return cost.plan(_chosen(config, objects, test, False, None))


@in_python()
@_plainly()
def routes(
    config: Configured | nn.Module = None,
    *,
    data: Any = None,
    task: Any = None,
    recipe: Any = None,
) -> RoutingTable:
    """Return the optimizer of each parameter of a network, before a run.

    The table is the same as `Result.routes` after the run.

    Args:
        config: The settings, as for `fedmuon.run`. A missing key takes its default. Or a torch
            module alone, for the default settings. It is not called, so no samples are needed.
        data: The samples, as for `fedmuon.run`. The size of a built-in network depends on them.
        task: The network: a name, an `nn.Module`, a pair (module, loss), or a `fedmuon.Task`.
        recipe: The optimizer, as for `fedmuon.run`.

    Returns:
        A tuple with one route per parameter, which prints as a table.

    Raises:
        InputError: If the task is the matrix task, whose model is one matrix, or a setting or an
            object cannot be used.

    Example:
        >>> import fedmuon
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(),
        ...                       nn.Linear(16, 10))
        >>> [one.name for one in fedmuon.routes(model) if one.optimizer == "muon"]
        ['2.weight']
    """
    if isinstance(config, nn.Module):
        if data is not None or task is not None:
            raise InputError(
                "config is a torch module, so data and task have no effect. Leave them out, or "
                "pass the module as task=module."
            )
        tables = {"task": {"name": "network"}}
        return routing(resolve(_chosen(tables, {"recipe": recipe}, None, False, None)), config)
    objects = {"data": data, "task": task, "recipe": recipe}
    resolved = resolve(_chosen(config, objects, None, False, None))
    network = build_experiment(resolved, build_data(resolved)).task
    if not isinstance(network, NetworkTask):
        raise InputError(
            f"task.name is {resolved.task.name!r}, whose model is one matrix, so there is nothing "
            "to route. Pass a network, such as task=module."
        )
    return routing(resolved, network.module)


@in_python()
@_plainly()
def unlearn(
    run: Result | str | Path,
    samples: Sequence[int] = (),
    *,
    clients: Sequence[int] = (),
    epsilon: float = 1.0,
    delta: float = 1e-5,
    out: str | Path,
) -> Record:
    """Remove the influence of samples or clients from the model of a finished run, by adding noise.

    The new model is (epsilon, delta)-indistinguishable from the noisy model of a run without these
    samples. In a run without a client, the client takes part in the same rounds with gradient 0.

    Args:
        run: A result, or the path of a run folder. The run must have a certificate.
        samples: Indices of the samples in the data source.
        clients: Numbers of clients whose samples are all forgotten. Pass samples or clients.
        epsilon: Privacy parameter ε of the guarantee.
        delta: Privacy parameter δ of the guarantee.
        out: A new folder for the noisy model.

    Returns:
        The noise and its cost in accuracy, for each kind of certificate. Keep the record
        confidential, because it contains the indices of the samples.

    Raises:
        InputError: If the run has no certificate, or an index is not one of its samples.

    Example:
        >>> import tempfile
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2},
        ...          "local": {"lr": 0.01, "steps": 1}, "orthogonalizer": {"lambda": 0.1},
        ...          "engine": {"dtype": "float64"}}
        >>> result = fedmuon.run(small)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record = fedmuon.unlearn(result, [0], out=f"{folder}/unlearned")
        >>> record["epsilon"], record["delta"]
        (1.0, 1e-05)
    """
    result = _result_of(run)
    return unlearning.execute(
        result.path, samples, epsilon, delta, Path(out), result.given, clients
    )


@in_python()
@_plainly()
def certify(
    run: Result | str | Path,
    *,
    confidence: float = 0.95,
    settings: int | None = None,
    output_noise: float | None = None,
    probes: int = 0,
    guess: float = GUESS,
    average: bool = False,
) -> RiskCertificates:
    """Compute upper limits of the error and loss of a run's final model on new samples.

    The limits follow from held-out samples, from the noise of a private run, and from the stability
    bound. The run folder stores them, so that `fedmuon show` and reports can show them.

    Args:
        run: A result, or the path of a run folder. The run must have ended.
        confidence: Probability with which each certified limit holds.
        settings: Number of settings from which this run's setting was chosen by looking at the same
            samples. The limits pay for all of them. The default is the number of settings in the
            folder of the sweep that contains the run, or 1.
        output_noise: Standard deviation of noise on the entries of a published model. For a run
            with certificates, the error rate of the published model then has a limit. Fix this
            number before you look at the samples, or count it in `settings`. The default is
            `stability.output-noise` of the run.
        probes: Number of random probes with which derivatives predict the gap of the loss, such as
            8. With 0, no gap is predicted. The prediction is accurate to first order and certifies
            nothing.
        guess: The train error that you expect, fixed before you look at the samples. Each value is
            valid. The certified limits from privacy are smallest if it is right.
        average: Whether to certify the average of the models of the last rounds, which a run with
            `output.average` saves, instead of the final model.

    Returns:
        One row for each certificate, with its assumptions, or with the reason why there is no
        limit.

    Raises:
        InputError: If the run has not ended, the task reports no accuracy, or a number is out of
            range.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 90, "test": 60, "dimension": 7},
        ...          "federation": {"clients": 3, "rounds": 2}}
        >>> found = fedmuon.certify(fedmuon.run(small))
        >>> found.rows[0].name, found.rows[0].status
        ('held-out samples', 'certified')
    """
    from fedmuon.experiments.certifying import stored
    from fedmuon.experiments.certifying.certify import certify

    result = _result_of(run)
    compute = partial(
        certify,
        result.path,
        confidence=confidence,
        settings=settings,
        user_objects=result.given,
        output_noise=output_noise,
        probes=probes,
        guess=guess,
        average=average,
    )
    certificates, not_stored = stored.computed(result.path, compute)
    if not_stored:
        logging.getLogger(__name__).warning("fedmuon: %s", not_stored)
    return certificates


@in_python()
@_plainly()
def certify_groups(
    run: Result | str | Path,
    *,
    per: str,
    confidence: float = 0.95,
    settings: int | None = None,
    guess: float = GUESS,
) -> GroupCertificates:
    """Compute upper limits of the error of each class or each client on new samples.

    The limits follow from held-out samples, and from the noise of a private run. All certified
    limits of a source hold together, so the largest one also limits the worst class or client.

    Args:
        run: A result, or the path of a run folder. The run must have ended.
        per: `"class"` or `"client"`. Limits of clients from held-out samples need `[data]
            client-test`.
        confidence: Probability with which all certified limits of a source hold together.
        settings: Number of settings from which this run's setting was chosen by looking at the same
            samples, as for `certify`. The limits pay for all of them.
        guess: The train error that you expect, as for `certify`.

    Returns:
        A row for each source and each class or client, worst first, and the reason if a source has
        no limits.

    Raises:
        InputError: If the run has not ended, the task reports no accuracy, or an argument is out of
            range.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 90, "test": 60, "dimension": 7},
        ...          "federation": {"clients": 3, "rounds": 2}}
        >>> limits = fedmuon.certify_groups(fedmuon.run(small), per="class")
        >>> limits.rows[0].certified == max(row.certified for row in limits.rows)
        True
    """
    from fedmuon.experiments.certifying.groups import certify_groups

    result = _result_of(run)
    return certify_groups(result.path, per, confidence, settings, result.given, guess)


@in_python()
@_plainly()
def bound(
    run: Result | str | Path | None = None,
    *,
    config: Configured = None,
    size: int | None = None,
    rho: float | None = None,
    l_orth: float | None = None,
    l_g: float | None = None,
) -> Record:
    """Compute the generalization bound for a run or for parameters (Stability note, Theorem 4.1).

    Args:
        run: A result, or the path of a run folder. Without `run`, the bound is for `config` and
            `size`.
        config: The settings: the path of a TOML file, a dictionary of tables such as `{"local":
            {"lr": 0.1}}`, or a `fedmuon.Config`. A missing key takes its default.
        size: Number of samples n_i of each client. The default is 200. Not allowed with `run`.
        rho: Failure probability of the random choice of participants. For parameters, the default
            is 0.01. For a run, the participants are known, so the bound adds no failure probability
            unless you pass `rho`.
        l_orth: Lipschitz constant of the orthogonalizer. The default is the proved constant.
        l_g: Smoothness constant of the loss. The default is the proved constant.

    Returns:
        The bound with its status, its constants and its assumptions. The keys are the same as in
        the file bound.json.

    Raises:
        InputError: If `run` is combined with `config` or `size`, or a number is out of range.

    Example:
        >>> import fedmuon
        >>> tables = {"federation": {"clients": 100, "per-round": 10, "rounds": 100},
        ...           "local": {"lr": 1e-4, "steps": 1}, "orthogonalizer": {"lambda": 0.1}}
        >>> fedmuon.bound(config=tables, size=1000)["status"]
        'certified'
    """
    arguments = {"l_orth": l_orth, "l_g": l_g}
    constants = {name: value for name, value in arguments.items() if value is not None}
    if run is None:
        tables = _nested(config)
        data = {"train": 1_000_000_000, "minimum": 1} | tables.get("data", {})  # no data is loaded
        bound_config = parse({**tables, "data": data})
        size, rho = 200 if size is None else size, 0.01 if rho is None else rho
        case = certificates.from_parameters(bound_config, size, rho, **constants)
    elif size is not None or config is not None:
        raise InputError(
            "`config` or `size` was passed together with `run`, but a run has its own config and "
            "size. Leave `config` and `size` out."
        )
    else:
        result = _result_of(run)
        case = dataclasses.replace(
            from_directory(result.path, rho=rho, given=result.given), **constants
        )
    return certificates.report(case, certificates.certify(case))


One = Result | str | Path


@in_python()
def compare(
    runs: One | Sequence[One] | Mapping[str, One | Sequence[One]], *more: Any
) -> Comparison:
    """Compare finished runs: means over seeds with their intervals, and the keys that differ.

    Runs that differ only in the seed form one row. `NAME ±` is half of Student's 95% interval of
    the mean of NAME.

    Args:
        runs: Results and folders in one list, or lists under your own labels, such as
            `{"mine": [...], "theirs": [...]}`. If a folder is not a run folder, the runs directly
            inside this folder are compared.
        more: Not allowed. If `more` is given, the error message asks for one list.

    Returns:
        The rows, the curves, and the damaged runs that were left out.

    Raises:
        InputError: If no finished run is given.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2}}
        >>> runs = [fedmuon.run(small, recipe=name) for name in ("fedavg", "fedmuon")]
        >>> found = fedmuon.compare(runs)
        >>> [row["run"] for row in found.rows]
        ['aggregate=by-samples, recipe=fedavg', 'aggregate=mean, recipe=fedmuon']
    """
    if more:
        raise InputError("compare takes its runs in one list: compare([first, second])")
    labelled = runs if isinstance(runs, Mapping) else {"": runs}
    folders = {
        str(label): [item.path if isinstance(item, Result) else item for item in _flat(group)]
        for label, group in labelled.items()
    }
    compared = comparison(folders)
    left_out = [*map(as_keywords, compared.left_out)]
    results = [
        result
        for group in labelled.values()
        for result in _flat(group)
        if isinstance(result, Result)
    ]
    temporary = [result.temporary for result in results if result.temporary]
    return dataclasses.replace(compared, left_out=left_out, temporary=temporary)


def _flat(runs: One | Sequence[One]) -> list[Result | Path]:
    """Flatten nested lists of results and folders."""
    if isinstance(runs, Result):
        return [runs]
    if isinstance(runs, str | Path):
        return [Path(runs)]
    return [item for part in runs for item in _flat(part)]


def configured(config: Configured) -> Config:
    """Return the settings as a config."""
    return _chosen(config, {}, None, False, None)


def _result_of(run: One) -> Result:
    return run if isinstance(run, Result) else Result(Path(run))


def _require_counts(**counts: Any) -> None:
    """Raise an error if a value is not a positive integer."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name} is {count!r}, but it must be an integer that is at least 1")


def _nested(config: Configured) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Config):
        return config.model_dump(by_alias=True, exclude_unset=True)
    if isinstance(config, Mapping):
        return {name: dict(table) if isinstance(table, Mapping) else table
                for name, table in config.items()}  # fmt: skip
    return read(Path(config))


def _chosen(
    config: Configured,
    objects: Mapping[str, Any],
    test: Any,
    resume: bool,
    out: str | Path | None,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Return the config that combines the tables, the keywords and the objects of a call.

    If a run is resumed without a config, use the config of that run.
    """
    tables, user_objects = _tables_and_objects(config, objects, test)
    for name, values in (extra or {}).items():
        tables[name] = tables.get(name, {}) | dict(values)
    if resume and config is None and out is not None:
        with in_python():
            resumed = nested(load(RunDirectory(Path(out)).config_to_resume()))
        tables = {name: keys | tables.get(name, {}) for name, keys in resumed.items()}
    return parse(tables, own_recipe=user_objects.recipe is not None).with_objects(user_objects)


def _tables_and_objects(
    config: Configured, objects: Mapping[str, Any], test: Any
) -> tuple[dict[str, Any], UserObjects]:
    """Apply the keywords to the config. Return the resulting tables and the user's objects."""
    tables = _nested(config)
    replaced = _replacing(tables, objects)
    if test is not None:
        if replaced.get("data") is None:
            raise InputError(
                "test was passed without data. Your own test samples can be used only together "
                "with your own training samples. Pass both data and test, or leave test out."
            )
        replaced["test"] = test
    user_objects = dataclasses.replace(
        config.given if isinstance(config, Config) else NOTHING, **replaced
    )
    return tables, user_objects


def _replacing(tables: dict[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Write the names of the objects into the tables, and return the objects by kind.

    If the call passes a name instead of an object for a kind, the object of this kind is None.
    """
    replaced: dict[str, Any] = {} if objects.get("data") is None else {"test": None}
    for kind, (table, key) in NAMED.items():
        inside = tables.get(table, {}).get(key) if isinstance(tables.get(table), dict) else None
        is_passed = objects.get(kind) is not None
        value = objects[kind] if is_passed else inside
        with Guard(kind, value):
            is_name = isinstance(value, str)
        if value is None or (is_name and not is_passed):
            continue
        passed = brought_adapters(value) if kind == "task" and is_language_peft(value) else value
        replaced[kind] = None if is_name else passed
        tables.setdefault(table, {})[key] = value if is_name else GIVEN
        if kind == "task" and not is_name:
            tables[table].pop("model", None)
    return replaced


@contextlib.contextmanager
def _folder(out: str | Path | None, resume: bool) -> Iterator[tuple[Path, Temporary | None]]:
    """Yield the run folder and, if it is temporary, the object that removes it later.

    If an error ends a run in a temporary folder, the folder stays until Python ends, so that the
    user can resume the run.
    """
    if out is not None:
        yield Path(out), None
        return
    if resume:
        raise InputError(
            "resume=True needs out. Pass the run folder to resume, such as out='runs/a'."
        )
    temporary = Temporary()
    try:
        yield temporary.path, temporary
    except BaseException:
        if any(temporary.path.iterdir()):
            BROKEN_OFF.append(temporary)
        raise


def _bar(progress: bool | None, counted: str) -> Any:
    """Return a progress bar if the caller wants one, otherwise callbacks that do nothing."""
    if not is_wanted(progress):
        silent: tuple[Callable[..., None], ...] = (lambda record: None, lambda count, total: None)
        return contextlib.nullcontext(silent)
    return shown(counted)
