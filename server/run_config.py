"""Conversion between an experiment's config and the run config of Flower.

Flower rejects keys that are not in the app's pyproject.toml. The names of the user's options are
not known in advance, so one key, `options`, can contain all of them as JSON.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmuon.config.incompatible import has_no_noise, noise_advice
from fedmuon.config.load import Config, nested, unflatten
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar

OUT, OPTIONS = "out", "options"


def packed(config: Config, out: Path) -> dict[str, Any]:
    """Convert a config to the content of a file for `flwr run --run-config`."""
    tables = nested(config)
    options = {name: keys.pop(OPTIONS) for name, keys in tables.items() if OPTIONS in keys}
    return {OUT: str(out), OPTIONS: json.dumps(options) if options else "", **tables}


def unpacked(run_config: Mapping[str, Scalar], engine: str) -> Config:
    """Convert Flower's run config to a config."""
    flat: dict[str, Any] = {
        key: value for key, value in run_config.items() if key not in (OUT, OPTIONS)
    }
    text = str(run_config.get(OPTIONS, ""))
    try:
        for table, options in json.loads(text or "{}").items():
            flat |= {f"{table}.{OPTIONS}.{name}": value for name, value in options.items()}
    except (ValueError, AttributeError, RecursionError):
        raise InputError(
            f'options = {text!r:.200} is not a JSON object of tables. Write \'{{"local": '
            '{"name": 1}}\', for example, or leave options empty.'
        ) from None
    return unflatten({**flat, "engine.name": engine})


def require_noise(config: Config, folder: Path) -> None:
    """Raise an error if a new private run has no noise.

    Flower's run config sets every key, so noise = 0 may be a default that the user did not choose.
    """
    if has_no_noise(config) and not (folder / "config.toml").exists():
        raise InputError(
            f"{noise_advice(config)} Runs with `flwr run` reject noise = 0, because 0 is also the "
            "default. For tests without privacy, use `fedmuon run`."
        )
