"""Runs as a user sees them: the command, its directory, resume after a kill, and bad input."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.nursery import Nursery
from conftest import quick, small
from cut_off import run_until
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fedmuon.config.load import Config, dump, parse
from fedmuon.config.load import load as load_config
from fedmuon.core.errors import InputError
from fedmuon.data import load
from fedmuon.experiments.cli import app, main
from fedmuon.experiments.cli.options import chosen_folder
from fedmuon.experiments.cli.show import Progress
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import read_source
from fedmuon.runs import fixed_files
from fedmuon.runs import prepare as preparation
from fedmuon.runs.directory import FIXED
from fedmuon.runs.prepare import prepare
from fedmuon.tasks.matrix import rate

ROOT = Path(__file__).resolve().parents[3]
TENSORS = {"initial.safetensors", "model.safetensors", "momentum.safetensors"}
FIRST = {"config.toml", "partition.npz", "schedule.npy"}
FILES = {*TENSORS, *FIRST, "SHA256SUMS", "rounds.jsonl", "summary.json"}


def digest(folder: Path) -> dict[str, str]:
    """A hash per file of the run that must not depend on when it was made."""
    names = TENSORS | FIRST
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def test_one_seed_one_model_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("1", 3), ("2", 3), ("3", 4)):
        execute(small(federation={"seed": seed}), tmp_path / name)
    assert digest(tmp_path / "1") == digest(tmp_path / "2")
    other = digest(tmp_path / "3")
    assert all(other[name] != value for name, value in digest(tmp_path / "1").items())


def test_the_directory_can_be_replayed_by_hand(tmp_path: Path) -> None:
    """From the files alone, in numpy: FedMuon with smoothed polar, and the summary's numbers."""
    config = small(data={"name": "digits", "train": 300, "test": 200})
    summary = execute(config, tmp_path / "run")
    assert {file.name for file in (tmp_path / "run").iterdir()} == FILES
    inputs, labels = load("digits")
    with np.load(tmp_path / "run" / "partition.npz") as split:
        train, client, test = split["train_index"], split["client"], split["test_index"]
    schedule = np.load(tmp_path / "run" / "schedule.npy")
    assert schedule.shape == (8, 3) and len(train) == len(client) == 300
    X = load_file(tmp_path / "run" / "initial.safetensors")["weight"]
    M = np.zeros_like(X)
    for row in schedule:
        Xs, Ms = [], []
        for i in row:
            U, y = inputs[train[client == i]], labels[train[client == i]]
            P = np.exp(U @ X)
            P /= P.sum(1, keepdims=True)
            right = P[np.arange(len(y)), y][:, None]
            Mi = 0.9 * M + 0.1 * U.T @ (right * (P - np.eye(10)[y])) / len(y)
            u, s, v = np.linalg.svd(Mi, full_matrices=False)
            Xs.append(X - 0.05 * (u * (s / np.sqrt(s**2 + 0.1))) @ v)
            Ms.append(Mi)
        X, M = np.mean(Xs, 0), np.mean(Ms, 0)
    held = load_file(tmp_path / "run" / "model.safetensors")["weight"]
    np.testing.assert_allclose(held, X, rtol=1e-10, atol=1e-13)
    P = np.exp(inputs @ X)
    P /= P.sum(1, keepdims=True)
    losses = 1 - P[np.arange(len(labels)), labels]
    assert summary["train_loss"] == pytest.approx(losses[train].mean(), rel=1e-9)
    assert summary["test_loss"] == pytest.approx(losses[test].mean(), rel=1e-9)
    gap = losses[test].mean() - losses[train].mean()
    assert summary["test_gap"] == pytest.approx(gap, rel=1e-6)
    assert summary["accuracy"] == pytest.approx((P.argmax(1) == labels)[test].mean())
    assert {"seconds", "engine", "seed", "versions"} <= set(summary)


@pytest.mark.parametrize("last", quick([1, 2, 3, 5, 7], [1, 7]))
def test_resume_after_any_round_gives_the_same_bytes(tmp_path: Path, last: int) -> None:
    config = small(local={"recipe": "fedmuon-aligned", "steps": 2, "batch": 5})
    execute(config, tmp_path / "whole")
    run_until(last, config, tmp_path / "cut")
    execute(None, tmp_path / "cut", resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    for run in ("cut", "whole"):
        lines = (tmp_path / run / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == list(range(1, 9))


def test_a_run_of_a_version_with_fewer_keys_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.toml lacks keys, which have their defaults; any other difference is refused."""
    config = small(local={"steps": 2})
    execute(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(
            fixed_files, "dump", lambda config: dump(config).replace("epochs = 0.0\n", "")
        )
        run_until(3, config, tmp_path / "old")
    assert "epochs" not in (tmp_path / "old" / "config.toml").read_text()
    with pytest.raises(InputError, match="differ from the settings that you passed"):
        execute(small(local={"steps": 3}), tmp_path / "old", resume=True)
    execute(config, tmp_path / "old", resume=True)
    model = "model.safetensors"
    assert (tmp_path / "old" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


def test_resume_after_kill_9(forks: Nursery, tmp_path: Path) -> None:
    out = f"--out={tmp_path / 'cut'}"
    settings = [
        "--set=data.name=synthetic", "--set=data.train=400", "--set=data.test=100",
        "--set=federation.rounds=120", "--set=engine.device=cpu",
    ]  # fmt: skip
    process = forks.start(["run", out, *settings])
    deadline = time.monotonic() + 200
    while not (tmp_path / "cut" / "checkpoint.safetensors").exists():  # of round 10 of 120
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    assert not (tmp_path / "cut" / "summary.json").exists()
    again = forks.run(["run", out, "--resume"], 200)
    assert again.code == 0, again.err
    execute(load_config(tmp_path / "cut" / "config.toml"), tmp_path / "whole")
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    execute(small(), tmp_path / "a")
    before = digest(tmp_path / "a")
    assert execute(None, tmp_path / "a", resume=True)["rounds"] == 8
    with pytest.raises(InputError, match="not empty"):
        execute(small(), tmp_path / "a")
    with pytest.raises(InputError, match="differ from the settings that you passed"):
        execute(small(local={"lr": 0.5}), tmp_path / "a", resume=True)
    assert digest(tmp_path / "a") == before


def test_a_command_is_resumed_by_saying_it_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["run", "--set=data.name=synthetic", "--set=federation.rounds=2", f"--out={out}"]
    assert CliRunner().invoke(app, command).exit_code == 0
    model = (out / "model.safetensors").read_bytes()
    for more in ([], ["--engine=inline"], ["--set=federation.rounds=2"]):
        again = [*command[:2], command[-1], *more, "--resume"]
        assert CliRunner().invoke(app, again).exit_code == 0
    for option, key, values in (
        ("--set=federation.rounds=3", "federation.rounds", (2, 3)),
        ("--seed=5", "federation.seed", (0, 5)),
    ):
        said = f"passed: {key} is {values[0]} in the file, but {values[1]} in your settings"
        with pytest.raises(InputError, match=said):
            invoke("run", "--resume", f"--out={out}", option)
    assert (out / "model.safetensors").read_bytes() == model


def invoke(*words: object) -> None:
    CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)


def test_resume_is_advised_only_where_it_can_follow(tmp_path: Path) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    execute(small(), out)
    other.mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(InputError, match="or resume the run with --resume"):
        execute(small(), out)
    with pytest.raises(InputError, match=r"Choose another folder with --out\.$"):
        execute(small(), other)
    for config in (None, small()):
        with pytest.raises(InputError, match="is not a run folder, because it contains files"):
            execute(config, other, resume=True)
    (out / "config.toml").unlink()
    with pytest.raises(InputError, match=r"Choose another folder with --out\.$"):
        execute(small(), out)
    for config in (None, small()):
        with pytest.raises(InputError, match=r"config.toml is missing, so .* without --resume"):
            execute(config, out, resume=True)


def test_there_is_no_run_to_resume(tmp_path: Path) -> None:
    for folder, said in ((tmp_path, "has no config.toml"), (tmp_path / "typo", "does not exist")):
        with pytest.raises(InputError, match=f"{said}, so there is no run .* leave --resume out"):
            invoke("run", "--resume", "--out", folder)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file, not a run folder"):
        invoke("run", "--resume", "--out", tmp_path / "file")


def test_a_file_in_the_place_of_a_run_folder_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for out in (file, file / "run"):
        said = f"cannot create {out} \\({file} is a file, but a folder is needed\\): choose another"
        with pytest.raises(InputError, match=said):
            execute(small(), out)


@pytest.mark.parametrize("victim", sorted(FIXED))
def test_a_damaged_run_is_refused(tmp_path: Path, victim: str) -> None:
    run_until(5, small(), tmp_path / "a")
    file = tmp_path / "a" / victim
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(InputError, match=victim):
        execute(None, tmp_path / "a", resume=True)


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not a run folder"):
        execute(small(), tmp_path, resume=True)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


BAD = [
    (["--set", "data.name=imagenet"], "[data] name = 'imagenet'"),
    (["--set", "federation.per-round=30"], "per-round"),
    (["--set", "orthogonalizer.lambda=0"], "[orthogonalizer] lambda = 0"),
    (["--set", "data.train=4990"], "4990"),
    (["missing.toml"], "missing.toml"),
    (["--resume"], "--out"),
    (["--lr", "0.1"], "write --set local.lr=0.1"),
    (["--normalize=ball"], "write --set data.normalize=ball"),
    (["--set", "engine.device=cuda:9"], "cuda:9"),
    (["--set", "data.name=fashion-mnist", "--set", "data.folder=/nowhere"], "/nowhere"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    out = [] if "--resume" in arguments else ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments, *out])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert words in captured.err.replace("\n", "") and "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()


def test_no_room_on_the_disk_leaves_nothing_half_written(forks: Nursery, tmp_path: Path) -> None:
    """A process whose files may not pass 4 kB: the writes fail as on a full disk."""
    arguments = ["run", "--out", str(tmp_path / "out"), "--set", "data.name=digits",
                 "--set", "data.train=1000", "--set", "data.test=500"]  # fmt: skip
    ended = forks.run(arguments, tamper={"longest": 4096})
    assert ended.code == 2 and "cannot write" in ended.err, ended.err
    assert all(file.stat().st_size < 4096 for file in (tmp_path / "out").iterdir())
    assert not [file for file in (tmp_path / "out").iterdir() if file.name.startswith(".")]


def test_a_loss_that_grows_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """And one that falls is not, nor one of which only the end was seen."""
    network = {"name": "network", "model": "mlp"}
    (file := tmp_path / "config.toml").write_text(dump(small(task=network)))
    for number, lr in enumerate((0.01, 1e3)):
        out = tmp_path / str(number)
        with pytest.raises(SystemExit) as ended:
            main(["run", str(file), "--set", f"local.lr={lr}", "--out", str(out)])
        assert not ended.value.code
        said = "Lower [local] lr" in capsys.readouterr().out.replace("\n", " ")
        assert said == (lr > 1)
    progress = Progress(Console())
    progress.on_start(5, 8)
    for round, loss in ((6, 1.0), (7, 2.0)):
        progress.on_round_end({"round": round, "client_loss": loss})
    assert not progress.risen({})


def test_evaluated_losses_decide_whether_the_loss_grew() -> None:
    """The client losses of two rounds are those of different clients."""
    progress = Progress(Console())
    progress.on_start(0, 8)
    for round, loss in ((1, 3.2), (8, 3.525)):
        progress.on_round_end({"round": round, "client_loss": loss})
    assert "the loss grew from 3.2 to 3.525" in progress.risen({"test_loss": 3.8})
    losses = {"untrained": {"test_loss": 4.05, "train_loss": 3.9}, "test_loss": 3.79}
    assert not progress.risen(losses)
    risen = progress.risen({**losses, "test_loss": 12.9})
    assert risen == "Note: the test loss grew from 4.05 to 12.9. Lower [local] lr."
    without_tests = {"untrained": {"train_loss": 3.9}, "train_loss": 3.7}
    assert not progress.risen(without_tests)


def test_a_folder_that_cannot_be_made() -> None:
    with pytest.raises(InputError, match="cannot create"):
        execute(small(), Path("/proc/nowhere/run"))


def test_the_command_reads_well() -> None:
    for arguments in (["--help"], ["run", "--help"]):
        shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
        assert shown.exit_code == 0
    assert "--resume" in shown.output and "--set" in shown.output


def test_doctor_names_every_source(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fedmuon.tasks.matrix.rate"
    monkeypatch.setattr(name, lambda kernel, *given: rate(kernel, 64, 64, 64, *given[3:]))
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "140"})
    assert shown.exit_code == 0, shown.output
    for name in ("mnist5k", "fashion-mnist", "cifar10", "torch", "GFLOP/s", "[data] folder"):
        assert name in shown.output


def test_the_default_config_is_written_whole(tmp_path: Path) -> None:
    execute(small(), tmp_path / "a")
    assert load_config(tmp_path / "a" / "config.toml") == small()


def test_the_environment_is_left_as_it_was() -> None:
    before = dict(os.environ)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("said", "before", "count"),
    [({}, "", "5000"), ({"GOMP_SPINCOUNT": "7"}, "", "7"),
     pytest.param({}, "import torch; ", None, marks=pytest.mark.slow),
     ({"OMP_WAIT_POLICY": "active"}, "", None)],
)  # fmt: skip
def test_threads_spin_briefly_unless_somebody_says_how(
    said: dict[str, str], before: str, count: str | None
) -> None:
    code = (
        f"{before}import os, fedmuon.core.start as command; command.set_thread_defaults();"
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    others = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_W", "GOMP"))}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=others | said, cwd=ROOT
    )
    assert shown.stdout.split() == [str(count)], shown.stderr


def test_a_new_folder_has_a_name_that_shells_and_other_systems_take() -> None:
    """Whatever names the samples have."""
    for name in ("./mine.py:blobs", "my.package:blobs", "/a b/mine.py:blobs"):
        folder = chosen_folder(None, parse({"data": {"name": name}}))
        assert folder.parent == Path("runs") and "blobs-fedmuon-seed0-" in folder.name
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", folder.name)


@pytest.mark.parametrize(("engine", "kept"), [("ray", False), ("inline", True)])
def test_a_driver_whose_clients_read_the_source_keeps_what_is_dealt_alone(
    engine: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has the samples a second time, as a task wants them; inline runs read once."""
    places: list[weakref.ref[Any]] = []
    read, make, found = read_source, build_experiment, []

    def source(config: Config) -> Any:
        places.append(weakref.ref(samples := read(config)))
        return samples

    def experiment(*given: Any) -> Any:
        found.extend(place() is not None for place in places)
        return make(*given)

    monkeypatch.setattr(preparation, "read_source", source)
    monkeypatch.setattr(preparation, "build_experiment", experiment)
    prepare(resolve(small(engine={"name": engine})), tmp_path)
    assert set(found) == {kept}
