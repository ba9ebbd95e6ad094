"""Step sizes that are tuned with samples that a certificate does not cover.

A limit from training samples pays for each choice that these samples made. A choice that other
samples made is free. So the step size of each run is chosen by smaller runs, which share no sample
with it. A smaller run has the same rounds and sampling rates. It has fewer samples, or fewer
clients, and less noise in proportion, so that each mean update has the same noise.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.tuning import Tuned
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Natural
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table
from fedmuon.data.source import Source
from fedmuon.experiments.studies.study import levels
from fedmuon.experiments.suites.contents import Nested, cell


def _different(seeds: list[int]) -> list[int]:
    if len({*seeds}) < len(seeds):
        raise ValueError("lists a seed twice. List each seed once")
    return seeds


class Tuning(Table):
    """The tuning of step sizes: `train` + `test` samples, which no other run uses, and the seeds.

    The seed of a smaller run chooses which of these samples train its model. The others test it.
    """

    train: Count
    test: Count
    seeds: Annotated[list[Natural], Field(min_length=1), AfterValidator(_different)]


def set_apart(source: Source, count: int) -> tuple[Source, Source]:
    """Divide a source into the samples for certified runs, and `count` samples for tuning.

    The tuning samples come from the official test part if the source has one, and otherwise from
    all samples.
    """
    first = source.official_test or 0
    candidates = np.random.default_rng(0).permutation(np.arange(first, len(source.labels)))
    if count >= len(candidates):
        raise InputError(
            f"[tuning] needs {count} samples, but {source.name} has {len(candidates)} for tuning "
            "and tests: lower train and test of [tuning]"
        )
    tuning = np.sort(candidates[:count])
    others = np.setdiff1d(np.arange(len(source.labels)), tuning)
    return _part(source, others), replace(_part(source, tuning), official_test=None)


def _part(source: Source, chosen: np.ndarray) -> Source:
    owner, images = source.owner, source.images
    return replace(
        source, inputs=source.inputs[chosen], labels=source.labels[chosen],
        owner=None if owner is None else owner[chosen],
        images=None if images is None else images[chosen],
    )  # fmt: skip


def smaller(config: Config, tuning: Tuning) -> Nested:
    """Return the tables that make a run smaller, with the same noise in each mean update."""
    share = tuning.train / config.data.train
    federation, privacy = config.federation, config.privacy
    data = {"train": tuning.train, "test": tuning.test}
    if privacy.level == "client":
        per_round = max(1, round(share * federation.per_round))
        clients = max(per_round, round(share * federation.clients))
        noise = privacy.noise * per_round / federation.per_round
        return {
            "data": data,
            "federation": {"clients": clients, "per-round": per_round},
            "privacy": {"noise": noise},
        }
    lot = max(1, round(share * privacy.lot))
    return {"data": data, "privacy": {"lot": lot, "noise": privacy.noise * lot / privacy.lot}}


def require_smaller(tables: Nested, first: Nested, config: Config, tuning: Tuning) -> None:
    """Raise an error, before anything is computed, if the smaller run of a config is invalid."""
    try:
        cell(tables, first, smaller(config, tuning))
    except InputError as error:
        raise InputError(
            f"[tuning] train = {tuning.train} and test = {tuning.test} make runs that are not "
            f"valid ({error}). Set train and test of [tuning] to other numbers."
        ) from None


def tunings(rows: Columns, by: str) -> dict[str, list[Tuned]]:
    """Return the tunings of each method, one for each value of the column `by`.

    The rows have the columns method, lr and tuning_error.
    """
    of_methods: dict[str, list[Tuned]] = {}
    for method in dict.fromkeys(rows["method"].tolist()):
        for level in levels(rows, by):
            part = where(rows, method=method, **{by: level})
            errors: Sequence[float] = part["tuning_error"].tolist()
            tuned = Tuned(method, "local.lr", part["lr"].tolist(), errors, "tuning_error")
            of_methods.setdefault(method, []).append(tuned)
    return of_methods
