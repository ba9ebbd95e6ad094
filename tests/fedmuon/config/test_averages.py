"""Each method averages as its paper says, unless the config names another aggregate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmuon
from fedmuon.analysis import Run, Uniform, certificate
from fedmuon.config.load import dump, load, parse
from fedmuon.config.methods import BY_SAMPLES, ORTHOGONALIZED, PRIVATE
from fedmuon.config.names import NAMES
from fedmuon.experiments.cli import main as program
from fedmuon.experiments.run import warn_once
from fedmuon.orthogonalize import Uncertified
from fedmuon.tasks.constants import constants

SIZES = (5, 12, 28)


def tables(**changes: dict) -> dict:
    base = {
        "data": {"name": "digits", "train": 45, "test": 40, "minimum": 1},
        "federation": {"clients": 3, "per-round": 3, "rounds": 2},
        "local": {"recipe": "fedavg", "lr": 1.0, "steps": 2},
    }
    return {name: base.get(name, {}) | changes.get(name, {}) for name in {**base, **changes}}


def parts() -> list[np.ndarray]:
    return np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


def main(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program(words)
    assert ended.value.code == 0


def average(**changes: dict) -> str:
    return parse({"local": {"recipe": "fedavg"}, **changes}).federation.aggregate


def test_each_method_has_the_average_of_its_paper() -> None:
    weighted = {*BY_SAMPLES}
    assert {"fedavg", "fedavgm", "fedprox", "fedper", "fednova"} <= weighted
    assert weighted <= {*NAMES["local.recipe"]}
    assert not weighted & {*ORTHOGONALIZED, *PRIVATE, "scaffold", "fedadam", "ditto"}
    for name in NAMES["local.recipe"]:
        local = {"recipe": name} | ({"personal": "head.*"} if name == "fedper" else {})
        task = {"name": "network"} if name == "fedper" else {}
        noise = {"privacy": {"noise": 1.0}} if name in PRIVATE else {}
        found = parse({"local": local, "task": task, **noise}).federation.aggregate
        assert found == ("by-samples" if name in weighted else "mean"), name


def test_auto_is_the_default_and_a_name_is_kept() -> None:
    assert average() == average(federation={"aggregate": "auto"}) == "by-samples"
    assert average(federation={"aggregate": "mean"}) == "mean"
    assert average(local={"recipe": "fedmuon"}, federation={"aggregate": "by-samples"}) == (
        "by-samples"
    )
    assert average(privacy={"level": "client", "noise": 1.0}) == "mean"
    assert average(compression={"uplink": "top-k", "feedback": "ef21"}) == "mean"


def test_fedavg_weights_by_samples_and_writes_it() -> None:
    given: dict[str, Any] = {"partition": parts()}
    runs = {name: fedmuon.run(tables(federation={"aggregate": name}), **given)
            for name in ("auto", "by-samples", "mean")}  # fmt: skip
    found = {name: one.summary["train_loss"] for name, one in runs.items()}
    assert found["auto"] == found["by-samples"] != found["mean"]
    text = (runs["auto"].path / "config.toml").read_text(encoding="utf-8")
    assert 'aggregate = "by-samples"' in text and 'aggregate = "mean"' not in text


def test_a_folder_of_version_1_0_keeps_the_plain_mean(tmp_path: Path) -> None:
    """Its config.toml says "mean". A config without the key, which resumes it, keeps that."""
    config = tables(federation={"aggregate": "mean"})
    whole = fedmuon.run(config, out=tmp_path / "whole").summary["train_loss"]
    folder = tmp_path / "run"

    def stop(record: Mapping[str, Any], state: object) -> None:
        if record["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedmuon.run(config, out=folder, callbacks=[stop])
    run = fedmuon.run(tables(), out=folder, resume=True)
    assert run.summary["train_loss"] == whole
    assert load(folder / "config.toml").federation.aggregate == "mean"
    assert parse(tables()).federation.aggregate == "by-samples"  # the control


def test_bounds_of_parameters_take_the_weights_into_account() -> None:
    """Equal sizes make the two means equal. Unequal weights depend on the schedule of a run."""

    def run(sizes: list[int], by_samples: bool) -> Run:
        counts = np.array(sizes)
        return Run(0.01, 0.0, 3, 2, counts, counts / counts.sum(), constants(),
                   by_samples=by_samples)  # fmt: skip

    part = Uniform(2, 0.05)
    equal = [certificate(run([15] * 4, one), 1.0, part) for one in (True, False)]
    assert (equal[0] == equal[1]).all()
    with pytest.raises(Uncertified, match="aggregate = 'mean'"):
        certificate(run([15, 15, 15, 40], True), 1.0, part)
    assert certificate(run([15, 15, 15, 40], False), 1.0, part).shape == (4,)
    whole = Uniform(4, 0.05)  # all clients in each round: the client of 40 samples weighs more
    found = [certificate(run([15, 15, 15, 40], one), 1.0, whole) for one in (True, False)]
    ratio = found[0] / found[1]
    assert np.allclose(ratio, np.array([15, 15, 15, 40]) / 85 * 4, rtol=1e-6)


def test_the_command_says_which_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    main(["list", "optimizers"])
    lines = capsys.readouterr().out.splitlines()
    assert any("fedavg " in line and "mean by samples" in line for line in lines)
    assert any("scaffold" in line and "plain mean" in line for line in lines)
    said = {}
    for name in ("mean", "by-samples"):
        file = tmp_path / f"{name}.toml"
        config = tables(federation={"aggregate": name, "partition": "quantity"},
                        data={"alpha": 0.2})  # fmt: skip
        file.write_text(dump(parse(config)), encoding="utf-8")
        main(["run", str(file), "--out", str(tmp_path / name)])
        said[name] = " ".join(capsys.readouterr().err.split())
        main(["show", str(tmp_path / name)])
        shown = " ".join(capsys.readouterr().out.split())
        assert f"average = {name}" in shown
        assert ("with equal weights" in shown) == (name == "mean")
    assert "this run of fedavg takes the plain mean" in said["mean"]
    assert "plain mean" not in said["by-samples"]


def test_a_default_config_has_no_note_and_a_card_with_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain mean is that of the papers of FedMuon and others, so only the card says it."""
    monkeypatch.setenv("COLUMNS", "200")
    rounds = "--set=federation.rounds=1"
    for place, more in enumerate(([], ["--set=local.recipe=scaffold", "--set=local.lr=0.1"])):
        main(["run", rounds, *more, "--out", str(tmp_path / str(place))])
        assert "plain mean" not in capsys.readouterr().err
    main(["show", str(tmp_path / "0")])
    assert "average = mean with equal weights │" in capsys.readouterr().out


def test_your_own_optimizer_with_the_default_mean_has_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    config = tables(federation={"partition": "quantity"}, data={"alpha": 0.2})
    del config["local"]["recipe"], config["local"]["lr"]
    chain = fedmuon.Chain((fedmuon.links.gradient(), fedmuon.links.descend(0.1)))
    own = fedmuon.Recipe(chain, lambda old, mean, states: (mean, states))
    fedmuon.run(config, recipe=own, out=tmp_path / "own")
    assert sum("your optimizer takes the plain mean" in one for one in caplog.messages) == 1


def test_runs_with_the_same_note_log_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    counts = []
    for place, seed in enumerate((0, 0, 7)):  # another seed has other sizes, but the same note
        config = tables(federation={"aggregate": "mean", "partition": "quantity", "seed": seed},
                        data={"alpha": 0.2})  # fmt: skip
        fedmuon.run(config, out=tmp_path / str(place))
        counts.append(sum("takes the plain mean" in one for one in caplog.messages))
    assert counts == [1, 1, 1]
