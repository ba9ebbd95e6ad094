"""Flower messages to the ClientApp and replies to the strategy, as no honest peer sends them."""

import base64
import contextlib
import io
import struct
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.supercore.task_identity import TaskIdentity

from fedmuon.clients import client_app
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.experiment import Fault
from fedmuon.federated.rounds import begin
from fedmuon.server.strategy import FedMuonStrategy
from tests.fuzz import base, values
from tests.fuzz.calls import TooLong, clock
from tests.fuzz.outcome import Case, Outcome, done, other, refused

KIND = "messages"
SHAPES = ((), (0,), (1,), (5, 3), (1, 5, 3), (2, 5, 3), (1, 3, 5), (1, 5, 3, 1), (1, 5, 4))
DTYPES = ("float64", "float16", "int64", "uint8", "bool", "complex128", "U3", "S4", "datetime64[s]")
HUGE = ((10**12,), (2**62, 4), (1 << 40, 1 << 40), (2**31, 2**31), (10**6, 10**6), (-1,), (5, -3))
NUMBERS = (-1, 0, 1, 2, 7, 2**31, 2**63 - 1, -(2**63))
ASKED = ("train", "evaluate", "query")
PICKLED = "k05VTVBZAQB2AHsnZGVzY3InOiAnfE8nLCAnZm9ydHJhbl9vcmRlcic6IEZhbHNlLCAnc2hhcGUnOiAoMSwpLCB9"
Lie = Callable[[Any], None]


def context(partition: int) -> Context:
    """What a SuperNode with that partition tells its app."""
    config = {"partition-id": partition}
    return Context(1, 100 + partition, node_config=config, state=RecordDict(), run_config={})  # type: ignore[arg-type]


def inflated(content: RecordDict) -> RecordDict:
    """The records as they come off the wire."""
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    return recorddict_from_proto(recorddict_to_proto(content))


def _stale(content: RecordDict) -> None:
    """A reply of another round, which nobody takes for one of this."""
    content["who"] = ConfigRecord({**content.config_records["who"], "round": 99})


class Line:
    """A grid whose nodes 100, 101, ... answer at once, each as partition 0, 1, ...; the replies of
    the one that lies to training messages are disturbed before they are delivered."""

    def __init__(self, clients: int, liar: int, lie: Lie) -> None:
        self.clients, self.liar, self.lie = clients, liar, lie
        self.replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return range(100, 100 + self.clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._answer(number, message) for number, message in enumerate(messages)]

    def pull_messages(self, ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(one) for one in list(ids) if one in self.replies]

    def _answer(self, number: int, message: Message) -> str:
        name = f"message-{number}"
        message.metadata.__dict__["_message_id"] = name
        node = message.metadata.dst_node_id
        reply = self._reply(message, node - 100)
        if message.metadata.message_type == MessageType.TRAIN and node - 100 == self.liar:
            self.lie(reply.content)
            with contextlib.suppress(ValueError):  # numbers that no wire carries
                reply = Message(inflated(reply.content), reply_to=message)
        self.replies[name] = reply
        return name

    def _reply(self, message: Message, partition: int) -> Message:
        act = client_app.train if message.metadata.message_type == MessageType.TRAIN else (
            client_app.query)  # fmt: skip
        try:
            return act(message, context(partition))
        except Exception as error:
            return Message(Error(1, str(error)), reply_to=message)


class Peers:
    """An experiment with its strategy; `both` and `alone` are the models after an honest round of
    both participants, and of the honest one alone."""

    def __init__(self, toml: str) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as if Flower ran us
        self.config = resolve(parse(tomllib.loads(toml)))
        samples = read_source(self.config)
        self.data = build_data(self.config, samples)
        self.experiment = build_experiment(self.config, self.data)
        self.liar = int(self.experiment.plan.participants(0)[0])
        self.both = self.round(lambda content: None)[0]
        drops = self.config.faults.policy == "drop"
        self.alone = self.round(_stale)[0] if drops else {}

    def round(self, lie: Lie) -> tuple[dict[str, np.ndarray], Sequence[Fault]]:
        """The model after the first round, and the faults that it survived."""
        grid = Line(self.config.federation.clients, self.liar, lie)
        finished = next(self._strategy().rounds(grid))  # type: ignore[arg-type]
        model = {name: value.numpy() for name, value in finished.state.params.items()}
        return model, finished.faults

    def request(self, kind: str) -> Message:
        strategy = self._strategy()
        strategy.nodes = {0: 100}
        if kind == "query":
            return Message(RecordDict({"config": ConfigRecord({})}), 100, MessageType.QUERY, ttl=60)
        (message,) = strategy.messages(kind, [0])
        return Message(inflated(message.content), 100, kind, ttl=60)

    def _strategy(self) -> FedMuonStrategy:
        fresh = begin(self.experiment.recipe, self.experiment.task, self.config.federation.seed)
        return FedMuonStrategy(self.config, self.experiment, fresh)


def draw(rng: Random) -> Case:
    side = rng.choice(("client", "server", "server"))
    numbers = "config" if side == "client" else "who"
    pools = {"arrays": _arrays, numbers: _numbers, "records": _records}
    wrongs = []
    for _ in range(rng.choice((1, 1, 2))):
        where = rng.choice(list(pools))
        wrongs.append({"where": where, **pools[where](rng)})
    recipe = rng.choice(("fedmuon", "fedavg", "fedavgm", "fedmuon-aligned"))
    policy, asked = rng.choice(("strict", "drop", "drop")), rng.choice(ASKED)
    return {"kind": KIND, "side": side, "recipe": recipe, "policy": policy, "asked": asked,
            "wrongs": wrongs}  # fmt: skip


def perform(case: Case, place: Path) -> Outcome:
    try:
        with clock(10.0):
            return (_to_client if case["side"] == "client" else _to_server)(case)
    except TooLong:
        return other("it hangs")


def _to_client(case: Case) -> Outcome:
    peers = _peers(case["recipe"], "strict")
    message = peers.request(case["asked"])
    for wrong in case["wrongs"]:
        disturb(message.content, wrong, "config")
    try:
        reply = getattr(client_app, case["asked"])(message, context(0))
    except InputError as error:
        return _sentence(str(error))
    except Exception as error:
        return _ended("client", error)
    return done() if not reply.has_error() else other("the client returns an error of its own")


def _to_server(case: Case) -> Outcome:
    """One of two participants lies; under `drop` the round is the honest one's alone, or the lie
    was none."""
    peers = _peers(case["recipe"], case["policy"])

    def lie(content: Any) -> None:
        for wrong in case["wrongs"]:
            disturb(content, wrong, "who")

    try:
        state, faults = peers.round(lie)
    except InputError as error:
        return _sentence(str(error)) if case["policy"] == "strict" else other(f"drop: {error}")
    except Exception as error:
        return _ended("server", error)
    if any("\n" in fault.why or len(fault.why) > 1000 for fault in faults):
        return other(f"a fault of several lines: {faults[0].why!r:.200}")
    if faults and not all(np.array_equal(value, peers.alone[k]) for k, value in state.items()):
        return other("a refused reply changed the average")
    if not all(np.isfinite(value).all() for value in state.values()):
        return other("the model is not finite")
    return refused("a fault") if faults else done()


def _sentence(text: str) -> Outcome:
    return refused(text) if text and "\n" not in text else other(f"no sentence: {text!r:.200}")


def _ended(side: str, error: BaseException) -> Outcome:
    trace, last = error.__traceback__, ""
    while trace:
        file = Path(trace.tb_frame.f_code.co_filename)
        last = f"{file.parent.name}/{file.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return other(f"the {side} ends with {type(error).__name__}: {error!s:.150} at {last}")


@lru_cache(maxsize=8)
def _peers(recipe: str, policy: str) -> Peers:
    tables = base.tables(
        {
            "local": {**base.TINY["local"], "recipe": recipe},
            "engine": {**base.TINY["engine"], "dtype": "float64", "name": "ray"},
        },
        base.NO_MAP if recipe.startswith("fedavg") else {},
    )
    tables["faults"] = {"policy": f'"{policy}"', "retries": "0", "deadline": "60.0"}
    tables["faults"]["patience"] = "0.1"
    return Peers(base.toml(tables))


def _arrays(rng: Random) -> dict[str, Any]:
    what = rng.choice(
        (
            "shape", "dtype", "huge", "bytes", "nan", "name", "missing", "extra", "stype", "large",
            "pickle", "declared",
        )
    )  # fmt: skip
    found: dict[str, Any] = {"what": what, "which": rng.random()}
    if what == "shape":
        found["shape"] = rng.choice(SHAPES)
    if what == "dtype":
        found["dtype"] = rng.choice(DTYPES)
    if what in ("huge", "declared"):
        found["shape"] = rng.choice(HUGE)
    if what == "bytes":
        found["cut"] = rng.random()
    if what == "nan":
        found["value"] = rng.choice(("nan", "inf", "-inf", "1e308"))
    if what in ("name", "extra", "stype"):
        found["text"] = values.text(rng)
    return found


def _numbers(rng: Random) -> dict[str, Any]:
    """A wrong value in the record of numbers, or a key too few or too many."""
    value: Any = rng.choice(
        (*NUMBERS, 0.5, float("nan"), "", "x", "0", True, [1, 2], [], ["a"], None)
    )
    key = rng.choice(
        (
            "round", "partition", "stack", "rows", "data.train", "local.lr", "odd", "task.name",
            "engine.device", "data.name", "federation.clients",
        )
    )  # fmt: skip
    return {"what": rng.choice(("value", "value", "value", "remove")), "key": key, "value": value}


def _records(rng: Random) -> dict[str, Any]:
    return {
        "what": rng.choice(("drop", "swap", "clear", "metrics")),
        "which": rng.random(),
        "value": rng.choice(([], [1.0, 2.0], [float("nan")], 1, [10**30], [[1]], "x")),
    }


def disturb(content: Any, wrong: dict[str, Any], numbers: str) -> None:
    """Change the message; what Flower itself would not send is left as it was."""
    try:
        if wrong["where"] == "arrays":
            _disturb_array(content.array_records["arrays"], wrong)
        elif wrong["where"] == "records":
            _disturb_records(content, wrong)
        elif wrong["what"] == "remove" or wrong["value"] is None:
            del content.config_records[numbers][wrong["key"]]
        else:
            content.config_records[numbers][wrong["key"]] = wrong["value"]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return  # or an earlier wrong took it away


def _disturb_records(content: Any, wrong: dict[str, Any]) -> None:
    names = sorted(content)
    name = names[int(wrong["which"] * len(names))]
    if wrong["what"] == "clear":
        content.clear()
    elif wrong["what"] == "drop":
        del content[name]
    elif wrong["what"] == "swap":
        content[name] = ConfigRecord({}) if name == "arrays" else ArrayRecord({})
    else:
        content["metrics"] = MetricRecord({"loss": wrong["value"]})


def _disturb_array(record: Any, wrong: dict[str, Any]) -> None:
    """Exchange one array for another form, name or content than the other side expects."""
    what = wrong["what"]
    if what == "extra":
        record[wrong["text"]] = Array(np.ones(3))
        return
    names = sorted(record)
    name = names[int(wrong["which"] * len(names))]
    one = record[name]
    try:
        array = np.load(io.BytesIO(one.data), allow_pickle=False)
    except (ValueError, MemoryError):  # something wrong was done to it before
        array = np.zeros(1)
    if what in ("name", "missing"):
        del record[name]
    if what == "name":
        record[wrong["text"]] = Array(array)
    elif what == "shape":
        record[name] = Array(np.ones(wrong["shape"], array.dtype))
    elif what == "dtype":
        record[name] = Array(np.zeros(array.shape, wrong["dtype"]))
    elif what == "large":
        record[name] = Array(np.zeros((1, 3000, 1000)))
    elif what == "nan":
        array.flat[int(wrong["which"] * array.size)] = float(wrong["value"])
        record[name] = Array(array)
    elif what != "missing":  # bytes of the sender's own making
        shape = tuple(wrong.get("shape", array.shape))
        stype = wrong["text"] if what == "stype" else one.stype
        record[name] = Array(one.dtype, shape, stype, _bytes(one.data, wrong))


def _bytes(data: bytes, wrong: dict[str, Any]) -> bytes:
    """What a sender puts in the place of an array's bytes."""
    if wrong["what"] == "huge":  # a header that promises more than follows
        head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {tuple(wrong['shape'])}, }}"
        head = head.ljust(117) + "\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + bytes(64)
    if wrong["what"] == "pickle":  # what numpy would unpickle, if it were allowed to
        return base64.b64decode(PICKLED).ljust(127) + b"\ngASVAAAAAAAAAAAu"
    return data[: int(wrong["cut"] * len(data))] if wrong["what"] == "bytes" else data
