"""Profiles of runs: the table of categories, shares of known times, files, and resumed runs."""

import importlib
import json
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import ray  # noqa: F401  modules of the table
from conftest import small
from free_alarm import free_alarm  # noqa: F401  a fixture

from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.stack_sampler import CALLER, LANE, category_of
from fedmuon.experiments.run import execute
from fedmuon.runs import process_profile
from fedmuon.runs.directory import RunDirectory
from fedmuon.runs.observers import evaluation
from fedmuon.runs.process_profile import ProcessProfile
from fedmuon.runs.profile_records import GROUPS, PROFILE, grouped, rounded
from fedmuon.runs.work_categories import CATEGORIES, EVALUATION, GRADIENTS, TABLE
from fedmuon.tasks.matrix import MatrixTask

ROOT = Path(__file__).resolve().parents[3]
BY_MODULE = ("fedmuon.federated", "fedmuon.runs")  # no entry for the package: each module has one


def codes_of(code: CodeType) -> set[str]:
    """The qualified names of a module's functions and classes, also of those inside functions."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {one.co_qualname for one in inner}.union(*map(codes_of, inner))


def missing_code(table: Mapping[str, str]) -> list[str]:
    """Entries that name no module, function or class."""
    missing = []
    for entry in table:
        module, _, name = entry.partition(":")
        if (names := names_in(module)) is None or (name and name not in names):
            missing.append(entry)
    return missing


@cache
def names_in(module: str) -> set[str] | None:
    """The names of the functions and classes of a module, or None if there is no such module."""
    try:
        file = importlib.import_module(module).__file__ or ""
    except ImportError:
        return None
    return codes_of(compile(Path(file).read_text("utf-8"), file, "exec"))


def modules() -> list[str]:
    """All modules of fedmuon that a run may load."""
    files = [
        file.relative_to(ROOT).with_suffix("")
        for folder in ("fedmuon", "clients", "server")
        for file in (ROOT / folder).rglob("*.py")
        if not file.name.startswith("__")
    ]
    return [".".join(("fedmuon", *file.parts[file.parts[0] == "fedmuon" :])) for file in files]


def uncategorized(table: Mapping[str, str]) -> list[str]:
    """Modules that would silently count for their callers, or for a package that has no default."""
    missing = []
    for module in modules():
        parts = module.split(".")
        names = {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
        if not names & {*table} or any(package in table for package in BY_MODULE):
            missing.append(module)
    return missing


def test_the_table_names_code_that_exists_and_categories() -> None:
    assert missing_code(TABLE) == []
    assert {*TABLE.values()} - {CALLER, LANE} == {*CATEGORIES}
    wrong = {"fedmuon.gone": "data", "fedmuon.core.rng:gone": "data", "threading:Event": "idle"}
    assert missing_code(wrong) == [*wrong][:2]


def test_every_module_of_a_run_has_a_category() -> None:
    assert len(modules()) > 150 and uncategorized(TABLE) == []
    for entry in ("fedmuon.federated.rounds", "fedmuon.optim"):
        without = {name: value for name, value in TABLE.items() if name != entry}
        assert uncategorized(without), entry


@pytest.mark.parametrize(("module", "function", "category"), [
    ("fedmuon.federated.oracles", "Exact.context.<locals>.gradient", "gradients"),
    ("fedmuon.federated.oracles", "Exact._sound", "checks"),
    ("fedmuon.tasks.networks", "NetworkTask.losses", CALLER),
    ("fedmuon.orthogonalize.spectral", "spectral_map.<locals>.apply", "orthogonalization"),
    ("fedmuon.optim.links", "map_matrices.<locals>.update", "orthogonalization"),
    ("fedmuon.optim.links", "momentum.<locals>.update", "optimizer"),
    ("fedmuon.tasks.base", "repeated.<locals>.<dictcomp>", "copies"),
    ("fedmuon.federated.wire", "pack", "messages"),
    ("fedmuon.privacy.ledger", "Ledger.append", "records"),
    ("torch.functional", "norm", CALLER),
])  # fmt: skip
def test_code_has_its_category(module: str, function: str, category: str) -> None:
    assert category_of(TABLE, module, function) == category


# Known times


def slowed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Let gradients and evaluations sleep, and return their seconds by timers."""
    measured = {GRADIENTS: 0.0, EVALUATION: 0.0}

    def slow(work: Callable[..., Any], category: str, seconds: float) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            time.sleep(seconds)
            result = work(*arguments)
            measured[category] += time.perf_counter() - begun
            return result

        return timed

    monkeypatch.setattr(MatrixTask, "gradient", slow(MatrixTask.gradient, GRADIENTS, 0.06))
    monkeypatch.setattr(evaluation, "evaluate", slow(evaluation.evaluate, EVALUATION, 0.02))
    return measured


def shares_and_times(out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, dict]:
    with monkeypatch.context() as patch:
        measured = slowed(patch)
        summary = execute(small(output={"profile": True, "evaluate-every": 4}), out)
    (profile,) = summary[PROFILE]
    assert profile["process"] == "run"
    return profile["seconds"], measured


@pytest.mark.usefixtures("free_alarm")
def test_shares_of_a_run_are_its_known_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the time sleeps in a known place. With a wrong table, it is found elsewhere."""
    seconds, measured = shares_and_times(tmp_path / "run", monkeypatch)
    total = sum(seconds.values())
    for category, expected in measured.items():
        assert abs(seconds[category] - expected) < 0.12 * total, (category, expected, seconds)
    records = RunDirectory(tmp_path / "run").records()
    assert all(len(record[PROFILE]) >= 1 for record in records[1:])
    of_rounds = sum(sum(record[PROFILE].values()) for record in records)
    assert of_rounds <= total + 1e-3 and total == pytest.approx(records[-1]["seconds"], rel=0.3)
    swapped = {GRADIENTS: EVALUATION, EVALUATION: GRADIENTS}
    wrong = {name: swapped.get(value, value) for name, value in TABLE.items()}
    monkeypatch.setattr(process_profile, "TABLE", wrong)
    seconds, measured = shares_and_times(tmp_path / "wrong", monkeypatch)
    wide = 0.12 * sum(seconds.values())
    assert any(abs(seconds.get(name, 0) - expected) > wide for name, expected in measured.items())


@pytest.mark.usefixtures("free_alarm")
def test_a_profile_changes_no_result_also_after_an_interruption(tmp_path: Path) -> None:
    """The sampler of an interrupted run ends, and the resumed run adds to the earlier rounds."""
    execute(small(), tmp_path / "without")

    def stop(record: Mapping[str, Any], state: object) -> None:
        if record["round"] == 5:
            raise Interrupted

    config, out = small(output={"profile": True}), tmp_path / "with"
    with pytest.raises(Interrupted):
        execute(config, out, callbacks=[stop])
    before = RunDirectory(out).records()
    summary = execute(None, out, resume=True)
    for name in ("model.safetensors", "momentum.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    records = RunDirectory(out).records()
    saved = [record[PROFILE] for record in before][:4]  # the checkpoint of round 4
    assert [record[PROFILE] for record in records][:4] == saved
    total = sum(sum(record[PROFILE].values()) for record in records)
    assert sum(summary[PROFILE][0]["seconds"].values()) >= total - 1e-3
    assert list(summary)[-1] == PROFILE and not (out / "worker-profiles.json").exists()


def test_a_deployment_is_rejected() -> None:
    with pytest.raises(InputError, match="each message starts a process that ends"):
        small(output={"profile": True}, engine={"name": "deployment"})


# Rounds


def test_groups_of_rounds_are_sums() -> None:
    """Against a loop over all rounds; some rounds are missing."""
    for last in (1, 39, 41, 1000):
        by_round = {n: {"data": 0.25 * n, "idle": 1.0} for n in range(1, last + 1) if n % 7}
        groups = grouped(by_round, last)
        assert 1 <= len(groups) <= GROUPS
        for group in groups:
            inside = [
                by_round[n] for n in range(group["first"], group["last"] + 1) if n in by_round
            ]
            assert group["seconds"]["data"] == sum(part["data"] for part in inside)
            assert group["seconds"]["idle"] == len(inside)
        assert sum(group["seconds"]["idle"] for group in groups) == len(by_round)
        assert groups[-1]["last"] <= last
    assert grouped({}, 5) == []


@pytest.mark.usefixtures("free_alarm")
def test_waiting_counts_for_the_round_of_the_next_message() -> None:
    profile = ProcessProfile()
    with profile.of_round(0, wanted=False):
        pass
    assert profile.end() == {}
    with profile.of_round(0):
        time.sleep(0.05)
    begun = time.perf_counter()
    time.sleep(0.2)
    with profile.of_round(1):
        waited = time.perf_counter() - begun
    with profile.of_round(1):
        time.sleep(0.05)
    time.sleep(0.2)  # for no round
    by_round = profile.end()
    assert [*by_round] == [1, 2] and "idle" not in by_round[1]
    assert 0.2 < by_round[2]["idle"] < waited + 0.2 + by_round[1]["other"]
    assert profile.end() == {}


def test_files_have_no_zeros_and_one_order() -> None:
    mixed = {"idle": 0.00001, "records": 2.00004, "gradients": 1.0}
    assert json.dumps(rounded(mixed)) == '{"gradients": 1.0, "records": 2.0}'
