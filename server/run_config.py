"""Flower's run config: the tables of an experiment, the folder of its results, and options.

Flower refuses a key that does not stand in the app's pyproject.toml, and nobody knows beforehand
how the user's options are called: so all of them may stand in one key, `options`, as JSON.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmuon.config.incompatible import infinite, noiseless
from fedmuon.config.load import Config, nested, unflatten
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar

OUT, OPTIONS = "out", "options"


def packed(config: Config, out: Path) -> dict[str, Any]:
    """Config -> the content of a file for `flwr run --run-config`."""
    tables = nested(config)
    options = {name: keys.pop(OPTIONS) for name, keys in tables.items() if OPTIONS in keys}
    return {OUT: str(out), OPTIONS: json.dumps(options) if options else "", **tables}


def unpacked(run_config: Mapping[str, Scalar], engine: str) -> Config:
    """The run config as Flower hands it over -> Config, with the engine that in truth runs it."""
    flat = {key: value for key, value in run_config.items() if key not in (OUT, OPTIONS)}
    flat |= _options(str(run_config.get(OPTIONS, "")))
    return unflatten({**flat, "engine.name": engine})


def require_noise(config: Config, folder: Path) -> None:
    """Reject a private run without noise that begins in `folder`: in Flower's run config every key
    is set, so that noise = 0 is nobody's choice."""
    if noiseless(config) and not (folder / "config.toml").exists():
        raise InputError(
            f"{infinite(config)}; under Flower noise = 0 counts as not set, because the run config "
            "has every key"
        )


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
        return {
            f"{table}.{OPTIONS}.{name}": value
            for table, options in found.items()
            for name, value in options.items()
        }
    except (ValueError, AttributeError, RecursionError):
        raise InputError(
            f"options = {text!r:.200} is no JSON of tables: write "
            '\'{"local": {"name": 1}}\', or leave it empty'
        ) from None
