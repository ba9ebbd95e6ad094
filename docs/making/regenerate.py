"""`make results`: run every shipped suite at full size, one after the other, cheapest first.

python -m docs.making.regenerate --list               list stored results with their seconds
python -m docs.making.regenerate --only dp-bias A1    run only these suites
python -m docs.making.regenerate --budget 600         stop after this number of seconds
python -m docs.making.regenerate --jobs 16            run cells of all suites, 16 at a time

Computed cells are saved in runs/results/SOURCES/SUITE, and the next call resumes from them. SOURCES
is a digest of the source files that compute results. So a result never mixes two versions of these
files and never uses cells of another version. A suite is done if its stored result has the current
digest.
"""

import argparse
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

from docs.making import results
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.data import readers
from fedmuon.experiments.cli.output import console
from fedmuon.experiments.cli.show import Progress
from fedmuon.experiments.studies.find import OF_RUNS, find
from fedmuon.experiments.suites import contents, suite
from fedmuon.experiments.suites.suite import Cell, Opened, Work, execute
from fedmuon.experiments.suites.workers import Workers
from fedmuon.runs.directory import Record

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path("runs", "results")
COMPUTE = ("fedmuon", "analysis/theory", "experiments/stability", "experiments/suites",
           "experiments/studies")  # fmt: skip
TELL = "_findings.py"  # suffix of study files that only describe computed rows
FASHION = "fashion-mnist"
TIMED = ("batch", "ns-degree", "ns-steps", "wall-clock")  # suites that measure time and run alone


@cache
def state_of_sources(root: Path = ROOT) -> str:
    """Return a digest of all source files that affect the results of suites."""
    every = (file for place in COMPUTE for file in (root / place).rglob("*.*"))
    mine = sorted(
        one for one in every if one.suffix in (".py", ".toml") and not one.name.endswith(TELL)
    )
    return files.digest(b"".join(str(one.relative_to(root)).encode() + one.read_bytes()
                                 for one in mine))[:12]  # fmt: skip


def commit(root: Path = ROOT) -> str | None:
    """Return the last commit that changed the code of the suites.

    If the commit is unknown, the result is None.
    """
    command = ["git", "-C", str(root), "log", "-1", "--format=%H", "--", *COMPUTE]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def data_of(name: str) -> str | None:
    """Return the data set on which to run a suite.

    A suite that uses Fashion-MNIST, or that does not fix its images, gets Fashion-MNIST if it is
    installed, otherwise the bundled digits. A suite that names another data set uses this data set.
    None means that the function `find` chooses the data set.
    """
    content = contents.read(name)
    own, of_runs = content.get("data"), content.get("kind", "stability") in OF_RUNS
    if own == FASHION or (own is None and of_runs):
        return FASHION if readers.found_folder(FASHION) else contents.DATA
    return None if isinstance(own, list) else own  # `find` takes the first available data set


def work_of(name: str, scale: str = "full") -> Work:
    """Return the cells of a suite, with its data set, as one piece of work."""
    return find(name, data_of(name), scale, {})


def place_of(name: str, runs: Path = RUNS) -> Path:
    """Return the folder in which a suite runs."""
    return runs / state_of_sources() / name


def state(name: str, runs: Path = RUNS, into: Path = results.FOLDER) -> str:
    """Return the state of a suite's stored result as text.

    The text starts with `kept`, `kept of other sources` or `not kept`. Unless the result is
    current, the text also says how many cells of the suite are already computed.
    """
    held = results.read(name, into)
    if held and held.get("sources") == state_of_sources():
        return "kept" if held["scale"] == "full" else f"kept at scale {held['scale']}"
    begun = len(list((place_of(name, runs) / Work.place).glob("*.json")))
    parts = ["kept of other sources" if held else "", f"{begun} cells computed" if begun else ""]
    return ", ".join(filter(None, parts)) or "not kept"


def cost(name: str, into: Path = results.FOLDER) -> float:
    """Return the seconds of the stored result of a suite, or infinity if there is none."""
    held = results.read(name, into)
    return held["seconds"] if held else math.inf


def listed(names: Sequence[str], runs: Path = RUNS, into: Path = results.FOLDER) -> Iterator[str]:
    """Yield one line of text per suite.

    The line contains the state and the run time of the stored result.
    """
    for name in names:
        took = cost(name, into)
        known = f"{took:9.0f} s" if took < math.inf else f"{'unknown':>11}"
        yield f"{name:24}{known}  {state(name, runs, into)}"


def regenerate(work: Work, runs: Path = RUNS, into: Path = results.FOLDER) -> Path:
    """Compute the missing cells of a suite, and store its result."""
    folder = place_of(work.request.stem, runs)
    begun = (folder / "suite.lock").exists()
    with Progress(console, work.counted, lines=True) as progress:
        execute(work, folder, begun, on_round_end=progress.on_round_end, on_start=progress.on_start)
    return results.keep(folder, into, {"sources": state_of_sources(), "commit": commit()})


@dataclass(frozen=True)
class Part:
    """A cell of a suite. Its cost is a share of the seconds that the whole suite takes."""

    cell: Cell
    suite: str
    cost: float

    @property
    def name(self) -> str:
        """The name of the suite and the name of the cell."""
        return f"{self.suite}/{self.cell.name}"

    @property
    def size(self) -> int:
        """Weight of the cell among all cells."""
        return round(self.cost)

    def compute(self) -> Record:
        """Compute the cell. Return its record and the seconds that the computation took."""
        return suite.timed(self.cell)


def together(
    names: Sequence[str], jobs: int, runs: Path = RUNS, into: Path = results.FOLDER
) -> None:
    """Compute the missing cells of several suites in `jobs` processes.

    The longest cells start first.

    Each cell is saved in the folder of its suite as soon as it is computed, so `regenerate` only
    has to write the tables. A suite without a stored result is assumed to take as long as the
    longest stored suite. Suites whose data are not installed are left out.
    """
    with Workers(jobs) as workers, ExitStack() as held:
        suites: dict[str, Opened] = {}
        for name in names:
            folder = place_of(name, runs)
            begun = (folder / "suite.lock").exists()
            with suppress(InputError):  # `one_by_one` reports the reason
                suites[name] = held.enter_context(suite.opened(work_of(name), folder, begun))
        longest = max([one for name in suites if (one := cost(name, into)) < math.inf], default=1.0)
        parts = []
        for name, one in suites.items():
            seconds = min(cost(name, into), longest) / sum(map(suite.cost, one.cells))
            parts += [Part(cell, name, seconds * suite.cost(cell)) for cell in one.pending]
        with Progress(console, "seconds", lines=True) as progress:
            done = 0.0
            progress.on_start(0, round(sum(part.cost for part in parts)))
            for part, record in workers(parts):
                suites[part.suite].save(part.cell, record)
                done += part.cost
                progress.on_round_end({"done": round(done), "cell": part.name})


def stop(*_: object) -> NoReturn:
    """Stop the program as Ctrl-C does."""
    raise KeyboardInterrupt


def main(words: Sequence[str] | None = None) -> int:
    """Run and store the requested suites. Return 1 if a suite was rejected, 130 if stopped."""
    parser = arguments()
    asked = parser.parse_args(words)
    if asked.jobs < 1:
        parser.error(
            f"--jobs is {asked.jobs}, but at least one job is needed: use --jobs 1 or more"
        )
    names = sorted(asked.only or contents.shipped(), key=lambda name: (cost(name), name))
    if asked.list:
        print(*listed(names), sep="\n")
        return 0
    if asked.budget:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, asked.budget)
    try:
        if asked.jobs > 1:
            lacking = [name for name in names if asked.again or state(name) != "kept"]
            together([name for name in lacking if name not in TIMED], asked.jobs)
        return max([one_by_one(name, asked.again) for name in names], default=0)
    except KeyboardInterrupt:
        print("Stopped. All finished cells are saved. Run the same command again to continue.")
        return 130
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def one_by_one(name: str, again: bool) -> int:
    """Print the state of a suite, and run it unless its result is current.

    Return 1 if the suite was rejected.
    """
    (line,) = listed([name])
    print(line, flush=True)
    if state(name) == "kept" and not again:
        return 0
    begun = time.perf_counter()
    try:
        print(f"{regenerate(work_of(name))} in {time.perf_counter() - begun:.0f} s", flush=True)
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="make results", description="Run suites and store their results."
    )
    parser.add_argument("--only", nargs="+", choices=sorted(contents.shipped()), metavar="SUITE")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="stop after this many seconds"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of cells that run in parallel")
    parser.add_argument(
        "--list", action="store_true", help="list stored results with their seconds"
    )
    parser.add_argument(
        "--again", action="store_true", help="also rerun suites whose results are current"
    )
    return parser


if __name__ == "__main__":
    from docs.making import regenerate as itself  # whose cells other processes can import

    sys.exit(itself.main())
