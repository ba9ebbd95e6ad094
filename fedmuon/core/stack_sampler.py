"""A sampling profiler: which kind of work the threads of this process do, and for how long.

A background thread wakes every few milliseconds and reads the call stack of each thread. Each stack
belongs to one category of work. The time since the last sample is added to this category. The
sampled code contains no timers, and its results do not change.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType

CALLER = "caller"  # in a table: such a function works for its caller, so the caller decides
LANE = "lane"  # in a table: such a function works for the thread that divided the work
IDLE, OTHER = "idle", "other"
PAUSE, LONGEST = 0.004, 0.1  # mean seconds between two samples: usually, and at most
SHARE = 0.004  # maximum share of a processor that sampling uses, by which pauses get longer
SPREAD = (0.5, 1.5)  # of a pause around its mean, so that samples do not follow a periodic loop
# Seconds after which Python gives the interpreter to the sampler. By default, Python waits for 5 ms
# unless the other thread blocks, so that work in short operations would rarely be sampled.
SWITCH = 0.0005
SMOOTH = 0.05  # weight of the newest sample in the mean cost of a sample

Seconds = dict[str, float]  # category -> seconds
Table = Mapping[str, str]  # module or `module:function` -> category, `CALLER` or `LANE`
Helpers = Callable[[], Iterable[int | None]]


def no_helpers() -> Iterable[int | None]:
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


class _Switching:
    """Lets Python switch between threads quickly while any sampler runs."""

    def __init__(self) -> None:
        self._lock, self._count, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH, self._before))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._before)


_switching = _Switching()


class StackSampler:
    """Samples the thread that starts it, and the threads that help this thread.

    The seconds of all categories add up to the time that has passed. If several threads work at the
    same time, each gets an equal part of this time. A thread that waits counts only if no other
    thread works: its time is then `idle`. Threads that other parts of the process started, such as
    those of Ray, are not sampled.

    A sampler that was started by a function ends with this function, even after an error.

    Args:
        table: The categories of modules and functions.
        helpers: Function that returns the identifiers of the threads that help.
    """

    def __init__(self, table: Table, helpers: Helpers = no_helpers) -> None:
        self._table, self._helpers = table, helpers
        self._known: dict[int, tuple[CodeType, str]] = {}  # id of code -> the code, its category
        self._seconds: Seconds = {}
        self._lock = threading.Lock()  # protects `_seconds`
        self._ended = threading.Lock()  # held while the sampler runs
        self._random = random.Random(0)
        self._root: CodeType | None = None
        self._thread, self._last = 0, 0.0
        self.samples, self.cost = 0, 0.0  # number of samples, and processor seconds of them all
        self._mean_cost = 0.0

    def start(self, root: CodeType | None = None) -> None:
        """Start to sample the calling thread.

        Args:
            root: The code of a function that is running. The sampler ends with this function.
                Without it, the sampler runs until `stop` or until the process ends.
        """
        self._root, self._thread = root, threading.get_ident()
        self._last = time.perf_counter()
        self._ended.acquire()
        threading.Thread(target=self._run, name="fedmuon-profile", daemon=True).start()

    def stop(self) -> None:
        """End the sampler. It may have ended before."""
        if self._ended.locked():
            self._ended.release()

    def take(self) -> Seconds:
        """Return the seconds of each category since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return taken

    def _run(self) -> None:
        begun = time.thread_time()
        with _switching:
            while not self._ended.acquire(timeout=self._pause()) and self._sample():
                now = time.thread_time()
                self._mean_cost += SMOOTH * (now - begun - self._mean_cost)
                self.cost, begun = self.cost + now - begun, now

    def _pause(self) -> float:
        mean = min(LONGEST, max(PAUSE, self._mean_cost / SHARE))
        return mean * self._random.uniform(*SPREAD)

    def _sample(self) -> bool:
        """Add the time since the last sample. Return whether to go on."""
        now = time.perf_counter()
        frames = sys._current_frames()
        if not self._is_running(frames.get(self._thread)):
            return False
        work = self._work_of(frames)
        del frames  # frames keep the tensors of their functions
        elapsed, self._last = now - self._last, now
        with self._lock:
            for category in work:
                self._seconds[category] = self._seconds.get(category, 0.0) + elapsed / len(work)
        self.samples += 1
        return True

    def _is_running(self, frame: FrameType | None) -> bool:
        """Return whether the function that started the sampler still runs."""
        if self._root is None:
            return True
        while frame is not None:
            if frame.f_code is self._root:
                return True
            frame = frame.f_back
        return False

    def _work_of(self, frames: Mapping[int, FrameType]) -> list[str]:
        """Return the categories of all threads that work, or only `idle`."""
        main = frames.get(self._thread)
        now = self._category(main)
        working = [] if now == IDLE else [OTHER if now in (CALLER, LANE) else now]
        for thread in self._helpers():
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
