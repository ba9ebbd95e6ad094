"""fedmuon: orthogonalized-momentum (Muon) optimization in federated and private learning.

    import fedmuon

    result = fedmuon.run({"federation": {"rounds": 10}}, data=(inputs, labels), task=module)
    result.plot()

A public name is imported only when your program uses this name for the first time.
"""

# Lets Ctrl-C end the command `fedmuon` with one sentence, also during the imports below.
from fedmuon.core import interrupts as _interrupts  # noqa: F401

# isort: split
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Users import every package as `fedmuon.<name>`. In an installed copy, the packages are inside this
# folder. In a source tree and in a Flower app bundle, they are in its parent folder.
if not (Path(__file__).parent / "clients").exists():
    __path__.append(str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from fedmuon import analysis, optim, orthogonalize
    from fedmuon.config.load import Config
    from fedmuon.config.method import Method
    from fedmuon.config.typed import Tables
    from fedmuon.core.errors import InputError
    from fedmuon.core.trial import in_trial
    from fedmuon.data.corpora import text_data
    from fedmuon.experiments.accounts import (
        AuditResult,
        NoiseResult,
        RunAuditResult,
        audit,
        audit_run,
        epsilon,
        sigma,
    )
    from fedmuon.experiments.api import (
        bound,
        certify,
        certify_groups,
        compare,
        gap,
        plan,
        routes,
        run,
        stability,
        suite,
        sweep,
        unlearn,
    )
    from fedmuon.experiments.certifying.groups import GroupCertificates
    from fedmuon.experiments.certifying.rows import RiskCertificates
    from fedmuon.experiments.engines import flower_simulation as flower
    from fedmuon.experiments.gap_result import GapResult
    from fedmuon.experiments.results import Comparison, Result, StabilityResult, SweepResult
    from fedmuon.experiments.suite_result import SuiteResult
    from fedmuon.optim import aggregators, links, orthogonalizers, recipes, schedules, stages
    from fedmuon.optim.aggregator import Aggregator
    from fedmuon.optim.chain import Chain, Context, Link
    from fedmuon.optim.orthogonalizers import Orthogonalizer
    from fedmuon.optim.recipe import Recipe
    from fedmuon.optim.stage import Stage
    from fedmuon.privacy.accounting.composition import EpsilonResult
    from fedmuon.runs import callbacks
    from fedmuon.tasks.user_task import Task

    __version__: str

_PLACES = {
    "Aggregator": "optim.aggregator",
    "AuditResult": "experiments.accounts",
    "Chain": "optim.chain",
    "Comparison": "experiments.results",
    "Config": "config.load",
    "Context": "optim.chain",
    "EpsilonResult": "privacy.accounting.composition",
    "GapResult": "experiments.gap_result",
    "GroupCertificates": "experiments.certifying.groups",
    "InputError": "core.errors",
    "Link": "optim.chain",
    "Method": "config.method",
    "NoiseResult": "experiments.accounts",
    "Orthogonalizer": "optim.orthogonalizers",
    "Recipe": "optim.recipe",
    "Result": "experiments.results",
    "RiskCertificates": "experiments.certifying.rows",
    "RunAuditResult": "experiments.accounts",
    "StabilityResult": "experiments.results",
    "Stage": "optim.stage",
    "SuiteResult": "experiments.suite_result",
    "SweepResult": "experiments.results",
    "Tables": "config.typed",
    "Task": "tasks.user_task",
    "in_trial": "core.trial",
    "text_data": "data.corpora",
    **dict.fromkeys(("audit", "audit_run", "epsilon", "sigma"), "experiments.accounts"),
    **dict.fromkeys(
        (
            "bound",
            "certify",
            "certify_groups",
            "compare",
            "gap",
            "plan",
            "routes",
            "run",
            "stability",
            "suite",
            "sweep",
            "unlearn",
        ),
        "experiments.api",
    ),
}
_MODULES = {
    "aggregators": "optim.aggregators",
    "analysis": "analysis",
    "callbacks": "runs.callbacks",
    "flower": "experiments.engines.flower_simulation",
    "links": "optim.links",
    "optim": "optim",
    "orthogonalize": "orthogonalize",
    "orthogonalizers": "optim.orthogonalizers",
    "recipes": "optim.recipes",
    "schedules": "optim.schedules",
    "stages": "optim.stages",
}


class _PublicModules(MetaPathFinder, Loader):
    """Import finder that redirects a public module path, such as `fedmuon.links`, to its file.

    `fedmuon.links`, for example, is the module `fedmuon.optim.links`. Public paths therefore stay
    valid when files move.
    """

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        known = package == __name__ and _MODULES.get(name, name) != name
        return spec_from_loader(fullname, self) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found = import_module(f"fedmuon.{_MODULES[spec.name.rpartition('.')[2]]}")
        spec.loader_state = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own import specification. Do not run the module's code again."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


if not any(type(one).__name__ == "_PublicModules" for one in sys.meta_path):  # added only once
    sys.meta_path.append(_PublicModules())

__all__ = [
    "Aggregator",
    "AuditResult",
    "Chain",
    "Comparison",
    "Config",
    "Context",
    "EpsilonResult",
    "GapResult",
    "GroupCertificates",
    "InputError",
    "Link",
    "Method",
    "NoiseResult",
    "Orthogonalizer",
    "Recipe",
    "Result",
    "RiskCertificates",
    "RunAuditResult",
    "StabilityResult",
    "Stage",
    "SuiteResult",
    "SweepResult",
    "Tables",
    "Task",
    "__version__",
    "aggregators",
    "analysis",
    "audit",
    "audit_run",
    "bound",
    "callbacks",
    "certify",
    "certify_groups",
    "compare",
    "epsilon",
    "flower",
    "gap",
    "in_trial",
    "links",
    "optim",
    "orthogonalize",
    "orthogonalizers",
    "plan",
    "recipes",
    "routes",
    "run",
    "schedules",
    "sigma",
    "stability",
    "stages",
    "suite",
    "sweep",
    "text_data",
    "unlearn",
]


def __getattr__(name: str) -> Any:
    """Import the public object with this name and store it, so that the next access is fast."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("fedmuon")
    elif name in _MODULES:
        value = import_module(f"fedmuon.{_MODULES[name]}")
    elif name in _PLACES:
        value = getattr(import_module(f"fedmuon.{_PLACES[name]}"), name)
    else:
        raise AttributeError(f"module 'fedmuon' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
