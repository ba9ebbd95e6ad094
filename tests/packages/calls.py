"""A script of a user's: every call and every namespace of fedmuon; prints where that lies."""

import sys
from importlib import import_module
from typing import Any

import torch

import fedmuon

SMALL = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
         "federation": {"clients": 3, "per-round": 2, "rounds": 2},
         "local": {"lr": 0.01, "steps": 1}, "orthogonalizer": {"lambda": 0.1}}  # fmt: skip
NEED = {"Link", "Chain", "Context", "Params", "Recipe", "Orthogonalizer", "Aggregator"}
MAP = fedmuon.links.orthogonalize(torch.sign)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "adamw": (), "align": (0.5,), "descend": (0.1,), "gradient": (), "momentum": (0.9,),
    "normalize": (), "only": (lambda name: True, fedmuon.links.descend(0.1)),
    "orthogonalize": (torch.sign,), "stateless": ("mine", lambda direction, context: direction),
    "block_periodic": (MAP, fedmuon.links.orthogonalize(torch.sign, shards=2), 5),
    "normalize_rows": (MAP, 0.95),
    "zeros": ({"weight": torch.ones(1, 2, 2)},),
}  # fmt: skip
KEYWORDS = {"scaffold": {"clients": 3}, "fedmuon_corrected": {"clients": 3}}


def called() -> list[str]:
    """The names of all factories, each called once."""
    found = []
    for package in (fedmuon.links, fedmuon.recipes, fedmuon.orthogonalizers):
        for name in set(package.__all__) - NEED - {"as_recipe"}:
            getattr(package, name)(*ARGUMENTS.get(name, ()), **KEYWORDS.get(name, {}))
            found.append(name)
    for makers in (fedmuon.aggregators.AGGREGATORS, fedmuon.schedules.SCHEDULES):
        found += list(makers)
    for name in ("mean", "by_samples", "median", "trimmed_mean", "krum"):
        getattr(fedmuon.aggregators, name)()
    fedmuon.callbacks.early_stopping()
    fedmuon.orthogonalize.smoothed_polar(torch.eye(3), lam=0.1)
    fedmuon.optim.Muon([torch.nn.Parameter(torch.eye(3))])
    return found


def main() -> None:
    """Call everything; what comes of it is looked at by the tests of the packages."""
    assert all(getattr(fedmuon, name) is not None for name in fedmuon.__all__)
    assert len(called()) > 25
    first = fedmuon.run(SMALL)
    second = fedmuon.run({**SMALL, "engine": {"name": sys.argv[1]}}, out="runs/second")
    assert str(fedmuon.compare([first, second])) and first.plot() and second.to_pandas() is not None
    beside = fedmuon.stability(SMALL, trials=2)
    assert len(beside.neighbours) == 2 and beside.plot() and fedmuon.bound(beside)["status"]
    assert fedmuon.bound(config={"local": {"steps": 1}}, size=1000)["status"]
    others = ("clients", "server", "analysis", "experiments")
    lie = {import_module(f"fedmuon.{name}").__file__ for name in others}
    assert not set(others) & set(sys.modules)
    print(fedmuon.__file__, *lie)


if __name__ == "__main__":
    main()
