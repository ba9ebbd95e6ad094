"""`fedmuon stationarity RUN`: the errors of a run's orthogonalizer, against a loop of its own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from typer.testing import CliRunner

from fedmuon.analysis.theory.stationarity import Noise, Schedule, muon, nesterov_muon
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability.step_quality import Quality, of_run
from fedmuon.federated.build import build_experiment

ROUNDS, STEPS, LR, BETA = 3, 2, 0.3, 0.8
LONE = {"clients": 1, "per-round": 1, "rounds": ROUNDS}
FORMS = {"002": "nesterov", "004": "polyak"}


def central(form: str, **orthogonalizer: Any) -> Config:
    """One client with all data takes steps of Muon on the matrix task."""
    table = {"name": "newton-schulz", "coefficients": "cubic", "steps": 3} | orthogonalizer
    local = {"recipe": "muon", "lr": LR, "steps": STEPS, "momentum": BETA, "momentum-form": form}
    return small({"local": local, "orthogonalizer": table}, federation=LONE)


def by_loop(config: Config, form: str) -> dict[str, float]:
    """The same run in NumPy: cubic steps from M / |M|_F, and the errors by their definitions."""
    experiment = build_experiment(config)
    x = experiment.task.initial(generator(config.federation.seed, Draw.INITIAL))["weight"][0]
    x, memory = x.double().numpy(), 0.0
    found = {"gamma": 0.0, "nu": 0.0, "delta_0": 0.0, "eps_q": 0.0}
    for _ in range(ROUNDS * STEPS):
        at = {"weight": torch.from_numpy(x)[None]}
        g = experiment.task.gradient(at, [experiment.shards[0].batch(None)])[1]["weight"][0].numpy()
        memory = BETA * memory + g
        m = BETA * memory + g if form == "nesterov" else memory
        z = m / np.linalg.norm(m)
        for _ in range(3):
            z = 1.5 * z - 0.5 * z @ z.T @ z
        u, s, vh = np.linalg.svd(m, full_matrices=False)
        r = min(m.shape[0], m.shape[1] - 1)  # the rows of a softmax gradient sum to 0
        off = np.linalg.norm(u[:, :r] @ vh[:r] - z, 2)
        for name, value in (("gamma", 1 - (m * z).sum() / s.sum()),
                            ("nu", np.linalg.norm(z, 2) - 1),
                            ("delta_0", 1 - (s[r - 1] / np.linalg.norm(s)) ** 2),
                            ("eps_q", off)):  # fmt: skip
            found[name] = max(found[name], float(value))
        x = x - LR * z
    return found


def answer(*arguments: str) -> dict[str, Any]:
    shown = CliRunner().invoke(app, ["stationarity", "--json", *arguments])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.output)


@pytest.mark.parametrize("paper", FORMS)
def test_a_run_s_errors_are_those_of_a_loop(paper: str, tmp_path: Path) -> None:
    config, out = central(FORMS[paper]), tmp_path / "a"
    execute(config, out)
    found = answer(str(out), "--paper", paper, "--gap", "0.9", "--l0", "0.5", "--sigma0", "0.1")
    wanted = by_loop(config, FORMS[paper])
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name
    assert 0.01 < found["gamma"] < found["eps_q"] < found["delta_0"] < 1  # nothing is trivial
    assert found["matrices"] == found["steps"] == ROUNDS * STEPS
    plan, shape = Schedule(LR, BETA, ROUNDS * STEPS, "of the run"), tuple(found["shape"])
    noise = Noise(sigma0=0.1, batch=found["batch"])
    if paper == "002":
        bound = nesterov_muon(plan, noise, 0.9, 0.5, shape, found["gamma"], found["nu"])
    else:
        terms = 0.9, 0.5, 0.1, min(shape), found["batch"]
        bound = muon(plan, *terms, polar_error=found["eps_q"])
    assert found["value"] == pytest.approx(bound.value) and found["no_bound_because"] == []
    # The negative controls: other options, and the paper whose momentum this is not.
    assert answer(str(out), "--paper", paper, "--gap", "0.5")["value"] != found["value"]
    (other,) = {*FORMS} - {paper}
    refused = answer(str(out), "--paper", other)
    assert refused["value"] is None and "momentum" in refused["no_bound_because"][0]
    assert refused["gamma"] == found["gamma"]


def test_an_exact_map_has_no_error(tmp_path: Path) -> None:
    execute(central("nesterov", name="exact-sign", coefficients="cubic"), tmp_path / "a")
    q = of_run(tmp_path / "a").quality
    assert max(q.gamma, q.nu, q.polar_error) < 1e-5 < 0.1 < q.delta0


def test_coefficients_that_overshoot_have_no_bound_of_004(tmp_path: Path) -> None:
    execute(central("polyak", coefficients="jordan", steps=2), tmp_path / "a")
    found = answer(str(tmp_path / "a"), "--paper", "004")
    assert found["nu"] > 0.01 and "exceeds 1" in found["no_bound_because"][-1]


@pytest.mark.slow
def test_runs_of_other_algorithms_have_no_bound(tmp_path: Path) -> None:
    """A network and several clients: the errors are measured, and each difference is named."""
    network = {"task": {"name": "network", "model": "mlp"}}
    local = {"recipe": "fedmuon", "lr": 0.1, "steps": 2, "schedule": "cosine", "adjust": "original"}
    config = small({**network, "local": local}, federation={"rounds": 2})
    execute(config, tmp_path / "n")
    found = answer(str(tmp_path / "n"))
    said = " ".join(found["no_bound_because"])
    assert found["value"] is None and 0 < found["gamma"] < 1
    for word in ("clients train", "a network", "step size changes", "multiplied", "momentum"):
        assert word in said, word
    shown = CliRunner().invoke(app, ["stationarity", str(tmp_path / "n")])
    assert "no bound, because" in shown.output and "gamma" in shown.output


def test_what_a_run_folder_excludes(tmp_path: Path) -> None:
    execute(central("nesterov"), tmp_path / "a")
    execute(small(local={"recipe": "fedavg"}), tmp_path / "b")
    folder = str(tmp_path / "a")
    for words, said in (
        ([folder, "--steps", "5"], "--steps has no effect with a run folder"),
        ([folder, "--paper", "004", "--sigma1", "1"], "--sigma1 has no effect"),
        ([folder, "--paper", "003"], "must be 002"),
        ([str(tmp_path / "b")], "orthogonalizes"),
    ):
        shown = CliRunner().invoke(app, ["stationarity", *words])
        assert isinstance(shown.exception, InputError) and said in str(shown.exception), said


def test_the_errors_of_one_matrix() -> None:
    """By hand: M = diag(3, 4) and T(M) = diag(0.5, 1.2)."""
    m, z = torch.diag(torch.tensor([3.0, 4.0])), torch.diag(torch.tensor([0.5, 1.2]))
    q = Quality().with_matrix(m, z)
    assert q.gamma == pytest.approx(1 - (1.5 + 4.8) / 7) and q.nu == pytest.approx(0.2)
    assert q.delta0 == pytest.approx(1 - 9 / 25) and q.polar_error == pytest.approx(0.5)
    assert Quality().with_matrix(0 * m, z) == Quality()  # no direction, no error
    assert q.with_matrix(m, torch.eye(2)) == Quality(q.gamma, q.nu, q.delta0, q.polar_error, 2)
