"""Made-up suites for tests: perturbation = certificate times noise, certificate = 2 Y_i / n_i."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.tables import WORDS
from fedmuon.core.files import announce

Table = dict[str, np.ndarray]
ABOUT = {
    "suite": "A1", "data": "fashion-mnist", "title": "Step size", "scale": "small",
    "again": "fedmuon suite A1 --data fashion-mnist --scale small",
    "trajectories": 660, "seconds": 12.5, "trajectories_per_second": 52.8,
    "note": "The published line is of MNIST: the values need not agree.",
    "published": {"data": "mnist", "runs": 60, "gap_within_bound": 1.0, "mean_gap": -0.00729,
                  "mean_bound": 0.05061, "mean_perturbation": 1.18e-5},
    "versions": {"python": "3.11", "torch": "2.13"}, "machine": {"cores": 2},
    "share_of_gemm": 0.41, "kind": "stability", "constant": "sharp", "delta": 0.05,
    "status": "certified",
    "assumptions": ["Every loss lies in [0, B]."],
}  # fmt: skip


def made(trials: int = 6, **levels: Any) -> tuple[Table, Table]:
    """Columns of runs.csv and neighbours.csv of a full grid; client 0 takes no part if K = 2."""
    grid = {"n": [2000], "lr": [0.01], "lambda": [0.1], "alpha": [0.5], "per_round": [5],
            "seed": [0, 1], **levels}  # fmt: skip
    runs, neighbours = [], []
    for values in itertools.product(*grid.values()):
        head = {"suite": "A1", "data": "fashion-mnist", **dict(zip(grid, values, strict=True))}
        rng = np.random.default_rng(int(head["seed"]))
        sizes = np.rint(head["n"] * np.array([0.05, 0.1, 0.15, 0.3, 0.4]))
        taken = np.array([0 if head["per_round"] == 2 else 10, 20, 30, 40, 50])
        exposure = taken * head["lr"] / np.sqrt(head["lambda"])
        client = np.arange(trials) % 5
        promised = 2 * exposure[client] / sizes[client]
        moved = promised * rng.uniform(0.3, 0.5, trials)
        bound = float(2 * promised.max() + np.sqrt(3 / head["n"]))
        gap = 0.2 * bound * rng.uniform(-1, 1)
        for t, i in enumerate(client):
            neighbours.append({
                **head, "trial": t, "client": i, "index": t, "replacement": 9000 + t,
                "size": sizes[i], "perturbation": moved[t], "exposure": exposure[i],
                "certificate": promised[t], "old_label": t % 3, "new_label": t // 3 % 3,
            })  # fmt: skip
        runs.append({
            **head, "gap": gap, "bound": bound, "mean_perturbation": moved.mean(),
            "max_perturbation": moved.max(), "within": True, "gap_low": gap - 0.01,
            "gap_high": gap + 0.01, "table_gap": gap + 0.001, "bound_one": bound / 2,
            "share": 0.5,
        })  # fmt: skip
    return columns(runs), columns(neighbours)


def columns(rows: list[dict]) -> Table:
    return {
        name: np.array([row[name] for row in rows], dtype=str if name in WORDS else float)
        for name in rows[0]
    }


def phase_grid(**more: Any) -> tuple[Table, Table]:
    """A small suite over eta and lambda."""
    return made(lr=[0.005, 0.01, 0.03], **{"lambda": [1e-3, 1e-2, 1e-1]}, **more)


def changed(table: Table, name: str, place: int, value: float) -> Table:
    column = table[name].copy()
    column[place] = value
    return {**table, name: column}


def write(folder: Path, runs: Table, neighbours: Table, **about: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in (("runs", runs), ("neighbours", neighbours)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(table)
            writer.writerows(zip(*(column.tolist() for column in table.values()), strict=True))
    (folder / "suite.json").write_text(json.dumps({**ABOUT, **about}), encoding="utf-8")
    return summed(folder)


def summed(folder: Path) -> Path:
    """The folder, with the sums of its files as they are now."""
    announce(folder, {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()})
    return folder
