"""The final model, and personal models if there are any, on each client's own test samples."""

from collections.abc import Mapping

import numpy as np

from fedmuon.core.files import Record
from fedmuon.federated.evaluation import client_means
from fedmuon.federated.personal import personal_means, tests_personal_models, tuning_steps
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES
from fedmuon.runs.observers.evaluation import Evaluation
from fedmuon.runs.prepare import Run

WORST = {"accuracy": "lowest", "loss": "highest"}


class ClientTests(Evaluation):
    """An evaluation that finally also tests the model on each client's own samples."""

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the results of the final model, also over the clients, and a table of clients."""
        of_clients, files = over_clients(self.run, state)
        fields, _ = super().end(state)
        return fields | of_clients, files


def over_clients(run: Run, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
    """Measure the shared model and personal models on each client's own test samples.

    The measure is the score of the task, or the loss if the task has no score. The record contains
    the mean, the standard deviation and the worst tenth over the clients. If there are personal
    models, also return a table with the results of each client.
    """
    tests = run.experiment.shards.client_test
    if tests is None or not len(tests.labels):
        return {}, NO_FILES
    shared = client_means(run.experiment.task, state.params, tests)
    means = {name: values[0] for name, values in shared.items()}
    names = [name for name in means if name != "loss"] or ["loss"]
    columns, files = {name: means[name] for name in names}, NO_FILES
    if tests_personal_models(run.config, run.experiment.recipe):
        personal = personal_means(run.experiment, state, tuning_steps(run.config))
        columns |= {f"personal_{name}": personal[name] for name in names}
        clients = np.flatnonzero(np.diff(tests.offsets))
        head = [
            "client",
            "samples",
            *(f"{model}_{name}" for name in names for model in ("global", "personal")),
        ]
        cells = [clients.tolist(), np.diff(tests.offsets)[clients].tolist()]
        cells += [columns[model + name].tolist() for name in names for model in ("", "personal_")]
        lines = [",".join(map(str, row)) for row in (head, *zip(*cells, strict=True))]
        files = {"personal.csv": ("\n".join(lines) + "\n").encode()}
    return {
        f"client_test_{name}{part}": value
        for name, values in columns.items()
        for part, value in distribution(values, name.removeprefix("personal_")).items()
        if np.isfinite(value)
    }, files


def distribution(values: np.ndarray, name: str) -> dict[str, float]:
    """Return the mean, the standard deviation, and the mean of the worst tenth of the values.

    For a custom metric, it is unknown whether larger values are better. The result then contains
    the means of both the lowest and the highest tenth.
    """
    ordered, tenth = np.sort(values), -(-len(values) // 10)
    ends = {"lowest": ordered[:tenth].mean(), "highest": ordered[-tenth:].mean()}
    if name in WORST:
        ends = {"worst": ends[WORST[name]]}
    deciles = {f"_{which}_decile": float(mean) for which, mean in ends.items()}
    return {"": float(values.mean()), "_std": float(values.std()), **deciles}
