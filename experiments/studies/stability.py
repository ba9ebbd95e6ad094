"""Kind `stability`: a published grid of runs, each with neighbours and a bound.

The number of samples n, alpha, K and the seed determine the participants and the samples. All runs
with the same four values form a stack. A stack contains a run for each pair (eta, lambda), and the
neighbours of each run. All of them are trained together in one batch. Then the certificate and the
bound of each run are computed.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from fedmuon.analysis import Realized
from fedmuon.analysis.report.verdicts import INCONCLUSIVE
from fedmuon.analysis.theory.trajectories import Start
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Natural, Positive, reads, refusal
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar, Table, validate
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import draw, stack
from fedmuon.data.source import Source
from fedmuon.experiments.stability import certificates, gap
from fedmuon.experiments.stability.certificates import Certificate, start_of
from fedmuon.experiments.stability.finished_run import Loss, measured_losses
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
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.neighbour_runs import distances, run_neighbours
from fedmuon.federated.rounds import begin
from fedmuon.runs.directory import Record
from fedmuon.tasks.matrix import rate, supported

REPLICAS = 256  # maximum size of one stack
# Stability note, section 5 and Table 1. float64, because float32 hides perturbations of 1e-5.
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
    """The values of each factor of a grid.

    The suite trains a run for every combination of the values.
    """

    train: Annotated[list[Count], Field(min_length=1)]
    per_round: Annotated[list[Count], Field(min_length=1)]
    alpha: Annotated[list[Positive], Field(min_length=1)]
    lr: Annotated[list[Positive], Field(min_length=1)]
    lambda_: Annotated[list[Positive], Field(min_length=1)]


class Published(Table):
    """A row of the Stability note, Table 2."""

    runs: Count
    gap_within_bound: float
    mean_gap: float
    mean_bound: float
    mean_perturbation: float


class Suite(Table):
    """The keys that the suite's TOML file may contain.

    Tables in `base` override those in `BASE`.
    """

    title: str
    seeds: Annotated[list[Natural], Field(min_length=1)]
    trials: Natural
    grid: Grid
    base: dict[str, dict[str, Scalar]] = Field(default_factory=dict)
    published: dict[str, Published] = Field(default_factory=dict)


# Cells: each is one stack of runs and neighbours

Pair = tuple[float, float]  # (eta, lambda)
# Certificates as requested, with C_hp = 1, and with the constants of all models.
Verdicts = tuple[Certificate, Certificate, Certificate]


@dataclass(frozen=True)
class StackData:
    """Data that all runs of a stack share.

    The rows of `draws` define the neighbours of each run.
    """

    config: Config
    source: Source
    data: FederatedData
    draws: np.ndarray
    client: np.ndarray  # the client whose sample each neighbour replaces [T]
    experiment: Experiment
    start: Start | None  # known facts about X0


@dataclass(frozen=True)
class Stack:
    """Runs that share samples and schedule. `config` contains the first pair (eta, lambda)."""

    config: Config
    pairs: tuple[Pair, ...]
    trials: int

    @property
    def name(self) -> str:
        """The unique name of the stack in the suite."""
        data, federation = self.config.data, self.config.federation
        lr, lam = self.pairs[0]
        return (
            f"n{data.train}-alpha{data.alpha:g}-k{federation.per_round}-seed{federation.seed}"
            f"-lr{lr:g}-lambda{lam:g}"
        )

    @property
    def size(self) -> int:
        """The number of trainings: all runs and all their neighbours."""
        return len(self.pairs) * (1 + self.trials)

    @property
    def cost(self) -> float:
        """The approximate number of samples that the trainings process."""
        federation = self.config.federation
        share = federation.per_round / federation.clients
        return self.size * self.config.data.train * share * federation.rounds

    def at(self, pair: Pair, **stability: Scalar) -> Config:
        """Return the config of the run with this pair (eta, lambda)."""
        config = self.config
        return config.model_copy(
            update={
                "local": config.local.model_copy(update={"lr": pair[0]}),
                "orthogonalizer": config.orthogonalizer.model_copy(update={"lambda_": pair[1]}),
                "stability": config.stability.model_copy(update=stability),
            }
        )

    def compute(self) -> Record:
        """Train the stack.

        Return the rows of runs.csv and neighbours.csv, the number of flop and the seconds.
        """
        begun = time.perf_counter()
        shared = self._prepare()
        config, experiment, plan = shared.config, shared.experiment, shared.experiment.plan
        # The final models [S, ...]; each run comes before its neighbours.
        neighbours = stack(shared.source, shared.draws, config.data.normalize)
        models = run_neighbours(
            experiment, neighbours.repeated(len(self.pairs)), config.federation.seed
        )
        # The distance of each neighbour from its run [pairs, T] in the Frobenius norm. No step uses
        # samples of a client that never takes part, so a distance is only rounding in that case.
        moved = distances(models, len(self.pairs))
        moved[:, ~np.isin(shared.client, plan.schedule())] = 0.0
        d, c = models["weight"].shape[-2:]
        part = Realized(plan.schedule(), plan.rows if plan.batch else None)
        cases = []
        for pair, far in zip(self.pairs, moved, strict=True):
            furthest = np.zeros(len(shared.data.sizes))  # maximum over each client's neighbours
            np.maximum.at(furthest, shared.client, far)
            case = certificates.CertifiedSetting(
                self.at(pair), shared.data.sizes, part, (d, c),
                moved=furthest, start=shared.start, factors=plan.factors(),
            )  # fmt: skip
            cases.append(case)
        verdicts = [
            (
                certificates.certify(case),
                certificates.certify(case.under(c_hp=1.0)),
                certificates.certify(case.under(constants="global")),
            )
            for case in cases
        ]
        ranged = [
            (case, certificate) for case, (certificate, *_) in zip(cases, verdicts, strict=True)
        ]
        runs = {name: value[:: 1 + self.trials] for name, value in models.items()}
        arguments = config, shared.data, shared.source.classes, experiment, runs
        losses = measured_losses(*arguments, [gap.proved_range(*entry) for entry in ranged])
        reasons = [gap.why_one(*entry) for entry in ranged]
        bounds = [certificate.bound for _, certificate in ranged]
        then = _after_changes(ranged, reasons, losses, partial(measured_losses, *arguments))
        samples = shared.data.sizes[plan.schedule()].sum() * config.local.steps
        return {
            "runs": self._run_rows(shared, verdicts, losses, moved),
            "neighbours": self._neighbour_rows(shared, verdicts, moved),
            "status": [bound.status if bound else "refused" for bound in bounds],
            "assumes": list(bounds[0].assumptions if bounds[0] else ()),
            **gap.as_record(reasons, then),
            # products of samples with the weights [d, c], in forward and backward passes
            "flop": 4.0 * d * c * float(samples) * self.size,
            "seconds": time.perf_counter() - begun,
        }

    def _prepare(self) -> StackData:
        config = resolve(self.config)
        if config.task.name != "matrix":
            raise InputError(
                f"task.name is {config.task.name!r}, but this suite compares runs with a bound "
                "that only the task 'matrix' has. Set task.name = 'matrix'."
            )
        law = config.stability.neighbours
        if law not in ("own", "any"):
            raise InputError(
                f"stability.neighbours is {law!r}, but this suite draws neighbours at random. "
                "Set stability.neighbours to 'own' or 'any'."
            )
        source = read_source(config)
        data = build_data(config, source)
        draws = draw(data, source, self.trials, config.federation.seed, law)
        # eta and lambda [2, S]: a run and all its neighbours have the same pair
        pairs = torch.tensor(self.pairs, dtype=torch.float64)
        hyperparameters = pairs.repeat_interleave(1 + self.trials, 0).T.contiguous()
        experiment = build_experiment(config, data, None, *hyperparameters)
        first = begin(experiment.recipe, experiment.task, config.federation.seed).params["weight"]
        start = start_of(first[0].cpu().numpy(), source)
        return StackData(config, source, data, draws, draws[:, 0], experiment, start)

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

    def _run_rows(
        self, shared: StackData, verdicts: list[Verdicts], losses: list[Loss], moved: np.ndarray
    ) -> list[Record]:
        """Return the rows of runs.csv for this stack."""
        rows = []
        for pair, triple, loss, far in zip(self.pairs, verdicts, losses, moved, strict=True):
            bound, bound_one, bound_global = (
                certificate.bound.value if certificate.bound else math.nan for certificate in triple
            )
            shares = []
            for certificate in triple:
                certificates = _of_clients(certificate.certificates, shared.client)
                used = certificates != 0
                shares.append(float((far[used] / certificates[used]).max(initial=0.0)))
            rows.append(
                self._setting(pair)
                | {
                    "gap": loss.gap.gap,
                    "bound": bound,
                    "mean_perturbation": float(far.mean()) if len(far) else math.nan,
                    "max_perturbation": float(far.max(initial=0.0)),
                    "within": loss.gap.gap <= bound,
                    "gap_low": loss.gap.low,
                    "gap_high": loss.gap.high,
                    "table_gap": loss.plain,
                    "bound_one": bound_one,
                    "share": shares[0],
                    "bound_global": bound_global,
                    "share_global": shares[2],
                    "range": triple[0].loss_bound,
                    "accuracy": loss.accuracy,
                    "train_loss": loss.gap.empirical,
                    "test_loss": loss.gap.empirical + loss.plain,
                }
            )
        return rows

    def _neighbour_rows(
        self, shared: StackData, verdicts: list[Verdicts], moved: np.ndarray
    ) -> list[Record]:
        """Return the rows of neighbours.csv for this stack.

        A row has nan if there is no certificate.
        """
        data, draws, client, labels = shared.data, shared.draws, shared.client, shared.source.labels
        index = data.train_index[data.order[data.offsets[client] + draws[:, 1]]]
        records = []
        for pair, (verdict, *_), far in zip(self.pairs, verdicts, moved, strict=True):
            columns = {
                "trial": np.arange(len(draws)),
                "client": client,
                "index": index,
                "replacement": draws[:, 2],
                "size": data.sizes[client],
                "perturbation": far,
                "exposure": _of_clients(verdict.exposures, client),
                "certificate": _of_clients(verdict.certificates, client),
                "old_label": labels[index],
                "new_label": labels[draws[:, 2]],
            }
            rows = zip(*(values.tolist() for values in columns.values()), strict=True)
            setting = self._setting(pair)
            records += [setting | dict(zip(columns, row, strict=True)) for row in rows]
        return records


def _of_clients(values: np.ndarray | None, client: np.ndarray) -> np.ndarray:
    """Return, for each neighbour, the certificate of the client whose sample is replaced.

    Without certificates, the result is nan.
    """
    return np.full(len(client), np.nan) if values is None else values[client]


def _after_changes(
    ranged: list[tuple[certificates.CertifiedSetting, Certificate]], reasons: list[gap.Why],
    losses: list[Loss], measure: Callable[[list[float]], list[Loss]],
) -> list[str]:  # fmt: skip
    """Return a verdict on the gap of each run.

    If a note suggests changes to the config, the verdicts are those for the changed configs.
    """
    verdicts = [verdict for _, verdict in ranged]
    if any(reason.changes for reason in reasons):
        after = [gap.after_changes(case) for case, _ in ranged]
        verdicts, tops = map(list, zip(*after, strict=True))
        try:
            losses = measure(tops)
        except InputError:  # with other rounding, the losses differ more than the range allows
            return [INCONCLUSIVE]
    return [
        gap.verdict_on(loss.gap, certificate)
        for loss, certificate in zip(losses, verdicts, strict=True)
    ]


# Suite

SIDE = 2048  # side of the square matrices whose product is timed
COMPARED = (
    "The published values are for {}, and our values are for {} ({} scale). Compare only signs, "
    "orders and trends. The paper states neither its C_hp nor its initial model."
)


def work(content: dict[str, Any], request: SuiteRequest) -> "Stability":
    """Return the suite. Runs that share samples and schedule form a stack."""
    suite = validate(Suite, content)
    data_table = {"data": {"name": request.data}}
    read = merged(merged(suite.base, request.changes), data_table)
    source = read_source(cell({"data": read["data"]})) if request.data != "synthetic" else None
    suite = suite.model_copy(update={"base": merged(suite.base, data_table)})
    all_stacks = stacks(suite, source, request.changes)
    return Stability(request, "stability", suite.title, all_stacks, suite.published)


def stacks(suite: Suite, source: Source | None, changes: Tables) -> list[Stack]:
    """Return the suite's stacks. `changes` are config tables that override those of the suite.

    `source` limits the numbers of samples of a stack. If `source` is None, there is no limit.

    Raises:
        InputError: If a key or a list of values in the suite has no effect.
    """
    contents.require_free("--set", changes, SETTLED)
    contents.require_free("[base]", suite.base, {**SETTLED, "data.name": ""})
    base = merged(merged(BASE, suite.base), changes)
    test, most_train = contents.room(source, base.get("data", {}).get("test", TEST))
    grid, share = suite.grid, max(1, REPLICAS // (1 + suite.trials))
    pairs = list(itertools.product(grid.lr, grid.lambda_))
    sizes = sorted({min(n, most_train) for n in grid.train})
    combinations = itertools.product(sizes, grid.alpha, grid.per_round, suite.seeds)
    batches = []
    for train, alpha, per_round, seed in combinations:
        setting: dict[str, dict[str, Scalar]] = {
            "data": {"train": train, "test": test, "alpha": alpha},
            "federation": {"per-round": per_round, "seed": seed},
            "local": {"lr": pairs[0][0]},
            "orthogonalizer": {"lambda": pairs[0][1]},
        }
        config = cell(base, setting)
        if config.engine.name != "inline":
            raise InputError(
                f"[engine] name = '{config.engine.name}' has no effect, because this suite "
                "computes many runs as one batch. Leave name out. To use several machines, set "
                "--ray-address."
            )
        unused = {"validation": config.data.validation, "client-test": config.data.client_test}
        for key, value in unused.items():
            if value:
                raise InputError(
                    f"[data] {key} is {value:g}, but it must be 0, because this suite does not "
                    f"evaluate models on these samples. Set [data] {key} = 0."
                )
        if config.output.clients:
            raise InputError(
                "[output] clients = true has no effect in this suite, because only single runs "
                "write records of clients. Leave clients out."
            )
        if config.stability.unit != "samples":
            raise InputError(
                f"[stability] unit = {config.stability.unit!r}, but the neighbours of this suite "
                "differ in one sample, as in the Stability note. Leave unit out. For whole "
                "clients, use `fedmuon suite poisoning`, or `fedmuon stability --neighbours "
                "clients` for one run."
            )
        if len(grid.lambda_) > 1 and not reads(config, "orthogonalizer.lambda"):
            raise InputError(f"[grid] {refusal(config, 'orthogonalizer.lambda', grid.lambda_)}")
        for first in range(0, len(pairs), share):
            batch = Stack(config, tuple(pairs[first : first + share]), suite.trials)
            batches.append(dataclasses.replace(batch, config=batch.at(batch.pairs[0])))
    for place, tables in (("--set", changes), ("[base]", suite.base)):
        contents.require_read(place, tables, [batch.config for batch in batches])
    return batches


@dataclass(frozen=True)
class Stability(Work):
    """A grid of runs as a suite. `lines` are rows of the Stability note, Table 2, by data set."""

    cells: Sequence[Stack]
    lines: Mapping[str, Published]
    place: ClassVar[str] = "stacks"
    counted: ClassVar[str] = "trajectories"

    @property
    def decisive(self) -> list[Any]:
        """The suite, the scale, and all settings of every stack, as JSON values."""
        settings = [
            [batch.name, batch.pairs, batch.trials, contents.locked(batch.config)]
            for batch in self.cells
        ]
        return [self.request.stem, self.request.scale, settings]

    @property
    def configs(self) -> Sequence[Config]:
        """The config of each run. A stack has one run for each pair (eta, lambda)."""
        return [batch.at(pair) for batch in self.cells for pair in batch.pairs]

    @property
    def published(self) -> Published | None:
        """The row for this data set in the Stability note, Table 2.

        The value is None if there is no such row.
        """
        return self.lines.get(PUBLISHED_FOR.get(self.request.data, ""))

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """Return runs.csv, neighbours.csv and summary.csv."""
        head = {"suite": self.request.stem, "data": self.request.data}
        lines = [head | {"source": "measured"} | _aggregate(records)]
        if self.published:
            lines.append(head | {"source": "Stability note, Table 2"} | self.published.model_dump())
        return {
            "runs": [head | run for record in records for run in record["runs"]],
            "neighbours": [head | line for record in records for line in record["neighbours"]],
            "summary": lines,
        }

    def summary(self, records: list[Record]) -> Record:
        """Return the entries of suite.json: number of runs, speed, constants and assumptions.

        The speed is relative to this machine's fastest large matrix product in the same precision.
        """
        data, scale = self.request.data, self.request.scale
        config, source = resolve(self.cells[0].config), PUBLISHED_FOR.get(data, "")
        seconds = sum(record["seconds"] for record in records)
        count = sum(batch.size for batch in self.cells)
        flop = sum(record["flop"] for record in records)
        dtype, device = DTYPES[config.engine.dtype], torch.device(config.engine.device)
        best = max(
            rate(kernel, SIDE, SIDE, SIDE, dtype, device) for kernel in supported(dtype, device)
        )
        names = ("status", "assumes", "gap_notes", "gap_changes", "gap_then")
        status, *lists = (
            list(dict.fromkeys(chain(*(record.get(name, []) for record in records))))
            for name in names
        )
        return {
            "trajectories": count,
            "trajectories_per_second": count / seconds,
            "share_of_gemm": flop / seconds / best,
            "measured": _aggregate(records),
            "published": self.published and {"data": source} | self.published.model_dump(),
            "note": COMPARED.format(source, data, scale) if self.published else "",
            "constant": config.stability.lipschitz,
            "delta": config.stability.delta,
            "machine": {"device": config.engine.device},
            **contents.guess(read_source(config), config),
            "status": status[0] if len(status) == 1 else "mixed",
            **dict(zip(("assumptions", *names[2:]), lists, strict=True)),
        }


def _aggregate(records: list[Record]) -> Record:
    """Return the columns of the Stability note, Table 2, as means over all runs.

    The gap of Table 2 is the test loss minus the weighted train loss.
    """
    runs = [run for record in records for run in record["runs"]]
    columns = {"gap_within_bound": "within", "mean_gap": "table_gap", "mean_bound": "bound",
               "mean_perturbation": "mean_perturbation"}  # fmt: skip
    means = {
        name: float(np.mean([run[column] for run in runs])) for name, column in columns.items()
    }
    return {"runs": len(runs), **means}


STUDY = RunStudy("stability", work, findings)
