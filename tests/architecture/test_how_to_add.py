"""The examples of CONTRIBUTING.md, "How to add", run on a copy of the code."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("fedmuon", "clients", "server", "analysis", "experiments", "docs")
FUNCTION = '''
@_recipe
def fedavg_decaying(lr: Number = 1.0, weight_decay: float = 0.0) -> Recipe:
    """FedAvg whose server takes the step 1 / t in round t."""

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        rounds = {name: value + 1 for name, value in states["rounds"].items()}
        after = {name: old[name] + (mean[name] - old[name]) / rounds[name] for name in old}
        return after, {**states, "rounds": rounds}

    chain = Chain((gradient(), descend(lr, {}, weight_decay)))
    return Recipe(chain, rule, kept=("rounds",))
'''
ROW = """    Method(
        "fedavg-decaying",
        "local SGD; the server's step decays as 1 / t",
        make="fedmuon.optim.recipes:fedavg_decaying",
        keys=_PLAIN,
        cites=("fedavg",),
        by_samples="the update of FedAvg",
    ),
"""
USE = """
import contextlib, io, json
import fedmuon
from docs.making.methods import method
from fedmuon.experiments.cli import main

def said(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*words])
    return out.getvalue()

tables = {"data": {"name": "synthetic", "train": 60, "test": 20, "dimension": 5},
          "federation": {"clients": 3, "per-round": 3, "rounds": 3}, "engine": {"dtype": "float64"},
          "local": {"recipe": NAME, "lr": 0.5}}
result = fedmuon.run(tables)
tables["local"]["recipe"] = "fedavg"
plain = fedmuon.run(tables)
print(json.dumps({
    "listed": NAME in said("list", "optimizers"),
    "explained": NAME in said("config", "explain", "local.recipe"),
    "page": method(NAME),
    "first": [result.rounds[0]["client_loss"], plain.rounds[0]["client_loss"]],
    "last": [result.summary["train_loss"], plain.summary["train_loss"]],
    "unread": said("config", "explain", "local.proximal"),
}))
"""


@pytest.mark.slow
def test_a_method_is_one_function_and_one_row(tmp_path: Path) -> None:
    """Two files change; help, lists, pages and runs then have the method."""
    tree = tmp_path / "tree"
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__", "*.png", "results", "papers")
        shutil.copytree(ROOT / room, tree / room, ignore=ignored)
    recipes, methods = tree / "fedmuon/optim/recipes.py", tree / "fedmuon/config/methods.py"
    recipes.write_text(recipes.read_text() + "\n" + FUNCTION)
    before, opening, after = methods.read_text().partition("ROWS = (\n")
    methods.write_text(before + opening + ROW + after)
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", USE.replace("NAME", "'fedavg-decaying'")],
        cwd=tree, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr[-3000:]
    seen = json.loads(shown.stdout.splitlines()[-1])
    assert seen["listed"] and seen["explained"]
    assert "McMahan" in seen["page"] or "fedavg-decaying" in seen["page"]
    assert seen["first"][0] == seen["first"][1]  # in round 1, the step is that of FedAvg
    assert seen["last"][0] != seen["last"][1]


@pytest.mark.parametrize("name", ["A method", "A stage", "An oracle", "An observer"])
def test_an_instruction_has_at_most_eight_lines(name: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, opening, rest = text.partition(f"- **{name}**")
    assert opening
    assert rest.partition("\n- **")[0].count("\n") < 8
