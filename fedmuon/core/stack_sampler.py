"""A sampling profiler: which kind of work the threads of this process do, and for how long.

At random times, every few milliseconds, a timer interrupts the main thread, which then reads the
call stack of each thread. Each stack belongs to one category of work. The share of a category in
the samples estimates its share of the time. The sampled code contains no timers, and its results do
not change.

The times are a Poisson process that does not depend on the sampled code. So the shares have no
bias, also if work repeats in a fixed rhythm, and a thread that could not run when several samples
were due counts for all of them.

The timer is a signal (SIGALRM), because the main thread handles signals wherever it is. A
background thread would have to wait until the main thread blocks, or has run Python code for 5 ms,
and on a busy machine until a core is free. It would rarely see Python code: where such code took
25% of the time in pieces of 2 ms, a background thread saw 1% to 4%. A background thread is used
only if the sampled thread is not the main thread, or if the program uses SIGALRM itself.
"""

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

CALLER = "caller"  # in a table: such a function works for its caller, so the caller decides
LANE = "lane"  # in a table: such a function works for the thread that divided the work
IDLE, OTHER = "idle", "other"
PAUSE, LONGEST = 0.004, 0.1  # mean seconds between two samples: usually, and at most
SHARE = 0.003  # maximum share of a processor for sampling; slow samples have longer pauses
SMOOTH = 0.05  # weight of the newest sample in the mean cost of a sample

Seconds = dict[str, float]  # category -> seconds
Table = Mapping[str, str]  # module or `module:function` -> category, `CALLER` or `LANE`
Helpers = Callable[[], Sequence[int | None]]


def no_helpers() -> Sequence[int | None]:
    """Return the identifiers of no threads."""
    return ()


def category_of(table: Table, module: str, function: str) -> str:
    """Return the category of a function in a table.

    The table may name the function, a function or class around it, its module, or a package around
    the module. The closest of these decides. Code that the table does not name works for its
    caller.

    Args:
        table: The table.
        module: The name of the module, such as `fedmuon.optim.chain`.
        function: The qualified name of the function, such as `Chain.step`.

    Example:
        >>> category_of({"a": "messages", "a.b:Grid": "idle"}, "a.b", "Grid.wait.<locals>.look")
        'idle'
    """
    parts = function.split(".")
    for end in range(len(parts), 0, -1):
        if (category := table.get(f"{module}:{'.'.join(parts[:end])}")) is not None:
            return category
    names = module.split(".")
    for end in range(len(names), 0, -1):
        if (category := table.get(".".join(names[:end]))) is not None:
            return category
    return CALLER


class StackSampler:
    """Samples the thread that starts it, and the threads that help this thread.

    The seconds of all categories add up to the time that has passed. If several threads work at the
    same time, each gets an equal part of this time. A thread that waits counts only if no other
    thread works: its time is then `idle`. Threads that other parts of the process started, such as
    those of Ray, are not sampled.

    A sampler can be stopped and started again. The time in between does not count.

    Args:
        table: The categories of modules and functions.
        helpers: Function that returns the identifiers of the threads that help.
    """

    def __init__(self, table: Table, helpers: Helpers = no_helpers) -> None:
        self._table, self._helpers = table, helpers
        self._known: dict[int, tuple[CodeType, str]] = {}  # id of code -> the code, its category
        self._weights: dict[str, float] = {}  # category -> sum of the pauses before its samples
        self._lock = threading.RLock()  # protects `_weights`, also from a signal in `take`
        self._random = random.Random(0)
        self._root: CodeType | None = None
        self._running, self._thread = False, 0
        self._ended: threading.Event | None = None  # of the background thread, if there is one
        self._handler: Any = None  # the handler of SIGALRM before
        self._mean_cost, self._pause = 0.0, PAUSE  # of a sample: processor seconds, mean pause
        self._due, self._remaining = 0.0, self._random.expovariate(1 / PAUSE)  # the next sample
        self._since, self._earlier = 0.0, 0.0  # begin of the time that nobody took, and time before

    def start(self, root: CodeType | None = None) -> None:
        """Start to sample the calling thread.

        Args:
            root: The code of a function that is running. The sampler stops when this function has
                returned or failed. Without it, the sampler runs until `stop`.
        """
        self._root, self._thread, self._running = root, threading.get_ident(), True
        self._since = time.perf_counter()
        self._due = self._since + self._remaining
        if _signals_are_free():
            self._ended = None
            self._handler = signal.signal(signal.SIGALRM, self._on_signal)
            signal.setitimer(signal.ITIMER_REAL, self._remaining)
            return
        self._ended = threading.Event()
        arguments = (self._ended,)
        threading.Thread(
            target=self._run, args=arguments, name="fedmuon-profile", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop sampling. The sampler may have stopped before."""
        if not self._running:
            return
        self._running, now = False, time.perf_counter()
        self._earlier += now - self._since
        self._remaining = max(1e-6, self._due - now)
        if self._ended is not None:
            self._ended.set()
            return
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._handler)

    def take(self) -> Seconds:
        """Return the seconds of each category since the last call.

        If there was no sample since then, the time counts for the next call.
        """
        with self._lock:
            weights, now = self._weights, time.perf_counter()
            passed = self._earlier + (now - self._since if self._running else 0.0)
            self._weights, self._earlier, self._since = {}, 0.0 if weights else passed, now
        total = sum(weights.values())
        return {category: passed * weight / total for category, weight in weights.items()}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            if self._running:
                self._sample(frame)
        finally:  # also if a second signal, such as that of Ctrl-C, raises an error here
            if self._running:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, self._due - time.perf_counter()))

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(max(0.0, self._due - time.perf_counter())):
            if not self._sample(sys._current_frames().get(self._thread)):
                return

    def _sample(self, main: FrameType | None) -> bool:
        """Count the samples that are due. Return whether to go on.

        Args:
            main: The frame of the thread that started the sampler.
        """
        begun, now = time.thread_time(), time.perf_counter()
        if not self._root_runs(main):
            self.stop()
            return False
        work, weight = self._work_of(main), 0.0
        while self._due <= now:  # several samples may be due
            weight += self._pause
            self._due += self._random.expovariate(1 / self._pause)
        with self._lock:
            for category in work if weight else ():
                self._weights[category] = self._weights.get(category, 0.0) + weight / len(work)
        self._mean_cost += SMOOTH * (time.thread_time() - begun - self._mean_cost)
        self._pause = min(LONGEST, max(PAUSE, self._mean_cost / SHARE))
        return True

    def _root_runs(self, frame: FrameType | None) -> bool:
        """Return whether the function with which the sampler ends still runs."""
        if self._root is None:
            return True
        while frame is not None:
            if frame.f_code is self._root:
                return True
            frame = frame.f_back
        return False

    def _work_of(self, main: FrameType | None) -> list[str]:
        """Return the categories of all threads that work, or only `idle`."""
        now = self._category(main)
        working = [] if now == IDLE else [OTHER if now in (CALLER, LANE) else now]
        helpers = self._helpers()
        frames = sys._current_frames() if helpers else {}
        for thread in helpers:
            if thread is None or (frame := frames.get(thread)) is None:
                continue
            category = self._category(frame)
            if category == LANE:  # a piece of the work that the main thread has divided
                category = self._category(main, waits=False)
            if category != IDLE:
                working.append(OTHER if category in (CALLER, LANE) else category)
        return working or [IDLE]

    def _category(self, frame: FrameType | None, waits: bool = True) -> str:
        """Return the category of the innermost function that the table names.

        Args:
            frame: The innermost frame of a thread.
            waits: Whether functions that wait count. Otherwise, the result says for which work the
                thread waits.
        """
        while frame is not None:
            code = frame.f_code
            known = self._known.get(id(code))
            if known is None:  # the entry holds the code, so that no other code gets the same id
                module = str(frame.f_globals.get("__name__", ""))
                known = code, category_of(self._table, module, code.co_qualname)
                self._known[id(code)] = known
            category = known[1]
            if category != CALLER and (waits or category != IDLE):
                return category
            frame = frame.f_back
        return CALLER


def _signals_are_free() -> bool:
    """Return whether the calling thread handles signals, and nothing else uses SIGALRM."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        return False
    unused = signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    return unused and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
