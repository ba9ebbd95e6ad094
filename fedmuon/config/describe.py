"""The description of a key: default, values, meaning, and who reads it.

Everything follows from the declarations in `schema.py`.
"""

import json
import textwrap
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fedmuon.config.schema import FIELDS, NEEDS, TABLES_OF_A_CONFIG
from fedmuon.core.choices import NAMES
from fedmuon.core.errors import InputError, near
from fedmuon.core.tables import ELSEWHERE, RENAMED

TINY, HUGE = 1e-9, 10**15  # limits that mean "above 0", and none
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
WIDTH = 96  # columns of a config file
HEAD = """\
# A config of fedmuon. Every key has the default that stands here: take the # before one away to
# change it. Keys that nothing reads are refused if they are changed.
"""
# The meaning of each key, by table; options are described by the object that they are for.
KEYS: dict[str, dict[str, str]] = {
    table: {name: field.description for name, field in fields.items() if field.description}
    for table, fields in FIELDS.items()
}
EVERY = [(table, key) for table, held in KEYS.items() for key in held]
# The letters that the papers have for keys of a config; a key without one stands for itself.
SYMBOLS = {
    f"{table}.{name}": symbol
    for table, name in EVERY
    if (symbol := FIELDS[table][name].json_schema_extra["symbol"])
}


@dataclass(frozen=True)
class Key:
    """One key of a config.

    Attributes:
        whole: `table.key`.
        default: As TOML writes it.
        values: What it can be.
        what: What it is.
        readers: Who reads it.
        setting: The option of the command line that sets it to its default.
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
    """The description of one key."""
    whole, default = f"{table}.{name}", json.dumps(FIELDS[table][name].default)
    setting = f"--set {whole}={default.strip(chr(34))}"
    what = KEYS[table][name]
    return Key(table, name, whole, default, values(whole), what, readers(whole), setting)


def keys(table: str) -> list[Key]:
    """The keys of a table in their order, without its options."""
    return [describe(table, name) for name in KEYS[table]]


def title(table: str) -> str:
    """The subject of a table: the first sentence of its class's docstring, without full stop."""
    said = " ".join((TABLES_OF_A_CONFIG[table].__doc__ or "").split())
    return said.partition(". ")[0].removesuffix(".")


def commented() -> str:
    """A config file to begin with: every key at its default, commented out and described."""
    lines = [HEAD]
    for table in KEYS:
        lines.append(f"\n# {title(table)}\n[{table}]\n")
        for key in keys(table):
            by = "" if key.readers == "always" else f"; read by {key.readers}"
            said = f"{key.what} ({key.values}{by})"
            lines += [f"# {line}\n" for line in textwrap.wrap(said, WIDTH, break_on_hyphens=False)]
            lines.append(f"#{key.name} = {key.default}\n")
    return "".join(lines)


def find(name: str) -> Key:
    """The key `table.key`, or the only key of that name.

    Raises:
        InputError: With what is near, where there is none, or several.
    """
    said = name.strip().replace("_", "-")
    found = [one for one in EVERY if said in (".".join(one), one[1])]
    if len(found) == 1:
        return describe(*found[0])
    if found:
        several = " or ".join(".".join(one) for one in found)
        raise InputError(f"{said} is a key of several tables: ask for {several}")
    place = tuple(said.split(".", 1))
    table, _, short = said.rpartition(".")
    table = table.lower()
    known = [one for one in EVERY if table not in KEYS or one[0] == table]
    names = near(short, (key for _, key in known), 3)
    close = [".".join(one) for key in names for one in known if one[1] == key]
    if place in ELSEWHERE:
        mend = ELSEWHERE[place]
    elif place in RENAMED:
        mend = f"it is called {place[0]}.{RENAMED[place]} now"
    elif close:
        mend = f"did you mean {' or '.join(close)}?"
    elif table in KEYS and short == "options" and "options" in FIELDS[table]:
        mend = f"it is a table of its own: set an option as {said}.OPTION=VALUE"
    elif table in KEYS:
        mend = f"those of [{table}] are {', '.join(KEYS[table])}"
    else:
        mend = f"name one as table.key, or one of the tables {', '.join(KEYS)}"
    raise InputError(f"{name!r} is no key of a config: {mend}")


def values(whole: str) -> str:
    """The possible values of a key in words."""
    table, _, name = whole.partition(".")
    field = FIELDS[table][name]
    if said := field.json_schema_extra["values"]:
        return said
    if whole in NAMES:
        return ", ".join(NAMES[whole]) + ", or yours"
    if field.annotation is bool:
        return "true, false"
    if get_origin(field.annotation) is Literal:
        return ", ".join(get_args(field.annotation))
    limits: dict[str, float] = {}
    for one in field.metadata:
        limits |= {
            kind: getattr(one, kind) for kind in ("ge", "gt", "le", "lt") if hasattr(one, kind)
        }
    return _range(limits)


def _range(limits: dict[str, Any]) -> str:
    """Limits of a number in words: `1 to 10⁹`, `above 0`, `0 to below 1`."""
    low: Any = limits.get("ge", limits.get("gt"))
    most = limits.get("le")
    positive = "gt" in limits or 0 < low < TINY
    begin = "above 0" if positive else _number(low)
    if "lt" in limits:
        return f"{begin}{', below' if positive else ' to below'} {limits['lt']}"
    if most is None:
        return f"{begin}, `inf`"
    endless = (
        most >= HUGE if isinstance(most, float) and not positive else most > 10**6 and positive
    )
    if endless:
        return begin if positive else f"{begin} or more"
    return f"{begin} to {_number(most)}"


def _number(value: float) -> str:
    """A limit as people write it: 10⁹, 1024, 0.001."""
    if value == 2**63 - 1:
        return "2⁶³ − 1"
    text = f"{value:.15g}" if value < 10**5 else f"{value:.0f}"
    power = len(text) - 1
    if power >= 5 and text == f"1{'0' * power}":
        return f"10{str(power).translate(SUPERSCRIPT)}"
    return text


def readers(whole: str) -> str:
    """Who reads a key: `always`, or what an experiment must have for it."""
    table, _, name = whole.partition(".")
    needs = NEEDS[table][name]
    implied = set()  # what the key that a condition names needs itself
    for need in needs:
        above, _, key = need.key.partition(".")
        implied |= {id(one) for one in NEEDS[above][key]}
    last = {
        one.key: one.readers.removesuffix("s").removesuffix(" read")
        for one in needs
        if id(one) not in implied
    }
    return ", with ".join(dict.fromkeys(last.values())) or "always"
