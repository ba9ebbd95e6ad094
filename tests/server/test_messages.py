"""A message may contain anything: it is valid, or refused in one sentence; errors are shown."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedmuon.clients.client_app import app
from fedmuon.clients.messages import array_record
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import begin, broadcast, client_updates
from fedmuon.server import stopping
from fedmuon.server.messaging import WIDTH, exchange, meet, raised, reason
from fedmuon.server.strategy import FedMuonStrategy

CLIENT = 2
Spoil = Callable[[RecordDict], Any]


def strategy(**tables: Any) -> FedMuonStrategy:
    config = resolve(small(**tables))
    experiment = build_experiment(config)
    state = begin(experiment.recipe, experiment.task, config.federation.seed)
    nodes = {client: 100 + client for client in range(config.federation.clients)}
    return FedMuonStrategy(config, experiment, state, nodes)


def request(server: FedMuonStrategy) -> Message:
    (message,) = server.messages("train", [CLIENT])
    message.metadata.__dict__["_message_id"] = "asked"
    return message


def answer(message: Message) -> Message:
    node: Any = {"partition-id": CLIENT}
    return app(message, Context(1, 100 + CLIENT, node, RecordDict(), {}))


def npy(array: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def promise(shape: str, held: int = 0) -> bytes:
    """An .npy file whose header promises more than there is."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * held


def put(data: bytes, kind: str = "numpy.ndarray", name: str = "model.weight") -> Spoil:
    def spoil(content: RecordDict) -> None:
        arrays = dict(content.array_records["arrays"])
        arrays[name] = Array("float64", (1, 7, 3), kind, data)
        content["arrays"] = ArrayRecord(arrays)

    return spoil


def drop(record: str) -> Spoil:
    return lambda content: content.pop(record)


def change(record: str, **values: Any) -> Spoil:
    """Other values of a record; None takes one away."""

    def spoil(content: RecordDict) -> None:
        held: Any = content[record]
        new = {**held, **values}
        content[record] = type(held)({k: v for k, v in new.items() if v is not None})

    return spoil


ARRAYS: dict[str, Spoil] = {
    "no arrays": drop("arrays"),
    "arrays are metrics": lambda content: content.__setitem__("arrays", MetricRecord({"a": 1.0})),
    "an array more": put(npy(np.zeros(1)), name="model.\r\n\x1b[31m" + "x" * 5000),
    "an empty file": put(b""),
    "rubbish": put(b"PK\x03\x04" + bytes(range(256))),
    "cut": put(npy(np.zeros((1, 7, 3)))[:-5]),
    "too long": put(npy(np.zeros((1, 7, 3))) + b"0"),
    "objects": put(npy(np.array([[{}]], dtype=object))),
    "words": put(npy(np.array([["a"]]))),
    "dates": put(npy(np.array([["2020-01-01"]], dtype="datetime64[D]"))),
    "complex": put(npy(np.zeros((1, 7, 3), complex))),
    "single": put(npy(np.zeros((1, 7, 3), np.float32))),
    "transposed": put(npy(np.zeros((1, 3, 7)))),
    "a large promise": put(promise("(1000000000000,)")),
    "a promise kept in part": put(promise("(134217728,)", 1000)),
    "a negative shape": put(promise("(-1, 7, 3)")),
    "a deep header": put(promise("(" * 500)),
    "a long number": put(promise(f"({'9' * 6000},)")),
}
REPLIES: dict[str, Spoil] = {
    **ARRAYS,
    "no who": drop("who"),
    "who are metrics": lambda content: content.__setitem__("who", MetricRecord({"round": 1})),
    "no round": change("who", round=None),
    "a stale round": change("who", round=7),
    "a round of bytes": change("who", round=b"0"),
    "another partition": change("who", partition=CLIENT + 1),
    "a wordy partition": change("who", partition="\x1b[2J" * 4000),
    "no metrics": drop("metrics"),
    "no loss": change("metrics", loss=None),
    "a lone loss": change("metrics", loss=0.5),
    "losses too many": change("metrics", loss=[0.5] * 1000),
    "not finite": put(npy(np.full((1, 7, 3), np.nan))),
    "infinite with both signs": put(npy(np.full((1, 7, 3), np.inf) * np.array([1.0, -1.0, 1.0]))),
}
REQUESTS: dict[str, Spoil] = {
    **ARRAYS,
    "no config": drop("config"),
    "no round": change("config", round=None),
    "a wordy round": change("config", round="one"),
    "a negative round": change("config", round=-1),
    "no stack": change("config", stack=None),
    "no replicas": change("config", stack=0),
    "many replicas": change("config", stack=2**62),
    "some replicas": change("config", stack=10**6),
    "rows too few": change("config", rows=[1, 2]),
    "rows of nobody": change("config", rows=[CLIENT, 10**9, 0]),
    "a key too many": change("config", **{"data.\x1b[31mrubbish": 1}),
    "a list for a value": change("config", **{"data.train": [1, 2, 3]}),
    "a word for a number": change("config", **{"data.train": "many"}),
    "bytes": change("config", **{"data.name": b"synthetic"}),
}
BOUND = 8 << 20  # bytes: nothing that a stranger names is allocated


@pytest.fixture(scope="module", autouse=True)
def sender() -> Iterator[None]:
    """Messages have a sender, as in a process that Flower starts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, name, 1)
        yield


@pytest.fixture(scope="module")
def server() -> FedMuonStrategy:
    found = strategy()
    answer(request(found))  # the client's own samples and rules are made once
    return found


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    assert tracemalloc.get_traced_memory()[1] < BOUND
    tracemalloc.stop()


def require_sentence(error: BaseException) -> None:
    assert str(error).isprintable() and 10 < len(str(error)) < 600


def test_a_valid_reply_is_read(server: FedMuonStrategy) -> None:
    """Negative control of what is refused below."""
    reply = server._read(answer(request(server)), CLIENT)
    assert reply.client == CLIENT and reply.params["weight"].shape == (1, 7, 3)


@pytest.mark.parametrize("tensor", [
    torch.randn(3, 4), torch.randn(4, 3).mT, torch.randn(1, 5, 7).mT, torch.randn(4, 6, 5)[:, ::2],
    torch.randn(2, 3, 4).permute(1, 0, 2), torch.tensor(3.0), torch.zeros(0, 3),
    torch.zeros(3, 0).mT, torch.arange(5), torch.tensor([2], dtype=torch.uint8),
    torch.ones(2).double(),
])  # fmt: skip
def test_arrays_have_the_bytes_that_flower_writes(tensor: torch.Tensor) -> None:
    """In both memory orders, in none, without axes and without entries."""
    tensors = {"a": tensor, "b": tensor + 1}
    assert array_record(tensors) == ArrayRecord(dict(tensors))
    assert array_record(tensors)["a"].data != array_record(tensors)["b"].data or not tensor.numel()


def test_large_finite_entries_are_read(server: FedMuonStrategy) -> None:
    """Although their sum is infinite."""
    reply = answer(request(server))
    put(npy(np.full((1, 7, 3), 1.7e308)))(reply.content)
    assert float(server._read(reply, CLIENT).params["weight"].min()) == 1.7e308


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.usefixtures("little_memory")
def test_a_reply_is_valid_or_a_fault(server: FedMuonStrategy, name: str) -> None:
    reply = answer(request(server))
    REPLIES[name](reply.content)
    with pytest.raises(InputError) as refused:
        server._read(reply, CLIENT)
    require_sentence(refused.value)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.usefixtures("little_memory")
def test_a_request_is_valid_or_refused(server: FedMuonStrategy, name: str) -> None:
    message = request(server)
    message.content = RecordDict(dict(message.content))
    REQUESTS[name](message.content)
    with pytest.raises(InputError) as refused:
        answer(message)
    require_sentence(refused.value)


SPOILED_METRICS: dict[str, Spoil] = {
    "nothing measured": drop("measured"),
    "no drift": change("measured", drift=None),
    "a whole number": change("measured", drift=1),
    "a list": change("measured", drift=[1.0]),
    "a name with control characters": change("measured", **{"\x1b[2J": 1.0}),
    "a long name": change("measured", **{"x" * 10**6: 1.0}),
    "names too many": change("measured", **{f"n{i}": 1.0 for i in range(200)}),
}


@pytest.fixture(scope="module")
def measuring() -> FedMuonStrategy:
    found = strategy(output={"clients": True})
    found.experiment = replace(found.experiment, measured=True)  # as `prepare` does
    answer(request(found))
    return found


def test_what_a_client_measures_is_read(measuring: FedMuonStrategy) -> None:
    reply = measuring._read(answer(request(measuring)), CLIENT)
    assert set(reply.metrics) == {"loss_before", "loss_after", "drift", "momentum_norm"}
    assert 0 < reply.metrics["loss_after"] < reply.metrics["loss_before"]


@pytest.mark.parametrize("name", SPOILED_METRICS)
@pytest.mark.usefixtures("little_memory")
def test_what_a_client_measures_is_valid_or_a_fault(measuring: FedMuonStrategy, name: str) -> None:
    reply = answer(request(measuring))
    SPOILED_METRICS[name](reply.content)
    with pytest.raises(InputError) as refused:
        measuring._read(reply, CLIENT)
    require_sentence(refused.value)


def test_flowers_own_rounds_record_no_clients(measuring: FedMuonStrategy) -> None:
    grid: Any = None
    with pytest.raises(
        InputError,
        match=r"clients = true .*, but the round loop of Flower's own strategies does not allow",
    ):
        list(measuring.configure_train(1, measuring.arrays(), ConfigRecord(), grid))


def test_another_nodes_reply_is_refused(server: FedMuonStrategy) -> None:
    reply = answer(request(server))
    reply.metadata.__dict__["_src_node_id"] = 100 + CLIENT + 1
    with pytest.raises(InputError, match="came from the wrong node"):
        server._read(reply, CLIENT)


@pytest.mark.parametrize("said", ["", " ", "\n", "Message: ", "\x1b[31mred\nmore", "x" * 10**6])
def test_reasons_are_one_line(server: FedMuonStrategy, said: str) -> None:
    why = reason(Message(Error(0, said), reply_to=request(server)))
    assert why.isprintable() and 0 < len(why) < 300


class Nodes(Grid):
    """Nodes that claim any partition."""

    def __init__(self, claims: dict[int, Any], more: Callable[[Message], list[Message]]) -> None:
        self.claims, self.more, self.waiting = claims, more, []

    def get_node_ids(self):  # type: ignore[override]
        return list(self.claims)

    def push_messages(self, messages):  # type: ignore[override]
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            self.waiting.append(message)
        return [str(number) for number in range(len(self.waiting))]

    def pull_messages(self, message_ids):  # type: ignore[override]
        found = []
        for message in self.waiting:
            claim = self.claims[message.metadata.dst_node_id]
            content = RecordDict({"who": ConfigRecord({"partition": claim})} if claim != () else {})
            found += [Message(content, reply_to=message), *self.more(message)]
        self.waiting = []
        return found

    create_message = send_and_receive = set_run = run = None  # type: ignore[assignment]


Nodes.__abstractmethods__ = frozenset()


def stale(message: Message) -> list[Message]:
    """An answer to a message that was never sent, and a second answer."""
    other = Message(RecordDict(), reply_to=message)
    other.metadata.__dict__["_reply_to_message_id"] = "never asked"
    return [other, Message(RecordDict(), reply_to=message)]


def test_unasked_answers_are_passed_over() -> None:
    grid = Nodes({7: 0, 8: 1}, stale)
    asked = [Message(RecordDict(), node, "query") for node in (7, 8)]
    assert sorted(exchange(grid, asked, 5.0)) == [0, 1]


def test_claims_to_a_partition() -> None:
    """Nobody takes what another node holds, and two that claim the same get nothing."""
    claims: dict[int, Any] = {7: 0, 8: 1, 9: (), 10: "1", 11: b"2", 12: [2], 13: 2.0, 14: True}
    assert meet(Nodes(claims, lambda message: []), {}, [0, 1], 5.0) == {0: 7, 1: 8}
    late = {**claims, 15: 0, 16: 5}
    held = {0: 7, 1: 8}
    assert meet(Nodes(late, lambda message: []), held, [5], 5.0) == {0: 7, 1: 8, 5: 16}
    both = {7: 0, 8: 0, 9: 1}
    assert meet(Nodes(both, lambda message: []), {}, [0, 1], 0.2) == {1: 9}


def test_a_wish_to_stop_ends_every_wait() -> None:
    grid = Nodes({}, lambda message: [])
    grid.pull_messages = lambda message_ids: []  # type: ignore[method-assign]
    asked = [Message(RecordDict(), 7, "query")]
    stopping.ask(15)
    try:
        with pytest.raises(Interrupted) as wish:
            exchange(grid, asked, 600.0)
        assert wish.value.exit_code == 143
        with pytest.raises(Interrupted):
            meet(grid, {}, [0], 600.0)
    finally:
        stopping.forget()
    assert exchange(grid, asked, 0.05) == {}


def first_line(error: Exception) -> str:
    """The first line of the reason that a worker gives for an error."""
    message = Message(RecordDict(), dst_node_id=4, message_type="train")
    try:
        raise error
    except Exception as caught:
        line, *below = raised(message, caught).split("\n")
    assert below[0] == "train" and len(below) > 2
    return line


@pytest.mark.parametrize(("words", "said"), [
    ("no disk", ": no disk"), ("no disk\nand no room\n", ": no disk"),
    ("\n \n  no disk", ": no disk"), ("no \x1b[31mdisk", ": no \\x1b[31mdisk"),
    ("", ""), ("\n", ""),
    ("x" * 5000, f": {'x' * 5000}"[: WIDTH - len("RuntimeError")] + "..."),
])  # fmt: skip
def test_an_error_has_its_first_words_and_its_place(words: str, said: str) -> None:
    """A long error is cut, and keeps its place."""
    head, _, place = first_line(RuntimeError(words)).partition(" (")
    assert head == f"RuntimeError{said}"
    assert f"{__file__}:" in place and place.endswith(" in first_line)")


def test_a_client_uses_the_factor_of_the_message() -> None:
    """A schedule is the server's alone; its clients read a number."""
    server = strategy(local={"schedule": "step", "options": {"every": 1, "factor": 0.25}})
    server.state = replace(server.state, round=1)
    message = request(server)
    experiment = server.experiment
    clients = [(CLIENT, experiment.shards[CLIENT])]
    sent = broadcast(experiment.recipe, server.state)
    (expected,) = client_updates(experiment.recipe, experiment.task, experiment.plan, clients, sent)
    found = server._read(answer(message), CLIENT).params["weight"]
    assert (found - expected.params["weight"]).abs().max() < 1e-15
    still = server.state.params["weight"]
    assert (found - still).abs().max() > 1e-4
