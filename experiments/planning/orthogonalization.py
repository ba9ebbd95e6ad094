"""The seconds that the orthogonalizer takes in a step of one client, and how it computes.

The matrices are random. Each has the norm of the first gradient of its parameter, because the
method of some maps depends on the norm. They are timed as in training, with all matrices of equal
shape as one stack, but apart from other work.
"""

import time
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor

from fedmuon.config.load import Config
from fedmuon.config.schema import OrthogonalizerTable, reads
from fedmuon.experiments.tables import columns
from fedmuon.optim.orthogonalizers import DTYPES, map_of_table
from fedmuon.optim.stage import ServerState
from fedmuon.orthogonalize import schedule
from fedmuon.orthogonalize.polynomial import gram_dtypes, half_segments, native_half
from fedmuon.orthogonalize.spectral import accurate_dtype, norm, wide
from fedmuon.runs.directory import Record
from fedmuon.runs.fixed_files import routing
from fedmuon.runs.prepare import Run
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask

TIMED = ("smoothed-polar", "clipped-sign", "exact-sign", "newton-schulz")
SAMPLES, SECONDS, MOST = 64, 0.3, 20  # of the first gradient; limits of the calls of one stack
BY_GRAM, BY_MATRIX = "products of Gram matrices, {}", "products of whole matrices, {}"
BY_EIGENVECTORS, BY_SVD = "eigenvectors of Gram matrices, {}", "SVD, float64"
NEWTON_SCHULZ = {"name": "newton-schulz", "steps": 5}
OTHERS = {
    "newton-schulz, 5 steps": NEWTON_SCHULZ,
    **{
        f"newton-schulz, 5 steps, products = '{half}'": {**NEWTON_SCHULZ, "products": half}
        for half in ("bfloat16", "float16")
    },
}


def orthogonalization(run: Run, state: ServerState) -> Record:
    """Return the seconds per stack of matrices, and in all, also of faster, less exact maps.

    The record is empty if the run does not use an orthogonalizer whose time is known in advance.
    """
    config = run.config
    table = config.orthogonalizer
    if not reads(config, "orthogonalizer.name") or table.name not in TIMED:
        return {}
    stacks = _stacks(run, state)
    if not stacks:
        return {}
    rows = [
        {
            "matrices": [*stack.shape],
            "method": _method(table, stack),
            "seconds": _seconds(table, stack),
        }
        for stack in stacks
    ]
    device, total = stacks[0].device, sum(row["seconds"] for row in rows)
    others = {}
    for words, keys in OTHERS.items():
        other = OrthogonalizerTable.model_validate(
            {**table.model_dump(by_alias=True, exclude_unset=True), **keys}
        )
        half = DTYPES[other.products]
        if other == table or (half is not None and not native_half(half, device)):
            continue
        spent = sum(_seconds(other, stack) for stack in stacks)
        if spent < total:
            others[words] = spent
    return {"map": table.name, "stacks": rows, "seconds": total, "faster": others}


def table_of(record: Record) -> Table:
    """Return the record of `orthogonalization` as a table."""
    rows = [
        (_named(row["matrices"]), row["method"], _in_ms(row["seconds"])) for row in record["stacks"]
    ]
    rows.append(("all", "", _in_ms(record["seconds"])))
    rows += [("all, less exact", words, _in_ms(spent)) for words, spent in record["faster"].items()]
    title = f"orthogonalization ({record['map']}) in a step of one client"
    return columns(title, ("matrices", "method", "seconds"), rows, left=2)


def _stacks(run: Run, state: ServerState) -> list[Tensor]:
    """Return stacks [count, m, n] of random matrices, one for each shape."""
    task, config = run.experiment.task, run.config
    if not isinstance(task, MatrixTask | NetworkTask):
        return []
    lengths = _first_norms(run, state)
    generator = torch.Generator().manual_seed(0)
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    for name, (count, rows, width) in _matrices(config, task).items():
        like = state.params[name]
        drawn = torch.randn(count, rows, width, generator=generator).to(like)
        length = lengths[name] / count**0.5
        drawn *= (length / norm(drawn).to(like))[:, None, None]
        by_shape.setdefault((rows, width), []).append(drawn)
    return [torch.cat(group) for group in by_shape.values()]


def _matrices(config: Config, task: MatrixTask | NetworkTask) -> dict[str, tuple[int, int, int]]:
    """Return the (count, m, n) of the matrices of each parameter that Muon updates."""
    if isinstance(task, MatrixTask):
        return {"weight": (1, task.dimension, task.classes)}
    table = routing(config, task.module)
    return {route.name: route.matrices for route in table if route.matrices is not None}


def _first_norms(run: Run, state: ServerState) -> dict[str, Tensor]:
    """Return the norms of the first gradient, of a few samples."""
    shards, task = run.experiment.shards, run.experiment.task
    batch = Batch(shards.inputs[:SAMPLES], shards.labels[:SAMPLES])
    _, slope = task.gradient(state.params, [batch])
    return {name: torch.linalg.vector_norm(value) for name, value in slope.items()}


def _method(table: OrthogonalizerTable, matrices: Tensor) -> str:
    short, long = sorted(matrices.shape[1:])
    if table.name == "newton-schulz":
        polynomials = schedule(table.polynomials, table.steps)
        if table.products == "full":
            for work in gram_dtypes(short, long, matrices.dtype, polynomials):
                return BY_GRAM.format(_written(work))
        half = DTYPES[table.products]
        segments = half_segments(short, long, matrices.dtype, half, polynomials)
        if len(segments) < len(polynomials):
            return f"{BY_GRAM.format(_written(half))}, renewed {len(segments) - 1} times"
        return BY_MATRIX.format(_written(DTYPES[table.products] or matrices.dtype))
    root = {"smoothed-polar": table.lambda_**0.5, "clipped-sign": table.clip_level}
    if table.name not in root:
        return BY_SVD
    floor = torch.tensor(root[table.name], dtype=torch.float64)
    work = accurate_dtype(norm(wide(matrices)[0]), floor, matrices.dtype)
    return BY_SVD if work is None else BY_EIGENVECTORS.format(_written(work))


def _seconds(table: OrthogonalizerTable, matrices: Tensor) -> float:
    """Return the shortest seconds of several calls after a first one, or of one long call."""
    apply, context = map_of_table(table), cast(Any, None)  # these maps do not read the context
    times: list[float] = []
    while not times or (sum(times) < SECONDS and len(times) < MOST):
        begun = time.perf_counter()
        apply(matrices, context, 0)
        if matrices.device.type == "cuda":
            torch.cuda.synchronize(matrices.device)
        times.append(time.perf_counter() - begun)
    return min(times[1:] or times)


def _named(matrices: list[int]) -> str:
    count, rows, width = matrices
    return f"{count} of {rows} x {width}"


def _written(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
