"""Descriptions of config keys: default, values, meaning, and when a key has an effect.

The descriptions are derived from the declarations in `schema.py`.
"""

import json
import textwrap
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fedmuon.config.names import NAMES
from fedmuon.config.schema import FIELDS, NEEDS, TABLES_OF_A_CONFIG
from fedmuon.core.errors import InputError, near
from fedmuon.core.tables import ELSEWHERE, RENAMED

TINY, HUGE = 1e-9, 10**15  # limits that are described as "above 0" and as no limit
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
WIDTH = 96  # columns of a config file
HEAD = (
    "# A config of fedmuon with all defaults. To change a key, remove the # before it.\n# If you "
    "change a key that has no effect in your experiment, the config is rejected.\n"
)
# Table -> key -> description. Options are described by the object that they belong to.
KEYS: dict[str, dict[str, str]] = {
    table: {name: field.description for name, field in fields.items() if field.description}
    for table, fields in FIELDS.items()
}
EVERY = [(table, key) for table, texts in KEYS.items() for key in texts]
# Key -> its symbol in the papers.
SYMBOLS = {
    f"{table}.{name}": symbol
    for table, name in EVERY
    if (symbol := FIELDS[table][name].json_schema_extra["symbol"])
}


@dataclass(frozen=True)
class Key:
    """One key of a config.

    Attributes:
        table: The table of the key.
        name: The name of the key in its table.
        whole: The full name, `table.key`.
        default: The default in TOML.
        values: The possible values in words.
        what: The description of the key.
        readers: The parts of an experiment that use the key, or `always` if every experiment does.
        setting: The command-line option that would set the key to its default value.
    """

    table: str
    name: str
    whole: str
    default: str
    values: str
    what: str
    readers: str
    setting: str


def describe(table: str, name: str) -> Key:
    """Return the description of one key."""
    full_name, default = f"{table}.{name}", json.dumps(FIELDS[table][name].default)
    setting = f"--set {full_name}={default.strip(chr(34))}"
    text = KEYS[table][name]
    return Key(
        table, name, full_name, default, values(full_name), text, readers(full_name), setting
    )


def keys(table: str) -> list[Key]:
    """Return the descriptions of all keys of a table, in order.

    The key `options` is left out.
    """
    return [describe(table, name) for name in KEYS[table]]


def title(table: str) -> str:
    """Return the title of a table: the first sentence of its docstring, without the full stop."""
    docstring = " ".join((TABLES_OF_A_CONFIG[table].__doc__ or "").split())
    return docstring.partition(". ")[0].removesuffix(".")


def commented() -> str:
    """Return a config file with descriptions, in which every key is commented out."""
    lines = [HEAD]
    for table in KEYS:
        lines.append(f"\n# {title(table)}\n[{table}]\n")
        for key in keys(table):
            by = "" if key.readers == "always" else f" Used by: {key.readers}."
            text = f"{key.what} Values: {key.values}.{by}"
            lines += [f"# {line}\n" for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]
            lines.append(f"#{key.name} = {key.default}\n")
    return "".join(lines)


def find(name: str) -> Key:
    """Find a key by its full name `table.key`, or by `key` alone if only one table has this key.

    Raises:
        InputError: If no key has this name, or if several keys have this name. The error suggests
            other names.
    """
    query = name.strip().replace("_", "-")
    matches = [entry for entry in EVERY if query in (".".join(entry), entry[1])]
    if len(matches) == 1:
        return describe(*matches[0])
    if matches:
        several = " or ".join(".".join(entry) for entry in matches)
        raise InputError(
            f"the key {query} exists in several tables, so its table must be named. Use {several}."
        )
    place = tuple(query.split(".", 1))
    table, _, short = query.rpartition(".")
    table = table.lower()
    candidates = [entry for entry in EVERY if table not in KEYS or entry[0] == table]
    names = near(short, (key for _, key in candidates), 3)
    close = [".".join(entry) for key in names for entry in candidates if entry[1] == key]
    if place in ELSEWHERE:
        fix = ELSEWHERE[place]
    elif place in RENAMED:
        fix = f"its new name is {place[0]}.{RENAMED[place]}"
    elif close:
        fix = f"did you mean {' or '.join(close)}?"
    elif table in KEYS and short == "options" and "options" in FIELDS[table]:
        fix = f"[{query}] is a table of options, so set one of its options as {query}.OPTION=VALUE"
    elif table in KEYS:
        fix = f"the keys of [{table}] are {', '.join(KEYS[table])}"
    else:
        fix = f"write table.key with one of the tables {', '.join(KEYS)}"
    raise InputError(f"{name!r} is not a config key: {fix}")


def values(whole: str) -> str:
    """Return a description of the values that a key can have."""
    table, _, name = whole.partition(".")
    field = FIELDS[table][name]
    if text := field.json_schema_extra["values"]:
        return text
    if whole in NAMES:
        return ", ".join(NAMES[whole]) + ", or your own"
    if field.annotation is bool:
        return "true, false"
    if get_origin(field.annotation) is Literal:
        return ", ".join(get_args(field.annotation))
    limits: dict[str, float] = {}
    for constraint in field.metadata:
        limits |= {
            kind: getattr(constraint, kind)
            for kind in ("ge", "gt", "le", "lt")
            if hasattr(constraint, kind)
        }
    return _range(limits)


def _range(limits: dict[str, Any]) -> str:
    """Describe the allowed range of a number, such as `1 to 10⁹`, `above 0` or `0 to below 1`."""
    low: Any = limits.get("ge", limits.get("gt"))
    high = limits.get("le")
    positive = "gt" in limits or 0 < low < TINY
    begin = "above 0" if positive else _number(low)
    if "lt" in limits:
        return f"{begin}{', below' if positive else ' to below'} {limits['lt']}"
    if high is None:
        return f"{begin}, `inf`"
    endless = (
        high >= HUGE if isinstance(high, float) and not positive else high > 10**6 and positive
    )
    if endless:
        return begin if positive else f"{begin} or more"
    return f"{begin} to {_number(high)}"


def _number(value: float) -> str:
    """Format the limit of a range, such as 10⁹, 1024 or 0.001."""
    if value == 2**63 - 1:
        return "2⁶³ − 1"
    text = f"{value:.15g}" if value < 10**5 else f"{value:.0f}"
    power = len(text) - 1
    if power >= 5 and text == f"1{'0' * power}":
        return f"10{str(power).translate(SUPERSCRIPT)}"
    return text


def readers(whole: str) -> str:
    """Describe when a key has an effect: `always`, or which parts of an experiment use the key."""
    table, _, name = whole.partition(".")
    needs = NEEDS[table][name]
    implied = set()  # conditions of keys on which this key depends
    for need in needs:
        above, _, key = need.key.partition(".")
        implied |= {id(condition) for condition in NEEDS[above][key]}
    last: dict[str, str] = {}  # the last condition on each key, in the order of these conditions
    for condition in needs:
        if id(condition) not in implied:
            last.pop(condition.key, None)
            last[condition.key] = condition.readers
    first, *others = dict.fromkeys(last.values()) or ("always",)
    return f"{first}, with {' and '.join(others)}" if others else first
