"""The k-th write fails, for every k; and files end where the disk is full, at many sizes.

The command must say so in one sentence, and go on to the same bytes once there is room.
"""

from typing import Any

from .folders import digests
from .jobs import Job
from .laboratory import OTHER, SAME, Laboratory, Trial, Verdict

# What fails, and whether all that follows does: a full disk stays full, a moment's refusal passes.
FAULTS = (("ENOSPC", True), ("EROFS", True), ("EACCES", False))
MOST = 400  # operations of one job
SIZES = (0, 1, 100, 250, 700, 1000, 1400, 2000, 3000, 5000, 20000, 100000)  # bytes


def scenario(lab: Laboratory) -> None:
    """Every job, at each of its writes; and with room for so many bytes a file."""
    for job in lab.jobs():
        for code, again in FAULTS:
            each(lab, job, code, again)
        for size in SIZES:
            with lab.trial(f"no room: {job.name}", f"files end at {size} bytes") as trial:
                tried(trial, job, {"longest": size})


def each(lab: Laboratory, job: Job, code: str, again: bool, stride: int = 1) -> None:
    """Until the job does not come to a k-th write."""
    start = lab.draws(f"{job.name} {code}").randint(1, stride)
    for number in range(start, MOST, stride):
        how = f"{code} at write {number}{' and after' if again else ''}"
        with lab.trial(f"{code}: {job.name}", how) as trial:
            fault = {"fail": number, "code": code, "again": again, "below": str(trial.folder)}
            if not tried(trial, job, fault):
                return
    raise AssertionError(f"{job.name} writes more than {MOST} times")


def tried(trial: Trial, job: Job, fault: dict[str, Any]) -> bool:
    """Whether the fault was felt; the verdict is the trial's."""
    ended = trial.laboratory.nursery.run(job.start(trial.out), 120, tamper=fault)
    if ended.code == 0:
        trial.verdict = trial.compare(job)
        return False
    said = ended.err.strip()
    if ended.code != 2 or not said.startswith("fedmuon: ") or len(said.splitlines()) != 1:
        trial.verdict = OTHER, f"exit code {ended.code}: {said[-1500:]}"
        return True
    trial.verdict = _mended(trial, job)
    return True


def _mended(trial: Trial, job: Job) -> Verdict:
    """With room again, the job must go on."""
    before = sorted(digests(trial.out))
    outcome, why = trial.go_on(job)
    return (outcome, why) if outcome == SAME else (OTHER, f"does not go on from {before}: {why}")
