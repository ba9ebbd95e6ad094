"""A Grid on Ray like Flower's own simulation, without a Ray: ids, configs, errors, addresses."""

import re
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import small
from flwr.app import Message, RecordDict
from flwr.common.config import flatten_dict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate.utils import verify_message_ids
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfDiskError,
    RayError,
    RayTaskError,
)
from test_messages import sender  # noqa: F401  a fixture

from fedmuon import flower
from fedmuon.core.errors import InputError
from fedmuon.experiments.engines import processes, ray_cluster, ray_engine
from fedmuon.experiments.run import execute
from fedmuon.server.ray import grid as grids
from fedmuon.server.ray import worker_pool
from fedmuon.server.ray.flower_internals import expired, flat, node_ids, numbered
from fedmuon.server.ray.worker_pool import Batch

NESTED = {"lr": 0.1, "model": {"name": "a", "head": {"bias": True}}, "model.width": 3}


APP: Any = None  # no test here calls the app


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What workers are made with, of grids without a Ray."""
    found: list[tuple[Any, ...]] = []

    def crew(resources: Any, asked: Any, most: int, held: tuple[Any, ...], spare: Any) -> Any:
        found.append(held)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(grids, "WorkerPool", crew)
    return found


def test_a_nested_run_config_is_flattened_as_flower_does(held: list[tuple[Any, ...]]) -> None:
    grids.RayGrid(APP, 2, run_config=NESTED)
    assert held[0][2] == flatten_dict(NESTED)
    assert held[0][2]["model.head.bias"] is True
    assert flat(None) == {} and flat(flat(NESTED)) == flat(NESTED)


@pytest.mark.parametrize("value", [[1, 2], None])
def test_a_run_config_that_flower_rejects_is_rejected(value: Any) -> None:
    with pytest.raises(InputError, match="The value for key width needs to be of type"):
        flower.simulate(APP, APP, 2, run_config={"model": {"width": value}})


def test_node_ids_are_like_those_of_flower(held: list[tuple[Any, ...]]) -> None:
    """Distinct, of 64 bits, none of them reserved, and with a seed the same each time."""
    found = node_ids(20_000, 7)
    assert len(set(found)) == 20_000 and not {0, SUPERLINK_NODE_ID} & set(found)
    assert Node(node_id=max(found)).node_id == max(found) < 2**64
    assert abs(sum(found) / 20_000 / 2**63 - 1) < 0.03  # uniform: 0.004 is one deviation
    assert found == node_ids(20_000, 7) != node_ids(20_000, 8)
    assert node_ids(3, None) != node_ids(3, None)
    grid = grids.RayGrid(APP, 3, seed=7)
    assert list(grid.get_node_ids()) == [grid.node_of(place) for place in range(3)] == found[:3]


def test_reserved_and_repeated_node_ids_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([[0, SUPERLINK_NODE_ID, 5, 5], [5, 6, 7], [8]])

    def generator(seed: int, what: Any) -> Any:
        return SimpleNamespace(integers=lambda *_, **__: np.array(next(drawn), np.uint64))

    monkeypatch.setattr("fedmuon.server.ray.flower_internals.generator", generator)
    assert node_ids(4, 0) == [5, 6, 7, 8]


@pytest.mark.parametrize("seed", [-1, 2.5, "a"])
def test_a_seed_of_node_ids_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(InputError, match="integer of 0 or more"):
        node_ids(2, seed)


def message(node: int = 5, ttl: float = 3.0) -> Message:
    found = Message(RecordDict(), dst_node_id=node, message_type="train", ttl=ttl)
    numbered(found)
    return found


def test_an_expired_message_is_answered_as_by_a_superlink() -> None:
    asked = message()
    name = asked.metadata.message_id
    theirs = verify_message_ids({name}, {name: asked}, 1, time.time() + 60)[name]
    ours = expired(asked)
    assert ours.error.code == theirs.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert ours.error.reason == theirs.error.reason
    assert ours.metadata.reply_to_message_id == name
    assert ours.metadata.src_node_id == theirs.metadata.src_node_id == SUPERLINK_NODE_ID


@pytest.mark.parametrize(("ended", "again", "codes"), [
    (True, False, [ErrorCode.MESSAGE_UNAVAILABLE] * 2), (False, False, [ErrorCode.UNKNOWN] * 2),
    (True, True, []),
])  # fmt: skip
def test_late_messages_are_told_from_those_of_dead_workers(
    ended: bool, again: bool, codes: list[int], held: list[tuple[Any, ...]]
) -> None:
    grid = grids.RayGrid(APP, 2, seed=7, again=again)
    sent = [message(node) for node in grid.get_node_ids()]
    grid._wanted = {one.metadata.message_id for one in sent}
    grid._again(Batch(sent, ended=ended), ActorUnavailableError("rpc", b"1" * 16))
    assert [one.error.code for one in grid._done.values()] == codes
    assert len(grid.retried) == len(grid._queue) == (2 if again else 0)
    assert all(
        "took too long, so the message was sent again" in one for one in grid.retried.values()
    )


@pytest.mark.parametrize(("again", "share"), [(True, 2), (False, 1)])
def test_messages_that_are_asked_once_have_all_of_their_time(
    again: bool, share: int, held: list[tuple[Any, ...]]
) -> None:
    """Half of it is for the second try, where there is one."""
    grid = grids.RayGrid(APP, 2, seed=7, again=again)
    batch = Batch([message(node, 60.0) for node in grid.get_node_ids()])
    worker: Any = SimpleNamespace(answer=SimpleNamespace(remote=lambda *_: "place"))
    grid._ask(worker, batch, {})
    assert batch.end - batch.start == pytest.approx(60.0 / share)


# A Ray cluster that is not there, and workers that end.


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray other tests have connected to."""
    monkeypatch.setattr(ray_cluster, "_driving", threading.Lock())
    monkeypatch.setattr("ray.is_initialized", lambda: False)


@pytest.mark.parametrize(("address", "why"), [
    ("HOST", "refused"), ("ray://HOST/", "refused"), ("foo", "Invalid address format: foo"),
    ("localhost:port", "port"), ("auto", "Could not find any running Ray"),
])  # fmt: skip
@pytest.mark.usefixtures("no_ray")
def test_an_address_where_nothing_listens_is_rejected_at_once(
    address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local address is that of a port that was free a moment ago."""
    import ray._private.services as services

    def none(address: str, folder: str | None) -> str:
        raise ConnectionError("Could not find any running Ray instance")

    if address == "auto":  # whatever runs on this machine
        monkeypatch.setattr(services, "get_ray_address_from_environment", none)
    monkeypatch.setattr(services, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray is asked"))
    address = address.replace("HOST", f"127.0.0.1:{processes.free_ports(1)[0]}")
    start = time.monotonic()
    with (
        pytest.raises(InputError, match=f"no Ray cluster answers.*{why}.*ray start --head"),
        ray_cluster.connected(address),
    ):
        pass
    assert time.monotonic() - start < 2 * ray_cluster.CONNECT


def test_a_run_whose_cluster_does_not_answer_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.services.get_node_ip_address", lambda: "127.0.0.1")
    address = f"127.0.0.1:{processes.free_ports(1)[0]}"
    with pytest.raises(InputError, match="no Ray cluster answers"):
        execute(small(engine={"name": "ray", "ray-address": address}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_an_address_where_grpc_answers_is_left_to_ray(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.services.get_node_ip_address", lambda: "127.0.0.1")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        ray_cluster._require_listener(form.format(f"127.0.0.1:{port}"))
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(("answer", "why"), [
    (None, "did not answer within 0.2 s"), (b"", "is not Ray"), (b"220 mail\r\n" * 2, "is not Ray"),
])  # fmt: skip
def test_a_program_that_is_not_ray_is_rejected_at_once(
    answer: bytes | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.services.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray_cluster, "ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as other:

        def speak() -> None:
            link, _ = server.accept()
            with link:
                link.recv(64)
                link.sendall(answer or b"")

        if answer is not None:  # without it, the connection stays open and silent
            other.submit(speak)
        with pytest.raises(InputError, match=why):
            ray_cluster._require_listener(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.usefixtures("no_ray")
def test_the_address_local_starts_a_ray_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, closed to others, which is removed at the end."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("ray.init", lambda **found: given.append(found))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with ray_cluster.connected(ray_cluster.LOCAL):
        pass
    assert "address" not in given[0] and given[0]["_temp_dir"].startswith("/tmp/fm-ray-")


DEAD, AWAY = ActorDiedError(), ActorUnavailableError("rpc", b"1" * 16)


def unloadable() -> ActorDiedError:
    """As Ray says that the clients' code cannot be imported."""
    cause = RayTaskError("__init__", "ImportError: no module named such", ImportError("such"))
    cause._actor_id = "1"  # type: ignore[attr-defined]
    return ActorDiedError(cause)


@pytest.mark.parametrize(("error", "said", "unsaid"), [
    (DEAD, "all of its workers died.*ran out of memory.*--resume", "cpus-per-client"),
    (AWAY, "all of its workers died.*ran out of memory.*--resume", "cpus-per-client"),
    (unloadable(), "no module named such|creation task.*--verbose", "cpus-per-client"),
    (ActorUnschedulableError("no node"), "not enough CPUs.*cpus-per-client = 1", "--resume"),
    (OutOfDiskError(), "store is full.*No space left on device.*delete files to make room "
     "and run the command again, with --resume.*--object-store-memory", "another place"),
])  # fmt: skip
def test_advice_is_about_what_happened(error: RayError, said: str, unsaid: str) -> None:
    found = ray_engine.explained(error, small(engine={"name": "ray"}))
    assert re.search(said, found) and unsaid not in found and "\n" not in found


def test_a_full_place_for_logs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait there for a minute."""
    monkeypatch.setattr(ray_cluster, "LEAST", 1 << 62)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # another test may have connected
    with pytest.raises(InputError) as full, ray_cluster.connected(ray_cluster.LOCAL):
        pass
    said = str(full.value)
    assert re.search(r"No space left on device; /tmp has [\d,]+ bytes free\): delete files", said)
    assert said.endswith("with --resume if a run had begun") and "\n" not in said


class Hired(worker_pool.WorkerPool):
    """A crew of workers that are numbers, on so many machines."""

    def __init__(self, machines: int) -> None:
        self.all, self.absent, self._held = [0], [], ()
        self.made, self.machines = 0, machines
        self._make = self.another

    def another(self) -> int:
        self.made += 1
        return self.made


@pytest.mark.parametrize(
    ("error", "machines", "made"),
    [(DEAD, 1, worker_pool.TRIES), (DEAD, 0, 0), (unloadable(), 1, 0)],
)
def test_a_dead_worker_is_replaced_a_few_times(
    error: RayError, machines: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose code cannot be loaded is not, nor one that no machine is left for."""
    hired = Hired(machines)
    monkeypatch.setattr(worker_pool, "_machines", lambda: [{}] * machines)
    with pytest.raises(RayError) as raised:
        for tries in range(worker_pool.TRIES + 1):
            hired.expect(hired.all[0], tries, error)
    assert raised.value is error and hired.all == []
    assert hired.made == made


def test_an_unreachable_worker_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as dead when Ray says so."""
    hired = Hired(1)
    monkeypatch.setattr(worker_pool, "_machines", lambda: [{}])
    for _ in range(10):
        hired.expect(0, 1, AWAY)
    assert hired.made == 0 and {tries for _, _, tries in hired.absent} == {0}


def test_logs_of_a_deployment_are_for_their_owner() -> None:
    started = processes.Processes({})
    try:
        started.start("python", ["python", "-c", ""]).wait()
        mode = (started.logs / "python.log").stat().st_mode
    finally:
        started.stop()
    assert stat.S_IMODE(mode) == 0o600
