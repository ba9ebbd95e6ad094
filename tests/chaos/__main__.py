"""`python -m tests.chaos [--only NAME ...] [--kills 100] [--seed S]`: the table of all trials."""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from . import clocks, engines, flips, interrupts, kills, writers, writes
from .laboratory import Laboratory
from .nursery import nursery

SCENARIOS = {
    "kills": kills.scenario,
    "writes": writes.scenario,
    "writers": writers.scenario,
    "clocks": clocks.scenario,
    "flips": flips.scenario,
    "interrupts": interrupts.scenario,
    "engines": engines.scenario,
}


def main() -> int:
    """The exit code: 1 if anything ended other than it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--kills", type=int, default=100, help="kill -9, over all engines")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--real", action="store_true", help="no forks: whole processes, slower")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    with nursery(place, asked.real) as children:
        lab = Laboratory(place, children, asked.seed, asked.kills)
        for name in asked.only:
            start = time.monotonic()
            SCENARIOS[name](lab)
            took = f"{name}: {time.monotonic() - start:.0f} s"
            print(f"{took}\n{lab.show()}", file=sys.stderr, flush=True)
    print(f"seed {asked.seed}\n{lab.show()}")
    if lab.findings:
        print("\n".join(["", *lab.findings]))
        return 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
