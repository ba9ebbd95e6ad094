"""The contents of a report section, and the titles and captions of its figures."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.numbers import number as number
from fedmuon.analysis.report.tables import Rows as Rows
from fedmuon.analysis.report.verdicts import Claim, with_command

# Entries that suite.json of every suite contains.
SHARED = ("kind", "title", "suite", "data", "scale", "again", "seconds", "versions")


@dataclass(frozen=True)
class Picture:
    """A figure that can be drawn wide or narrow, with its title and caption."""

    name: str
    draw: Callable[..., Any]
    title: str
    caption: str
    read: Callable[..., str] | None = None  # returns more caption text, given the drawn figure

    @classmethod
    def known(
        cls,
        name: str,
        draw: Callable[..., Any],
        *given: Any,
        where: str = "",
        read: Callable[..., str] | None = None,
    ) -> "Picture":
        """Make a picture whose title and caption are in assets/captions.toml.

        `given` contains the arguments of the function `draw` that come before the argument
        `narrow`.
        """
        read = read or partial(of_drawn, name)
        return cls(name, draw, TITLES[name] + where, CAPTIONS[name], read).of(*given)

    def of(self, *given: Any) -> "Picture":
        """Return a copy of the picture whose `draw` gets `given` as its first arguments."""
        return replace(self, draw=partial(self.draw, *given))


Titled = tuple[str, tuple[str, ...], Rows]  # title, head and rows of a table


@dataclass(frozen=True)
class Findings:
    """One section of a report. All strings are plain text."""

    name: str  # name of the folder
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
    more: Sequence[Titled] = ()
    caution: str = ""  # caution that readers of the verdicts must know
    pending: str = ""  # requested results that are missing, and the command that resumes
    about: Sequence[
        tuple[str, str]
    ] = ()  # facts beside the answer: scale, seeds, n, device, threads
    card: Sequence[tuple[str, ...]] = ()  # settings: symbol with meaning, and values
    told: str = ""  # description from the suite file
    runs: Titled | None = None  # table of all runs, folded by default

    @classmethod
    def of_suite(
        cls, folder: Path, about: Mapping[str, Any], facts: Sequence[str], **held: Any
    ) -> "Findings":
        """Make the section of a suite.

        Args:
            folder: The suite's folder.
            about: Contents of suite.json in this folder.
            facts: Names of the values in suite.json to list under `circumstances`.
            **held: Values of the other fields of `Findings`.
        """
        machine = about.get("machine", {})
        seeds = about.get("seeds", about.get("settings", {}).get("seeds"))
        seed_text = ", ".join(map(str, seeds)) if isinstance(seeds, list) else seeds
        card = card_of(about)
        samples = next((value for name, value in card if name.startswith("n:")), None)
        glance = {"scale of this suite": about["scale"], "seeds": seed_text,
                  "training samples n": samples, "device": machine.get("device", "cpu"),
                  "threads": machine.get("threads")}  # fmt: skip
        held["claims"] = [with_command(claim, about, folder) for claim in held["claims"]]
        return cls(
            name=folder.resolve().name,
            title=f"{about['title']} on {about['data']}" if about["data"] else str(about["title"]),
            data=str(about["data"]),
            note=str(about.get("note", "")),
            again=str(about["again"]),
            circumstances=circumstances(about, facts),
            about=[
                (name, text(value)) for name, value in glance.items() if value not in (None, "")
            ],
            told=str(about.get("told", "")),
            **({"card": card} | held),
        )


def card_of(about: Mapping[str, Any]) -> Rows:
    """Return the settings of the runs as table rows.

    For a study, the rows contain the short strings, numbers and lists of the study's file.
    """
    if "card" in about:
        return [(f"{name}: {words}" if words else text(name), text(value))
                for name, words, value in about["card"]]  # fmt: skip
    settings = about.get("settings", {})
    below = [(f"[{table}] {key}", value) for table, keys in dict(settings.get("base", {})).items()
             for key, value in keys.items()]  # fmt: skip
    rows: Rows = []
    for name, value in [*settings.items(), *below]:
        if isinstance(value, list) and all(isinstance(item, int | float | str) for item in value):
            value = ", ".join(map(text, value))
        if isinstance(value, int | float | str) and len(str(value)) < 200 and text(value):
            rows.append((name, text(value)))
    return rows


def circumstances(record: Mapping[str, Any], names: Sequence[str]) -> Rows:
    """Return table rows with the named values, the machine and the library versions of a record."""
    rows: Rows = [
        (name.replace("_", " "), text(record[name]))
        for name in names
        if record.get(name) not in (None, "")
    ]
    if isinstance(share := record.get("share_of_gemm"), float):
        rows.append(("share of the machine's best matrix product", f"{share:.0%}"))
    for group in ("machine", "versions"):
        if values := record.get(group):
            rows.append((group, ", ".join(f"{name} {text(values[name])}" for name in values)))
    return rows


def spread(values: np.ndarray) -> str:
    """Return the mean as text. Several values also get their standard deviation (SD)."""
    deviation = f" (SD {number(float(values.std(ddof=1)), 2)})" if len(values) > 1 else ""
    return number(float(values.mean())) + deviation


def text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_TEXTS = tomllib.loads(
    (Path(__file__).parent / "assets" / "captions.toml").read_text(encoding="utf-8")
)
TITLES: dict[str, str] = _TEXTS["titles"]
CAPTIONS: dict[str, str] = _TEXTS["captions"]
OF_LABELS: dict[str, dict[str, str]] = _TEXTS["drawn"]


def of_drawn(name: str, figure: Any) -> str:
    """Return the caption sentences that depend on the drawn figure.

    Each sentence in assets/captions.toml has a key. The caption includes a sentence if a legend
    label, or the scale of a y axis, begins with its key. Labels of lines without finite points do
    not count.
    """
    drawn = [str(axes.get_yscale()) for axes in figure.axes]
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            ends = (
                np.asarray(handle.get_ydata(), dtype=float)
                if hasattr(handle, "get_ydata")
                else [0.0]
            )
            if np.isfinite(ends).any():
                drawn.append(str(label))
    return " ".join(
        sentence
        for label, sentence in OF_LABELS.get(name, {}).items()
        if any(part.startswith(label) for part in drawn)
    )
