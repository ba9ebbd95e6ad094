"""Run every benchmark in turn, each in its own process, and write one page of results.

    python -m benchmarks [--only PART ...] [--quick] [--out bench]
    python -m benchmarks --before COMMIT [--pairs 3] [--only PART ...]

The page shows every ratio with its aim, both times, and the machine. Compare only ratios of the
same run. The page is printed at the end, and written as page.txt and page.html. Until then, stderr
shows the progress. If a part fails, its row states the reason. `python -m benchmarks.plan` and
`python -m benchmarks.language_models` are not included; run them separately.

`--before` runs each part in turn in the source tree of an earlier commit and in this tree, and
prints our seconds in both. A ratio below 1 means that the part has become slower.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks import page
from benchmarks.page import Row

QUICK = "A quick look at small sizes: no figure is held to an aim."
ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 600.0  # seconds after which a part is stopped


@dataclass(frozen=True)
class Part:
    """A benchmark module with its arguments, for a full run and for a quick run."""

    about: str
    given: str = ""
    quick: str = ""
    module: str = ""


PARTS = {
    "rounds": Part("FedMuon rounds, with pfl-research, BlazeFL and Flower",
                   "--pairs 2", "--pairs 1 --skip-flower"),
    "ray": Part("rounds on Ray, many clients, messages",
                "--pairs 1", "--pairs 1 --crowd 1000", "benchmarks.engine_overhead"),
    "networks": Part("local training of a CNN", "--pairs 1", "--pairs 1 --rounds 1 --skip-flower"),
    "published": Part("published set-ups of simulators, and a transformer", "", "--small"),
    "suites": Part("suites, compared with an older commit, and on Ray workers",
                   "--scaling --before --suites A1 --seeds 1",
                   "--scaling --before --seeds 1 --train 1000", "benchmarks.laboratory"),
    "optimizer": Part("an optimizer step, compared with torch.optim.Muon",
                      "--shapes 12x768x768 48x256x256 220x784x10 1x2048x2048 --budget 6",
                      "--shapes 220x784x10 --budget 1 --side 512"),
    "randomized": Part("randomized polar factors", "--sides 1024 2048 --exact 512 --budget 8",
                       "--sides 512 --exact 256 --rank 62 --budget 2"),
    "privacy": Part("clipped gradients, compared with Opacus", "--pairs 1 --lot 256 --calls 3",
                    "--pairs 1 --lot 64 --calls 3 --models mlp"),
    "many": Part("ls, compare, report and watch with many run folders", "--runs 2000",
                 "--runs 50", "benchmarks.many_runs"),
    "deployment": Part("costs of a deployment round", "--rounds 2", "--rounds 1"),
}  # fmt: skip


def measured(name: str, quick: bool, file: Path, tree: Path = ROOT) -> list[Row]:
    """Return the rows of a part in a source tree. If it failed, one more row states the reason."""
    part = PARTS[name]
    given = (part.quick if quick else part.given).split()
    script = [sys.executable, "-m", part.module or f"benchmarks.{name}", *given]
    last: deque[str] = deque(maxlen=2)
    with subprocess.Popen(
        [*script, "--rows", str(file)],
        stdout=2,  # send it to stderr, because stdout is reserved for the page
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=os.name == "posix",  # so that it can be stopped with all its children
        cwd=None if tree == ROOT else tree,
        env=os.environ if tree == ROOT else os.environ | {"PYTHONPATH": str(tree)},
    ) as child:
        assert child.stderr
        reader = threading.Thread(target=_passed_on, args=(child.stderr, last), daemon=True)
        reader.start()
        try:
            code = child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = f"more than {PATIENCE:.0f} s"
        finally:
            _end(child)
        reader.join(5)
    found = [one.unjudged() if quick else one for one in page.read(file)]
    if not code and found:
        return found
    why = f"ended with {code}: {' / '.join(last) or 'it said nothing'}"
    return [*found, Row(part.about, note=why, failed=True)]


def beside(commit: str, name: str, pairs: int, quick: bool, folder: Path) -> list[Row]:
    """Compare our seconds in this tree with our seconds in the tree of an earlier commit.

    The figures are medians over pairs.
    """
    old = folder / "before"
    found: dict[str, dict[Path, list[float]]] = {}
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(old), commit], check=True)
    try:
        for turn in range(2 * pairs):
            tree = (old, ROOT)[turn % 2]
            for row in measured(name, quick, folder / f"{name}{turn}.jsonl", tree):
                if row.failed:
                    return [row]
                if row.ours is not None and row.unit == "s":
                    found.setdefault(row.figure, {old: [], ROOT: []})[tree].append(row.ours)
    finally:
        subprocess.run([*git, "remove", "--force", str(old)], check=True)
    rows = []
    for figure, times in found.items():
        if len(times[old]) == len(times[ROOT]):
            each = [past / now for past, now in zip(times[old], times[ROOT], strict=True)]
            spread = f"{min(each):.2f} to {max(each):.2f} in {pairs} pairs"
            middle = {tree: statistics.median(times[tree]) for tree in times}
            ratio = statistics.median(each)
            rows.append(Row(figure, middle[ROOT], middle[old], ratio, 0.97, note=spread))
    return rows


def _passed_on(stream: IO[str], last: deque[str]) -> None:
    """Print the stderr of a part as it comes, and store its last lines for an error note."""
    for line in stream:
        _say(line.rstrip("\n"))
        if line.strip():
            last.append(line.strip())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _end(child: subprocess.Popen[str]) -> None:
    """Stop a part that is still running, with all its children."""
    if child.poll() is None:
        if os.name == "posix":
            os.killpg(child.pid, signal.SIGTERM)
        child.terminate()


def main() -> int:
    """Parse the arguments, run the parts, and write the page. Return 1 if a part failed."""
    about = "\n".join(["parts:", *(f"  {name:12} {part.about}" for name, part in PARTS.items())])
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS),
                        help="run only these parts; all by default")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="check that it works, at small sizes; no aim is judged")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("bench"))
    parser.add_argument("--before", metavar="COMMIT", help="compare with this earlier commit")
    parser.add_argument(
        "--pairs", type=int, default=3, help="runs of each tree with --before; 3 by default"
    )
    asked = parser.parse_args()
    load, begun, parts, written = page.load(), time.perf_counter(), {}, ""
    with tempfile.TemporaryDirectory(prefix="fedmuon-bench-") as folder:
        for turn, name in enumerate(asked.only, 1):
            start = time.perf_counter()
            _say(f"{turn}/{len(asked.only)} {name}: {PARTS[name].about}")
            if asked.before:
                rows = beside(asked.before, name, asked.pairs, asked.quick, Path(folder))
            else:
                rows = measured(name, asked.quick, Path(folder) / f"{name}.jsonl")
            now = time.perf_counter()
            parts[f"{name}: {PARTS[name].about} ({now - start:.0f} s)"] = rows
            where = page.place((load, page.load()), now - begun) + [QUICK] * asked.quick
            written = page.write(asked.out, parts, where)
    print(f"{written}\nThe page is {asked.out / 'page.txt'} and {asked.out / 'page.html'}")
    return int(any(row.failed for rows in parts.values() for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
