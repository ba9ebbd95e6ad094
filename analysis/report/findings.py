"""What a report says of one folder: its claims, numbers, figures, assumptions, circumstances."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.captions import CAPTIONS, TITLES
from fedmuon.analysis.report.claims import Claim

Rows = list[tuple[str, ...]]
SHARED = (
    "kind",
    "title",
    "suite",
    "data",
    "scale",
    "again",
    "seconds",
    "versions",
)  # of all suites


@dataclass(frozen=True)
class Picture:
    """A figure to draw, wide or narrow, what it shows, and what a reader should see in it."""

    name: str
    draw: Callable[..., Any]
    title: str
    caption: str

    @classmethod
    def known(cls, name: str, draw: Callable[..., Any], *given: Any, where: str = "") -> "Picture":
        """One whose title and caption are in `fedmuon.analysis.report.captions`, of what `draw` is
        given before `narrow`."""
        return cls(name, draw, TITLES[name] + where, CAPTIONS[name]).of(*given)

    def of(self, *given: Any) -> "Picture":
        """The same with all that `draw` asks for but `narrow`."""
        return replace(self, draw=partial(self.draw, *given))


@dataclass(frozen=True)
class Findings:
    """One section of a report; all strings are plain text."""

    name: str  # of the folder
    title: str
    data: str
    claims: Sequence[Claim]
    numbers_title: str
    head: tuple[str, ...]
    numbers: Rows
    note: str
    pictures: Sequence[Picture]
    again: str
    circumstances: Rows
    stands_on: str = ""
    assumptions: Sequence[str] = ()
    more: Sequence[tuple[str, tuple[str, ...], Rows]] = ()  # tables: title, head, rows

    @classmethod
    def of_suite(
        cls, folder: Path, about: Mapping[str, Any], facts: Sequence[str], **held: Any
    ) -> "Findings":
        """Those of a suite, whose suite.json is `about`; `facts` are its circumstances."""
        return cls(
            name=folder.resolve().name,
            title=f"{about['title']} on {about['data']}" if about["data"] else str(about["title"]),
            data=str(about["data"]),
            note=str(about.get("note", "")),
            again=str(about["again"]),
            circumstances=circumstances(about, facts),
            **held,
        )


def circumstances(record: Mapping[str, Any], names: Sequence[str]) -> Rows:
    """What was run where: the named values, the machine and the versions."""
    rows: Rows = [
        (name.replace("_", " "), text(record[name]))
        for name in names
        if record.get(name) not in (None, "")
    ]
    if isinstance(share := record.get("share_of_gemm"), float):
        rows.append(("share of the machine's best matrix product", f"{share:.0%}"))
    for group in ("machine", "versions"):
        if held := record.get(group):
            rows.append((group, ", ".join(f"{name} {text(held[name])}" for name in held)))
    return rows


def number(value: Any, digits: int = 4) -> str:
    """Four digits, or as many as are asked for; a dash for what is unknown."""
    unknown = value is None or not isinstance(value, int | float) or value != value
    return "–" if unknown else f"{value:.{digits}g}".replace("-", "−")


def spread(values: np.ndarray) -> str:
    """Mean and standard deviation, if there are several."""
    more = f" ± {values.std(ddof=1):.2g}" if len(values) > 1 else ""
    return number(float(values.mean())) + more


def text(value: Any) -> str:
    """Any value in words."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
