"""An object is known again where it is the same, and told from one that would do other things."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brought import PLAIN, tables
from cut_off import interrupted

import fedmuon
from fedmuon import links
from fedmuon.config.load import parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import main
from fedmuon.runs import fingerprints

SYNTHETIC = {
    "data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
    "federation": {"clients": 3, "per-round": 2, "rounds": 2},
}


@pytest.fixture(autouse=True)
def _here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that name no folder lie among the tests' own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("runs")))


def digest(found: Any, folder: Path) -> str:
    """What a run that begins would write of a map."""
    config = parse({"orthogonalizer": {"name": "given"}}).with_objects(
        UserObjects(orthogonalizer=found)
    )
    return fingerprints.described(config, folder, afresh=True)["orthogonalizer"]


def written(text: str, name: str = "own_map") -> Any:
    """The object of that name in a module of that text."""
    held: dict[str, Any] = {"__name__": "__main__", "np": np, "torch": torch}
    exec(text, held)
    return held[name]


class Slotted:
    __slots__ = ("__hidden", "k")

    def __init__(self, k: float, hidden: float = 0.0) -> None:
        self.k, self.__hidden = k, hidden

    def __call__(self, m: torch.Tensor) -> torch.Tensor:
        return (self.k + self.__hidden) * m


class Listed(list[float]):
    k: float

    def __call__(self, m: torch.Tensor) -> torch.Tensor:
        return self.k * m


class Keyed(dict[str, float]):
    k: float

    def __call__(self, m: torch.Tensor) -> torch.Tensor:
        return self.k * m


def with_k(found: Any, k: float) -> Any:
    found.k = k
    return found


def attributed(k: float) -> Any:
    return written(f"def own_map(m):\n    return own_map.k * m\n\nown_map.k = {k}\n")


def of_global(value: str, body: str) -> Callable[[float], Any]:
    """Of a number, the map of a module that has it in its global K."""
    return lambda k: written(f"K = {value.format(k)}\n\ndef own_map(m):\n    return {body}\n")


FACTORIES: dict[str, Callable[[float], Any]] = {
    "default": lambda k: written(f"def own_map(m, k={k}):\n    return k * m\n"),
    "keyword default": lambda k: written(f"def own_map(m, *, k={k}):\n    return k * m\n"),
    "closure": lambda k: lambda m: k * m,
    "partial": lambda k: partial(lambda m, k: k * m, k=k),
    "global": of_global("{}", "K * m"),
    "in a lambda": of_global("{}", "(lambda z: K * z)(m)"),
    "in a comprehension": of_global("{}", "torch.stack([K * z for z in m])"),
    "in a generator": of_global("{}", "sum(K * m for _ in range(1))"),
    "deeper": of_global("{}", "(lambda z: (lambda y: K * y)(z))(m)"),
    "list": of_global("[{}]", "K[0] * m"),
    "dict": of_global("{{'a': [{}]}}", "K['a'][0] * m"),
    "array": of_global("np.array([{}])", "K[0] * m"),
    "tensor": of_global("torch.tensor({})", "K * m"),
    "helper": of_global("lambda m: {} * m", "K(m)"),
    "slots": Slotted,
    "hidden slots": lambda k: Slotted(0.0, k),
    "list of attributes": lambda k: with_k(Listed([1.0]), k),
    "dict of attributes": lambda k: with_k(Keyed(), k),
    "attribute of a function": attributed,
    "list of a class": of_global("type('C', (), {{'__module__': 'a', 'k': [{}]}})", "K.k[0] * m"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_objects_that_do_other_things_are_told_apart(name: str, tmp_path: Path) -> None:
    one, same, other = (digest(FACTORIES[name](k), tmp_path) for k in (0.5, 0.5, 0.1))
    assert one == same != other


def test_a_path_is_known_again_once_it_was_used(tmp_path: Path) -> None:
    """Paths remember their words and hashes, which differ from process to process."""
    found = Path("a") / "b"
    before = digest([found], tmp_path)
    assert hash(found) and str(found)
    assert digest([found], tmp_path) == before


class Remembering:
    """A map, aggregate or loss that keeps something between calls."""

    def __init__(self) -> None:
        self.seen: dict[Any, float] = {}

    def __call__(self, m: Any) -> Any:
        if isinstance(m, torch.Tensor):
            self.seen.setdefault(tuple(m.shape[-2:]), 0.5)
            return 0.5 * m
        self.seen[len(self.seen)] = 1.0
        return m[0].params


def test_the_very_same_object_is_the_same_whatever_it_remembers(tmp_path: Path) -> None:
    """In a bound, beside neighbours, and when a run is gone on with."""
    own_map = fedmuon.Orthogonalizer(Remembering(), 0.5)
    assert fedmuon.bound(fedmuon.run(SYNTHETIC, orthogonalizer=own_map))["value"] > 0
    fedmuon.stability(SYNTHETIC, trials=1, orthogonalizer=fedmuon.Orthogonalizer(Remembering()))

    mine = Remembering()
    with pytest.raises(KeyboardInterrupt):
        fedmuon.run(tables(), **PLAIN, aggregate=mine, callbacks=[interrupted], out=tmp_path)
    assert fedmuon.run(**PLAIN, aggregate=mine, out=tmp_path, resume=True).summary["rounds"] == 2
    with pytest.raises(InputError, match="the aggregate differs from the aggregate"):
        fedmuon.run(**PLAIN, aggregate=Remembering().__call__, out=tmp_path, resume=True)


FILE = """
import fedmuon

class Map:
    def __init__(self):
        self.seen = {}

    def __call__(self, m):
        self.seen.setdefault(tuple(m.shape[-2:]), 0.5)
        return helped(m)

def helped(m):
    return 0.5 * m

mine = fedmuon.Orthogonalizer(Map(), 0.5)
"""


@pytest.mark.slow
def test_the_command_line_knows_a_map_again_that_remembers(tmp_path: Path) -> None:
    """While it runs, and when another command reads the run."""
    (file := tmp_path / "mine.py").write_text(FILE)
    sets = [f"{table}.{key}={value}" for table, keys in SYNTHETIC.items()
            for key, value in keys.items()]  # fmt: skip
    sets += [f"orthogonalizer.name={file}:mine"]
    given = [word for one in sets for word in ("--set", one)]
    out = str(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["stability", *given, "--trials", "1", "--out", out])
    assert not ended.value.code
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-m", "fedmuon", "bound", out], check=True, cwd=root)


@pytest.mark.parametrize("edited", ["mine.py", "helper.py"])
def test_another_line_of_its_file_or_of_a_neighbour_is_another_object(
    edited: str, tmp_path: Path
) -> None:
    """Though the object itself is as it was: opaque things call what they please."""
    texts = {
        "mine.py": "import helper\n\n\ndef aggregate(replies):\n    return replies[0].params\n",
        "helper.py": "X = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    given = {**PLAIN, "aggregate": f"{tmp_path / 'mine.py'}:aggregate"}
    done = fedmuon.run(tables(), **given)
    (tmp_path / edited).write_text(texts[edited] + "Y = 1\n")
    with pytest.raises(InputError, match="the aggregate differs from the aggregate"):
        fedmuon.run(**PLAIN, out=done.path, resume=True)


@pytest.mark.parametrize("text", ["[5]", "{}", "null", '{"recipe": "0"}', '{"factors": "ab"}', "{"])
def test_a_damaged_file_of_objects_is_said_to_be_damaged(text: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fedmuon.run(tables(), **PLAIN, callbacks=[interrupted], out=tmp_path)
    file = tmp_path / "objects.json"
    assert json.loads(file.read_text())["task"]
    file.write_text(text)
    with pytest.raises(InputError, match="damaged"):
        fedmuon.run(**PLAIN, out=tmp_path, resume=True)


def test_attributes_of_later_versions_count_only_where_they_have_an_effect() -> None:
    """Runs that began with version 1.0 resume; the control sets the attribute."""
    link = links.gradient()
    recipe = fedmuon.Recipe(fedmuon.Chain((link,)), lambda old, mean, states: (mean, states))
    changed = (link, "knows_samples", True), (recipe, "stages", (fedmuon.Stage(),))
    for subject, name, value in changed:
        plain = [*fingerprints.parts(subject, {})]
        asking = [*fingerprints.parts(replace(subject, **{name: value}), {})]
        assert f"'{name}'" not in plain and f"'{name}'" in asking
