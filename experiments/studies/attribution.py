"""Study `attribution`: compare attribution scores of training samples with exact retraining.

Each method returns scores [T, n]. A score estimates the derivative of test loss t with respect to
the weight of training sample z, up to a factor that is the same for all z. `trajectory`
differentiates the whole run. The other methods use only one model, or the models before each round.
These methods know neither the optimizer nor the participants. Therefore, the score that they give
to a sample is multiplied by the number of rounds in which its client took part, and divided by n_i.

The exact runs use the same random numbers as the scored run, so the comparison has no noise.
`leave-one-out` repeats the run without one sample z of client i. The client's mean then has n_i - 1
gradients. Therefore, the weight of z falls by 1, and the weight of each other sample of the client
rises by 1 / (n_i - 1). `zero-out` replaces z by zeros, whose gradient is 0, and does not change
n_i. `halves` is the linear datamodeling score (Park et al. 2023): it repeats the run on many random
halves of every client's samples. For each test sample, the predicted loss change of an exact run is
the sum of score times weight change. Spearman's rho compares these predictions with the exact
losses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import spearman
from fedmuon.analysis.report.findings import Rows
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import (
    POSITIVE,
    Claim,
    Effect,
    Rule,
    Slope,
    correlation,
    mean_of,
)
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.data.neighbours import Neighbours
from fedmuon.experiments.studies.study import Call, Study, distinct, heading
from fedmuon.experiments.suites.contents import Nested, SuiteRequest, cell, require_matrix
from fedmuon.federated.adjoint import pulled_back
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.neighbour_runs import retrained, run_neighbours
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.matrix import MatrixTask

STEPS = 30  # maximum number of conjugate-gradient steps
STACK = 64  # maximum number of runs in one batch


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    The keys set the config of all runs and the changes of each variant.
    """

    tests: Annotated[int, Field(ge=2)]  # number of test samples
    left_out: Annotated[int, Field(ge=3)]  # number of samples that are left out one at a time
    subsets: Annotated[int, Field(ge=3)]  # number of random halves
    dampings: Annotated[list[Positive], Field(min_length=1)]  # relative damping of `influence`
    projections: Count  # number of random projections of TRAK
    variants: Annotated[dict[str, Nested], Field(min_length=1)]
    base: Nested = Field(default_factory=dict)


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each combination of a variant and a kind of exact run."""
    source = {"data": {"name": request.data}, "engine": {"dtype": "float64", "device": "cpu"}}
    calls = []
    for place, (name, tables) in enumerate(settings.variants.items()):
        config = cell(source, settings.base, tables)
        require_matrix(name, config, "attribution needs")
        if config.local.batch:
            raise InputError(
                f"The variant {name!r} has local.batch = {config.local.batch}, but attribution "
                "needs full batches. Set local.batch = 0."
            )
        for truth in RETRAIN:
            work = partial(measure, settings, name, config, truth)
            calls.append(Call(f"{place}-{truth}", work))
    return calls


# Measurements: scores of the training samples, and exact runs without some of them


def measure(settings: Settings, variant: str, config: Config, truth: str) -> Record:
    """Return a row for each method and test sample: the correlation of scores with exact runs."""
    run = train(config, settings.tests)
    exact, weights = RETRAIN[truth](run, settings)
    methods: dict[str, Callable[[ScoredRun], Tensor]] = {
        "trajectory": trajectory,
        "tracin": lambda run: products(run, run.models[:-1]),
        "last product": lambda run: products(run, run.models[-1:]),
    }
    for value in settings.dampings:
        methods[f"influence, {value:g}"] = partial(influence, damping=value)
    methods["trak"] = partial(trak, projections=settings.projections)
    rows = []
    for name, method in methods.items():
        foretold = (method(run) @ weights.T).numpy()  # [T, exact runs]
        for t, (value, actual) in enumerate(zip(foretold, exact.T, strict=True)):
            rows.append({"variant": variant, "truth": truth, "method": name, "test": t,
                         "rho": spearman(value, actual)})  # fmt: skip
    return {"rows": rows}


@dataclass(frozen=True)
class ScoredRun:
    """A run of the matrix task.

    The study computes scores of the run's training samples for T test samples.
    """

    experiment: Experiment
    seed: int
    train: Batch  # samples of all clients
    test: Batch
    start: ServerState  # state before the first round
    models: Sequence[Params]  # models before each round, and the final model
    shares: Tensor  # share of each sample in the updates [n]

    def slopes(self, model: Params, samples: Batch) -> Tensor:
        assert isinstance(self.experiment.task, MatrixTask)
        return self.experiment.task.slopes(model, samples)[0]

    def chances(self, samples: Batch) -> Tensor:
        return (samples.inputs @ self.models[-1]["weight"][0]).softmax(1)

    def losses(self, params: Params) -> np.ndarray:
        """Return the test losses of a model or of a stack of models.

        The shape is [T] for one model, and [runs, T] for a stack.
        """
        return self.experiment.task.losses(params, self.test)[0].numpy()


def train(config: Config, tests: int) -> ScoredRun:
    """Train the run, and return it with its first test samples."""
    config = resolve(config)
    source = read_source(config)
    data = build_data(config, source)
    experiment = build_experiment(config, data)
    shards, seed = experiment.shards, config.federation.seed
    start = begin(experiment.recipe, experiment.task, seed)
    ends = [outcome.state.params for outcome in run_rounds(experiment, start)]
    sizes = np.diff(shards.offsets)
    part = np.bincount(experiment.plan.schedule().ravel(), minlength=len(sizes)) / sizes
    held_out = shards.held_out
    return ScoredRun(
        experiment,
        seed,
        Batch(shards.inputs, shards.labels),
        Batch(held_out.inputs[:tests], held_out.labels[:tests]),
        start,
        [start.params, *ends],
        torch.from_numpy(np.repeat(part, sizes)),
    )


def trajectory(run: ScoredRun) -> Tensor:
    """Return the scores of our method, which differentiates the whole run in one reverse pass.

    A score is <grad f_t, dX^R / dw_z>. It is the derivative of test loss t with respect to the
    weight w_z of training sample z, where X^R is the final model.
    """
    slopes = run.slopes(run.models[-1], run.test)
    towards = run.test.inputs[:, None, :, None] * slopes[:, None, None, :]
    none = Batch(run.test.inputs[:0], run.test.labels[:0])
    scores = torch.zeros(len(slopes), len(run.train.labels), dtype=slopes.dtype)
    offsets = run.experiment.shards.offsets
    sweep = pulled_back(run.experiment, run.start, {"weight": towards}, lambda client: none)
    for pulled in sweep:
        rows = np.arange(pulled.own.shape[1]) if pulled.rows is None else pulled.rows
        scores[:, int(offsets[pulled.client]) + rows] += pulled.own
    return scores


def products(run: ScoredRun, models: Sequence[Params]) -> Tensor:
    """Return the negative inner products of test and training gradients, summed over models.

    A score is -<grad f_t, grad loss_z>. If the models are those before each round, the method is
    TracIn (Pruthi et al. 2020). The gradients are u s^T and v s'^T, so their inner product is (u .
    v)(s . s').
    """
    inner = run.test.inputs @ run.train.inputs.T
    dots = (run.slopes(model, run.test) @ run.slopes(model, run.train).T for model in models)
    return -inner * sum(dots) * run.shares


def influence(run: ScoredRun, damping: float) -> Tensor:
    """Return influence scores (Koh and Liang 2017).

    A score is -grad f_t^T (F + damping tr F / dim I)^-1 grad loss_z. Here, F is the Gauss-Newton
    matrix of the softmax at the final model. The method of conjugate gradients solves the systems
    of all t together.
    """
    chance, inputs = run.chances(run.train), run.train.inputs
    size = inputs.square().sum(1) * (1 - chance.square().sum(1))
    level = damping * float(size.mean()) / run.models[-1]["weight"][0].numel()

    def applied(v: Tensor) -> Tensor:
        turned = torch.tensordot(inputs, v, 1)  # [n, T, c]
        bent = chance[:, None] * turned
        bent -= chance[:, None] * bent.sum(-1, keepdim=True)
        return torch.tensordot(inputs.T, bent, 1) / len(inputs) + level * v

    slopes = run.slopes(run.models[-1], run.test)
    solved = conjugate_gradients(applied, run.test.inputs.T[:, :, None] * slopes)
    train_slopes = run.slopes(run.models[-1], run.train)
    along = (torch.tensordot(inputs, solved, 1) * train_slopes[:, None]).sum(-1)
    return -along.T * run.shares


def conjugate_gradients(applied: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
    """Solve A x = b for T right-hand sides b, which have the shape [d, T, c].

    `applied` multiplies by A, which must be positive definite.
    """

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((0, 2), keepdim=True)

    solution, residual = torch.zeros_like(right), right
    direction, size = right, inner(right, right)
    for _ in range(STEPS):
        image = applied(direction)
        step = (size / inner(direction, image)).nan_to_num_()  # 0 for a system that is solved
        solution, residual = solution + step * direction, residual - step * image
        after = inner(residual, residual)
        direction, size = residual + (after / size).nan_to_num_() * direction, after
    return solution


def trak(run: ScoredRun, projections: int) -> Tensor:
    """Return the scores of TRAK (Park et al. 2023).

    A score is -phi_t^T (Phi^T Phi)^-1 phi_z (1 - p_z). Here, phi is the gradient of log(p_y / (1 -
    p_y)) at the final model after a random projection, and the rows of Phi are these gradients of
    the training samples.
    """
    d, c = run.models[-1]["weight"].shape[1:]
    shape = (d, projections, c)
    drawn = torch.from_numpy(generator(run.seed, Draw.PROBE).standard_normal(shape))

    def projected(samples: Batch) -> tuple[Tensor, Tensor]:
        chance = run.chances(samples)
        correct = chance.gather(1, samples.labels[:, None])
        margin = (torch.eye(chance.shape[1])[samples.labels].to(chance) - chance) / (1 - correct)
        parts = (torch.tensordot(samples.inputs, block, 1) for block in drawn.split(16, 1))
        features = torch.cat([(part * margin[:, None]).sum(-1) for part in parts], 1)
        return features, 1 - correct[:, 0]

    (test_features, _), (features, wrong) = projected(run.test), projected(run.train)
    inverse = torch.linalg.pinv(features.T @ features, hermitian=True)
    return -(test_features @ inverse @ features.T) * wrong * run.shares


def chosen_rows(run: ScoredRun, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Choose random samples of participants. A client's only sample is never chosen.

    Returns:
        The rows of the chosen samples, and the client of every sample.
    """
    sizes, plan = np.diff(run.experiment.shards.offsets), run.experiment.plan
    owner = np.repeat(np.arange(plan.clients), sizes)
    used = np.flatnonzero(np.isin(owner, plan.schedule()) & (sizes[owner] > 1))
    rng = generator(run.seed, Draw.NEIGHBOUR)
    return rng.choice(used, min(settings.left_out, len(used)), replace=False), owner


def leave_one_out(run: ScoredRun, settings: Settings) -> tuple[np.ndarray, Tensor]:
    """Repeat the run without one sample, for several samples of participants.

    Returns:
        Two arrays: the changes of the test losses compared with the run on all samples [runs, T],
        and the changes of the sample weights [runs, n].
    """
    rows, owner = chosen_rows(run, settings)
    full_losses, loss_changes, changes = run.losses(run.models[-1]), [], []
    for row in rows:
        others = owner == owner[row]
        changes.append(np.where(others, 1 / (others.sum() - 1), 0.0))
        changes[-1][row] = -1.0
        less = retrained(run.experiment, np.arange(len(owner)) != row, run.seed)
        loss_changes.append(run.losses(less) - full_losses)
    return np.concatenate(loss_changes), torch.from_numpy(np.stack(changes))


def zero_out(run: ScoredRun, settings: Settings) -> tuple[np.ndarray, Tensor]:
    """Repeat the run with zeros in place of one sample. Return the same as `leave_one_out`."""
    shards = run.experiment.shards
    rows, owner = chosen_rows(run, settings)
    loss_changes = []
    for chunk in np.split(rows, range(STACK, len(rows), STACK)):
        samples = np.concatenate([[-1], chunk])
        client = np.where(samples < 0, -1, owner[samples])
        position = np.where(samples < 0, -1, samples - shards.offsets[client])
        nothing = np.zeros((len(samples), shards.inputs.shape[1]))
        labels = np.zeros(len(samples), np.int64)
        neighbours = Neighbours(client, position, position, nothing, labels)
        losses = run.losses(run_neighbours(run.experiment, neighbours, run.seed))
        loss_changes.append(losses[1:] - losses[:1])
    return np.concatenate(loss_changes), -torch.eye(len(owner), dtype=torch.float64)[rows]


def halves(run: ScoredRun, settings: Settings) -> tuple[np.ndarray, Tensor]:
    """Train runs on random halves of the samples.

    Returns:
        The test losses, in the shape [runs, T], and a mask that says which samples each run used,
        in the shape [runs, n].
    """
    shards, losses, masks = run.experiment.shards, [], []
    for number in range(settings.subsets):
        rng = generator(run.seed, Draw.NEIGHBOUR, round=number, block=1)
        subsets = [
            first + rng.permutation(size)[: (size + 1) // 2]
            for first, size in zip(shards.offsets, np.diff(shards.offsets), strict=False)
        ]
        masks.append(np.isin(np.arange(len(shards.labels)), np.concatenate(subsets)))
        losses.append(run.losses(retrained(run.experiment, masks[-1], run.seed)))
    return np.concatenate(losses), torch.from_numpy(np.stack(masks)).double()


RETRAIN = {"leave-one-out": leave_one_out, "zero-out": zero_out, "halves": halves}


# Claims

OURS = "trajectory"
NAMES = {"trajectory": "derivative through the run (ours)", "tracin": "TracIn, before each round",
         "last product": "gradient product, last model", "trak": "TRAK, last model"}  # fmt: skip
TRUTHS = {"leave-one-out": "leave-one-out", "zero-out": "zero-out", "halves": "halves of samples"}
STANDS_ON = (
    "A score estimates how the loss of a test sample responds to the weight of a training "
    "sample. Spearman's ρ compares the scores with exact runs, which use the same random draws. "
    "There are three kinds of exact runs. Leave-one-out runs lack one sample, so the mean of its "
    "client has one term less. Zero-out runs have zeros in place of one sample, with the same "
    "number of samples n_i. The third kind uses half of each client's samples. The score of an "
    "exact run is the sum of the scores of its samples, each multiplied by the change of its "
    "weight. If a run lacks one sample, each other sample of the same client gains the weight "
    "1/(n_i − 1). ρ is computed for each test sample, and then averaged. Intervals are 95% "
    "intervals over test samples, for one seed. Methods from the literature use neither the "
    "optimizer nor the schedule. Therefore their scores are multiplied by the client's share of "
    "the updates, which is its number of participations divided by n_i. Influence uses the "
    "Gauss–Newton matrix and 30 steps of conjugate gradients. Its damping is the given multiple "
    "of the mean eigenvalue. TRAK uses one model and no ridge."
)


RANKED = 300  # exact runs that the scores of a test sample rank, at full scale


def name_of(method: str) -> str:
    return NAMES.get(method) or method.replace("influence,", "influence, damping")


def mean(values: np.ndarray) -> Slope:
    """Return the mean of differences of correlations over test samples, with its 95% interval.

    Test samples whose loss never changes have no correlation and are ignored.
    """
    finite = values[np.isfinite(values)]
    return mean_of(finite) if len(finite) > 1 else Slope(np.nan, np.nan, np.nan)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims that our scores predict the exact runs, and that other scores are worse."""
    foretold, ahead = [], []
    for variant, truth in distinct(rows, "variant", "truth"):
        part = where(rows, variant=variant, truth=truth)
        rho = {name: where(part, method=name)["rho"] for name in distinct(part, "method")}
        trajectory_rho = rho.pop(OURS)
        mean_rho = correlation(trajectory_rho[np.isfinite(trajectory_rho)], RANKED)
        if truth != "halves":  # a first-order score predicts the effect of one sample well
            foretold.append(
                Claim(
                    f"{variant}: scores from the derivative through the run rank the {truth} "
                    "runs with Spearman's ρ ≥ 0.99.",
                    Effect.between("mean ρ over test samples", {"": mean_rho}),
                    Rule(low=0.99),
                    f"mean ρ {mean_rho.value:.4f} ({mean_rho.low:.4f} to {mean_rho.high:.4f})",
                )
            )
        leads = {name_of(name): mean(trajectory_rho - other_rho) for name, other_rho in rho.items()}
        ahead.append(
            Claim(
                f"{variant}, {TRUTHS[truth]}: scores from the derivative through the run have a "
                "higher ρ than all other scores.",
                Effect.between("lead in ρ", leads),
                POSITIVE,
                "lead in ρ: "
                + "; ".join(f"{_shown(lead, 4)} over {name}" for name, lead in leads.items()),
            )
        )
    return [*foretold, *ahead]


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table.

    The rows contain mean correlations by variant, method and kind of exact run.
    """
    truths = distinct(rows, "truth")
    lines: Rows = [("scores", *truths)]
    for variant in distinct(rows, "variant"):
        lines.append(heading(f"{variant}:", lines[0]))
        for method in distinct(rows, "method"):
            part = where(rows, variant=variant, method=method)
            estimates = (mean(where(part, truth=truth)["rho"]) for truth in truths)
            lines.append((f"  {name_of(method)}", *(_shown(estimate, 3) for estimate in estimates)))
    return lines


def _shown(estimate: Slope, digits: int) -> str:
    return f"{written(estimate.value, f'.{digits}f')} ± {estimate.high - estimate.value:.{digits}f}"


# Figures


@style.styled
def correlations(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the correlations.

    There is a panel for each kind of exact run, a line for each method, and a mark for each
    variant.
    """
    truths, methods, variants = (distinct(rows, key) for key in ("truth", "method", "variant"))
    figure, panels = style.canvas(len(truths), narrow, 2.6)
    for axes, truth in zip(panels, truths, strict=True):
        for place, (variant, look) in enumerate(zip(variants, style.SERIES, strict=False)):
            part = where(rows, variant=variant, truth=truth)
            estimates = [mean(where(part, method=method)["rho"]) for method in methods]
            value = np.array([estimate.value for estimate in estimates])
            reach = np.array([estimate.high for estimate in estimates]) - value
            at = [line + 0.2 * (place - (len(variants) - 1) / 2) for line in range(len(methods))]
            axes.errorbar(value, at, xerr=reach, fmt=look[1], color=look[0], ms=4, lw=0,
                          elinewidth=1, label=variant)  # fmt: skip
        axes.set_yticks(range(len(methods)), [name_of(method) for method in methods])
        axes.get_yticklabels()[methods.index(OURS)].set_fontweight("bold")
        axes.invert_yaxis()
        axes.set_title(truth if narrow else TRUTHS[truth], loc="left")
        axes.set_xlabel("mean Spearman's ρ")
        if axes is not panels[0] and not narrow:
            axes.set_yticklabels([])
    for axes in panels:
        axes.set_xlim(min(panel.get_xlim()[0] for panel in panels), 1.05)
    style.legend_below(figure, panels[0], 3)
    return figure


STUDY = Study(
    "attribution", Settings, cells, claims, numbers, STANDS_ON, {"attribution": correlations}
)
