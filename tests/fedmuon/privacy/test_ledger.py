"""The ledger is ahead of what was released, keeps everything, and refuses what does not fit."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import private, small
from torch import nn
from typer.testing import CliRunner

import fedmuon
from fedmuon.config.schema import Local, OrthogonalizerTable, Privacy
from fedmuon.core.errors import InputError
from fedmuon.experiments import spending
from fedmuon.experiments.auditing import one_run
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute
from fedmuon.experiments.spending import privacy_record
from fedmuon.federated.accountant import delta_of, epsilons
from fedmuon.optim import DPSGD
from fedmuon.optim.aggregators import by_samples
from fedmuon.optim.private import Private
from fedmuon.optim.recipes import make_recipe
from fedmuon.privacy import ledger as ledger_module
from fedmuon.privacy.accounting.composition import account, epsilon
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.ledger import Ledger
from fedmuon.runs.directory import AUDIT

ROOT = Path(__file__).resolve().parents[3]
NOISE = {"noise_multiplier": 2.0, "blocks": 4, "steps": 5}


def filled(path: Path, rounds: int = 3) -> Ledger:
    """Clients 0 and 2 in every round, client 1 in the first."""
    ledger = Ledger.open(path, "config")
    for number in range(rounds):
        clients, rates = ([0, 1, 2], [0.1, 0.2, 0.1]) if number == 0 else ([0, 2], [0.1, 0.1])
        assert ledger.begin(number, clients, rates, **NOISE) == 0
    return ledger


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    written = filled(tmp_path / "ledger.jsonl")
    read = Ledger.open(tmp_path / "ledger.jsonl", "config")
    assert read.entries == written.entries
    assert read.head == written.head
    assert read.clients() == [0, 1, 2]
    assert read.events(1) == [Event(0.2, 1.0, 5)]
    assert read.events(0) == [Event(0.1, 1.0, 5)] * 3
    assert read.events(7) == []
    with pytest.raises(InputError, match="another run"):
        Ledger.open(written.path, "another config")
    with pytest.raises(InputError, match="cannot write"):
        Ledger.open(tmp_path / "missing" / "ledger.jsonl", "config")


def test_each_client_has_its_own_epsilon(tmp_path: Path) -> None:
    answers = epsilons(filled(tmp_path / "ledger.jsonl"), 1e-5)
    assert answers[0] is answers[2]
    assert answers[0].upper == epsilon(2.0, 0.1, 15, 1e-5, blocks=4).upper
    assert answers[1].upper == epsilon(2.0, 0.2, 5, 1e-5, blocks=4).upper
    assert answers[0].certified
    ledger = Ledger.open(tmp_path / "silent.jsonl", "config")
    ledger.begin(0, [0], [0.1], 0.0, 1, 1)
    answer = epsilons(ledger, 1e-5)[0]
    assert answer.epsilon == math.inf and not answer.certified


@pytest.mark.slow
def test_a_line_is_in_the_file_before_begin_returns(tmp_path: Path) -> None:
    """A process that is killed the moment `begin` returns leaves its line behind."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fedmuon.privacy.ledger import Ledger\n"
        "ledger = Ledger.open(Path(sys.argv[1]), 'config')\n"
        "ledger.begin(0, [3], [0.5], 1.0, 1, 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    file = tmp_path / "ledger.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(file)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert Ledger.open(file, "config").events(3) == [Event(0.5, 1.0, 1)]


def test_a_resumed_round_is_a_new_attempt_and_both_are_spent(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    filled(file)
    resumed = Ledger.open(file, "config")
    resumed.require(1)  # the model is older than the ledger
    assert resumed.begin(1, [0, 2], [0.1, 0.1], **NOISE) == 1
    assert resumed.begin(1, [0, 2], [0.1, 0.1], **NOISE) == 2
    assert resumed.events(0) == [Event(0.1, 1.0, 5)] * 5
    once = account([Event(0.1, 1.0, 15)], 1e-5).upper
    assert epsilons(resumed, 1e-5)[0].upper > once
    keys = {(entry.round, entry.attempt) for entry in resumed.entries}
    assert len(keys) == len(resumed.entries)  # no lot is drawn twice


def test_a_line_cut_off_by_a_kill_is_cut_away(tmp_path: Path) -> None:
    """One that lacks its end alone is whole, as it announced a release. One whose end is another
    byte is damaged."""
    file, heads = tmp_path / "ledger.jsonl", tmp_path / "ledger.heads"
    entries = filled(file).entries
    whole, whole_heads = file.read_bytes(), heads.read_bytes()
    file.write_bytes(whole[:-10])
    os.truncate(heads, len(whole_heads) - 33)  # its hash is written after the line
    ledger = Ledger.open(file, "config")
    assert len(ledger.entries) == 2
    assert ledger.begin(2, [0, 2], [0.1, 0.1], **NOISE) == 0
    assert file.read_bytes() == whole and heads.read_bytes() == whole_heads
    file.write_bytes(whole[:-1])
    assert Ledger.read(file).entries == entries and file.read_bytes() == whole[:-1]
    Ledger.open(file, "config").begin(3, [0, 1], [0.1, 0.1], **NOISE)
    assert [one.round for one in Ledger.read(file).entries] == [0, 1, 2, 3]
    file.write_bytes(whole[:-1] + b"\x0b")
    with pytest.raises(InputError, match=r"line 4 .*damaged"):
        Ledger.read(file)
    os.truncate(file, 5)
    heads.unlink()
    assert Ledger.open(file, "config").entries == []


@pytest.mark.parametrize("lines", [0, 1, 2, 3])
@pytest.mark.parametrize("cut", [0, 1, 20, 32])
def test_every_state_that_a_kill_leaves_is_continued(tmp_path: Path, lines: int, cut: int) -> None:
    """The hash of the last line is missing, or is not whole; all earlier hashes are there."""
    file, heads = tmp_path / "ledger.jsonl", tmp_path / "ledger.heads"
    filled(file)
    whole, whole_heads = file.read_bytes(), heads.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[: lines + 1]))
    heads.write_bytes(whole_heads[: 33 * lines + cut])
    assert len(Ledger.read(file).entries) == lines
    ledger = Ledger.open(file, "config")
    for number in range(lines, 3):
        clients, rates = ([0, 1, 2], [0.1, 0.2, 0.1]) if number == 0 else ([0, 2], [0.1, 0.1])
        ledger.begin(number, clients, rates, **NOISE)
    assert file.read_bytes() == whole and heads.read_bytes() == whole_heads


def test_a_ledger_that_lost_a_release_is_refused(tmp_path: Path) -> None:
    """Whole lines, bytes of a line or the whole file are missing. No file is changed."""
    file, heads = tmp_path / "ledger.jsonl", tmp_path / "ledger.heads"
    filled(file)
    whole, whole_heads = file.read_bytes(), heads.read_bytes()
    for content in (_lines(file, 3), _lines(file, 1), whole[:-10], b"", whole[: len(whole) // 2]):
        file.write_bytes(content)
        for opened in (lambda: Ledger.open(file, "config"), lambda: Ledger.read(file)):
            with pytest.raises(InputError, match="lacks a line that"):
                opened()
        assert file.read_bytes() == content and heads.read_bytes() == whole_heads
    file.write_bytes(whole)
    for content in (b"", whole_heads[:66], whole_heads[33:]):
        heads.write_bytes(content)
        with pytest.raises(InputError, match=r"names \d of the 4 lines|lacks a line that"):
            Ledger.open(file, "config")
        assert file.read_bytes() == whole and heads.read_bytes() == content
    heads.unlink()
    with pytest.raises(InputError, match="names 0 of the 4 lines"):
        Ledger.read(file)
    heads.write_bytes(whole_heads)
    assert len(Ledger.open(file, "config").entries) == 3  # the control


def test_a_hash_that_lacks_only_its_newline_still_names_its_line(tmp_path: Path) -> None:
    file, heads = tmp_path / "ledger.jsonl", tmp_path / "ledger.heads"
    filled(file)
    whole, whole_heads = file.read_bytes(), heads.read_bytes()
    heads.write_bytes(whole_heads[:-1])
    file.write_bytes(whole[:-10])
    with pytest.raises(InputError, match="lacks a line that"):
        Ledger.open(file, "config")
    file.write_bytes(whole)
    assert len(Ledger.open(file, "config").entries) == 3 and heads.read_bytes() == whole_heads


def test_a_ledger_that_was_opened_before_has_its_first_line_and_hash(tmp_path: Path) -> None:
    file, heads = tmp_path / "ledger.jsonl", tmp_path / "ledger.heads"
    Ledger.open(file, "config")
    whole = file.read_bytes()
    heads.unlink()
    with pytest.raises(InputError, match="names 0 of the 1 lines"):
        Ledger.open(file, "config", opened=True)
    file.write_bytes(b"")
    for opened in (
        lambda: Ledger.open(file, "config", opened=True),
        lambda: Ledger.read(file, True),
    ):
        with pytest.raises(InputError, match="missing or empty, although the run has begun"):
            opened()
    assert not heads.exists() and not file.read_bytes()
    file.write_bytes(whole)  # the control: a kill before any other file was written leaves this
    assert Ledger.open(file, "config").entries == [] and heads.exists()


def test_a_ledger_that_grows_while_it_is_read_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of two rounds are added after the reader has read the hashes."""
    file = tmp_path / "ledger.jsonl"
    running, early = filled(file), file.with_suffix(".heads").read_text().split()

    def hashes(path: Path) -> list[str]:
        monkeypatch.undo()
        for number in (3, 4):
            running.begin(number, [0, 1], [0.1, 0.1], **NOISE)
        return early

    monkeypatch.setattr(ledger_module, "_heads_of", hashes)
    assert len(Ledger.read(file).entries) == 5
    with pytest.raises(InputError, match="names 4 of the 6 lines"):  # the control: hashes are lost
        file.with_suffix(".heads").write_text("".join(f"{head}\n" for head in early))
        Ledger.read(file)


def test_a_ledger_of_version_1_0_continues_and_gets_its_second_file(tmp_path: Path) -> None:
    file, heads = tmp_path / "ledger.jsonl", tmp_path / "ledger.heads"
    first, *_ = map(json.loads, filled(tmp_path / "new.jsonl").path.read_text().splitlines())
    old = Ledger(file)
    old._append({key: first[key] for key in first if key not in ("head", "heads")})
    heads.unlink()
    ledger = Ledger.open(file, "config")
    assert not ledger.has_second_file and heads.exists()
    ledger.begin(0, [0, 1, 2], [0.1, 0.2, 0.1], **NOISE)
    assert heads.read_text().splitlines() == ledger.heads
    os.truncate(file, len(_lines(file, 1)))
    with pytest.raises(InputError, match="lacks a line"):
        Ledger.open(file, "config")


def test_a_ledger_behind_the_model_is_refused(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger.jsonl")
    ledger.require(3)
    with pytest.raises(InputError, match="round 3"):
        ledger.require(4)
    saved = ledger.head
    ledger.begin(3, [0], [0.1], **NOISE)
    ledger.require(3, saved)
    other = filled(tmp_path / "other.jsonl")
    other.require(3, saved)  # the same lines are the same ledger
    os.truncate(tmp_path / "other.jsonl", len(_lines(tmp_path / "other.jsonl", 3)))
    (tmp_path / "other.heads").unlink()
    (tmp_path / "other.heads").write_text("".join(f"{head}\n" for head in other.heads[:3]))
    with pytest.raises(InputError, match="not the privacy ledger"):
        Ledger.open(tmp_path / "other.jsonl", "config").require(2, saved)


@pytest.mark.parametrize("left", [0, 1, 300])
def test_a_refused_ledger_is_left_as_it_is(tmp_path: Path, left: int) -> None:
    """A file that is empty or cut is not begun anew or mended when the model knows of more."""
    file = filled(tmp_path / "ledger.jsonl").path
    os.truncate(file, left)
    held = file.read_bytes()
    with pytest.raises(InputError, match="has no entry for round"):
        Ledger.open(file, "config", done=3)
    assert file.read_bytes() == held


def _lines(file: Path, count: int) -> bytes:
    return b"".join(file.read_bytes().splitlines(keepends=True)[:count])


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_line_that_was_changed_or_removed_is_refused(tmp_path: Path, line: int) -> None:
    file = tmp_path / "ledger.jsonl"
    filled(file)
    lines = file.read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[line])
    record["noise_multiplier"] = 50.0
    file.write_text("\n".join([*lines[:line], json.dumps(record), *lines[line + 1 :], ""]))
    with pytest.raises(InputError, match="damaged or changed"):
        Ledger.open(file, "config")
    file.write_text("\n".join([*lines[:line], *lines[line + 1 :], ""]))
    with pytest.raises(InputError):
        Ledger.open(file, "config")


def test_a_round_that_no_accountant_covers_is_refused_and_not_written(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger.jsonl", 1)
    size = ledger.path.stat().st_size
    for clients, rates in (([0], [1.5]), ([0, 0], [0.1, 0.1]), ([0, 1], [0.1])):
        with pytest.raises(InputError):
            ledger.begin(1, clients, rates, **NOISE)
    assert ledger.path.stat().st_size == size


# Rates that are public, or are not: what runs, ledgers and loops then call their epsilon.

OLD = {"ledger": 2, "fingerprint": "run", "adjacency": "add-remove", "sampling": "poisson",
       "noise": "secret"}  # fmt: skip


def noise_of(out: Path, **changes: Any) -> tuple[float, set[float]]:
    """The noise that was found, and the rates of all that was released."""
    summary = execute(private(2, epsilon=4.0, **changes), out)
    entries = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()[1:]]
    return summary["privacy"]["noise"], {rate for one in entries for rate in one["rates"]}


def test_a_public_population_hides_how_many_samples_there_are(tmp_path: Path) -> None:
    """Rates and noise are the same however the samples are dealt; with lot / n_i they are not."""
    dealt = [{"per-round": 6, "seed": seed} for seed in (1, 2)]
    public = [noise_of(tmp_path / f"a{n}", federation=one, population=40)
              for n, one in enumerate(dealt)]  # fmt: skip
    assert public[0] == public[1] and public[0][1] == {6 / 40}
    own = [noise_of(tmp_path / f"b{n}", federation=one) for n, one in enumerate(dealt)]
    assert own[0] != own[1] and len(own[0][1]) > 1  # control
    spent = [json.loads((tmp_path / name / "summary.json").read_text())["privacy"]
             for name in ("a0", "b0")]  # fmt: skip
    assert [(one["adjacency"], one["rate_from"]) for one in spent] == [
        ("add-remove", "public"), ("zero-out", "samples")]  # fmt: skip
    assert "fewer samples than a lot" not in spent[0]["note"]
    assert (
        epsilons(Ledger.read(tmp_path / "a0" / "ledger.jsonl"), 1e-3)[0].adjacency == "add-remove"
    )


def test_a_public_rate_and_the_delta_that_follows() -> None:
    sizes = np.array([10**6])
    assert Privacy(rate=0.25).public_rate == 0.25 and Privacy().public_rate == 0
    assert Privacy(lot=8.0, population=32).public_rate == 0.25
    assert delta_of(private(noise=1.0, delta=0.0, rate=1e-4), sizes) == pytest.approx((6e4) ** -1.1)
    assert delta_of(private(noise=1.0, delta=0.0, population=60_000), sizes) == pytest.approx(
        (6e4) ** -1.1
    )
    assert delta_of(private(noise=1.0, delta=0.0), sizes) == pytest.approx(1e6**-1.1)


def test_old_ledgers_are_read_as_what_holds(tmp_path: Path) -> None:
    """Format 2 said add-remove of rates lot / n_i; and so would a ledger of any format."""
    for number, first in enumerate((OLD, OLD | {"ledger": 3, "rate_from": "samples"})):
        made = Ledger(tmp_path / f"{number}.jsonl")
        made._append(first)
        made.begin(0, [0], [0.1], 2.0, 1, 5)
        read = Ledger.read(made.path)
        assert read.about["adjacency"] == "zero-out" and read.about["rate_from"] == "samples"
        assert epsilons(read, 1e-5)[0].adjacency == "zero-out"
    before = {"epsilon": 2.0, "certified": True, "adjacency": "add-remove"}  # its summary
    assert (
        privacy_record(private(noise=1.0), {"privacy": before})["privacy"]["adjacency"]
        == "zero-out"
    )


def test_a_ledger_accounts_for_what_it_names(tmp_path: Path) -> None:
    made = Ledger.open(tmp_path / "ledger.jsonl", "run", adjacency="replace-one")
    made.begin(0, [0], [0.1], 2.0, 1, 50)
    found = epsilons(made, 1e-5)[0]
    assert found == account(made.events(0), 1e-5, adjacency="replace-one")
    assert found.lower > account(made.events(0), 1e-5).upper
    with pytest.raises(InputError, match="another run"):
        Ledger.open(made.path, "run", adjacency="zero-out")


def loop(**privacy: Any) -> Private:
    given = {"noise": 2.0, "lot": 20.0, **privacy}
    return DPSGD(nn.Linear(6, 3), population=200, lr=0.1, privacy=given)


def test_a_loop_of_ones_own_names_what_holds() -> None:
    inputs, labels = torch.zeros(200, 6), torch.zeros(200, dtype=torch.long)
    own, public, replaced = loop(), loop(population=250), loop(adjacency="replace-one")
    for one in (own, public, replaced):
        for lot in one.lots(5):
            one.step(lot, inputs[lot.rows], labels[lot.rows])
    names = [one.epsilon(1e-5).adjacency for one in (own, public, replaced)]
    assert names == ["zero-out", "add-remove", "replace-one"]
    assert public.epsilon(1e-5).upper < own.epsilon(1e-5).upper < replaced.epsilon(1e-5).lower
    state = own.state_dict()
    public.load_state_dict(state)  # lots at a rate that was not public count as well
    assert public.epsilon(1e-5).adjacency == "zero-out"
    assert public.epsilon(1e-5).upper > own.epsilon(1e-5).upper
    assert math.isfinite(replaced.epsilon(1e-5).rdp)


def test_weights_that_tell_of_sizes_are_refused_where_sizes_are_hidden(tmp_path: Path) -> None:
    """A mechanism of one's own says add-remove by itself, whatever the config says."""
    own = make_recipe(
        Local(recipe="dp-sgd", lr=0.01),
        OrthogonalizerTable(),
        privacy=Privacy(population=40, noise=1.0, lot=8.0),
    )
    assert own.mechanism is not None and own.mechanism.adjacency == "add-remove"
    given = {"data": {"name": "synthetic", "train": 60, "test": 20},
             "federation": {"clients": 3, "per-round": 2, "rounds": 1}}  # fmt: skip
    weighed = {**given, "federation": {**given["federation"], "aggregate": "by-samples"}}
    with pytest.raises(InputError, match="hides how many samples"):
        fedmuon.run(weighed, recipe=own, out=tmp_path / "config")
    with pytest.raises(InputError, match="hides how many samples"):
        mine = dataclasses.replace(own, aggregate=by_samples())
        fedmuon.run(given, recipe=mine, out=tmp_path / "recipe")
    found = fedmuon.run(given, recipe=own, out=tmp_path / "plain").summary["privacy"]
    assert found["adjacency"] == "add-remove"


# What `privacy spent` says of clients that never took part, and of the bounds of an audit.

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
    monkeypatch.setattr(one_run, "read_record", lambda folder: record)
    audit = spending.spent(tmp_path)["audit"]
    assert (audit["bound"], audit["best"], audit["epsilon_at_least"]) == (best, 0.75, counts)
    shown = " ".join(CliRunner().invoke(app, ["privacy", "spent", str(tmp_path)]).output.split())
    assert f"audited, {best}" in shown and ">= 0.7500" in shown and ">= 0.2500" not in shown
    assert one_run.BOUNDS[best].split(";")[0] in shown
