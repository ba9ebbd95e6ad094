"""Command lines, drawn from the program's own commands and options."""

from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import click

from tests.fuzz import base, configs, values
from tests.fuzz.calls import call, judged, snapshot
from tests.fuzz.outcome import Case, Outcome

KIND = "commands"
PLACES = (
    "tiny.toml", "suite.toml", "run", "private", "stability", "suite", "empty", "new", "missing",
    "tiny.toml/x", "run/config.toml", "run/partition.npz", "run/model.safetensors",
)  # fmt: skip
# Words that some option knows, so that not every case ends at the parser.
WORDS = (
    "small", "full", "synthetic", "paper", "sharp", "explicit", "muon", "adamw", "sgd", "gpt",
    "cnn", "nanogpt", "cubic", "quintic", "jordan", "taylor-4", "gaussian", "kaczmarz", "e2e",
    "dart", "restaurants", "lodgings", "inline", "ray", "deployment", "local", "poisson",
    "add-remove", "joint", "per-release", "001", "002", "003",
)  # fmt: skip
ORDINARY = {"int": ("1", "2", "3", "10", "100"), "float": ("0.5", "1", "0.01", "2", "64", "1e-5")}


def draw(rng: Random) -> Case:
    path, command = rng.choice(_commands())
    arguments = list(path)
    for one in command.params:
        required = one.required or isinstance(one, click.Argument)
        if rng.random() < (0.9 if required else 0.35 if path[0] == "privacy" else 0.2):
            arguments += _given(rng, one)
    options = {name for one in command.params for name in one.opts}
    if "--out" in options and "--out" not in arguments and rng.random() < 0.9:
        arguments += ["--out", "new"]
    if rng.random() < 0.04:
        arguments.insert(rng.randrange(len(arguments) + 1), values.text(rng))
    return {"kind": KIND, "arguments": arguments}


def perform(case: Case, place: Path) -> Outcome:
    named = {
        Path(word).parts[0]
        for word in case["arguments"]
        if word and "\0" not in word and Path(word).parts
    }
    for name in base.NAMES:
        if name in named:
            base.copied(place.parent, name, place)
    base.write(place / "tiny.toml", base.toml(base.tables()))
    base.write(place / "suite.toml", base.SUITE)
    before = snapshot(place)
    words = [word.replace("{here}", str(place)) for word in case["arguments"]]
    return judged(call(words, place), place, before)


@lru_cache
def _commands() -> list[tuple[tuple[str, ...], click.Command]]:
    import typer.main

    from fedmuon.experiments.cli import app

    def walk(path: tuple[str, ...], one: Any) -> list[tuple[tuple[str, ...], click.Command]]:
        if not hasattr(one, "commands"):
            return [(path, one)]
        return [leaf for name in one.commands for leaf in walk((*path, name), one.commands[name])]

    return walk((), typer.main.get_command(app))


def _given(rng: Random, one: click.Parameter) -> list[str]:
    if isinstance(one, click.Argument) or not hasattr(one, "is_flag"):
        return [_value(rng, one)]
    name = rng.choice([*one.opts, *one.secondary_opts])
    if getattr(one, "is_flag", False):
        return [name]
    times = rng.choice((1, 1, 2)) if one.multiple else 1
    return [word for _ in range(times) for word in (name, _value(rng, one))]


def _value(rng: Random, one: click.Parameter) -> str:
    if one.name == "overrides":
        return configs.override(rng) if rng.random() < 0.9 else values.text(rng)
    kind = one.type.name
    if kind in ("path", "file", "directory") or (one.name in ("name", "folder", "out", "config")):
        return rng.choice(PLACES) if rng.random() < 0.8 else values.text(rng)
    numeric = {"integer": "int", "float": "float", "integer range": "int"}.get(kind)
    if numeric and rng.random() < 0.55:
        return rng.choice(ORDINARY[numeric])
    if numeric:
        pool = rng.choice((values.INTEGERS, values.FLOATS, values.SPELLED))
        return str(rng.choice(pool))
    return rng.choice(WORDS) if rng.random() < 0.75 else values.text(rng)
