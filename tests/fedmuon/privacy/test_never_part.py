"""What `privacy spent` says of clients that never took part, and of the bounds of an audit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from typer.testing import CliRunner

import fedmuon
from fedmuon.experiments import spending
from fedmuon.experiments.auditing import one_run
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.runs.directory import AUDIT

EXAMPLE: dict[str, Any] = {"lot": 6.0, "noise": 1.0, "bound": 0.2, "delta": 1e-3}
CLIENT: dict[str, Any] = {"level": "client", "cohorts": "fixed", "noise": 1.0, "delta": 1e-3}
RECIPES = (("dp-sgd", EXAMPLE), ("fedavg", CLIENT))


@pytest.mark.parametrize(("recipe", "privacy"), RECIPES)
def test_who_takes_part_in_no_round_has_spent_nothing(
    recipe: str, privacy: dict[str, Any], tmp_path: Path
) -> None:
    """Three of six clients in the one round. That is shown, and nothing that was released moves
    when their samples do, to the last bit; a control, it does with those of a participant."""
    rng = np.random.default_rng(0)
    inputs, labels = torch.from_numpy(rng.standard_normal((90, 5))), torch.arange(90) % 3
    config = {
        "federation": {"clients": 6, "per-round": 3, "rounds": 1},
        "data": {"minimum": 2},
        "local": {"recipe": recipe, "lr": 0.1, "steps": 1},
        "privacy": {**privacy, "insecure-reproducible-noise": True},
        "engine": {"dtype": "float64"},
    }

    def released(name: str, moved: np.ndarray) -> bytes:
        found = inputs.clone()
        found[moved] = found[moved].flip(1)
        fedmuon.run(config, data=(found, labels), out=tmp_path / name)
        return (tmp_path / name / "model.safetensors").read_bytes()

    plain = released("plain", np.array([], int))
    spent = spending.spent(tmp_path / "plain")
    taken = np.load(tmp_path / "plain" / "schedule.npy").ravel()
    assert spent["never_part"] == 3 and {*spent["clients"]} == {str(one) for one in taken}
    shown = CliRunner().invoke(app, ["privacy", "spent", str(tmp_path / "plain")]).output
    assert "3 never took part" in " ".join(shown.split())
    with np.load(tmp_path / "plain" / "partition.npz") as held:
        owner, index = held["client"], held["train_index"]
    assert released("others", index[~np.isin(owner, taken)]) == plain
    assert released("own", index[owner == taken[0]]) != plain


def test_a_client_that_no_secret_cohort_drew_has_the_amplified_epsilon(tmp_path: Path) -> None:
    """Cohorts of one of six on average: somebody is in none of two rounds, and nobody has 0."""
    config = small(
        federation={"rounds": 2, "per-round": 1},
        local={"recipe": "fedavg", "lr": 0.1},
        privacy={"level": "client", "noise": 1.0, "delta": 1e-3},
    )
    execute(config, tmp_path)
    rows = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert len({who for row in rows for who in json.loads(row)["participants"]}) < 6
    spent = spending.spent(tmp_path)
    amplified = epsilon(1.0, 1 / 6, 2, 1e-3, adjacency="add-remove")
    assert spent["never_part"] == 0 and spent["clients"]["each"]["upper"] == amplified.upper > 0


@pytest.mark.parametrize("best", ["binomial", "trade_off", "declared"])
def test_the_best_bound_of_an_audit_is_shown_by_its_name(
    best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(small(federation={"rounds": 1}, local={"recipe": "dp-sgd"}, privacy=EXAMPLE), tmp_path)
    bounds = {name: 0.75 if name == best else 0.25 for name in one_run.BOUNDS}
    counts = max(bounds["binomial"], bounds["trade_off"])
    record = {**bounds, "epsilon_at_least": counts, "confidence": 0.95, "delta": 1e-3}
    (tmp_path / AUDIT).write_text(json.dumps(record))
    monkeypatch.setattr(one_run, "stored", lambda folder: record)
    audit = spending.spent(tmp_path)["audit"]
    assert (audit["bound"], audit["best"], audit["epsilon_at_least"]) == (best, 0.75, counts)
    shown = " ".join(CliRunner().invoke(app, ["privacy", "spent", str(tmp_path)]).output.split())
    assert f"audited, {best}" in shown and ">= 0.7500" in shown and ">= 0.2500" not in shown
    assert one_run.BOUNDS[best].split(";")[0] in shown
