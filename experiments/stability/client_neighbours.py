"""Neighbours of a run that differ in a whole client: random ones, all, and the worst found.

`worst_clients` searches for the samples of a client that move the final model most. It first gives
one label to all samples of the client, and trains a run for each label. Then it differentiates the
run: for the direction V of the largest shift so far, one reverse pass computes <V, dX^R / dw_z> for
every candidate z, which is a held-out sample with any label. The candidate with the largest product
replaces all samples of the client. Each step trains the exact run, and the best attack stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedmuon.config.load import Config
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.client_neighbours import (
    ClientNeighbours,
    draw_clients,
    every_client,
    relabelled,
    same_for_all,
    stack_clients,
    without_samples,
)
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.influence import parts_in_memory, require_smooth, smooth
from fedmuon.federated.adjoint import pulled_back
from fedmuon.federated.experiment import Engine, Experiment
from fedmuon.federated.neighbour_runs import distances, run_neighbours
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.federated.shards import targets_on
from fedmuon.tasks.base import Batch, Params

FILE = "replaced.csv"
HEADER = "trial,client,position,replacement,label\n"
LABELS = 10  # maximum number of labels that are tried for all samples of a client
POOL = 200  # maximum number of held-out samples that are tried, each with LABELS labels
PASSES = 2  # number of reverse passes
Attacks = list[np.ndarray]  # one array [n_i, 4] for each neighbour, as in `draw_clients`


def require_client_neighbours(config: Config) -> None:
    """Raise InputError if the config cannot have neighbours that differ in a whole client."""
    table = config.stability
    if table.realized:
        raise InputError(
            f"[stability] realized bounds neighbours that differ in one sample, but unit is "
            f"{table.unit!r}. Set unit = 'samples', or leave realized out."
        )
    if table.unit == "clients":
        return
    if config.task.name != "matrix":
        raise InputError(
            "[stability] unit = 'removed-clients' needs [task] name = 'matrix', because only there "
            "the gradient of a client without samples is 0. Set unit = 'clients', or set [task] "
            "name = 'matrix'."
        )
    if table.neighbours == "worst":
        raise InputError(
            "[stability] neighbours = 'worst' has no effect with unit = 'removed-clients', because "
            "a client can be removed in only one way. Set neighbours = 'all'."
        )


@dataclass(frozen=True)
class DrawnClients:
    """Neighbours that replace all samples of a client."""

    run: FinishedRun
    attacks: Attacks

    def __len__(self) -> int:
        return len(self.attacks)

    def __getitem__(self, part: slice | np.ndarray) -> "DrawnClients":
        chosen = np.arange(len(self.attacks))[part]
        return DrawnClients(self.run, [self.attacks[t] for t in chosen])

    @property
    def clients(self) -> np.ndarray:
        """The client of each neighbour [T]."""
        return np.array([rows[0, 0] for rows in self.attacks])

    @property
    def heads(self) -> list[str]:
        """The first columns of neighbours.csv; no single sample is replaced, so two are -1."""
        return [f"{t},{client},-1,-1," for t, client in enumerate(self.clients)]

    def stacked(self) -> ClientNeighbours:
        """Return the data sets: the original data set, and then the neighbours."""
        return stack_clients(self.run.source, self.attacks, self.run.config.data.normalize)


def pick_clients(run: FinishedRun, engine: Engine, size: int) -> DrawnClients:
    """Return the neighbours that the config requests, and write them to replaced.csv.

    `size` is the number of neighbours that are trained together.
    """
    file = run.out / FILE
    if FILE in files.sums_of(run.out) and file.exists():
        files.require_sound(run.out, [FILE])
        return DrawnClients(run, read_attacks(file))
    drawn = DrawnClients(run, _picked(run, engine, size))
    rows = [(t, *row) for t, rows in enumerate(drawn.attacks) for row in rows.tolist()]
    content = "".join([HEADER, *(",".join(map(str, row)) + "\n" for row in rows)]).encode()
    files.announce(run.out, {FILE: content})
    files.write_bytes(file, content)
    return drawn


def read_attacks(file: Path) -> Attacks:
    """Return the neighbours in a replaced.csv."""
    with open(file, encoding="utf-8", opener=files.regular) as lines:
        table = np.loadtxt(lines, np.int64, delimiter=",", skiprows=1, ndmin=2)
    return np.split(table[:, 1:], np.flatnonzero(np.diff(table[:, 0])) + 1)


def _picked(run: FinishedRun, engine: Engine, size: int) -> Attacks:
    table, data, seed = run.config.stability, run.data, run.config.federation.seed
    removed = table.unit == "removed-clients"
    if table.neighbours == "worst":
        return worst_clients(run, engine, size)
    if table.neighbours == "all":
        clients = np.flatnonzero(data.sizes).tolist()
        if removed:
            return [without_samples(data, client) for client in clients]
        return every_client(data, run.source, seed)
    drawn = draw_clients(data, run.source, table.trials, seed, table.neighbours)
    return [without_samples(data, int(rows[0, 0])) for rows in drawn] if removed else drawn


# The worst found samples of a client


def worst_clients(run: FinishedRun, engine: Engine = run_rounds, size: int = 64) -> Attacks:
    """Return the worst found samples for the `trials` clients that take part in most rounds."""
    return search(run, engine, size)[1]


def search(
    run: FinishedRun, engine: Engine = run_rounds, size: int = 64
) -> tuple[Attacks, Attacks]:
    """Return the worst labels and the worst found samples of the same clients."""
    require_smooth(run.config)
    labels = _labels(run)
    part = np.bincount(run.experiment.plan.schedule().ravel(), minlength=len(run.data.sizes))
    order = np.argsort(-part, kind="stable")
    clients = order[part[order] > 0][: run.config.stability.trials].tolist()
    tried = [relabelled(run.data, client, label) for client in clients for label in labels]
    moved, shifts = _shifts(run, tried, engine, size)
    best = moved.reshape(len(clients), -1).argmax(1) + len(labels) * np.arange(len(clients))
    relabelled_only = [tried[t] for t in best]
    attacks, far = list(relabelled_only), moved[best]
    towards = {name: value[best] for name, value in shifts.items()}
    candidates = Candidates.of(run, labels)
    experiment = smooth(run)
    for _ in range(PASSES):
        chosen = candidates.steepest(experiment, towards, clients, run.config.federation.seed)
        replacements = [
            same_for_all(run.data, client, int(candidates.index[p]), int(candidates.label[p]))
            for client, p in zip(clients, chosen, strict=True)
        ]
        moved, shifts = _shifts(run, replacements, engine, size)
        for t in np.flatnonzero(moved > far):
            attacks[t], far[t] = replacements[t], moved[t]
            for name, value in shifts.items():
                towards[name][t] = value[t]
    return relabelled_only, attacks


def _labels(run: FinishedRun) -> list[int]:
    """Return the labels that an attack may give to samples."""
    labels = run.source.labels
    if labels.ndim > 1 or labels.dtype.kind != "i" or run.source.classes < 2:
        raise InputError(
            "the worst clients are searched with other labels, so [stability] neighbours = 'worst' "
            "with unit = 'clients' needs one class label per sample. Set neighbours = 'own' or "
            "'all'."
        )
    rng = generator(run.config.federation.seed, Draw.NEIGHBOUR, block=7)
    drawn = rng.permutation(run.source.classes)[:LABELS]
    return sorted(drawn.tolist())


def _shifts(
    run: FinishedRun, attacks: Attacks, engine: Engine, size: int
) -> tuple[np.ndarray, Params]:
    """Return the distances [T] and the differences [T, ...] of the neighbours' final models."""
    moved, differences = [], []
    for start in range(0, len(attacks), size):
        drawn = DrawnClients(run, attacks[start : start + size])
        seed = run.config.federation.seed
        models = run_neighbours(run.experiment, drawn.stacked(), seed, engine)
        moved.append(distances(models)[0])
        differences.append({name: v[1:] - v[:1] for name, v in models.items()})
    joined = {name: torch.cat([part[name] for part in differences]) for name in differences[0]}
    return np.concatenate(moved), joined


@dataclass(frozen=True)
class Candidates:
    """Held-out samples with labels: any of them may replace all samples of a client."""

    index: np.ndarray
    label: np.ndarray
    samples: Batch

    @classmethod
    def of(cls, run: FinishedRun, labels: Sequence[int]) -> "Candidates":
        """Return a random subset of the samples that train no client, each with every label."""
        unused = np.ones(len(run.source.labels), bool)
        unused[run.data.train_index] = False
        pool = np.flatnonzero(unused)
        rng = generator(run.config.federation.seed, Draw.NEIGHBOUR, block=8)
        pool = np.sort(rng.permutation(pool)[:POOL])
        index, label = np.repeat(pool, len(labels)), np.tile(labels, len(pool))
        task, kind = run.experiment.task, run.source.labels.dtype
        rows = torch.from_numpy(run.source.rows(run.config.data.normalize, index))
        targets = targets_on(task.device, torch.float64, label.astype(kind))
        return cls(index, label, Batch(rows.to(task.device, torch.float64), targets))

    def steepest(
        self, experiment: Experiment, towards: Params, clients: Sequence[int], seed: int
    ) -> list[int]:
        """Return the candidate with the largest <V, dX^R / dw> for each client and its V."""
        start = begin(experiment.recipe, experiment.task, seed)
        nobody = Batch(self.samples.inputs[:0], self.samples.labels[:0])
        attacked, slopes = set(clients), dict[int, list[torch.Tensor]]()
        directions = {name: value[:, None].double() for name, value in towards.items()}

        def samples_of(client: int) -> Batch:
            return self.samples if client in attacked else nobody

        for part in parts_in_memory(experiment, directions):
            sums: dict[int, torch.Tensor] = {}
            for pulled in pulled_back(experiment, start, part, samples_of):
                if pulled.client in attacked:
                    sums[pulled.client] = pulled.others + sums.get(pulled.client, 0.0)
            for client, value in sums.items():
                slopes.setdefault(client, []).append(value)
        return [int(torch.cat(slopes[i])[t].argmax()) for t, i in enumerate(clients)]
