"""Suites of private runs: what each certifies, every client's account, and 000's printed table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from made_training import read
from typer.testing import CliRunner

from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.experiments.report import gather
from fedmuon.experiments.run import execute
from fedmuon.experiments.spending import spent
from fedmuon.experiments.studies import dp_muon_printed
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies.dp_muon_printed import Row, account
from fedmuon.experiments.studies.training_findings import budget_claims, sampling_in_words
from fedmuon.experiments.suites.suite import execute as make
from fedmuon.federated import accountant
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.runs.loop import OnRoundEnd

TINY = """
kind = "training"
title = "Private and not"
data = "digits"
seeds = [0]
base.federation = { clients = 5, per-round = 2, rounds = 4 }
base.local = { steps = 2, lr = 0.1 }
base.privacy = { lot = 20.0, delta = 1e-3 }
base.output.evaluate-every = 2
sweep = { key = "privacy.epsilon", values = [2.0, 8.0], label = "ε" }
variants.private.local.recipe = "dp-sgd"
variants.filtered.local.recipe = "disk-sgd"
"""


def made(folder: Path, text: str = TINY) -> Path:
    file = folder / "own.toml"
    file.write_text(text)
    make(kinds.find(str(file), None, "full", {}), folder / "out")
    return folder / "out"


@pytest.mark.slow
def test_a_private_suite_says_what_its_runs_certify(tmp_path: Path) -> None:
    out = made(tmp_path)
    for row in read(out / "runs.csv"):
        summary = json.loads((out / "runs" / row["run"] / "summary.json").read_text())
        assert float(row["epsilon"]) == summary["privacy"]["epsilon"] <= float(row["x"])
        assert row["certified"] == "True"
        own = [one for one in read(out / "clients.csv")
               if all(one[name] == row[name] for name in ("variant", "x", "seed"))]  # fmt: skip
        told = {one["client"]: float(one["epsilon"]) for one in own}
        assert told == summary["privacy"]["clients"]
        assert {one["target"] for one in own} == {row["x"]}
    found = gather(out)
    assert found[0].claims[-1].holds and "4 of 4 runs are certified" in found[0].claims[-1].detail
    assert found[0].head[-1] == "certified ε (zero-out)"
    assert found[0].pictures[-1].name == "clients" and "zero-out" in found[0].claims[-1].sentence
    for narrow in (False, True):
        assert found[0].pictures[-1].draw(narrow).axes


def test_runs_without_privacy_say_nothing_of_it(tmp_path: Path) -> None:
    text = TINY.replace("dp-sgd", "fedavg").replace("disk-sgd", "local-muon")
    for unread in ("base.privacy = { lot = 20.0, delta = 1e-3 }\n", ", lr = 0.1"):
        text = text.replace(unread, "")
    out = made(tmp_path, text.replace("privacy.epsilon", "local.lr").replace("8.0", "3.0"))
    assert "epsilon" not in read(out / "runs.csv")[0] and not (out / "clients.csv").exists()
    assert not any("certified ε" in name for name in gather(out)[0].head)


def columns(**changed: Any) -> tuple[dict, dict]:
    runs = {"epsilon": np.array([2.0, np.nan]), "certified": np.array(["True", "False"])}
    clients = {"epsilon": np.array([1.5, 2.0]), "target": np.array([2.0, 2.0])}
    clients |= {"client": np.array([0, 1])}
    certified = {"certified": changed.pop("certified", runs["certified"])}
    return runs | certified, clients | changed


def test_the_claim_about_accounts_can_fail() -> None:
    def verdicts(**change: np.ndarray) -> list[bool | None]:
        return [claim.holds for claim in budget_claims(*columns(**change))]

    assert verdicts() == [True]  # the second run diverged, and certifies nothing
    assert verdicts(epsilon=np.array([1.5, 2.001])) == [False]
    assert verdicts(certified=np.array(["False", "False"])) == [False]
    assert verdicts(target=np.array([0.0, 0.0])) == []  # there is no target to keep to


@pytest.mark.parametrize(("client", "sampling", "said"), [
    (0, ["poisson", "poisson"], "Poisson lots"),
    (0, ["poisson", "cyclic"], "Poisson lots, cyclic lots"),
    (-1, ["none", "none"], "public cohorts"),
])  # fmt: skip
def test_how_lots_are_drawn_is_said(client: int, sampling: list[str], said: str) -> None:
    runs, clients = columns(client=np.array([client, client]), sampling=np.array(sampling))
    (claim,) = budget_claims(runs, clients)
    assert sampling_in_words(clients) == said and said in claim.sentence


def private_run(out: Path, watch: OnRoundEnd = lambda record: None) -> dict[str, Any]:
    given = {"epsilon": 4.0, "lot": 6.0, "bound": 0.2}
    local = {"recipe": "dp-sgd", "lr": 0.1, "steps": 2}
    config = small(federation={"rounds": 4}, local=local, privacy=given)
    return execute(config, out, on_round_end=watch)


def stopping(record: dict[str, Any]) -> None:
    if record["round"] == 3:
        raise KeyboardInterrupt


def test_the_ledger_of_a_run_is_read_for_people(tmp_path: Path) -> None:
    summary = private_run(tmp_path / "run")["privacy"]
    shown = CliRunner().invoke(app, ["privacy", "spent", str(tmp_path / "run"), "--json"])
    found = json.loads(shown.output)
    assert found["delta"] == summary["delta"] and found["epsilon"] == summary["epsilon"]
    assert {name: one["upper"] for name, one in found["clients"].items()} == summary["clients"]
    assert all(one["lower"] <= one["upper"] <= one["rdp"] for one in found["clients"].values())
    people = CliRunner().invoke(app, ["privacy", "spent", str(tmp_path / "run")])
    assert f"{summary['epsilon']:.4f}" in people.output
    smaller = spent(tmp_path / "run", 1e-9)["epsilon"]
    assert smaller > found["epsilon"]


def test_a_running_ledger_is_left_alone_and_a_changed_one_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        private_run(tmp_path, stopping)
    before = spent(tmp_path)
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(file.read_bytes() + b'{"round": 4, "att')  # a line that is being written
    held = file.read_bytes()
    assert spent(tmp_path) == before and file.read_bytes() == held
    lines = held.split(b"\n")
    lines[2] = lines[2].replace(b'"steps": 2', b'"steps": 1')
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match="line 3 of"):
        spent(tmp_path)
    (tmp_path / "ledger.jsonl").write_bytes(b"\n".join(held.split(b"\n")[:3]) + b"\n")
    with pytest.raises(InputError, match="lacks a line that"):
        spent(tmp_path)
    (tmp_path / "config.toml").unlink()
    (tmp_path / "ledger.jsonl").write_bytes(held)
    with pytest.raises(InputError, match="Add --delta"):
        spent(tmp_path)
    with pytest.raises(InputError, match="no ledger"):
        spent(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name",
    ["dp-classification", "dp-federated", "disk-ablation", "dp-ftrl"],
)
@pytest.mark.parametrize("scale", ["small", "full"])
def test_private_suites_clip_jointly(name: str, scale: str) -> None:
    cells: Any = kinds.find(name, "mnist5k", scale, {}).cells
    assert len({one.name for one in cells}) == len(cells) > 3
    assert {one.config.privacy.clipping for one in cells} == {"flat"}


def test_noise_is_searched_for_once(tmp_path: Path) -> None:
    private_run(tmp_path / "a")
    before = accountant.cached_noise_for.cache_info()
    private_run(tmp_path / "b")
    after = accountant.cached_noise_for.cache_info()
    assert after.misses == before.misses and after.hits > before.hits


E2E: dict[str, Any] = {"population": 42043, "lot": 1024, "steps": 410, "delta": 8e-6}


def test_the_printed_table_is_per_release() -> None:
    asked = Row(blocks=49, noise=2.3395, printed=7.9852, **E2E)
    row = account("E2E", asked)["rows"][0]
    assert row["per_release"] == pytest.approx(7.98505, rel=1e-4)
    assert (row["joint_lower"], row["joint_upper"]) == pytest.approx((61.78, 61.98), abs=0.02)
    again = epsilon(row["needed"], 1024 / 42043, 410, 8e-6, 49)
    assert again.epsilon == pytest.approx(7.9852, rel=1e-3) and again.epsilon <= 7.9852
    rows = {name: np.array([value]) for name, value in row.items()}
    assert [claim.holds for claim in dp_muon_printed.claims(rows)] == [True, True, None]
    off = rows | {"printed": np.array([7.9])}
    assert dp_muon_printed.claims(off)[0].holds is False
    honest = rows | {"printed": rows["joint_upper"]}
    assert dp_muon_printed.claims(honest)[1].holds is False
    one = rows | {"blocks": np.array([1])}
    assert dp_muon_printed.claims(one)[2].holds is False
    single = account("E2E", Row(blocks=1, noise=0.7189, printed=8.0, **E2E))["rows"][0]
    found = dp_muon_printed.claims({name: np.array([value]) for name, value in single.items()})
    assert [claim.holds for claim in found] == [True, None, True]
    assert "would be certified for Poisson lots" in found[2].sentence
    assert "own runs did not draw Poisson lots" in dp_muon_printed.STANDS_ON
