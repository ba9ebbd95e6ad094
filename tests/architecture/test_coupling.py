"""A round stays small: which files rounds.py loads, and how many cases it distinguishes.

Each limit is what the code needs today. Lower it in the commit that makes a lower one possible.
"""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from . import coupling
from .coupling import CHAIN, ROUNDS

ROOT = Path(__file__).resolve().parents[2]
CONDITIONS = 15
FILES = {ROUNDS: 15, CHAIN: 5}
# Folders and modules of optional features, which a round must not need.
BARRED = {"config", "privacy", "compression", "low_rank", "client_privacy", "clock"}


def barred(files: Iterable[str]) -> set[str]:
    return {file for file in files if BARRED & {*Path(file).with_suffix("").parts}}


def test_rounds_load_no_optional_feature() -> None:
    assert barred(coupling.closure(ROOT, ROUNDS)) == set()


@pytest.mark.parametrize("file", FILES)
def test_the_kernel_loads_few_files(file: str) -> None:
    assert len(coupling.closure(ROOT, file)) <= FILES[file]


def test_rounds_distinguish_few_cases() -> None:
    assert coupling.conditions(coupling.parse(ROOT, ROUNDS)) <= CONDITIONS


# The counts are right: code whose counts are known


def write(root: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


IMPORTS = """
from typing import TYPE_CHECKING
import torch
import fedmuon.core.errors
from fedmuon.clients import training
from fedmuon.optim import chain, stage

try:
    from fedmuon.tasks.base import Task
except ImportError:
    from fedmuon.tasks.matrix import Task
if TYPE_CHECKING:
    from fedmuon.federated.clock import Timetable
else:
    from fedmuon.federated.plan import Plan

def timetable():
    from fedmuon.federated import clock
"""
TREE = {
    ROUNDS: IMPORTS,
    "fedmuon/__init__.py": "version = 1",
    "fedmuon/clients/ignored.py": "version = 1",
    "fedmuon/federated/clock.py": "from fedmuon.config import load",
    "fedmuon/config/load.py": "version = 1",
    "fedmuon/optim/stage.py": "",
    "fedmuon/core/__init__.py": "",
}
LOADED = {
    "fedmuon/core/errors.py": "version = 1",
    "clients/training.py": "version = 1",
    "fedmuon/optim/__init__.py": '"""Optimizers."""',
    "fedmuon/optim/chain.py": "from fedmuon.federated.rounds import timetable",
    "fedmuon/tasks/base.py": "version = 1",
    "fedmuon/tasks/matrix.py": "version = 1",
    "fedmuon/federated/plan.py": "version = 1",
}


def test_a_closure_follows_imports_of_modules(tmp_path: Path) -> None:
    """Not those in functions or for types, and no empty files."""
    write(tmp_path, TREE | LOADED)
    assert coupling.closure(tmp_path, ROUNDS) == sorted([ROUNDS, *LOADED])


def test_a_barred_file_is_seen(tmp_path: Path) -> None:
    assert barred([*TREE]) == {"fedmuon/federated/clock.py", "fedmuon/config/load.py"}
    write(tmp_path, TREE | LOADED | {"clients/training.py": "import fedmuon.federated.clock"})
    assert barred(coupling.closure(tmp_path, ROUNDS)) == barred([*TREE])


CODE = '''"""A module
in two lines."""

# A comment.
def update(replies, found=None):
    """Return something."""
    if replies:  # the first of five conditions, in the second line of code
        total = 1 if found else 2

    elif found:
        total = 3
    text = """Text
    # of two lines."""
    for _one, (reply, held) in replies:
        print(text)
    return [reply for reply in replies if reply if total]
'''


def test_conditions_lines_and_names_are_counted() -> None:
    parsed = ast.parse(CODE)
    assert coupling.conditions(parsed) == 5
    assert coupling.code_lines(CODE) == 10
    names = "replies found total total text _one reply held reply"
    assert sorted(coupling.bound_names(parsed)) == sorted(names.split())
    assert coupling.house_words([parsed]) == 33.3


@pytest.mark.parametrize(("code", "features"), [
    ("plan.timetable.oldest()", "clock"),
    ("from fedmuon.optim.low_rank import factors", "compression"),
    ("import fedmuon.optim.compression", "compression"),
    ("Recipe(persistent=())", "client states"),
    ("class PersonalParameters: pass", "personal"),
    ("def audit(client_level): pass", "client privacy"),
    ("from fedmuon.federated import clock as PERSONAL", "clock, personal"),
    ("import codecs; text = 'compression'; np.ma.is_masked(timetables)", ""),
])  # fmt: skip
def test_a_feature_is_seen_in_identifiers(code: str, features: str) -> None:
    parsed = ast.parse(code)
    named = [name for name in coupling.FEATURES if coupling.names_feature(parsed, name)]
    assert ", ".join(named) == features


def test_fields_of_a_dataclass_are_counted() -> None:
    recipe = "class Recipe:\n    chain: Chain\n    sent: tuple = ()\n    limit = 3\n"
    parsed = ast.parse(f"{recipe}class Chain:\n    links: tuple")
    assert coupling.fields(parsed, "Recipe") == ["chain", "sent"]
