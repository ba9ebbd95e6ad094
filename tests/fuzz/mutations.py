"""Damage to the bytes of a file: what disks, editors and other programs do."""

import contextlib
import csv
import io
import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import values

BYTES = ("flip", "flip", "flip", "cut", "double", "insert", "zeros", "end", "lines")
WHOLE = ("delete", "empty", "folder", "loop", "other", "rubbish")
ODD: tuple[Any, ...] = (None, True, "", "x", "<b>", -1, 0, 1e308, 10**30, [], {}, [1], {"a": 1},
                        float("nan"), float("inf"), "=1+1", "\x1b[31m")  # fmt: skip


def drawn(rng: Random, suffix: str) -> dict[str, Any]:
    """A mutation as JSON; `at` is where, as a share of the file."""
    kinds = (*BYTES, *WHOLE)
    if suffix in (".json", ".jsonl"):
        kinds = (*BYTES, *WHOLE, *["value"] * 12)
    if suffix == ".csv":
        kinds = (*BYTES, *WHOLE, *["cell"] * 12)
    if suffix == ".toml":
        kinds = (*BYTES, *WHOLE, *["setting"] * 8)
    found: dict[str, Any] = {"op": rng.choice(kinds), "at": rng.random()}
    if found["op"] in ("flip", "value", "cell"):
        found["which"] = rng.randrange(1 << 16)
    if found["op"] in ("insert", "cell", "setting", "rubbish"):
        found["text"] = values.toml(rng) if found["op"] == "setting" else values.text(rng)
    return found


def damage(file: Path, how: dict[str, Any], others: list[Path]) -> None:
    if how["op"] in WHOLE:
        _whole(file, how, others)
        return
    content = file.read_bytes()
    place = int(how["at"] * len(content))
    file.write_bytes(_bytes(content, place, how))


def spoil(folder: Path, mutations: list[dict[str, Any]], suffix: str = "") -> None:
    """Damage files of that suffix below the folder, or any if it has none."""
    for one in mutations:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        files = [file for file in files if not {"figures", "tables"} & {*file.parts}]
        fit = [file for file in files if file.suffix == suffix] or files
        if fit:  # an earlier mutation may have left nothing to mutate
            with contextlib.suppress(ValueError, IndexError, TypeError, csv.Error):
                damage(fit[int(one["file"] * len(fit))], one, files)


def _whole(file: Path, how: dict[str, Any], others: list[Path]) -> None:
    rubbish = how.get("text", "").encode("utf-8", "replace")
    content = others[int(how["at"] * len(others))].read_bytes() if how["op"] == "other" else rubbish
    file.unlink()
    if how["op"] == "folder":
        file.mkdir()
    elif how["op"] == "loop":
        file.symlink_to(file.name)
    elif how["op"] != "delete":
        file.write_bytes(content)


def _bytes(content: bytes, place: int, how: dict[str, Any]) -> bytes:
    before, after = content[:place], content[place:]
    text = how.get("text", "").encode("utf-8", "replace")
    match how["op"]:
        case "value":
            return _valued(content, place, how)
        case "cell":
            return _celled(content, how)
        case "setting":
            return _set(content, how)
        case "flip" if after:
            return before + bytes([after[0] ^ (1 << how["which"] % 8)]) + after[1:]
    return {
        "cut": before,
        "double": before + before[-40:] + after,
        "insert": before + text + after,
        "zeros": before + bytes(min(len(after), 64)) + after[64:],
        "end": content + content[-60:],
        "lines": b"".join(sorted(content.splitlines(keepends=True))),
    }.get(how["op"], content)


def _valued(content: bytes, place: int, how: dict[str, Any]) -> bytes:
    """JSON, or one line of JSON lines, with one value replaced by an odd one, or left out."""
    lines = content.decode().splitlines()
    at = (
        int(how["at"] * len(lines))
        if len(lines) > 1 and content[:1] + content[-2:-1] == b"{}"
        else -1
    )
    try:
        record = json.loads(lines[at] if at >= 0 else content)
    except ValueError:
        at, record = -1, json.loads(content)
    spots = list(_spots(record))
    holder, key = spots[how["which"] % len(spots)]
    holder[key] = ODD[how["which"] % len(ODD)]
    if how["which"] % 5 == 0 and isinstance(holder, dict):
        del holder[key]
    if at < 0:
        return (json.dumps(record, indent=2) + "\n").encode()
    lines[at] = json.dumps(record)
    return "".join(f"{line}\n" for line in lines).encode()


def _spots(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list) and value[key]:
            found += _spots(value[key])
    return found


def _celled(content: bytes, how: dict[str, Any]) -> bytes:
    rows = list(csv.reader(io.StringIO(content.decode())))
    row = rows[int(how["at"] * len(rows))]
    if row:
        row[how["which"] % len(row)] = how["text"].replace("\0", "")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "replace")


def _set(content: bytes, how: dict[str, Any]) -> bytes:
    lines = content.decode().splitlines()
    keyed = [number for number, line in enumerate(lines) if " = " in line]
    number = keyed[int(how["at"] * len(keyed))]
    lines[number] = f"{lines[number].split(' = ')[0]} = {how['text']}"
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
