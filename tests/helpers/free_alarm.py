"""A fixture that lends SIGALRM, with which pytest-timeout ends tests, to the code under test."""

import signal
from collections.abc import Iterator

import pytest

from fedmuon.core import stack_sampler


@pytest.fixture
def free_alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing uses SIGALRM, and the test has to leave it like this. Samples come often."""
    monkeypatch.setattr(stack_sampler, "PAUSE", 0.001)
    monkeypatch.setattr(stack_sampler, "SHARE", 1.0)
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    timer, now = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left)
    assert timer == (0.0, 0.0) and now == signal.SIG_DFL
