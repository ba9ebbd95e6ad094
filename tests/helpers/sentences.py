"""Errors that a user reads are one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedmuon.core.errors import InputError


@contextmanager
def one_sentence(words: str) -> Iterator[None]:
    """Expect an `InputError` without a line break whose text matches this pattern."""
    with pytest.raises(InputError, match=words) as caught:
        yield
    assert "\n" not in str(caught.value)
