"""One stack of a suite: all its runs and neighbours as one program, then the theory on each run."""

import dataclasses
import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from fedmuon.analysis import Realized
from fedmuon.config import Config
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Law, draw, stack
from fedmuon.errors import InputError
from fedmuon.experiments.laboratory import bound
from fedmuon.experiments.laboratory.bound import Verdict
from fedmuon.experiments.laboratory.measure import Loss, measured_losses
from fedmuon.federated import setup
from fedmuon.federated.coupled import coupled, distances
from fedmuon.federated.plan import Plan
from fedmuon.storage import Record
from fedmuon.tables import Scalar

Pair = tuple[float, float]  # eta and lambda


@dataclass(frozen=True)
class Stack:
    """Runs that share samples and schedule; `config` has the first pair (eta, lambda)."""

    config: Config
    pairs: tuple[Pair, ...]
    trials: int

    @property
    def name(self) -> str:
        """What tells it from the other stacks of its suite."""
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

    def compute(self) -> Record:
        """Lines of runs.csv and neighbours.csv, and the work: flop in products, and seconds."""
        start = time.perf_counter()
        config = setup.resolve(self.config)
        if config.task.name != "matrix":
            raise InputError(
                "a suite holds runs to their bound: set task.name = 'matrix', which has one"
            )
        source = setup.source(config)
        data = setup.federated_data(config, source)
        drawn = draw(data, source, self.trials, config.federation.seed, _law(config))
        # eta and lambda [2, S]: each pair for its run and all its neighbours
        pairs = torch.tensor(self.pairs, dtype=torch.float64).repeat_interleave(1 + self.trials, 0)
        experiment = setup.experiment(config, data, source.classes, None, *pairs.T.contiguous())
        neighbours = stack(source, drawn, config.data.normalize).repeated(len(self.pairs))
        params = coupled(experiment, neighbours, config.federation.seed)
        runs = {name: value[:: 1 + self.trials] for name, value in params.items()}
        losses = measured_losses(config, data, source.classes, experiment, runs)
        moved, (d, c) = distances(params, len(self.pairs)), params["weight"].shape[-2:]
        schedule = experiment.plan.schedule()
        # No step reads a sample of a client that never takes part: what is left there is rounding.
        moved[:, ~np.isin(drawn[:, 0], schedule)] = 0.0
        judged = [self._judge(pair, data, experiment.plan, (d, c)) for pair in self.pairs]
        lines = list(zip(map(self._setting, self.pairs), judged, moved, strict=True))
        bounds = [verdict.bound for verdict, _ in judged]
        return {
            "runs": [
                head | _run(verdicts, loss, far, drawn[:, 0])
                for (head, verdicts, far), loss in zip(lines, losses, strict=True)
            ],
            "neighbours": [
                head | row
                for head, (verdict, _), far in lines
                for row in _neighbours(data, drawn, source.labels, verdict, far)
            ],
            "status": [bound.status if bound else "refused" for bound in bounds],
            "assumes": list(bounds[0].assumptions if bounds[0] else ()),
            "flop": 4.0
            * d
            * c
            * float(data.sizes[schedule].sum() * config.local.steps)
            * self.size,
            "seconds": time.perf_counter() - start,
        }

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

    def _judge(
        self, pair: Pair, data: FederatedData, plan: Plan, shape: tuple[int, int]
    ) -> tuple[Verdict, Verdict]:
        """What the theory promises of one run, and what it would with C_hp = 1."""
        part = Realized(plan.schedule(), plan.rows if plan.batch else None)
        case = bound.Case(self.at(pair), data.sizes, part, shape)
        one = dataclasses.replace(case, config=self.at(pair, c_hp=1.0))
        return bound.judge(case), bound.judge(one)

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


def _run(
    verdicts: tuple[Verdict, Verdict], loss: Loss, moved: np.ndarray, client: np.ndarray
) -> Record:
    value, one = (each.bound.value if each.bound else math.nan for each in verdicts)
    promised = _known(verdicts[0].certificates, client)
    sampled = promised != 0
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
        "share": float((moved[sampled] / promised[sampled]).max(initial=0.0)),
    }


def _known(values: np.ndarray | None, client: np.ndarray) -> np.ndarray:
    """Those of the clients; nan where the theory refuses."""
    return np.full(len(client), np.nan) if values is None else values[client]


def _neighbours(
    data: FederatedData, drawn: np.ndarray, labels: np.ndarray, verdict: Verdict, moved: np.ndarray
) -> list[Record]:
    client = drawn[:, 0]
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
