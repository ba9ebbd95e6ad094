"""The error of clients that were not in training, and its certified limits.

`participation_gap.py [--data fashion-mnist] [--clients 2000] [--plot FILE]`

A client draws shares of the labels from Dirichlet(0.5), and then 20 to 30 images. No image belongs
to two clients. Three groups of clients come from this population: participants, unseen clients, and
tuning clients. Step sizes and the expected train error (`guess`) are chosen with tuning clients, so
the certified limits do not pay for this choice.
"""

import argparse
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import fedmuon
from fedmuon.analysis.report import style
from fedmuon.data import read
from fedmuon.data.features import Features

Clients = list[np.ndarray]  # the indices of each client's images
ROUNDS, RATE = 20, 0.1  # a participant takes part in a round with this probability
NOISES = (6.0, 9.0, 15.0)
METHODS: dict[str, tuple[dict[str, Any], dict[str, float], tuple[float, ...]]] = {
    # Keys of [local], keys of [privacy], and step sizes
    "fedavg": ({}, {}, (2.0, 4.0, 8.0)),
    "fedmuon": ({"momentum": 0.5}, {}, (0.1, 0.2, 0.4)),
    "local-muon": ({}, {}, (0.1, 0.2, 0.4)),
}
HEAD = {  # the columns of the table, and their widths
    "method": 10, "noise": 5, "TV": 6, "participants": 12, "unseen (95%)": 15, "estimated": 9,
    "certified": 9, f"all {len(METHODS) * len(NOISES)}": 6, "participation gap (95%)": 23,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What is measured and certified for one method and noise multiplier."""

    method: str
    noise: float
    total_variation: float
    participants: float
    unseen: tuple[float, float]  # the mean, and the half width of its 95% interval
    estimated: float
    certified: float
    certified_together: float  # this limit holds together with those of all other rows
    gap: tuple[float, float]

    def cells(self) -> tuple[str, ...]:
        unseen, gap = (f"{mean:.4f} ± {half:.4f}" for mean, half in (self.unseen, self.gap))
        shown = (self.participants, unseen, self.estimated, self.certified, self.certified_together)
        words = [value if isinstance(value, str) else f"{value:.4f}" for value in shown]
        return (self.method, f"{self.noise:g}", f"{self.total_variation:.4f}", *words, gap)


def draw_clients(labels: np.ndarray, counts: tuple[int, ...], seed: int) -> list[Clients]:
    """Draw groups of clients. The images of each label are used up in a random order."""
    rng = np.random.default_rng(seed)
    classes = int(labels.max()) + 1
    unused = [rng.permutation(np.flatnonzero(labels == label)).tolist() for label in range(classes)]

    def client() -> np.ndarray:
        numbers = rng.multinomial(rng.integers(20, 31), rng.dirichlet(np.full(classes, 0.5)))
        if any(number > len(rest) for number, rest in zip(numbers, unused, strict=True)):
            raise SystemExit("a label has too few images for all clients: lower --clients")
        return np.array([unused[k].pop() for k in range(classes) for _ in range(numbers[k])])

    return [[client() for _ in range(count)] for count in counts]


def mean_and_half(*groups: np.ndarray) -> tuple[float, float]:
    """Return the mean of one group, or that of the first minus the second, with its half width."""
    mean = groups[0].mean() - (groups[1].mean() if len(groups) > 1 else 0.0)
    return float(mean), 1.96 * float(sum(group.var(ddof=1) / len(group) for group in groups)) ** 0.5


class Study:
    """The three groups of clients, and how models are trained and tested on them."""

    def __init__(self, data: str, clients: int) -> None:
        source = read(data)
        if data == "mnist5k":
            self.inputs = Features("hog").rows(source)[:, ::18]
        else:  # the projection to 80 components is learnt on other, public images
            self.inputs = Features("hog", 0, "mnist5k", 80).rows(source)
        self.labels = source.labels
        counts = (clients, clients // 4, max(10, clients * 3 // 40))
        self.participants, self.unseen, self.tuning = draw_clients(source.labels, counts, 0)

    def network(self) -> nn.Module:
        layer = nn.Linear(self.inputs.shape[1], int(self.labels.max()) + 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    def samples(self, clients: Clients) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.concatenate(clients)
        return self.inputs[chosen], self.labels[chosen]

    def train(
        self, clients: Clients, per_round: int, noise: float, method: str, lr: float
    ) -> fedmuon.Result:
        local, privacy, _ = METHODS[method]
        config = {
            "data": {"minimum": 1},
            "federation": {"clients": len(clients), "per-round": per_round, "rounds": ROUNDS},
            "local": {"recipe": method, "steps": 1, "lr": lr, **local},
            # The certificates need no secret noise, and this run can be repeated.
            "privacy": {"level": "client", "noise": noise, "bound": 0.5,
                        "insecure-reproducible-noise": True, **privacy},
        }  # fmt: skip
        return fedmuon.run(
            config, data=self.samples(clients), test=self.samples(self.unseen[:1]),
            partition=np.repeat(range(len(clients)), [len(images) for images in clients]),
            task=self.network, progress=False,
        )  # fmt: skip

    def errors(self, result: fedmuon.Result, clients: Clients) -> np.ndarray:
        """Return the mean error of each client. The linear model ignores the images' scale."""
        inputs, labels = self.samples(clients)
        wrong = (inputs @ result.model["weight"].numpy().T).argmax(1) != labels
        ends = np.cumsum([len(images) for images in clients])
        return np.array([part.mean() for part in np.split(wrong, ends[:-1])])

    def tuned(self, method: str, noise: float) -> tuple[float, float, fedmuon.Result]:
        """Return the best step size for tuning clients, their error, and the model.

        There are fewer tuning clients. Each entry of their mean update has the same noise.
        """
        per_round = len(self.tuning) // 2
        noise *= per_round / self.per_round
        tried: list[tuple[float, float, fedmuon.Result]] = []
        for lr in METHODS[method][2]:
            result = self.train(self.tuning, per_round, noise, method, lr)
            tried.append((lr, float(self.errors(result, self.tuning).mean()), result))
        return min(tried, key=lambda trial: trial[1])

    @property
    def per_round(self) -> int:
        return max(1, round(RATE * len(self.participants)))

    def row(self, method: str, noise: float) -> Row:
        lr, guess, reference = self.tuned(method, noise)
        result = self.train(self.participants, self.per_round, noise, method, lr)
        single, together = (
            fedmuon.certify(result, guess=round(guess, 2), settings=settings)
            for settings in (1, len(METHODS) * len(NOISES))
        )
        limits = {row.status: row.value for row in single.rows if row.name == "privacy of clients"}
        (paid,) = (row.value for row in together.rows
                   if row.name == "privacy of clients" and row.value is not None)  # fmt: skip
        errors, changes = [], []
        for clients in (self.unseen, self.participants):
            errors.append(self.errors(result, clients))
            # The reference knows neither group, so its gap has the mean 0, and cancels spread.
            changes.append(errors[-1] - self.errors(reference, clients))
        return Row(
            method, noise, single.divergence["total_variation"], float(errors[1].mean()),
            mean_and_half(errors[0]), limits["estimated"] or 1.0, limits["certified"] or 1.0,
            paid, mean_and_half(*changes),
        )  # fmt: skip


def print_line(cells: tuple[str, ...]) -> None:
    aligned = (cell.rjust(width) for cell, width in zip(cells, HEAD.values(), strict=True))
    print(*aligned, sep="  ", flush=True)


@style.styled
def draw(rows: list[Row], file: Path) -> None:
    """Draw the errors and the limits of each method by noise multiplier."""
    figure, panels = style.canvas(len(METHODS), False, 2.6)
    for panel, method in zip(panels, METHODS, strict=True):
        chosen = [row for row in rows if row.method == method]
        noises = np.array([row.noise for row in chosen])
        unseen = np.array([row.unseen for row in chosen])
        lines = {
            "certified limit, 95%": [row.certified for row in chosen],
            "estimated limit": [row.estimated for row in chosen],
            "participants": [row.participants for row in chosen],
        }
        for (label, values), look in zip(lines.items(), style.SERIES, strict=False):
            style.errorbars(panel, noises, np.array(values), None, look, label)
        style.errorbars(panel, noises, unseen[:, 0], unseen[:, 1], style.SERIES[3], "unseen")
        style.levels_on_x(panel, noises)
        panel.set(title=method, xlabel="noise multiplier", ylim=(0, 1))
        panel.axhline(0.9, color=style.GREY, lw=0.8, ls=":", label="random guess")
    panels[0].set_ylabel("mean error of a client")
    style.legend_below(figure, panels[0], 5)
    style.saved_as(figure, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="fashion-mnist", choices=("fashion-mnist", "mnist5k"))
    parser.add_argument("--clients", type=int, default=2000, help="number of participants")
    parser.add_argument("--plot", type=Path, help="file of the figure: .png, .pdf or .svg")
    options = parser.parse_args()
    logging.getLogger("fedmuon").setLevel(logging.ERROR)  # the noise is longer than an update
    study = Study(options.data, options.clients)
    table: list[Row] = []
    print_line(tuple(HEAD))
    for method, noise in itertools.product(METHODS, NOISES):
        table.append(study.row(method, noise))
        print_line(table[-1].cells())
    if options.plot:
        draw(table, options.plot)
