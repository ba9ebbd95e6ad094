"""The k-th write fails, for every k; and files end where the disk is full, at many sizes.

The command must say so in one sentence, and go on to the same bytes once there is room. Runs are
tried at each of their writes, suites at the first and the last write of each kind: of one suffix,
for the sake of the same lines.
"""

import json
from functools import partial
from typing import Any

from .folders import digests
from .jobs import Job
from .laboratory import OTHER, SAME, Laboratory, Trial, improper

# What fails, and whether all that follows does: a full disk stays full, a moment's refusal passes.
FAULTS = (("ENOSPC", True), ("EROFS", True), ("EACCES", False))
Writes = list[tuple[bool, tuple[str, ...]]]
SIZES = (0, 1, 100, 250, 700, 1000, 1400, 2000, 3000, 5000, 20000, 100000)  # bytes


def scenario(lab: Laboratory) -> None:
    for job in lab.jobs():
        for code, again in FAULTS:
            if job.command == "suite":
                kinds(lab, job, code, again)
            elif not job.secret:  # whose writes are those of the run whose noise repeats
                each(lab, job, code, again)
        if job.secret:
            mixed(lab, job)
        lab.side_by_side(job, (partial(no_room, lab, job, size) for size in SIZES))


def no_room(lab: Laboratory, job: Job, size: int) -> None:
    """A trial in which no file may grow beyond so many bytes."""
    with lab.trial(f"no room: {job.name}", f"files end at {size} bytes") as trial:
        tried(trial, job, {"longest": size})


def each(lab: Laboratory, job: Job, code: str, again: bool, stride: int = 1) -> None:
    """Every k-th write, or one of so many; and one more that the job does not come to."""
    row, count = f"{code}: {job.name}", len(of_code(listed(lab, job), code))
    first = lab.draws(f"{job.name} {code}").randint(1, stride)
    numbers = [*range(first, count + 1, stride), count + 1]
    lab.side_by_side(
        job, (partial(_failing, lab, job, row, number, count, code, again) for number in numbers)
    )


def mixed(lab: Laboratory, job: Job) -> None:
    """Every k-th write, the faults by turns."""
    row, count = f"all three by turns: {job.name}", len(of_code(listed(lab, job), "ENOSPC"))
    faults = ((number, count, *FAULTS[number % len(FAULTS)]) for number in range(1, count + 1))
    lab.side_by_side(job, (partial(_failing, lab, job, row, *one) for one in faults))


def kinds(lab: Laboratory, job: Job, code: str, again: bool) -> None:
    """Of every kind of write the first one and the last one: a suite repeats them, cell by cell."""
    writes = of_code(listed(lab, job), code)
    first = {kind: number for number, kind in reversed([*enumerate(writes, 1)])}
    last = {kind: number for number, kind in enumerate(writes, 1)}
    row, count = f"{code}: {job.name}, {len(first)} kinds of {len(writes)}", len(writes)
    numbers = sorted({*first.values(), *last.values()})
    lab.side_by_side(
        job, (partial(_failing, lab, job, row, number, count, code, again) for number in numbers)
    )


def of_code(writes: Writes, code: str) -> list[tuple[str, ...]]:
    """The kinds of those that fail: a full disk lets files be removed."""
    return [kind for frees, kind in writes if not (frees and code == "ENOSPC")]


def listed(lab: Laboratory, job: Job) -> Writes:
    """What the job's writes are: whether each makes room, and its kind (`tamper`)."""
    folder = lab.place / f"listed-{job.name.replace(' ', '-')}"
    folder.mkdir(exist_ok=True)
    file = folder / "writes"
    if not file.exists():
        listing = {"listed": str(file), "below": str(folder / "out")}
        ended = lab.nursery.run(job.start(folder / "out"), 120, tamper=listing)
        assert ended.code == 0, ended
    return [(frees, tuple(kind)) for frees, kind in map(json.loads, file.read_text().splitlines())]


def _failing(
    lab: Laboratory, job: Job, row: str, number: int, count: int, code: str, again: bool
) -> None:
    """A trial whose write of that number (from 1) fails; one may be done without."""
    with lab.trial(row, f"{code} at write {number}{' and after' if again else ''}") as trial:
        fault = {"fail": number, "code": code, "again": again, "below": str(trial.folder)}
        if tried(trial, job, fault) and number > count:
            trial.verdict = OTHER, f"the job has more than {count} writes"


def tried(trial: Trial, job: Job, fault: dict[str, Any]) -> bool:
    """Whether the fault was felt; the verdict is the trial's."""
    ended = trial.laboratory.nursery.run(job.start(trial.out), 120, tamper=fault)
    if ended.code == 0:
        trial.verdict = trial.compare(job)
        return False
    if why := improper(ended, {}, {}):
        trial.verdict = OTHER, why
        return True
    before = sorted(digests(trial.out))  # with room again, the job must go on
    outcome, why = trial.go_on(job)
    if outcome != SAME:
        outcome, why = OTHER, f"does not go on from {before}: {why}"
    trial.verdict = outcome, why
    return True
