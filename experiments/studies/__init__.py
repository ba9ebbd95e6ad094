"""What a suite can compute: a folder each, which a suite's `kind` names, with - for _.

`cells` has the work, `findings` what it comes to, `figure` the pictures, `suite.toml` the published
one if there is one. `stability` and `training` are suites of runs; the others are numerical
studies (see `study`).
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def known() -> list[str]:
    """The kinds of suites, as suite.json has them."""
    return [found.name.replace("_", "-") for found in iter_modules(__path__) if found.ispkg]


def part(kind: str, name: str) -> Any:
    """The module of that name in the folder of a kind."""
    return import_module(f"{__name__}.{kind.replace('-', '_')}.{name}")
