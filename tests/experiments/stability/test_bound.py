"""`fedmuon bound`: what it loads, what it says where the amplification overflows."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from test_realized import dense_norm
from typer.testing import CliRunner

import fedmuon
from benchmarks import attack
from fedmuon import analysis
from fedmuon.analysis.theory import recursion
from fedmuon.config.load import parse
from fedmuon.experiments.cli import app
from fedmuon.experiments.cli.theory import setting_of
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.stability.certificates import MAPLESS, MUON, method_of
from fedmuon.experiments.stability.finished_run import curvature, observed_constants
from fedmuon.experiments.stability.neighbours import execute, verdict_table
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import begin
from fedmuon.orthogonalize import lipschitz
from fedmuon.tasks.base import Batch
from fedmuon.tasks.constants import constants
from fedmuon.tasks.matrix import MatrixTask

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "ray", "flwr", "matplotlib", "sklearn", "scipy", "pandas"}
MILLION = ["--rounds", "1000000", "--local-steps", "1", "--clients", "1000000", "--per-round", "10",
           "--size", "1000", "--lr", "1e-6"]  # fmt: skip


def loaded(*commands: list[str]) -> list[tuple[str, set[str]]]:
    """What a process prints for each of these commands, and the heavy packages it then holds."""
    code = (
        "import json, sys\n"
        "from fedmuon.experiments.cli import main\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        main(command)\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        "    print('answered', flush=True)\n"
        "    print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *answers, rest = done.stdout.split("answered\n")
    assert len(answers) == len(commands) and not rest
    held = [HEAVY & set(line.split()) for line in done.stderr.splitlines()]
    return list(zip(answers, held, strict=True))


ASKED = [["--lambda", "0.1"], ["--json"], ["--json", "--c-hp", "sharp", "--batch", "10"],
         ["--json", "--set", "local.recipe=fedmuon-aligned"],
         ["--json", "--set", "orthogonalizer.name=newton-schulz"]]  # fmt: skip


def test_the_calculator_answers_without_the_heavy_packages() -> None:
    """They take longer to import than a million rounds and clients to compute."""
    found = loaded(*(["bound", *MILLION, *more] for more in ASKED))
    for more, (answer, held) in zip(ASKED, found, strict=True):
        assert held == set() and ("C_hp" in answer or json.loads(answer)["value"]), more


@pytest.mark.slow
def test_reading_a_run_needs_torch(tmp_path: Path) -> None:
    """Negative control: `loaded` sees what is loaded."""
    run(small(), tmp_path / "a")
    ((_, held),) = loaded(["bound", str(tmp_path / "a"), "--json"])
    assert held >= {"torch"}


def record_of(*arguments: str) -> dict:
    shown = CliRunner().invoke(app, ["bound", "--json", *arguments])
    assert shown.exit_code == 0, shown.output + str(shown.exception)
    return json.loads(shown.output)


def test_an_overflow_is_a_vacuous_bound_with_its_reason() -> None:
    """Every eps_i is B = 1, n_eff = n and S = 1: (10) with the explicit constant, by hand."""
    record = record_of("--rounds", "10000", "--clients", "50", "--size", "100", "--lr", "1")
    r, tree = math.log(20), 13  # of delta, and ceil(log2 5000)
    h = 2 + math.e * (math.sqrt(r / 5000) + math.sqrt(2) * r * tree)
    assert record["h"] == pytest.approx(h, rel=1e-12)
    moves = 2 - 1 / 50 / 100 + 1 / 50 / 100
    g = 1 + math.sqrt(r / 2 * 5000) * moves
    assert record["g"] == pytest.approx(g, rel=1e-12)
    assert record["value"] == min(record["h"], record["g"]) and record["status"] == "certified"
    assert record["max_exposure"] is None and record["max_certificate"] is None
    assert record["refusal"] == ""
    assert record["note"] == (
        "The bound is vacuous (eps_i = B for 50 of 50 clients), because the amplification exceeds "
        "1e308. Use fewer steps, a smaller lr, or an orthogonalizer with a smaller Lipschitz "
        "constant."
    )


def test_what_is_merely_large_is_given() -> None:
    """Negative control: a finite exposure is a number, and a bound below B has no note."""
    large = record_of("--rounds", "40", "--clients", "50", "--size", "100", "--lr", "1")
    assert 1e10 < large["max_exposure"] < 1e308
    assert large["note"] == "The bound is vacuous, because no gap can exceed B = 1."
    small = record_of(*MILLION, "--lambda", "0.1")
    assert small["note"] == "" and small["value"] < 1
    shown = CliRunner().invoke(app, ["bound", "--rounds", "10000", "--lr", "1"])
    assert "exceeds" in shown.output and "vacuous" in shown.output


@pytest.mark.parametrize("aligned", [False, True])
def test_clients_of_the_last_rounds_keep_their_certificate(aligned: bool) -> None:
    """Clients 0 and 1 overflow, 2 and 3 come last, 4 and 5 never: B, a number, 0."""
    recipe = {"recipe": "fedmuon-aligned"} if aligned else {}
    config = small(local={"lr": 1.0, "steps": 2, **recipe}, orthogonalizer={"lambda": 1e-4},
                   federation={"rounds": 1200, "per-round": 2})  # fmt: skip
    schedule = np.array([[0, 1]] * 1199 + [[2, 3]])
    case = certificates.CertifiedSetting(config, np.full(6, 10**6), analysis.Realized(schedule))
    verdict = certificates.certify(case)
    assert verdict.exposures is not None and verdict.bound is not None
    assert np.isinf(verdict.exposures).tolist() == [True] * 2 + [False] * 4
    assert 0 < verdict.exposures[2] == verdict.exposures[3] and not verdict.exposures[4:].any()
    assert "(eps_i = B for 2 of 6 clients)" in certificates.report(case, verdict)["note"]
    # Where the two hold next to nothing of the sample, the bound says something all the same.
    case = replace(case, sizes=np.array([1, 1, *[10**9] * 4]))
    verdict = certificates.certify(case)
    assert verdict.bound is not None and verdict.bound.value < 0.1
    note = certificates.report(case, verdict)["note"]
    assert note.startswith("For 2 of 6 clients, the bound uses the trivial")


def test_an_overflow_does_not_stop_the_neighbours(tmp_path: Path) -> None:
    record = execute(small(orthogonalizer={"lambda": 1e-300}), tmp_path / "a")
    certificates = np.loadtxt(tmp_path / "a" / "neighbours.csv", delimiter=",", skiprows=1)[:, 6]
    assert record["value"] > 1 and record["note"] and np.isinf(certificates).any()
    assert record["l_orth"] == lipschitz("smoothed-polar", "sharp", lam=1e-300)
    assert verdict_table(tmp_path / "a", record).row_count


def test_a_case_is_the_run_of_analysis() -> None:
    config = small(local={"batch": 4})
    case = certificates.CertifiedSetting(config, np.full(6, 15), analysis.Uniform(3, 0.01), l_g=0.5)
    what = case.run
    assert (what.lr, what.beta, what.rounds, what.local_steps, what.batch) == (0.05, 0.9, 8, 1, 4)
    assert what.constants == replace(constants(), smoothness=0.5)
    assert what.weights.tolist() == [1 / 6] * 6


def test_both_kinds_stand_side_by_side() -> None:
    """001's own network setting: five steps at eps = 1e-7, printed and proved (method of D.3)."""
    changes = ["orthogonalizer.name=newton-schulz", "orthogonalizer.eps=1e-7"]
    case = setting_of(None, changes, {})
    kinds = certificates.report(case, certificates.certify(case))["kinds"]
    names = {"steps": 5, "coefficients": "cubic", "eps": 1e-7}
    for kind in ("paper", "sharp"):
        assert kinds[kind]["l_orth"] == lipschitz("newton-schulz", kind, **names)
    assert kinds["paper"]["l_orth"] > 1e18 * kinds["sharp"]["l_orth"]
    given = setting_of(None, changes, {"l_orth": 2.0})
    assert certificates.report(given, certificates.certify(given))["kinds"] == {}


def test_the_momentum_of_the_matrix_task_never_has_full_rank() -> None:
    """But in the quotient by the ones vector, where Lemma D.12 asks for a run's momenta."""
    config = resolve(parse({"engine": {"dtype": "float64"}}))
    what = build_experiment(config)
    start = begin(what.recipe, what.task, 0)
    _, gradient = what.task.gradient(start.params, [what.shards[0].data])
    values = torch.linalg.svdvals(gradient["weight"][0])
    assert values[-1] <= 1e-14 * values[0] < values[-2]
    case = setting_of(None, ["orthogonalizer.name=exact-sign"], {})
    assert "from the momenta of the run (Lemma D.12)" in certificates.certify(case).refusal


def test_sizes_and_chances_that_are_none_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"size": 0}, {"size": 10.5}, {"size": -3}]
    for given in [*wrong, {"rho": math.nan}, {"rho": 0.0}]:
        with pytest.raises(fedmuon.InputError, match=f"{next(iter(given))} "):
            fedmuon.bound(**given)


@pytest.mark.parametrize(("words", "error"), [
    ("--l-g=-1", "--l-g is -1.0"), ("--l-orth=-1", "--l-orth is -1.0"), ("--rho=2", "--rho is 2.0"),
    ("--size=0", "--size is 0"), ("--rho=0.1 --clients=5 --per-round=5", "--rho has no effect"),
    ("runs/a --size=10", "Remove --size. With a run folder"),
    ("runs/a --lr=1 --set local.steps=2", "Remove --lr and --set local.steps=2. With"),
])  # fmt: skip
def test_errors_name_the_option(words: str, error: str) -> None:
    found = CliRunner().invoke(app, ["bound", *words.split()])
    assert isinstance(found.exception, fedmuon.InputError) and error in str(found.exception)


# Estimated constants: never above proved ones, and the curvature is the Hessian's norm.

TASK = MatrixTask(6, 3, torch.float64)


def batch(n: int) -> Batch:
    rng = np.random.default_rng(2)
    inputs = rng.standard_normal((n, 6))
    inputs /= np.linalg.norm(inputs, axis=1, keepdims=True)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(rng.integers(0, 3, n)))


def test_estimates_never_exceed_what_is_proved() -> None:
    models = [TASK.initial(np.random.default_rng(seed)) for seed in (0, 1)]
    found, proved = observed_constants(TASK, models, batch(40)), constants()
    assert 0.1 * proved.gradient_bound < found.gradient_bound <= proved.gradient_bound
    assert found.lipschitz == found.gradient_bound
    assert 0 < found.smoothness <= proved.smoothness
    assert 0.3 < found.loss_bound <= proved.loss_bound


def test_curvature_is_the_norm_of_the_hessian() -> None:
    some, X = batch(12), TASK.initial(np.random.default_rng(3))["weight"]
    expected = dense_norm(X[0], some)
    assert curvature(TASK, {"weight": X}, some) == pytest.approx(expected, rel=0.05)
    assert curvature(TASK, {"weight": X}, some) <= expected * (1 + 1e-6)


def network(**local: object) -> dict:
    return {
        "data": {"name": "digits", "train": 120, "test": 60, "minimum": 5},
        "task": {"name": "network", "model": "mlp"},
        "federation": {"clients": 4, "per-round": 2, "rounds": 2},
        "local": {"lr": 1e-3, "steps": 1, "aux-lr": 1e-3, **local},
    }


@pytest.mark.slow
def test_the_bound_of_a_network_is_estimated_and_says_so(tmp_path: Path) -> None:
    run(small(**network()), tmp_path / "a")
    case = finished_run.from_directory(tmp_path / "a")
    found = certificates.certify(case)
    assert found.bound is not None and found.bound.status == "estimated"
    assert any("true values may be larger" in line for line in found.bound.assumptions)
    assert not any("proved" in line for line in found.bound.assumptions)
    assert case.l_orth == pytest.approx(1 / np.sqrt(0.1))  # not the auxiliary step, which is 1
    assert certificates.report(case, found)["status"] == "estimated"


@pytest.mark.slow
def test_a_constant_that_is_its_author_s_word_is_said_of_networks_too(tmp_path: Path) -> None:
    tables = small(**network()).model_dump(by_alias=True)
    tables["orthogonalizer"] = {}
    half = fedmuon.Orthogonalizer(lambda m: 0.5 * m, 0.5)
    found = fedmuon.bound(fedmuon.run(tables, orthogonalizer=half, out=tmp_path / "a"))
    assert found["status"] == "estimated"
    assert any("claims L_orth = 0.5" in one for one in found["assumptions"])


@pytest.mark.slow
def test_adamw_beside_muon_has_no_constant(tmp_path: Path) -> None:
    run(small(**network(aux="adamw")), tmp_path / "a")
    verdict = certificates.certify(finished_run.from_directory(tmp_path / "a"))
    assert verdict.bound is None and "The step of AdamW" in verdict.refusal


def test_parameters_alone_say_nothing_of_a_network() -> None:
    config = resolve(small(**network()))
    verdict = certificates.certify(certificates.from_parameters(config, 30))
    assert "Run the experiment" in verdict.refusal


# The adversary against certificates: it finds none too small, and those that are made so.


def attacked(monkeypatch: pytest.MonkeyPatch, *given: str) -> int:
    """Its exit code."""
    monkeypatch.setattr("sys.argv", ["attack", *given])
    return attack.main()


@pytest.mark.slow
def test_no_neighbour_is_above_and_the_planted_error_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attacked(monkeypatch, *["--pairs", "1", "--only", "fedavgm", "sgd", "clipped-sign"]) == 0
    said = capsys.readouterr().out
    assert ", 0 above a certificate" in said and "exceeded in 0 cells" not in said
    assert "Poisson lots" in said  # why a recipe is not attacked


def forgotten(**changes: Any) -> Any:
    """What takes the recipe for another one."""
    return lambda config: replace(method_of(config), **changes)


def alike(chosen: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Weights 1/K."""
    return np.full(chosen.shape, 1 / chosen.shape[1])


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("place", "name", "instead", "family"), [
    pytest.param(certificates, "method_of", forgotten(server=0.0), "fedavgm", marks=SLOW),
    pytest.param(certificates, "method_of", forgotten(afresh=True), "sgd", marks=SLOW),
    (recursion, "by_samples", alike, "fedavg"),
])  # fmt: skip
def test_a_wrong_certificate_is_found_out(
    place: Any, name: str, instead: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the whole: a few cells of one family of recipes see it."""
    monkeypatch.setattr(place, name, instead)
    assert attacked(monkeypatch, "--pairs", "300", "--only", family) == 1


def test_what_is_not_attacked_is_told() -> None:
    """Every recipe is in one of the two lists."""
    every, refused = attack.families([])
    assert {recipe for recipe, _ in every} == {*MUON, *MAPLESS}
    assert not {*MUON, *MAPLESS} & {*refused} and "adamw" in refused


@pytest.mark.parametrize("samples", [1, 400, 10**6])
def test_rounding_grows_with_the_root_of_the_samples(samples: int) -> None:
    """R E steps of 1 + lr R E sqrt(n), each off by eps sqrt(3), for a matrix of 7 x 3."""
    config = small(local={"lr": 0.01, "steps": 2}, federation={"rounds": 5, "per-round": 2})
    seen = analysis.Realized(np.array([[0, 1]] * 5))
    case = certificates.CertifiedSetting(config, np.full(6, samples), seen, shape=(7, 3))
    found = certificates._rounding(case, method_of(config)) / np.finfo(float).eps
    assert found == pytest.approx(math.sqrt(3) * (1 + 0.1 * math.sqrt(samples)) * 10, rel=1e-12)
