"""A project that `fedmuon new` wrote: its tests pass, and it runs here, on Flower and deployed."""

import contextlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from flwr.common.config import flatten_dict, validate_config
from safetensors.numpy import load_file

from fedmuon.config.load import flatten, load
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import main
from fedmuon.experiments.cli.project import NODES, new
from fedmuon.experiments.engines.deployment import SETTINGS
from fedmuon.experiments.engines.processes import Processes, free_ports
from fedmuon.server.run_config import unpacked

pytestmark = pytest.mark.timeout(400)
NAME = "demo_app"
TWO = ("federation.clients=2", "federation.per-round=2", "federation.rounds=1",
       "engine.dtype=float64")  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes into an empty folder."""
    folder = tmp_path_factory.mktemp("empty")
    fedmuon_here(folder, "new", NAME)
    return folder / NAME


def fedmuon_here(folder: Path, *arguments: str) -> None:
    """The command, given in a folder; it ends well."""
    with contextlib.chdir(folder), pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


def fedmuon(folder: Path, *arguments: str) -> str:
    """The output of a command that runs in its own process and in this folder. It must succeed."""
    command = [sys.executable, "-P", "-m", "fedmuon", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def inline(project: Path, out: str, changes: Sequence[str]) -> Path:
    """A run of two clients in this process, in double precision."""
    words = [word for change in changes for word in ("--set", change)]
    fedmuon_here(project, "run", "config.toml", *words, "--out", out)
    return project / out


def distance(one: Path, other: Path) -> float:
    """The largest difference of two runs' weights."""
    found = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert found[0].keys() == found[1].keys()
    return max(float(np.abs(found[0][name] - found[1][name]).max()) for name in found[0])


@pytest.mark.slow
def test_its_own_tests_pass(project: Path) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert ended.returncode == 0 and "3 passed" in ended.stdout, ended.stdout


@pytest.mark.slow
def test_it_learns_by_the_command_of_its_page(project: Path) -> None:
    assert "fedmuon run config.toml --out runs/first" in (project / "README.md").read_text()
    assert "runs/first" in fedmuon(project, "run", "config.toml", "--out", "runs/first")
    summary = json.loads((project / "runs/first/summary.json").read_text())
    assert summary["rounds"] == 10 and summary["accuracy"] > 0.5  # a guess has 0.1
    assert "64 x 64 " in (project / "runs/first/routes.txt").read_text()


def test_it_is_a_flower_app(project: Path) -> None:
    """Whose run config is config.toml, of as many clients as Flower simulates."""
    app = tomllib.loads((project / "pyproject.toml").read_text())
    sound, errors, warnings = validate_config(app, True, project)
    assert sound and not errors and not warnings
    held = flatten_dict(app["tool"]["flwr"]["app"]["config"])
    of_file = load(project / "config.toml", TWO[:2])
    assert unpacked(held, "inline") == of_file
    assert held.keys() == {"out", "options", *flatten(of_file)}
    assert of_file.federation.clients == NODES


@pytest.mark.slow  # test_deployment.py runs this repository's own app by that command
@pytest.mark.skipif(os.name != "posix", reason="gives the command in a shell")
def test_flwr_run_in_the_project(project: Path) -> None:
    """As it is typed there, on a SuperLink that Flower starts at a port of its own and that is
    ended here. A busy machine may miss the 15 seconds that Flower gives it to start, or its
    heartbeats: then the run fails, and `flwr run` exits with 0 all the same."""
    names = ("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT")
    ports = {name: str(port) for name, port in zip(names, free_ports(2), strict=True)}
    processes = Processes({**SETTINGS, **ports, "RAY_ADDRESS": "local"})
    changes = "federation.rounds=1 engine.dtype='float64'"
    typed = f'cd "{project}" && flwr run . --stream --run-config "{changes}"'
    written: list[Path] = []
    try:
        for _ in range(3):
            processes.start("run", ["/bin/sh", "-c", typed]).wait(150)
            written = list((project / "runs").glob("[0-9]*/summary.json"))
            if written:
                break
        said = processes.log("run")
    finally:
        processes.stop()
    assert written, said
    summary = written[0]
    assert str(summary.parent) in said
    assert json.loads(summary.read_text())["engine"] == "ray"
    assert distance(summary.parent, inline(project, "runs/beside-flwr", TWO)) <= 1e-12


@pytest.mark.slow
def test_a_deployment_of_ones_own(project: Path) -> None:
    """With a file's object and options, which the processes must find in folders of their own."""
    changes = [*TWO, f"local.recipe=./{NAME}/recipe.py:mine"]
    words = [word for change in changes for word in ("--set", change)]
    words += ["--engine", "deployment", "--out", "runs/deployed"]
    fedmuon(project, "run", "config.toml", *words)
    config = load(project / "runs/deployed/config.toml")
    assert config.local.recipe == f"{(project / NAME / 'recipe.py').resolve()}:mine"
    assert dict(config.local.options) == {"bound": 1.0} and config.engine.name == "deployment"
    assert (
        distance(project / "runs/deployed", inline(project, "runs/beside-deployed", changes))
        <= 1e-12
    )


@pytest.mark.parametrize(("name", "said"), [
    ("my-project", "try my_project"),
    ("3rd", "try rd"),
    ("Demo App", "try demo_app"),
    ("class", "choose another"),
    ("été", "is not a valid package name"),
    ("_hidden", "try hidden"),
    ("numpy", "installed Python package"),
    ("json", "installed Python package"),
    ("tests", "folder inside every project"),
    ("a" * 33, "at most 32"),
])  # fmt: skip
def test_a_name_that_is_none_is_one_sentence(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refusal:
        new(tmp_path / name)
    assert "\n" not in str(refusal.value) and not (tmp_path / name).exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        with pytest.raises(InputError, match=r"is not an empty folder\. Choose a new or empty"):
            new(tmp_path / name)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["precious.txt"]


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    new(tmp_path / "mine")
    assert (tmp_path / "mine" / "mine" / "model.py").exists()
