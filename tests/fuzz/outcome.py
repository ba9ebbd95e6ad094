"""How a case may end, and the cases that once ended as none may."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Case = dict[str, Any]  # JSON: `kind`, and what that kind's module reads
ENDS = ("done", "refused", "other")


@dataclass(frozen=True)
class Outcome:
    """`done`, `refused` in one sentence with nothing touched, or `other`, which is a finding."""

    end: str
    why: str = ""


def done(why: str = "") -> Outcome:
    return Outcome("done", why)


def refused(why: str = "") -> Outcome:
    return Outcome("refused", why)


def other(why: str) -> Outcome:
    return Outcome("other", why)


# Cases that once ended as none may, one small JSON file each; they are replayed for ever.

FOLDER = Path(__file__).resolve().parent / "found"


def save(case: Case, why: str) -> Path | None:
    """Write the case; None when one with the same ending was saved already.

    Numbers, names and paths do not count, so that one cause is saved once.
    """
    what, at, where = why.partition(" at ")
    gist = where if at else re.sub(r"[\d/][\w./-]*", "", what)[:60]
    name = f"{case['kind']}-{hashlib.sha256(gist.encode()).hexdigest()[:10]}.json"
    file = FOLDER / name
    if file.exists():
        return None
    FOLDER.mkdir(exist_ok=True)
    file.write_text(json.dumps({**case, "why": why}, indent=1) + "\n", encoding="utf-8")
    return file


def saved() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def load(file: Path) -> Case:
    return json.loads(file.read_text(encoding="utf-8"))
