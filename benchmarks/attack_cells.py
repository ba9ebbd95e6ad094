"""Random cases for `benchmarks/attack.py`: certified configs with samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch

from fedmuon import analysis
from fedmuon.config.load import only_read, parse
from fedmuon.config.names import NAMES
from fedmuon.config.schema import Local, TaskTable, reads
from fedmuon.core.choices import GIVEN
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.data.source import unit_rows
from fedmuon.experiments.stability import certificates
from fedmuon.experiments.stability.certificates import map_constant
from fedmuon.optim.orthogonalizers import Orthogonalizer
from fedmuon.orthogonalize import Uncertified
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask


def words(table: type[Table], key: str) -> tuple[Any, ...]:
    """Return the allowed values of a key."""
    return get_args(table.model_fields[key].annotation)


# The first entry of each map is almost linear for typical momenta. Maps that are not listed use
# their defaults.
MAPS: dict[str, tuple[dict[str, Any], ...]] = {
    "smoothed-polar": ({"lambda": 1e4}, {"lambda": 0.1}, {"lambda": 1e-3}),
    "newton-schulz": (
        {"eps": 1e5},
        {"eps": 0.5, "coefficients": "jordan", "normalization": "max"},
        {"coefficients": "quintic", "normalization": "unit"},
        {"eps": 0.05, "coefficients": "polar-express-e2"},
    ),
    "clipped-sign": ({"clip-level": 50.0}, {"clip-level": 0.05}),
    "gaussian-smoothed-sign": ({"sigma": 3.0}, {"sigma": 0.1}),
    "randomized-polar": ({"rank": 1, "oversample": 0},),
}
HALF = Orthogonalizer(lambda m: 0.5 * m, 0.5)  # represents a custom orthogonalizer
AXES: dict[str, Sequence[Any]] = {
    "local.momentum-form": words(Local, "momentum_form"),
    "local.momentum": (0.0, 0.5, 0.9),
    "local.schedule": tuple(NAMES["local.schedule"]),
    "local.batch": (0, 3),
    "local.steps": (1, 3),
    "local.alignment": (0.3, 0.9, 1.0),
    "local.server-momentum": (0.3, 0.9),
    "federation.aggregate": ("mean", "by-samples"),
    "federation.rounds": (1, 3, 8, 20),
    "task.initial": words(TaskTable, "initial"),
    "judged as": ("float64", "float32"),  # dtype of the verdict; the run itself is in float64
    "share of clients": (0.01, 0.5, 1.0),  # K / N, with K >= 1
    "lr times decay": (0.0, 0.0, 0.1, 2.5),
    "lr times L_orth": (1e-2, 0.1, 1.0),
    "shape": ((1, 2), (2, 5), (6, 3), (5, 10)),
    "sizes": ((1,), (8,), (4, 8, 6), (2, 12, 6, 2)),  # n_i
    "samples": ("alike", "torn", "drawn"),
    "non-negative": (False, False, True),
}
CALM: dict[str, Sequence[Any]] = {
    "samples": ("alike",), "lr times L_orth": (1e-4,), "lr times decay": (0.0, 0.1, 2.5),
    "shape": ((3, 2), (6, 2)),
}  # fmt: skip
RANKED, TRIED = 12, 512  # neighbours ranked by derivatives; candidates for the sample vector


@dataclass(frozen=True)
class Cell:
    """An optimizer and an orthogonalizer, with a value for every axis."""

    recipe: str
    orth: str  # the orthogonalizer; "" for an optimizer without one
    calm: bool
    seed: list[int]
    drawn: Mapping[str, Any]

    @classmethod
    def of(cls, recipe: str, orth: str, number: int, seed: list[int]) -> "Cell":
        """Make the cell with this number in its family."""
        rng, calm = np.random.default_rng(seed), number % 2 == 0
        axes, maps = {**AXES, **(CALM if calm else {})}, MAPS.get(orth, ({},))
        drawn = {axis: values[int(rng.integers(len(values)))] for axis, values in axes.items()}
        drawn["parameters"] = maps[0 if calm else number // 2 % len(maps)]
        return cls(recipe, orth, calm, seed, drawn)

    def tables(self, lr: float = 1.0) -> dict[str, dict[str, Any]]:
        """Return the tables of the config, with only the keys that the run reads."""
        drawn, clients = self.drawn, len(self.drawn["sizes"])
        found: dict[str, dict[str, Any]] = {
            "data": {},
            "federation": {"seed": self.seed[-1], "clients": clients,
                           "per-round": max(1, round(drawn["share of clients"] * clients))},
            "task": {},
            "local": {"recipe": self.recipe, "lr": lr,
                      "weight-decay": drawn["lr times decay"] / lr},
            "engine": {"device": "cpu", "dtype": "float64"},
            "stability": {"trials": RANKED},
        }  # fmt: skip
        if self.orth != GIVEN:
            found["orthogonalizer"] = {"name": self.orth or "smoothed-polar", **drawn["parameters"]}
        for axis, value in drawn.items():
            table, _, key = axis.partition(".")
            if key:
                found[table][key] = value
        return only_read(found)

    @property
    def read(self) -> list[str]:
        """The axes that this optimizer reads."""
        config = parse(self.tables())
        return [axis for axis in AXES if "." not in axis or reads(config, axis)]

    def rate(self) -> float:
        """Return lr, computed from the axis "lr times L_orth"."""
        config, sizes = parse(self.tables()), np.array(self.drawn["sizes"])
        law = analysis.Uniform(config.federation.per_round, 0.5)
        case = certificates.CertifiedSetting(config, sizes, law, self.drawn["shape"])
        try:
            slope = HALF.lipschitz if self.orth == GIVEN else map_constant(case)
        except Uncertified:
            slope = 1.0
        return self.drawn["lr times L_orth"] / (slope or 1.0)

    def samples(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and labels of all clients and of some further samples.

        The further samples are the candidates from which neighbours are ranked. The inputs are
        random, or one vector repeated, with one label or with all labels in turn.
        """
        (d, c), n, how = self.drawn["shape"], sum(self.drawn["sizes"]), self.drawn["samples"]
        inputs, labels = rng.standard_normal((n + 2 * c, d)), np.arange(n + 2 * c) % c
        if how == "drawn":
            labels[:n] = rng.integers(c, size=n)
        else:
            u, y = self._longest(self.admissible(rng.standard_normal((TRIED, d))))
            inputs[:n], inputs[n : n + c] = u, -u
            labels[:n] = (y + labels[:n]) % c if how == "torn" else y
        return self.admissible(inputs), labels

    def _longest(self, inputs: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the vector [d] and the label with the longest gradient at the initial model."""
        features, classes = self.drawn["shape"]
        task = MatrixTask(features, classes, torch.float64, start=self.drawn["task.initial"])
        start, rows = task.initial(generator(self.seed[-1], Draw.INITIAL)), torch.from_numpy(inputs)
        every = (torch.full((len(rows),), y) for y in range(task.classes))
        slopes = torch.cat([task.slopes(start, Batch(rows, labels)) for labels in every])
        y, row = divmod(int(slopes.norm(dim=-1).argmax()), len(rows))
        return inputs[row], y

    def admissible(self, inputs: np.ndarray) -> np.ndarray:
        """Scale rows to length 1. If samples must be nonnegative, take absolute values first."""
        return unit_rows(abs(inputs) if self.drawn["non-negative"] else inputs)
