"""`python -m tests.fuzz`: draw cases until the time is up, and tell how they ended.

Exit code 1 if any ended as none may; these are in tests/fuzz/found/ then, and fail `make test`
until they are mended.
"""

import argparse
import secrets
import sys
import time

from tests.fuzz import campaign, properties


def main() -> int:
    """Parse, run, print the table; 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to draw cases")
    parser.add_argument("--cases", type=int, default=10_000, help="how many, at most")
    parser.add_argument("--seed", type=int, default=None, help="of everything; else at random")
    parser.add_argument("--only", choices=sorted(campaign.KINDS), action="append")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    seed = secrets.randbelow(2**32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    end = time.monotonic() + chosen.seconds
    kinds = chosen.only or list(campaign.KINDS)
    found = campaign.campaign(kinds, chosen.cases, end, seed, chosen.workers)
    print(campaign.table(found))
    left = end - time.monotonic()
    failed = 0 if chosen.only or left < 1 else properties.explore(left, seed)
    return int(bool(failed) or any(one.outcome.end == "other" for one in found))


if __name__ == "__main__":
    sys.exit(main())
