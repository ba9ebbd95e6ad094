"""The sampling profiler: its shares against timers in the sampled code, and when it ends."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType

import pytest
import torch
from free_alarm import free_alarm  # noqa: F401  a fixture

from fedmuon.core.stack_sampler import CALLER, IDLE, LANE, OTHER, Seconds, StackSampler, category_of
from fedmuon.core.threads import helper_threads, spread

FOUND: Seconds = {}  # function -> seconds by its own timer


def spin(seconds: float) -> None:
    """Multiply small matrices, for at least these seconds."""
    matrix, end = torch.ones(40, 40), time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix = (matrix @ matrix).clamp(0, 1)


def timed(name: str, work: Callable[[], object]) -> None:
    begun = time.perf_counter()
    work()
    FOUND[name] = FOUND.get(name, 0.0) + time.perf_counter() - begun


def first() -> None:
    timed("first", partial(spin, 0.03))


class Second:
    def work(self) -> None:
        def inner() -> None:
            spin(0.005)

        timed("second", inner)


def third() -> None:
    timed("third", partial(time.sleep, 0.005))


TABLE = {f"{__name__}:{name}": name for name in ("first", "third")} | {
    f"{__name__}:Second": "second",
    "fedmuon.core.threads:_Job.help_elsewhere": LANE,
    "fedmuon.core.threads:_help_others": IDLE,
    "threading:Condition.wait": IDLE,
}


def sampled(work: Callable[[], object], table: Mapping[str, str] = TABLE) -> Seconds:
    sampler = StackSampler(table, helper_threads)
    sampler.start(sys._getframe().f_code)
    FOUND.clear()
    begun = time.perf_counter()
    work()
    FOUND["all"] = time.perf_counter() - begun
    sampler.stop()
    return sampler.take()


def mixture() -> None:
    for _ in range(25):
        first()
        Second().work()
        third()


def error_of(seconds: Seconds) -> float:
    """The largest difference of a share and the share that the timers measured."""
    return max(
        abs(seconds.get(name, 0.0) - FOUND[name]) / FOUND["all"]
        for name in ("first", "second", "third")
    )


def in_some_run(holds: Callable[[], bool]) -> bool:
    """Whether a statement about measured times holds in one of several measurements.

    On a busy machine, a process may stop at any time for longer than a measurement takes.
    """
    return any(holds() for _ in range(8))


@pytest.mark.usefixtures("free_alarm")
def test_shares_are_those_of_timers() -> None:
    """About 200 samples: 0.15 is more than four standard deviations."""

    def holds() -> bool:
        seconds = sampled(mixture)
        assert sum(seconds.values()) == pytest.approx(FOUND["all"], rel=0.05, abs=0.05)
        return error_of(seconds) < 0.15

    assert in_some_run(holds)


@pytest.mark.usefixtures("free_alarm")
def test_a_wrong_table_has_wrong_shares() -> None:
    swapped = {**TABLE, f"{__name__}:first": "third", f"{__name__}:third": "first"}
    assert not in_some_run(lambda: error_of(sampled(mixture, swapped)) < 0.15)


class WithSamples(StackSampler):
    """Stores the categories of each sample."""

    samples: list[set[str]]

    def _work_of(self, main: FrameType | None) -> list[str]:
        work = super()._work_of(main)
        self.samples.append({*work})
        return work


@pytest.mark.parametrize("rule", [True, False])
@pytest.mark.usefixtures("free_alarm")
def test_a_piece_in_another_thread_belongs_to_the_work_that_was_divided(rule: bool) -> None:
    """Also while the main thread waits for it. Without the rule for such pieces, it is `other`."""
    threads, places = torch.get_num_threads(), [-1, -1]
    torch.set_num_threads(2)
    lane = "fedmuon.core.threads:_Job.help_elsewhere"
    table = {**TABLE, lane: LANE if rule else CALLER}
    sampler, long_began = WithSamples(table, helper_threads), threading.Event()
    sampler.samples = []

    def short() -> None:
        long_began.wait(20)  # so that another thread takes the other piece

    def long() -> None:
        long_began.set()
        places[0], end = len(sampler.samples) + 1, time.monotonic() + 20
        while len(sampler.samples) < places[0] + 20 and time.monotonic() < end:
            spin(0.001)
        places[1] = len(sampler.samples) - 1

    def divided() -> None:
        spread([short, long])

    table[f"{__name__}:{divided.__qualname__}"] = "divided"
    try:
        spread([lambda: None, lambda: None])  # start the helper
        sampler.start(sys._getframe().f_code)
        divided()
        sampler.stop()
    finally:
        torch.set_num_threads(threads)
    during = sampler.samples[places[0] : places[1]]
    assert len(during) >= 3  # of 20, except on a very busy machine
    assert all(("divided" in work) == rule for work in during), during


@pytest.mark.usefixtures("free_alarm")
def test_waiting_is_idle_and_unknown_work_is_other() -> None:
    seconds = sampled(lambda: threading.Event().wait(0.15))
    assert max(seconds, key=lambda name: seconds[name]) == IDLE
    assert {*sampled(partial(spin, 0.1))} <= {OTHER, IDLE}


@pytest.mark.usefixtures("free_alarm")
def test_python_code_between_waits_is_seen() -> None:
    """Pieces that are shorter than the pauses. A background thread sees almost none of them."""

    def python() -> None:
        end, count = time.perf_counter() + 0.002, 0
        while time.perf_counter() < end:
            count += 1

    def alternating() -> None:
        for _ in range(100):
            timed("python", python)
            time.sleep(0.002)

    table = TABLE | {f"{__name__}:{python.__qualname__}": "python"}

    def holds() -> bool:
        error = sampled(alternating, table).get("python", 0.0) - FOUND["python"]
        return abs(error) < 0.1 * FOUND["all"]

    assert in_some_run(holds)


def alarm() -> tuple[object, tuple[float, float]]:
    return signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)


@pytest.mark.usefixtures("free_alarm")
def test_the_sampler_stops_with_its_function_also_after_an_error() -> None:
    sampler, before = StackSampler(TABLE), alarm()

    def fails() -> None:
        sampler.start(sys._getframe().f_code)
        spin(0.03)
        raise ValueError

    with pytest.raises(ValueError):
        fails()
    end = time.monotonic() + 20
    while alarm() != before:
        assert time.monotonic() < end
        time.sleep(0.01)
    sampler.take()
    spin(0.05)
    assert sampler.take() == {}
    sampler.stop()  # again


@pytest.mark.usefixtures("free_alarm")
def test_time_between_two_starts_does_not_count() -> None:
    """Nor is the time of blocks lost that are shorter than the pauses between samples."""

    def holds() -> bool:
        sampler, inside = StackSampler({__name__: "here"}), 0.0
        for _ in range(40):
            sampler.start()
            begun = time.perf_counter()
            spin(0.002)
            inside += time.perf_counter() - begun
            sampler.stop()
            time.sleep(0.003)
        return sampler.take().get("here") == pytest.approx(inside, rel=0.1)

    assert in_some_run(holds)


@pytest.mark.usefixtures("free_alarm")
def test_another_thread_or_another_alarm_uses_a_background_thread() -> None:
    results: list[Seconds] = []

    def measure() -> None:
        before = alarm()
        results.append(sampled(mixture))
        assert alarm() == before

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        measure()
    finally:
        signal.signal(signal.SIGALRM, previous)
    for seconds in results:
        assert seconds["first"] > 0.2 * sum(seconds.values())


@pytest.mark.parametrize(("module", "function", "category"), [
    ("a.b", "f", "package"), ("a.b.c", "f", "module"), ("a.bc", "f", "package"), ("b", "f", CALLER),
    ("a.b.c", "f.<locals>.g.<locals>.<lambda>", "inner"), ("a.b.c", "f.<locals>.h", "module"),
    ("a.b.c", "C.f", "class"), ("a.b.c", "C.g", "method"), ("a.b.c", "CC.g", "module"),
])  # fmt: skip
def test_the_closest_entry_decides(module: str, function: str, category: str) -> None:
    table = {
        "a": "package", "a.b.c": "module", "a.b.c:C": "class", "a.b.c:C.g": "method",
        "a.b.c:f.<locals>.g": "inner",
    }  # fmt: skip
    assert category_of(table, module, function) == category
