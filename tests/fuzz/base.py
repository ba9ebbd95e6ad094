"""The small experiment that cases disturb, and its folders, which cases copy and damage."""

import html
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.calls import Ending, call
from tests.fuzz.values import written
from tests.helpers.small_suites import STABILITY

Tables = dict[str, dict[str, str]]  # table -> key -> the value's TOML text

TINY = {
    "data": {"name": "synthetic", "train": 60, "test": 30, "dimension": 5, "classes": 3,
             "minimum": 5},
    "federation": {"clients": 4, "per-round": 2, "rounds": 3},
    "local": {"lr": 0.05, "steps": 1},
    "orthogonalizer": {"lambda": 0.1},
    "engine": {"device": "cpu"},
    "output": {"evaluate-every": 2, "checkpoint-every": 1},
}  # fmt: skip
PRIVATE = {
    "local": {"recipe": "dp-muon", "lr": 0.05, "steps": 1},
    "privacy": {"noise": 1.0, "lot": 4.0, "insecure-reproducible-noise": True},
    "output": {"checkpoint-every": None},
}
NETWORK = {"task": {"name": "network", "model": "mlp"}, "local": {"lr": 0.05, "batch": 4}}
SUITE = STABILITY
NO_MAP = {"orthogonalizer": {"lambda": None}}
READ = {"data": {"dimension": None, "classes": None}}  # what only generated samples have


def tables(*layers: dict[str, dict]) -> Tables:
    """Layers of tables, the later on top, as TOML texts; None takes a key away."""
    found: Tables = {}
    for layer in (TINY, *layers):
        for table, keys in layer.items():
            held = {**found.get(table, {}), **{key: written(one) for key, one in keys.items()}}
            found[table] = {key: held[key] for key in held if keys.get(key, "") is not None}
    return found


def toml(content: Tables) -> str:
    return "\n".join(
        f"[{table}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
        for table, keys in content.items()
    )


def write(file: Path, text: str) -> Path:
    """The text in a file, byte for byte; what is no UTF-8 in it came from bytes."""
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    return file


# Results that must be the reference's when a damaged folder is accepted.
RESULTS = ("model.safetensors", "momentum.safetensors", "schedule.npy", "partition.npz",
           "config.toml", "initial.safetensors", "neighbours.csv", "runs.csv")  # fmt: skip
NAMES = ("run", "private", "network", "stopped", "stopped-private", "stability", "suite", "empty")


class Stop(BaseException):
    """What ends a run in the middle, as a kill would."""


def make(folder: Path) -> None:
    place = folder / "templates"
    place.mkdir()
    write(place / "suite.toml", SUITE)
    (place / "empty").mkdir()
    for name, out, layer in (("tiny", "run", {}), ("private", "private", PRIVATE),
                             ("network", "network", NETWORK)):  # fmt: skip
        write(place / f"{name}.toml", toml(tables(layer)))
        _call(place, "run", f"{name}.toml", "--out", out)
    _call(place, "stability", "tiny.toml", "--trials", "3", "--out", "stability")
    _call(place, "suite", "suite.toml", "--out", "suite")
    _stopped(place / "tiny.toml", place / "stopped")
    _stopped(place / "private.toml", place / "stopped-private")


def copied(folder: Path, name: str, place: Path) -> Path:
    shutil.copytree(folder / "templates" / name, place / name)
    return place / name


def _call(place: Path, *arguments: str) -> Ending:
    ending = call(arguments, place, 60)
    if ending.code != 0:
        raise RuntimeError(f"{arguments} failed: {ending.err}{ending.trouble}")
    return ending


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
        with tempfile.TemporaryDirectory(dir=folder, prefix="sound-") as place:
            held = copied(folder, name, Path(place))
            write(held.parent / "suite.toml", SUITE)
            ending = _call(held.parent, *reader, name)
            page = held / "report.html"
            files = {str(file.relative_to(held.parent)): file.read_bytes()
                     for file in held.rglob("*") if file.name in RESULTS}  # fmt: skip
            words = told(page) if page.exists() else ""
            _known[name, reader] = Reference(files, ending.out, words)
    return _known[name, reader]


def told(page: Path) -> str:
    text = re.sub(r'data:image/svg[+]xml;base64,[^"]*', "", page.read_text(encoding="utf-8"))
    return html.unescape(re.sub(r"<[^>]*>", " ", text))
