"""Measure `ls`, `compare`, `report` and `watch` with thousands of run folders.

    python -m benchmarks.many_runs [--runs 2000]

One real run of 50 rounds is copied. Each command runs without an index of runs, because
FEDMUON_CACHE names a folder that cannot be created ("without"), with no index yet ("cold"), and
with the index of an earlier command ("warm"). The figures are seconds of CPU time of the whole
command, because other load on the machine disturbs it least. The peer of a figure is the time
without an index. A request of the page of `watch` needs no index. Its peer is the first request,
which reads every folder.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import page
from benchmarks.page import Row, say
from fedmuon.experiments.inspect.status import SETTLED
from fedmuon.experiments.inspect.watch import Server

CONFIG = ("data.name=synthetic", "data.train=200", "data.test=100", "federation.rounds=50",
          "engine.device=cpu")  # fmt: skip
COMMANDS = ("ls", "compare", "report")


def cpu_seconds_of(*words: str, cache: str = os.devnull) -> float:
    """Run a command, and return its CPU seconds. Without a cache folder, it cannot use an index."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "fedmuon", *words],
        env={**os.environ, "FEDMUON_CACHE": cache, "COLUMNS": "120"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_of_polls(folder: Path, times: int = 10) -> list[float]:
    """Return the CPU seconds of successive requests of the page of `watch`."""
    found = []
    with Server(folder) as server:
        target = f"/{server.url.rstrip('/').rpartition('/')[2]}/runs"
        for _ in range(times):
            begun = time.process_time()
            status, *_ = server.answer(["127.0.0.1"], target)
            assert status == 200
            found.append(time.process_time() - begun)
    return found


def rows(count: int) -> Iterator[Row]:
    """Copy a run, and yield a row for each command."""
    with tempfile.TemporaryDirectory() as name:
        place, runs = Path(name), Path(name) / "runs"
        cpu_seconds_of("run", "--out", str(place / "run"), *(f"--set={one}" for one in CONFIG))
        for number in range(count):
            shutil.copytree(place / "run", runs / f"run-{number:05}")
        time.sleep(2 * SETTLED / 1e9)  # the index stores no run that has just changed
        say(f"{count} copies of a run")
        for command in COMMANDS:
            cache = str(place / f"cache-{command}")
            without = cpu_seconds_of(command, str(runs))
            cold = cpu_seconds_of(command, str(runs), cache=cache)
            warm = cpu_seconds_of(command, str(runs), cache=cache)
            for what, seconds in {"cold": cold, "warm": warm}.items():
                figure = f"{command}, {count} runs, {what} index"
                yield Row(figure, seconds, without, without / seconds)
        first, *later = seconds_of_polls(runs)
        poll = sorted(later)[len(later) // 2]
        yield Row(f"a request of watch, {count} runs", poll, first, first / poll)


def main() -> None:
    """Parse the number of runs, and print the rows."""
    parser = page.parser(__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    asked = parser.parse_args()
    page.tell(rows(asked.runs), asked.rows)


if __name__ == "__main__":
    main()
