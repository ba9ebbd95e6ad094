"""What a config names by a path, found from other folders too: workers are seldom where we are."""

from pathlib import Path

from fedmuon.config.load import Config
from fedmuon.config.user_objects import NAMED
from fedmuon.core.choices import is_own
from fedmuon.core.registry import settled
from fedmuon.core.tables import attribute

OBJECTS = (*NAMED.values(), ("task", "model"))
FILES = (("data", "folder"), ("data", "tokenizer"), ("task", "weights"))


def with_objects(config: Config) -> Config:
    """The config with whole paths of the user's `./file.py:object`."""
    for table, key in OBJECTS:
        name = _held(config, table, key)
        if is_own(name):
            config = _changed(config, table, key, settled(name))
    return config


def with_files(config: Config) -> Config:
    """The same, and with whole paths of files and folders that are read."""
    for table, key in FILES:
        if name := _held(config, table, key):
            config = _changed(config, table, key, str(Path(name).expanduser().resolve()))
    return with_objects(config)


def _held(config: Config, table: str, key: str) -> str:
    held = getattr(config, table)
    return getattr(held, attribute(type(held), key))


def _changed(config: Config, table: str, key: str, value: str) -> Config:
    held = getattr(config, table)
    if _held(config, table, key) == value:
        return config
    changed = held.model_copy(update={attribute(type(held), key): value})
    return config.model_copy(update={table: changed})
