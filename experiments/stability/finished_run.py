"""Open a finished run, and compute its losses, momenta and constants.

`from_directory` returns the `CertifiedSetting` of a run (see `certificates.py`). A `FinishedRun`
also contains the samples and the experiment, so that the run or a neighbour can be repeated.
"""

import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedmuon.analysis import MeasuredGap, Realized, Uniform, label_shares, measured_gap
from fedmuon.analysis.theory.checks import probability
from fedmuon.config.load import Config, load
from fedmuon.config.user_objects import NAMED, NOTHING, UserObjects
from fedmuon.core import files
from fedmuon.core.arrays import read_tensors
from fedmuon.core.choices import GIVEN, is_own
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, require_regular
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import classes_of
from fedmuon.data.partition import weights
from fedmuon.data.source import Source
from fedmuon.experiments.stability.certificates import (
    AUTHOR,
    CertifiedSetting,
    has_map,
    map_constant,
    start_of,
)
from fedmuon.federated.build import build_experiment, build_plan, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.custom_recipe import user_map
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.model_routes import routes, routing_of
from fedmuon.federated.rounds import begin, simulate
from fedmuon.federated.shards import partition_digest
from fedmuon.optim.chain import Chain, Context, Link, State
from fedmuon.optim.links import ADJUSTMENTS
from fedmuon.optim.recipes import aux_rate
from fedmuon.runs import fingerprints
from fedmuon.runs.directory import RunDirectory
from fedmuon.tasks.base import Batch, Params, Task
from fedmuon.tasks.constants import Constants
from fedmuon.tasks.networks import NetworkTask

CENSUS = "neighbours.csv"
SAMPLES, POWERS, REACH = 128, 12, 1e-3
OBSERVED = (
    "B, L_loss, G_max and Lg are estimates: the largest loss, gradient norm and curvature at the "
    "first and the last model on {} samples. Their true values may be larger."
)
ROUTED = (
    "The orthogonalizer and the auxiliary step together have the larger of their two constants."
)
DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)

Found = TypeVar("Found")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, with the samples and the experiment that its neighbours need."""

    config: Config
    source: Source
    data: FederatedData
    experiment: Experiment
    out: Path

    @classmethod
    def open(cls, out: Path, given: UserObjects = NOTHING) -> "FinishedRun":
        """Open the run in the folder `out`.

        If a callback ended the run early, the result has only the finished rounds. `given` contains
        the Python objects (such as a custom task) that the caller passed.
        """
        run = cls.of(load(out / "config.toml").with_objects(given), out)
        planned = run.experiment.plan.rounds
        rounds = (RunDirectory(out).summary() or {}).get("rounds", planned)
        if rounds == planned:
            return run
        plan = replace(run.experiment.plan, rounds=rounds)
        return replace(run, experiment=replace(run.experiment, plan=plan))

    @classmethod
    def of(cls, config: Config, out: Path) -> "FinishedRun":
        """Open the run of this config in `out`, and check that its samples are unchanged."""
        source = read_source(config)
        stored = fingerprints.require_same(out, fingerprints.described(config, out, source))
        data = build_data(config, source)
        try:
            with np.load(require_regular(out / "partition.npz")) as split:
                dealt = partition_digest(split["train_index"], split["client"])
        except DAMAGE as error:
            raise InputError(f"{out} is damaged ({error}): {AFRESH}") from None
        if dealt != partition_digest(data.train_index, data.client):
            raise InputError(
                f"the partition now differs from the partition in {out}. Your partition function "
                "must use only the random generator that it receives."
            )
        experiment = build_experiment(config, data)
        plan, _ = fingerprints.with_factors(experiment.plan, config, stored)
        return cls(config, source, data, replace(experiment, plan=plan), out)

    def model(self, stem: str = "model") -> Params:
        """Return the stored "model" or "initial" model, as a stack of one replica."""
        arrays, _ = read_tensors(self.out / f"{stem}.safetensors")
        task = self.experiment.task
        return {name: value[None].to(task.device, task.dtype) for name, value in arrays.items()}


def from_directory(
    folder: Path,
    changes: list[str] | tuple[str, ...] = (),
    rho: float | None = None,
    given: UserObjects = NOTHING,
    is_checked: bool = False,
) -> CertifiedSetting:
    """Return the facts about a finished run that the theory needs.

    Args:
        folder: The run folder.
        changes: Changes of [stability].
        rho: Failure probability for a random schedule: the result covers every uniform schedule. If
            None, the result covers only the schedule of this run.
        given: Python objects (such as a custom task) that the caller passed.
        is_checked: Whether the caller has compared the files of the run with their checksums.
    """
    if not (folder / "config.toml").exists():
        raise InputError(f"{folder} has no config.toml, so it is not a run folder. Check the path.")
    run = RunDirectory(folder)
    if not is_checked:
        run.require_sound()
    config = load(folder / "config.toml", changes).with_objects(given)
    require_objects(config, folder)
    stored = fingerprints.require_same(folder, fingerprints.described(config, folder))
    plan, _ = fingerprints.with_factors(build_plan(config), config, stored)
    try:
        with np.load(require_regular(folder / "partition.npz")) as split:
            sizes = np.bincount(split["client"], minlength=plan.clients)
        schedule = np.load(require_regular(folder / "schedule.npy"))
        realized = Realized(schedule, plan.rows if plan.batch else None)
        start = read_tensors(folder / "initial.safetensors")[0]
        shape = start["weight"].shape[:2] if config.task.name == "matrix" else None
    except DAMAGE as error:
        raise InputError(
            f"{folder} is damaged ({error}). Run the experiment again in another folder."
        ) from None
    moved = None
    measured_unit = load(folder / "config.toml").stability.unit
    # The checksum is written after all neighbours have run.
    if CENSUS in files.sums_of(folder) and config.stability.unit == measured_unit:
        files.require_sound(folder, [CENSUS])
        moved = largest_moves(folder / CENSUS, plan.clients)
    own_map = user_map(config)
    case = CertifiedSetting(
        config,
        sizes,
        realized if rho is None else Uniform(plan.per_round, probability("rho", rho)),
        shape,
        l_map=None if own_map is None else own_map.lipschitz,
        dropped=any("dropped" in record for record in run.records()),
        stopped=str((run.summary() or {}).get("stopped", "")),
        factors=plan.factors(),
        moved=moved,
        start=start_of(start["weight"].numpy(), source_of(config, folder)) if shape else None,
    )
    if config.task.name != "matrix":
        return with_estimates(case, folder)
    return replace(
        case,
        gaps=cache(partial(smallest_singular_values, folder, given)),
        squares=cache(partial(_squares_of_run, folder, given)),
    )


def read_census(census: Path, usecols: Sequence[int] | None = None) -> np.ndarray:
    """Return the numbers of a neighbours.csv, one row per neighbour."""
    with open(census, encoding="utf-8", opener=files.regular) as file:
        return np.loadtxt(file, delimiter=",", skiprows=1, usecols=usecols, ndmin=2)


def largest_moves(census: Path, clients: int) -> np.ndarray:
    """Return, for each client, the largest perturbation among its neighbours in neighbours.csv."""
    columns = read_census(census, usecols=(1, 4))
    moved = np.zeros(clients)
    np.maximum.at(moved, columns[:, 0].astype(int), columns[:, 1])
    return moved


def require_objects(config: Config, folder: Path, function: str = "bound") -> None:
    """Raise InputError if the run needs Python objects that the caller did not pass.

    `function` is the name of the Python function that does the same as the command.
    """
    missing = [
        f"[{table}] {key}"
        for kind, (table, key) in NAMED.items()
        if getattr(getattr(config, table), key) == GIVEN and getattr(config.given, kind) is None
    ]
    if missing:
        raise InputError(
            f"the run in {folder} used objects that were passed in Python ({', '.join(missing)}), "
            "so this command cannot load them. In Python, call "
            f"fedmuon.{function}(result) with the "
            "result of fedmuon.run. To get the result again, call fedmuon.run with resume=True "
            "and the same objects."
        )


def source_of(config: Config, folder: Path) -> Source | None:
    """Return the samples of a run, or None if its data set is not built in or has changed."""
    if is_own(config.data.name):
        return None
    try:
        source = read_source(config)
        fingerprints.require_same(folder, fingerprints.described(config, folder, source))
    except InputError:
        return None
    return source


# Losses


@dataclass(frozen=True)
class Loss:
    """Two measures of the gap of one model.

    `gap` weights the held-out losses by the clients' label shares. `plain` is the mean test loss
    minus the weighted train loss, as in the Stability note, Table 2.
    """

    gap: MeasuredGap
    plain: float
    accuracy: float = float("nan")  # accuracy on held-out samples


def measured_losses(
    config: Config, data: FederatedData, classes: int, experiment: Experiment, params: Params,
    ranges: Sequence[float] | None = None,
) -> list[Loss]:  # fmt: skip
    """Return the measured gap and accuracy of every model in a stack.

    `ranges` contains the proved range of the losses for each model. The default is 1, which is
    valid for the loss 1 - p_y. Cross-entropy is unbounded, so the interval for the gap of a network
    is an approximation with the normal distribution.
    """
    interval = "shorter" if config.task.name == "matrix" else "normal"
    shards, clients = experiment.shards, len(data.sizes)
    if not len(data.test_labels):
        raise InputError(
            "no sample is held out, so the gap cannot be measured. Lower [data] train, or set "
            "[data] test."
        )
    owner = np.repeat(np.arange(clients), data.sizes)
    shares = label_shares(classes_of(data.labels), owner, clients, max(1, classes))
    chances = weights(data.sizes, config.federation.risk_weights)
    (train, _), (test, measures) = (
        experiment.task.losses(params, batch)
        for batch in (Batch(shards.inputs, shards.labels), shards.held_out)
    )
    train, test = (losses.double().cpu().numpy() for losses in (train, test))
    right = (
        measures["accuracy"].double().mean(1).tolist()
        if "accuracy" in measures
        else [np.nan] * len(test)
    )
    of_test, results = classes_of(data.test_labels), []
    tops = ranges or [1.0] * len(test)
    for train_losses, test_losses, score, top in zip(train, test, right, tops, strict=True):
        means = np.bincount(owner, train_losses, clients) / data.sizes
        args = means, chances, shares, test_losses, of_test
        gap = measured_gap(*args, interval=interval, loss_bound=top)
        results.append(Loss(gap, float(test_losses.mean() - gap.empirical), score))
    return results


def mean_squares(experiment: Experiment, sizes: np.ndarray, params: Params) -> np.ndarray:
    """Return the mean of (loss - (1 - 1/c))^2 over the training samples of each client.

    `params` is a stack of S models of the matrix task. The result has shape [S, N].
    """
    shards, classes = experiment.shards, params["weight"].shape[-1]
    losses, _ = experiment.task.losses(params, Batch(shards.inputs, shards.labels))
    squares = (losses.double().cpu().numpy() - (1 - 1 / classes)) ** 2
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return np.stack([np.bincount(owner, row, len(sizes)) for row in squares]) / sizes


def _squares_of_run(folder: Path, given: UserObjects) -> np.ndarray:
    """Return `mean_squares` of the final model of the run in the folder, as an array [N]."""
    run = FinishedRun.open(folder, given)
    weight = read_tensors(folder / "model.safetensors")[0]["weight"][None]
    params = {"weight": weight.to(run.experiment.shards.inputs.device)}
    return mean_squares(run.experiment, run.data.sizes, params)[0]


# Momenta of a run of the matrix task


def observe_orthogonalizations(
    experiment: Experiment, look: Callable[[Context, Params, Params], None]
) -> None:
    """Repeat the run, and call `look` at each step that orthogonalizes.

    `look` receives the context of the step, the momenta, and what the link `orthogonalize` made of
    the momenta.
    """
    recipe, plan = experiment.recipe, experiment.plan

    def update(
        link: Link, direction: Params, state: State, context: Context
    ) -> tuple[Params, State]:
        images, state = link.update(direction, state, context)
        look(context, direction, images)
        return images, state

    links = tuple(
        replace(link, update=partial(update, link)) if link.name == "orthogonalize" else link
        for link in recipe.chain.links
    )
    start = begin(recipe, experiment.task, plan.seed)
    simulate(replace(experiment, recipe=replace(recipe, chain=Chain(links))), start)


def observe_momenta(
    experiment: Experiment, look: Callable[[int, Tensor, Tensor], Found]
) -> list[list[list[Found]]]:
    """Repeat the run, and call `look` for each orthogonalized momentum.

    Args:
        experiment: A run of the matrix task.
        look: A function that is called with a client, its model and its momentum [d, c].

    Returns:
        The values that `look` returned [R, E, K], with the clients of a round in the order of the
        schedule.
    """
    plan = experiment.plan
    values: dict[tuple[int, int, int], Found] = {}

    def keep(context: Context, momenta: Params, images: Params) -> None:
        rows = zip(context.draws, context.params["weight"], momenta["weight"], strict=True)
        for draw, model, momentum in rows:
            assert isinstance(draw, partial)
            round, client, step = (draw.keywords[name] for name in ("round", "client", "step"))
            values[round, step, client] = look(client, model, momentum)

    observe_orthogonalizations(experiment, keep)
    return [
        [[values[r, k, int(i)] for i in cohort] for k in range(plan.steps)]
        for r, cohort in enumerate(plan.schedule())
    ]


def smallest_singular_values(folder: Path, given: UserObjects) -> np.ndarray:
    """Repeat the run, and return the smallest singular value s_q of all momenta.

    The result is an array [R, E, K]. s_q is the distance from a momentum M [d, c] to the nearest
    jump of the exact sign. Each row of M sums to 0, because each row of a softmax gradient does.
    Therefore, only the q = min(d, c - 1) largest singular values of M can be positive, and s_q is
    the smallest of these q values. The function subtracts max(d, c) eps s_1, the error that
    rounding may have added.
    """

    def gap(client: int, model: Tensor, momentum: Tensor) -> float:
        d, c = momentum.shape
        s = torch.linalg.svdvals(momentum.double())
        floor = s[min(d, c - 1) - 1] - max(d, c) * torch.finfo(momentum.dtype).eps * s[0]
        return max(0.0, float(floor))

    return np.array(observe_momenta(FinishedRun.open(folder, given).experiment, gap))


OF_BATCHES = (
    "With BatchNorm, a sample changes the gradients of all other samples in its batch, and the "
    "running statistics do not follow gradient steps. So no bound covers this network. Use "
    "GroupNorm."
)

# Constants of a network. The supremum over all models and samples is unknown. The maximum is
# therefore taken over the initial and the final model and some samples. It is a lower estimate and
# proves nothing, so a bound that uses it has the status `estimated`.


def with_estimates(case: CertifiedSetting, folder: Path) -> CertifiedSetting:
    """Return the setting of a network's run with constants that are estimated at its models."""
    run = FinishedRun.of(resolve(case.config), folder)
    task, shards, rows = run.experiment.task, run.experiment.shards, len(run.data.labels)
    if isinstance(task, NetworkTask) and task.statistics:
        return replace(case, refusal=OF_BATCHES)
    count = min(SAMPLES, rows)
    models = [
        {name: value[None].to(task.device, task.dtype) for name, value in arrays.items()}
        for arrays, _ in (
            read_tensors(folder / f"{stem}.safetensors") for stem in ("initial", "model")
        )
    ]
    indices = torch.from_numpy(np.linspace(0, rows - 1, count).astype(np.int64))
    batch = Batch(shards.inputs[indices], shards.labels[indices])
    of_map = () if case.l_map is None else (AUTHOR.format(case.l_map),)
    return replace(
        case,
        constants=observed_constants(task, models, batch),
        caveats=(OBSERVED.format(count), *((ROUTED,) * has_map(case.config)), *of_map),
        **_constant_of_step(case, task),
    )


def observed_constants(task: Task, models: Sequence[Params], batch: Batch) -> Constants:
    """Return the largest loss, gradient norm and Hessian norm at these models and samples."""
    losses = max(float(task.losses(params, batch)[0].max()) for params in models)
    samples = [
        Batch(batch.inputs[row : row + 1], batch.labels[row : row + 1])
        for row in range(len(batch.labels))
    ]
    slopes = max(
        _norm(task.gradient(params, [sample])[1]) for params in models for sample in samples
    )
    return Constants(
        losses, slopes, slopes, max(curvature(task, params, batch) for params in models)
    )


def curvature(task: Task, params: Params, batch: Batch) -> float:
    """Estimate the norm of the Hessian of the mean loss.

    The method is power iteration on differences of gradients.
    """
    rng = np.random.default_rng(0)
    draws = {name: rng.standard_normal(tuple(value.shape)) for name, value in params.items()}
    v, size = {name: torch.from_numpy(d).to(params[name]) for name, d in draws.items()}, 0.0
    step = REACH * max(1.0, _norm(params))
    for _ in range(POWERS):
        length = _norm(v)
        if not length:
            return 0.0
        ahead, behind = (
            task.gradient(
                {name: value + sign * step / length * v[name] for name, value in params.items()},
                [batch],
            )[1]
            for sign in (1, -1)
        )
        v = {name: (ahead[name] - behind[name]) / (2 * step) for name in v}
        size = _norm(v)
    return size


def _norm(tree: Params) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in tree.values()))


def _constant_of_step(case: CertifiedSetting, task: Task) -> dict[str, Any]:
    """Return the Lipschitz constant of one step of a network, divided by the step size.

    The result contains one field of the setting: `l_orth`, or `refusal` with the reason why no
    constant is known. The constant is the larger of two constants: one for the scaled
    orthogonalizer, which changes hidden matrices, and one for the auxiliary step, which changes all
    other parameters.
    """
    if not has_map(case.config):
        return {"l_orth": 1.0}
    assert isinstance(task, NetworkTask)
    local = case.config.local
    table = routes(task.module, *routing_of(case.config))
    scales = [ADJUSTMENTS[local.adjust](*route.matrices[1:]) for route in table if route.matrices]
    if local.aux == "adamw" and len(scales) < len(table):
        return {
            "refusal": (
                "The step of AdamW has no Lipschitz constant, so there is no bound. Set [local] "
                "aux "
                "= 'sgd'."
            )
        }
    auxiliary = aux_rate(local) / local.lr if len(scales) < len(table) else 0.0
    try:
        bare = map_constant(case) if case.l_orth is None else case.l_orth
    except InputError as error:
        return {"refusal": str(error)}
    return {"l_orth": max([auxiliary, *(scale * bare for scale in scales)])}
