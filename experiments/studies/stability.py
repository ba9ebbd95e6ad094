"""Kind `stability`: a published grid of runs, each with its neighbours and its bound.

The number of samples n, alpha, K and the seed decide who takes part and which samples there are.
All runs that share these four form a stack. The pairs (eta, lambda) of a stack, each a run with its
neighbours, run as one program. Then the theory is applied to each run.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from fedmuon.analysis import Realized
from fedmuon.analysis.report.verdicts import UNDECIDED
from fedmuon.config.load import Config
from fedmuon.config.read_if import reads, refusal
from fedmuon.config.schema import Count, Natural, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar, Table, validate
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Law, draw, stack
from fedmuon.data.source import Source
from fedmuon.experiments.stability import bound, gap
from fedmuon.experiments.stability.bound import Verdict
from fedmuon.experiments.stability.measure import Loss, measured_losses
from fedmuon.experiments.stability.reachable_ball import start_of
from fedmuon.experiments.studies.stability_findings import findings
from fedmuon.experiments.studies.study import RunStudy
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import (
    PUBLISHED_FOR,
    TEST,
    SuiteRequest,
    Tables,
    cell,
    merged,
)
from fedmuon.experiments.suites.suite import Rows, Work
from fedmuon.federated.build import DTYPES, build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import Experiment, begin, distances, run_neighbours
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params
from fedmuon.tasks.matrix import rate, supported

REPLICAS = 256  # of one stack, at most
# 001, section 5 and Table 1; float64, because float32 hides perturbations of 1e-5.
BASE: dict[str, dict[str, Scalar]] = {
    "federation": {"clients": 20, "rounds": 50},
    "local": {"recipe": "fedmuon", "steps": 1, "momentum": 0.9},
    "orthogonalizer": {"name": "smoothed-polar"},
    "engine": {"dtype": "float64"},
}
SETTLED = {
    "data.train": "[grid]",
    "data.alpha": "[grid]",
    "data.name": "--data",
    "federation.per-round": "[grid]",
    "federation.seed": "seeds",
    "local.lr": "[grid]",
    "orthogonalizer.lambda": "[grid]",
    "stability.trials": "trials",
}


class Grid(Table):
    """What varies; every combination is run."""

    train: Annotated[list[Count], Field(min_length=1)]
    per_round: Annotated[list[Count], Field(min_length=1)]
    alpha: Annotated[list[Positive], Field(min_length=1)]
    lr: Annotated[list[Positive], Field(min_length=1)]
    lambda_: Annotated[list[Positive], Field(min_length=1)]


class Published(Table):
    """A line of 001, Table 2."""

    runs: Count
    gap_within_bound: float
    mean_gap: float
    mean_bound: float
    mean_perturbation: float


class Suite(Table):
    """A grid, its seeds, and neighbours a run; `base` has config tables that differ from BASE."""

    title: str
    seeds: Annotated[list[Natural], Field(min_length=1)]
    trials: Natural
    grid: Grid
    base: dict[str, dict[str, Scalar]] = Field(default_factory=dict)
    published: dict[str, Published] = Field(default_factory=dict)


def stacks(suite: Suite, source: Source | None, changes: Tables) -> "list[Stack]":
    """The suite's stacks; `changes` are config tables that override its own.

    Sizes are cut to what the source holds; None is a source without an end.
    """
    contents.require_free("--set", changes, SETTLED)
    contents.require_free("[base]", suite.base, {**SETTLED, "data.name": ""})
    base = merged(merged(BASE, suite.base), changes)
    test, most = contents.room(source, base.get("data", {}).get("test", TEST))
    grid, share = suite.grid, max(1, REPLICAS // (1 + suite.trials))
    pairs = list(itertools.product(grid.lr, grid.lambda_))
    sizes = sorted({min(n, most) for n in grid.train})
    every = itertools.product(sizes, grid.alpha, grid.per_round, suite.seeds)
    found = []
    for train, alpha, per_round, seed in every:
        setting: dict[str, dict[str, Scalar]] = {
            "data": {"train": train, "test": test, "alpha": alpha},
            "federation": {"per-round": per_round, "seed": seed},
            "local": {"lr": pairs[0][0]},
            "orthogonalizer": {"lambda": pairs[0][1]},
        }
        shared = cell(base, setting)
        _require_used(suite, shared)
        for first in range(0, len(pairs), share):
            several = tuple(pairs[first : first + share])
            stack = Stack(shared, several, suite.trials)
            found.append(dataclasses.replace(stack, config=stack.at(several[0])))
    for place, asked in (("--set", changes), ("[base]", suite.base)):
        contents.require_read(place, asked, [stack.config for stack in found])
    return found


def _require_used(suite: Suite, config: Config) -> None:
    """Reject an engine that no stack uses, and several lambdas that no map reads."""
    if config.engine.name != "inline":
        raise InputError(
            f"[engine] name = '{config.engine.name}' has no effect: a stack is one program, so "
            "leave it out, and spread the stacks with --ray-address"
        )
    if len(suite.grid.lambda_) > 1 and not reads(config, "orthogonalizer.lambda"):
        raise InputError(f"[grid] {refusal(config, 'orthogonalizer.lambda', suite.grid.lambda_)}")


# A cell: one stack of runs and neighbours.

Pair = tuple[float, float]  # eta and lambda
# As asked for, with C_hp = 1, and with the constants of all models.
Verdicts = tuple[Verdict, Verdict, Verdict]


@dataclass(frozen=True)
class Made:
    """What all runs of a stack share; `drawn` [T, 3] are the neighbours of each."""

    config: Config
    source: Source
    data: FederatedData
    drawn: np.ndarray
    experiment: Experiment

    @property
    def initial(self) -> np.ndarray:
        """X0 [d, c]."""
        seed = self.config.federation.seed
        return (
            begin(self.experiment.recipe, self.experiment.task, seed)
            .params["weight"][0]
            .cpu()
            .numpy()
        )

    @property
    def client(self) -> np.ndarray:
        """Whose sample each neighbour replaces [T]."""
        return self.drawn[:, 0]


@dataclass(frozen=True)
class Stack:
    """Runs that share samples and schedule; `config` has the first pair (eta, lambda)."""

    config: Config
    pairs: tuple[Pair, ...]
    trials: int

    @property
    def name(self) -> str:
        """Its unique name within the suite."""
        data, federation = self.config.data, self.config.federation
        lr, lam = self.pairs[0]
        return (
            f"n{data.train}-alpha{data.alpha:g}-k{federation.per_round}-seed{federation.seed}"
            f"-lr{lr:g}-lambda{lam:g}"
        )

    @property
    def size(self) -> int:
        """Trajectories: runs and neighbours."""
        return len(self.pairs) * (1 + self.trials)

    @property
    def cost(self) -> float:
        """Samples that its trajectories see, as far as the config says."""
        federation = self.config.federation
        share = federation.per_round / federation.clients
        return self.size * self.config.data.train * share * federation.rounds

    def compute(self) -> Record:
        """Lines of runs.csv and neighbours.csv, and the work: flop in products, and seconds."""
        start = time.perf_counter()
        made = self._made()
        models = self._trained(made)
        moved = self._moved(made, models)
        d, c = shape = models["weight"].shape[-2:]
        seen = made.data.sizes[made.experiment.plan.schedule()].sum() * made.config.local.steps
        each = zip(self.pairs, moved, strict=True)
        cases = [self._case(pair, made, shape, far) for pair, far in each]
        judged = [
            (
                bound.judge(case),
                bound.judge(case.under(c_hp=1.0)),
                bound.judge(case.under(constants="global")),
            )
            for case in cases
        ]
        ranged = [*zip(cases, (own for own, *_ in judged), strict=True)]
        tops = [gap.proved_range(*one) for one in ranged]
        losses = self._losses(made, models, tops)
        why = [gap.why_one(*one) for one in ranged]
        return {
            "runs": self._runs(made, judged, losses, moved),
            "neighbours": self._neighbours(made, judged, moved),
            **_standing(judged),
            **gap.as_record(why, self._then(made, models, ranged, losses, why)),
            # of products of a sample with the weights [d, c], forwards and backwards
            "flop": 4.0 * d * c * float(seen) * self.size,
            "seconds": time.perf_counter() - start,
        }

    def _made(self) -> Made:
        config = resolve(self.config)
        if config.task.name != "matrix":
            raise InputError(
                "a suite holds runs to their bound: set task.name = 'matrix', which has one"
            )
        source = read_source(config)
        data = build_data(config, source)
        drawn = draw(data, source, self.trials, config.federation.seed, _law(config))
        # eta and lambda [2, S]: each pair for its run and all its neighbours
        pairs = torch.tensor(self.pairs, dtype=torch.float64)
        each = pairs.repeat_interleave(1 + self.trials, 0).T.contiguous()
        experiment = build_experiment(config, data, None, *each)
        return Made(config, source, data, drawn, experiment)

    def _trained(self, made: Made) -> Params:
        """The last models [S, ...], every run before its neighbours."""
        config = made.config
        neighbours = stack(made.source, made.drawn, config.data.normalize)
        return run_neighbours(
            made.experiment, neighbours.repeated(len(self.pairs)), config.federation.seed
        )

    def _losses(self, made: Made, models: Params, tops: list[float]) -> list[Loss]:
        """Those of the runs, not of the neighbours; each lie in an interval of that length."""
        runs = {name: value[:: 1 + self.trials] for name, value in models.items()}
        of = made.config, made.data, made.source.classes, made.experiment
        return measured_losses(*of, runs, tops)

    def _then(
        self,
        made: Made,
        models: Params,
        ranged: list[tuple[bound.Case, Verdict]],
        losses: list[Loss],
        why: list[gap.Why],
    ) -> list[str]:
        """What becomes of each run's claim, after the changes if some are named."""
        verdicts = [verdict for _, verdict in ranged]
        if any(one.changes for one in why):
            after = [gap.after_changes(case) for case, _ in ranged]
            verdicts, tops = map(list, zip(*after, strict=True))
            try:
                losses = self._losses(made, models, tops)
            except InputError:  # rounded otherwise, they are further apart
                return [UNDECIDED]
        gaps = (one.gap for one in losses)
        return [*map(gap.verdict_on, gaps, verdicts)]

    def _moved(self, made: Made, models: Params) -> np.ndarray:
        """How far each neighbour ends from its run [pairs, T], in the Frobenius norm."""
        moved = distances(models, len(self.pairs))
        # No step reads a sample of a client that never takes part: what is left there is rounding.
        moved[:, ~np.isin(made.client, made.experiment.plan.schedule())] = 0.0
        return moved

    def _runs(
        self, made: Made, judged: list[Verdicts], losses: list[Loss], moved: np.ndarray
    ) -> list[Record]:
        """The lines of runs.csv."""
        every = zip(self.pairs, judged, losses, moved, strict=True)
        return [
            self._setting(pair)
            | _run(verdicts, loss, far, made.client)
            | {
                "accuracy": loss.accuracy,
                "train_loss": loss.gap.empirical,
                "test_loss": loss.gap.empirical + loss.plain,
            }
            for pair, verdicts, loss, far in every
        ]

    def _neighbours(self, made: Made, judged: list[Verdicts], moved: np.ndarray) -> list[Record]:
        """The lines of neighbours.csv."""
        return [
            self._setting(pair) | line
            for pair, (verdict, *_), far in zip(self.pairs, judged, moved, strict=True)
            for line in _neighbours(made, verdict, far)
        ]

    def at(self, pair: Pair, **stability: Scalar) -> Config:
        """The config of one of its runs."""
        config = self.config
        return config.model_copy(
            update={
                "local": config.local.model_copy(update={"lr": pair[0]}),
                "orthogonalizer": config.orthogonalizer.model_copy(update={"lambda_": pair[1]}),
                "stability": config.stability.model_copy(update=stability),
            }
        )

    def _case(self, pair: Pair, made: Made, shape: tuple[int, ...], far: np.ndarray) -> bound.Case:
        """One run, whose neighbours moved so far [T]."""
        plan, (d, c) = made.experiment.plan, shape
        part = Realized(plan.schedule(), plan.rows if plan.batch else None)
        start, moved = start_of(made.initial, made.source), np.zeros(len(made.data.sizes))
        np.maximum.at(moved, made.client, far)
        return bound.Case(
            self.at(pair), made.data.sizes, part, (d, c),
            moved=moved, start=start, factors=plan.factors(),
        )  # fmt: skip

    def _setting(self, pair: Pair) -> Record:
        data, federation = self.config.data, self.config.federation
        return {
            "n": data.train,
            "lr": pair[0],
            "lambda": pair[1],
            "alpha": data.alpha,
            "per_round": federation.per_round,
            "seed": federation.seed,
        }


def _law(config: Config) -> Law:
    """How a suite draws its neighbours."""
    if config.stability.neighbours in ("own", "any"):
        return config.stability.neighbours
    raise InputError("a suite draws neighbours at random: set stability.neighbours to own or any")


def _standing(judged: list[Verdicts]) -> Record:
    """What becomes of each run's bound, and what the bounds assume."""
    bounds = [verdict.bound for verdict, *_ in judged]
    return {
        "status": [bound.status if bound else "refused" for bound in bounds],
        "assumes": list(bounds[0].assumptions if bounds[0] else ()),
    }


def _run(verdicts: Verdicts, loss: Loss, moved: np.ndarray, client: np.ndarray) -> Record:
    """What a run's line of runs.csv holds beside its setting."""
    value, one, wide = (each.bound.value if each.bound else math.nan for each in verdicts)
    return {
        "gap": loss.gap.gap,
        "bound": value,
        "mean_perturbation": float(moved.mean()) if len(moved) else math.nan,
        "max_perturbation": float(moved.max(initial=0.0)),
        "within": loss.gap.gap <= value,
        "gap_low": loss.gap.low,
        "gap_high": loss.gap.high,
        "table_gap": loss.plain,
        "bound_one": one,
        "share": _share(verdicts[0], moved, client),
        "bound_global": wide,
        "share_global": _share(verdicts[2], moved, client),
        "range": verdicts[0].loss_bound,
    }


def _share(verdict: Verdict, moved: np.ndarray, client: np.ndarray) -> float:
    """The largest perturbation over its certificate."""
    promised = _known(verdict.certificates, client)
    sampled = promised != 0
    return float((moved[sampled] / promised[sampled]).max(initial=0.0))


def _known(values: np.ndarray | None, client: np.ndarray) -> np.ndarray:
    """Those of the clients; nan where the theory refuses."""
    return np.full(len(client), np.nan) if values is None else values[client]


def _neighbours(made: Made, verdict: Verdict, moved: np.ndarray) -> list[Record]:
    """What its neighbours' lines hold beside the setting; nan where the theory refuses."""
    data, drawn, client, labels = made.data, made.drawn, made.client, made.source.labels
    index = data.train_index[data.order[data.offsets[client] + drawn[:, 1]]]
    columns = {
        "trial": np.arange(len(drawn)),
        "client": client,
        "index": index,
        "replacement": drawn[:, 2],
        "size": data.sizes[client],
        "perturbation": moved,
        "exposure": _known(verdict.exposures, client),
        "certificate": _known(verdict.certificates, client),
        "old_label": labels[index],
        "new_label": labels[drawn[:, 2]],
    }
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


# The suite.

SIDE = 2048  # of the matrices whose product is timed
COMPARED = (
    "Published values are of {}, these of {} ({} scale): compare signs, orders and trends, not "
    "digits. The paper prints neither its C_hp nor its start."
)


def work(content: dict[str, Any], asked: SuiteRequest) -> "Stability":
    """The suite as stacks of runs that share samples and schedule."""
    suite = validate(Suite, content)
    named = {"data": {"name": asked.data}}
    read = merged(merged(suite.base, asked.changes), named)
    source = read_source(cell({"data": read["data"]})) if asked.data != "synthetic" else None
    suite = suite.model_copy(update={"base": merged(suite.base, named)})
    every = stacks(suite, source, asked.changes)
    return Stability(asked, "stability", suite.title, every, suite.published)


@dataclass(frozen=True)
class Stability(Work):
    """A grid as stacks; `lines` are those of 001, Table 2, by data set."""

    cells: Sequence[Stack]
    lines: Mapping[str, Published]
    place: ClassVar[str] = "stacks"
    counted: ClassVar[str] = "trajectories"

    @property
    def decisive(self) -> list[Any]:
        """Suite, scale, and what every stack is computed from."""
        settings = [
            [one.name, one.pairs, one.trials, one.config.model_dump(by_alias=True)]
            for one in self.cells
        ]
        return [self.asked.stem, self.asked.scale, settings]

    @property
    def configs(self) -> Sequence[Config]:
        """One a run: a stack has one for each pair (eta, lambda)."""
        return [one.at(pair) for one in self.cells for pair in one.pairs]

    @property
    def published(self) -> Published | None:
        """The line of the stability note's Table 2 (001) to compare with."""
        return self.lines.get(PUBLISHED_FOR.get(self.asked.data, ""))

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """runs.csv, neighbours.csv and summary.csv."""
        head = {"suite": self.asked.stem, "data": self.asked.data}
        lines = [head | {"source": "measured"} | _aggregate(records)]
        if self.published:
            lines.append(head | {"source": "001, Table 2"} | self.published.model_dump())
        return {
            "runs": [head | run for record in records for run in record["runs"]],
            "neighbours": [head | line for record in records for line in record["neighbours"]],
            "summary": lines,
        }

    def summary(self, records: list[Record]) -> Record:
        """What was done, how fast, and what it stands on."""
        data, scale = self.asked.data, self.asked.scale
        config, source = resolve(self.cells[0].config), PUBLISHED_FOR.get(data, "")
        seconds = sum(record["seconds"] for record in records)
        count = sum(one.size for one in self.cells)
        flop = sum(record["flop"] for record in records)
        status = set(chain(*(record["status"] for record in records)))
        return {
            "trajectories": count,
            "trajectories_per_second": count / seconds,
            "share_of_gemm": flop / seconds / best_rate(config),
            "measured": _aggregate(records),
            "published": self.published and {"data": source} | self.published.model_dump(),
            "note": COMPARED.format(source, data, scale) if self.published else "",
            "constant": config.stability.lipschitz,
            "delta": config.stability.delta,
            "machine": {"device": config.engine.device},
            **contents.guess(read_source(config), config),
            "status": status.pop() if len(status) == 1 else "mixed",
            "assumptions": _once(record["assumes"] for record in records),
            "gap_notes": _once(record.get("gap_notes", []) for record in records),
            "gap_changes": _once(record.get("gap_changes", []) for record in records),
            "gap_then": _once(record.get("gap_then", []) for record in records),
        }


def _once(lists: Iterable[list[str]]) -> list[str]:
    """All items in order, without repeats."""
    return list(dict.fromkeys(chain(*lists)))


def _aggregate(records: list[Record]) -> Record:
    """The columns of 001, Table 2 over all runs; its gap is test minus weighted train loss."""
    runs = [run for record in records for run in record["runs"]]
    columns = {"gap_within_bound": "within", "mean_gap": "table_gap", "mean_bound": "bound",
               "mean_perturbation": "mean_perturbation"}  # fmt: skip
    means = {name: float(np.mean([run[of] for run in runs])) for name, of in columns.items()}
    return {"runs": len(runs), **means}


def best_rate(config: Config) -> float:
    """Flop per second of this machine's best large product, in the precision of the runs."""
    dtype, device = DTYPES[config.engine.dtype], torch.device(config.engine.device)
    return max(rate(name, SIDE, SIDE, SIDE, dtype, device) for name in supported(dtype, device))


STUDY = RunStudy("stability", work, findings)
