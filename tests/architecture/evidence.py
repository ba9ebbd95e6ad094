"""Whether a change of the code leaves all results as they were, to the bit.

    python -m tests.architecture.evidence                   this tree against the commit 763be6a
    python -m tests.architecture.evidence --base main       against another commit
    python -m tests.architecture.evidence record FILE       only this tree; FILE is JSON
    python -m tests.architecture.evidence control           twice here, then with other step sizes

The first form makes a temporary worktree of the base, runs the cases of `cases.py` in both trees,
and prints a table. `--only NAME ...` takes single cases. The exit code is 0 if all are equal.

A case has three SHA-256 digests. `model`: the tensors in all .safetensors files. `rounds`: all
rounds.jsonl. `numbers`: the numbers, truth values and labels in all other JSON, CSV and NumPy
files.
Times, versions, paths and sentences are left out. A dash means that a case has no such files.
Processors differ in the last bits, so digests are only compared within one call of this script.
"""

import argparse
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors.numpy import load_file

from .cases import CASES, Case

ROOT = Path(__file__).resolve().parents[2]
BASE = "763be6a"
PARTS = ("model", "rounds", "numbers")
LIMIT = 600  # seconds of one command
THREADS = ("OMP", "MKL", "OPENBLAS", "NUMBA")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    **{f"{name}_NUM_THREADS": "1" for name in THREADS},
}
# Keys and columns that hold a time, a version, a place or a checksum of a line with times in it.
# Earlier commits have no bytes and no error of adapters.
ASIDE = re.compile(
    r"seconds|per_second|^bytes_|^adapter_|"
    r"^(machine|versions|git_commit|check|share_of_gemm|faults|untrained|workers)$"
)
# Verdicts of earlier commits.
FORMER = {
    "fails": "refuted",
    "undecided": "inconclusive",
    "not testable at this scale": "not tested here",
}
LABELS = ("status", "verdict")  # the only strings of JSON files that count
Digests = dict[str, str | None]
Tables = Mapping[str, Any]


def main() -> int:
    """The exit code: 0 if all cases are equal, or if the control tells all apart."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.evidence")
    parser.add_argument(
        "what", nargs="?", choices=("compare", "record", "control"), default="compare"
    )
    parser.add_argument("file", nargs="?", type=Path, help="of `record`: where the digests go")
    parser.add_argument("--base", default=BASE, help=f"the commit to compare with: {BASE}")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time: 2")
    asked = parser.parse_args()
    if (asked.what == "record") != (asked.file is not None):
        parser.error("name a file after `record`, and only there")
    if asked.what == "record":
        (found,) = record([ROOT], asked.only, asked.jobs)
        asked.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} cases are in {asked.file}")
        return 0
    if asked.what == "control":
        return control(asked.only, asked.jobs)
    with worktree(asked.base) as base:
        before, after = record([base, ROOT], asked.only, asked.jobs)
    lines = compared(before, after)
    print_table(lines)
    equal = sum(different(line) == 0 for line in lines.values())
    print(f"{equal} of {len(lines)} equal")
    return int(equal < len(lines))


def control(names: Iterable[str], jobs: int) -> int:
    """The same tree twice must be equal; step sizes that differ by 1e-6 must show in every part."""
    names = list(names)
    first, again = record([ROOT, ROOT], names, jobs)
    (other,) = record([ROOT], [name for name in names if has_steps(CASES[name])], jobs, stepped)
    same, moved = compared(first, again), compared(first, other)
    print_table(same)
    print("\nwith step sizes that are larger by 1e-6:\n")
    print_table(moved)
    steady = sum(different(line) == 0 for line in same.values())
    seen = sum("equal" not in line.values() for line in moved.values())
    print(f"{steady} of {len(same)} repeat; {seen} of {len(moved)} differ in every part")
    return int(steady < len(same) or seen < len(moved))


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """That commit's files, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="evidence-") as folder:
        place = Path(folder, "base")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def stepped(key: str, value: Any) -> Any:
    """Step sizes are larger by 1e-6 of themselves; anything else is as it was."""
    if isinstance(value, Mapping):
        return {name: stepped(name, one) for name, one in value.items()}
    if isinstance(value, list):
        return [stepped(key, one) for one in value]
    return value * (1 + 1e-6) if key in ("lr", "lrs") else value


def has_steps(case: Case) -> bool:
    return any(stepped("", step.tables) != step.tables for step in case.steps)


def record(
    trees: list[Path],
    names: Iterable[str],
    jobs: int = 2,
    change: Callable[[str, Any], Any] = lambda _, value: value,
) -> list[dict[str, Digests]]:
    """The digests of each case by each tree's code; all trees run a case before the next one."""
    names = list(names)
    pairs = [(name, tree) for name in names for tree in trees]
    with ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(lambda pair: digests(CASES[pair[0]], pair[1], change), pairs))
    found: list[dict[str, Digests]] = [{} for _ in trees]
    for place, (name, _) in enumerate(pairs):
        found[place % len(trees)][name] = done[place]
    return found


def digests(
    case: Case, tree: Path, change: Callable[[str, Any], Any] = lambda _, value: value
) -> Digests:
    """Run the case with that tree's code, and digest what it wrote."""
    with tempfile.TemporaryDirectory(prefix="case-") as folder:
        place = Path(folder)
        for name, text in case.files.items():
            (place / name).write_text(text)
        for step in case.steps:
            words = [step.command, *step.options]
            if step.tables:
                file = place / f"{step.name}.toml"
                file.write_text(tomli_w.dumps(change("", step.tables)))
                words.insert(1, file.name)
            said = fedmuon(tree, place, *words, "--out", step.name)
            if said.returncode:
                return dict.fromkeys(PARTS, f"failed: {step.name}: {said.stdout[-2000:]}")
        folders = [place / step.name for step in case.steps]
        return read(place, folders, case.varying)


def fedmuon(tree: Path, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedmuon", *words], cwd=place, env=environment(tree),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
    )  # fmt: skip


def environment(tree: Path) -> dict[str, str]:
    """Where `import fedmuon` finds that tree, and one thread computes."""
    return os.environ | QUIET | {"PYTHONPATH": str(tree)}


def read(place: Path, folders: list[Path], varying: tuple[str, ...] = ()) -> Digests:
    """The three digests of the files below these folders, which lie in `place`."""
    hashes = {part: hashlib.sha256() for part in PARTS}
    used = set()
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
    for file in files:
        part = part_of(file)
        if part is None or file.name in varying:
            continue
        used.add(part)
        hashes[part].update(f"\n{file.relative_to(place).as_posix()}\n".encode())
        hashes[part].update(content(file, varying))
    return {part: hashes[part].hexdigest() if part in used else None for part in PARTS}


def part_of(file: Path) -> str | None:
    """Which digest a file belongs to; tables/ has the same numbers again, rounded, with words."""
    if file.suffix == ".safetensors":
        return "model"
    if file.name == "rounds.jsonl":
        return "rounds"
    readable = file.suffix in (".json", ".jsonl", ".csv", ".npz", ".npy")
    return "numbers" if readable and file.parent.name not in ("tables", "logs") else None


def content(file: Path, varying: tuple[str, ...]) -> bytes:
    if file.suffix == ".safetensors":
        return tensors(load_file(file))
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            return tensors(dict(arrays))
    if file.suffix == ".npy":
        return tensors({"": np.load(file)})
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
        kept = [{k: v for k, v in row.items() if not aside(k, varying)} for row in rows]
    elif file.suffix == ".jsonl":
        kept = [numbers(json.loads(line), varying) for line in text.splitlines()]
    else:
        kept = numbers(json.loads(text), varying)
    return json.dumps(kept, sort_keys=True).encode()


def tensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    parts = []
    for name, value in sorted(arrays.items()):
        parts += [f"{name} {value.dtype} {value.shape}\n".encode(), value.tobytes()]
    return b"".join(parts)


def aside(key: str, varying: tuple[str, ...]) -> bool:
    return key in varying or ASIDE.search(key) is not None


def numbers(value: Any, varying: tuple[str, ...], key: str = "") -> Any:
    """The numbers, truth values and labels of a JSON value, with their keys."""
    if isinstance(value, dict):
        kept = {k: numbers(v, varying, k) for k, v in value.items() if not aside(k, varying)}
        return {FORMER.get(k, k): v for k, v in kept.items() if v not in ("", [], {})}
    if isinstance(value, list):
        return [one for one in (numbers(v, varying, key) for v in value) if one not in ("", [], {})]
    if isinstance(value, str):
        return FORMER.get(value, value) if key in LABELS else ""
    return value


def compared(
    before: Mapping[str, Digests], after: Mapping[str, Digests]
) -> dict[str, dict[str, str]]:
    """By case and part: equal, different, failed, or a dash if neither has it."""
    return {
        name: {part: verdict(before[name][part], digest[part]) for part in PARTS}
        for name, digest in after.items()
    }


def verdict(before: str | None, after: str | None) -> str:
    failed = [one for one in (before, after) if one and one.startswith("failed")]
    if failed:
        return failed[0]
    if before is None and after is None:
        return "-"
    return "equal" if before == after else "different"


def different(line: Mapping[str, str]) -> int:
    """How many parts of a case are not equal; a case without any part is not equal either."""
    cells = set(line.values())
    return len(cells - {"equal", "-"}) + (cells == {"-"})


def print_table(lines: Mapping[str, Mapping[str, str]]) -> None:
    """The table, and below it the last words of commands that failed."""
    row = "{:<18} | {:<9} | {:<9} | {:<9}"
    print(row.format("name", *PARTS))
    print("-|-".join("-" * width for width in (18, 9, 9, 9)))
    for name, line in lines.items():
        print(row.format(name, *(cell.partition(":")[0] for cell in line.values())))
    for name, line in lines.items():
        said = next((cell for cell in line.values() if cell.startswith("failed")), None)
        if said:
            print(f"\n{name} {said}")


if __name__ == "__main__":
    raise SystemExit(main())
