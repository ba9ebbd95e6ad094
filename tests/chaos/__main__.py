"""`python -m tests.chaos [--only NAME ...] [--kills 100] [--seed S]`: the table of all trials."""

import argparse
import contextlib
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from . import disturbances, engines, flips, states, writes
from .laboratory import HEAD, Laboratory
from .nursery import nursery

SCENARIOS = {
    "kills": disturbances.kills, "methods": disturbances.methods,
    "writes": writes.scenario, "writers": disturbances.writers,
    "clocks": disturbances.clocks, "flips": flips.scenario, "interrupts": disturbances.interrupts,
    "engines": engines.scenario, "states": states.scenario,
}  # fmt: skip
MOST = 4  # trials side by side; one more than there are processors, as some wait for the disk


def main() -> int:
    """The exit code: 1 if anything ended other than it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--kills", type=int, default=100, help="kill -9, over all engines")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--real", action="store_true", help="no forks: whole processes, slower")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    with contextlib.ExitStack() as ending:
        count = min(MOST, 1 + (os.cpu_count() or 1))
        children = [ending.enter_context(nursery(place, asked.real)) for _ in range(count)]
        lab = Laboratory(place, children, asked.seed, asked.kills)
        print(f"seed {asked.seed}", flush=True)
        try:
            for name in asked.only:
                print(f"\n{name}\n{HEAD}", flush=True)
                start = time.monotonic()
                SCENARIOS[name](lab)
                lab.say()
                print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        except KeyboardInterrupt:
            print(f"\ninterrupted\n{lab.show()}", flush=True)
            raise
    print(f"\nseed {asked.seed}\n{lab.show()}")
    if lab.findings:
        print("\n".join(["", *lab.findings]))
        return 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
