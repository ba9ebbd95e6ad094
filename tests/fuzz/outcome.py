"""How a case may end."""

from dataclasses import dataclass
from typing import Any

Case = dict[str, Any]  # JSON: `kind`, and what that kind's module reads
ENDS = ("done", "refused", "other")


@dataclass(frozen=True)
class Outcome:
    """`done`, `refused` in one sentence with nothing touched, or `other`, which is a finding."""

    end: str
    why: str = ""


def done(why: str = "") -> Outcome:
    """The program did what it was asked."""
    return Outcome("done", why)


def refused(why: str = "") -> Outcome:
    """The program said in one sentence why not."""
    return Outcome("refused", why)


def other(why: str) -> Outcome:
    """Anything else: `why` says what."""
    return Outcome("other", why)
