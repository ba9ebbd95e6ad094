"""kill -9 before many operations on files: `stability` with client neighbours then resumes."""

import itertools
from pathlib import Path

import pytest
from chaos.folders import contents, difference
from chaos.jobs import RUN, Job, settings
from chaos.nursery import Nursery

STACK = {"stack": 1}  # each neighbour is a stack of its own


@pytest.mark.slow
@pytest.mark.parametrize("how", ["worst", "all"])
def test_a_killed_search_of_clients_resumes_bit_identically(
    how: str, forks: Nursery, tmp_path: Path
) -> None:
    table = ["stability.unit=clients", f"stability.neighbours={how}", "federation.rounds=2"]
    table += ["stability.trials=2"] * (how == "worst") + ["stability.probes=1"]
    job = Job(how, "stability", settings(RUN, table))
    assert forks.run(job.start(tmp_path / "whole"), tamper=STACK).code == 0
    wanted, halfway, number = contents(tmp_path / "whole"), 0, 0
    for number in itertools.count(50, 5):  # the run itself ends at about 60
        out = tmp_path / str(number)
        kill = {"kill": number, "below": str(out)}
        if forks.run(job.start(out), tamper={**STACK, **kill}).code == 0:
            break
        file = out / "neighbours.csv"
        left = len(file.read_bytes().splitlines()) - 1 if file.exists() else 0
        halfway += 0 < left < len(wanted["neighbours.csv"])
        again = forks.run(job.resume(out), tamper=STACK)
        assert again.code == 0, f"{number}: {again.err}"
        assert not difference(contents(out), wanted), number
    assert number > 80 and halfway >= 1
