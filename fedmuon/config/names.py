"""Names that a config accepts, with descriptions, options and references, for each key.

They follow from the rows in `core.choices` and `config.methods`.
"""

from collections.abc import Mapping

from fedmuon.config.methods import Column, Summaries
from fedmuon.core.choices import CHOICES, Options

RECIPE = "local.recipe"


def _summaries(key: str) -> dict[str, str]:
    return {choice.name: choice.summary for choice in CHOICES[key]}


COMPRESSORS, DOWNLINK = _summaries("compression.uplink"), _summaries("compression.downlink")
FEATURES, ADAPTERS = _summaries("data.features"), _summaries("federation.adapters")
ATTACKS = _summaries("attacks.kind")
# Keys that accept no custom objects, and how `fedmuon list` calls their names.
CLOSED = (
    "compression.uplink", "compression.downlink", "data.features", "federation.adapters",
    "attacks.kind",
)  # fmt: skip
CLOSED_LISTS = {
    "compressors": "compression.uplink",
    "features": "data.features",
    "adapters": "federation.adapters",
    "attacks": "attacks.kind",
}
# Key -> name -> description.
NAMES: dict[str, Mapping[str, str]] = {
    RECIPE: Summaries("summary"),
    **{key: _summaries(key) for key in CHOICES if key not in CLOSED},
}
# Key -> name -> option of [table.options] -> its default and description.
OPTIONS: dict[str, Mapping[str, Options]] = {
    key: Column("options")
    if key == RECIPE
    else {choice.name: choice.options for choice in CHOICES[key] if choice.options}
    for key in (
        "data.name", "federation.partition", "federation.aggregate", RECIPE, "local.schedule",
        "output.callback",
    )
}  # fmt: skip


def cited(key: str) -> Mapping[str, tuple[str, ...]]:
    """Return a mapping from the names for a key to their references."""
    if key == RECIPE:
        return Column("cites")
    return {choice.name: choice.cites for choice in CHOICES[key] if choice.cites}


LISTS = {  # what `fedmuon list` shows -> its key
    "data": "data.name",
    "optimizers": RECIPE,
    "orthogonalizers": "orthogonalizer.name",
    "aggregators": "federation.aggregate",
    "partitions": "federation.partition",
    "models": "task.model",
    "tasks": "task.name",
    "schedules": "local.schedule",
    "callbacks": "output.callback",
}
SAME_LIST = {"recipes": "optimizers", "maps": "orthogonalizers"}  # earlier name -> name of a list
