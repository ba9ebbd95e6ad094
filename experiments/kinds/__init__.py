"""The kinds of suites: a TOML file's `kind` is one of these, or the name of a study."""

from importlib import import_module
from typing import Any, Protocol, cast

from experiments import contents
from experiments.contents import Asked, Tables
from experiments.studies import Study, load
from experiments.suite import Work
from fedmuon.errors import InputError

KINDS = ("stability", "training")  # each a module of this package


class Kind(Protocol):
    """What a kind's module has; `contents.read` made `content`."""

    def work(self, content: dict[str, Any], asked: Asked) -> Work:
        """The suite as cells."""
        ...


def find(name: str, data: str | None, scale: str, changes: Tables) -> Work:
    """The suite that the command line asks for; without data, on the suite's own default."""
    content = contents.read(name)
    kind, own = content.pop("kind", "stability"), content.pop("data", None)
    if not isinstance(kind, str) or not isinstance(own, str | None):
        raise InputError(
            f"{name} is no suite, in which kind and data are names: give a config to `fedmuon run`"
        )
    if kind in KINDS:
        chosen = data or own or contents.DATA
        maker = cast(Kind, import_module(f"experiments.kinds.{kind}"))
        return maker.work(contents.at(content, chosen, scale), Asked(name, chosen, scale, changes))
    study = load(kind, KINDS)
    if data and not own:
        raise InputError(f"the suite {name} has no data: leave --data out")
    asked = Asked(name, data or own or "", scale, changes)
    return Study.of(kind, study, contents.at(content, asked.data, scale), asked)
