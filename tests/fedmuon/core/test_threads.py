"""Work in pieces: in order, whoever does it; errors as if in turn; threads as before."""

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick
from torch import Tensor

from fedmuon.config.load import load
from fedmuon.core.errors import Interrupted
from fedmuon.core.threads import PerThread, Turns, spread
from fedmuon.experiments.run import execute
from fedmuon.tasks.base import Batch, Replaced
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.models import mlp
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example import clipped_sums
from fedmuon.tasks.per_example.clipping import Clipping


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads of torch, and as many afterwards."""
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param


def square(number: int) -> int:
    time.sleep(0.001 * (number % 3))
    return number * number


def test_results_are_in_order(threads: int) -> None:
    def squares(count: int) -> list[int]:
        return spread([partial(square, k) for k in range(count)])

    assert squares(20) == [k * k for k in range(20)] and squares(0) == []
    nested = spread([partial(squares, count) for count in (3, 0, 17, 1)])
    assert nested == [[k * k for k in range(count)] for count in (3, 0, 17, 1)]


def test_pieces_run_beside_one_another(threads: int) -> None:
    together = threading.Barrier(threads)
    spread([partial(together.wait, 20.0)] * (2 * threads))


def test_each_is_computed_by_one_thread_of_torch(threads: int) -> None:
    assert spread([torch.get_num_threads] * 8) == [1] * 8
    inner = spread([lambda: spread([torch.get_num_threads] * 2)] * 4)
    assert inner == [[1, 1]] * 4


def test_one_piece_alone_takes_no_job(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmuon.core.threads._Job", None)
    assert spread([torch.get_num_threads]) == [1]
    with pytest.raises(ZeroDivisionError):
        spread([lambda: 1 // 0])
    with pytest.raises(TypeError):
        spread([torch.get_num_threads] * 2)


def test_the_first_piece_that_fails_ends_it(threads: int) -> None:
    begun = []

    def fail(number: int) -> None:
        begun.append(number)
        time.sleep(0.02 / (1 + number))  # the second is sooner
        raise ValueError(str(number))

    with pytest.raises(ValueError, match=r"^0$"):
        spread([partial(fail, k) for k in range(50)])
    assert len(begun) <= threads
    assert spread([partial(square, 3)]) == [9]


def test_a_wish_to_stop_comes_before_errors(threads: int) -> None:
    together = threading.Barrier(min(2, threads))

    def stop() -> None:
        together.wait(20.0)
        raise Interrupted

    def fail() -> None:
        together.wait(20.0)
        raise ValueError

    with pytest.raises(Interrupted if threads > 1 else ValueError):
        spread([fail, stop, *[partial(square, 1)] * 9])


def test_one_for_each_thread(threads: int) -> None:
    own, together = PerThread(object), threading.Barrier(threads)

    def mine() -> object:
        together.wait(20.0)
        return own()

    found = spread([mine] * threads)
    assert len(set(map(id, found))) == threads and own() is own()


def test_nothing_found_is_kept(threads: int) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    gc.freeze()  # `gc.collect` below then looks only at objects of this test

    def made() -> Tensor:
        alive.add(one := torch.zeros(3))
        return one

    def many() -> int:
        return max(len(spread([made] * 2)) * 0 + len(alive) for _ in range(50))

    assert max(spread([many] * threads)) <= 4 * threads
    gc.collect()
    assert not alive


def test_threads_of_a_program_do_not_change_each_others_number() -> None:
    steps, seen = [threading.Event() for _ in range(3)], list[int]()

    def first() -> None:
        torch.set_num_threads(3)
        spread([lambda: (steps[0].set(), steps[1].wait(20.0))])
        seen.append(torch.get_num_threads())
        steps[2].set()

    other = threading.Thread(target=first)
    torch.set_num_threads(2)
    other.start()
    steps[0].wait(20.0)
    spread([lambda: (steps[1].set(), steps[2].wait(20.0))])
    other.join()
    assert seen == [3] and torch.get_num_threads() == 2


def test_no_more_threads_than_there_are_now() -> None:
    working, most = list[int](), list[int]()

    def work() -> None:
        working.append(1)
        most.append(len(working))
        time.sleep(0.005)
        working.pop()

    torch.set_num_threads(5)
    spread([partial(square, 2)] * 20)
    torch.set_num_threads(2)
    spread([lambda: spread([work] * 6)] * 4)
    assert max(most) <= 2


def test_a_forked_process_has_threads_of_its_own() -> None:
    torch.set_num_threads(3)
    spread([int] * 9)
    with warnings.catch_warnings(action="ignore"):  # Python's, that a child lacks threads
        child = os.fork()
    if not child:
        signal.alarm(60)
        good = False
        with contextlib.suppress(BaseException):
            good = spread([int] * 9) == [0] * 9 and torch.get_num_threads() == 3
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


ENDING = """
import atexit, os, threading
atexit.register(lambda: os._exit(len(threading.enumerate()) - 1))  # the first is called last
import torch
from fedmuon.core.threads import spread
torch.set_num_threads(3)
spread([lambda: torch.ones(500, 500) @ torch.ones(500, 500)] * 9)
"""


@pytest.mark.slow
def test_helpers_end_before_python_does() -> None:
    """One that Python ends in the midst of C++ aborts the program, now and then."""
    subprocess.run([sys.executable, "-c", ENDING], check=True, timeout=60)


def in_all_threads(piece: Callable[[], float], count: int) -> list[float]:
    together = threading.Barrier(count)

    def work() -> float:
        together.wait(20.0)
        return piece()

    return spread([work] * count)


def half() -> float:
    """1 + 2^-9 by a matrix product: 1 in bfloat16."""
    return float(torch.tensor([[1.0]]) @ torch.tensor([[1 + 2**-9]]))


def subnormal() -> float:
    return float(torch.tensor([1e-40]) * 1.0)


def inferring() -> float:
    return float(torch.ones(1).is_inference())


def test_all_threads_compute_in_the_manner_of_the_one_that_spreads(threads: int) -> None:
    def seen() -> list[float]:
        found = [in_all_threads(one, threads) for one in (half, subnormal, inferring)]
        assert all(len({*one}) == 1 for one in found)
        nested = spread([lambda: spread([half] * 3)] * threads)
        assert nested == [[found[0][0]] * 3] * threads
        return [one[0] for one in found]

    plain = [1 + 2**-9, pytest.approx(1e-40), 0.0]
    assert seen() == plain
    with torch.autocast("cpu", torch.bfloat16):
        assert seen() == [1.0, *plain[1:]]
        with torch.autocast("cpu", enabled=False), torch.inference_mode():
            assert seen() == [*plain[:2], 1.0]
    try:
        if torch.set_flush_denormal(True):
            assert seen() == [plain[0], 0.0, 0.0]
    finally:
        torch.set_flush_denormal(False)
    assert seen() == plain


# --- The same bytes, however many threads there are ----------------------------------------------


def by_threads(work: Callable[[], Any]) -> Any:
    """What one, two and three threads give, which is the same."""
    found = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.add(work())
    (one,) = found
    return one


def last_model(*keys: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        execute(load(None, keys), Path(folder) / "run")
        return b"".join(
            (Path(folder) / "run" / name).read_bytes()
            for name in ("model.safetensors", "momentum.safetensors")
        )


SHORT = ("federation.clients=3", "federation.per-round=3", "data.test=200", "federation.rounds=2")
NETWORK = ("task.name=network", "data.train=300", "data.minimum=20", "local.steps=1", *SHORT)
RUNS = {
    "matrix": ("data.name=synthetic", "data.train=6000", "data.dimension=800", *SHORT),
    "mlp": ("task.model=mlp", *NETWORK),
    "cnn": ("task.model=cnn", "local.batch=64", "local.recipe=fedavg", *NETWORK),
}


@pytest.mark.parametrize("name", quick(RUNS, ["matrix", "mlp"]))
def test_bytes_do_not_depend_on_threads(name: str) -> None:
    assert by_threads(lambda: last_model(*RUNS[name]))


def test_neither_do_those_of_a_stack_and_of_clipped_sums() -> None:
    """220 replicas with samples of their own, and clients' clipped sums."""
    rng, wide = np.random.default_rng(0), MatrixTask(300, 10)
    inputs, labels = torch.randn(700, 300), torch.from_numpy(rng.integers(10, size=700))
    replica = torch.arange(1, 220)
    own = Replaced(replica, 3 * replica, torch.randn(219, 300), labels[:219])
    batches = [Batch(inputs[:699], labels[:699], own), Batch(inputs[699:], labels[699:])]
    weights = {"weight": torch.randn(440, 10, 300).mT}
    net, points = NetworkTask(mlp((300,), 10), (300,)), Clipping("flat", 0.1)
    start = net.initial(rng, 2)

    def both() -> tuple[bytes, ...]:
        found = wide.gradient(weights, batches)[1], net.clipped([(1.0, start)], batches, points)[1]
        return tuple(value.numpy().tobytes() for one in found for value in one.values())

    assert by_threads(both)


def test_groups_of_a_client_are_added_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """37 samples in parts and groups of 5, by one, two and three threads, against larger groups."""
    task = NetworkTask(mlp((6,), 3), (6,), torch.float64)
    rng = np.random.default_rng(0)
    start, labels = task.initial(rng, 1), torch.from_numpy(rng.integers(3, size=37))
    batch, clipping = Batch(torch.randn(37, 6).double(), labels), Clipping("flat", 0.1)

    def sums() -> dict[str, torch.Tensor]:
        return task.clipped([(1.0, start)], [batch], clipping)[1]

    def in_bytes() -> bytes:
        return b"".join(value.numpy().tobytes() for value in sums().values())

    whole = sums()
    monkeypatch.setitem(clipped_sums.MOST, "cpu", 5)
    monkeypatch.setattr(clipped_sums, "LANE", 8.0)
    alone = {name: value[0] for name, value in start.items()}
    here = task.clipped_sums()
    assert len(here._lanes(alone, 37)) == 4
    on_gpu = dataclasses.replace(here, device=torch.device("cuda"))
    assert on_gpu._lanes(alone, 37) == [slice(0, 37)]  # parts would only be launched one by one
    by_threads(in_bytes)
    several = sums()
    assert any(not torch.equal(several[name], value) for name, value in whole.items())
    for name, value in whole.items():
        torch.testing.assert_close(several[name], value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("slow, bad", [((0,), None), ((1, 2), None), ((0,), 3), ((3,), 2)])
def test_turns_come_in_order_and_end_with_a_failure(slow: tuple, bad: int | None) -> None:
    turns, seen = Turns(), list[int]()

    def piece(number: int) -> None:
        with turns.of(number) as turn:
            time.sleep(0.02 * (number in slow))
            if number == bad:
                raise ValueError(number)
            turn()
            seen.append(number)

    torch.set_num_threads(3)
    with contextlib.nullcontext() if bad is None else pytest.raises(ValueError, match=str(bad)):
        spread([partial(piece, number) for number in range(6)])
    assert seen == list(range(6 if bad is None else bad))
