"""What the user brings: gone on with to the same bytes, refused where it is unsound."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brought import CLASSES, DATA, PLAIN, X, Y, linear, refused, tables
from torch import nn

import fedmuon
from fedmuon import links
from fedmuon.config.load import Config, load, parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.choices import OF_A_ROUND, OF_A_RUN
from fedmuon.core.errors import InputError
from fedmuon.data.user_data import as_source
from fedmuon.experiments.cli import main
from fedmuon.experiments.results import Result
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_worker, resolve
from fedmuon.federated.schedule import schedule_of
from fedmuon.optim.links import private_gradient
from fedmuon.optim.orthogonalizers import require_sound
from fedmuon.optim.recipes import as_recipe
from fedmuon.optim.server_rules import replace_by_mean
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.per_example.clipping import Clipping
from fedmuon.tasks.thread_copies import stateless

pytestmark = pytest.mark.usefixtures("runs_apart")
LAMBDA = {"orthogonalizer": {"lambda": 1.0}}
MUON = {"local": {"recipe": "fedmuon", "route": "all-matrices"}}


class Stop(Exception):
    """What a test raises to end a run in the middle."""


class Stopping(fedmuon.callbacks.Callback):
    def on_round(self, record: Any, state: Any) -> None:
        if record["round"] == 3:
            raise Stop


def cut(config: Any, out: Path, **given: Any) -> None:
    """A run that ends in the middle of its third round."""
    with pytest.raises(Stop):
        fedmuon.run(config, **given, out=out, callbacks=[Stopping()])


def test_a_run_of_handed_over_objects_is_gone_on_with_by_the_same_ones(tmp_path: Path) -> None:
    config = tables(federation={"rounds": 6}, output={"checkpoint-every": 2})
    given = {**PLAIN, "aggregate": "by-samples", "schedule": lambda round: 1 / (round + 1)}
    whole = fedmuon.run(config, **given)
    cut(config, tmp_path, **given)
    other = {**given, "data": (X, Y + 1)}
    for config_again in (config, None):
        with pytest.raises(InputError):
            fedmuon.run(config_again, **other, out=tmp_path, resume=True)
    refused("was passed in Python", None, out=tmp_path, resume=True)
    again = fedmuon.run(**given, out=tmp_path, resume=True)
    for name in ("model.safetensors", "partition.npz", "schedule.npy", "config.toml"):
        assert (again.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert [one["round"] for one in again.rounds] == [1, 2, 3, 4, 5, 6]


def scaled(lr: float) -> fedmuon.Chain:
    return fedmuon.Chain((links.gradient(), links.descend(lr)))


BEGUN: dict[str, Any] = {
    "task": fedmuon.Task(linear()),
    "recipe": scaled(0.1),
    "aggregate": lambda replies: replies[0].params,
    "schedule": lambda round: 1.0,
}
OTHERS: dict[str, Any] = {
    "task": fedmuon.Task(BEGUN["task"].module, lambda y, t: (y[:, 0] - t).square() / 2),
    "recipe": scaled(0.2),
    "aggregate": lambda replies: replies[1].params,
    "schedule": lambda round: 0.5,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_no_run_is_gone_on_with_by_another_object(kind: str, tmp_path: Path) -> None:
    given = {**DATA, **BEGUN}
    cut(tables(federation={"rounds": 4}), tmp_path, **given)
    with pytest.raises(InputError, match=f"the {kind} differs from the {kind}"):
        fedmuon.run(**{**given, kind: OTHERS[kind]}, out=tmp_path, resume=True)
    whole = fedmuon.run(**given, out=tmp_path, resume=True)
    with pytest.raises(InputError, match=f"the {kind} differs from the {kind}"):
        fedmuon.bound(Result(whole.path, replace(whole.given, **{kind: OTHERS[kind]})))


def test_a_map_is_known_again_by_its_constant(tmp_path: Path) -> None:
    maps = [fedmuon.Orthogonalizer(lambda m: m / 2, constant) for constant in (1.0, 0.5)]
    done = fedmuon.run(tables(**MUON), **PLAIN, orthogonalizer=maps[0], out=tmp_path)
    with pytest.raises(InputError, match="the orthogonalizer differs from the orthogonalizer"):
        fedmuon.bound(Result(done.path, replace(done.given, orthogonalizer=maps[1])))


def test_a_file_that_was_edited_is_another_object(tmp_path: Path) -> None:
    """Read anew by the next run of a process, and refused by one that goes on."""
    (file := tmp_path / "mine.py").write_text("def schedule(round):\n    return 0.0\n")
    config = tables(output={"evaluate-every": 1})
    given: dict[str, Any] = {**PLAIN, "schedule": f"{file}:schedule"}
    still = fedmuon.run(config, **given)
    file.write_text("def schedule(round):\n    return 1.00\n")
    moved = fedmuon.run(config, **given)
    losses = [[one["train_loss"] for one in done.rounds] for done in (still, moved)]
    assert losses[0][0] == losses[0][1] and losses[1][0] != losses[1][1]
    refused("the schedule differs from the schedule", None, **PLAIN, out=still.path, resume=True)


def test_samples_of_a_file_that_changed_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "held.npz"
    np.savez(file, inputs=X, labels=CLASSES)
    config = tables(data={"name": "npz", "folder": str(file), "train": 40, "test": 20})
    config["federation"] |= {"partition": "iid"}
    first = fedmuon.run(config)
    np.savez(file, inputs=X[::-1] + 1, labels=CLASSES)
    second = fedmuon.run(config)
    assert first.summary["train_loss"] != second.summary["train_loss"]
    refused("the data differ from the data", None, out=first.path, resume=True)


def test_a_schedule_is_called_once_a_run(tmp_path: Path) -> None:
    """And what it said then is what the bound and a resumed run use, be it random."""
    said: list[float] = []

    def schedule(round: int) -> float:
        said.append(float(np.random.default_rng().random()))
        return said[-1]

    given = {**PLAIN, "schedule": schedule}
    cut(tables(federation={"rounds": 5}), tmp_path, **given)
    done = fedmuon.run(**given, out=tmp_path, resume=True)
    fedmuon.bound(done)
    assert len(said) == 5
    assert json.loads((tmp_path / "objects.json").read_text())["factors"] == said


def test_the_aggregate_of_a_recipe_holds_unless_the_config_names_another() -> None:
    median = replace(as_recipe(scaled(0.1)), aggregate=fedmuon.aggregators.median())
    of = {**PLAIN, "config": tables(federation={"per-round": 3})}
    named = fedmuon.run(**of, recipe=scaled(0.1), aggregate="median")
    held = fedmuon.run(**of, recipe=median)
    other = fedmuon.run(**of, recipe=median, aggregate="by-samples")
    assert torch.equal(held.model["weight"], named.model["weight"])
    assert not torch.equal(other.model["weight"], named.model["weight"])


def test_runs_of_one_seed_are_no_seeds_of_one_another() -> None:
    aggregates = [lambda replies, k=k: replies[k].params for k in (0, 1)]
    runs = [
        fedmuon.run(tables(federation={"seed": seed}), **PLAIN, aggregate=one)
        for one in aggregates
        for seed in (0, 1)
    ]
    mixed = fedmuon.compare([runs[place] for place in (0, 3, 2, 1)])  # (a, 0), (b, 1), (b, 0) ...
    losses = [[run.summary["train_loss"] for run in runs[at : at + 2]] for at in (0, 2)]
    assert [row["train_loss"] for row in mixed.rows] == pytest.approx([sum(x) / 2 for x in losses])
    found = fedmuon.compare([*runs, runs[0], str(runs[0].path)])
    assert [row["seeds"] for row in found.rows] == [2, 2]
    for row in found.rows:  # of one name, which says nothing alone
        assert str(row["run"]).startswith("aggregate=<lambda> of digest ")
    again = fedmuon.run(tables(), **PLAIN, aggregate=aggregates[0])
    assert [row["seeds"] for row in fedmuon.compare([runs[0], again]).rows] == [1, 1]
    other = fedmuon.run(tables(data={"name": "digits", "train": 60, "test": 10, "minimum": 1}))
    assert "data.name=digits" in str(fedmuon.compare([again, other]).rows[1]["run"])


def first(replies: Any) -> Any:
    return replies[0].params


def second(replies: Any) -> Any:
    return replies[1].params


def test_objects_are_compared_by_their_names() -> None:
    runs = [fedmuon.run(tables(), **PLAIN, aggregate=one) for one in (first, second)]
    found = [row["run"] for row in fedmuon.compare(runs).rows]
    assert found == ["aggregate=first", "aggregate=second"]
    told = json.loads((runs[0].path / "objects.json").read_text())
    assert told["aggregate"].startswith("first:")


def test_runs_are_compared_by_labels_or_folder(tmp_path: Path) -> None:
    runs = [
        fedmuon.run(tables(federation={"seed": seed}), **PLAIN, out=tmp_path / str(seed))
        for seed in (0, 1, 2)
    ]
    found = fedmuon.compare({"mine": runs[:2], "theirs": runs[2].path})
    assert [(row["run"], row["seeds"]) for row in found.rows] == [("mine", 2), ("theirs", 1)]
    assert list(found.curves) == ["mine", "theirs"]
    for folder in (tmp_path, str(tmp_path), [tmp_path]):
        assert [row["seeds"] for row in fedmuon.compare(folder).rows] == [3]
    assert fedmuon.compare({"a": runs[0], "b": runs[0]}).rows[1]["run"] == "b"
    other = fedmuon.run(tables(federation={"rounds": 5}), **PLAIN)
    split = fedmuon.compare({"mine": [runs[0], other]})
    assert [row["seeds"] for row in split.rows] == [1, 1]
    assert all(str(row["run"]).startswith("mine: rounds=") for row in split.rows)
    with pytest.raises(InputError, match="in one list: compare"):
        fedmuon.compare(runs[0], runs[1])
    split.rows[0].pop("test_loss")
    assert "test_loss" in split.measures


class Wide(nn.Linear):
    """Whose width is seen in its bias."""

    def __init__(self, width: int = 7) -> None:
        super().__init__(3, 1)
        nn.init.constant_(self.bias, width)


@pytest.mark.parametrize(("table", "width"), [({}, 7), ({"width": 128}, 128), ({"width": 9}, 9)])
def test_unset_keys_are_the_parameter_s(table: dict[str, Any], width: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {**DATA, "task": Wide, "schedule": lambda round: 0.0}
    cut(tables(task=table, federation={"rounds": 4}), tmp_path, **given)
    done = fedmuon.run(**given, out=tmp_path, resume=True)
    assert done.model["bias"] == width == done.config.task.width


def test_a_map_keeps_its_own_defaults() -> None:
    said: list[Any] = []

    def own_map(m: torch.Tensor, steps: int = 20, eps: float = 0.5) -> torch.Tensor:
        said.append((steps, eps))
        return m

    fedmuon.run(tables(**MUON), **PLAIN, orthogonalizer=own_map)
    fedmuon.run(tables(**MUON, orthogonalizer={"steps": 3}), **PLAIN, orthogonalizer=own_map)
    assert set(said) == {(20, 0.5), (3, 0.5)}


def test_a_keyword_replaces_what_the_config_was_given() -> None:
    given = UserObjects(data=(X, Y), test=(X[:7], Y[:7]), task=linear(), schedule=lambda round: 0.0)
    named = tables(
        data={"name": "given"}, task={"name": "given"}, local={"schedule": "given"},
        output={"evaluate-every": 1},
    )  # fmt: skip
    config = parse(named).with_objects(given)
    still = fedmuon.run(config)
    moved = fedmuon.run(config, schedule="constant", data=(X, Y))
    assert still.config.data.test == 7 and moved.config.data.test == 12
    assert still.rounds[0]["train_loss"] == still.rounds[1]["train_loss"]
    assert moved.rounds[0]["train_loss"] != moved.rounds[1]["train_loss"]


def module(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), *layers)


def options(table: str, **given: Any) -> dict[str, Any]:
    return {table: {"options": given}}


def mechanical(*more: fedmuon.Link) -> fedmuon.Recipe:
    """A recipe with a mechanism of its own, and with links before the last."""
    chain = fedmuon.Chain((private_gradient(), *more, links.descend(0.1)))
    return fedmuon.Recipe(
        chain, replace_by_mean, mechanism=Mechanism(Clipping("block", 1.0), 0.5, 4.0)
    )


def asking(direction: links.Params, context: fedmuon.Context) -> links.Params:
    return context.released([(1.0, context.params)]).gradient


MIXING = links.stateless("unit", lambda d, context: {n: v / v.norm() for n, v in d.items()})
DRAWING = links.stateless(
    "noisy", lambda d, context: {n: v + torch.randn_like(v) for n, v in d.items()}
)
PARTS = [range(20), range(20, 40), range(40, 60)]
INDICES = "one array of sample indices per client.* a numpy array .* with the client of each sample"
NOTHING = {"data": None, "task": None}
MATRIX: dict[str, Any] = {"data": (5 * X, CLASSES), "task": None, "recipe": "fedmuon"}


def noisy(noise: bool = False, count: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return X, Y


def digested(digest: str = "") -> tuple[np.ndarray, np.ndarray]:
    return X, Y


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 9))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # what is learned
    "frozen": ({"task": nn.Linear(3, 1).requires_grad_(False)}, "are frozen"),
    "rrelu": ({"task": module(nn.RReLU())}, "Use nn.ReLU"),
    "batch-norm": ({"task": module(nn.BatchNorm1d(1, momentum=None))}, "Set momentum to a number"),
    "no-parameters": ({"task": nn.Flatten()}, "Add layers with parameters"),
    "no-task": ({"task": 3}, "pass an nn.Module"),
    "first-layer": ({"task": nn.Linear(4, 1)}, "Change its first layer"),
    "no-channel": ({"task": convolution(), "data": (X.reshape(-1, 1, 3).repeat(3, 1), CLASSES)},
                   r"Put nn.Unflatten\(1, \(1, 3\)\) in front .* of shape \(1, 3, 3\)"),
    "flat-images": ({"task": convolution(), "data": (X.repeat(3, 1), CLASSES)},
                    r"Put nn.Unflatten\(1, \(1, 3, 3\)\) in front"),
    "not-flat": ({"task": nn.Linear(9, 9), "data": (X.reshape(-1, 1, 3).repeat(3, 1), CLASSES)},
                 r"Put nn.Flatten\(\) in front .* of shape \(9\)"),
    "last-layer": ({"data": (X, CLASSES + 3), "task": nn.Linear(3, 2)},
                   "the size of the last layer to"),
    "real-classes": ({"data": (X, CLASSES.astype(float)), "task": nn.Linear(3, 2)},
                     "labels are real numbers, so return one output"),
    "mean-loss": ({"task": (nn.Linear(3, 1), lambda y, t: y.mean())}, "Return one value per"),
    "metric": ({"task": fedmuon.Task(linear(), None, {"m": lambda y, t: y.mean()})},
               "metric m has .* Return one value per sample"),
    **{
        f"metric-{name}": (
            {"task": fedmuon.Task(linear(), None, {name: lambda y, t: y[:, 0]})},
            f"cannot have the name {name}, .* Rename the metric",
        )
        for name in ("train_loss", "participants", "versions", "seeds", "run", "accuracy ±")
    },
    "real-targets": ({"task": None}, "pass your own task"),
    # what is named
    "option": ({"config": options("local", x=1)}, "x = 1 .* Leave the option out"),
    "option-of-data": ({"config": options("data", x=1)}, "Leave the option out"),
    "word": ({"aggregate": "trimmed-mean", "config": options("federation", trim="a")},
             "set a number, such as 0.2"),
    "fraction": ({"partition": "shards", "config": options("federation", **{"per-client": 1.5})},
                 "set an integer, such as 2"),
    "key": ({"orthogonalizer": lambda m: m, "config": MUON | LAMBDA},
            "your orthogonalizer has no parameter `lam`"),
    "model": ({"task": None, "config": {"task": {"name": "torch.nn:Linear", "model": "mlp"}}},
              "leave model out"),
    "no-module": ({"task": "nowhere.at:all"}, "package.module:object"),
    "no-file": ({"task": "./nowhere.py:all"}, r"there is no file .* \./file.py:object"),
    "no-object": ({"task": "torch.nn:Linnear"}, "Linnear"),
    "no-name": ({"schedule": "cosin"}, "did you mean cosine"),
    # maps
    "map-shape": ({"orthogonalizer": lambda m: m[..., :1], "config": MUON},
                  "Return a tensor with the shape and dtype"),
    "map-type": ({"orthogonalizer": lambda m: m.float(), "config": MUON}, "Return a tensor with"),
    "map-draws": ({"orthogonalizer": lambda m: m + torch.randn_like(m), "config": MUON},
                  "Remove its random draws"),
    "map-mixes": ({"orthogonalizer": lambda m: m - m.mean(0), "config": MUON},
                  "Treat each matrix separately"),
    "map-steeper": (
        {"orthogonalizer": fedmuon.Orthogonalizer(lambda m: 50 * m, lipschitz=0.5), "config": MUON},
        "lipschitz = 0.5 .* differ by 50 times the distance",
    ),
    "no-map": ({"orthogonalizer": 3, "config": MUON}, "pass a function on matrices"),
    "unread-map": ({"orthogonalizer": lambda m: m}, "Choose a Muon optimizer"),
    # aggregates
    "less": ({"aggregate": lambda r: {"bias": r[0].params["bias"]}}, "mapping of bias"),
    "nothing": ({"aggregate": lambda r: None}, "mapping of bias"),
    "other-shape": ({"aggregate": lambda r: {n: v[None] for n, v in r[0].params.items()}},
                    "Return a dense tensor with the shape, dtype and device of the replies"),
    "no-aggregate": ({"aggregate": 3}, "a function"),
    "krum": ({"aggregate": "krum"}, "Raise .* per-round to 4"),
    "trim": ({"aggregate": "trimmed-mean", "config": options("federation", trim=0.5)},
             "Use a share of 0 or more and below 0.5"),
    # schedules
    "nan": ({"schedule": lambda r: float("nan")}, "Return a number of 0 or more"),
    "negative": ({"schedule": lambda r: -1}, "Return a number of 0 or more"),
    "no-number": ({"schedule": lambda r: None}, "Return a number of 0 or more"),
    "no-schedule": ({"schedule": 3}, "pass a function of the round"),
    "warm": ({"schedule": "warm-up", "config": options("local", warm=-1)}, "Use 0 rounds or more"),
    # recipes
    "no-recipe": ({"recipe": 3}, "pass a fedmuon.Recipe"),
    "no-links": ({"recipe": []}, "pass a fedmuon.Recipe"),
    "unasked-lr": ({"recipe": [links.gradient()], "config": {"local": {"lr": 0.1}}},
                   "no parameter `lr`"),
    "private-key": ({"recipe": [links.gradient()], "config": {"privacy": {"epsilon": 1.0}}},
                    "epsilon = 1.0 .* no privacy mechanism. Leave epsilon out"),
    "second-release": ({"recipe": mechanical(links.stateless("again", asking))},
                       "second release.*Call context.released in only one link"),
    **{
        f"mechanism-{table}-{key}": (
            {"recipe": mechanical(), "config": {table: {key: value}}}, mend
        )
        for table, key, value, mend in (
            ("privacy", "epsilon", 1.0, "already sets clipping, noise and lots. Leave epsilon out"),
            ("privacy", "noise", 1.0, "already sets clipping, noise and lots. Leave noise out"),
            ("privacy", "level", "client", "sets clipping, noise and lots. Leave level out"),
            ("privacy", "insecure-reproducible-noise", True, "Leave insecure-repr"),
            ("privacy", "delta", 1e-15, "Raise delta"),
            ("output", "checkpoint-every", 3, "Leave checkpoint-every out"),
            ("local", "batch", 4, "Set batch = 0"),
            ("engine", "name", "ray", "Set retries = 0"),
        )
    },
    "mixing": ({"recipe": (links.gradient(), MIXING, links.descend(0.1))}, "separately for each"),
    "drawing": ({"recipe": (links.gradient(), DRAWING, links.descend(0.1))},
                "draw random numbers only from context.draws"),
    "torch-optimizer": ({"recipe": torch.optim.SGD},
                        "SGD requires arguments that .* recipe: .* a torch optimizer is not"),
    # partitions
    "twice": ({"partition": [[0, 1], [1, 2], [3]]}, "assigns sample 1 more than once"),
    "beyond": ({"partition": [[0, 1], [60], [3]]}, "sample index 60, but .* numbered from 0 to 59"),
    "before": ({"partition": [[0, 1], [-1], [3]]}, "sample index -1, but .* numbered from 0 to 59"),
    "empty": ({"partition": [[0, 1], [], [3]]}, "Assign more samples"),
    "count": ({"partition": [[0, 1], [2]]}, "Remove the key clients"),
    "halves": ({"partition": [[0, 1], [2.5], [3]]}, "must be integers"),
    "no-partition": ({"partition": 3}, "pass index arrays"),
    "left-out": ({"partition": lambda y, n, rng: [range(10)]}, "only 10 of 48 samples to clients"),
    "short": ({"partition": lambda y, n, rng: y[:3] > 0}, "type bool, but 48 integers"),
    "who": ({"partition": lambda y, n, rng: np.full(len(y), n)}, "client number 3, .* 0 to 2"),
    "idle": ({"partition": lambda y, n, rng: np.zeros(len(y), int)}, "Assign more samples"),
    "parts-train": ({"partition": PARTS, "config": {"data": {"train": 30}}},
                    "Remove train from the config"),
    "parts-minimum": ({"partition": PARTS, "config": {"data": {"minimum": 50}}},
                      "Remove minimum from the config"),
    "no-column": ({"partition": "column"}, "Use npz, csv or parquet"),
    "list-of-clients": ({"partition": lambda y, n, rng: list(np.arange(len(y)) % n)}, INDICES),
    "tuple-of-clients": ({"partition": lambda y, n, rng: tuple(np.arange(len(y)) % n)}, INDICES),
    # samples
    "no-data": ({"data": 3}, "pass .inputs, labels."),
    "no-labels": ({"data": (X,)}, "pass .inputs, labels."),
    "lengths": ({"data": (X, Y[:-1])}, "one label for each sample"),
    "words": ({"data": (X, ["a", 1] * 30)}, "of type str, in sample 0|of type int, in sample 1"),
    "below-0": ({"data": (X, CLASSES - 1)}, "renumber the labels from 0 to 1"),
    "not-finite": ({"data": (X * np.nan, Y)}, "correct or remove this sample"),
    "ragged": ({"data": ([[1, 2], [3]], [1.0, 2.0])}, "sample 1 has shape .1,.*one shape"),
    "test-alone": ({**NOTHING, "test": (X, Y)}, "Pass both data and test, or leave test out"),
    "test-of-source": ({"data": as_source((X, Y)), "test": (X, Y)}, "leave test out"),
    "unlike-test": ({"test": (X[:, :2], Y)}, "pass samples of the same shape"),
    "no-csv": ({**NOTHING, "config": {"data": {"name": "csv", "folder": "/nowhere.csv"}}},
               "/nowhere.csv' does not exist: set .* to the path of a .csv file"),
    "labels": ({"data": (X, CLASSES + 2), "task": nn.Linear(3, 3)},
               "the labels go from 0 to 3"),
    "tokens": ({**MATRIX, "config": {"data": {"normalize": "tokens"}}}, "to a norm of at most 1"),
    "pixels": ({**MATRIX, "config": {"data": {"normalize": "pixels"}}}, "to a norm of at most 1"),
    # options, keys and columns
    "digest": ({"data": digested}, "Rename the parameter"),
    "its-digest": ({"data": digested, "config": options("data", digest="abc")}, "Rename the param"),
    "no-switch": ({"data": noisy, "config": options("data", noise=3)}, "set true or false"),
    "a-switch": ({"data": noisy, "config": options("data", noise=1)}, "set true or false"),
    "yes": ({"data": noisy, "config": options("data", noise="yes")}, "set true or false"),
    "zero": ({"data": noisy, "config": options("data", noise=0.0)}, "set true or false"),
    "measure": ({"config": {"output": {"callback": "early-stopping",
                                       "options": {"measure": "test_los"}}}},
                "measure to one of .*test_loss"),
    "tracker": ({"config": {"output": {"callback": "tensorboard"}}}, "needs a value for folder"),
    "module": ({"task": linear(), "config": {"task": {"width": 3}}}, "width = 3 has no effect"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_used_is_one_sentence_with_its_mend(name: str, tmp_path: Path) -> None:
    given, mend = REFUSED[name]
    given = {**PLAIN, **given}
    refused(mend, tables(**given.pop("config", {})), **given, out=tmp_path / "run")


def test_what_is_sound_is_taken() -> None:
    fedmuon.run(tables(), **PLAIN)
    fedmuon.run(tables(data={"options": {"noise": True}}), **{**PLAIN, "data": noisy})
    stopping = fedmuon.callbacks.early_stopping("test_loss")
    fedmuon.run(tables(output={"evaluate-every": 2}), **PLAIN, callbacks=[stopping])
    for link in (links.normalize(), links.momentum(0.5), links.adamw()):  # they keep clients apart
        fedmuon.run(tables(), **PLAIN, recipe=(links.gradient(), link, links.descend(0.1)))


def test_a_run_tells_no_more_than_is_listed_and_leaves_the_caller_s_draws() -> None:
    """Though a module is made with the run's seed; and a metric may have any other name."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = fedmuon.run(tables(), **PLAIN)
    assert torch.equal(torch.rand(3), expected)
    told = {name for record in (found.summary, *found.rounds) for name in record}
    assert told <= {*OF_A_ROUND, *OF_A_RUN}


@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_the_last_round_is_in_the_log(every: int) -> None:
    found = fedmuon.run(tables(output={"evaluate-every": every}), **PLAIN)
    last = found.rounds[-1]
    assert last["round"] == 2 and last["train_loss"] == found.summary["train_loss"]
    assert ("train_loss" in found.rounds[0]) == (every == 1)


def test_samples_that_differ_from_process_to_process_are_refused() -> None:
    """A worker makes them anew, for which a fresh function of the same draws stands here."""

    def config_of(drawn: np.random.Generator) -> Config:
        def samples() -> tuple[np.ndarray, np.ndarray]:
            x = drawn.standard_normal((60, 3))
            return x, x.sum(1)

        given = UserObjects(data=samples, task=linear)
        return parse(tables(data={"name": "given"}, task={"name": "given"})).with_objects(given)

    def rng() -> np.random.Generator:
        return np.random.default_rng(1)

    unseeded = config_of(drawn := rng())
    told = resolve(unseeded)
    assert build_worker(told.with_objects(config_of(rng()).given), 0).shard.size
    with pytest.raises(InputError, match="Use a fixed seed"):
        build_worker(told.with_objects(config_of(drawn).given), 0)


@pytest.mark.parametrize("constant", [None, 0.5])
def test_a_map_in_place_is_the_same_map(constant: float | None) -> None:
    """The momentum that it is given lives on; half the matrix keeps to a constant of 0.5."""
    ends = [
        fedmuon.run(
            tables(**MUON), **PLAIN, orthogonalizer=fedmuon.Orthogonalizer(halved, constant)
        ).model
        for halved in (lambda m: m * 0.5, lambda m: m.mul_(0.5))
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("shape", [(1, 3), (6, 4), (5, 5), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_probe_takes_maps_with_proved_constants(shape: Any, dtype: torch.dtype) -> None:
    for made in ("smoothed_polar", "newton_schulz", "clipped_sign"):
        require_sound(getattr(fedmuon.orthogonalizers, made)(), torch.zeros(1, *shape, dtype=dtype))
    require_sound(fedmuon.Orthogonalizer(lambda m: m, 1.0), torch.zeros(1, *shape, dtype=dtype))


def test_a_name_beside_an_object_is_refused() -> None:
    named = tables(data={"name": "given"}, task={"name": "given"})
    given = UserObjects(data=(X, Y), task=linear(), partition=PARTS)
    with pytest.raises(InputError, match="Set partition to 'given'"):
        execute(parse(named).with_objects(given), Path(tempfile.mkdtemp()))


def test_there_is_nothing_to_resume_where_nothing_began(tmp_path: Path) -> None:
    for given in ({}, PLAIN):
        refused("leave resume=True out to begin", None, **given, out=tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()


def test_a_resumed_run_is_held_to_the_keywords(tmp_path: Path) -> None:
    fedmuon.run(tables(), **PLAIN, out=tmp_path)
    refused("with out=, or resume the run with resume=True", tables(), **PLAIN, out=tmp_path)
    assert fedmuon.run(**PLAIN, recipe="fedavg", out=tmp_path, resume=True).rounds
    refused(
        "local.recipe is 'fedavg' in the file, but 'sgd' in your settings",
        None,
        **PLAIN,
        recipe="sgd",
        out=tmp_path,
        resume=True,
    )


FAILING = """
import torch
from torch import nn

def schedule(round):
    return 1 / round

def aggregate(replies):
    raise KeyError("nothing")

def callback(record, state):
    raise OSError("full")

def task(shape):
    return nn.Linear(shape[7], 1)

def data():
    return undefined

def partition(labels, clients):
    return None
"""
KEYS = ["local.schedule", "federation.aggregate", "output.callback", "task.name", "data.name",
        "federation.partition"]  # fmt: skip


def refused_command(setting: str, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    small = ["federation.rounds=2", "federation.clients=3", "data.name=digits", "data.train=60",
             "data.test=10", "data.minimum=1", setting]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["run", "--out", str(out), *(f"--set={one}" for one in small)])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("key", KEYS)
def test_commands_tell_which_object_fails(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "failing.py").write_text(FAILING)
    kind = key.removesuffix(".name").rpartition(".")[2]
    said = refused_command(f"{key}={file}:{kind}", tmp_path / "run", capsys)
    table, _, name = key.partition(".")
    assert f"[{table}] {name} = " in said and f"failing.py:{kind}" in said
    assert "line " in said or "change the parameters of your function" in said


def test_modules_of_a_project_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unpacked" / "unpacked").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match="Run the command in the project's folder, install the module"
    ):
        fedmuon.run({"data": {"name": "unpacked.data:samples"}})


def test_a_bound_of_given_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fedmuon.run(tables(), **PLAIN, out=tmp_path / "a")
    with pytest.raises(SystemExit) as ended:
        main(["bound", str(tmp_path / "a")])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "were passed in Python" in said
    assert "call fedmuon.bound(result)" in said


def test_python_is_told_of_keywords(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for ask in (lambda: fedmuon.bound(tmp_path), lambda: Result(tmp_path / "a").model):
        with pytest.raises(InputError) as refused:
            ask()
        assert "--" not in str(refused.value)


@pytest.mark.parametrize("body", ["sys.exit(0)", "sys.exit(3)", "raise SystemExit"])
def test_exits_are_errors(body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "leaving.py").write_text(
        f"import sys\n\n\ndef aggregate(replies):\n    {body}\n"
    )
    said = refused_command(f"federation.aggregate={file}:aggregate", tmp_path / "run", capsys)
    assert "leaving.py:aggregate" in said and "SystemExit" in said


def test_a_callback_that_fails_costs_no_privacy(tmp_path: Path) -> None:
    """What was released before it is in the checkpoint, so it is not released again."""
    private = {"local": {"recipe": "dp-sgd"}, "privacy": {"noise": 1.0, "lot": 5.0}}
    config = tables(**private, federation={"rounds": 4})
    del config["engine"]["device"]
    cut(config, tmp_path, data=(X, CLASSES))
    fedmuon.run(data=(X, CLASSES), out=tmp_path, resume=True)
    ledger = (tmp_path / "ledger.jsonl").read_text().splitlines()
    rounds = [one["round"] for one in map(json.loads, ledger) if "round" in one]
    assert rounds == sorted(set(rounds))


class Half(nn.Module):
    def forward(self, what: Any) -> Any:
        if isinstance(what, torch.Tensor):
            return what / 2
        return 0.5 if isinstance(what, int) else what[0].params


CALLABLES: dict[str, Any] = {"orthogonalizer": MUON, "aggregate": {}, "schedule": {}}


@pytest.mark.parametrize("kind", CALLABLES)
def test_a_module_and_a_function_of_anything_are_values(kind: str) -> None:
    half = Half()
    values = (half, lambda what: half(what), lambda *given, **named: half(given[0]))
    config = tables(**CALLABLES[kind])
    given: list[dict[str, Any]] = [{**PLAIN, kind: one} for one in values]
    found = [fedmuon.run(config, **one).model["weight"] for one in given]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    table = {"orthogonalizer": "orthogonalizer", "aggregate": "federation", "schedule": "local"}
    idle = {table[kind]: {**config.get(table[kind], {}), "options": {"idle": 1}}}
    for one in (given[0], given[2]):
        refused("idle = 1 has no effect", {**config, **idle}, **one)
        if kind == "orthogonalizer":
            refused("rank = 3 has no effect", {**config, kind: {"rank": 3}}, **one)


def test_files_lie_beside_the_config_or_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config := tmp_path / "a.toml").write_text("[local]\nschedule = './mine.py:schedule'\n")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    found = {}
    for folder, factor in ((here, 0.25), (tmp_path, 0.5)):
        (folder / "mine.py").write_text(f"def schedule(round):\n    return {factor}\n")
        found[factor] = schedule_of(load(config))
    assert [found[factor] and found[factor](0) for factor in found] == [0.25, 0.5]
    (here / "mine.py").write_text("def schedule(round):\n    return 0.125\n")
    relative = parse({"local": {"schedule": "./mine.py:schedule"}})
    assert (one := schedule_of(relative)) and one(0) == 0.125
    monkeypatch.chdir(tmp_path)
    assert (one := schedule_of(relative)) and one(0) == 0.5


def test_a_constant_is_a_number_of_any_kind() -> None:
    two: tuple[Any, ...] = (2, np.float32(2), np.int64(2), np.array([2.0]), torch.tensor(2))
    for constant in two:
        found = fedmuon.Orthogonalizer(lambda m: m, constant).lipschitz
        assert found == 2 and type(found) is float
    none: tuple[Any, ...] = (-1.0, float("nan"), float("inf"), 10**400, True, np.True_, "1", 1j,
                             [1.0], np.ones(2), torch.ones(2))  # fmt: skip
    for constant in none:
        with pytest.raises(InputError, match="Use a finite number of 0 or more") as said:
            fedmuon.Orthogonalizer(lambda m: m, constant)
        assert "\n" not in str(said.value)


@pytest.mark.parametrize(("table", "words"), [
    ("a,b\n1,2", r"no column 'label': set \[data.options\] label to one of a, b"),
    ("a,label\nx,1\ny,0", "column 'a' of .* contains words"),
    ("a,label\n1,1\n2", "line 3 of .*held.csv has 1 value, but the header has 2"),
    ('a,label\n"1\n",1\n2,3,4', "line 4 of .*held.csv has 3 values, but the header has 2"),
    ("", "held.csv is empty"),
    ("a,label\n", "held.csv has a header, but no samples"),
])  # fmt: skip
def test_a_table_that_cannot_be_read(tmp_path: Path, table: str, words: str) -> None:
    (file := tmp_path / "held.csv").write_text(table)
    refused(words, {"data": {"name": "csv", "folder": str(file)}})


def test_the_label_of_a_file_is_an_option(tmp_path: Path) -> None:
    (file := tmp_path / "held.csv").write_text("a,b\n1,2")
    data = {"name": "csv", "folder": str(file)}
    words = r"target = 'b' has no effect.* Set \[data.options\] label = 'b', or leave"
    refused(words, {"data": {**data, "target": "b"}})
    file.write_text("a,b\n" + "1,0\n2,1\n" * 12)
    data |= {"train": 18, "test": 6, "minimum": 1, "options": {"label": "b"}}
    found = fedmuon.run({"data": data, "federation": {"clients": 3, "rounds": 1, "per-round": 3}})
    assert found.summary["accuracy"] >= 0


def test_a_csv_file_is_no_npz_file(tmp_path: Path) -> None:
    (file := tmp_path / "held.npz").write_text("a,label\n1,1")
    with pytest.raises(InputError, match=r"held.npz is not a readable \.npz file: check") as said:
        fedmuon.run({"data": {"name": "npz", "folder": str(file)}})
    assert "pickle" not in str(said.value)


@pytest.mark.parametrize(("table", "key"), [
    ("local", "recipe"), ("federation", "aggregate"), ("federation", "partition"),
    ("local", "schedule"), ("orthogonalizer", "name"), ("task", "name"), ("output", "callback"),
])  # fmt: skip
def test_an_object_of_a_wrong_type_is_named(tmp_path: Path, table: str, key: str) -> None:
    (file := tmp_path / "own.py").write_text("held = 3\n")
    words = rf"\[{table}\] {key} = '{file}:held' gives an object of type int, which cannot be used"
    muon = {"local": {"recipe": "fedmuon"}} if table == "orthogonalizer" else {}
    refused(words, tables(**muon, **{table: {key: f"{file}:held"}}))


class Unwritten(list):
    """Samples that nobody should write out: there may be many."""

    def __repr__(self) -> str:
        raise AssertionError("written out")


def test_samples_are_not_written_out() -> None:
    data = Unwritten((X, Y))
    found = fedmuon.run(tables(), data=data, task=linear)
    assert torch.equal(found.model["weight"], fedmuon.run(tables(), **PLAIN).model["weight"])


def test_a_loss_of_a_namespace_without_a_name_is_called() -> None:
    """As from `exec(code, {})`; its module is unknown, so nothing is assumed of it."""
    space: dict[str, Any] = {}
    exec("def loss(outputs, targets):\n    return ((outputs[:, 0] - targets) ** 2)", space)
    del space["__builtins__"]
    assert "__name__" not in space and not stateless(space["loss"])
