"""kill -9, signals, two processes on one folder, and wrong clocks: whole commands, disturbed."""

import itertools
import json
import math
import re
import shlex
import signal
import time
from functools import partial
from pathlib import Path

from . import jobs
from .folders import LISTED, digests, ledger_lines
from .jobs import Job
from .laboratory import OTHER, REFUSED, SAME, Laboratory, Trial, Verdict, improper, without_notes
from .nursery import Child, Ended

# kill -9 at random moments of every job that runs in one process; then it is resumed

SHARES = {
    "run": 25, "private run": 15, "repeatable run": 12, "census": 16, "suite: training": 10,
    "suite: stability": 6, "suite: study": 6,
}  # fmt: skip
METHOD_SHARE = 20  # of 100 kills, for each of the jobs of `of_methods`
AGAIN = 0.3  # how often a resumed job is killed once more


def kills(lab: Laboratory) -> None:
    """Of 100 kills 90 are here; the other 10 are those of `engines`."""
    for job in lab.jobs():
        count = max(1, round(lab.kills * SHARES[job.name] / 100))
        trials = (partial(_killed, lab, job, number, count) for number in range(count))
        lab.side_by_side(job, trials)


def methods(lab: Laboratory) -> None:
    """Of 100 kills, 20 are of each method with late replies, votes or without a server."""
    for job in jobs.of_methods():
        count = max(1, round(lab.kills * METHOD_SHARE / 100))
        trials = (partial(_killed, lab, job, number, count) for number in range(count))
        lab.side_by_side(job, trials)


def _killed(lab: Laboratory, job: Job, number: int, count: int) -> None:
    """In one of `count` equal parts of the job's time, or a bit beyond its end."""
    draws = lab.draws(f"kill {job.name} {number}")
    moment = 1.1 * (number + draws.random()) / count * lab.reference(job).seconds
    with lab.trial(f"kill -9: {job.name}", f"killed after {moment:.4f} s") as trial:
        trial.kill_after(job.start(trial.out), moment)
        while draws.random() < AGAIN:
            again = draws.random() * lab.reference(job).seconds
            trial.kill_after(job.resume(trial.out), again)
        outcome, why = trial.go_on(job)  # a refusal would be a lost run
        trial.verdict = (OTHER, f"lost: {why}") if outcome == REFUSED else (outcome, why)


# Ctrl-C and SIGTERM at random moments: one sentence names the command to resume, which works

INTERRUPTS = 6  # of each signal and job
AFRESH = "run the command again"  # which these jobs say before they write anything
COMMAND = re.compile(r"fedmuon ((?:run|stability|suite|deploy-demo) .*?--resume)\b")


def interrupts(lab: Laboratory) -> None:
    for job in lab.jobs():
        every = itertools.product((signal.SIGINT, signal.SIGTERM), range(INTERRUPTS))
        lab.side_by_side(job, (partial(_tried, lab, job, *one) for one in every))


def _tried(lab: Laboratory, job: Job, sign: signal.Signals, number: int) -> None:
    draws = lab.draws(f"interrupt {job.name} {sign.name} {number}")
    moment = (number + draws.random()) / INTERRUPTS * lab.reference(job).seconds
    with lab.trial(f"interrupt: {job.name}", f"{sign.name} after {moment:.4f} s") as trial:
        trial.verdict = interrupted(trial, job, sign, moment)


def interrupted(
    trial: Trial, job: Job, sign: signal.Signals, moment: float, real: bool = False
) -> Verdict:
    nursery = trial.laboratory.nursery
    child = nursery.start(job.start(trial.out), real=real)
    time.sleep(moment)
    child.send(sign)
    ended = child.wait()
    if ended.code == 0:  # it was done
        return trial.compare(job)
    if ended.code == -sign and not without_notes(
        ended.err
    ):  # before its first line or behind its last one
        return trial.go_on(job)
    if ended.code != 128 + sign:
        return OTHER, f"exit code {ended.code}: {ended.err[-1500:]}"
    said = without_notes(ended.err)
    if not said.startswith("fedmuon: ") or len(said.splitlines()) != 1:
        return OTHER, f"not one sentence: {said[-1500:]}"
    if AFRESH in said:  # then nothing may be there, and the job can begin anew
        if held := set(digests(trial.out)) - {LISTED}:
            return OTHER, f"it asks for the command again, but there are {sorted(held)}"
        again = nursery.run(job.start(trial.out), 240, real=real)
        return (OTHER, again.err[-800:]) if again.code else trial.compare(job)
    if not (found := COMMAND.search(said)):
        return OTHER, f"no command to go on: {said[-1500:]}"
    again = nursery.run(shlex.split(found[1]), 240, real=real)
    if again.code:
        return OTHER, f"{found[0]} fails with {again.code}: {again.err[-800:]}"
    outcome, why = trial.compare(job)
    return (outcome, why) if outcome == SAME else (OTHER, f"after {found[0]}: {why}")


# Two processes on one folder: one runs, the other is rejected and told who holds the folder

STARTS = ((0.0, False), (0.5, True))  # share of the first one's time, whether the second resumes
HOLDER = re.compile(r"process (\d+)")


def writers(lab: Laboratory) -> None:
    """All pairs, the second one now as a new run, now as one that goes on."""
    for first, second in itertools.product(lab.jobs(), repeat=2):
        for gap, resumed in STARTS:
            how = f"{second.name}{' --resume' if resumed else ''} after {gap} of {first.name}"
            with lab.trial("two writers", how) as trial:
                trial.verdict = pair(trial, first, second, gap, resumed)


def pair(trial: Trial, first: Job, second: Job, gap: float, resumed: bool) -> Verdict:
    """The second one starts after that share of the first one's time."""
    lab = trial.laboratory
    children = [lab.nursery.start(first.start(trial.out))]
    time.sleep(gap * lab.reference(first).seconds)
    line = [*second.start(trial.out), *(["--resume"] if resumed else [])]
    children.append(lab.nursery.start(line))
    ends = [child.wait() for child in children]
    done = [number for number, ended in enumerate(ends) if ended.code == 0]
    if len(done) == 2 and resumed and second.is_in(first):
        return trial.compare(first)  # one after the other: the second found it finished
    if len(done) != 1:
        return OTHER, f"{len(done)} of two went on: {ends}"
    winner = (first, second)[done[0]]
    why = _refusal(ends[1 - done[0]], children[done[0]])
    if why:
        return OTHER, why
    rounds = [json.loads(line).get("round") for line in ledger_lines(trial.out)]
    if len(rounds) != len(set(rounds)):
        return OTHER, f"the ledger has rounds {rounds}"
    return trial.compare(winner)


def _refusal(ended: Ended, holder: Child) -> str:
    named = HOLDER.search(ended.err)
    if named and int(named[1]) != holder.number:
        return f"the holder is process {holder.number}: {ended.err}"
    return improper(ended, {}, {})


# Clocks that are wrong by hours: results do not depend on them

HOUR = 3600.0
MISLED = 5
LONGEST = 600.0  # seconds; no job takes as long when its steady clock is sound


def clocks(lab: Laboratory) -> None:
    for job in lab.jobs():
        lab.side_by_side(job, (partial(_misled, lab, job, number) for number in range(MISLED)))


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
        if trial.verdict[0] != OTHER and not number % 2:  # seconds are of a clock that is right
            told = [value for file in trial.out.rglob("*.json*") for value in _seconds(file)]
            wrong = [value for value in told if not (math.isfinite(value) and 0 <= value < LONGEST)]
            if wrong or not told:
                trial.verdict = OTHER, f"seconds: {wrong}"


def _seconds(file: Path) -> list[float]:
    if file.suffix not in (".json", ".jsonl"):
        return []
    text = file.read_text()
    records = [json.loads(text)] if file.suffix == ".json" else map(json.loads, text.splitlines())
    return [value for one in records for key, value in one.items() if key.endswith("seconds")]
