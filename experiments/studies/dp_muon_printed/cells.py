"""Study `dp-muon-printed`: what the settings of 000's Table 3 spend, by both modes."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from pydantic import Field

from fedmuon.config.schema import Chance, Count, Positive
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.suites.contents import Asked
from fedmuon.privacy.accounting import epsilon
from fedmuon.privacy.calibration import noise_for
from fedmuon.runs.directory import Record


class Row(Table):
    """A printed setting: T steps of m blocks on Poisson lots, and the epsilon beside them."""

    population: Count
    lot: Positive
    steps: Count
    blocks: Count
    delta: Chance
    noise: Positive
    printed: Positive


class Settings(Table):
    """What the suite's file holds: rows by name."""

    rows: Annotated[dict[str, Row], Field(min_length=1)]


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell a row."""
    return [
        Call(f"row-{number}", partial(accounted, name, row))
        for number, (name, row) in enumerate(settings.rows.items())
    ]


def accounted(name: str, row: Row) -> Record:
    """The printed epsilon beside that of both modes, and the noise that it would take jointly."""
    releases = row.lot / row.population, row.steps, row.delta, row.blocks
    joint = epsilon(row.noise, *releases)
    spent = {
        "per_release": epsilon(row.noise, *releases, "per-release").epsilon,
        "joint_lower": joint.lower,
        "joint_upper": joint.upper,
        "joint_rdp": joint.rdp,
        "needed": noise_for(row.printed, *releases)[0],
        "adjacency": joint.adjacency,
        "sampling": joint.sampling,
    }
    return {"rows": [{"name": name} | row.model_dump(exclude={"population", "lot"}) | spent]}
