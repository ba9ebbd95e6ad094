"""Ctrl-C and SIGTERM at random moments: a sentence with the command to go on, and that it works."""

import re
import shlex
import signal
import time
from functools import partial

from .folders import LISTED, digests
from .jobs import Job
from .laboratory import OTHER, SAME, Laboratory, Trial, Verdict

TRIALS = 6  # of each signal and job
AFRESH = "give the command again"  # which these jobs say before they write anything
COMMAND = re.compile(r"fedmuon ((?:run|stability|suite|deploy-demo) .*?--resume)\b")


def scenario(lab: Laboratory) -> None:
    """Every job, both signals."""
    for job in lab.jobs():
        lab.reference(job)  # before it is asked for by several threads
        lab.side_by_side(
            partial(_tried, lab, job, sign, number)
            for sign in (signal.SIGINT, signal.SIGTERM)
            for number in range(TRIALS)
        )


def _tried(lab: Laboratory, job: Job, sign: signal.Signals, number: int) -> None:
    draws = lab.draws(f"interrupt {job.name} {sign.name} {number}")
    moment = (number + draws.random()) / TRIALS * lab.reference(job).seconds
    with lab.trial(f"interrupt: {job.name}", f"{sign.name} after {moment:.4f} s") as trial:
        trial.verdict = interrupted(trial, job, sign, moment)


def interrupted(
    trial: Trial, job: Job, sign: signal.Signals, moment: float, real: bool = False
) -> Verdict:
    """Interrupt it, do what it says, and compare."""
    nursery = trial.laboratory.nursery
    child = nursery.start(job.start(trial.out), real=real)
    time.sleep(moment)
    child.send(sign)
    ended = child.wait()
    if ended.code == 0:  # it was done
        return trial.compare(job)
    if ended.code == -sign and not ended.err:  # before its first line or behind its last one
        return trial.go_on(job)
    if ended.code != 128 + sign:
        return OTHER, f"exit code {ended.code}: {ended.err[-1500:]}"
    said = ended.err.strip()
    if not said.startswith("fedmuon: ") or len(said.splitlines()) != 1:
        return OTHER, f"not one sentence: {said[-1500:]}"
    if AFRESH in said:
        return _afresh(trial, job, real)
    if not (found := COMMAND.search(said)):
        return OTHER, f"no command to go on: {said[-1500:]}"
    again = nursery.run(shlex.split(found[1]), 240, real=real)
    if again.code:
        return OTHER, f"{found[0]} fails with {again.code}: {again.err[-800:]}"
    outcome, why = trial.compare(job)
    return (outcome, why) if outcome == SAME else (OTHER, f"after {found[0]}: {why}")


def _afresh(trial: Trial, job: Job, real: bool) -> Verdict:
    """It asks for the command again: then nothing may be there, and the job can begin anew."""
    if held := set(digests(trial.out)) - {LISTED}:
        return OTHER, f"it asks for the command again, but there are {sorted(held)}"
    again = trial.laboratory.nursery.run(job.start(trial.out), 240, real=real)
    return (OTHER, again.err[-800:]) if again.code else trial.compare(job)
