"""A suite by its name, or by the path of its TOML file; `kind` says what its cells are."""

from fedmuon.errors import InputError
from fedmuon.experiments.studies import known, part
from fedmuon.experiments.studies.study import Study
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Asked, Tables
from fedmuon.experiments.suites.suite import Work

OF_RUNS = ("stability", "training")


def find(name: str, data: str | None, scale: str, changes: Tables) -> Work:
    """The suite that the command line asks for; without data, on the suite's own default."""
    content = contents.read(name)
    kind, own = content.pop("kind", "stability"), content.pop("data", None)
    if not isinstance(kind, str) or not isinstance(own, str | None):
        raise InputError(
            f"{name} is no suite, in which kind and data are names: give a config to `fedmuon run`"
        )
    if kind not in known():
        others = [one for one in known() if one not in OF_RUNS]
        raise InputError(
            f"kind = {kind!r} is no kind of suite: choose one of {', '.join([*OF_RUNS, *others])}"
        )
    cells = part(kind, "cells")
    if kind in OF_RUNS:
        chosen = data or own or contents.DATA
        return cells.work(contents.at(content, chosen, scale), Asked(name, chosen, scale, changes))
    if data and not own:
        raise InputError(f"the suite {name} has no data: leave --data out")
    asked = Asked(name, data or own or "", scale, changes)
    return Study.of(kind, cells, contents.at(content, asked.data, scale), asked)
