"""Cases at random from one seed, in workers that may crash, and a table of how they ended."""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.fuzz import base, commands, configs, data_files, folders, messages, outcome, reports
from tests.fuzz.calls import load
from tests.fuzz.outcome import ENDS, Case, Outcome
from tests.fuzz.workers import apart, perform_all

KINDS: dict[str, ModuleType] = {
    one.KIND: one for one in (configs, commands, folders, data_files, messages, reports)
}
SHARES = {"configs": 25, "commands": 25, "folders": 20, "files": 15, "messages": 12, "reports": 3}
BATCH = 200  # cases drawn at once


@dataclass(frozen=True)
class Tried:
    case: Case
    outcome: Outcome


def campaign(
    kinds: Sequence[str], cases: int, end: float, seed: int, workers: int, keep: bool = True
) -> list[Tried]:
    """Draw and perform at most so many cases until `end`; findings are printed and saved."""
    tried: list[Tried] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        load()
        apart(lambda: base.make(Path(folder)))
        while len(tried) < cases and time.monotonic() < end:
            count = min(BATCH, cases - len(tried))
            drawn = [draw(kinds, seed, len(tried) + number) for number in range(count)]
            ended = perform_all(drawn, Path(folder), workers, end)
            batch = [Tried(case, one) for case, one in zip(drawn, ended, strict=True) if one]
            tried += batch
            for one in batch:
                if one.outcome.end == "other":  # saved, unless one like it is there
                    file = outcome.save(one.case, one.outcome.why) if keep else None
                    place = f"  [{file.name}]" if file else ""
                    print(f"{one.case['kind']}: {one.outcome.why}{place}")
    return tried


def draw(kinds: Sequence[str], seed: int, number: int) -> Case:
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(kinds, [SHARES[kind] for kind in kinds])[0]
    return KINDS[kind].draw(rng)


def perform(case: Case, place: Path) -> Outcome:
    return KINDS[case["kind"]].perform(case, place)


def table(tried: Sequence[Tried]) -> str:
    counts = Counter((one.case["kind"], one.outcome.end) for one in tried)
    lines = [f"{'kind':<10}{'tried':>8}{'done':>8}{'refused':>9}{'other':>7}"]
    rows = {kind: [counts[kind, end] for end in ENDS] for kind in KINDS}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    for name, row in rows.items():
        if any(row) or name == "all":
            lines.append(f"{name:<10}{sum(row):>8}{row[0]:>8}{row[1]:>9}{row[2]:>7}")
    return "\n".join(lines)
