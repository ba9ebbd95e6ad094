"""One stack of a suite: all its runs and neighbours as one program, then the theory on each run."""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from fedmuon.analysis import Realized
from fedmuon.analysis.report.verdicts import UNDECIDED
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Law, draw, stack
from fedmuon.data.source import Source
from fedmuon.experiments.stability import bound, gap
from fedmuon.experiments.stability.bound import Verdict
from fedmuon.experiments.stability.measure import Loss, measured_losses
from fedmuon.experiments.stability.reachable_ball import start_of
from fedmuon.federated import build
from fedmuon.federated.rounds import Experiment, begin, distances, run_neighbours
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

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
        shape = models["weight"].shape[-2:]
        each = zip(self.pairs, moved, strict=True)
        cases = [self._case(pair, made, shape, far) for pair, far in each]
        judged = [_judge(case) for case in cases]
        ranged = [*zip(cases, (own for own, *_ in judged), strict=True)]
        tops = [gap.proved_range(*one) for one in ranged]
        losses = self._losses(made, models, tops)
        why = [gap.why_one(*one) for one in ranged]
        return {
            "runs": self._runs(made, judged, losses, moved),
            "neighbours": self._neighbours(made, judged, moved),
            **_standing(judged),
            **gap.as_record(why, self._then(made, models, ranged, losses, why)),
            "flop": self._flop(made, shape),
            "seconds": time.perf_counter() - start,
        }

    def _made(self) -> Made:
        config = build.resolve(self.config)
        if config.task.name != "matrix":
            raise InputError(
                "a suite holds runs to their bound: set task.name = 'matrix', which has one"
            )
        source = build.source(config)
        data = build.federated_data(config, source)
        drawn = draw(data, source, self.trials, config.federation.seed, _law(config))
        experiment = build.experiment(config, data, source.classes, None, *self._per_replica())
        return Made(config, source, data, drawn, experiment)

    def _per_replica(self) -> torch.Tensor:
        """eta and lambda [2, S]: each pair for its run and all its neighbours."""
        pairs = torch.tensor(self.pairs, dtype=torch.float64)
        return pairs.repeat_interleave(1 + self.trials, 0).T.contiguous()

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
            self._setting(pair) | _run(verdicts, loss, far, made.client) | _learned(loss)
            for pair, verdicts, loss, far in every
        ]

    def _neighbours(self, made: Made, judged: list[Verdicts], moved: np.ndarray) -> list[Record]:
        """The lines of neighbours.csv."""
        return [
            self._setting(pair) | line
            for pair, (verdict, *_), far in zip(self.pairs, judged, moved, strict=True)
            for line in _neighbours(made, verdict, far)
        ]

    def _flop(self, made: Made, shape: tuple[int, ...]) -> float:
        """In products of a sample with the weights [d, c], forwards and backwards."""
        d, c = shape
        seen = made.data.sizes[made.experiment.plan.schedule()].sum() * made.config.local.steps
        return 4.0 * d * c * float(seen) * self.size

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


def _judge(case: bound.Case) -> Verdicts:
    """What the theory promises of one run, and what it would by 001's own choices."""
    one, wide = case.under(c_hp=1.0), case.under(constants="global")
    return bound.judge(case), bound.judge(one), bound.judge(wide)


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


def _learned(loss: Loss) -> Record:
    """What the run's model is worth, and its losses as plain means."""
    train = loss.gap.empirical
    return {"accuracy": loss.accuracy, "train_loss": train, "test_loss": train + loss.plain}


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
