"""Folders made once by the program itself, which cases copy and damage."""

import html
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import base
from tests.fuzz.calls import call

# Results that must be the reference's when a damaged folder is accepted.
RESULTS = ("model.safetensors", "momentum.safetensors", "schedule.npy", "partition.npz",
           "config.toml", "initial.safetensors", "neighbours.csv", "runs.csv")  # fmt: skip
NAMES = ("run", "private", "network", "stopped", "stopped-private", "stability", "suite", "empty")


class Stop(BaseException):
    """What ends a run in the middle, as a kill would."""


def make(folder: Path) -> None:
    """Make them below FOLDER/templates."""
    place = folder / "templates"
    place.mkdir()
    base.write(place / "tiny.toml", base.toml(base.tables()))
    base.write(place / "private.toml", base.toml(base.tables(base.PRIVATE)))
    base.write(place / "network.toml", base.toml(base.tables(base.NETWORK)))
    base.write(place / "suite.toml", base.SUITE)
    (place / "empty").mkdir()
    _call(place, "run", "tiny.toml", "--out", "run")
    _call(place, "run", "private.toml", "--out", "private")
    _call(place, "run", "network.toml", "--out", "network")
    _call(place, "stability", "tiny.toml", "--trials", "3", "--out", "stability")
    _call(place, "suite", "suite.toml", "--out", "suite")
    _stopped(place / "tiny.toml", place / "stopped")
    _stopped(place / "private.toml", place / "stopped-private")


def copied(folder: Path, name: str, place: Path) -> Path:
    """A template's copy below `place`, under its own name."""
    shutil.copytree(folder / "templates" / name, place / name)
    return place / name


def _call(place: Path, *arguments: str) -> None:
    ending = call(arguments, place, 60)
    if ending.code != 0:
        raise RuntimeError(f"{arguments} failed: {ending.err}{ending.trouble}")


def _stopped(config: Path, out: Path) -> None:
    """A run that ends without a word after its second round."""
    from fedmuon.config.load import load
    from fedmuon.experiments.run import execute

    def watch(record: dict) -> None:
        if record["round"] == 2:
            raise Stop

    try:
        execute(load(config), out, on_round_end=watch)
    except Stop:
        return
    raise RuntimeError(f"{out} was not stopped")


@dataclass(frozen=True)
class Reference:
    """What a command makes of the sound template: its result files, its words, its page."""

    files: dict[str, bytes]
    said: str
    page: str


_known: dict[tuple[str, tuple[str, ...]], Reference] = {}


def reference(folder: Path, name: str, reader: tuple[str, ...]) -> Reference:
    """The reference of a reader, made once in each worker."""
    if (name, reader) not in _known:
        with tempfile.TemporaryDirectory(dir=folder, prefix="sound-") as here:
            _known[name, reader] = _read(folder, name, reader, Path(here))
    return _known[name, reader]


def _read(folder: Path, name: str, reader: tuple[str, ...], here: Path) -> Reference:
    held = copied(folder, name, here)
    base.write(here / "suite.toml", base.SUITE)
    ending = call([*reader, name], here, 60)
    if ending.code != 0:
        raise RuntimeError(f"{reader} refuses the sound {name}: {ending.err}{ending.trouble}")
    page = held / "report.html"
    return Reference(results(held), ending.out, told(page) if page.exists() else "")


def results(held: Path) -> dict[str, bytes]:
    """The files that make the result, by their names from the folder above."""
    return {
        str(file.relative_to(held.parent)): file.read_bytes()
        for file in held.rglob("*")
        if file.name in RESULTS
    }


def told(page: Path) -> str:
    """The words of a report, without its pictures."""
    text = re.sub(r'data:image/svg[+]xml;base64,[^"]*', "", page.read_text(encoding="utf-8"))
    return html.unescape(re.sub(r"<[^>]*>", " ", text))
