"""Flower's run config with options of the user's, and files that other folders find."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from conftest import small
from flwr.common.config import flatten_dict, fuse_dicts

from fedmuon.config.load import Config, absolute_paths, flatten, load, nested
from fedmuon.core.errors import InputError
from fedmuon.core.registry import import_object
from fedmuon.experiments.engines.processes import importable
from fedmuon.federated.build import resolve
from fedmuon.server.run_config import packed, unpacked

RECIPE = """
from fedmuon import links
def mine(lr, bound=1.0, whole=1, word="a", switch=True):
    return [links.gradient(), links.descend(lr * bound)]
"""
ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {"bound": 0.5, "whole": 2, "word": 'it\'s "b" = c', "switch": False}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config that names a recipe in a file beside it, read in another folder."""
    (tmp_path / "mine.py").write_text(RECIPE)
    tables = nested(small())
    tables["local"] |= {"recipe": "./mine.py:mine", "options": OPTIONS}
    tables["orthogonalizer"] = {}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(tables))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    resolved = resolve(load(Path("config.toml")))
    monkeypatch.chdir("elsewhere")
    return resolved


def by_flower(file: str) -> dict:
    """What the ServerApp is handed of a file for --run-config."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return fuse_dicts(flatten_dict(table), flatten_dict(tomllib.loads(file)))


def test_options_pass_flower(own: Config, tmp_path: Path) -> None:
    run_config = by_flower(tomli_w.dumps(packed(own, tmp_path / "out")))
    assert run_config["out"] == str(tmp_path / "out")
    assert unpacked(run_config, "inline") == own
    assert unpacked(run_config, "ray").engine.name == "ray"
    assert dict(unpacked(run_config, "ray").local.options) == OPTIONS


def test_options_by_themselves_do_not(own: Config) -> None:
    """The control: without the one key for all, Flower refuses them."""
    with pytest.raises(ValueError, match="not present"):
        by_flower(tomli_w.dumps(nested(own)))


def test_options_of_an_app_of_ones_own_stand_in_its_config(own: Config) -> None:
    assert unpacked(flatten(own), "inline") == own


@pytest.mark.parametrize("text", ["{", "[1]", '{"local": 3}', "3", "[" * 100_000])
def test_options_that_are_none_are_one_sentence(text: str) -> None:
    with pytest.raises(InputError, match="is no JSON of tables") as refusal:
        unpacked({"options": text}, "ray")
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_a_file_is_found_from_another_folder(own: Config, tmp_path: Path) -> None:
    assert own.local.recipe == f"{tmp_path.resolve() / 'mine.py'}:mine"
    assert import_object(own.local.recipe, "[local] recipe").__name__ == "mine"
    assert resolve(own) == own


def test_what_is_ours_or_a_modules_stays(tmp_path: Path) -> None:
    plain = small()
    assert resolve(plain).local == plain.local
    named = load(None, ["task.name=torch.nn:Linear"])
    assert absolute_paths(named) == named


def test_paths_become_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = absolute_paths(load(None, ["data.name=csv", "data.folder=table.csv"]))
    assert found.data.folder == str(tmp_path.resolve() / "table.csv")


def test_another_process_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of this folder is found, and does not stand before an installed one."""
    for name in ("mypackage", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("ours = True\n")
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PYTHONPATH": importable()}
    code = "import mypackage, numpy; assert not hasattr(numpy, 'ours'); numpy.zeros(1)"
    command = [sys.executable, "-P", "-c", code]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path.parent)
