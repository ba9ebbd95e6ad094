"""The property tests with other examples each time, for as long as told.

    python -m tests.fuzz.properties [seconds] [seed]

Each pass is a process of pytest with the profile `explore`, another seed and another order. What
fails is printed and kept in tests/found, from where `make test` replays it (helpers/replay.py).
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLUGIN = "explored"  # the module beside this one, which pytest loads
TIMES = 20  # as many examples as the ordinary suite tries


def explore(seconds: float, seed: int) -> int:
    """How many property tests failed; passes begin until the time is up, and then end at once."""
    end, failures, seeds = time.monotonic() + seconds, 0, random.Random(seed)
    while (left := end - time.monotonic()) > 0:
        failures += _explored(left, seeds.getrandbits(32))
    return failures


def _explored(seconds: float, seed: int) -> int:
    """The failures of one pass; what it says is printed if there are any."""
    print(f"properties: a pass with --hypothesis-seed={seed}", flush=True)
    process = subprocess.Popen(
        [*command(seed), "--hypothesis-profile=explore", "--timeout=0", "tests"],
        cwd=ROOT, env=environment(TIMES), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        said, _ = process.communicate()
    failed = [line for line in said.splitlines() if line.startswith("explored: FAILED")]
    broken = not failed and process.returncode not in (0, 5, -signal.SIGTERM)
    if failed or broken:
        print(said, flush=True)
    return len(failed) + broken


def command(seed: int) -> list[str]:
    """A pytest of the property tests alone, with the examples and the order of a seed."""
    plugins = ["-p", PLUGIN, "-p", "no:xdist", "-p", "no:cacheprovider"]
    alone = ["-m", "hypothesis", "--tb=short", "-q"]
    return [sys.executable, "-m", "pytest", *plugins, *alone, f"--hypothesis-seed={seed}"]


def environment(times: int) -> dict[str, str]:
    """Its environment: where the plugin lies, and how many times as many examples it tries."""
    places = os.pathsep.join(
        str(place) for place in (HERE, HERE.parent / "helpers", HERE.parent, ROOT)
    )
    return {**os.environ, "PYTHONPATH": places, "EXPLORED_TIMES": str(times)}


if __name__ == "__main__":
    given = [float(one) for one in sys.argv[1:]]
    seconds, seed = (given + [60.0, random.SystemRandom().getrandbits(32)][len(given) :])[:2]
    sys.exit(min(explore(seconds, int(seed)), 1))
