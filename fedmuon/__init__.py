"""fedmuon: orthogonalized-momentum (Muon) optimization in federated and private learning.

    import fedmuon

    result = fedmuon.run({"federation": {"rounds": 10}}, data=(inputs, labels), task=module)
    result.plot()

Names are loaded when they are first used.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# One name for users: in a source tree and in Flower's bundle the other rooms lie beside this
# folder; installed, they lie in it.
if not (Path(__file__).parent / "clients").exists():
    __path__.append(str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from fedmuon import (
        aggregators,
        callbacks,
        links,
        optim,
        orthogonalize,
        orthogonalizers,
        recipes,
        schedules,
    )
    from fedmuon.aggregators import Aggregator
    from fedmuon.config import Config
    from fedmuon.errors import InputError
    from fedmuon.library import bound, compare, plan, run, stability, unlearn
    from fedmuon.orthogonalizers import Orthogonalizer
    from fedmuon.results import Comparison, Result, StabilityResult
    from fedmuon.tasks.own import Task
    from fedmuon.transforms.base import Chain, Context, Link
    from fedmuon.transforms.recipes import Recipe

    __version__: str

_PLACES = {
    "Aggregator": "aggregators",
    "Chain": "transforms.base",
    "Comparison": "results",
    "Config": "config",
    "Context": "transforms.base",
    "InputError": "errors",
    "Link": "transforms.base",
    "Orthogonalizer": "orthogonalizers",
    "Recipe": "transforms.recipes",
    "Result": "results",
    "StabilityResult": "results",
    "Task": "tasks.own",
    "bound": "library",
    "compare": "library",
    "plan": "library",
    "run": "library",
    "stability": "library",
    "unlearn": "library",
}
_MODULES = ("aggregators", "callbacks", "links", "optim", "orthogonalize", "orthogonalizers",
            "recipes", "schedules")  # fmt: skip

__all__ = ["Aggregator", "Chain", "Comparison", "Config", "Context", "InputError", "Link",
           "Orthogonalizer", "Recipe", "Result", "StabilityResult", "Task", "__version__",
           "aggregators", "bound", "callbacks", "compare", "links", "optim", "orthogonalize",
           "orthogonalizers", "plan", "recipes", "run", "schedules", "stability",
           "unlearn"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The public object of that name, kept for the next time."""
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("fedmuon")
    elif name in _MODULES:
        found = import_module(f"fedmuon.{name}")
    elif name in _PLACES:
        found = getattr(import_module(f"fedmuon.{_PLACES[name]}"), name)
    else:
        raise AttributeError(f"module 'fedmuon' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
