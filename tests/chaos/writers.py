"""Two processes on one folder: one goes on, the other is refused and told by whom."""

import itertools
import json
import re
import time

from .folders import ledger_lines
from .jobs import Job
from .laboratory import OTHER, Laboratory, Trial, Verdict
from .nursery import Child, Ended

STARTS = ((0.0, False), (0.5, True))  # share of the first one's time, whether the second resumes
NAMED = re.compile(r"process (\d+)")


def scenario(lab: Laboratory) -> None:
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
    """What is wrong with the refusal of one of two."""
    said = ended.err.strip()
    if ended.code != 2 or not said.startswith("fedmuon: ") or len(said.splitlines()) != 1:
        return f"not one sentence: exit code {ended.code}: {said[-1500:]}"
    named = NAMED.search(said)
    if named and int(named[1]) != holder.number:
        return f"the holder is process {holder.number}: {said}"
    return ""
