"""Study `wall-clock`: 004's Lemma 11 on this machine, and its printed losses by seconds.

A shape's cell times an SVD with U V^T, Newton-Schulz steps of degree 2, and a square product of the
longer side, all in float32, in turn, several times over. Times are geometric means over the rounds,
and quotients of two have Student's interval of the differences of logarithms, round by round.
Predictions are Lemma 11's with the throughputs of that product and of that SVD, once with 004's
count for Newton-Schulz and once with the products that are made here, which are fewer.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, model_validator

from fedmuon.analysis.report.slopes import paired
from fedmuon.analysis.theory.wall_clock import horner_flops, svd_flops
from fedmuon.config.schema import Count
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.suites.contents import Asked
from fedmuon.optim.flops import performed_newton_schulz
from fedmuon.orthogonalize import newton_schulz, schedule
from fedmuon.runs.directory import Record

DEGREE, COEFFICIENTS = 2, "quintic"
METHODS = ("sgd", "svd", "q1", "q2", "q3")


class Printed(Table):
    """One of 004's tables: train losses at these seconds."""

    seconds: Annotated[list[float], Field(min_length=2)]
    sgd: list[float]
    svd: list[float]
    q1: list[float]
    q2: list[float]
    q3: list[float]

    @model_validator(mode="after")
    def _alike(self) -> "Printed":
        lengths = {len(getattr(self, name)) for name in ("seconds", *METHODS)}
        if len(lengths) > 1:
            raise InputError("a printed table has one loss of each method at every second")
        return self


class Settings(Table):
    """What the suite's file holds."""

    shapes: Annotated[list[Annotated[list[Count], Field(min_length=2, max_length=2)]],
                      Field(min_length=1)]  # fmt: skip
    iterations: Annotated[list[Count], Field(min_length=1)]
    repeats: Count
    tables: Annotated[dict[str, Printed], Field(min_length=1)]


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell for each printed table and each shape."""
    found = [
        Call(f"printed-{number}", partial(printed, name, table), 0)
        for number, (name, table) in enumerate(settings.tables.items())
    ]
    shapes = [(shape[0], shape[1]) for shape in settings.shapes]
    return found + [
        Call(f"timed-{m}x{n}", partial(timed, settings, (m, n)), m * n) for m, n in shapes
    ]


def printed(name: str, table: Printed) -> Record:
    """A row for each printed second."""
    columns = {method: getattr(table, method) for method in METHODS}
    rows = [
        {"table": name, "seconds": second} | {one: losses[k] for one, losses in columns.items()}
        for k, second in enumerate(table.seconds)
    ]
    return {"rows": rows, "times": []}


def timed(settings: Settings, shape: tuple[int, int]) -> Record:
    """A row for each number of steps; `to_svd` and `to_product` are what the ends of the intervals
    of its time over those of an SVD and of a product are times, or over, the quotient."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    square = torch.randn(max(shape), max(shape), generator=torch.Generator().manual_seed(1))
    products = partial(torch.matmul, square, square)
    mine = [partial(newton_schulz, matrix, q, COEFFICIENTS) for q in settings.iterations]
    logs = np.log(in_turn([partial(_polar, matrix), products, *mine], settings.repeats))
    svd, product, *found = np.exp(logs.mean(0)).tolist()
    efficiency = 2 * max(shape) ** 3 / product / (svd_flops(*shape) / svd)
    rows = []
    for at, (steps, seconds) in enumerate(zip(settings.iterations, found, strict=True), 2):
        made = performed_newton_schulz(*shape, schedule(COEFFICIENTS, steps), matrix.dtype)
        away = [math.exp(paired([*zip(logs[:, at], logs[:, k], strict=True)])[1]) for k in (0, 1)]
        rows.append({
            "m": shape[0], "n": shape[1], "steps": steps, "svd_seconds": svd,
            "seconds": seconds, "efficiency": efficiency,
            "lemma": svd_flops(*shape) / horner_flops(*shape, steps, DEGREE) * efficiency,
            "made": svd_flops(*shape) / made * efficiency,
            "to_svd": away[0], "to_product": away[1],
        })  # fmt: skip
    return {"rows": [], "times": rows}


def _polar(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T as 004 has it."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def in_turn(calls: Sequence[Callable[[], object]], repeats: int) -> np.ndarray:
    """The seconds of each call in each round [repeats, calls], after a round that does not count:
    what slows the machine for a while slows all calls of a round."""
    found = np.empty((repeats + 1, len(calls)))
    for row in found:
        for at, call in enumerate(calls):
            start = time.perf_counter()
            call()
            row[at] = time.perf_counter() - start
    return found[1:]
