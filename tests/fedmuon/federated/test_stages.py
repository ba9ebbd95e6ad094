"""Custom stages: a documented example with a state, and errors."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import small

import fedmuon
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError, OwnError
from fedmuon.experiments.stability.certificates import Uncertified, method_of
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.optim.compression import Compression, top_k
from fedmuon.optim.stage import Stage

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))
stages = SimpleNamespace(
    LargerHalf=__import__("stage").LargerHalf,
    LargestLength=__import__("stage_with_state").LargestLength,
)
sys.path.remove(str(EXAMPLES))

TABLES: dict[str, Any] = {
    "data": {"name": "synthetic", "train": 90, "test": 20, "dimension": 7, "classes": 3},
    "federation": {"clients": 5, "per-round": 3, "rounds": 3},
    "local": {"recipe": "fedmuon", "steps": 2, "lr": 0.05},
    "engine": {"dtype": "float64"},
}


def model(result: fedmuon.Result) -> torch.Tensor:
    return torch.as_tensor(result.model["weight"])


def with_stage(stage: Any, engine: str = "inline", **tables: Any) -> fedmuon.Result:
    merged = {name: {**TABLES.get(name, {}), **tables.get(name, {})} for name in TABLES | tables}
    merged["engine"] = {**merged["engine"], "name": engine}
    return fedmuon.run(merged, stage=stage)


@pytest.mark.slow
def test_a_stage_with_a_state_gives_the_same_result_on_ray() -> None:
    federation = {"stage": f"{EXAMPLES}/stage_with_state.py:LargestLength"}
    inline, on_ray = (
        with_stage(None, engine, federation=federation) for engine in ("inline", "ray")
    )
    assert (model(inline) == model(on_ray)).all()
    assert inline.rounds[-1]["bytes_up"] == on_ray.rounds[-1]["bytes_up"]


def test_the_longest_update_limits_those_of_the_next_round() -> None:
    named = small(TABLES, federation={"stage": "given"})
    named = named.with_objects(UserObjects(stage=stages.LargestLength()))
    made = build_experiment(resolve(named))
    state, limit = begin(made.recipe, made.task, made.plan.seed), float("inf")
    for finished in run_rounds(made, state):
        moved = (finished.state.params["weight"] - state.params["weight"]).norm()
        assert moved <= limit * (1 + 1e-12)
        state, limit = finished.state, float(finished.state.states["length"]["largest"])
        assert 0 < limit < 10


def test_a_stage_is_named_in_a_config_and_resumed(tmp_path: Path) -> None:
    name = f"{EXAMPLES / 'stage_with_state.py'}:LargestLength"
    tables = {**TABLES, "federation": {**TABLES["federation"], "stage": name}}
    whole = fedmuon.run(tables, out=tmp_path / "whole")
    assert (model(whole) == model(with_stage(stages.LargestLength()))).all()

    def stop(record: Any, state: Any) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedmuon.run(tables, out=tmp_path / "half", callbacks=[stop])
    resumed = fedmuon.run(tables, out=tmp_path / "half", resume=True)
    assert (model(resumed) == model(whole)).all()


class Longer(Stage):
    def reply(self, reply: Any, received: Any, memory: Any) -> Any:
        trees = {**reply.trees, "more": {"n": torch.ones(1)}}
        return reply.with_trees(trees)


class Lost(Stage):
    def open(self, message: Any, model: Any) -> Any:
        return {"model": {}}


class Storing(Stage):
    def reply(self, reply: Any, received: Any, memory: Any) -> Any:
        return reply.storing("memory", reply.params)


class Counting(Stage):
    count = 0

    def reply(self, reply: Any, received: Any, memory: Any) -> Any:
        self.count += 1
        model = {name: value + self.count for name, value in reply.params.items()}
        return reply.with_trees({**reply.trees, "model": model})


class Broken(Stage):
    def send(self, message: Any, server: Any) -> Any:
        return message["mode"]


class Empty(Stage):
    def read(self, replies: Any, received: Any, server: Any) -> Any:
        return [], {}


class WithoutMomentum(Stage):
    def require(self, recipe: Any) -> None:
        if "momentum" in recipe.sent:
            raise InputError("this stage cannot send a momentum")


WRONG = [
    (WithoutMomentum, "this stage cannot send a momentum"),
    (Longer, r"'more\.n', `reply` of your stages returns"),
    (Lost, "the client would start without the parameter|`open` of your stages returns"),
    (Storing, r"stores the state 'memory', but its attribute `stores`"),
    (Counting, "returns different messages when it is called again"),
    (Empty, "`read` of a stage returned no replies"),
]


@pytest.mark.parametrize(("stage", "message"), WRONG)
def test_the_trial_finds_what_is_wrong(stage: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_stage(stage())


# Names of states, and stages that exclude each other


@dataclass(frozen=True)
class Remembering(Stage):
    """Stores the last update of a client under a name, and a number on the server under another."""

    stored: str = ""
    initially: str = ""

    @property
    def stores(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.stored,) if self.stored else ()

    def reply(self, reply: Any, received: Any, memory: Any) -> Any:
        return reply.storing(self.stored, reply.params) if self.stored else reply

    def initial(self, model: Any, returned: Any) -> Any:
        number = {"n": torch.zeros(len(next(iter(model.values()))))}
        return {self.initially: number} if self.initially else {}

    def read(self, replies: Any, received: Any, server: Any) -> Any:
        return replies, {name: server.states[name] for name in self.initial(server.params, ())}


SCAFFOLD = {"recipe": "scaffold"}
TOP_K = {"uplink": "top-k", "share": 0.5, "feedback": "error"}
NAMES: list[tuple[Any, dict[str, Any], str]] = [
    ([Remembering("a"), Remembering("a")], {}, "Remembering stores a client state 'a'"),
    (Remembering("client-control"), {"local": SCAFFOLD}, "stores a client state 'client-control'"),
    (Remembering("compression"), {"compression": TOP_K}, "stores a client state 'compression'"),
    (Remembering("", "momentum"), {}, "returns from `initial` a server state 'momentum'"),
    (Remembering("", "server-control"), {"local": SCAFFOLD}, "a server state 'server-control'"),
    (Remembering("", "model"), {}, "a server state 'model'"),
    ([Remembering("", "a"), Remembering("", "a")], {}, "a server state 'a'"),
    (Remembering("", "ef21-model"), {"compression": TOP_K | {"feedback": "ef21"}}, "'ef21-model'"),
]


@pytest.mark.parametrize(("stage", "tables", "message"), NAMES)
def test_a_name_of_a_state_is_taken_once(stage: Any, tables: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_stage(stage, **tables)


@pytest.mark.parametrize("local", [{}, SCAFFOLD])
def test_other_names_change_nothing(local: dict[str, Any]) -> None:
    """The negative control."""
    stages = [Remembering("a", "a"), Remembering("b", "b")]
    compression = {} if local else {"compression": TOP_K}
    changed, plain = (with_stage(one, local=local, **compression) for one in (stages, None))
    assert (model(changed) == model(plain)).all()


def test_a_state_of_an_aggregator_is_taken(tmp_path: Path) -> None:
    total = fedmuon.Aggregator(
        lambda replies, state: (replies[0].params, state), init=lambda params: {"n": torch.zeros(1)}
    )
    named = {**TABLES, "local": {"recipe": "fedavg"}}
    fedmuon.run(named, aggregate=total, stage=Remembering("", "a"))  # the control
    with pytest.raises(InputError, match="a server state 'aggregate'"):
        fedmuon.run(named, aggregate=total, stage=Remembering("", "aggregate"))


class OwnCompression(Compression):
    pass


@pytest.mark.parametrize("kind", [Compression, OwnCompression])
def test_messages_are_compressed_once(kind: type[Compression]) -> None:
    stage = kind(top_k(0.5), feedback="error", clients=5)
    for table in (TOP_K, TOP_K | {"feedback": "ef21"}, {"downlink": "top-k", "share": 0.5}):
        with pytest.raises(InputError, match=r"stage = 'given' compresses .* only once"):
            with_stage(stage, compression=table)
    with pytest.raises(InputError, match="can be compressed or encoded only once"):
        with_stage([stage, stage])
    with pytest.raises(InputError, match=r"EncodedStates and .*Compression of the recipe change"):
        with_stage(stage, local={"recipe": "fedmuon-svd"})
    compressed = model(with_stage(stage, local=SCAFFOLD | {"lr": 0.05}))  # the control
    expected = model(with_stage(None, local=SCAFFOLD | {"lr": 0.05}, compression=TOP_K))
    assert (compressed == expected).all()


@pytest.mark.parametrize("kind", [Compression, OwnCompression])
def test_a_compressing_stage_has_the_limits_of_the_table(kind: type[Compression]) -> None:
    up, down = kind(top_k(0.5)), kind(downlink=top_k(0.5))
    private = {"privacy": {"level": "client", "noise": 1.0}, "local": {"recipe": "fedavg"}}
    for stage in (up, down):
        with pytest.raises(InputError, match=r"stage = 'given' c.*\[privacy\] (level|trust)"):
            with_stage(stage, **private)
    ef21 = kind(top_k(0.5), feedback="ef21", clients=5)
    with pytest.raises(InputError, match=r"your own code|adds the last updates"):
        with_stage(ef21, devices={"mode": "fedbuff"})
    with pytest.raises(InputError, match="'median' does not take the plain mean"):
        with_stage(ef21, federation={"aggregate": "median"})
    with pytest.raises(InputError, match=r"clients = 7, but \[federation\] clients = 5"):
        with_stage(kind(top_k(0.5), feedback="ef21", clients=7))
    table = {"uplink": "top-k", "share": 0.5, "feedback": "ef21"}  # the control
    assert (model(with_stage(ef21)) == model(with_stage(None, compression=table))).all()


def test_what_is_no_stage_is_rejected() -> None:
    with pytest.raises(InputError, match=r"fedmuon\.Stage, or a list of them"):
        with_stage([3])


def test_errors_of_a_stage_name_it() -> None:
    with pytest.raises(OwnError, match=r"your stage Broken .*KeyError"):
        with_stage(Broken())


def test_a_class_is_created() -> None:
    assert (model(with_stage(stages.LargerHalf)) == model(with_stage(stages.LargerHalf()))).all()


def test_what_a_custom_stage_excludes() -> None:
    privacy = {"level": "client", "noise": 1.0}
    with pytest.raises(InputError, match="the ledger does not know what your stage sends"):
        with_stage(Stage(), privacy=privacy, local={"recipe": "fedavg", "lr": 0.1})
    with pytest.raises(InputError, match="it is unknown what your stage does"):
        with_stage(Stage(), devices={"mode": "fedbuff"})
    named = small(TABLES, federation={"stage": f"{EXAMPLES / 'stage.py'}:LargerHalf"})
    with pytest.raises(Uncertified, match="your own code, but a certificate does not allow"):
        method_of(named)
