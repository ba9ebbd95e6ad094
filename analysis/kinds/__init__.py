"""The kinds of suites as a report sees them: suite.json's `kind` chooses who reads the folder."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from analysis.columns import MEND, read_json
from analysis.findings import SHARED, Findings
from analysis.studies import known
from fedmuon.errors import InputError

KINDS = ("stability", "training")  # each a module of this package


def of_suite(folder: Path) -> Findings:
    """The findings of a suite folder."""
    file = folder / "suite.json"
    about = read_json(file, SHARED)
    return _reader(str(about["kind"]), file)(folder, about)


def _reader(kind: str, file: Path) -> Callable[[Path, Mapping[str, Any]], Findings]:
    if kind in KINDS:
        return import_module(f"analysis.kinds.{kind}").findings
    if kind in known():
        return import_module(f"analysis.studies.{kind.replace('-', '_')}").findings
    raise InputError(f"{file} is of an unknown kind {kind!r}: {MEND}")
