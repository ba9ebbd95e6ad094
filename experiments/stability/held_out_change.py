"""The competitor of the certified loss: the change of the loss since X⁰ on held-out samples.

A bound certifies that the population loss of the final model is below the loss of X⁰ if training
lowers the train loss by more than the bound. Held-out samples can certify the same, with the
empirical Bernstein bound for the paired changes of their losses. If a range of the loss is proved
on the ball that training cannot leave, both use this range. The limit costs the held-out samples,
and holds only for one model that they did not choose.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedmuon.analysis.report.numbers import number, written
from fedmuon.analysis.theory.held_out import change_limit
from fedmuon.core.files import Record
from fedmuon.experiments.stability.finished_run import FinishedRun

NAME = "held-out samples: population loss below that of X⁰"


def held_out_change(run: FinishedRun, failure: float, width: float = 2.0) -> Record:
    """Return the mean change of the loss since X⁰ and its upper limit, as entries of bound.json.

    The record is empty without held-out samples, and for a network, whose loss has no upper limit.

    Args:
        run: The run.
        failure: The probability that the limit fails.
        width: The length of an interval that contains the change of every possible sample.
    """
    samples = run.experiment.shards.held_out
    if run.config.task.name != "matrix" or not len(samples.labels):
        return {}
    before, after = (
        run.experiment.task.losses(run.model(stem), samples)[0][0].double().cpu().numpy()
        for stem in ("initial", "model")
    )
    changes: np.ndarray = after - before
    return {
        "held_out_samples": len(changes),
        "held_out_change": float(changes.mean()),
        "held_out_change_limit": change_limit(changes, failure, width),
        "held_out_failure": failure,
    }


def held_out_words(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the result of `held_out_change` as table rows, or [] if there is none."""
    limit = record.get("held_out_change_limit")
    if limit is None:
        return []
    verdict = (
        f"yes, by {number(-limit, 3)}"
        if limit < 0
        else f"no: the limit of the change is {written(limit, '+.3g')}"
    )
    probability = number(1 - record["held_out_failure"], 6)
    cost = f"{record['held_out_samples']:,} samples that train nothing, probability {probability}"
    return [(NAME, f"{verdict} ({cost})")]
