"""Which keys of a config something reads, and the message that rejects one that nothing reads.

`fedmuon.config.schema` declares of every key when it is read.
"""

from collections.abc import Iterator
from typing import Any

from fedmuon.config.schema import (
    CLIENT,
    FIELDS,
    OF_CLIENTS,
    PRIVATELY,
    Config,
    ReadIf,
    declared,
    value_of,
)
from fedmuon.core.choices import PRIVATE, is_own
from fedmuon.core.tables import shown

# Options have no declaration: the object that they are for asks for them.
NEEDS: dict[str, dict[str, tuple[ReadIf, ...]]] = {
    table: {name: declared(field, "read_if") for name, field in fields.items()}
    for table, fields in FIELDS.items()
}


def reads(config: Config, name: str) -> bool:
    """Whether anything reads the key `table.key` under the rest of the config."""
    return _missing(config, name) is None


def unread(config: Config) -> list[str]:
    """The keys `table.key` that differ from their defaults though nothing reads them."""
    names = [f"{table}.{key}" for table, keys in NEEDS.items() for key in keys]
    idle = [name for name in names if not reads(config, name)]
    changed = [name for name in idle if not is_default(config, name, value_of(config, name))]
    # A public population or rate sets the adjacency: name first what was set.
    return sorted(changed, key="privacy.adjacency".__eq__)


def unread_by_own_recipe(config: Config, private: bool) -> Iterator[str]:
    """Sentences on keys of private recipes of ours that are set beside a recipe of the user's: its
    mechanism, if it is `private`, has them in itself; delta is the account's."""
    why, but = "has no mechanism to read it", ()
    if private:
        why, but = "carries clipping, noise and lots in its mechanism", ("privacy.delta",)
    names = [
        f"privacy.{key}"
        for key, needs in NEEDS["privacy"].items()
        if private or not (config.privacy.level == "client" and (needs or (None,))[0] in OF_CLIENTS)
    ]
    names += ["output.checkpoint-every"] if private else []  # a private run keeps every round
    for name in names:
        if name not in but and not is_default(config, name, value := value_of(config, name)):
            yield (
                f"{_spelled(name)} = {shown(value)} has no effect: your recipe {why}, so leave "
                f"{name.partition('.')[2]} out"
            )


def is_default(config: Config, name: str, value: Any) -> bool:
    """Whether that is the value of the key where none is set."""
    table, _, key = name.partition(".")
    return value == FIELDS[table][key].default


def refusal(config: Config, name: str, value: Any = None) -> str:
    """What is set, why nothing reads it, and the mend; the value is the config's if not given."""
    need = _missing(config, name)
    assert need is not None
    key, mend = need.key, need.mend
    if need is PRIVATELY and config.privacy.level == "client":  # neither goes with the other
        key, mend = CLIENT.key, f"set level = 'example' and {mend}"
    elif need is CLIENT and config.local.recipe in PRIVATE:
        mend += " and choose a recipe without dp- and disk-"
    value = value_of(config, name) if value is None else value
    return (
        f"{_spelled(name)} = {shown(value)} has no effect: only {need.readers} it, and here "
        f"{_spelled(key)} = {shown(value_of(config, key))}, so {mend}, or leave "
        f"{name.partition('.')[2]} out"
    )


def _missing(config: Config, name: str) -> ReadIf | None:
    table, _, key = name.partition(".")
    if table == "task" and key != "model" and is_own(config.task.name):
        return None  # which may ask for any
    return next((need for need in NEEDS[table][key] if not need.met(config)), None)


def _spelled(name: str) -> str:
    table, _, key = name.partition(".")
    return f"[{table}] {key}"
