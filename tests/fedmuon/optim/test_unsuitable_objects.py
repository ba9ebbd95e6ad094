"""A custom object that fits no slot is refused by one sentence, wherever it fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import unsuitable_objects as table
from brought import CLASSES, DATA, PLAIN, X, linear, tables
from flwr.app import Error, Message, MessageType, RecordDict
from torch import nn

import fedmuon
from fedmuon import links
from fedmuon.core.errors import InputError, OwnError
from fedmuon.experiments.cli import main
from fedmuon.federated.experiment import Fault
from fedmuon.server.messaging import raised, reason
from fedmuon.server.ray.flower_internals import identify, numbered
from fedmuon.server.strategy import FedMuonStrategy, RoundFailed

pytestmark = pytest.mark.usefixtures("runs_apart")

HERE = Path(__file__).name


@pytest.mark.parametrize(("slot", "name"), table.sample())
def test_an_unsuitable_object_works_or_is_refused(slot: str, name: str) -> None:
    assert table.outcome(slot, name) in ("works", "refused")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("slot", [slot for slot in table.SLOTS if slot != "control"])
def test_every_unsuitable_object_works_or_is_refused(slot: str) -> None:
    found = {name: table.outcome(slot, name) for one, name in table.cases() if one == slot}
    assert found and set(found.values()) <= {"works", "refused"}, found


def test_the_table_is_large_and_its_check_sees_raw_errors() -> None:
    assert len(table.cases()) >= 600
    assert table.outcome("control", "raw") == "a traceback of ours: KeyError"
    assert table.unreadable(InputError("two\nlines")) and table.unreadable(InputError(""))


def fails(*given: Any, **named: Any) -> Any:
    raise RuntimeError("no such thing\nmore of it")


def fails_later(outputs: Any, targets: Any) -> Any:
    """Not when it is tried on a sample or two."""
    return fails() if len(targets) > 2 else outputs[:, 0] * 0


class Failing(fedmuon.callbacks.Callback):
    """Fails after its second round."""

    def on_round(self, record: Any, state: Any) -> None:
        if record["round"] == 2:
            fails()


def linked(update: Callable[..., Any]) -> list[fedmuon.Link]:
    return [links.gradient(), links.stateless("mine", update), links.descend(0.1)]


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"task": fails}, "your task fails fails with"),
    "loss": ({"task": (linear(), fails_later)}, "your loss fails_later fails in round 1, on "),
    "metric": (
        {"task": fedmuon.Task(linear(), None, {"m": fails})},
        "your metric fails fails with",
    ),
    "data": ({"data": lambda: fails()}, "your data <lambda> fails with"),
    "partition": ({"partition": lambda y, n, rng: fails()}, "your partition <lambda> fails with"),
    "recipe": ({"recipe": lambda: fails()}, "your recipe <lambda> fails with"),
    "link": ({"recipe": linked(lambda d, c: fails())}, "your update of the link mine "),
    "aggregate": ({"aggregate": lambda replies: fails()}, "your aggregate <lambda> fails with"),
    "schedule": ({"schedule": lambda round: fails()}, "your schedule <lambda> fails with"),
    "callback": ({"callbacks": [Failing()]}, "your callback Failing fails in round 2 with"),
}


@pytest.mark.parametrize("slot", CALLS)
def test_an_error_of_the_user_s_names_slot_object_place_and_line(slot: str) -> None:
    """Its first line alone, and what was raised is the cause."""
    given, begin = CALLS[slot]
    with pytest.raises(InputError) as refused:
        fedmuon.run(tables(), **{**PLAIN, **given})
    said = str(refused.value)
    line = fails.__code__.co_firstlineno + 1
    assert said.startswith(begin) and "RuntimeError: no such thing (" in said
    assert f"{HERE}, line {line})" in said and "more of it" not in said
    assert type(refused.value.__cause__) is RuntimeError


def test_an_error_of_torch_s_names_the_object_and_what_is_wanted() -> None:
    """No line of the user's is in it, so the error says what to give."""
    with pytest.raises(InputError, match=r"your aggregate Linear cannot be used .*pass a function"):
        fedmuon.run(tables(), **PLAIN, aggregate=nn.Linear(3, 2))


def test_a_client_is_named_where_its_samples_alone_fail() -> None:
    """On its own, or with those that it is stepped together with."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return fails() if len(targets) == 20 else outputs[:, 0] ** 2

    parts = [range(21), range(21, 41), range(41, 60)]
    with pytest.raises(InputError, match=r"fails in round 1, on .*client.* 1"):
        fedmuon.run(
            tables(federation={"per-round": 3}), **DATA, task=(linear(), loss), partition=parts
        )


class Wish(Exception):
    """What a program raises in a callback, to end the run and go on elsewhere."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, Wish])
def test_a_caller_s_own_signals_reach_it(error: type[BaseException]) -> None:
    """Ctrl-C is none of ours, and an error of the caller's class is still one of that class."""

    def heard(record: Any, state: Any) -> None:
        raise error("now")

    with pytest.raises(error, match="now") as found:
        fedmuon.run(tables(), **PLAIN, callbacks=[heard])
    assert isinstance(found.value, InputError) is (error is Wish)


def test_the_command_line_ends_with_2_and_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "mine.py").write_text(
        "def aggregate(replies):\n    raise KeyError('nothing')\n"
    )
    small = ["federation.rounds=1", "federation.clients=2", "federation.per-round=2",
             "data.name=digits", "data.train=40", "data.test=10", "data.minimum=1",
             f"federation.aggregate={file}:aggregate"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["run", "--out", str(tmp_path / "run"), *(w for s in small for w in ("--set", s))])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert f"[federation] aggregate = '{file}:aggregate' (aggregate aggregate) fails with" in said
    assert f"KeyError: 'nothing' ({file}, line 2)" in said


@pytest.mark.slow
def test_an_error_in_a_worker_arrives_as_the_same_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is longer than what is shown of other errors, and not wrapped in another sentence."""
    sentence = f"your loss mine fails in round 1, on client 0 with E: {'x' * 300} (m.py, line 3)"
    identify()
    numbered(asked := Message(RecordDict(), 1, MessageType.TRAIN))
    answer = Message(Error(0, raised(asked, OwnError(sentence))), reply_to=asked)
    why = reason(answer)
    strategy: Any = object.__new__(FedMuonStrategy)
    strategy.config = table.small({"faults": {"retries": 0}})
    monkeypatch.setattr(strategy, "_attempt", lambda *given: ({}, [Fault(0, 0, why)]))
    with pytest.raises(RoundFailed) as refused:
        strategy._collect(None, [0])
    assert str(refused.value) == sentence


def test_values_that_fit_are_taken() -> None:
    """Whatever the guards do: modules as functions, arrays as numbers, odd callables."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    fedmuon.run(tables(), data=(X, CLASSES), task=(module, nn.CrossEntropyLoss(reduction="none")))
    fedmuon.run(tables(), **PLAIN, schedule=lambda round: torch.ones(1, requires_grad=True))
