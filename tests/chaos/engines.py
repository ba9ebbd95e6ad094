"""kill -9 and signals where many processes work: Ray, its workers and nodes; deployments.

Ten seconds after a driver's death none of its processes is alive, and no folder of it is left.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import jobs
from .disturbances import interrupted
from .jobs import Job
from .laboratory import GOES_ON, OTHER, SAME, Laboratory, Trial, Verdict, improper
from .nursery import ROOT, Child
from .processes import MARK, command, marked, places

SHARES = {"ray driver": 4, "ray worker": 2, "ray node": 1, "deployment driver": 2, "supernode": 1}
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LONG, SOON = 400.0, 10.0  # seconds


def scenario(lab: Laboratory) -> None:
    """The kills that are left, and two signals an engine."""
    ray, deployed = _job("ray"), _job("deployment")
    for job, kind in ((ray, "ray driver"), (deployed, "deployment driver")):
        _each(lab, kind, lambda trial, share, job=job: _driver(trial, job, share))
    _each(lab, "ray worker", lambda trial, share: _client(trial, ray, re.compile(b"ray::")))
    _each(lab, "ray node", lambda trial, share: _node(trial))
    supernode = re.compile(b".*flower-supernode", re.DOTALL)
    _each(lab, "supernode", lambda trial, share: _client(trial, deployed, supernode))
    for job in (ray, deployed):
        for sign in SIGNALS:
            moment = lab.draws(f"{job.name} {sign}").random()
            with _marked(lab, f"interrupt: {job.name}", f"{sign.name} at {moment:.3f}") as trial:
                seconds = moment * lab.reference(job, real=True).seconds
                trial.verdict = interrupted(trial, job, sign, seconds, real=True)
                _look_for_rest(trial)


def _job(engine: str) -> Job:
    changes = (f"engine.name={engine}", "faults.deadline=90", "faults.retries=1")
    few = ("federation.clients=2", "federation.per-round=1", "federation.rounds=3")
    return jobs.run(*changes, *(few if engine == "deployment" else ()), name=engine)


def _each(lab: Laboratory, kind: str, act: Callable[[Trial, float], Verdict]) -> None:
    draws = lab.draws(kind)
    count = max(1, round(lab.kills * SHARES[kind] / 100))
    for number in range(count):
        share = (number + draws.random()) / count
        with _marked(lab, f"kill -9: {kind}", f"at {share:.3f} of the time") as trial:
            trial.verdict = act(trial, share)
            _look_for_rest(trial)


@contextlib.contextmanager
def _marked(lab: Laboratory, scenario: str, how: str) -> Iterator[Trial]:
    """A trial whose processes can be found, and are ended with it whatever it leaves."""
    with lab.trial(scenario, how) as trial:
        os.environ[MARK] = str(trial.folder)
        try:
            yield trial
        finally:
            del os.environ[MARK]
            for number in _marked_processes(trial):
                with contextlib.suppress(OSError):
                    os.kill(number, signal.SIGKILL)


def _driver(trial: Trial, job: Job, share: float) -> Verdict:
    lab = trial.laboratory
    child = lab.nursery.start(job.start(trial.out), real=True)
    time.sleep(share * lab.reference(job, real=True).seconds)
    left = places(str(trial.folder))
    child.send(signal.SIGKILL)
    child.wait()
    rest = _rest(trial, left)
    outcome, why = _gone_on(trial, job)
    return (OTHER, rest) if rest else (outcome, why)


def _gone_on(trial: Trial, job: Job) -> Verdict:
    ended = trial.laboratory.nursery.run(job.resume(trial.out), LONG, real=True)
    if ended.code:
        return OTHER, f"lost: exit code {ended.code}: {ended.err[-1500:]}"
    return trial.compare(job)


def _rest(trial: Trial, folders: set[Path]) -> str:
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        if not _marked_processes(trial) and not any(one.exists() for one in folders):
            return ""
        time.sleep(0.1)
    lives = {one: command(one)[:80].decode(errors="replace").replace("\0", " ")
             for one in _marked_processes(trial)}  # fmt: skip
    held = [str(one) for one in folders if one.exists()]
    return f"{SOON:g} s later these live on: {lives}, these folders are left: {held}"


def _look_for_rest(trial: Trial) -> None:
    """Nothing may be left of a trial that ended by itself either."""
    if trial.verdict[0] != OTHER and (rest := _rest(trial, set())):
        trial.verdict = OTHER, rest


def _client(trial: Trial, job: Job, name: re.Pattern[bytes]) -> Verdict:
    """A client's process dies in the middle of a run.

    Ray asks another worker, and the run ends by itself. A SuperNode stays dead: the run ends,
    resumable, or was done without it.
    """
    lab = trial.laboratory
    lab.reference(job, real=True)
    child = lab.nursery.start(job.start(trial.out), real=True)
    killed = _kill_one(trial, child, name)
    ended = child.wait(LONG)
    if not killed:
        return OTHER, f"nothing was there to be killed: {ended}"
    if ended.code == 0:
        return trial.compare(job)
    why = improper(ended, {}, {})
    return (OTHER, why) if why else _gone_on(trial, job)


def _kill_one(trial: Trial, child: Child, name: re.Pattern[bytes]) -> bool:
    """Kill the first process of that kind once a round is done; whether there was one."""
    end, log = time.monotonic() + LONG, trial.out / "rounds.jsonl"
    while time.monotonic() < end and Path(f"/proc/{child.number}").exists():
        found = [number for number in _marked_processes(trial) if name.match(command(number))]
        if found and log.exists() and log.stat().st_size:
            os.kill(found[0], signal.SIGKILL)
            return True
        if (trial.out / "summary.json").exists():
            return False
        time.sleep(0.002)
    return False


def _node(trial: Trial) -> Verdict:
    """Of a cluster of two nodes one dies, and the run ends on the other."""
    lab, stop = trial.laboratory, trial.folder / "stop"
    helper = [sys.executable, "-m", "tests.chaos.cluster", str(trial.folder)]
    cluster = subprocess.Popen(helper, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        address = _awaited(trial.folder / "address")
        job = jobs.run(
            "engine.name=ray", f"engine.ray-address={address}", "federation.rounds=40",
            "faults.deadline=30", "faults.retries=4", name="cluster",
        )  # fmt: skip
        child = lab.nursery.start(job.start(trial.out), real=True)
        _awaited(trial.out / "rounds.jsonl")
        (trial.folder / "kill").touch()
        ended = child.wait(LONG)
        why = ""
        for _ in range(GOES_ON):  # it stops, resumable, while nobody answers for the dead node
            if ended.code == 0 or (why := improper(ended, {}, {})):
                break
            ended = lab.nursery.run(job.resume(trial.out), LONG, real=True)
        if ended.code:
            return OTHER, why or f"lost: {ended.err[-1500:]}"
        own = jobs.run("engine.name=ray", "federation.rounds=40", name="ray, 40 rounds")
        lab.reference(own, real=True)
        # the config names another address, so only the results are compared
        for name in ("model.safetensors", "momentum.safetensors", "schedule.npy", "partition.npz"):
            wanted = lab.reference(own).folder / name
            if (trial.out / name).read_bytes() != wanted.read_bytes():
                return OTHER, f"{name} differs"
        return SAME, ""
    finally:
        stop.touch()
        cluster.wait(60)


def _awaited(file: Path) -> str:
    end = time.monotonic() + 120
    while not (file.exists() and file.stat().st_size):
        if time.monotonic() > end:
            raise TimeoutError(f"{file} does not come")
        time.sleep(0.01)
    return file.read_text()


def _marked_processes(trial: Trial) -> list[int]:
    return marked(str(trial.folder))
