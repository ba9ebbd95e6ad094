"""The generalization gap that derivatives through the run predict.

The expected gap is the mean change of a sample's own loss when the sample is replaced,

    E[R(A) - R_hat(A)] = sum_a w_a E[loss(A(S with z' for z_a), z_a) - loss(A(S), z_a)],

with w_a = p_i / n_i, because z_a is a fresh sample for the run that does not contain it. To first
order, with s_ab = <grad loss(A, z_a), dA / dw_b> and the weight w_b of sample b in the gradients
(`fedmuon.federated.adjoint`), the mean over replacements by samples of the same client and label is

    T = sum_a w_a (mean of s_ab over the m_g - 1 other samples b of the group of a, minus s_aa)
      = -tr(D S C),

where C subtracts the mean of each group g, and D is diagonal with the entries w_a m_g / (m_g - 1).
C is a projection, and D is constant within a group, so -tr(D S C) = -tr(C D S C). Hutchinson's
estimator needs one reverse pass for a random vector e of signs, with f = C e:

    T = -E sum_b f_b <V, dA / dw_b>,      V = sum_a f_a D_aa grad loss(A, z_a).

A sample that is the only one of its label in its client is compared with samples of other clients
that have this label. They enter the client as candidates with weight 0. The replacement has the
same label, because the measured gap keeps the label shares of each client (`gap.py`).

The estimate is a prediction, not a certificate: it is accurate to first order only. The gap is
also, to second order, the mean of T and of the same trace at held-out samples, which enter as
candidates with weight 0. T alone is too small if the model fits single samples, and the trace at
held-out samples is too large (`ends`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import vjp

from fedmuon.analysis.theory.checks import whole
from fedmuon.core.demands import Demand
from fedmuon.core.errors import InputError, plain
from fedmuon.core.rng import Draw, generator
from fedmuon.data.neighbours import classes_of, held_out
from fedmuon.data.partition import weights
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.influence import (
    derivatives_needed,
    parts_in_memory,
    smooth,
)
from fedmuon.federated.adjoint import Pulled, pulled_back
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin
from fedmuon.federated.shards import targets_on
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask

PROBES = 8
STAND_INS = 8  # samples of other clients with which a lone sample is compared
PREDICTION: Demand = derivatives_needed(
    lambda subject: "a predicted gap", "it follows derivatives through the run", ""
)


@dataclass(frozen=True)
class PredictedGap:
    """A predicted gap, with the estimate of each probe.

    Attributes:
        probes: The estimate of each random probe [k], at the training samples.
        alone: Number of samples that have a label of their own, so that nothing replaces them.
        outside: The estimate of each probe [k] at held-out samples, if it was requested.
    """

    probes: np.ndarray
    alone: int
    outside: np.ndarray | None = None

    @property
    def value(self) -> float:
        """The mean over probes."""
        return float(self.probes.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, or NaN for a single probe."""
        return standard_error(self.probes)

    @property
    def both_ends(self) -> np.ndarray | None:
        """The mean of both ends for each probe [k]."""
        return None if self.outside is None else (self.probes + self.outside) / 2


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean, or NaN for a single value."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def predict(
    run: FinishedRun, probes: int = PROBES, ends: bool = False, model: Params | None = None
) -> PredictedGap:
    """Return the predicted gap of a finished run, for the loss of its task.

    Args:
        run: The finished run.
        probes: The number of random probes.
        ends: Whether to compute the trace at held-out samples, too. Without held-out samples of the
            same labels, it is not computed.
        model: The final model as a stack of one. By default, it is read from the run folder.

    Raises:
        InputError: If the final model has no derivative with respect to the sample weights.
    """
    experiment = smooth(run, PREDICTION)
    count = whole("probes", probes)
    estimator = Estimator.of(run, experiment, count, ends)
    start = begin(experiment.recipe, experiment.task, run.config.federation.seed)
    towards = estimator.directions(experiment, run.model() if model is None else model)
    values, first = np.zeros(len(estimator.own)), 0
    try:
        for part in parts_in_memory(experiment, towards):
            rows = slice(first, first + len(next(iter(part.values()))))
            for pulled in pulled_back(experiment, start, part, estimator.candidates_of):
                values[rows] += estimator.products(pulled, rows)
            first = rows.stop
    except RuntimeError as error:  # autograd may fail in the user's own objects
        raise InputError(
            f"torch cannot differentiate this run ({plain(str(error), 200)}), so no gap can be "
            "predicted."
        ) from error
    outside = values[count:] if len(values) > count else None
    return PredictedGap(values[:count], estimator.alone, outside)


@dataclass(frozen=True)
class Extra:
    """A sample that enters a client as a candidate with weight 0.

    Attributes:
        input: The sample [d].
        label: Its label.
        position: The position of the client's sample whose batches the candidate enters.
        factors: The factors [rows] of the products <V, dA / dw> in the estimates.
    """

    input: Tensor
    label: Tensor
    position: int
    factors: np.ndarray


@dataclass(frozen=True)
class Extras:
    """The P candidates of a client, as arrays."""

    samples: Batch
    position: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, entries: list[Extra]) -> "Extras":
        """Collect candidates."""
        inputs, labels = (torch.stack([getattr(entry, name) for entry in entries])
                          for name in ("input", "label"))  # fmt: skip
        position = np.array([one.position for one in entries])
        return cls(Batch(inputs, labels), position, np.stack([one.factors for one in entries], 1))


@dataclass(frozen=True)
class Estimator:
    """The random probes of both ends, and the factors of their reverse passes.

    A row is a probe at the training samples, or (after all of these) one at held-out samples.

    Attributes:
        own: The factors [rows, n] of <V, dA / dw> of the training samples in the estimates.
        in_v: The factors [k, n] of their gradients in V, for probes at the training samples.
        offsets: The first row of each client in the training samples.
        alone: Number of samples that nothing replaces.
        extras: The candidates of each client.
        no_candidates: The candidates of other clients.
        fresh: The held-out candidates of all clients, and the factors [k, m] of their gradients.
    """

    own: np.ndarray
    in_v: np.ndarray
    offsets: np.ndarray
    alone: int
    extras: Mapping[int, Extras]
    no_candidates: Batch
    fresh: tuple[Batch, np.ndarray] | None = None

    @classmethod
    def of(cls, run: FinishedRun, experiment: Experiment, probes: int, ends: bool) -> "Estimator":
        """Draw the probes, the stand-ins of lone samples, and the held-out candidates."""
        seed, data, shards = run.config.federation.seed, run.data, experiment.shards
        labels = classes_of(data.labels)
        if labels.ndim > 1:
            raise InputError(
                "a sample of this run has many labels, so there is no replacement with the same "
                "label, and no gap is predicted. Use a task with one label for each sample."
            )
        groups = Groups.of(run)
        signs = generator(seed, Draw.PROBE, block=1).choice([-1.0, 1.0], size=(probes, len(labels)))
        lone = groups.size == 1
        centred = np.where(lone, signs, signs - groups.means(signs))
        factors = groups.weights * groups.size / np.maximum(groups.size - 1, 1)
        fresh = HeldOutEnd.of(run, experiment, groups, probes) if ends else None
        later = np.zeros((probes if fresh else 0, len(labels)))
        extras: dict[int, list[Extra]] = {}
        rng, alone = generator(seed, Draw.PROBE, block=2), 0
        for a in np.flatnonzero(lone).tolist():
            others = np.flatnonzero((labels == labels[a]) & (groups.owner != groups.owner[a]))
            stand_ins = rng.permutation(others)[:STAND_INS].tolist()
            if not stand_ins:
                alone += 1
                centred[:, a] = 0.0
                continue
            of_products = np.concatenate([centred[:, a], later[:, a]]) / len(stand_ins)
            client = int(groups.owner[a])
            extras.setdefault(client, []).extend(
                Extra(
                    shards.inputs[b], shards.labels[b], a - int(data.offsets[client]), of_products
                )
                for b in stand_ins
            )
        if fresh is not None:
            fresh.add_to(extras)
        return cls(
            np.concatenate([-centred, later]),
            centred * factors,
            data.offsets,
            alone,
            {client: Extras.of(entries) for client, entries in extras.items()},
            Batch(shards.inputs[:0], shards.labels[:0]),
            fresh and (fresh.samples, fresh.in_v),
        )

    def directions(self, experiment: Experiment, model: Params) -> Params:
        """Return V for each row, as a stack."""
        shards = experiment.shards
        samples = Batch(shards.inputs, shards.labels)
        inside = weighted_slopes(experiment, model, samples, self.in_v)
        if self.fresh is None:
            return inside
        outside = weighted_slopes(experiment, model, *self.fresh)
        return {name: torch.cat([inside[name], outside[name]]) for name in inside}

    def candidates_of(self, client: int) -> Batch:
        """Return the samples that enter the client with weight 0."""
        return self.extras[client].samples if client in self.extras else self.no_candidates

    def products(self, pulled: Pulled, rows: slice) -> np.ndarray:
        """Return what the derivatives of a batch add to the estimates of these rows."""
        first, last = self.offsets[pulled.client], self.offsets[pulled.client + 1]
        samples = np.arange(first, last)
        chosen = samples if pulled.rows is None else samples[pulled.rows]
        total = (self.own[rows, chosen] * pulled.own.double().cpu().numpy()).sum(1)
        if (extras := self.extras.get(pulled.client)) is not None:
            of_products = extras.factors[rows]
            if pulled.rows is not None:  # a candidate is in the batches of its sample
                of_products = of_products * np.isin(extras.position, pulled.rows)
            total += (of_products * pulled.others.double().cpu().numpy()).sum(1)
        return total


@dataclass(frozen=True)
class Groups:
    """The training samples, in groups with the same client and label.

    Attributes:
        owner: The client [n] of each sample.
        group: The number [n] of its group.
        weights: Its weight w_a [n].
    """

    owner: np.ndarray
    group: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, run: FinishedRun) -> "Groups":
        """Return the groups of a run's training samples."""
        sizes = run.data.sizes
        owner = np.repeat(np.arange(len(sizes)), sizes)
        pairs = np.stack([owner, classes_of(run.data.labels)])
        _, group = np.unique(pairs, axis=1, return_inverse=True)
        chances = weights(sizes, run.config.federation.risk_weights)
        return cls(owner, group.reshape(-1), (chances / np.maximum(sizes, 1))[owner])

    @property
    def size(self) -> np.ndarray:
        """The number of samples [n] in the group of each sample."""
        return np.bincount(self.group)[self.group]

    def means(self, signs: np.ndarray) -> np.ndarray:
        """Return the mean of the signs [k, n] over the group of each sample."""
        return group_means(signs, self.group)


def group_means(signs: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the mean of the signs [k, n] over the group of each sample."""
    sums = np.stack([np.bincount(group, row) for row in signs])
    return (sums / np.bincount(group))[:, group]


@dataclass(frozen=True)
class HeldOutEnd:
    """Held-out candidates for every client and label, with the probes of their trace.

    Each group has as many candidates as training samples, and at least two. The weight w_g of the
    group is that of its training samples, so V contains w_g / (m - 1) f_c grad loss(A, z_c).

    Attributes:
        samples: The candidates of all clients.
        client: The client [m] that each candidate enters.
        position: The position [m] of the client's sample whose batches it enters.
        centred: The centred signs f [k, m].
        in_v: The factors [k, m] of the gradients in V.
    """

    samples: Batch
    client: np.ndarray
    position: np.ndarray
    centred: np.ndarray
    in_v: np.ndarray

    @classmethod
    def of(
        cls, run: FinishedRun, experiment: Experiment, groups: Groups, probes: int
    ) -> "HeldOutEnd | None":
        """Draw the candidates. Return None if a label has fewer than two held-out samples."""
        seed, data, source = run.config.federation.seed, run.data, run.source
        rng, of_class = generator(seed, Draw.PROBE, block=3), classes_of(source.labels)
        columns: list[tuple[np.ndarray, ...]] = []
        pools = {i: held_out(data, source, i) for i in np.unique(groups.owner).tolist()}
        for g in range(int(groups.group.max()) + 1):
            members = np.flatnonzero(groups.group == g)
            client = int(groups.owner[members[0]])
            label, pool = classes_of(data.labels)[members[0]], pools[client]
            usable = pool[of_class[pool] == label]
            count = min(max(2, len(members)), len(usable))
            if count < 2:
                return None
            weight = groups.weights[members].sum() / (count - 1)
            position = members[np.arange(count) % len(members)] - data.offsets[client]
            of_group = np.full(count, client), np.full(count, g), np.full(count, weight)
            columns.append((rng.choice(usable, count, replace=False), position, *of_group))
        index, position, client, group, weight = map(np.concatenate, zip(*columns, strict=True))
        signs = generator(seed, Draw.PROBE, block=4).choice([-1.0, 1.0], size=(probes, len(index)))
        centred = signs - group_means(signs, group)
        inputs = torch.from_numpy(source.rows(run.config.data.normalize, index))
        device, dtype = experiment.task.device, experiment.task.dtype
        samples = Batch(inputs.to(device, dtype), targets_on(device, dtype, source.labels[index]))
        return cls(samples, client, position, centred, centred * weight)

    def add_to(self, extras: dict[int, list[Extra]]) -> None:
        """Add the candidates to those of their clients. Their rows come after all others."""
        for c, (client, position) in enumerate(
            zip(self.client.tolist(), self.position.tolist(), strict=True)
        ):
            of_products = np.concatenate([np.zeros(len(self.centred)), -self.centred[:, c]])
            entry = Extra(self.samples.inputs[c], self.samples.labels[c], position, of_products)
            extras.setdefault(client, []).append(entry)


def weighted_slopes(
    experiment: Experiment, model: Params, samples: Batch, coefficients: np.ndarray
) -> Params:
    """Return sum_a c_ka grad loss(A, z_a) for each row of coefficients c [k, n], as a stack."""
    task = experiment.task
    point = {name: value.to(task.dtype) for name, value in model.items()}
    factors = torch.from_numpy(coefficients).to(task.device, task.dtype)
    if isinstance(task, MatrixTask):
        slopes = task.slopes(point, samples)[0]
        products = [samples.inputs.T @ (row[:, None] * slopes) for row in factors]
        return {"weight": torch.stack(products)[:, None]}
    assert isinstance(task, NetworkTask)
    alone = {name: value[0] for name, value in point.items()}

    def slope(row: Tensor) -> Callable[[slice], Params]:
        def of_part(part: slice) -> Params:
            labels = samples.labels[part]
            arguments = {"inputs": samples.inputs[part], "labels": labels, "weights": row[part],
                         "keys": labels}  # fmt: skip
            total, back = vjp(lambda at: task.total(at, **arguments), alone)
            return back(torch.ones_like(total))[0]

        return of_part

    rows = []
    for row in factors:
        trees = list(task.chunks.each(slope(row), len(samples.labels), 1))
        rows.append({name: torch.stack([tree[name] for tree in trees]).sum(0) for name in alone})
    return {name: torch.stack([row[name] for row in rows])[:, None] for name in alone}
