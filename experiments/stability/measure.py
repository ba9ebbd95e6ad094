"""A finished run, opened again, and what its model lost: the gap F - F_hat with its interval."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedmuon.analysis import MeasuredGap, label_shares, measured_gap
from fedmuon.config import load as tables
from fedmuon.config.load import Config
from fedmuon.config.user_objects import NOTHING, Own
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, require_regular
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import classes_of
from fedmuon.data.partition import weights
from fedmuon.data.source import Source
from fedmuon.federated.build import build_experiment
from fedmuon.federated.client_data import build_data, partition_digest, read_source
from fedmuon.federated.rounds import Experiment
from fedmuon.runs import fingerprints
from fedmuon.runs.directory import RunDirectory
from fedmuon.tasks.base import Batch, Params


@dataclass(frozen=True)
class Laboratory:
    """A finished run with what its neighbours need."""

    config: Config
    source: Source
    data: FederatedData
    experiment: Experiment
    out: Path

    @classmethod
    def open(cls, out: Path, given: Own = NOTHING) -> "Laboratory":
        """The run in the directory, with its samples, some of which may have been given; it ended
        where a callback stopped it."""
        found = cls.of(tables.load(out / "config.toml").beside(given), out)
        planned = found.experiment.plan.rounds
        made = (RunDirectory(out).summary() or {}).get("rounds", planned)
        if made == planned:
            return found
        plan = replace(found.experiment.plan, rounds=made)
        return replace(found, experiment=replace(found.experiment, plan=plan))

    @classmethod
    def of(cls, config: Config, out: Path) -> "Laboratory":
        """The run of this config in the directory, with its samples."""
        source = read_source(config)
        there = fingerprints.require_same(out, fingerprints.described(config, out, source))
        data = build_data(config, source)
        _require_dealt(out, data)
        experiment = build_experiment(config, data)
        plan, _ = fingerprints.with_factors(experiment.plan, config, there)
        return cls(config, source, data, replace(experiment, plan=plan), out)


def _require_dealt(out: Path, data: FederatedData) -> None:
    """Refuse samples that are dealt otherwise now than in the run."""
    try:
        with np.load(require_regular(out / "partition.npz")) as held:
            there = partition_digest(held["train_index"], held["client"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{out} is damaged ({error}): {AFRESH}") from None
    if there != partition_digest(data.train_index, data.client):
        raise InputError(
            f"the partition deals otherwise at each call than in {out}: let it draw from the "
            "generator that it is given"
        )


@dataclass(frozen=True)
class Loss:
    """The gap at the clients' label shares; plain test minus weighted train loss (001, Table 2)."""

    gap: MeasuredGap
    plain: float
    accuracy: float = float("nan")  # on held-out samples


def measured_losses(
    config: Config, data: FederatedData, classes: int, experiment: Experiment, params: Params,
    ranges: Sequence[float] | None = None,
) -> list[Loss]:  # fmt: skip
    """The losses of every model of a stack [S, ...]; all share the data of `experiment`.

    `ranges` [S] are proved lengths B of an interval that has all losses of a model: 1 unless given,
    as 1 - p_y has. Cross-entropy has none, so the gap of a network comes with the normal
    approximation.
    """
    interval = "shorter" if config.task.name == "matrix" else "normal"
    shards, clients = experiment.shards, len(data.sizes)
    if not len(data.test_labels):
        raise InputError("no sample is held out, so the gap is unknown: leave some for [data] test")
    owner = np.repeat(np.arange(clients), data.sizes)
    shares = label_shares(classes_of(data.labels), owner, clients, max(1, classes))
    chances = weights(data.sizes, config.federation.risk_weights)
    (train, _), (test, seen) = (
        experiment.task.losses(params, batch)
        for batch in (Batch(shards.inputs, shards.labels), shards.held_out)
    )
    train, test = (one.double().cpu().numpy() for one in (train, test))
    right = (
        seen["accuracy"].double().mean(1).tolist() if "accuracy" in seen else [np.nan] * len(test)
    )
    of_test, found = classes_of(data.test_labels), []
    tops = ranges or [1.0] * len(test)
    for fitted, held, score, top in zip(train, test, right, tops, strict=True):
        means = np.bincount(owner, fitted, clients) / data.sizes
        given = means, chances, shares, held, of_test
        gap = measured_gap(*given, interval=interval, loss_bound=top)
        found.append(Loss(gap, float(held.mean() - gap.empirical), score))
    return found
