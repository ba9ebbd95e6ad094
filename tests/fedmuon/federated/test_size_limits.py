"""Sizes that no machine has, and numbers that no arithmetic has, are one sentence, at once."""

import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import small
from typer.testing import CliRunner

from fedmuon.config.load import Config, dump, load
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app, main
from fedmuon.federated import size_limits
from fedmuon.federated.build import build_experiment
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.privacy.accounting import composition

DIGITS = "9" * 5000
GPT = "task.name=network task.model=gpt data.name=pydoc "
CLOUD = "data.name=synthetic "
REFUSED = {
    "data.train=1000000000000": "[data] train = 1000000000000 is not valid",
    CLOUD + "data.train=1000000000": "[data] train, test or dimension",
    CLOUD + "data.dimension=1000000000": "for its samples), but the machine has",
    CLOUD + "data.train=20 data.test=10 federation.clients=1 federation.per-round=1 "
    "data.dimension=1000000 data.classes=900000": "GiB of memory",
    "federation.clients=1000000000000": "[federation] clients",
    "federation.rounds=1000000000000": "[federation] rounds",
    CLOUD + "data.train=20000000 data.dimension=1 data.minimum=1 federation.clients=10000000 "
    "federation.per-round=10000000 federation.rounds=1000": "its schedule",
    "local.steps=10000000000000000000": "[local] steps",
    "local.batch=1000000000000000": "[local] batch",
    GPT + "task.width=1000000000": "[task] width",
    GPT + "task.width=1000000 task.heads=1": "for its model",
    "orthogonalizer.name=newton-schulz orthogonalizer.steps=9223372036854775808": "steps = 922",
    f"federation.rounds={DIGITS}": "too many digits",
    f"federation.rounds={'9' * 4000}": "[federation] rounds = 999",
    f"local.lr={'[' * 5000}": "nested too deeply",
    "local.weight-decay=1e300": "[local] weight-decay = 1e+300",
    "local.lr=1e300": "[local] lr = 1e+300",
    "local.recipe=dp-sgd privacy.noise=1e-320 privacy.lot=8": "too small for the accountant",
    "local.recipe=dp-sgd privacy.lot=1e-320": "[privacy] lot = 1e-320",
    "engine.device=mps": "[engine] device = 'mps'",
    "engine.device=meta": "[engine] device = 'meta'",
    "engine.device=cuda:4096": "is not available on this machine",
    "engine.device=cpu:3": "[engine] device = 'cpu:3' is not available on this machine",
    "engine.device=cpu:99999999999999999999": "is unknown",
    'data.name=idx data.folder="a\\u0000b"': "[data] folder = 'a\\x00b' is not valid",
    "local.recipe=disk-muon privacy.noise=1 privacy.lot=8 orthogonalizer.name=randomized-polar "
    + CLOUD
    + "data.dimension=1": "but it must be at most 1 for matrices of shape",
}


def refused(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one sentence of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capfd.readouterr().err.strip()
    assert end.value.code == 2 and "\n" not in said
    return said


@pytest.mark.parametrize("changes", REFUSED)
def test_what_cannot_be_is_refused_at_once(
    changes: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [part for change in changes.split() for part in ("--set", change)]
    start = time.process_time()
    said = refused(["run", *given, "--out", str(tmp_path / "run")], capfd)
    assert REFUSED[changes] in said and len(said) < 600
    assert time.process_time() - start < 5  # seconds of this process, whatever others do


def test_large_counts_that_can_be_are_accepted() -> None:
    """The control: limits are far from what anybody runs."""
    big = ["federation.clients=1000000", "federation.rounds=1000000", "data.train=1000000000",
           "data.minimum=1", "local.steps=100000"]  # fmt: skip
    assert load(None, big).federation.rounds == 10**6


@pytest.mark.parametrize("text", [f"[local]\nlr = {'[' * 20000}", f"[local]\nlr = {DIGITS}"])
def test_files_that_no_reader_can_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(InputError, match="not valid TOML") as refusal:
        load(file)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_a_run_is_held_to_the_memory_that_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(data={"train": 400_000, "test": 1000, "dimension": 50})
    assert size_limits.machine_memory() > 0
    source = read_source(config)
    for have in (2**28 + 2**20, 2**20):  # the second is less than is looked at
        monkeypatch.setattr(size_limits, "machine_memory", lambda have=have: have)
        with pytest.raises(InputError, match=r"needs about 0\.\d+ GiB .* machine has 0\.\d+ GiB"):
            build_data(config, source)
    monkeypatch.setattr(size_limits, "machine_memory", lambda: 2**40)
    build_data(config, source)


@pytest.mark.parametrize(("clients", "per_round"), [(10**7, 10**7), (10**7, 5), (10**5, 10**5)])
def test_every_participant_of_a_round_takes_memory(
    clients: int, per_round: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tiny samples: 930 MB were held by 100,000 of them; those who wait take little."""
    tables = {"clients": clients, "per-round": per_round}
    config = small(data={"train": 2 * clients, "minimum": 1}, federation=tables)
    monkeypatch.setattr(size_limits, "machine_memory", lambda: 24 * 2**30)
    said = r"its clients\), .* Lower \[federation\] clients or per"
    too_many = pytest.raises(InputError, match=said) if per_round == 10**7 else nullcontext()
    with too_many:
        size_limits.require_room(config, (2,))
    needed: list[int] = []
    monkeypatch.setattr(size_limits, "_refuse", lambda parts: needed.append(parts["clients"]))
    size_limits.require_room(config, (2,))
    assert 0.9 < needed[0] / (6.7e3 * per_round + 210 * (clients - per_round)) < 1.1


def test_a_stack_of_replicas_takes_the_memory_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(data={"dimension": 20_000, "classes": 50})
    source = read_source(config)
    data = build_data(config, source)
    monkeypatch.setattr(size_limits, "machine_memory", lambda: 2**30)
    assert build_experiment(config, data).task.dtype == torch.float64
    with pytest.raises(InputError, match="for its model"):
        build_experiment(config, data, lr=torch.full((256,), 0.1))


def test_the_limit_of_a_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 with a limit above the process's own group, and version 1."""
    whole = size_limits.machine_memory()
    monkeypatch.setattr(size_limits, "GROUPS", tmp_path)
    monkeypatch.setattr(size_limits, "OWN", tmp_path / "own")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text("1000000\n")
    (tmp_path / "own").write_text("0::/a/b\n")
    assert size_limits.machine_memory() == 1_000_000
    (tmp_path / "memory" / "c").mkdir(parents=True)
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("2000\n")
    (tmp_path / "own").write_text("4:cpu:/x\n3:memory,cpu:/c\nnonsense\n")
    assert size_limits.machine_memory() == 2000
    (tmp_path / "own").unlink()
    assert size_limits.machine_memory() >= whole


PRIVACY = ["--delta", "1e-5", "--population", "1000"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("epsilon --noise 1e-320 --lot 8 --steps 5", "noise = 1e-320"),
        ("epsilon --noise 1e300 --lot 8 --steps 5", "noise = 1e+300"),
        ("epsilon --noise nan --lot 8 --steps 5", "noise = nan"),
        ("epsilon --noise 1 --lot 1e-320 --steps 5", "sampling probability"),
        (f"epsilon --noise 1 --lot 8 --steps {10**23}", "steps = 1000"),
        (f"epsilon --noise 1 --lot 8 --steps 5 --blocks {10**23}", "blocks = 1000"),
        (f"sigma --epsilon 8 --lot 8 --steps {10**23}", "steps = 1000"),
        (f"audit --noise 1 --lot 8 --steps 5 --trials {10**15}", "trials"),
        ("audit --noise 1 --lot 8 --steps 5 --seed -1", "seed"),
    ],
)
def test_the_accountant_says_what_it_cannot_compute(
    options: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(["privacy", *options.split(), *PRIVACY], capfd)


def test_the_accountant_computes_at_its_ends() -> None:
    """The control: they are open."""
    assert composition.epsilon(1e-6, 0.01, 10, 1e-5).upper > 0


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("flops --steps 10000000000", "steps = 1e+10"),
        ("flops --rank 1000000000000000", "rank = 1e+15"),
        ("stationarity --paper 000 --noise 1e300", "noise = 1e+300"),
        ("stationarity --paper 004 --q 100000000", "q = 1e+08"),
    ],
)
def test_calculators_have_limits(
    command: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(command.split(), capfd)


def test_markup_in_a_path_is_a_path(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Folders may be called [/x], which is a tag to the console."""
    out = tmp_path / "[/x]"
    file = tmp_path / "small.toml"
    file.write_text(dump(small(federation={"rounds": 1})))
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(out)])
    assert done.exit_code == 0 and "[/x]" in done.output.replace("\n", "")
    assert "NUL" in refused(["run", "--out", "a\0b"], capfd)


@pytest.mark.parametrize("text", [dump(Config()), "small = 3", "for = 3", "for.mnist5k = 3"])
def test_a_config_is_no_suite(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["suite", str(file), "--out", str(tmp_path / "out")])
    assert end.value.code == 2 and not (tmp_path / "out").exists()


def test_a_million_clients_are_still_judged_in_a_moment() -> None:
    start = time.process_time()
    many = ["--rounds", "1000000", "--clients", "1000000", "--local-steps", "1", "--per-round",
            "10", "--lr", "1e-6"]  # fmt: skip
    assert CliRunner().invoke(app, ["bound", "--json", *many]).exit_code == 0
    assert time.process_time() - start < 5
