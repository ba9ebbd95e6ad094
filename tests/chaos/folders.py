"""What a folder of results holds, without what only the clock and the machine's speed decide."""

import csv
import hashlib
import io
import json
from pathlib import Path
from typing import Any

CLOCK = ("seconds", "per_second", "share_of_gemm", "git_commit")  # parts of names
SUMS = {"check", "digest"}  # of lines and cells that hold seconds
PICTURES = {".html", ".png", ".pdf"}  # seconds are drawn and told there
LISTED = "SHA256SUMS"
Contents = dict[str, Any]


def contents(folder: Path, repeated: bool = False) -> Contents:
    """File -> what it holds. `repeated` private rounds leave more in a ledger, and cost more."""
    held = {
        str(file.relative_to(folder)): _read(file)
        for file in sorted(folder.rglob("*"))
        # without locks, what a kill leaves half written, and what processes have said
        if file.is_file()
        and not any(
            part.startswith(".") or part == "logs" for part in file.relative_to(folder).parts
        )
    }
    if repeated:
        ledgers = ("ledger.jsonl", "ledger.heads")
        held = {name: value for name, value in held.items() if Path(name).name not in ledgers}
        for name, value in held.items():
            if Path(name).name == "summary.json":
                held[name] = {key: value[key] for key in value if key not in ("privacy", "ledger")}
    return held


def _read(file: Path) -> Any:
    if file.suffix in PICTURES:
        return file.stat().st_size > 0
    content = file.read_bytes()
    try:
        if file.name == LISTED:
            return _listed(file)
        if file.suffix == ".jsonl":
            return [timeless(json.loads(line)) for line in content.splitlines()]
        if file.suffix == ".json":
            return timeless(json.loads(content))
        if file.suffix == ".csv":
            return [timeless(row) for row in csv.DictReader(io.StringIO(content.decode()))]
    except (ValueError, KeyError, AttributeError) as error:
        return f"unreadable: {error}"
    return hashlib.sha256(content).hexdigest()


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        kept = [key for key in value if key not in SUMS and not any(one in key for one in CLOCK)]
        return {key: timeless(value[key]) for key in kept}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def _listed(file: Path) -> list[str]:
    """The files that are as it says; damage may have left other lines in it."""
    pairs = [
        line.split(maxsplit=1) for line in file.read_bytes().decode(errors="replace").splitlines()
    ]
    known = [pair for pair in pairs if len(pair) == 2 and "\0" not in pair[1]]
    return sorted({name for digest, name in known if _hash(file.parent / name) == digest})


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def difference(found: Contents, wanted: Contents) -> str:
    for name in sorted(set(found) | set(wanted)):
        if name not in found or name not in wanted:
            return f"{name} is {'missing' if name not in found else 'new'}"
        if found[name] != wanted[name]:
            texts = (json.dumps(held[name], default=str) for held in (found, wanted))
            brief = (t if len(t) < 300 else f"{t[:140]} ... {t[-140:]}" for t in texts)
            return f"{name} differs: {' for '.join(brief)}"
    return ""


def digests(folder: Path) -> dict[str, str]:
    """File -> hash of every byte; but for hidden files, which are locks."""
    if not folder.exists():
        return {}
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(folder).parts)
    }


def ledger_lines(folder: Path) -> list[bytes]:
    file = folder / "ledger.jsonl"
    content = file.read_bytes() if file.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
