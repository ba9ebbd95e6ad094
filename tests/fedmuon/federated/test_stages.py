"""Custom stages: a documented example with a state, and errors."""

import sys
from dataclasses import dataclass, replace
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
from fedmuon.federated.rounds import begin, run_rounds, simulate
from fedmuon.federated.wire import distrusted
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


def made(name: str = "Mine", **attributes: Any) -> Any:
    """A class of stages with these methods and attributes."""
    return type(name, (Stage,), attributes)


def changed(trees: Any, change: Any) -> Any:
    return {
        tree: {name: change(value) for name, value in tensors.items()}
        for tree, tensors in trees.items()
    }


def storing(state: Any) -> Any:
    """A stage that stores this function of the client and of its memory."""

    def reply(self: Any, reply: Any, received: Any, memory: Any) -> Any:
        return reply.storing("ef", state(reply.client, memory))

    return made(stores=("ef",), reply=reply)


def replying(change: Any) -> Any:
    """A stage whose `reply` returns this function of a reply."""
    return made(reply=lambda self, reply, received, memory: change(reply))


def reading(change: Any) -> Any:
    """A stage whose `read` returns this function of the trees of each reply."""

    def read(self: Any, replies: Any, received: Any, server: Any) -> Any:
        return [reply.with_trees(change(reply.trees)) for reply in replies], {}

    return made(read=read)


def adopting(change: Any) -> Any:
    return made(adopt=lambda self, models, first, memories: change(models))


def each(change: Any) -> Any:
    return lambda models: {name: change(value) for name, value in models.items()}


def clamped(trees: Any) -> Any:
    return changed(trees, lambda value: value.clamp_(max=0.01))


def shortened(norm: Any) -> Any:
    """A stage that divides updates by 1 plus this norm."""

    def reply(self: Any, reply: Any, received: Any, memory: Any) -> Any:
        model = {}
        for name, value in reply.params.items():
            update = value - received.params[name]
            model[name] = received.params[name] + update / (1 + norm(update))
        return reply.with_trees({**reply.trees, "model": model})

    return made(reply=reply)


def counting(states: Any) -> Any:
    """A stage whose next states are this function of the server's state."""

    def initial(self: Any, model: Any, returned: Any) -> Any:
        return {"count": {"n": torch.zeros(1)}}

    def read(self: Any, replies: Any, received: Any, server: Any) -> Any:
        return replies, states(server)

    return made(initial=initial, read=read)


def sum_of_memories(self: Any, models: Any, first: Any, memories: Any) -> Any:
    shift = sum(memory["ef"]["n"] for memory in memories if memory)
    return {name: value + shift for name, value in models.items()}


def failing(self: Any, reply: Any, server: Any) -> None:
    raise RuntimeError("never valid")


NUMBER = {"n": torch.ones(1)}
REPEATED = "changes when another replica is in the same batch"
IN_PLACE = "changes a tensor of its arguments in place"
WRONG = [
    (WithoutMomentum, "this stage cannot send a momentum"),
    (Longer, r"`reply` returns the tensor 'more\.n', but `returned_like` announces no such tensor"),
    (Lost, "`open` returns no tensor '.*', but `send` received one"),
    (Storing, r"stores the state 'memory', but the attribute `stores`"),
    (Counting, "returns different messages when it is called again"),
    (Empty, "`read` returns no replies"),
    # What a client stores
    (made(stores=("my.ef",)), r"`stores` contains the name 'my\.ef', .* without a dot"),
    (made(stores="memory"), r"`stores` is the text 'memory', .* Set stores = \('memory',\)"),
    (made(stores=("ef",)), "`reply` stores no state 'ef'"),
    (storing(lambda client, memory: torch.ones(1)), "stores a Tensor as the state 'ef'"),
    (storing(lambda client, memory: {"n": 3}), "`reply` stores an object of type int under .*'n'"),
    (storing(lambda client, memory: {1: torch.ones(1)}), "of type Tensor under the name 1"),
    (storing(lambda client, memory: {"n": torch.ones(1).bfloat16()}), "with dtype torch.bfloat16"),
    (storing(lambda client, memory: {str(client): torch.ones(1)}), "no tensor 'ef.0', but another"),
    (storing(lambda client, memory: {"n": torch.ones(1 + len(memory))}), r"with shape \(2,\)"),
    ([storing(lambda client, memory: NUMBER)] * 2, "this name is already used by the recipe"),
    # Results that `adopt`, `read`, `send` and `reply` may not return
    (adopting(each(lambda value: value[:1])), r"`adopt` returns .* shape \(1, 7, 3\).*it received"),
    (adopting(each(lambda value: value.float())), "`adopt` returns .* dtype torch.float32"),
    (adopting(each(lambda value: 1)), "`adopt` returns an object of type int"),
    (adopting(lambda models: {**models, "x": torch.ones(2)}), "it received no such tensor"),
    (reading(lambda trees: changed(trees, lambda value: value[..., :1])), r"shape \(1, 7, 1\)"),
    (reading(lambda trees: changed(trees, lambda value: value.float())), "dtype torch.float32"),
    (reading(lambda trees: changed(trees, lambda value: value.numpy())), "of type ndarray"),
    (reading(lambda trees: {**trees, "model": {}}), "no tensor 'model.weight', but `reply`"),
    (reading(lambda trees: {**trees, "model": {**trees["model"], "x": torch.ones(1)}}), "model.x"),
    (reading(lambda trees: {"model": trees["model"]}), "returns no tensor 'momentum.weight'"),
    (made(read=lambda self, replies, received, server: (["a"], {})), "a str among the replies"),
    (made(send=lambda self, message, server: {**message, "x": {"a": 3}}), "`send` returns .* int"),
    (made(check=failing), "RuntimeError: never valid"),
    (replying(lambda reply: replace(reply, loss=None)), "whose loss is None"),
    (replying(lambda reply: replace(reply, samples=-5)), "samples = -5"),
    (counting(lambda server: {}), r"no tensor 'count\.n', but `initial` returns one"),
    ([counting(lambda server: {"count": NUMBER})] * 2, "`initial` a server state 'count'"),
    # Changes in place
    (made(send=lambda self, message, server: clamped(message)), f"`send` {IN_PLACE}"),
    (made(open=lambda self, message, model: clamped(message)), f"`open` {IN_PLACE}"),
    (replying(lambda reply: reply.with_trees(clamped(reply.trees))), f"`reply` {IN_PLACE}"),
    (reading(clamped), f"`read` {IN_PLACE}"),
    # Replicas and clients that are mixed
    (shortened(torch.norm), REPEATED),
    (made(stores=("ef",), reply=storing(lambda client, memory: {"n": torch.ones(1) + client}).reply,
          adopt=sum_of_memories), "when other clients are in the same batch"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "message"), WRONG)
def test_the_trial_finds_what_is_wrong(stage: Any, message: str) -> None:
    given = [one() for one in stage] if isinstance(stage, list) else stage()
    with pytest.raises(InputError, match=message):
        with_stage(given)


def sum_of_last_axes(update: Any) -> Any:
    return update.flatten(1).norm(dim=1).view(-1, 1, 1)


def by_client(self: Any, message: Any, client: int) -> Any:
    return {**message, **({"odd": {"n": torch.ones(1)}} if client % 2 else {})}


def odd_reply(self: Any, reply: Any, received: Any, memory: Any) -> Any:
    return reply.with_trees(by_client(self, reply.trees, reply.client))


def without_odd(self: Any, replies: Any, received: Any, server: Any) -> Any:
    def plain(trees: Any) -> Any:
        return {name: tree for name, tree in trees.items() if name != "odd"}

    return [reply.with_trees(plain(reply.trees)) for reply in replies], {}


def test_a_stage_assigns_models_to_clients() -> None:
    """Client 0 starts from another model, and the results of `assign` are checked."""

    def assign(self: Any, trees: Any, clients: Any) -> Any:
        lower = torch.tensor([0.5 if client == 0 else 1.0 for client in clients])
        lower = lower.repeat_interleave(len(trees["model"]["weight"]) // len(clients))
        return {**trees, "model": {n: v * lower[:, None, None] for n, v in trees["model"].items()}}

    def result(stage: Any) -> Any:
        named = small(TABLES, federation={"stage": "given"}).with_objects(UserObjects(stage=stage))
        experiment = build_experiment(resolve(named))
        start = begin(experiment.recipe, experiment.task, 0)
        shift = {name: value + 1 for name, value in start.params.items()}
        return simulate(experiment, replace(start, params=shift)).params["weight"]

    assert not torch.equal(result(made(assign=assign)()), result(Stage()))
    wrong = made(assign=lambda self, trees, clients: {"model": {}})
    with pytest.raises(InputError, match=r"`assign` returns no tensor 'model\.weight'"):
        result(wrong())


def test_replies_may_depend_on_the_client() -> None:
    stage = made(reply=odd_reply, read=without_odd, returned_by=by_client)
    with_stage(stage())
    with pytest.raises(InputError, match="but `returned_like` announces no such tensor"):
        with_stage(made(reply=odd_reply, read=without_odd)())


SOUND = [
    storing(lambda client, memory: {"n": torch.ones(1), "b": torch.tensor(True)}),
    counting(lambda server: {"count": {"n": server.states["count"]["n"] + 1}}),
    shortened(sum_of_last_axes),
    adopting(each(lambda value: value.clamp(max=0.5))),
    reading(lambda trees: changed(trees, lambda value: value.clamp(max=0.5))),
    reading(lambda trees: {**trees, "more": {"n": torch.ones(1)}}),
]


@pytest.mark.parametrize("stage", SOUND)
def test_sound_stages_are_accepted(stage: Any) -> None:
    """The negative control of the trial, also with two replicas."""
    with_stage(stage())
    named = small(TABLES, federation={"stage": "given"}).with_objects(UserObjects(stage=stage()))
    experiment = build_experiment(resolve(named))
    twice = simulate(experiment, begin(experiment.recipe, experiment.task, 0, 2)).params["weight"]
    once = simulate(experiment, begin(experiment.recipe, experiment.task, 0)).params["weight"]
    assert twice.shape == (2, 7, 3)
    torch.testing.assert_close(twice[:1], once, rtol=1e-11, atol=1e-12)


class Personal(Stage):
    """Leaves a bias with each client."""

    stores = ("mine",)

    def is_personal(self, name: str) -> bool:
        return name == "bias"

    def send(self, message: Any, server: Any) -> Any:
        return self.sent_like(message)

    def adopt(self, models: Any, first: Any, memories: Any) -> Any:
        fresh = first()["bias"].chunk(len(memories))
        known = [memory["mine"] if memory else {} for memory in memories]
        parts = [one.get("bias", bias) for one, bias in zip(known, fresh, strict=True)]
        return {**models, "bias": torch.cat(parts)}

    def reply(self, reply: Any, received: Any, memory: Any) -> Any:
        sent = reply.with_trees(self.sent_like(reply.trees))
        return sent.storing("mine", {"bias": reply.params["bias"]})

    def sent_like(self, message: Any) -> Any:
        model = {name: value for name, value in message["model"].items() if name != "bias"}
        return {**message, "model": model}

    def returned_like(self, message: Any) -> Any:
        return self.sent_like(message)


@pytest.mark.parametrize("order", [1, -1])
def test_personal_parameters_may_be_missing_in_messages(order: int) -> None:
    given = [Personal(), Stage()][::order]
    tables = {**TABLES, "local": {"recipe": "fedavg", "steps": 2}}
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    result = fedmuon.run(tables, task=(torch.nn.Linear(7, 3), loss), stage=given)
    assert result.model is not None
    with pytest.raises(OwnError, match=r"no tensor 'model\.bias', but `send` received one"):
        unknown = type("Unknown", (Personal,), {"is_personal": Stage.is_personal})
        fedmuon.run(tables, task=(torch.nn.Linear(7, 3), loss), stage=unknown())


# Errors after the trial


def later(wrong: Any, otherwise: Any) -> Any:
    """A method that is right in the trial and in round 1, but not in round 2."""

    def method(self: Any, first: Any, second: Any, *more: Any) -> Any:
        round = second.round if hasattr(second, "round") else more[0].round
        use = otherwise if fedmuon.in_trial() or not round else wrong
        return use(first)

    return method


def same(trees: Any) -> Any:
    return trees


def both(replies: Any) -> Any:
    return replies, {}


LATER = [
    (made(send=later(lambda trees: changed(trees, torch.Tensor.float), same)), "round 2: `send` "),
    (made(reply=later(lambda reply: reply.with_trees({**reply.trees, "x": NUMBER}), same)),
     r"in round 2, on client \d: `reply` returns the tensor 'x\.n'"),
    (made(reply=later(lambda reply: reply.storing("u", NUMBER), same)),
     r"in round 2, on client \d: `reply` stores the state 'u'"),
    (made(reply=later(lambda reply: 1 / 0, same)),
     r"fails in round 2, on client \d with ZeroDivisionError"),
    (made(stores=("ef",), reply=later(
        lambda reply: reply.storing("ef", {"n": torch.ones(2)}),
        lambda reply: reply.storing("ef", NUMBER),
    )), r"in round 2, on client \d: `reply` stores the tensor 'ef\.n' with shape \(2,\)"),
    (made(read=later(lambda replies: ([], {}), both)), "in round 2: `read` returns no replies"),
    (made(read=later(lambda replies: (["a"], {}), both)), "in round 2: `read` returns a str"),
    (counting(lambda server: {"count": NUMBER} if fedmuon.in_trial() or not server.round else {}),
     r"in round 2: `read` returns no tensor 'count\.n'"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "message"), LATER)
def test_a_run_finds_what_is_wrong_later(stage: Any, message: str) -> None:
    with pytest.raises(OwnError, match=message):
        with_stage(stage())
    with_stage(stage(), federation={"rounds": 1})  # the negative control


class Growing(Stage):
    stores = ("ef",)

    def reply(self, reply: Any, received: Any, memory: Any) -> Any:
        size = 1 if fedmuon.in_trial() else 1 + received.round
        return reply.storing("ef", {"n": torch.ones(size)})


@pytest.mark.slow
def test_ray_reports_the_same_error() -> None:
    errors = []
    for engine in ("inline", "ray"):
        with pytest.raises(InputError, match="in round 2, on client") as found:
            with_stage(Growing(), engine, federation={"per-round": 5})
        errors.append(str(found.value))
    assert errors[0].split("client")[0] == errors[1].split("client")[0]
    assert errors[0].split(": `reply`")[1] == errors[1].split(": `reply`")[1]


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
    compression: dict[str, Any] = {} if local else {"compression": TOP_K}
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


def test_the_wrong_stage_of_a_list_is_named() -> None:
    with pytest.raises(OwnError, match="your stage Storing cannot be used"):
        with_stage([Stage(), Storing(), Stage()])


def test_errors_of_a_stage_are_no_errors_of_a_message() -> None:
    for error, message in ((OwnError("of a stage"), "^of a stage$"), (KeyError(1), "malformed")):
        with pytest.raises(InputError, match=message) as found, distrusted():
            raise error
        assert isinstance(found.value, OwnError) == isinstance(error, OwnError)


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
