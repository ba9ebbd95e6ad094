"""kill -9 at random moments of every job that runs in one process; then it goes on."""

from .jobs import Job
from .laboratory import OTHER, Laboratory, Trial

SHARES = {
    "run": 22, "private run": 14, "repeatable run": 10, "census": 14, "suite: training": 9,
    "suite: stability": 5, "suite: study": 5,
}  # fmt: skip
AGAIN = 0.3  # how often a resumed job is killed once more


def scenario(lab: Laboratory) -> None:
    """Of 100 kills 79 are here; the other 21 are those of `engines`."""
    draws = lab.draws("kill")
    for job in lab.jobs():
        count = max(1, round(lab.kills * SHARES[job.name] / 100))
        for number in range(count):
            # One moment of each of `count` equal parts of the job's time, and a bit beyond its end.
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
