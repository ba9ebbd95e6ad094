"""The short form of `python -m tests.chaos`, and that it would see what it looks for."""

import math
import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from chaos import disturbances, flips, states, writes
from chaos.disturbances import interrupted
from chaos.folders import contents, difference
from chaos.jobs import run
from chaos.laboratory import OTHER, SAME, Laboratory, Trial, improper
from chaos.nursery import ROOT, Ended, Nursery

from fedmuon.core.cores import few_free_cores

SEED = 1
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def lab(forks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """A laboratory of the quick jobs; whatever a test does in it, nothing is found."""
    return Laboratory(tmp_path_factory.mktemp("chaos"), [forks], SEED, 12, quick=True)


def none_other(lab: Laboratory, count: int) -> None:
    """Every trial so far ended as it should, and there were some."""
    tried = sum(sum(counts.values()) for counts in lab.table.values())
    assert tried >= count and not lab.findings, "\n".join(lab.findings)


@pytest.mark.slow
def test_kills(lab: Laboratory) -> None:
    disturbances.kills(lab)
    none_other(lab, 6)


@pytest.mark.slow
def test_kills_of_late_voting_and_gossip_methods(lab: Laboratory) -> None:
    disturbances.methods(lab)
    none_other(lab, 10)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", states.RECIPES)
def test_kills_of_runs_whose_clients_keep_states(lab: Laboratory, recipe: str) -> None:
    found = states.tried(lab, recipe, 4)
    none_other(lab, 1)
    assert found.kills == 4


def test_a_state_that_differs_in_a_bit_is_seen() -> None:
    state = {"control.w": np.ones(3)}
    other = {"control.w": np.nextafter(state["control.w"], 2)}
    assert not states.unlike(state, {"control.w": np.ones(3)})
    assert states.unlike(state, other) == "control.w differs"
    assert "has none" in states.unlike(state, None) and "for" in states.unlike(state, {})


@pytest.mark.slow
def test_failing_writes(lab: Laboratory) -> None:
    for code, again in writes.FAULTS:
        writes.each(lab, lab.jobs()[0], code, again, 16)
    for size in (0, 700):
        writes.no_room(lab, lab.jobs()[0], size)
    none_other(lab, 11)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1])
def test_two_writers(lab: Laboratory, kind: int) -> None:
    """Of a plain and of a private run."""
    job = lab.jobs()[kind]
    for gap, resumed in disturbances.STARTS:
        with lab.trial("two writers", f"{job.name}, {gap}") as trial:
            trial.verdict = disturbances.pair(trial, job, job, gap, resumed)
    none_other(lab, 2)


@pytest.mark.slow
def test_damage(lab: Laboratory) -> None:
    for case in flips.cases(lab)[:2]:
        flips.tried(lab, case, list(flips.damages(case.folder, lab.draws("flips"), 1))[::8])
    none_other(lab, 6)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupts(lab: Laboratory, sign: signal.Signals) -> None:
    job = lab.jobs()[0]
    with lab.trial("interrupt", sign.name) as trial:
        trial.verdict = interrupted(trial, job, sign, 0.5 * lab.reference(job).seconds)
    none_other(lab, 1)


def test_another_model_is_seen(lab: Laboratory) -> None:
    """Negative control: the harness tells two runs apart that differ in a bit of the learning."""
    job, other = lab.jobs()[0], run("local.lr=0.0500001")
    trial = Trial(lab, lab.place / "another")
    trial.folder.mkdir()
    assert lab.nursery.run(other.start(trial.out)).code == 0
    outcome, why = trial.compare(job)
    assert outcome == OTHER and "differs" in why
    again = Trial(lab, lab.place / "the same")
    again.folder.mkdir()
    assert lab.nursery.run(job.start(again.out)).code == 0
    assert again.compare(job) == (SAME, "")


def test_a_lost_round_is_seen(lab: Laboratory) -> None:
    job = lab.jobs()[0]
    folder = lab.place / "lost"
    shutil.copytree(lab.reference(job).folder, folder)
    log = folder / "rounds.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    found = contents(folder)
    assert len(found["rounds.jsonl"]) == 7 and difference(found, lab.reference(job).held)


NOTE = few_free_cores(threads=8, others=math.inf, load=2.0)


@pytest.mark.parametrize(
    ("code", "said", "after", "why"),
    [
        (2, "fedmuon: no", {"a": "1"}, ""),
        (2, "fedmuon: no", {"a": "2"}, "changed"),
        (2, "fedmuon: no\nfedmuon: no", {"a": "1"}, "not one sentence"),
        (2, f"fedmuon: {NOTE}\nfedmuon: no", {"a": "1"}, ""),
        (2, f"fedmuon: {NOTE}", {"a": "1"}, "not one sentence"),
        (2, f"fedmuon: {NOTE}\nfedmuon: no\nfedmuon: no", {"a": "1"}, "not one sentence"),
        (2, "no", {"a": "1"}, "not one sentence"),
        (2, "Traceback (most recent call last)", {"a": "1"}, "exit code 2"),
        (1, "fedmuon: no", {"a": "1"}, "exit code 1"),
        (-9, "", {"a": "1"}, "exit code -9"),
    ],
)
def test_only_one_sentence_is_a_refusal(code: int, said: str, after: dict, why: str) -> None:
    found = improper(Ended(code, "", said, 0.0), {"a": "1"}, after)
    assert why in found and bool(found) == bool(why)


def test_a_fault_is_felt(lab: Laboratory) -> None:
    """Negative control: the shim does fail the write that it is told to, and no other."""
    job, out = lab.jobs()[0], lab.place / "fault"
    fault = {"fail": 10, "code": "ENOSPC", "again": False, "below": str(out)}
    ended = lab.nursery.run(job.start(out), tamper=fault)
    assert ended.code == 2 and "No space left on device" in ended.err
    assert lab.nursery.run(job.start(lab.place / "far"), tamper=fault).code == 0


def test_damage_is_of_every_class() -> None:
    found = list(flips.damages(ROOT / "tests" / "chaos", random.Random(1), 1))
    kinds = {damage.kind for damage in found if damage.file == "jobs.py"}
    assert kinds == {"names", "numbers", "whitespace", "marks", "ends", "cut", "longer", "gone"}


@pytest.mark.slow
def test_a_soak_in_small() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.soak", "--quick"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 6
