"""A key as people are told of it: default, values, what it is, who reads it.

Everything follows from the declarations of `schema.py`.
"""

import json
import textwrap
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fedmuon.config.name_texts import NAMES
from fedmuon.config.read_if import NEEDS
from fedmuon.config.schema import FIELDS, TABLES_OF_A_CONFIG, ReadIf, declared
from fedmuon.core.errors import InputError, near
from fedmuon.core.tables import ELSEWHERE, RENAMED

TINY, HUGE = 1e-9, 10**15  # limits that mean "above 0", and none
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
# What each key is, by table and key; options are described by the object that they are for.
KEYS: dict[str, dict[str, str]] = {
    table: {name: field.description for name, field in fields.items() if field.description}
    for table, fields in FIELDS.items()
}


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    table: str
    name: str
    default: str  # as TOML has it
    values: str
    what: str
    readers: str

    @property
    def whole(self) -> str:
        """`table.key`."""
        return f"{self.table}.{self.name}"

    @property
    def setting(self) -> str:
        """What sets it on the command line, to its default."""
        return f"--set {self.whole}={self.default.strip(chr(34))}"


def title(table: str) -> str:
    """What a table is about: the first sentence of its class's docstring, without its end."""
    said = " ".join((TABLES_OF_A_CONFIG[table].__doc__ or "").split())
    return said.partition(". ")[0].removesuffix(".")


def keys(table: str) -> list[Key]:
    """The keys of a table in their order, without its options."""
    return [_key(table, name) for name in KEYS[table]]


def find(name: str) -> Key:
    """The key `table.key`, or the only one called so; of others is said what is near."""
    said = name.strip().replace("_", "-")
    found = [one for one in _every() if said in (".".join(one), one[1])]
    if len(found) == 1:
        return _key(*found[0])
    if found:
        several = " or ".join(".".join(one) for one in found)
        raise InputError(f"{said} is a key of several tables: ask for {several}")
    raise InputError(f"{name!r} is no key of a config: {_near(said)}")


def _every() -> list[tuple[str, str]]:
    return [(table, key) for table, held in KEYS.items() for key in held]


def _near(said: str) -> str:
    place = tuple(said.split(".", 1))
    if place in ELSEWHERE:
        return ELSEWHERE[place]
    if place in RENAMED:
        return f"it is called {place[0]}.{RENAMED[place]} now"
    table, _, name = said.rpartition(".")
    table = table.lower()
    known = [one for one in _every() if table not in KEYS or one[0] == table]
    short = near(name, (key for _, key in known), 3)
    close = [".".join(one) for key in short for one in known if one[1] == key]
    if close:
        return f"did you mean {' or '.join(close)}?"
    if table in KEYS and name == "options" and name in TABLES_OF_A_CONFIG[table].model_fields:
        return f"it is a table of its own: set an option as {said}.OPTION=VALUE"
    if table in KEYS:
        return f"those of [{table}] are {', '.join(KEYS[table])}"
    return f"name one as table.key, or one of the tables {', '.join(KEYS)}"


def _key(table: str, name: str) -> Key:
    default, whole = FIELDS[table][name].default, f"{table}.{name}"
    return Key(table, name, json.dumps(default), values(whole), KEYS[table][name], readers(whole))


def values(whole: str) -> str:
    """What a key can be, in words."""
    table, _, name = whole.partition(".")
    field = FIELDS[table][name]
    if said := declared(field, "values"):
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
    low, most = limits.get("ge", limits.get("gt")), limits.get("le")
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
    implied = {id(need) for one in needs for need in _needs_of(one)}
    last = {one.key: _without_verb(one.readers) for one in needs if id(one) not in implied}
    return ", with ".join(dict.fromkeys(last.values())) or "always"


def _needs_of(need: ReadIf) -> tuple[ReadIf, ...]:
    """What the key that a need names needs itself."""
    table, _, name = need.key.partition(".")
    return NEEDS[table][name]


def _without_verb(said: str) -> str:
    return said.removesuffix("s").removesuffix(" read")


# A config file to begin with: every key at its default, behind a comment, with what it is.

WIDTH = 96
HEAD = """\
# A config of fedmuon. Every key has the default that stands here: take the # before one away to
# change it. Keys that nothing reads are refused if they are changed.
"""


def commented() -> str:
    """The file as text."""
    return HEAD + "".join(_table(name) for name in KEYS)


def _table(name: str) -> str:
    lines = "".join(_lines(one) for one in keys(name))
    return f"\n# {title(name)}\n[{name}]\n{lines}"


def _lines(key: Key) -> str:
    """What it is, what it can be, who reads it; and the key."""
    readers = "" if key.readers == "always" else f"; read by {key.readers}"
    said = textwrap.wrap(f"{key.what} ({key.values}{readers})", WIDTH, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in said) + f"#{key.name} = {key.default}\n"


# The letters that the papers have for keys of a config; a key without one stands for itself.
SYMBOLS = {
    f"{table}.{name}": symbol
    for table, fields in FIELDS.items()
    for name, field in fields.items()
    if (symbol := declared(field, "symbol"))
}
