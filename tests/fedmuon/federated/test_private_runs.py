"""A private run from config to summary: calibration, ledger, a kill; and a loop of one's own."""

import copy
import itertools
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import private, quick, small
from cut_off import broken_off
from torch import nn
from typer.testing import CliRunner

import fedmuon
from fedmuon.config.load import nested, parse
from fedmuon.core.errors import InputError
from fedmuon.experiments import spending
from fedmuon.experiments.cli import app
from fedmuon.experiments.inspect.status import RunStatus
from fedmuon.experiments.run import execute
from fedmuon.experiments.spending import spent
from fedmuon.optim.private import Private
from fedmuon.privacy.accounting.composition import account, epsilon, event
from fedmuon.privacy.ledger import Ledger
from fedmuon.runs.directory import CHECKPOINTS, RunDirectory
from fedmuon.runs.provenance import versions
from fedmuon.tasks.per_example.clipping import Clipping

TARGET = private(4, epsilon=4.0)  # six clients, four rounds, calibrated noise


def lines(out: Path) -> list[dict]:
    text = (out / "ledger.jsonl").read_text().splitlines()
    return [json.loads(line) for line in text[1:]]


def test_a_target_is_met_by_every_client_and_nearly_reached_by_one(tmp_path: Path) -> None:
    summary = execute(TARGET, tmp_path)
    spent = summary["privacy"]
    assert 3.9 < spent["epsilon"] <= 4.0 and spent["certified"]
    assert spent["epsilon"] == max(spent["clients"].values())
    assert spent["noise"] > 0.3 and "not part of the release" in spent["note"]
    worst = spent["client"]
    sizes = np.bincount(np.load(tmp_path / "partition.npz")["client"])
    taken = sum(worst in entry["participants"] for entry in lines(tmp_path))
    alone = epsilon(spent["noise"], min(1.0, 6 / int(sizes[worst])), 2 * taken, 1e-3)
    assert spent["epsilon"] == pytest.approx(alone.epsilon, rel=1e-3)
    assert not any("client_loss" in json.loads(line) for line in
                   (tmp_path / "rounds.jsonl").read_text().splitlines())  # fmt: skip


def test_a_killed_round_stays_spent_and_is_released_anew(tmp_path: Path) -> None:
    """The engine dies after the ledger's line of round 2 is written, before its model is."""
    broken_off(TARGET, tmp_path, at=3)
    assert [entry["round"] for entry in lines(tmp_path)] == [0, 1, 2]
    summary = execute(None, tmp_path, resume=True)
    told = [(entry["round"], entry["attempt"]) for entry in lines(tmp_path)]
    assert told == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]
    assert summary["privacy"]["epsilon"] > 4.0  # the lost round counts, and is said to
    assert (
        "is more than [privacy] epsilon = 4, because interrupted rounds"
        in summary["privacy"]["note"]
    )


def test_one_example_s_loss_stops_no_private_run(tmp_path: Path) -> None:
    """Its gradient is left out of the sums; were the run to end there, that would tell of it."""
    net = torch.nn.Linear(4, 2, bias=False)
    net.weight.data = torch.tensor([[1.0], [-1.0]]).expand(2, 4).clone()
    inputs, labels = np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) % 2
    inputs = inputs.astype(np.float32)
    inputs[3] = 3e38
    for recipe, privacy in (("dp-sgd", {"noise": 1.0, "lot": 8.0}), ("sgd", {})):
        given = {
            "federation": {"clients": 2, "per-round": 2, "rounds": 1, "partition": "iid"},
            "local": {"recipe": recipe, "lr": 1e-3, "steps": 1}, "privacy": privacy,
        }  # fmt: skip
        data, test = (inputs, labels), (np.ones((4, 4), np.float32), np.arange(4) % 2)
        out = tmp_path / recipe
        if privacy:
            found = fedmuon.run(given, data=data, test=test, task=net, out=out).summary
            assert "train_loss" not in found and found["privacy"]["certified"]
        else:
            with pytest.raises(InputError, match="not finite"):
                fedmuon.run(given, data=data, test=test, task=net, out=out)


def test_a_tail_cut_off_behind_the_model_is_refused(tmp_path: Path) -> None:
    """Also where every round is there, but not every attempt."""
    broken_off(TARGET, tmp_path, at=2)
    broken_off(TARGET, tmp_path, after=3)
    ledger = tmp_path / "ledger.jsonl"
    whole = ledger.read_text().splitlines(keepends=True)
    assert [(e["round"], e["attempt"]) for e in lines(tmp_path)] == [
        (0, 0), (1, 0), (1, 1), (2, 0), (3, 0)]  # fmt: skip
    ledger.write_text("".join(whole[:-2]))
    with pytest.raises(InputError, match="lacks a line that"):
        execute(None, tmp_path, resume=True)
    heads = tmp_path / "ledger.heads"
    whole_heads = heads.read_text().splitlines(keepends=True)
    heads.write_text("".join(whole_heads[:-2]))
    with pytest.raises(InputError, match="has no entry for round 2"):
        execute(None, tmp_path, resume=True)
    first = json.loads(whole[0])  # the same rounds, without the attempt that was lost
    other = Ledger(tmp_path / "other.jsonl", "")
    other._append({key: value for key, value in first.items() if key != "head"})
    for entry in [*lines(tmp_path)[:2], *map(json.loads, whole[-2:])]:
        other._append({key: value for key, value in entry.items() if key != "head"})
    ledger.write_bytes(other.path.read_bytes())
    heads.write_bytes(other.path.with_suffix(".heads").read_bytes())
    with pytest.raises(InputError, match="not the privacy ledger that was saved with the model"):
        execute(None, tmp_path, resume=True)
    ledger.write_text("".join(whole))
    heads.write_text("".join(whole_heads))
    assert execute(None, tmp_path, resume=True)["privacy"]["epsilon"] > 4.0


def recorded_but_not_saved(out: Path) -> None:
    """Leave what a kill between the record of the third round and its checkpoint leaves."""
    broken_off(TARGET, out, at=3)  # the third round has its line in the ledger
    record = {"round": 3, "participants": [0, 1], "train_seconds": 1.0, "seconds": 1.0}
    RunDirectory(out).append(record)
    for name in CHECKPOINTS[1:]:
        (out / name).unlink(missing_ok=True)
    assert RunDirectory(out).saved_rounds() == [2] and len(RunDirectory(out).records()) == 3


LOST = [*itertools.product(("line", "bytes", "ledger", "ledger and checkpoints"), (False, True))]


@pytest.mark.parametrize(("lost", "old"), quick(LOST, [LOST[0], LOST[3], LOST[6], LOST[7]]))
def test_a_release_that_its_ledger_lost_is_not_forgotten(
    tmp_path: Path, lost: str, old: bool
) -> None:
    """Also in folders of version 1.0, by their records. Neither a file nor a record changes."""
    recorded_but_not_saved(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    if old:  # without the second file, and with a first line that does not name it
        first, *entries = map(json.loads, ledger.read_text().splitlines())
        (tmp_path / "ledger.heads").unlink()
        ledger.unlink()
        again = Ledger(tmp_path / "again.jsonl")
        for record in ({name: first[name] for name in first if name != "heads"}, *entries):
            again._append({name: value for name, value in record.items() if name != "head"})
        (tmp_path / "again.jsonl").rename(ledger)
        (tmp_path / "again.heads").unlink()
        (tmp_path / CHECKPOINTS[0]).unlink()  # it names the other hashes
    whole = ledger.read_bytes()
    if lost == "line":
        ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    elif lost == "bytes":
        ledger.write_bytes(whole[:-10])
    else:
        ledger.unlink()
    if "checkpoints" in lost:
        for name in CHECKPOINTS:
            (tmp_path / name).unlink(missing_ok=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    said = r"no entry for round|lacks a line|no ledger\.jsonl|its ledger is missing"
    with pytest.raises(InputError, match=said):
        execute(None, tmp_path, resume=True)
    if ledger.exists():
        with pytest.raises(InputError, match=r"no entry for round|lacks a line"):
            spent(tmp_path)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert {name: after.get(name) for name in before} == before
    ledger.write_bytes(whole)  # the control: with the whole ledger, the run ends and counts all
    assert len(lines(tmp_path)) == 3
    summary = execute(None, tmp_path, resume=True)
    assert summary["privacy"]["epsilon"] > 4.0 and len(lines(tmp_path)) > 4


@pytest.mark.parametrize(
    "lost",
    quick(
        ["both files", "a line and the second file", "all content"], ["both files", "all content"]
    ),
)
def test_a_first_round_that_its_ledger_lost_is_not_forgotten(tmp_path: Path, lost: str) -> None:
    """No checkpoint exists yet. The file rounds.jsonl shows that the run has begun."""
    broken_off(TARGET, tmp_path, at=1)
    (tmp_path / CHECKPOINTS[0]).unlink()
    assert not RunDirectory(tmp_path).saved_rounds() and len(lines(tmp_path)) == 1
    files = [tmp_path / name for name in ("ledger.jsonl", "ledger.heads")]
    whole = [file.read_bytes() for file in files]
    for file in files:
        if lost == "all content":
            file.write_bytes(b"")
        else:
            file.unlink()
    if lost == "a line and the second file":
        files[0].write_bytes(whole[0].splitlines(keepends=True)[0])
    said = "missing or empty|names 0 of the 1 lines|its ledger is missing, so the spent epsilon"
    with pytest.raises(InputError, match=said):
        execute(None, tmp_path, resume=True)
    with pytest.raises(InputError, match=said):
        spent(tmp_path)
    for file, content in zip(files, whole, strict=True):
        file.write_bytes(content)
    assert execute(None, tmp_path, resume=True)["privacy"]["epsilon"] > 4.0  # the control


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_begun_run_without_its_ledger_is_shown_as_lost(tmp_path: Path, rounds: int) -> None:
    """A run without rounds.jsonl has released nothing, so it can start again."""
    broken_off(TARGET, tmp_path, at=1)
    for name in ("ledger.jsonl", "ledger.heads", *(() if rounds else ("rounds.jsonl",))):
        (tmp_path / name).unlink()
    (tmp_path / CHECKPOINTS[0]).unlink()
    found = RunStatus(tmp_path).state
    if not rounds:
        assert found == "unfinished" and not RunDirectory(tmp_path).lost()
        with pytest.raises(InputError, match="not the folder of a private run"):
            spent(tmp_path)
        return
    assert found.startswith("lost: ") and RunDirectory(tmp_path).lost() in found
    for shown in ("ls", "show"):
        assert "--resume" not in CliRunner().invoke(app, [shown, str(tmp_path)]).output
    with pytest.raises(InputError, match="has begun, but its ledger is missing, so the spent"):
        spent(tmp_path)


def test_a_finished_run_without_its_ledger_and_records_is_not_run_again(tmp_path: Path) -> None:
    """Its checksums name the ledger. Without the checksums as well, nothing shows the run."""
    execute(TARGET, tmp_path)
    for name in ("ledger.jsonl", "ledger.heads", "summary.json", "rounds.jsonl"):
        (tmp_path / name).unlink()
    with pytest.raises(InputError, match="finished private run without its ledger"):
        execute(None, tmp_path, resume=True)


def test_a_run_that_a_kill_ended_before_its_first_release_has_spent_nothing(tmp_path: Path) -> None:
    broken_off(TARGET, tmp_path, at=1)
    for name in ("rounds.jsonl", "ledger.heads", CHECKPOINTS[0]):
        (tmp_path / name).unlink()
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(InputError, match="Nothing has been released yet"):
        spent(tmp_path)
    assert execute(None, tmp_path, resume=True)["privacy"]["epsilon"] <= 4.0


def test_a_noise_that_misses_its_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"epsilon = 4\. Set only one of noise and epsilon"):
        execute(private(4, epsilon=4.0, noise=0.5), tmp_path / "loud")
    assert not (tmp_path / "loud").exists()
    assert execute(private(4, epsilon=4.0, noise=9.0), tmp_path / "quiet")["privacy"]["epsilon"] < 4


def test_lots_that_no_client_can_fill_are_refused_and_small_clients_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="samples of the largest client"):
        execute(private(4, epsilon=4.0, lot=500.0), tmp_path / "large")
    execute(TARGET, tmp_path / "fit")
    sizes = np.bincount(np.load(tmp_path / "fit" / "partition.npz")["client"])
    tight = private(4, epsilon=4.0, lot=float(sizes.max()))
    note = execute(tight, tmp_path / "tight")["privacy"]["note"]
    assert f"{(sizes < sizes.max()).sum()} of 6 clients have fewer samples than lot = " in note


def test_without_noise_nothing_is_called_private(tmp_path: Path) -> None:
    """Nor forgotten: its ledger says so, and a stopped one goes on."""
    broken_off(private(4, noise=0.0), tmp_path, after=2)
    spent = execute(None, tmp_path, resume=True)["privacy"]
    assert spent["epsilon"] is None and not spent["certified"]
    told = spending.spent(tmp_path)
    assert told["epsilon"] is None and not told["certified"] and "infinite" in told["note"]
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_repeatable_noise_is_never_certified(tmp_path: Path) -> None:
    config = private(4, noise=1.0, **{"insecure-reproducible-noise": True})
    first = execute(config, tmp_path / "a")
    execute(config, tmp_path / "b")
    assert not first["privacy"]["certified"] and "follow from the seed" in first["privacy"]["note"]
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert models[0] == models[1]
    told = spending.spent(tmp_path / "a")
    assert not told["certified"] and "follow from the seed" in told["note"]
    assert told["epsilon"] == pytest.approx(first["privacy"]["epsilon"])
    privacy = {"noise": 1.0, "insecure-reproducible-noise": True}  # and in a loop of one's own
    loop = Private(network(), recipe="dp-sgd", privacy=privacy, **OPTIONS)
    stepped(loop, 1)
    answer = loop.epsilon(1e-5)
    assert not answer.certified and "follow from the seed" in answer.note


def test_a_run_that_a_callback_stops_is_not_certified(tmp_path: Path) -> None:
    """What it saw are losses on the data, which no ledger counts."""
    early = {"evaluate-every": 1, "callback": "early-stopping",
             "options": {"measure": "train_loss", "patience": 1, "least": 10.0}}  # fmt: skip
    tables = nested(private(4, noise=1.0))
    summary = execute(parse({**tables, "output": early}), tmp_path)
    assert summary["stopped"] and summary["privacy"]["epsilon"] > 0
    told = spending.spent(tmp_path)
    for found in (summary["privacy"], told):
        assert not found["certified"] and "A callback ended this run" in found["note"]


def test_retries_would_release_twice() -> None:
    tables = {"local": {"recipe": "dp-sgd"}, "engine": {"name": "ray"}}
    with pytest.raises(InputError, match="retries = 0"):
        small(**tables)
    small(**tables, faults={"retries": 0}, privacy={"noise": 1.0})


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


INPUTS, LABELS = torch.randn(200, 6), torch.randint(0, 3, (200,))
OPTIONS: dict[str, Any] = {"population": 200, "orthogonalizer": {"name": "newton-schulz"}}


def stepped(made: Private, steps: int) -> None:
    for lot in made.lots(steps):
        made.step(lot, INPUTS[lot.rows], LABELS[lot.rows])


@torch.no_grad()
def loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    return float(nn.functional.cross_entropy(model(inputs), labels))


@pytest.mark.parametrize(
    "recipe",
    quick(["dp-sgd", "dp-adam", "dp-muonbc", "dp-muon", "disk-muon"], {"dp-muon"}),
)
def test_a_loop_of_ones_own(recipe: str) -> None:
    torch.manual_seed(1)
    teacher = torch.randn(6, 3)
    inputs = torch.randn(200, 6)
    labels = (inputs @ teacher).argmax(1)
    model = network()
    made = Private(
        model, recipe=recipe, lr=0.02 if recipe != "dp-sgd" else 0.5,
        privacy={"noise": 0.3, "lot": 50.0, "bound": 1.0}, **OPTIONS,
    )  # fmt: skip
    before = loss(model, inputs, labels)
    for lot in made.lots(steps=40):
        made.step(lot, inputs[lot.rows], labels[lot.rows])
    assert loss(model, inputs, labels) < before - 0.02
    blocks = 6 if recipe in ("dp-sgd", "dp-adam") else 2  # one hidden matrix, and all the rest
    assert made.epsilon(1e-5).epsilon == epsilon(0.3, 0.25, 40, 1e-5, blocks).epsilon


def test_a_lot_of_ones_own_is_refused() -> None:
    made = Private(network(), privacy={"noise": 1.0, "lot": 20.0}, **OPTIONS)
    lots = made.lots(3)
    lot = next(lots)
    with pytest.raises(InputError, match="not used"):
        next(made.lots(1))
    with pytest.raises(InputError, match=r"Pass exactly the examples of lot\.rows"):
        made.step(lot, INPUTS[:3], LABELS[:3])
    made.step(lot, INPUTS[lot.rows], LABELS[lot.rows])
    with pytest.raises(InputError, match="counts each drawn lot once"):
        made.step(lot, INPUTS[lot.rows], LABELS[lot.rows])


def test_the_users_loop_remembers_what_it_spent() -> None:
    privacy = {"noise": 1.0, "lot": 20.0}
    made, other = (Private(network(), privacy=privacy, **OPTIONS) for _ in range(2))
    stepped(made, 3)
    other.load_state_dict(made.state_dict())
    assert other.epsilon(1e-5) == made.epsilon(1e-5) and other.epsilon(1e-5).epsilon > 0
    seen, own = versions()["torch"], torch.__version__  # of which only one may name the build
    assert seen.partition("+")[0] == own.partition("+")[0]


def test_a_scheduler_changes_the_step() -> None:
    made = Private(network(), lr=0.1, privacy={"noise": 0.0, "lot": 20.0}, **OPTIONS)
    schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
    for lot in made.lots(2):
        made.step(lot, INPUTS[lot.rows], LABELS[lot.rows])
        schedule.step()
    assert made.param_groups[0]["lr"] == pytest.approx(0.025)


def sgd(noise: float, lot: float) -> Private:
    privacy = {"noise": noise, "lot": lot}
    return Private(network(), recipe="dp-sgd", lr=0.1, privacy=privacy, **OPTIONS)


def test_a_loaded_account_keeps_the_noise_it_was_drawn_at() -> None:
    """Against the accountant itself; and going back to an earlier state takes nothing back."""
    loud = sgd(0.5, 40.0)
    stepped(loud, 1)
    early = copy.deepcopy(loud.state_dict())
    stepped(loud, 4)
    quiet = sgd(9.0, 4.0)
    quiet.load_state_dict(loud.state_dict())
    stepped(quiet, 2)
    blocks = Clipping().blocks(dict(network().named_parameters()))
    events = [event(0.5, 0.2, 5, blocks), event(9.0, 0.02, 2, blocks)]
    assert quiet.epsilon(1e-5).upper == account(events, 1e-5).upper
    before = loud.epsilon(1e-5).upper
    loud.load_state_dict(early)
    assert loud.epsilon(1e-5).upper == before
    again = sgd(0.5, 40.0)
    again.load_state_dict(early)
    assert again.epsilon(1e-5).upper == account([event(0.5, 0.2, 1, blocks)], 1e-5).upper < before


@pytest.mark.parametrize(("privacy", "why"), [
    ({"level": "client", "noise": 1.0}, "protects single examples within a client"),
    ({}, "privacy noise is not set"),
    ({"epsilon": 3.0}, "fedmuon privacy sigma"),
    ({"noise": 1.0, "epsilon": 1.0}, "out"),
    ({"noise": 1.0, "noise-correlation": "sqrt-toeplitz", "band": 4}, "out"),
    ({"noise": 1.0, "trust": "local"}, "out"),
    ({"sampling": "shuffle"}, "not supported in a custom loop"),
    ({"noise": 1.0, "bound": math.inf}, "bound to a finite number"),
    ({"noise": 1.0, "lot": 201.0}, "exceeds population = 200"),
    ({"noise": 1.0, "delta": 1e-15}, "below 1e-12"),
])  # fmt: skip
def test_a_loop_of_ones_own_refuses_what_a_run_does(privacy: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Private(network(), recipe="dp-sgd", privacy=privacy, **OPTIONS)


def killed_at(config: Any, out: Path, fsync: int, draws: Path) -> bool:
    """Run or resume in a child that kills itself at its n-th fsync; True if it was killed.

    `draws` gets a line for each round that the ledger allowed to draw.
    """
    child = os.fork()
    if not child:
        calls, wait, begin = itertools.count(), os.fsync, Ledger.begin

        def counted(handle: int) -> None:
            if next(calls) == fsync:
                os.kill(os.getpid(), signal.SIGKILL)
            wait(handle)

        def begun(ledger: Ledger, number: int, *rest: Any, **named: Any) -> int:
            attempt = begin(ledger, number, *rest, **named)
            with draws.open("a") as log:
                log.write(f"{number} {attempt}\n")
            return attempt

        code = 1
        try:
            setattr(os, "fsync", counted)  # noqa: B010
            setattr(Ledger, "begin", begun)  # noqa: B010
            execute(config, out, resume=(out / "config.toml").exists())
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["example", "client"])
def test_no_kill_makes_a_run_forget_what_it_drew(tmp_path: Path, level: str) -> None:
    """Killed at every fsync, and again while it resumes; then it ends with all draws counted."""
    clients = small({"local": {"recipe": "fedavg"}, "federation": {"rounds": 2},
                     "privacy": {"level": "client", "noise": 2.0, "delta": 1e-3}})  # fmt: skip
    config = clients if level == "client" else private(2, epsilon=4.0)
    point = 0
    for point in itertools.count():
        out, draws = tmp_path / f"run-{point}", tmp_path / f"draws-{point}"
        if not killed_at(config, out, point, draws):
            break
        for second in (3, -1):  # the second kill comes early in the resumed run
            killed_at(config, out, second, draws)
        drawn = draws.read_text().splitlines()
        entries = Ledger.read(out / "ledger.jsonl").entries
        assert {f"{entry.round} {entry.attempt}" for entry in entries} >= {*drawn}
        assert spent(out)["epsilon"] == RunDirectory(out).finished()["privacy"]["epsilon"]
    assert point > 15
