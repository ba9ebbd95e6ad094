"""Packages that register methods: written into a folder as an installer would leave them."""

from collections.abc import Mapping
from pathlib import Path

NAME = "fedavg-decay"
ROW = f'''
from fedmuon import Method

METHOD = Method(
    "{NAME}",
    "FedAvg whose server step decays",
    make="decaying.rule:fedavg_decay",
    keys=("lr", "weight-decay", "server-lr"),
    options={{"decay": ("0.5", "exponent of the decay")}},
    cites=("fedavg", "@misc{{decaying, title = {{Decay}}, author = {{A}}, year = {{2026}}}}"),
    by_samples="the update of FedAvg",
)


def method():
    return METHOD
'''
RULE = """
from fedmuon import Chain, Recipe
from fedmuon.links import descend, gradient


def fedavg_decay(lr=1.0, server_lr=0.0, weight_decay=0.0, decay=0.5):
    def server(old, mean, states):
        count = {name: value + 1 for name, value in states["rounds"].items()}
        step = {name: (server_lr or 1.0) / value**decay for name, value in count.items()}
        model = {name: old[name] + step[name] * (mean[name] - old[name]) for name in old}
        return model, {**states, "rounds": count}

    return Recipe(Chain((gradient(), descend(lr, {}, weight_decay))), server, kept=("rounds",))
"""
STAGE = """
from fedmuon import Stage


class Halved(Stage):
    def reply(self, reply, received, memory):
        model = {name: (received.params[name] + value) / 2 for name, value in reply.params.items()}
        return reply.with_trees({**reply.trees, "model": model})
"""


def install(
    folder: Path,
    entries: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    package: str = "fedmuon-decay",
) -> None:
    """Write a package with these entry points, name -> value, and modules, file -> text."""
    for file, text in (modules or {}).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    metadata = folder / f"{package.replace('-', '_')}-1.5.dist-info"
    metadata.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n"
    (metadata / "METADATA").write_text(head, encoding="utf-8")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    text = "\n".join(["[fedmuon.methods]", *lines, ""])
    (metadata / "entry_points.txt").write_text(text, encoding="utf-8")


MODULES = {
    "decaying/__init__.py": "",
    "decaying/row.py": ROW,
    "decaying/rule.py": RULE,
    "decaying/stages.py": STAGE,
}
