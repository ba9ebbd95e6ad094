"""Suites of one file: written with changes, run from the command, and their tables."""

import csv
from pathlib import Path

import pytest

from fedmuon.experiments.cli import main
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.suites.suite import Work


def suite_of(folder: Path, text: str, *changes: tuple[str, str]) -> Work:
    """Write the suite, with other words in some places, to `suite.toml` of a folder."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "suite.toml").write_text(text)
    return find(str(folder / "suite.toml"), None, "full", {})


def command(*words: object, code: int = 0) -> None:
    """Say a command, which ends with that code."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    assert (ended.value.code or 0) == code


def table(out: Path, name: str) -> list[dict[str, str]]:
    """The rows of a table of a suite."""
    return list(csv.DictReader((out / f"{name}.csv").read_text().splitlines()))
