"""Flower's Grid on Ray actors, with an app of plain Flower and with our own."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray as library
import torch
from conftest import quick, small
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from plain_flower import NODES, ROUNDS, client_app, server_app
from ray.exceptions import RayError
from ray.experimental import get_object_locations
from test_engines_agree import distance

from fedmuon.clients import client_app as clients
from fedmuon.core.errors import InputError
from fedmuon.experiments.engines import flower_simulation, ray_cluster
from fedmuon.experiments.engines.flower_simulation import RayGrid, simulate
from fedmuon.experiments.engines.processes import importable
from fedmuon.experiments.engines.ray_cluster import connected
from fedmuon.experiments.run import execute
from fedmuon.federated.build import resolve
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import prepare
from fedmuon.server.ray import grid as server_grid
from fedmuon.server.ray.flower_internals import node_ids
from fedmuon.server.ray.worker_pool import large
from fedmuon.server.strategy import FlowerEngine

MANY, SEED = 10**6, 5
IDS = node_ids(NODES, SEED)  # the first ones of a grid of more nodes, too
ALL = {node: float(node) for node in range(NODES)}  # partition -> its answer
BUT_4 = {node: value for node, value in ALL.items() if node != 4}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ray(cluster: str) -> Iterator[None]:
    with connected(cluster):
        yield


@pytest.fixture(scope="module")
def spare(ray: None) -> list[Any]:
    """The idle worker of the last grid, for the next one: each worker takes seconds to start."""
    return []


@pytest.fixture(scope="module")
def grid(spare: list[Any]) -> Iterator[RayGrid]:
    """One worker, so that its messages come together; a million nodes cost nothing."""
    with RayGrid(client_app, MANY, workers=1, pieces=1, seed=SEED, spare=spare) as million:
        yield million


def one_worker(app: ClientApp = client_app, **options: Any) -> RayGrid:
    return RayGrid(app, NODES, workers=1, seed=SEED, **options)


def messages(ttl: float = 60.0, **orders: Any) -> list[Message]:
    """One to each node, of one content."""
    content = RecordDict({"arrays": ArrayRecord([np.zeros(3)]), "config": ConfigRecord(orders)})
    return [Message(content, node, MessageType.TRAIN, ttl=ttl) for node in IDS]


def answers(grid: RayGrid, sent: list[Message]) -> dict[int, float | str]:
    """By partition: what its node added to the model, or why there is no reply."""
    found, replies = {}, grid.send_and_receive(sent, timeout=100)
    asked = {one.metadata.message_id: one.metadata.dst_node_id for one in sent}
    for reply in replies:
        node = asked[reply.metadata.reply_to_message_id]
        record = None if reply.has_error() else reply.content.array_records["arrays"]
        found[IDS.index(node) if node in IDS else node] = (
            record.to_numpy_ndarrays()[0][0] if record else reply.error.reason
        )
    return found


# The first tests hand one idle worker on, which the grid of the module takes.


@pytest.mark.slow
def test_a_worker_of_an_earlier_grid_answers_with_the_app_of_this_one(spare: list[Any]) -> None:
    """It is the same process, and knows nothing of the other app; a dead one is replaced."""
    other = ClientApp()

    @other.train()
    def minus_one(message: Message, context: Context) -> Message:
        arrays = ArrayRecord([np.full(3, -1.0)])
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    with one_worker(spare=spare) as first:
        assert answers(first, messages()) == ALL
    (worker,) = spare
    with one_worker(other, spare=spare) as second:
        assert answers(second, messages()) == dict.fromkeys(range(NODES), -1.0)
    assert spare == [worker]
    library.kill(worker)
    with one_worker(spare=spare) as third:
        assert answers(third, messages()) == ALL
    assert len(spare) == 1 and spare != [worker]


def test_a_closed_grid_says_so(spare: list[Any]) -> None:
    with one_worker(spare=spare) as grid:
        pass
    with pytest.raises(InputError, match="closed"):
        grid.push_messages(messages())


@contextmanager
def joined(address: str, verbose: bool = False) -> Iterator[None]:
    """Ray is connected already."""
    yield


@pytest.fixture
def simulated(spare: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`simulate` joins the Ray of this module, and takes its idle worker."""
    monkeypatch.setattr(flower_simulation, "connected", joined)
    monkeypatch.setattr(server_grid, "RayGrid", partial(RayGrid, spare=spare))


@pytest.mark.usefixtures("simulated")
def test_an_app_of_plain_flower_is_flowers_fedavg(cluster: str) -> None:
    """Against the mean by hand; clients remember between rounds, and read the run's config."""
    more = {"run_config": {"scale": 2.0}, "address": cluster, "workers": 1}
    context = simulate(server_app, client_app, NODES, **more)
    weights = np.arange(1, NODES + 1)
    mean = np.average(2.0 * np.arange(NODES), weights=weights)
    (model,) = context.state.array_records["arrays"].to_numpy_ndarrays()
    np.testing.assert_allclose(model, ROUNDS * mean, rtol=1e-12)
    assert context.state["metrics"]["times"] == ROUNDS - 1


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("own", "threads"), [(True, 1), (False, 3)])
def test_a_server_leaves_the_cores_to_the_workers_beside_it(
    own: bool, threads: int, cluster: str
) -> None:
    """Of a Ray of its own, not of a cluster; what the program had before it has afterwards."""
    server, found = ServerApp(), []
    server.main()(lambda grid, context: found.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        simulate(server, client_app, NODES, address="" if own else cluster, workers=1)
        assert [*found, torch.get_num_threads()] == [threads, 3]
    finally:
        torch.set_num_threads(before)


# The grid of the module


def test_each_node_answers_for_itself(grid: RayGrid) -> None:
    """And what one does with its message, no other one sees."""
    assert answers(grid, messages()) == ALL
    assert list(grid.get_node_ids())[-1] == grid.node_of(MANY - 1)


FAILING = [("raises", "on fire"), ("dies", "Actor"), ("sleeps", "expired due to its TTL")]


@pytest.mark.parametrize(("order", "why"), quick(FAILING, FAILING[:1]))
def test_one_that_fails_takes_no_other_with_it(grid: RayGrid, order: str, why: str) -> None:
    """Its worker comes back, and asks the others again one by one."""
    found = answers(grid, messages(ttl=3.0 if order == "sleeps" else 60.0, **{order: 4}))
    assert why in str(found.pop(4))
    assert found == BUT_4
    assert len(grid.retried) == (0 if order == "raises" else NODES)
    assert answers(grid, messages())[4] == 4.0
    assert grid.retried == {}


@pytest.mark.slow
@pytest.mark.parametrize("orders", [{"raises": 4, "server-round": 2}, {}])
@pytest.mark.usefixtures("ray")
def test_the_first_error_of_a_client_is_shown_whole(
    orders: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its node, round and traceback, once; other replies have one line."""
    with caplog.at_level("WARNING", "fedmuon"), one_worker() as own:
        found = [answers(own, messages(**orders)) for _ in range(3)]
    assert all("\n" not in str(one.get(4)) for one in found)
    said = [
        record.getMessage()
        for record in caplog.records
        # On a busy machine the log also says that no worker has started in 15 s.
        if record.name == "fedmuon" and "no worker has started" not in record.getMessage()
    ]
    if not orders:
        assert not said
        return
    first, last = said
    assert "(partition 4) failed at train of round 2" in first and "in train" in first
    assert first.endswith("RuntimeError: the disk of this client is on fire")
    assert "raise RuntimeError(" in first and first.count("\n") < 20
    assert last == "2 later replies of clients were also errors"


def times(grid: RayGrid, node: int, count: int = 1, **orders: Any) -> list[int]:
    """How often a node had been asked before, as it remembers at each of so many messages."""
    content = RecordDict({"arrays": ArrayRecord([np.zeros(3)]), "config": ConfigRecord(orders)})
    sent = [Message(content, grid.node_of(node), MessageType.TRAIN) for _ in range(count)]
    replies = grid.send_and_receive(sent, timeout=100)
    return sorted(
        -1 if one.has_error() else int(one.content["metrics"]["times"])  # type: ignore[index]
        for one in replies
    )


def test_a_node_keeps_what_it_kept_last(grid: RayGrid) -> None:
    """A client that raises has changed nothing, and one that forgets has nothing."""
    assert times(grid, 100, 3) == [0, 1, 2]
    found = [times(grid, 100, **one) for one in ({"raises": 100}, {}, {"forgets": 100}, {})]
    assert found == [[-1], [3], [4], [0]]


def test_a_reply_is_to_the_message_that_was_sent(grid: RayGrid) -> None:
    found = answers(grid, messages(echoes=4))
    assert "does not reply to the received message" in str(found.pop(4))
    assert found == BUT_4


def test_nodes_that_are_not_there_do_not_answer(grid: RayGrid) -> None:
    assert "is not one of the" in str(answers(grid, [Message(RecordDict(), MANY, "train")])[MANY])
    content = messages()[0].content
    assert "is not one of the" in str(answers(grid, [Message(content, -1, "train")])[-1])


def test_a_message_that_stands_there_twice_is_two(grid: RayGrid) -> None:
    (first, *_) = messages()
    assert len(grid.send_and_receive([first, first], timeout=100)) == 2


def test_several_threads_of_a_server_ask_at_once(grid: RayGrid) -> None:
    """As old servers of Flower do: each gets the replies to its own."""

    def asked(node: int) -> dict[int, float | str]:
        return answers(grid, [messages()[node]])

    with ThreadPoolExecutor(NODES) as pool:
        for _ in range(5):
            found = list(pool.map(asked, range(NODES)))
            assert found == [{node: float(node)} for node in range(NODES)]


@pytest.mark.parametrize(("given", "why"), [
    ({"workers": 0}, "workers = 0"),
    ({"workers": 2.5}, "workers = 2.5"),
    ({"resources": {"num_cpus": 6400}}, "room for a worker, which needs CPU = 6400"),
    ({"resources": {"num_gpus": 64}}, "GPU = 64"),
    ({"resources": {"cpus": 1}}, "num_cpus, num_gpus or memory"),
    ({"num_supernodes": 0}, "num_supernodes = 0 is not valid"),
    ({"num_supernodes": -1}, "num_supernodes = -1 is not valid"),
])  # fmt: skip
def test_grids_that_cannot_be_are_refused(ray: None, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        RayGrid(client_app, **{"num_supernodes": NODES, **given})


def test_a_program_has_one_ray(ray: None) -> None:
    """A second one is refused and leaves it as it is."""
    with pytest.raises(InputError, match="already connected to Ray"):
        simulate(server_app, client_app, NODES)
    assert library.is_initialized()


@pytest.mark.slow
def test_where_nobody_is_for_long_somebody_is_told(
    ray: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedmuon.server.ray.worker_pool.PATIENCE", 0.0)
    wait = RayGrid._wait
    monkeypatch.setattr(RayGrid, "_wait", lambda grid, seconds: wait(grid, min(seconds, 0.01)))
    with one_worker() as grid:
        assert len(answers(grid, messages())) == NODES
    assert caplog.messages.count(caplog.messages[0]) == 1
    assert "no worker has started within" in caplog.messages[0]


@pytest.mark.slow
def test_what_is_late_is_not_waited_for(grid: RayGrid) -> None:
    replies = grid.send_and_receive(messages(sleeps=0, ttl=2.0), timeout=0.3)
    assert len(replies) < NODES
    assert answers(grid, messages()) == ALL


@pytest.mark.slow
def test_what_is_forgotten_is_not_asked_and_not_kept(grid: RayGrid) -> None:
    """Of a worker that sleeps, and of one that has not begun."""
    assert answers(grid, messages())[0] == 0.0
    asleep = grid.push_messages(messages(sleeps=0, ttl=4.0))
    waiting = grid.push_messages(messages())
    assert [len(batch.messages) for batch in grid._queue] == [NODES]
    grid.forget([*asleep, *waiting[1:]])
    assert [len(batch.messages) for batch in grid._queue] == [1]
    replies: list[Message] = []
    while not replies:
        replies = grid.pull_within([*asleep, *waiting], 1.0)
    assert [one.metadata.reply_to_message_id for one in replies] == waiting[:1]
    assert not (grid._running or grid._queue or grid._done or grid._wanted or grid.retried)


@pytest.mark.parametrize(("size", "stored"), [(200_000, False), (600_000, True)])
def test_what_is_small_does_not_pass_through_rays_store(
    size: int, stored: bool, grid: RayGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the content nor the reply, of as many bytes."""
    content = RecordDict({"arrays": ArrayRecord([np.zeros(size // 8)])})
    assert large(content) == stored
    take, places = RayGrid._take, []

    def taken(grid: RayGrid, place: Any) -> None:
        if grid._running[place][1].messages:  # and no worker that returns after an earlier test
            places.append(get_object_locations([place])[place]["node_ids"])
        take(grid, place)

    monkeypatch.setattr(RayGrid, "_take", taken)
    assert answers(grid, [Message(content, IDS[3], MessageType.TRAIN)]) == {3: 3.0}
    assert [bool(one) for one in places] == [stored]


@pytest.mark.slow
def test_the_memory_of_a_worker_is_its_own(ray: None) -> None:
    """A client that holds 200 MB for a while raises the peak; memory of this process does not."""
    with one_worker() as own:
        assert answers(own, messages()) == ALL
        (before,) = own.memory()
        held = np.ones(25_000_000)
        (same,) = own.memory()
        assert answers(own, messages(holds=4)) == ALL
        (after,) = own.memory()
    taken = 8 * len(held)
    assert 0 <= same["memory"] - before["memory"] < 0.1 * taken
    assert 0.8 * taken < after["memory"] - same["memory"] < 1.3 * taken
    assert [one["replies"] for one in (before, same, after)] == [NODES, NODES, 2 * NODES]
    assert before["pid"] == after["pid"] and before["node"] == after["node"]


class Broken(ClientApp):
    """An app that no process but this one can load."""

    def __reduce__(self) -> tuple:
        return exec, ("raise ImportError('no module named such')",)


@pytest.mark.slow
def test_an_app_that_cannot_be_loaded_is_an_error(ray: None) -> None:
    with (
        RayGrid(Broken(), NODES, workers=1, seed=SEED) as grid,
        pytest.raises(RayError, match="no module named such"),
    ):
        grid.send_and_receive(messages(), timeout=60)


def run_by(app: Any, folder: Path) -> None:
    """A run on one worker with that ClientApp, to the same model as inline."""
    what = small(engine={"name": "ray"})
    run = prepare(resolve(what), folder / "ray")
    with RayGrid(app, what.federation.clients, workers=1) as grid:
        train(run, FlowerEngine(run.config, grid))
    execute(small(), folder / "inline")
    assert distance(folder / "inline", folder / "ray") <= 1e-12


@pytest.mark.slow
def test_our_clients_are_stepped_together(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call a round, to the same model; an id tells which process answered."""
    calls, ask = [], RayGrid._ask
    monkeypatch.setattr(RayGrid, "_ask", lambda *given: (calls.append(given), ask(*given))[1])
    run_by(clients.app, tmp_path)
    assert len(calls) == small().federation.rounds


class Dying:
    """Our ClientApp in a process that ends once, the first time that several are asked."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, message: Message, context: Context) -> Message:
        return clients.app(message, context)

    def load(self) -> None:
        pass

    def together(self, sent: list[Message], contexts: list[Context]) -> list[Message]:
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return clients.app.together(sent, contexts)


@pytest.mark.slow
def test_a_round_that_a_dead_worker_cost_more_says_so(ray: None, tmp_path: Path) -> None:
    """Its clients are asked again, to the same model; the record of the round names them."""
    run_by(Dying(tmp_path / "mark"), tmp_path)
    lines = (tmp_path / "ray" / "rounds.jsonl").read_text().splitlines()
    first, second = (json.loads(line).get("faults", []) for line in lines[:2])
    assert all(one["why"].endswith("so the message was sent again") for one in first)
    assert len(first) == small().federation.per_round and second == []


@pytest.mark.slow
def test_a_client_that_must_not_answer_twice_is_not_asked_again(ray: None, tmp_path: Path) -> None:
    """What it released before its worker died is in the account once."""
    what = small(engine={"name": "ray"}, faults={"retries": 0})
    run = prepare(resolve(what), tmp_path / "ray")
    app: Any = Dying(tmp_path / "mark")
    with (
        RayGrid(app, what.federation.clients, workers=1, again=False) as grid,
        pytest.raises(InputError),
    ):
        train(run, FlowerEngine(run.config, grid))
    log = tmp_path / "ray" / "rounds.jsonl"
    assert not (log.exists() and log.read_text())


def test_flower_wants_to_know_who_makes_messages() -> None:
    """Negative control of what `flower_internals` does, in a process where nobody did it."""
    code = (
        "from flwr.app import Message, RecordDict\n"
        "try:\n"
        "    Message(RecordDict(), 1, 'train')\n"
        "except RuntimeError:\n"
        "    from fedmuon.server.ray import flower_internals\n"
        "    flower_internals.identify()\n"
        "    message = Message(RecordDict(), 1, 'train')\n"
        "    name = flower_internals.numbered(message)\n"
        "    assert message.metadata.message_id == name\n"
        "    bare = flower_internals.with_content(message, None)\n"
        "    assert message.has_content() and not bare.has_content()\n"
        "    reply = flower_internals.refusal(message, 'why')\n"
        "    assert reply.metadata.reply_to_message_id == name and reply.error.reason == 'why'\n"
        "    print('known')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "known\n", done.stderr


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_workers_are_told_where_modules_lie(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of our own Ray by its environment, which is quicker; a cluster's by Ray."""
    seen: list[tuple[str, bool]] = []

    def init(**given: Any) -> None:
        seen.append((os.environ.get("PYTHONPATH", ""), "runtime_env" in given))

    monkeypatch.setattr(library, "init", init)
    monkeypatch.setattr(ray_cluster, "_require_listener", lambda address: None)
    monkeypatch.setattr(library, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster, "_driving", threading.Lock())
    monkeypatch.setattr(library, "shutdown", lambda: None)
    monkeypatch.setenv("PYTHONPATH", "/here")
    wanted = importable()
    with connected(address):
        pass
    assert "/here" in wanted.split(os.pathsep)
    assert seen == [("/here", True) if address else (wanted, False)]
    assert os.environ["PYTHONPATH"] == "/here"


@pytest.mark.slow
def test_a_worker_that_is_gone_for_good_is_replaced(grid: RayGrid) -> None:
    """Also where Ray does not start it again."""
    assert answers(grid, messages())[0] == 0.0
    (before,) = grid._pool.all
    library.kill(before)
    assert answers(grid, messages()) == ALL
    assert before not in grid._pool.all and grid.workers == 1
