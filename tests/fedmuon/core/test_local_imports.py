"""A file of the user's has its own neighbours, as they are now."""

from pathlib import Path
from typing import Any

import pytest

from fedmuon.core.registry import absolute_name, import_object, local_imports, stamp

EAGER = "from helper import SCALE\n\n\ndef said():\n    return SCALE\n"
LATE = "def said():\n    from helper import SCALE\n\n    return SCALE\n"
DEEP = "from pack.inner import SCALE\n\n\ndef said():\n    return SCALE\n"


def folder(place: Path, text: str, scale: float) -> str:
    """A folder with a file and its neighbours; the name of the file's object."""
    (place / "pack").mkdir(parents=True, exist_ok=True)
    (place / "mine.py").write_text(text)
    (place / "helper.py").write_text(f"SCALE = {scale}\n")
    (place / "pack/__init__.py").write_text("")
    (place / "pack/inner.py").write_text("from .more import SCALE\n")
    (place / "pack/more.py").write_text(f"SCALE = {scale}\n")
    return absolute_name(f"{place / 'mine.py'}:said")


def said(name: str) -> Any:
    return import_object(name, "key")()


@pytest.mark.parametrize("text", [EAGER, LATE, DEEP])
def test_two_folders_have_modules_of_one_name(text: str, tmp_path: Path) -> None:
    one, other = (folder(tmp_path / name, text, x) for name, x in (("one", 0.1), ("other", 0.7)))
    first = import_object(one, "key")
    assert (said(one), said(other), said(one), first()) == (0.1, 0.7, 0.1, 0.1)


@pytest.mark.parametrize("text", [EAGER, LATE, DEEP])
def test_a_neighbour_that_was_edited_is_read_again(text: str, tmp_path: Path) -> None:
    """By an edit of the same length, within the same second."""
    name = folder(tmp_path, text, 0.1)
    assert said(name) == 0.1
    before = stamp(tmp_path / "mine.py")
    folder(tmp_path, text, 0.7)
    assert stamp(tmp_path / "mine.py") != before and said(name) == 0.7


def test_an_edit_of_the_same_length_is_seen(tmp_path: Path) -> None:
    name = folder(tmp_path, "said = lambda: 1\n", 0.1)
    assert said(name) == 1
    (tmp_path / "mine.py").write_text("said = lambda: 2\n")
    assert said(name) == 2


def test_the_caller_s_module_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    theirs = types.ModuleType("helper")
    monkeypatch.setitem(sys.modules, "helper", theirs)
    assert said(folder(tmp_path, EAGER, 0.3)) == 0.3
    assert sys.modules["helper"] is theirs


def test_libraries_are_nobody_s_neighbours(tmp_path: Path) -> None:
    folder(tmp_path, "import torch, json, helper\n", 0.1)
    for name in ("torch", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit\n")
    assert list(local_imports(tmp_path / "mine.py")) == ["helper"]
