"""Trial calls: fedmuon calls custom objects on random tensors before a run.

A trial finds errors, hidden states and random draws before any sample is read. `in_trial` lets a
custom object recognize such a call.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_TRIAL: ContextVar[bool] = ContextVar("fedmuon_trial", default=False)


def in_trial() -> bool:
    """Return whether fedmuon is trying your object on random tensors, outside the training.

    Before a run, fedmuon calls custom links, rules, aggregators and orthogonalizers on random
    tensors. An object that counts or logs its calls can ignore these calls.

    Returns:
        True during a trial call, False during the training.

    Example:
        >>> import fedmuon
        >>> fedmuon.in_trial()
        False
    """
    return _TRIAL.get()


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Mark the calls within this block, or within the decorated function, as trial calls."""
    token = _TRIAL.set(True)
    try:
        yield
    finally:
        _TRIAL.reset(token)
