"""The functions of `import fedmuon`: `run`, `sweep`, `plan`, `stability`, `bound`, `compare` and
`unlearn`.

They do what the commands of the same names do, and take objects in place of names. Without `out`, a
run is written to a temporary folder, which is removed with its result; `Result.save` copies it.
`fedmuon` imports this module, and torch with it, when one of its names is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedmuon.config.load import Config, load, nested, parse, read, to_resume
from fedmuon.config.user_objects import NAMED, NOTHING, UserObjects
from fedmuon.core.choices import GIVEN
from fedmuon.core.errors import Guard, InputError, as_keywords, in_python
from fedmuon.core.files import Temporary
from fedmuon.core.threads import without_autocast
from fedmuon.experiments import unlearning
from fedmuon.experiments.cli.show import shown
from fedmuon.experiments.planning import cost
from fedmuon.experiments.results import (
    Comparison,
    Record,
    Result,
    StabilityResult,
    SweepResult,
    comparison,
)
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates
from fedmuon.experiments.stability.finished_run import from_directory
from fedmuon.experiments.suites.suite import here
from fedmuon.experiments.suites.workers import Workers
from fedmuon.runs.callbacks import Callback, Listener

BROKEN_OFF: list[Temporary] = []  # folders of runs that ended by an error
Configured = Config | Mapping[str, Any] | str | Path | None


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Let torch compute as it does by default, whatever surrounds the call: with gradients, without
    autocast, in float32 and on a device that holds values. Workers in other processes do so too."""
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
    schedule: Any = None,
    callbacks: Sequence[Callback | Listener] = (),
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Result:
    """Run a federated experiment, or go on with it; every keyword overrides what `config` names.

    `config` is the path of a TOML file, nested tables as in one, or a `Config`. A keyword is a name
    as in the config, or an object:

    - `data`: (inputs, labels) as arrays, tensors or tables; a DataFrame whose labels are the column
      that [data] target names; a sequence of pairs or dicts, such as a torch Dataset or one of
      Hugging Face; a Bunch of scikit-learn; or a function that returns one of these. `test`: the
      same, held out. [data] normalize is how samples are scaled: arrays of uint8 are taken for
      pixels and divided by 255, so give other features as floats;
    - `partition`: index arrays into `data`, one a client, a function (labels, clients, rng), or a
      partitioner of flwr-datasets;
    - `task`: an nn.Module, (module, loss), or `fedmuon.Task(module, loss, metrics)`;
    - `recipe`: a `fedmuon.Recipe`, a `fedmuon.Chain`, or links;
    - `orthogonalizer`: `fedmuon.Orthogonalizer(apply, lipschitz)`, or a function on stacks;
    - `aggregate`: a function of a round's replies; `schedule`: one of the round.

    Without `out` the run folder is temporary: it is removed with the last result that lies in it,
    or when Python ends. `result.save(path)` keeps a copy.

    >>> import fedmuon
    >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
    ...          "federation": {"clients": 3, "per-round": 2, "rounds": 2}}
    >>> result = fedmuon.run(small)
    >>> result.summary["rounds"], sorted(result.model)
    (2, ['weight'])
    """
    objects = {
        "data": data, "partition": partition, "task": task, "recipe": recipe,
        "orthogonalizer": orthogonalizer, "aggregate": aggregate, "schedule": schedule,
    }  # fmt: skip
    chosen = _chosen(config, objects, test, resume, out)
    with _folder(out, resume) as (folder, kept), in_python(), _bar(progress, "rounds") as bar:
        execute(chosen, folder, resume, *bar, callbacks=callbacks)
    return Result(folder, chosen.given, kept)


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
    schedule: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> SweepResult:
    """Run a config at every point of a grid, with several seeds, and choose the best point.

    Args:
        grid: `table.key` -> a list of values, or a range as "0.01:10:log7" or "0:0.9:lin4". An
            empty grid repeats one run with several seeds.
        seeds: Runs per point, with the config's seed and those after it.
        select: The metric that chooses the best: "validation-loss" (the default), which like
            "validation-accuracy" needs [data] validation; "train-loss"; "test-loss" or
            "test-accuracy", whose best value is optimistic; or "max:NAME" or "min:NAME".
        jobs: Runs at the same time, each in its own process. Objects must then be importable there.
        out: The folder of the sweep; a temporary one by default.
        resume: Whether `out` may hold this sweep, or a part of it, to continue.
        progress: Whether to show a bar.

    The other arguments are those of `run`.

    >>> import fedmuon
    >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
    ...          "federation": {"clients": 3, "per-round": 2, "rounds": 2}}
    >>> found = fedmuon.sweep(small, grid={"local.lr": [0.1, 1.0]}, select="train-loss")
    >>> len(found.runs), sorted(found.best)
    (2, ['fedmuon'])
    """
    from fedmuon.experiments.studies.sweep import grid_search, run_grid  # matplotlib

    objects = {
        "data": data, "partition": partition, "task": task, "recipe": recipe,
        "orthogonalizer": orthogonalizer, "aggregate": aggregate, "schedule": schedule,
    }  # fmt: skip
    with in_python():
        for name, many in {"seeds": seeds, "jobs": jobs}.items():
            if isinstance(many, bool) or not isinstance(many, int) or many < 1:
                raise InputError(f"{name} = {many!r} is no count: give a whole number from 1 on")
        base, given = _tables_and_objects(config, objects, test)
        work = grid_search(base, grid, seeds, select, given=given)
    workers = Workers(jobs) if jobs > 1 else contextlib.nullcontext()
    with _folder(out, resume) as (folder, kept), in_python(), _bar(progress, "rounds") as bar:
        with workers as by:
            summary, _ = run_grid(work, folder, resume, by or here, *bar)
        folders = [folder / "runs" / cell.name for cell in work.cells]
    return SweepResult(folder, summary, folders, given, kept)


@_plainly()
def stability(
    config: Configured = None,
    *,
    trials: int | None = None,
    neighbours: str | None = None,
    data: Any = None,
    test: Any = None,
    partition: Any = None,
    task: Any = None,
    recipe: Any = None,
    orthogonalizer: Any = None,
    aggregate: Any = None,
    schedule: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> StabilityResult:
    """Run an experiment and neighbours that differ in one sample, and check the bound.

    Keywords are those of `run`, and two more: `neighbours` is own, any, worst (of all replacements,
    by derivatives) or all; `trials` is how many, if not all. The bound is that of the Stability
    note. The precision is float64 unless the config names one.
    """
    from fedmuon.experiments.stability import neighbours as runs  # loads scipy

    objects = {
        "data": data, "partition": partition, "task": task, "recipe": recipe,
        "orthogonalizer": orthogonalizer, "aggregate": aggregate, "schedule": schedule,
    }  # fmt: skip
    asked = {"trials": trials, "neighbours": neighbours}
    table = {name: value for name, value in asked.items() if value is not None}
    more = {"stability": table} if table else {}
    chosen = _chosen(config, objects, test, resume, out, more)
    with _folder(out, resume) as (folder, kept), in_python(), _bar(progress, "neighbours") as bar:
        runs.execute(certificates.in_float64(chosen), folder, resume, *bar)
    return StabilityResult(folder, chosen.given, kept)


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
    schedule: Any = None,
) -> Record:
    """Estimate what `run` would cost with the same arguments, from a few seconds of its work.

    The record has seconds, memory (bytes held at most) and bytes sent in a round; docs/scale.md
    explains every key. Nothing is written, so there is no `out`, `resume`, `callbacks`, `progress`.

    >>> import fedmuon
    >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
    ...          "federation": {"clients": 3, "per-round": 2, "rounds": 2}}
    >>> fedmuon.plan(small)["bytes"]["a client up"] > 0
    True
    """
    objects = {
        "data": data, "partition": partition, "task": task, "recipe": recipe,
        "orthogonalizer": orthogonalizer, "aggregate": aggregate, "schedule": schedule,
    }  # fmt: skip
    return cost.plan(_chosen(config, objects, test, False, None))


@in_python()
@_plainly()
def unlearn(
    run: Result | str | Path,
    samples: Sequence[int],
    *,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    out: str | Path,
) -> Record:
    """Unlearn samples of a finished run, named by their index in the source.

    `out` gets the run's model with noise. Nobody can tell it, beyond (epsilon, delta), from the
    model of a run without these samples. The record says what each kind of certificate costs; it is
    confidential.
    """
    made = run if isinstance(run, Result) else Result(Path(run))
    return unlearning.execute(made.path, samples, epsilon, delta, Path(out), made.given)


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
    """Theorem 4.1 of the Stability note as a number, for a run or for parameters.

    Of parameters, `size` is the number of samples per client. The record is that of bound.json,
    with the assumptions that the bound stands on.

    >>> import fedmuon
    >>> tables = {"federation": {"clients": 100, "per-round": 10, "rounds": 100},
    ...           "local": {"lr": 1e-4, "steps": 1}, "orthogonalizer": {"lambda": 0.1}}
    >>> fedmuon.bound(config=tables, size=1000)["status"]
    'certified'
    """
    given = {"l_orth": l_orth, "l_g": l_g}
    named = {name: value for name, value in given.items() if value is not None}
    if run is None:
        held = _nested(config)
        data = {"train": 1_000_000_000, "minimum": 1} | held.get("data", {})  # from no source
        chosen = parse({**held, "data": data})
        size, rho = 200 if size is None else size, 0.01 if rho is None else rho
        case = certificates.from_parameters(chosen, size, rho, **named)
    elif size is not None or config is not None:
        raise InputError("a run has its own config and sizes: give rho, l_orth or l_g alone")
    else:
        made = run if isinstance(run, Result) else Result(Path(run))
        case = dataclasses.replace(from_directory(made.path, rho=rho, given=made.given), **named)
    return certificates.report(case, certificates.certify(case))


One = Result | str | Path


@in_python()
def compare(
    runs: One | Sequence[One] | Mapping[str, One | Sequence[One]], *more: Any
) -> Comparison:
    """Compare finished runs: means over seeds `±` standard deviations (over n - 1), and the keys in
    which the runs differ.

    Give results and folders in one list, or by your own labels: {"mine": [...], "theirs": [...]}. A
    folder without a run stands for the runs right below it; `left_out` says which of them are
    damaged. Runs of a label that differ in more than the seed have rows of their own.
    """
    if more:
        raise InputError("compare takes its runs in one list: compare([first, second])")
    labelled = runs if isinstance(runs, Mapping) else {"": runs}
    folders = {
        str(label): [one.path if isinstance(one, Result) else one for one in _flat(held)]
        for label, held in labelled.items()
    }
    found = comparison(folders)
    told = [*map(as_keywords, found.left_out)]
    results = [one for held in labelled.values() for one in _flat(held) if isinstance(one, Result)]
    temporary = [one.temporary for one in results if one.temporary]
    return dataclasses.replace(found, left_out=told, temporary=temporary)


def _flat(held: One | Sequence[One]) -> list[Result | Path]:
    """Results and folders, however deep in lists."""
    if isinstance(held, Result):
        return [held]
    if isinstance(held, str | Path):
        return [Path(held)]
    return [one for part in held for one in _flat(part)]


def _nested(config: Configured) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Config):
        return config.model_dump(by_alias=True, exclude_unset=True)
    if isinstance(config, Mapping):
        return {name: dict(held) if isinstance(held, Mapping) else held
                for name, held in config.items()}  # fmt: skip
    return read(Path(config))


def _chosen(
    config: Configured,
    objects: Mapping[str, Any],
    test: Any,
    resume: bool,
    out: str | Path | None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """The config, that of the run to resume where nothing is said, beside the objects given."""
    held, given = _tables_and_objects(config, objects, test)
    for name, values in (more or {}).items():
        held[name] = held.get(name, {}) | dict(values)
    if resume and config is None and out is not None:
        with in_python():
            known = nested(load(to_resume(Path(out))))
        held = {name: keys | held.get(name, {}) for name, keys in known.items()}
    return parse(held, own_recipe=given.recipe is not None).with_objects(given)


def _tables_and_objects(
    config: Configured, objects: Mapping[str, Any], test: Any
) -> tuple[dict[str, Any], UserObjects]:
    """The config's tables, in which keywords override names, and the objects handed over."""
    held = _nested(config)
    kept = _replacing(held, objects)
    if test is not None:
        if kept.get("data") is None:
            raise InputError("test is held out beside data that are given: give data, too")
        kept["test"] = test
    given = dataclasses.replace(config.given if isinstance(config, Config) else NOTHING, **kept)
    return held, given


def _replacing(held: dict[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Names go into the tables; the objects themselves, and None in place of what a name overrides,
    are returned."""
    kept: dict[str, Any] = {} if objects.get("data") is None else {"test": None}
    for kind, (table, key) in NAMED.items():
        inside = held.get(table, {}).get(key) if isinstance(held.get(table), dict) else None
        said = objects.get(kind) is not None
        found = objects[kind] if said else inside
        with Guard(kind, found):
            named = isinstance(found, str)
        if found is None or (named and not said):
            continue
        kept[kind] = None if named else found
        held.setdefault(table, {})[key] = found if named else GIVEN
        if kind == "task" and not named:
            held[table].pop("model", None)
    return kept


@contextlib.contextmanager
def _folder(out: str | Path | None, resume: bool) -> Iterator[tuple[Path, Temporary | None]]:
    """The folder of a run, and what keeps it if it is temporary. One in which a run was broken off
    stays until Python ends, so that the run can be resumed."""
    if out is not None:
        yield Path(out), None
        return
    if resume:
        raise InputError("resume=True needs out: name the run directory to go on with")
    kept = Temporary()
    try:
        yield kept.path, kept
    except BaseException:
        if any(kept.path.iterdir()):
            BROKEN_OFF.append(kept)
        raise


def _bar(progress: bool, counted: str) -> Any:
    """A bar if it is asked for; silence otherwise."""
    if not progress:
        silent: tuple[Callable[..., None], ...] = (lambda record: None, lambda done, total: None)
        return contextlib.nullcontext(silent)
    return shown(counted)
