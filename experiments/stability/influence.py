"""Rank sample replacements by the derivative of the final model with respect to sample weights.

If sample z of a client is replaced by z', the weight of z changes from 1 to 0, and the weight of z'
changes from 0 to 1. To first order, the final model X^R changes by D = dX^R / dw_z' - dX^R / dw_z
(`fedmuon.federated.adjoint`). For k Gaussian directions V, reverse passes compute <V, D> for all
pairs (z, z') at once. Each <V, D> is normal with variance ||D||_F^2, so the mean square of the k
products estimates ||D||_F^2. The relative error of ||D||_F is about 1 / sqrt(2 k) (Johnson and
Lindenstrauss).

If a matrix D~ near D and its norm are known, a regression makes the estimate of ||D||_F more
accurate. The regression explains the k products <V, D> by the products <V, D~>. With D = a D~ + B
and a by least squares, ||D||^2 is estimated by a^2 ||D~||^2 + sum <V, B>^2 / (k - 1), whose error
is about ||B|| / (||D|| sqrt(k)). In the matrix task, D~ is the difference of the two samples'
gradients, both of rank one, at the mean of the initial and the final model.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.analysis.report.claims import spearman
from fedmuon.config.facts import FACTS, METHOD_FACTS
from fedmuon.config.load import Config
from fedmuon.core import files
from fedmuon.core.arrays import read_tensors
from fedmuon.core.demands import Demand, Fact, Trait, require_allowed
from fedmuon.core.errors import InputError, plain
from fedmuon.core.rng import Draw, generator
from fedmuon.data.neighbours import held_out
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.federated.adjoint import Pulled, pulled_back
from fedmuon.federated.build import build_experiment
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.recipe_facts import FACTS as RECIPE_FACTS
from fedmuon.federated.recipe_facts import BuiltRecipe
from fedmuon.federated.rounds import begin
from fedmuon.federated.shards import targets_on
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import Record, RunDirectory
from fedmuon.runs.loop import OnRoundEnd, OnStart
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.matrix import MatrixTask

POOL = 2048  # maximum number of held-out samples that are tried
DIRECTIONS = 64  # k
MEMORY = 1 << 30  # bytes of adjoints
KEPT = 1 << 30  # bytes for the candidates: k numbers for each client or mini-batch
RANKING = ".neighbours.ranking"  # exists until all replacements in it have been run
PREDICTED = "predicted.csv"
LEAST = 1e-6  # share of the largest perturbation; smaller perturbations are rounding errors
CALIBRATION = {"pairs": "replacements ranked by derivatives (first order, estimated)",
               "largest_predicted": "largest predicted", "largest_drawn": "largest of drawn ones",
               "spearman": "Spearman's rho of predicted and exact perturbations",
               "largest_error": "largest relative error of a prediction"}  # fmt: skip

NO_SELECTION = "a choice of entries or a rounded number has no derivative"


def derivatives_needed(named: Callable[[Any], str], reason: str, instead: str) -> "Demand[Any]":
    """Return the demand of a feature that differentiates the final model by sample weights.

    Args:
        named: What needs the derivatives, as in `Demand`.
        reason: Why it needs them: the words that follow "because".
        instead: Another fix, as in `Demand`.
    """
    return Demand(
        named,
        {
            Trait.PRIVATE: "a private run clips its gradients, and its noise hides single samples",
            Trait.NOISE_PER_STEP: "clipping and noise hide single samples",
            Trait.PROTECTS_CLIENTS: "clipping and noise hide single samples",
            Trait.UNSMOOTH_MAP: reason,
            Trait.ROUNDS_PRODUCTS: "this rounding is larger than the effect of one sample",
            Trait.NO_WEIGHTED_MEAN: "a selection among replies has no derivative",
            Trait.NO_DERIVATIVE: reason,
            Trait.STORES_CLIENT_STATES: "client states carry derivatives into rounds that the "
            "reverse pass does not repeat",
            Trait.ENCODES_STATES: "a low-rank momentum has no derivative where singular values are "
            "equal",
            Trait.SENDS_VARIABLES: "the reverse pass follows the parameters themselves",
            Trait.VARIES_RANKS: "the reverse pass follows whole adapters",
            Trait.COMPRESSES_REPLIES: NO_SELECTION,
            Trait.COMPRESSES_MODEL: NO_SELECTION,
            Trait.HOSTILE_CLIENTS: "the reverse pass follows clients that take the steps of the "
            "optimizer",
            Trait.CLIPS_CHANGES: "the reverse pass does not follow clipping",
            Trait.MIXES_REPLIES: "a choice of neighbours has no derivative",
            Trait.CUSTOM_STAGE: "it is unknown whether the messages of your stage have a "
            "derivative",
        },
        instead,
    )


DERIVATIVES = derivatives_needed(
    lambda subject: "[stability] neighbours = 'worst'",
    "it ranks replacements by derivatives",
    "set [stability] neighbours to 'own', 'any' or 'all'",
)


def _adamw_link(built: BuiltRecipe) -> str:
    names = [link.name for link in built.recipe.chain.links if "adamw" in link.name]
    return f"the link {names[0]}" if names else ""


ADAMW_LINK = Fact(Trait.NO_DERIVATIVE, _adamw_link, "Choose another recipe, such as fedavg")


@dataclass(frozen=True)
class Candidates:
    """Held-out samples [P] that may replace training samples, and which clients may use them."""

    index: np.ndarray
    admitted: dict[int, np.ndarray]
    samples: Batch

    @classmethod
    def of(cls, run: FinishedRun, experiment: Experiment) -> "Candidates":
        """Return the held-out samples that may replace training samples, or a random subset."""
        active = np.unique(experiment.plan.schedule()).tolist()
        pools = {i: held_out(run.data, run.source, i) for i in active}
        index, limit, plan = np.unique(np.concatenate(list(pools.values()))), POOL, experiment.plan
        if plan.batch:  # k numbers are stored for each mini-batch and candidate
            batches = plan.rounds * plan.per_round * plan.steps
            limit = max(1, min(POOL, KEPT // (8 * batches * DIRECTIONS)))
        if not len(index):
            raise InputError(
                "no held-out sample has the same class label as a participant's sample, so no "
                "sample can be replaced. Lower [data] train to hold out more samples."
            )
        if len(index) > limit:
            rng = generator(run.config.federation.seed, Draw.NEIGHBOUR, block=2)
            index = np.sort(rng.choice(index, limit, replace=False))
        inputs = torch.from_numpy(run.source.rows(run.config.data.normalize, index))
        device, dtype = experiment.task.device, experiment.task.dtype
        labels = targets_on(device, dtype, run.source.labels[index])
        admitted = {i: np.flatnonzero(np.isin(index, indices)) for i, indices in pools.items()}
        return cls(index, admitted, Batch(inputs.to(device, dtype), labels))

    def groups(self, experiment: Experiment) -> Iterator["Candidates"]:
        """Yield the candidates of groups of participants, so that each group fits in memory.

        The participants are in the order of a reverse pass. With full batches, a pass stores k
        numbers for each candidate and participant.
        """
        met = list(dict.fromkeys(experiment.plan.schedule()[::-1].ravel().tolist()))
        client_bytes, no_rows = 8 * DIRECTIONS * len(self.index), np.empty(0, np.int64)
        size = len(met) if experiment.plan.batch else max(1, KEPT // client_bytes)
        for start in range(0, len(met), size):
            group = set(met[start : start + size])
            admitted = {i: rows if i in group else no_rows for i, rows in self.admitted.items()}
            yield replace(self, admitted=admitted)

    def of_client(self, client: int) -> Batch:
        """Return the candidates that may replace the client's samples."""
        place = self.admitted[client]
        if len(place) == len(self.index):
            return self.samples
        return Batch(self.samples.inputs[place], self.samples.labels[place])


@dataclass
class Slopes:
    """The products <V, dX^R / dw> for the samples and the candidates of one client.

    The products of the samples form an array [k, n_i]. Each entry of `others` is a batch: its rows
    (None for all rows), and an array [k, P] of the products of the candidates for this batch.
    """

    own: Tensor
    others: list[tuple[np.ndarray | None, Tensor]] = field(default_factory=list)

    def add(self, pulled: Pulled) -> None:
        """Add the products of one batch."""
        self.own[:, slice(None) if pulled.rows is None else pulled.rows] += pulled.own
        if pulled.rows is None and self.others:
            self.others[0][1].add_(pulled.others)
        else:
            self.others.append((pulled.rows, pulled.others.clone()))

    def differences(self) -> Iterator[Tensor]:
        """Yield, for each sample in turn, <V, D> [k, P] for all candidates that may replace it."""
        for sample, slope in enumerate(self.own.T):
            terms = [numbers for rows, numbers in self.others if rows is None or sample in rows]
            yield torch.stack(terms).sum(0) - slope[:, None] if terms else 0 * self.others[0][1]


@dataclass(frozen=True)
class Gradients:
    """Gradients u s^T of samples at one model.

    `slopes` contains s [n, c], and `along` contains <V, u s^T> [k, n].
    """

    samples: Batch
    slopes: Tensor
    along: Tensor

    @classmethod
    def of(cls, task: MatrixTask, model: Params, towards: Params, samples: Batch) -> "Gradients":
        """Return the gradients, and their products with the directions [k, 1, d, c]."""
        slopes = task.slopes(model, samples)[0]
        turned = torch.tensordot(samples.inputs, towards["weight"][:, 0].transpose(0, 1), 1)
        return cls(samples, slopes, (turned * slopes[:, None]).sum(-1).T)

    def some(self, rows: slice | np.ndarray) -> "Gradients":
        samples = Batch(self.samples.inputs[rows], self.samples.labels[rows])
        return Gradients(samples, self.slopes[rows], self.along[:, rows])


@dataclass(frozen=True)
class Ranking:
    """The replacements with the largest predictions, and the same number of random replacements.

    Attributes:
        rows: For each replacement, the client, the position of the sample, and the new sample [T,
            3].
        predicted: Predicted perturbations [T].
        top: The first `top` rows have the largest predictions. All other rows are random.
        pairs: Number of replacements that were compared.
    """

    rows: np.ndarray
    predicted: np.ndarray
    top: int
    pairs: int


def rank_replacements(
    run: FinishedRun,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
) -> Ranking:
    """Rank all replacements, and return the `trials` samples with the largest predictions.

    `on_round_end` is called after each round of a reverse pass.
    """
    best, drawn, pairs = [], [], 0
    rng = generator(run.config.federation.seed, Draw.NEIGHBOUR, block=3)
    for client, index, moved in predictions(run, on_round_end, on_start):
        at, pairs = np.arange(len(moved)), pairs + moved.size
        any_other = rng.integers(len(index), size=len(moved))
        for chunks, other in ((best, moved.argmax(1)), (drawn, any_other)):
            chunks.append(
                np.stack([np.full_like(at, client), at, index[other], moved[at, other]], 1)
            )
    ranked, random = np.concatenate(best), np.concatenate(drawn)
    first = np.argsort(-ranked[:, 3], kind="stable")[: run.config.stability.trials]
    rows = np.concatenate([ranked[first], random[rng.permutation(len(random))[: len(first)]]])
    return Ranking(rows[:, :3].astype(np.int64), rows[:, 3], len(first), pairs)


def predictions(
    run: FinishedRun,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield, for each participant, its candidates and the estimate of ||D||_F for every pair.

    A pair is a sample of the participant and a candidate, so the estimates have shape [n_i, P].
    """
    experiment = smooth(run)
    offsets = experiment.shards.offsets
    start = begin(experiment.recipe, experiment.task, run.config.federation.seed)
    candidates, towards = Candidates.of(run, experiment), _directions(run, start.params)
    parts, groups = list(parts_in_memory(experiment, towards)), list(candidates.groups(experiment))
    near = _regressor(run, experiment, start, towards, candidates)
    on_start(0, len(parts) * len(groups) * experiment.plan.rounds)
    counter = itertools.count(1)

    def heard() -> None:
        on_round_end({"done": next(counter), "ranking": "ranking by derivatives"})

    for group in groups:
        try:
            blocks = [_slopes(experiment, start, part, group, heard) for part in parts]
        except RuntimeError as error:  # autograd may fail in the user's own objects
            raise InputError(
                f"torch cannot differentiate this run ({plain(str(error), 200)}). Set "
                "[stability] neighbours to 'own', 'any' or 'all'."
            ) from error
        for client in blocks[0]:
            if not len(place := group.admitted[client]):
                continue
            per_part = [block[client] for block in blocks]  # one block per part of the directions
            others = [
                (same[0][0], torch.cat([numbers for _, numbers in same]))
                for same in zip(*(block.others for block in per_part), strict=True)
            ]
            slopes = Slopes(torch.cat([block.own for block in per_part]), others)
            if near is None:
                moved = torch.stack([d.square().mean(0).sqrt() for d in slopes.differences()])
            else:
                rows = slice(int(offsets[client]), int(offsets[client + 1]))
                moved = norms(slopes, near[0].some(rows), near[1].some(place))
            yield client, group.index[place], moved.cpu().numpy()


def _regressor(
    run: FinishedRun,
    experiment: Experiment,
    start: ServerState,
    towards: Params,
    others: Candidates,
) -> tuple[Gradients, Gradients] | None:
    """Return the gradients of samples and candidates in closed form, or None for other tasks."""
    task, shards = experiment.task, experiment.shards
    if not isinstance(task, MatrixTask):
        return None
    last = read_tensors(run.out / "model.safetensors")[0]["weight"].to(task.device, task.dtype)
    middle = {"weight": (start.params["weight"] + last) / 2}
    samples = Batch(shards.inputs, shards.labels)
    return (
        Gradients.of(task, middle, towards, samples),
        Gradients.of(task, middle, towards, others.samples),
    )


def smooth(run: FinishedRun, demand: "Demand[Any]" = DERIVATIVES) -> Experiment:
    """Return the run's experiment in float64.

    Raise InputError if the final model has no derivative with respect to the sample weights. The
    error names the feature that has this demand.
    """
    config = run.config
    require_smooth(config, run.experiment.recipe, demand)
    if run.experiment.task.dtype == torch.float64:
        return run.experiment
    engine = config.engine.model_copy(update={"dtype": "float64"})
    exact = config.model_copy(update={"engine": engine})
    experiment = build_experiment(exact, run.data)
    return replace(experiment, plan=run.experiment.plan)


def require_smooth(
    config: Config, recipe: Recipe | None = None, demand: "Demand[Any]" = DERIVATIVES
) -> None:
    """Raise InputError if the final model cannot be differentiated.

    A built recipe also shows facts of a custom recipe, which the config does not show.
    """
    require_allowed(config, (demand,), (*FACTS, *METHOD_FACTS))
    if recipe is not None:
        built = BuiltRecipe(config, recipe)
        require_allowed(built, (demand,), (*RECIPE_FACTS, ADAMW_LINK))


def _directions(run: FinishedRun, params: Params) -> Params:
    rng = generator(run.config.federation.seed, Draw.NEIGHBOUR, block=4)
    return {
        name: torch.from_numpy(rng.standard_normal((DIRECTIONS, *value.shape))).to(value)
        for name, value in params.items()
    }


def parts_in_memory(experiment: Experiment, towards: Params) -> Iterator[Params]:
    """Split the directions into parts that fit in memory.

    A reverse pass stores several copies of the directions for each client. In the matrix task, it
    also stores the logits of one client and of all candidates.
    """
    task, sizes = experiment.task, np.diff(experiment.shards.offsets)
    entries = sum(value[0].numel() for value in towards.values()) * experiment.plan.per_round
    if isinstance(task, MatrixTask):
        entries += task.classes * (int(sizes.max()) + POOL)
    size = max(1, MEMORY // (64 * entries))
    for place in torch.arange(len(next(iter(towards.values())))).split(size):
        yield {name: value[place] for name, value in towards.items()}


def _slopes(
    experiment: Experiment,
    start: ServerState,
    towards: Params,
    candidates: Candidates,
    heard: Callable[[], None],
) -> dict[int, Slopes]:
    """Run one reverse pass, and return the `Slopes` of each participant."""
    by_client: dict[int, Slopes] = {}
    for pulled in pulled_back(experiment, start, towards, candidates.of_client, heard):
        size = experiment.shards.size(pulled.client)
        fresh = Slopes(pulled.own.new_zeros(len(pulled.own), size))
        by_client.setdefault(pulled.client, fresh).add(pulled)
    return by_client


def norms(one: Slopes, own: Gradients, others: Gradients) -> Tensor:
    """Return estimates of ||D||_F for all pairs, as an array [n_i, P].

    The estimates use a regression on the differences of gradients.
    """
    pair = (own.slopes[None], own.samples, others.slopes[None], others.samples)
    apart, estimates = gradient_distances(*pair)[0].square(), []
    for sample, difference in enumerate(one.differences()):
        near = others.along - own.along[:, sample, None]
        share = ((difference * near).sum(0) / near.square().sum(0)).nan_to_num_()
        residual = (difference - share * near).square().sum(0) / (len(near) - 1)
        estimates.append((share.square() * apart[sample] + residual).sqrt())
    return torch.stack(estimates)


def gradient_distances(slopes: Tensor, own: Batch, slopes_there: Tensor, there: Batch) -> Tensor:
    """Return ||u s^T - v t^T||_F [S, n, P] for u [n, d], s [S, n, c], v [P, d] and t [S, P, c].

    Both matrices have rank one, so the square is |u|^2 |s|^2 + |v|^2 |t|^2 - 2 (u . v)(s . t). The
    inputs u and v may also be stacks.
    """
    own_squares = own.inputs.square().sum(-1) * slopes.square().sum(-1)
    other_squares = there.inputs.square().sum(-1) * slopes_there.square().sum(-1)
    cross = (own.inputs @ there.inputs.mT) * (slopes @ slopes_there.mT)
    return (own_squares[:, :, None] + other_squares[:, None, :] - 2 * cross).clamp_min_(0).sqrt_()


def stored_ranking(run: FinishedRun, on_round_end: OnRoundEnd, on_start: OnStart) -> Ranking:
    """Return the ranking that an interrupted command stored for this run, or compute one."""
    file, home = run.out / RANKING, RunDirectory(run.out).mark
    lines = files.whole_lines(file)
    if lines and (stored := files.unsealed(lines[0], home)) is not None:
        rows = np.array(stored["rows"], dtype=np.int64).reshape(-1, 3)
        return Ranking(rows, np.array(stored["predicted"]), stored["top"], stored["pairs"])
    ranking = rank_replacements(run, on_round_end, on_start)
    record = {"rows": ranking.rows.tolist(), "predicted": ranking.predicted.tolist()}
    record |= {"top": ranking.top, "pairs": ranking.pairs}
    files.write_bytes(file, files.sealed(record, home).encode())
    return ranking


def calibration(ranking: Ranking, moved: np.ndarray) -> Record:
    """Compare the predictions of a ranking with the exact perturbations.

    The predictions are first-order estimates. They are not certificates.
    """
    predicted, floor = ranking.predicted, LEAST * moved.max()
    error = np.abs(predicted - moved) / np.maximum(moved, floor) if floor else np.zeros(1)
    rho = spearman(predicted, moved)
    return {
        "pairs": ranking.pairs,
        "compared": len(moved),
        "spearman": rho if np.isfinite(rho) else None,
        "largest_error": float(error.max()),
        "largest_predicted": float(predicted.max()),
        "largest": float(moved.max()),
        "largest_drawn": float(moved[ranking.top :].max()),
    }
