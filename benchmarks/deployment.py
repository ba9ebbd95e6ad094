"""Measure the cost of a deployment round for each kind of process (on Linux).

    python -m benchmarks.deployment [--rounds 3]

The benchmark runs `fedmuon deploy-demo` with 3 clients, 2 of them per round, and samples its
processes while they run. Flower starts a process for each message. Each row states the number of
processes of a kind and the CPU time of one of them.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks import page
from benchmarks.page import Row

LOOK = 0.05  # seconds between samples
KINDS = {  # part of the command line -> purpose of the process
    "superlink_auth.py superlink": "SuperLink: stores the messages",
    "flower-supernode": "SuperNode, one per client: polls the SuperLink for messages",
    "superlink_auth.py superexec": "SuperExec, one per node and for the server: starts processes",
    "flwr-serverapp": "the server: loads torch and averages",
    "flwr-clientapp": "one message to one client: its identity, or a round of training",
    "flwr run": "submits the app, and streams the server's output",
    "fedmuon": "the `fedmuon` command",
}


def looked_at(command: list[str]) -> dict[str, dict[int, float]]:
    """Run a command, and return the last observed CPU seconds by kind and process id."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        while child.poll() is None:
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    told = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    fields = (process / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # the process has ended
                    continue
                if kind := next((kind for kind in KINDS if kind in told), None):
                    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                    found[kind][int(process.name)] = spent
            time.sleep(LOOK)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return found


def measured(rounds: int) -> Iterator[Row]:
    """Return the total time, and the CPU time of each kind of process."""
    with tempfile.TemporaryDirectory() as folder:
        given = ["--out", f"{folder}/run", "--set", f"federation.rounds={rounds}"]
        start = time.perf_counter()
        found = looked_at([sys.executable, "-m", "fedmuon", "deploy-demo", *given])
        yield Row(f"{rounds} rounds of 2 of 3 clients", time.perf_counter() - start)
    for kind, why in KINDS.items():
        if times := list(found[kind].values()):
            note = f"{len(times)} processes, {statistics.median(times):.1f} s each: {why}"
            yield Row(f"  all {kind}", sum(times), note=note)


def main() -> None:
    """Parse the arguments, run the benchmark, and print the rows."""
    parser = page.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    page.tell(measured(asked.rounds), asked.rows)


if __name__ == "__main__":
    main()
