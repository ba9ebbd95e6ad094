"""Values that shells complete: keys of the config, their values, names, suites and runs.

Each function takes an incomplete word and returns the words that complete it. A function imports
the config only if it needs the config.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from fedmuon.config.names import CLOSED_LISTS, LISTS, SAME_LIST

RUNS = Path("runs")  # where new run folders are created by default
LISTED = ("suites", "settings", *LISTS, *CLOSED_LISTS)  # what `fedmuon list` shows

Completion = Callable[[str], list[str]]


def among(*words: str) -> Completion:
    """Return a function that completes these words."""

    def complete(incomplete: str) -> list[str]:
        return _begun(words, incomplete)

    return complete


def value_of(key: str) -> Completion:
    """Return a function that completes the values of the config key `table.key`."""

    def complete(incomplete: str) -> list[str]:
        return _begun(values(key), incomplete)

    return complete


def values(key: str) -> list[str]:
    """Return the names that a config key accepts; empty if its values are not names."""
    from fedmuon.config import describe  # the config

    names = describe.find(key).values.removesuffix(", or your own").split(", ")
    return names if len(names) > 1 else []


def keys(incomplete: str, end: str = "") -> list[str]:
    """Complete a key `table.key`."""
    from fedmuon.config import schema  # the config

    candidates = (f"{table}.{name}{end}" for table, keys in schema.NEEDS.items() for name in keys)
    return _begun(candidates, incomplete)


def settings(incomplete: str) -> list[str]:
    """Complete `table.key=`, and then a value of that key."""
    key, equals, _ = incomplete.partition("=")
    if not equals:
        return keys(incomplete, end="=")
    return _begun((f"{key}={value}" for value in values(key)), incomplete) if keys(key) else []


def tables_and_keys(incomplete: str) -> list[str]:
    """Complete a table of the config, or a key `table.key`."""
    from fedmuon.config import schema  # the config

    return [*_begun(schema.TABLES_OF_A_CONFIG, incomplete), *keys(incomplete)]


def suites(incomplete: str) -> list[str]:
    """Complete the name of a suite."""
    from fedmuon.experiments.suites.contents import shipped  # the config

    return _begun(sorted(shipped()), incomplete)


def lists(incomplete: str) -> list[str]:
    """Complete the name of a list that `fedmuon list` can print."""
    return _begun([*LISTED, *SAME_LIST], incomplete)


def named_settings(incomplete: str) -> list[str]:
    """Complete the name of a setting for --setting."""
    from fedmuon.experiments.settings import descriptions

    return _begun([*descriptions()], incomplete)


def run_folders(incomplete: str) -> list[str]:
    """Complete a folder. For an empty word, return the folders in runs/.

    In the result, a slash follows each folder that is not a run, because it may contain runs.
    """
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    if not incomplete and RUNS.is_dir():
        folder = RUNS
    if not folder.is_dir():
        return []
    folders = sorted(str(entry) for entry in folder.iterdir() if entry.is_dir())
    ends = ("" if (Path(path) / "config.toml").is_file() else "/" for path in folders)
    return _begun((f"{path}{end}" for path, end in zip(folders, ends, strict=True)), incomplete)


def _begun(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the words that begin with the incomplete word."""
    return [word for word in words if word.startswith(incomplete)]
