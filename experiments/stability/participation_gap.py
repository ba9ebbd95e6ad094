"""The measured participation gap: the loss on unseen clients minus that of training clients.

Each client has the same weight. The unseen clients are those of [data] unseen-clients, and all
their samples are used. The interval is over unseen clients, for the final model.
"""

import numpy as np

from fedmuon.analysis.report.numbers import count, written
from fedmuon.analysis.theory.client_neighbours import participation_gap
from fedmuon.core.errors import InputError
from fedmuon.data.unseen import UNSEEN
from fedmuon.experiments.stability.certificates import Certificate, CertifiedSetting, of_clients
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.gap import proved_range
from fedmuon.federated.text_losses import client_losses, left_out_samples
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Batch

NAME = "participation gap"
NOBODY = (
    "no client is left out of training, so the participation gap is not measured. Use data whose "
    "clients are known ([federation] partition = 'column') and set [data] unseen-clients."
)


def measure_participation_gap(
    run: FinishedRun, case: CertifiedSetting, certificate: Certificate
) -> Record:
    """Return the entries of bound.json about the measured gap, or {} if neighbours are samples.

    If no gap is measured, `participation_gap` is None and `participation_gap_refusal` contains the
    reason.
    """
    if not of_clients(run.config):
        return {}
    try:
        training, unseen = losses_of_clients(run)
        gap = participation_gap(
            training, unseen,
            "shorter" if run.config.task.name == "matrix" else "normal",
            proved_range(case, certificate),
        )  # fmt: skip
    except InputError as error:
        return {"participation_gap": None, "participation_gap_refusal": str(error)}
    return {
        "participation_gap": gap.gap,
        "participation_gap_low": gap.low,
        "participation_gap_high": gap.high,
        "training_clients_loss": gap.empirical,
        "unseen_clients_loss": gap.population,
        "unseen_clients": len(unseen),
    }


def losses_of_clients(run: FinishedRun) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean losses of the clients that train [N], and of the unseen clients [M]."""
    task, shards, model = run.experiment.task, run.experiment.shards, run.model()
    apart = left_out_samples(run.config, task, UNSEEN, everything=True)
    if apart is None:
        raise InputError(NOBODY)
    sizes = run.data.sizes
    owners = np.repeat(np.arange(len(sizes)), sizes)
    training = client_losses(task, model, Batch(shards.inputs, shards.labels), owners)
    unseen = client_losses(task, model, apart.samples, apart.owners)
    return training.losses, unseen.losses


def gap_rows(record: Record) -> list[tuple[str, object]]:
    """Return the entries of `measure_participation_gap` as table rows."""
    if "participation_gap" not in record:
        return []
    if record["participation_gap"] is None:
        # If the clients are no population, the row of the bound states the reason.
        refused = record.get("participation_refusal")
        return [] if refused else [(NAME, record["participation_gap_refusal"])]
    ends = (written(record[f"participation_gap_{end}"], "+.4g") for end in ("low", "high"))
    clients = count(record["unseen_clients"], "unseen client")
    return [
        (f"{NAME} ({clients})", written(record["participation_gap"], "+.4g")),
        ("its 95% interval", " to ".join(ends)),
    ]
