"""A suite by its name, or by the path of its TOML file; `kind` says what its cells are."""

from typing import Any

from fedmuon.core.errors import InputError, instead
from fedmuon.experiments.studies import known, part
from fedmuon.experiments.studies.study import Study
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Asked, Tables
from fedmuon.experiments.suites.suite import Work

OF_RUNS = ("stability", "training")


def find(
    name: str,
    data: str | None,
    scale: str,
    changes: Tables,
    seed: int | None = None,
    seeds: int | None = None,
) -> Work:
    """The suite that the command line asks for; without data, or seeds, on the suite's own."""
    content = contents.read(name)
    kind, own = content.pop("kind", "stability"), content.pop("data", None)
    if not isinstance(kind, str) or not isinstance(own, str | None):
        raise InputError(
            f"{name} is no suite, in which kind and data are names: give a config to `fedmuon run`"
        )
    if kind not in known():
        every = sorted(known(), key=lambda one: one not in OF_RUNS)
        mend = instead(kind, every, "choose one of")
        raise InputError(f"kind = {kind!r} is no kind of suite: {mend}")
    of_runs, cells = kind in OF_RUNS, part(kind, "cells")
    if data and not own and not of_runs:
        raise InputError(f"the suite {name} has no data: leave --data out")
    named = data or own or (contents.DATA if of_runs else "")
    content = contents.at(content, named, scale)
    if seed is not None or seeds is not None:
        content["seeds"] = _seeds(name, content.get("seeds"), seed, seeds)
    told = {"told": contents.told(name), "seeds": content.get("seeds")}
    asked = Asked(name, named, scale, changes, seed, seeds, told)
    return cells.work(content, asked) if of_runs else Study.of(kind, cells, content, asked)


def _seeds(name: str, own: Any, seed: int | None, count: int | None) -> list[int] | int:
    """The one, or so many of them, in place of a suite's own, in the form that those have."""
    option = "--seed" if count is None else "--seeds"
    if own is None:
        raise InputError(f"the suite {name} has no seeds: leave {option} out")
    if count is None:
        if isinstance(own, int):
            raise InputError(f"the suite {name} counts its seeds: leave --seed out")
        return [int(seed or 0)]
    if seed is not None:
        raise InputError("--seed is one, --seeds are many: leave one of them out")
    return count if isinstance(own, int) else [*range(count)]
