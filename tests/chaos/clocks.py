"""Clocks that are wrong by hours, now ahead, now behind: the results know nothing of it."""

import json
import math
from functools import partial
from pathlib import Path

from .jobs import Job
from .laboratory import OTHER, Laboratory, Trial, Verdict

HOUR = 3600.0
TRIALS = 5
LONGEST = 600.0  # seconds; no job takes as long when its steady clock is sound


def scenario(lab: Laboratory) -> None:
    """The wall's clock alone, then all of them."""
    for job in lab.jobs():
        lab.reference(job)  # before it is asked for by several threads
        lab.side_by_side(partial(_misled, lab, job, number) for number in range(TRIALS))


def _misled(lab: Laboratory, job: Job, number: int) -> None:
    draws = lab.draws(f"clock {job.name} {number}")
    wall = [draws.uniform(-30, 30) * HOUR for _ in range(17)]
    steady = [draws.uniform(-2, 2) * HOUR for _ in range(13)] if number % 2 else [0.0]
    how = f"trial {number}, {'all clocks' if number % 2 else 'the wall clock'}"
    with lab.trial(f"clocks: {job.name}", how) as trial:
        clock = {"wall": wall, "steady": steady}
        ended = lab.nursery.run(job.start(trial.out), 120, tamper={"clock": clock})
        said = f"exit code {ended.code}: {ended.err[-1500:]}"
        trial.verdict = trial.compare(job) if ended.code == 0 else (OTHER, said)
        if trial.verdict[0] != OTHER and not number % 2:
            trial.verdict = _sane(trial, trial.verdict)


def _sane(trial: Trial, verdict: Verdict) -> Verdict:
    """Seconds are taken from a clock that does not leap."""
    told = [value for file in trial.out.rglob("*.json*") for value in _seconds(file)]
    wrong = [value for value in told if not (math.isfinite(value) and 0 <= value < LONGEST)]
    return (OTHER, f"seconds: {wrong}") if wrong or not told else verdict


def _seconds(file: Path) -> list[float]:
    """Every number of seconds in a file of JSON objects."""
    if file.suffix not in (".json", ".jsonl"):
        return []
    text = file.read_text()
    records = [json.loads(text)] if file.suffix == ".json" else map(json.loads, text.splitlines())
    return [value for one in records for key, value in one.items() if key.endswith("seconds")]
