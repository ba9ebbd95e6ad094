"""`fedmuon unlearn`: add noise to a finished run's model that hides whether samples were used.

The samples are single samples, or all samples of some clients (`analysis.client_certificate`).
The certificate bounds how far the samples can move the model, and determines the noise. The run is
also repeated without the samples, which shows how far the model actually moves. The accuracy loss
from noise is measured for each kind of certificate. Publish only the noisy model, and only one
noisy model of a run. Averaging several of them removes noise, and their epsilons and deltas add up.
Do not publish the record, because it was computed from the samples to be forgotten. Certificates
that are computed after the run (`realized`) depend on the samples, so they do not determine the
noise.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.theory import corollaries as theory
from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core import files
from fedmuon.core.arrays import read_tensors, tensor_bytes
from fedmuon.core.errors import InputError
from fedmuon.core.locks import held
from fedmuon.data.client_neighbours import stack_clients, without_samples
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.tables import columns
from fedmuon.federated.evaluation import risk
from fedmuon.federated.neighbour_runs import retrained, run_neighbours
from fedmuon.privacy.noise import KeyStream
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

KINDS = ("ball", "global")
DRAWS = 16  # number of noise draws for measuring the accuracy
MODEL, EVIDENCE = "unlearned.safetensors", "unlearn.json"
DATA_FREE = ("smoothed-polar", "newton-schulz", "clipped-sign")


def execute(
    folder: Path,
    samples: Sequence[int],
    epsilon: float,
    delta: float,
    out: Path,
    given: UserObjects = NOTHING,
    clients: Sequence[int] = (),
) -> Record:
    """Write a noisy model to `out`.

    The noise hides whether the samples, or all samples of the clients, were used, with the
    guarantee (epsilon, delta). A forgotten client takes part in the same rounds of the retrained
    run, and its gradient is 0.
    """
    if bool(samples) == bool(clients):
        raise InputError("pass samples or clients to forget, and not both. Use two commands.")
    if any((out / name).exists() for name in (MODEL, EVIDENCE)):
        raise InputError(f"{out} already contains an unlearned model. Choose another folder.")
    multiplier = theory.noise_multiplier(epsilon, delta)
    limits = sensitivities(folder, samples, given, clients)
    laboratory = FinishedRun.open(folder, given)
    ended, _ = read_tensors(folder / "model.safetensors")
    model = {name: value[None] for name, value in ended.items()}
    experiment = laboratory.experiment
    retrained_model = _retrained(laboratory, samples, clients)
    distance = math.sqrt(
        sum(float((model[name] - retrained_model[name]).square().sum()) for name in model)
    )
    if any(distance > limit for limit in limits.values()):
        raise InputError(
            f"retraining without the {'clients' if clients else 'samples'} moved the model by "
            f"{number(distance)}, but the certificate allows at most "
            f"{number(min(limits.values()))}. The certificate's assumptions do not hold for this "
            "run, so no noisy model is written."
        )
    held_out, task = experiment.shards.held_out, experiment.task

    def accuracies(models: Params) -> list[float]:
        scores = risk(task, models, held_out.inputs, held_out.labels).scores
        return scores["accuracy"].tolist()

    # For each kind: the noise for its sensitivity, the accuracy with this noise, and the delta of
    # the best test that distinguishes these two models, the original and the retrained one.
    kinds = {}
    for kind, sensitivity in limits.items():
        sigma = sensitivity * multiplier
        accuracy = accuracies(noised(model, sigma, DRAWS))
        kinds[kind] = {
            "sensitivity": sensitivity,
            "sigma": sigma,
            "accuracy": float(np.mean(accuracy)),
            "spread": float(np.std(accuracy, ddof=1)),
            "told": theory.indistinguishable(distance / sigma, epsilon) if sigma else 0.0,
        }
    best = min(limits, key=lambda kind: limits[kind])
    record: Record = {
        "samples": list(samples), "clients": list(clients), "epsilon": epsilon, "delta": delta,
        "kind": best, "distance": distance, "accuracy": accuracies(model)[0],
        "accuracy_retrained": accuracies(retrained_model)[0], "kinds": kinds,
    }  # fmt: skip
    with held(out):
        noisy = noised(model, limits[best] * multiplier)
        files.write_bytes(out / MODEL, tensor_bytes(noisy))
        files.write_bytes(out / EVIDENCE, (json.dumps(record, indent=2) + "\n").encode())
    return record


def _retrained(run: FinishedRun, samples: Sequence[int], clients: Sequence[int]) -> Params:
    """Train again without the samples, or with clients that have no samples."""
    experiment, seed = run.experiment, run.config.federation.seed
    if not clients:
        rows = run.data.rows_of(np.array(samples))
        stay = ~np.isin(np.arange(len(experiment.shards.labels)), rows)
        return retrained(experiment, stay, seed)
    rows = np.concatenate([without_samples(run.data, client) for client in clients])
    neighbours = stack_clients(run.source, [rows], run.config.data.normalize)
    models = run_neighbours(experiment, neighbours, seed)
    return {name: value[1:] for name, value in models.items()}


def sensitivities(
    folder: Path,
    samples: Sequence[int],
    given: UserObjects = NOTHING,
    clients: Sequence[int] = (),
) -> dict[str, float]:
    """Return how far the removal can move the model, for each kind of constants.

    Several clients are removed one after the other, so their certificates are added.

    Raise an error if the run has no certificate.
    """
    case = finished_run.from_directory(folder, given=given)
    _require_covered(case)
    if case.start:  # nonnegativity is a fact about the samples, on which sigma must not depend
        case = dataclasses.replace(case, start=dataclasses.replace(case.start, nonnegative=False))
    with np.load(files.require_regular(folder / "partition.npz")) as split:
        owner = dict(zip(split["train_index"].tolist(), split["client"].tolist(), strict=True))
    if strangers := [sample for sample in samples if sample not in owner]:
        raise InputError(
            f"sample {strangers[0]} is not one of the run's training samples. Pass the index of "
            "a training sample in the data source, as in train_index of partition.npz."
        )
    if strangers := [client for client in clients if not 0 <= client < len(case.sizes)]:
        raise InputError(
            f"client {strangers[0]} is not one of the run's clients, which are numbered from 0 to "
            f"{len(case.sizes) - 1}. Pass the number of a client of the run."
        )
    leaving, limits = Counter(owner[sample] for sample in samples), {}
    changes = {"unit": "removed-clients" if clients else "samples"}
    for kind in KINDS:
        verdict = certificates.certify(case.under(constants=kind, **changes))
        bound = verdict.bound
        if verdict.certificates is None or bound is None or bound.status != "certified":
            reason = verdict.refusal or (_uncertified(case, bound.status) if bound else "no bound")
            what = "clients" if clients else "samples"
            raise InputError(f"the run has no certificate, so it cannot forget {what}: {reason}")
        if clients:
            limits[kind] = float(verdict.certificates[list(clients)].sum())
        else:
            limits[kind] = theory.removal(verdict.certificates, case.sizes, leaving)
        if not math.isfinite(limits[kind]):
            raise InputError(
                "the certificate overflows, so no noise can hide the removal. Lower [local] lr."
            )
    return limits


def _uncertified(case: certificates.CertifiedSetting, status: str) -> str:
    """Return why a bound with this status is not certified, and what to do."""
    exact = "" if case.exact else "[engine] dtype = 'float64'"
    if status == "estimated":
        also = f" and {exact}" if exact else ""
        advice = f"Its constants are estimated. Repeat the run with [task] name = 'matrix'{also}."
    elif status == "claimed":
        advice = (
            "It relies on the Lipschitz constant of your own orthogonalizer, which nobody checked. "
            "Repeat the run with a built-in orthogonalizer."
        )
    elif exact:
        advice = f"Repeat the run with {exact}."
    else:
        advice = (
            "Rounding errors could exceed the certificate. Repeat the run with a larger [local] "
            "lr, or with fewer [federation] rounds."
        )
    return f"the status of its bound is `{status}`, but removal needs `certified`. {advice}"


def _require_covered(case: certificates.CertifiedSetting) -> None:
    """Raise an error if the run's certificate covers replaced samples, but not removed samples."""
    if case.config.local.batch:
        raise InputError(
            "removal is certified only for full batches, because the choice of samples in a "
            "mini-batch depends on the number of samples of the client. Set [local] batch = 0."
        )
    if case.config.federation.aggregate != "mean":
        raise InputError(
            "removing a sample changes the weight of its client, which the certificate does not "
            "cover. Set [federation] aggregate = 'mean'."
        )
    if case.config.orthogonalizer.name not in DATA_FREE:
        raise InputError(
            f"the orthogonalizer is {case.config.orthogonalizer.name}, but removal needs a "
            "certificate that never fails and does not depend on the samples. Use one of "
            f"{', '.join(DATA_FREE)}."
        )


def noised(model: Params, sigma: float, draws: int = 1) -> Params:
    """Return `draws` copies of the model, each with its own secret noise.

    The first dimension of every parameter is the number of the copy.
    """
    rng, noisy = KeyStream(), {}
    for name, value in model.items():
        noise = torch.from_numpy(rng.standard_normal((draws, *value.shape[1:])))
        noisy[name] = value + sigma * noise.to(value.device, value.dtype)
    return noisy


def table(record: Record) -> Table:
    """Return a printable table of the noise and its cost for each kind of certificate."""
    rows = [
        [kind, number(entry['sensitivity']), number(entry['sigma']),
         f"{entry['accuracy']:.2%} (SD {entry['spread']:.2%})", number(entry['told'], 2)]
        for kind, entry in record["kinds"].items()
    ]  # fmt: skip
    clients = record.get("clients", [])  # missing in folders of older versions
    count, what = len(clients or record["samples"]), "client" if clients else "sample"
    title = (
        f"{count} {what}{'s' if count > 1 else ''} forgotten for ε = {record['epsilon']:g}, δ = "
        f"{record['delta']:g}\naccuracy without noise {record['accuracy']:.2%}, accuracy after "
        f"retraining {record['accuracy_retrained']:.2%}; distance between the two models "
        f"{number(record['distance'])}"
    )
    return columns(title, ("constants", "certificate", "σ", "accuracy", "δ of this pair"), rows)
