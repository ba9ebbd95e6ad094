"""The notebooks of `examples/`: stripped, short, and true, as their cells run."""

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fedmuon.experiments.cli import main

BOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
FILES = sorted(BOOKS.glob("*.ipynb"))
Names = dict[str, Any]


def cells(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8"))["cells"]


def executed(file: Path) -> tuple[Names, list[Any]]:
    """Its code in order, in one namespace: the names that it leaves, and what cells show."""
    names: Names = {"__name__": "__main__"}
    shown = []
    for cell in cells(file):
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"]), f"{file.name}:{cell['id']}").body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), file.name, "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), file.name, "eval"), names))
    return names, [one for one in shown if one is not None]


def pictures(shown: list[Any]) -> int:
    """How many of them a notebook shows as pictures, each of which can be drawn."""
    found = 0
    for one in shown:
        if hasattr(one, "savefig"):
            with tempfile.TemporaryFile() as file:
                one.savefig(file)
            found += 1
        elif hasattr(one, "_repr_html_"):
            assert "<table>" in one._repr_html_()
    return found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and no window to draw in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernels have it


def test_notebooks_are_stripped_and_short() -> None:
    assert len(FILES) == 3
    for file in FILES:
        first, *rest = cells(file)
        assert first["cell_type"] == "markdown" and first["source"][0].startswith("# ")
        code = [one for one in rest if one["cell_type"] == "code"]
        assert all(one["outputs"] == [] and one["execution_count"] is None for one in code)
        lines = [line for one in code for line in one["source"]]
        assert len(lines) < 60 and max(map(len, lines)) <= 101  # with the line's end
        used = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
        assert used <= {"fedmuon", "matplotlib.pyplot", *sys.stdlib_module_names}


def test_a_first_run_and_its_certificate(capsys: pytest.CaptureFixture) -> None:
    names, shown = executed(FILES[0])
    assert pictures(shown) == 2 and "model.safetensors" in shown[2]
    bound = names["bound"]
    assert bound["status"] == "certified" and 0.5 < names["nearest"] <= 1 and bound["share"] < 0.2
    assert names["result"].summary["accuracy"] > names["beside"].summary["accuracy"] > 0.3
    said = capsys.readouterr().out
    assert "status: certified" in said and said.count("\n- ") == len(bound["assumptions"])


@pytest.mark.slow
def test_neighbours_and_the_census_by_derivatives(capsys: pytest.CaptureFixture) -> None:
    names, shown = executed(FILES[1])
    assert pictures(shown) == 1 and pictures([names["figure"]]) == 1
    assert len(names["census"].neighbours) == 200 < 100_000 < names["ranked"]["pairs"]
    most = names["most"]
    assert most(names["census"]) < most(names["worst"]) and 0.5 < names["share"] <= 1
    assert all(abs(1 - one["predicted"] / one["perturbation"]) < 0.01 for one in names["pairs"])
    assert "census: 200 neighbours" in capsys.readouterr().out


def test_a_private_run_its_ledger_and_an_audit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    apart = subprocess.run

    def here(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        """Our commands in this process, which has loaded what they need."""
        if command[:3] != [sys.executable, "-m", "fedmuon"]:
            return apart(command, **given)
        before = capsys.readouterr().out
        with pytest.raises(SystemExit) as end:
            main(command[3:])
        said = capsys.readouterr().out
        print(before, end="")
        return subprocess.CompletedProcess(command, int(end.value.code or 0), said)

    monkeypatch.setattr(subprocess, "run", here)
    names, shown = executed(FILES[2])
    assert pictures(shown) == 1 and len(names["lines"]) == 10
    private, audit = names["private"], names["audit"]
    assert private["certified"] and 7.9 < private["epsilon"] <= 8
    assert max(shown[-1].values()) == round(private["epsilon"], 3)
    assert 0 <= audit["epsilon_at_least"] < audit["epsilon"] == private["epsilon"]
    assert "round 0: 2 steps" in capsys.readouterr().out


def test_a_cell_that_fails_is_seen(tmp_path: Path) -> None:
    broken = cells(FILES[0])[:2]
    broken[1]["source"] = ["1 / 0"]
    (file := tmp_path / "broken.ipynb").write_text(json.dumps({"cells": broken}))
    with pytest.raises(ZeroDivisionError):
        executed(file)
