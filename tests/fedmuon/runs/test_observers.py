"""Observers of a run: which a config has, when the loop calls them, and that it knows no others."""

import ast
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import small

from fedmuon.config.load import Config
from fedmuon.core.files import Record
from fedmuon.experiments.run import execute
from fedmuon.federated.build import resolve
from fedmuon.federated.experiment import Round
from fedmuon.federated.rounds import run_rounds
from fedmuon.optim.stage import ServerState
from fedmuon.runs import loop
from fedmuon.runs.callbacks import Callback
from fedmuon.runs.ending import SUMMARY, in_order
from fedmuon.runs.observers.choice import observers_of
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import prepare

CONDITIONS = 12  # in loop.py; 58 before the optional features became observers
NETWORK = {"name": "network", "model": "mlp"}
ADAPTED = {"name": f"{Path(__file__).parents[2] / 'helpers' / 'adapted.py'}:fresh"}
PERSONAL = {"recipe": "fedper", "personal": "head.*"}
CHOICES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "default": ({}, ["Replies", "Evaluation"]),
    "devices": ({"devices": {"mode": "synchronous"}}, ["SimulatedTime", "Replies", "Evaluation"]),
    "clients": ({"output": {"clients": True}}, ["Replies", "Evaluation", "ClientRecords"]),
    "profile": ({"output": {"profile": True}}, ["Replies", "Evaluation", "Profile"]),
    "average": ({"output": {"average": 0.5}}, ["Replies", "Evaluation", "AverageModel"]),
    "adapters": ({"task": ADAPTED}, ["Replies", "Evaluation", "AdapterMeans"]),
    "products": (
        {"task": ADAPTED, "federation": {"adapters": "exact"}},
        ["Replies", "Evaluation", "AdapterMeans"],
    ),
    "fixed factors": (
        {"task": ADAPTED, "federation": {"adapters": "freeze-a"}},
        ["Replies", "Evaluation"],
    ),
    "tests": ({"data": {"client-test": 0.3}}, ["Replies", "ClientTests"]),
    "personal": (
        {"task": NETWORK, "local": PERSONAL},
        ["Replies", "Evaluation", "PersonalModels"],
    ),
    "callback": (
        {"output": {"callback": "early-stopping"}},
        ["Replies", "Evaluation", "UserCallback"],
    ),
}


class Recorder(Observer):
    """A custom observer that notes every call, and ends the run after two rounds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, list[tuple[Any, ...]]()

    def lines(self) -> int:
        """The number of lines in rounds.jsonl."""
        return (self.folder / "rounds.jsonl").read_bytes().count(b"\n")

    def begin(self, state: ServerState, earlier: Sequence[Record]) -> None:
        self.calls.append(("begin", state.round, len(earlier)))

    def after(self, finished: Round, record: Record) -> Record:
        self.calls.append(("after", finished.state.round, self.lines(), "test_loss" in record))
        return {"replies": len(finished.answered)}

    def react(self, record: Record, state: ServerState) -> str:
        self.calls.append(("react", state.round, self.lines(), record["replies"]))
        return "two rounds are enough" if state.round == 2 else ""

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        self.calls.append(("end", state.round))
        return {"total": 6}, {"recorder.txt": b"six\n"}

    def close(self, summary: Record) -> None:
        self.calls.append(("close", (self.folder / "summary.json").exists()))


class Asked(Callback):
    """A callback that notes the rounds after which it is called."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def on_round(self, record: Mapping[str, Any], state: Any) -> None:
        self.rounds.append(record["round"])


def test_a_custom_observer_is_called_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, before, behind = Recorder(tmp_path / "run"), Asked(), Asked()

    def chosen(run: Any, engine: Any) -> tuple[Observer, ...]:
        *standard, first, last = observers_of(run, engine)
        return *standard, first, recorder, last

    monkeypatch.setattr(loop, "observers_of", chosen)
    config = small(output={"evaluate-every": 1})
    summary = execute(config, recorder.folder, callbacks=[before, behind])
    assert recorder.calls == [
        ("begin", 0, 0),
        *(("after", 1, 0, True), ("react", 1, 1, 3)),
        *(("after", 2, 1, True), ("react", 2, 2, 3)),
        *(("end", 2), ("close", True)),
    ]
    assert (before.rounds, behind.rounds) == ([1, 2], [1])  # after a reason, nobody else is called
    assert summary["stopped"] == "two rounds are enough" and summary["rounds"] == 2
    assert (recorder.folder / "recorder.txt").read_bytes() == b"six\n"
    for line in (recorder.folder / "rounds.jsonl").read_text().splitlines():
        names = list(json.loads(line))
        place = names.index("replies")
        assert names[place - 1 : place + 3] == ["accuracy", "replies", "train_seconds", "seconds"]
    written = json.loads((recorder.folder / "summary.json").read_text())
    assert list(written) == list(summary) and list(written)[4:7] == [
        "total",
        "untrained",
        "stopped",
    ]


def test_an_observer_that_does_nothing_changes_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(small(), tmp_path / "without")

    def chosen(run: Any, engine: Any) -> tuple[Observer, ...]:
        return Observer(), *observers_of(run, engine)

    monkeypatch.setattr(loop, "observers_of", chosen)
    execute(small(), tmp_path / "with")
    for name in ("model.safetensors", "momentum.safetensors"):
        with_it, without = ((tmp_path / run / name).read_bytes() for run in ("with", "without"))
        assert with_it == without


@pytest.mark.parametrize("name", CHOICES)
def test_a_run_has_the_observers_of_its_config(name: str, tmp_path: Path) -> None:
    tables, names = CHOICES[name]
    config: Config = small(**tables)
    run = prepare(resolve(config), tmp_path / "run")
    assert [type(observer).__name__ for observer in observers_of(run, run_rounds)] == names


def test_the_summary_has_one_order() -> None:
    """Whatever the order of observers; measures, and fields of custom observers, come first."""
    fields = {name: name for name in reversed(SUMMARY)} | {"train_loss": 1.0, "custom": 2.0}
    assert list(in_order(fields)) == ["train_loss", "custom", *SUMMARY]
    assert list(in_order({"workers": [], "seed": 3, "accuracy": 1.0})) == [
        *("accuracy", "seed", "workers"),
    ]


def conditions(tree: ast.AST) -> int:
    """The number of if statements, if expressions and ifs of comprehensions."""
    return sum(
        len(node.ifs) if isinstance(node, ast.comprehension)
        else isinstance(node, ast.If | ast.IfExp)
        for node in ast.walk(tree)
    )  # fmt: skip


def test_the_loop_knows_no_optional_feature() -> None:
    tree = ast.parse(inspect.getsource(loop))
    assert conditions(ast.parse("a = [b for b in c if b if c] if d else e\nif a: pass")) == 4
    assert conditions(tree) <= CONDITIONS
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    features = {str(name) for name in modules if ".observers." in str(name)}
    assert features == {f"fedmuon.runs.observers.{name}" for name in ("choice", "observer")}
