"""The suite of language models: its choice, its losses, its claims, which can fail."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from small_suites import STUDIES, save_language_model
from study_rows import columns, one_seed
from suite_files import command

from fedmuon.analysis.report.tables import Columns, where
from fedmuon.core.errors import InputError
from fedmuon.data.unseen import UNSEEN, VALIDATION
from fedmuon.experiments.studies import language_models
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.suite import Work
from fedmuon.federated.client_data import left_out

PAIR = ("Muon", "AdamW")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language-models")
    save_language_model(folder)
    return folder


@pytest.fixture(autouse=True)
def there(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(place / "cache"))
    monkeypatch.chdir(place)


def suite(folder: Path, **changes: Any) -> Work:
    """The tiny suite with some changed tables."""
    content = {"kind": "language-models", **STUDIES["language-models"]}
    content = contents.merged(content, changes)
    (folder / "suite.toml").write_text(tomli_w.dumps(content))
    return find(str(folder / "suite.toml"), None, "full", {})


def test_the_step_size_with_the_smallest_validation_loss_is_chosen(tmp_path: Path) -> None:
    """And rows contain what `fedmuon run` records with this step size and seed."""
    (cell, *_) = suite(tmp_path).cells
    record = cell.compute()
    (chosen,) = (row for row in record["tuning"] if row["chosen"])
    assert chosen["validation_loss"] == min(row["validation_loss"] for row in record["tuning"])
    lr = float(chosen["step_sizes"].removeprefix("lr = "))
    row = record["rows"][1]
    assert row["seed"] == 1 and row["step_sizes"] == chosen["step_sizes"]
    tables = contents.merged(cell.tables, {"federation": {"seed": 1}, "local": {"lr": lr}})  # type: ignore
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    command("run", tmp_path / "run.toml", "--out", (out := tmp_path / "run"))
    summary = json.loads((out / "summary.json").read_text())
    assert row["unseen_loss"] == pytest.approx(summary["unseen_loss"], rel=1e-6)
    assert row["own_loss"] == pytest.approx(summary["client_text_loss"], rel=1e-6)
    records = [json.loads(line) for line in (out / "rounds.jsonl").open()]
    assert row["bytes_up"] == sum(line["bytes_up"] for line in records)
    assert row["simulated_seconds"] == pytest.approx(records[-1]["simulated_seconds"])
    assert summary["validation_clients_loss"] != summary["unseen_loss"]
    written = json.loads((out / "continuations.json").read_text())
    of_seed_0 = {text["text"] for text in record["samples"] if text["method"] == "pretrained"}
    assert {language_models.in_one_line(text["before"]) for text in written} == of_seed_0


def test_no_client_trains_and_measures(tmp_path: Path) -> None:
    """With the tuning seeds and with the comparison seeds."""
    (cell, *_) = suite(tmp_path).cells
    config = cell.config  # type: ignore
    names = [{*source.owner_names} for group in (UNSEEN, VALIDATION)
             if (source := left_out(config, group))]  # fmt: skip
    for seed in (0, 1, 9):
        _, experiment = cell._built({"local.lr": 0.1}, seed)  # type: ignore
        assert len(experiment.shards.offsets) - 1 == 6 - sum(map(len, names)) == 3
    assert not names[0] & names[1]


@pytest.mark.parametrize("name", ["unseen-clients", "validation-clients"])
def test_both_groups_are_needed(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unseen-clients or validation-clients is 0"):
        suite(tmp_path, base={"data": {name: 0}})


def test_settings_that_have_no_effect_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains the name 'SGD'"):
        suite(tmp_path, claims=[{"better": "SGD", "than": "AdamW, factors"}])
    with pytest.raises(InputError, match="seed 9 is in seeds and in tuning-seeds"):
        suite(tmp_path, seeds=[9])
    then = {"AdamW, factors": {"then": {"local.weight-decay": [0.1, 0.2]}}}
    with pytest.raises(InputError, match="then has no effect"):
        suite(tmp_path, methods=then)
    with pytest.raises(InputError, match=r"output\.evaluate-every has no effect.* set by every"):
        suite(tmp_path, base={"output": {"evaluate-every": 5}})
    with pytest.raises(InputError, match=r"unseen-clients = .* no effect.* partition = 'iid'"):
        suite(tmp_path, base={"federation": {"partition": "iid"}})
    with pytest.raises(InputError, match=r"--set data\.name has no effect.* set by \[texts\."):
        find("language-models", None, "small", {"data": {"name": "fortunes"}})


def test_options_of_the_data_can_be_changed() -> None:
    changes: Any = {"data": {"options": {"windows": 2, "clients": "R*, J*, 1*, 2*"}}}
    work = find("language-models", None, "small", changes)
    for cell in work.cells:
        assert cell.tables["data"]["options"] == changes["data"]["options"]  # type: ignore
    again = "--set data.options.windows=2 --set 'data.options.clients=R*, J*, 1*, 2*'"
    assert again in work.request.again


def rows(fall: float = 0.1, spread: float = 0.001, edge: str = "") -> Columns:
    """Muon ends `fall` below AdamW, with differences that vary between seeds by `spread`."""
    return columns([
        {"texts": "t", "method": method, "seed": seed, "edge": edge * (method == "Muon"),
         "unseen_loss": 3.0 - (method == "Muon") * (fall + spread * seed) + 0.2 * seed,
         "fall": 0.5 + 0.01 * seed}
        for method in ("Muon", "AdamW") for seed in range(3)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("found", "verdict", "word"),
    [
        (rows(), "holds", "'Muon' wins against 'AdamW'."),
        (rows(-0.1), "refuted", "'Muon' loses against 'AdamW'."),
        (rows(0.0, 0.1), "inconclusive", "'Muon' compared with 'AdamW' is inconclusive."),
        (rows(edge="local.lr"), "inconclusive", "'Muon' compared with 'AdamW' is inconclusive."),
        (one_seed(rows()), "inconclusive", "'Muon' compared with 'AdamW' is inconclusive."),
    ],
    ids=["better", "worse", "alike", "at an end", "one seed"],
)
def test_the_sentence_follows_from_the_losses(found: Columns, verdict: str, word: str) -> None:
    assert language_models.lower(found, "t", *PAIR).verdict == verdict
    assert language_models.sentence_about_muon(found, [PAIR]) == (
        f"On t, after equally many rounds: {word}"
    )


def test_only_comparisons_of_muon_with_another_optimizer_are_in_the_sentence() -> None:
    assert language_models.sentence_about_muon(rows(), [("AdamW", "Muon"), ("Muon", "Muon")]) == ""
    assert language_models.lower(rows(), "t", "Muon", "SGD").verdict != "holds"


def test_a_run_that_diverged_loses() -> None:
    found = rows()
    found["unseen_loss"][found["method"] == "AdamW"] = math.nan
    assert language_models.lower(found, "t", *PAIR).verdict == "holds"
    assert language_models.lower(found, "t", *reversed(PAIR)).verdict == "refuted"


def test_the_fall_below_the_pretrained_model_can_be_refuted() -> None:
    assert language_models.improves(rows(), "t").verdict == "holds"
    found = rows()
    found["fall"][:] = -found["fall"]
    assert language_models.improves(found, "t").verdict == "refuted"
    assert len(where(found, method="Muon")["fall"]) == 3


def test_differences_are_paired() -> None:
    """Seeds differ by 0.2, and paired differences by 0.001."""
    _, _, lines = language_models.differences(rows(), [PAIR])
    value, half = str(lines[0][2]).split(" ± ")
    exact = -(0.1 + 0.001 * np.arange(3))
    assert float(value) == pytest.approx(exact.mean(), abs=1e-4)
    assert float(half) == pytest.approx(4.3027 * 0.001 / math.sqrt(3), abs=1e-4)
