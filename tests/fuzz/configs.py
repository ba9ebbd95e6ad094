"""Configs: TOML files valid, nearly valid and extreme, through what reads them."""

import math
import re
import tomllib
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from fedmuon.config.load import UNFINISHED, Config
from fedmuon.config.schema import unread
from tests.fuzz import base, values
from tests.fuzz.calls import call, judged, snapshot
from tests.fuzz.outcome import Case, Outcome

KIND = "configs"
STARTS = ({}, base.PRIVATE, base.NETWORK, {"engine": {"dtype": "float64"}})
COMMANDS = (["run", "c.toml", "--out", "out"], ["run", "c.toml", "--out", "out"],
            ["stability", "c.toml", "--trials", "2", "--out", "out"],
            ["suite", "c.toml", "--out", "out"],
            ["deploy-demo", "c.toml", "--out", "out"])  # fmt: skip
LONG = {"rounds", "steps", "trials", "train", "test", "clients", "width", "depth", "context"}


def draw(rng: Random) -> Case:
    command = rng.choice(COMMANDS)
    if command[0] == "suite":
        return {"kind": KIND, "toml": _suite(rng), "command": command}
    content = _start(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        table, key, value = _setting(rng)
        content.setdefault(table, {})[key] = value
    if rng.random() < 0.8:
        _without_unread(content)
    text = base.toml(content)
    text = _disturbed(rng, text) if rng.random() < 0.15 else text
    changes = [f"--set={override(rng)}" for _ in range(rng.choice((0, 0, 0, 1)))]
    return {"kind": KIND, "toml": text, "command": [*command, *changes]}


def perform(case: Case, place: Path) -> Outcome:
    base.write(place / "c.toml", case["toml"].replace("{here}", str(place)))
    before = snapshot(place)
    return judged(call(case["command"], place), place, before)


def _start(rng: Random) -> base.Tables:
    """A small experiment of any recipe, map and task."""
    content = base.tables(rng.choice(STARTS))
    for table, key in (("local", "recipe"), ("orthogonalizer", "name")):
        if rng.random() < 0.6:
            content.setdefault(table, {})[key] = _fitting(rng, key, _keys(table)[key])
    if content["local"].get("recipe", "").startswith(('"dp-', '"disk-')):
        content["local"].pop("batch", None)
        content["privacy"] = {"noise": "1.0", "lot": "4.0"}
        content["faults"] = {"retries": "0"}
    return content


def _without_unread(content: base.Tables) -> None:
    """Leave out what nothing reads beside the rest, or most cases would end at that."""
    try:
        tables = tomllib.loads(base.toml(content))
        config = Config.model_validate(tables, context=UNFINISHED)
    except (ValueError, RecursionError):
        return
    for name in unread(config):
        table, _, key = name.partition(".")
        content.get(table, {}).pop(key, None)


def override(rng: Random) -> str:
    table, key, value = _setting(rng)
    return f"{table}.{key}={value}"


def _setting(rng: Random) -> tuple[str, str, str]:
    """A key of the config with a value that fits, nearly fits, or does not; or an unknown key."""
    table = rng.choice(list(Config.model_fields))
    keys = _keys(table)
    name = rng.choice(list(keys))
    if rng.random() < 0.03:
        return rng.choice((table, "odd")), rng.choice(("odd", "é", name.upper())), "1"
    if (table, name) == ("engine", "name") and rng.random() < 0.7:
        return table, name, '"inline"'
    fits = rng.random() < 0.75
    return table, name, _fitting(rng, name, keys[name]) if fits else values.toml(rng)


def _keys(table: str) -> dict[str, FieldInfo]:
    model: Any = Config.model_fields[table].annotation
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _fitting(rng: Random, name: str, field: FieldInfo) -> str:
    """A value of the key's own type, within its limits or at their ends."""
    kind: Any = field.annotation
    if get_origin(kind) is not None and not _numeric(kind):
        return values.quoted(rng.choice([str(one) for one in get_args(kind)]))
    if kind is bool:
        return rng.choice(("true", "false"))
    low, high = _limits(field)
    if kind is int:
        return str(
            rng.choice((max(int(low), 1), max(int(low), 2), int(low) + 3, rng.randrange(1, 9)))
            if name in LONG or rng.random() < 0.75
            else rng.choice(values.INTEGERS)
        )
    if kind is str:
        return values.quoted(values.text(rng))
    top = 10.0 if math.isinf(high) else high
    inner = rng.uniform(low if math.isfinite(low) else 0.0, top)
    return repr(float(rng.choice((low, high, inner, inner, rng.choice(values.FLOATS)))))


def _numeric(kind: Any) -> bool:
    return any(one in (int, float) for one in get_args(kind))


def _limits(field: FieldInfo) -> tuple[float, float]:
    low, high = 0.0, math.inf
    for one in field.metadata:
        low = max(low, float(getattr(one, "ge", getattr(one, "gt", low))))
        high = float(getattr(one, "le", getattr(one, "lt", high)))
    return low, high


def _suite(rng: Random) -> str:
    """A small suite with one of its lines changed, left out or doubled."""
    lines = [*base.SUITE.splitlines()]
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        key = re.split(r"\s*=", lines[at])[0]
        odd = values.toml(rng)
        lines[at : at + 1] = rng.choice(
            (
                [], [lines[at]] * 2, [f"{key} = {odd}"], [f"{key} = [{odd}]"], [f"{odd} = 1"],
                [lines[at], f'like = "{rng.choice(("A1", "cnn", "odd", ""))}"'],
                [lines[at], f'kind = "{rng.choice(("training", "dp-bias", "stability", "odd"))}"'],
            )
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _disturbed(rng: Random, text: str) -> str:
    at, width = rng.randrange(len(text)), rng.choice((0, 1, 5, 50))
    return text[:at] + rng.choice(("", values.text(rng), text[at : at + 30])) + text[at + width :]
