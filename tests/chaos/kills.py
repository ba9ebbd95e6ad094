"""kill -9 at random moments of every job that runs in one process; then it goes on."""

from functools import partial

from .jobs import Job
from .laboratory import OTHER, Laboratory, Trial

SHARES = {
    "run": 25, "private run": 15, "repeatable run": 12, "census": 16, "suite: training": 10,
    "suite: stability": 6, "suite: study": 6,
}  # fmt: skip
AGAIN = 0.3  # how often a resumed job is killed once more


def scenario(lab: Laboratory) -> None:
    """Of 100 kills 90 are here; the other 10 are those of `engines`."""
    for job in lab.jobs():
        count = max(1, round(lab.kills * SHARES[job.name] / 100))
        lab.reference(job)  # before it is asked for by several threads
        lab.side_by_side(partial(_killed, lab, job, number, count) for number in range(count))


def _killed(lab: Laboratory, job: Job, number: int, count: int) -> None:
    """In one of `count` equal parts of the job's time, or a bit beyond its end."""
    draws = lab.draws(f"kill {job.name} {number}")
    moment = 1.1 * (number + draws.random()) / count * lab.reference(job).seconds
    with lab.trial(f"kill -9: {job.name}", f"killed after {moment:.4f} s") as trial:
        trial.kill_after(job.start(trial.out), moment)
        while draws.random() < AGAIN:
            again = draws.random() * lab.reference(job).seconds
            trial.kill_after(job.resume(trial.out), again)
        trial.verdict = _judged(trial, job)


def _judged(trial: Trial, job: Job) -> tuple[str, str]:
    """A killed job must go on: a refusal would be a lost run."""
    outcome, why = trial.go_on(job)
    return (OTHER, f"lost: {why}") if outcome == "refused" else (outcome, why)
