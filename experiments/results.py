"""What a notebook gets back: finished runs as plain Python, and tables that compare them."""

import csv
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedmuon.config.load import Config, flatten, load
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import NAMED, NOTHING, UserObjects
from fedmuon.core.arrays import read_tensors
from fedmuon.core.choices import GIVEN, SPREAD
from fedmuon.core.errors import InputError, in_python
from fedmuon.core.files import Record, Temporary, copied, read_text, regular, require_sound
from fedmuon.experiments.tables import NOT_RELEASED, adjacency_of
from fedmuon.runs.directory import PERSONAL_MODELS, RunDirectory, client_records, traffic_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, and what lies in it as plain Python."""

    path: Path
    given: UserObjects = field(
        default=NOTHING, repr=False, compare=False
    )  # objects handed over in Python
    temporary: "Temporary | None" = field(default=None, repr=False, compare=False)  # if it is one

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))  # a text may be given, too

    @cached_property
    @in_python()
    def summary(self) -> Record:
        """The content of summary.json."""
        return RunDirectory(self.path).finished()

    @cached_property
    @in_python()
    def rounds(self) -> list[Record]:
        """The records of rounds.jsonl."""
        directory = RunDirectory(self.path)
        if directory.summary() is not None:
            require_sound(self.path, ["rounds.jsonl"])
        return directory.records()

    @in_python()
    def clients(self) -> list[Record]:
        """The records of clients.jsonl: one for each client and round that it took part in.

        Raises:
            InputError: If the run kept none, or they are damaged.
        """
        return client_records(self.path)

    @cached_property
    @in_python()
    def config(self) -> Config:
        """The config with every key resolved."""
        RunDirectory(self.path).require_config()
        return load(self.path / "config.toml")

    @cached_property
    @in_python()
    def model(self) -> "dict[str, Tensor]":
        """The last model: parameter's name -> tensor."""
        return read_tensors(self._sound("model.safetensors"))[0]

    @in_python()
    def personal_model(self, client: int) -> "dict[str, Tensor]":
        """A client's own model, of a run with Ditto, FedPer or another recipe with personal models.

        Args:
            client: Its number, from 0 to N - 1.

        Returns:
            Parameter's name -> tensor. A client that never took part has the personal part of the
            first model.

        Raises:
            InputError: If the run keeps no personal models, as one on SuperNodes, which keep them.
        """
        if not 0 <= client < self.config.federation.clients:
            raise InputError(f"client {client} is none of the run's: give 0 to N - 1")
        if not (self.path / PERSONAL_MODELS).exists():
            raise InputError(
                f"{self.path} holds no personal models: its recipe has none, or its nodes keep them"
            )
        held = read_tensors(self._sound(PERSONAL_MODELS))[0]
        places = {int(one): place for place, one in enumerate(held.pop("client"))}
        if client in places:
            own = {name: value[places[client]] for name, value in held.items()}
        else:
            first = read_tensors(self._sound("initial.safetensors"))[0]
            own = {name: first[name] for name in held}
        return self.model | own

    def _sound(self, name: str) -> Path:
        """A file of a finished run, rejected where it is damaged."""
        RunDirectory(self.path).finished()
        require_sound(self.path, [name])
        return self.path / name

    def save(self, path: str | Path) -> Self:
        """Copy the run folder to `path`, where the result then lies; returns the result itself.

        A run without `out` lies in a temporary folder, which is removed with its last result, or
        when Python ends. The copy appears whole or not at all.

        Args:
            path: A folder that does not exist yet; the folders above it are made.

        Raises:
            InputError: If `path` exists, lies inside the run folder, or cannot be written.
        """
        place = Path(path).expanduser().absolute()
        copied(self.path, place)
        object.__setattr__(self, "path", place)
        object.__setattr__(self, "temporary", None)  # the last result that lets go of it removes it
        return self

    def _repr_html_(self) -> str:
        """What a notebook shows: what was measured, and where it lies."""
        private = f". {NOT_RELEASED}" if "privacy" in self.summary else ""
        return _table(self._measured(), f"{self.path}{private}")

    def _measured(self) -> list[Record]:
        known = self.summary
        of = {"recipe": known["recipe"], "data": known["data"], "rounds": known["rounds"]}
        return [of | {name: one for name, one in known.items() if isinstance(one, float)}]

    def to_pandas(self) -> Any:
        """The rounds as a DataFrame, where pandas is installed."""
        return _frame(self.rounds)

    @in_python()
    def plot(self, x: str = "rounds") -> "Figure":
        """Draw losses and what else was measured.

        Args:
            x: The horizontal axis: `rounds`; `seconds`, simulated by `[devices]`; or megabytes sent
                so far, `bytes-up` by clients and `bytes` in both directions.
        """
        return _curves({self.path.name: [self.rounds]}, x)


@dataclass(frozen=True)
class StabilityResult(Result):
    """A run with its neighbours, and the bound."""

    @cached_property
    @in_python()
    def neighbours(self) -> list[Record]:
        """The rows of neighbours.csv: perturbation, exposure and certificate of each neighbour."""
        whole = ("trial", "client", "index", "replacement")
        with open(self._sound("neighbours.csv"), encoding="utf-8", opener=regular) as file:
            return [
                {k: int(v) if k in whole else float(v) for k, v in row.items()}
                for row in csv.DictReader(file)
            ]

    @cached_property
    @in_python()
    def bound(self) -> Record:
        """The content of bound.json."""
        return json.loads(read_text(self._sound("bound.json")))

    def _measured(self) -> list[Record]:
        most = max(one["perturbation"] for one in self.neighbours)
        found = {"bound": self.bound["value"], "status": self.bound["status"]}
        return [{"neighbours": len(self.neighbours), "largest perturbation": most, **found}]

    def to_pandas(self) -> Any:
        """The neighbours as a DataFrame, where pandas is installed."""
        return _frame(self.neighbours)

    @in_python()
    def plot(self, x: str = "rounds") -> "Figure":
        """Draw perturbations by client with their certificates, which have no other axis `x`."""
        if x != "rounds":
            raise InputError(
                f"x = {x!r} has no effect on neighbours: leave it out, or draw the curves of the "
                f"run by Result({str(self.path)!r}).plot(x={x!r})"
            )
        import numpy as np  # not to list or compare runs

        from fedmuon.experiments.stability.figure import census_figure  # loads matplotlib

        columns = {
            name: np.array([one[name] for one in self.neighbours]) for name in self.neighbours[0]
        }
        return census_figure(columns)


@dataclass(frozen=True, repr=False)
class SweepResult:
    """A finished sweep: its folder, the content of sweep.json, and its runs."""

    path: Path
    summary: Record
    folders: Sequence[Path]
    given: UserObjects = field(default=NOTHING, compare=False)
    temporary: "Temporary | None" = field(default=None, compare=False)

    @property
    def best(self) -> dict[str, Record]:
        """Recipe -> the row of its best point; empty without a grid."""
        return self.summary.get("best", {})

    @property
    def table(self) -> list[Record]:
        """A row per point: its keys, and every metric as mean, `_low` and `_high` over seeds."""
        return self.summary["table"]

    @property
    def runs(self) -> list[Result]:
        """Every run as a result, in the order of the grid."""
        return [Result(one, self.given, self.temporary) for one in self.folders]

    @property
    def warnings(self) -> list[str]:
        """What to know before using the best values."""
        return self.summary.get("warnings", [])

    def to_pandas(self) -> Any:
        """The table as a DataFrame, where pandas is installed."""
        return _frame(self.table)

    def __str__(self) -> str:
        return "\n".join([*_lines_of(self.table), *(f"Warning: {one}." for one in self.warnings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return _table(self.table, " ".join(f"Warning: {one}." for one in self.warnings))


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs beside each other: those that differ in the seed alone are one line of `rows`."""

    rows: list[Record]
    curves: dict[str, list[list[Record]]]
    note: str = ""  # what to know of the numbers
    folders: dict[str, list[Path]] = field(default_factory=dict)  # of a row's runs, by its name
    left_out: Sequence[str] = ()  # why runs of a folder are not among them
    # Temporary folders among them, which stay as long as this does.
    temporary: Sequence[Temporary] = field(default=(), compare=False)

    @property
    def measures(self) -> list[str]:
        """The names of what was measured in any row.

        `NAME ±` is the standard deviation over seeds.
        """
        names = [name for row in self.rows for name in list(row)[list(row).index("seeds") + 1 :]]
        return list(dict.fromkeys(names))

    def to_pandas(self) -> Any:
        """The rows as a DataFrame, where pandas is installed."""
        return _frame(self.rows)

    @in_python()
    def plot(self, x: str = "rounds") -> "Figure":
        """Draw curves, mean and spread over seeds.

        Args:
            x: The horizontal axis: `rounds`; `seconds`, simulated by `[devices]`; or megabytes sent
                so far, `bytes-up` by clients and `bytes` in both directions.
        """
        return _curves(self.curves, x)

    def __str__(self) -> str:
        return "\n".join([*_lines_of(self.rows), *filter(None, [self.note, *self._told()])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return _table(self.rows, " ".join(filter(None, [self.note, *self._told()])))

    def _told(self) -> list[str]:
        """What is not among them, in sentences."""
        return [f"Left out: {why}" for why in self.left_out]


def _curves(curves: Mapping[str, Sequence[Sequence[Record]]], x: str) -> "Figure":
    from fedmuon.analysis.report.style import by_round  # loads matplotlib

    return by_round(curves, x=x)


def _table(rows: Sequence[Record], below: str = "") -> str:
    """Rows as HTML, with a line below them."""
    head, *body = ([escape(word) for word in line] for line in _cells(rows))
    lines = ["".join(f"<th>{word}</th>" for word in head)]
    lines += ["".join(f"<td>{word}</td>" for word in line) for line in body]
    found = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{found}</table>" + (f"<code>{escape(below)}</code>" if below else "")


def _lines_of(rows: Sequence[Record]) -> list[str]:
    """Rows as lines of text, in columns."""
    cells = _cells(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(word.ljust(n) for word, n in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _cells(rows: Sequence[Record]) -> list[list[str]]:
    """A line of names, and one for each row; real numbers have four digits."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    lines = [heads]
    for row in rows:
        values = [row.get(name, "") for name in heads]
        lines.append([f"{one:.4g}" if isinstance(one, float) else str(one) for one in values])
    return lines


def _frame(rows: Sequence[Record]) -> Any:
    try:
        import pandas  # an optional package
    except ImportError:
        raise InputError("pandas is not installed: pip install pandas") from None
    return pandas.DataFrame(rows)


# Runs are compared in groups that differ in the seed alone, and by what else tells them apart.

SEED, NOISE = "federation.seed", "privacy.noise"
SPENT = 0.01  # of a target, by which the noise that is found for it may miss it
DIGEST = "data.options.digest"  # of samples that were given, which nobody reads


@dataclass(frozen=True)
class Finished:
    """What is compared of a finished run."""

    folder: Path
    config: Config
    summary: Record
    rounds: list[Record]
    objects: dict[str, str]  # what tells the user's own objects from others, by kind
    neighbours: bool  # whether it has neighbours

    @classmethod
    def read(cls, folder: Path) -> "Finished":
        """The run in that folder; rejected where a file of it was changed."""
        directory = RunDirectory(folder)
        summary = directory.finished()
        directory.require_unchanged()
        config, file = load(folder / "config.toml"), folder / "objects.json"
        told = json.loads(read_text(file)) if file.exists() else {}
        objects = {kind: str(one) for kind, one in told.items()}
        neighbours = (folder / "neighbours.csv").exists()
        return cls(folder, config, summary, directory.records(), objects, neighbours)

    def keys(self) -> dict[str, Any]:
        """The config by `table.key`; without neighbours, the defaults of what only they read.

        Noise that follows from a target epsilon is of that seed's own clients: the run spent it.
        """
        config = self.config
        if not self.neighbours:
            config = config.model_copy(update={"stability": type(config.stability)()})
        found = flatten(config)
        target, spent = config.privacy.epsilon, self.summary.get("privacy", {}).get("epsilon")
        if target and spent and math.isclose(spent, target, rel_tol=SPENT):
            found[NOISE] = "by epsilon"
        return found

    def reads(self, name: str) -> bool:
        """Whether the key says anything of the run."""
        idle = name.startswith("stability.") and not self.neighbours
        return ".options." in name or (reads(self.config, name) and not idle)


def comparison(labelled: Mapping[str, Sequence[Path]]) -> Comparison:
    """Compare the finished runs in these folders, by labels.

    A folder that is no run stands for the runs right below it. Those that are damaged are left out.
    Runs of different labels are in different groups.
    """
    runs: dict[tuple[str, Path], Finished] = {}
    left: list[str] = []
    for label, folders in labelled.items():
        for folder in folders:
            is_run = (folder / "config.toml").exists()
            below = [] if is_run else [one.parent for one in sorted(folder.glob("*/summary.json"))]
            for place in below or [folder]:
                try:
                    runs[label, place.resolve()] = Finished.read(place)
                except InputError as error:
                    if not below:
                        raise
                    left.append(str(error))
    if not runs:
        raise InputError(left[0] if left else "there is nothing to compare: name a finished run")
    note = NOT_RELEASED if any("privacy" in run.summary for run in runs.values()) else ""
    return _grouped([(label, run) for (label, _), run in runs.items()], note, left)


def _grouped(runs: Sequence[tuple[str, Finished]], note: str, left: Sequence[str]) -> Comparison:
    """A row for each group, with means and standard deviations; its curves and folders by name."""
    flats = [run.keys() for _, run in runs]
    _name_objects(flats, [run.objects for _, run in runs])
    names = dict.fromkeys(name for flat in flats for name in flat)
    differing = [name for name in names
                 if name != SEED and len({flat.get(name) for flat in flats}) > 1]  # fmt: skip
    groups: dict[tuple[Any, ...], list[Finished]] = {}
    changed: dict[tuple[Any, ...], Record] = {}
    for (label, run), flat in zip(runs, flats, strict=True):
        key = (label, *(flat.get(name) for name in differing), *run.objects.items())
        while any(one.config.federation.seed == flat[SEED] for one in groups.get(key, ())):
            key = (*key, "again")  # who has the same seed is no other seed of the same
        groups.setdefault(key, []).append(run)
        shown = [name for name in differing if name != DIGEST and run.reads(name)]
        changed.setdefault(key, {name: flat.get(name) for name in shown})
    # What a group has of the keys that differ; with their table where other tables have such keys.
    short = Counter(name.partition(".")[2] for name in names)
    titles = []
    for of in changed.values():
        words = {key: key.partition(".")[2] for key in of}
        named = {key: word if short[word] == 1 else key for key, word in words.items()}
        titles.append(", ".join(f"{named[key]}={value}" for key, value in of.items()))
    rows, sent, curves, folders = [], [], {}, {}
    for (key, members), title in zip(groups.items(), titles, strict=True):
        label, folder = key[0], members[0].folder
        name = title or folder.name
        if title and titles.count(title) > 1:
            name = f"{title} ({folder.name})"
        if label:
            name = label if [one[0] for one in groups].count(label) == 1 else f"{label}: {name}"
        name = f"{name} ({folder})" if name in curves else name
        row = {"run": name, **changed[key], **_spent(members)}
        rows.append({**row, "seeds": len(members), **_measures(members)})
        sent.append(_traffic(members))
        curves[name] = [one.rounds for one in members]
        folders[name] = [one.folder for one in members]
    if any(one != sent[0] for one in sent):  # else they tell nothing
        rows = [row | one for row, one in zip(rows, sent, strict=True)]
    return Comparison(rows, curves, note, folders, left)


def _name_objects(flats: Sequence[dict[str, Any]], objects: Sequence[Mapping[str, str]]) -> None:
    """Give the flat configs the names of objects that were handed over in Python.

    Where others have the same name, their digests are added.
    """
    for kind, (table, key) in NAMED.items():
        place = f"{table}.{key}"
        every = {one[kind].partition(":")[::2] for one in objects if ":" in one.get(kind, "")}
        alike = Counter(name for name, _ in every)
        for flat, one in zip(flats, objects, strict=True):
            name, _, digest = one.get(kind, "").partition(":")
            if flat.get(place) == GIVEN and digest:
                flat[place] = name if alike[name] == 1 else f"{name} of digest {digest[:6]}"


def _spent(members: Sequence[Finished]) -> Record:
    """What private runs spent, the seed that spent most, and what that epsilon says."""
    accounts = [one.summary["privacy"] for one in members if "privacy" in one.summary]
    if not accounts:
        return {}
    known = [math.inf if one["epsilon"] is None else one["epsilon"] for one in accounts]
    worst = accounts[known.index(max(known))]
    return {
        "spent epsilon": max(known),
        "at delta": max(one["delta"] for one in accounts),
        "adjacency": adjacency_of(worst),
        "level": "client" if worst.get("unit") == "client" else "example",
        "certified": all(one["certified"] for one in accounts),
    }


def _traffic(members: Sequence[Finished]) -> Record:
    """The mean over runs of the megabytes of all messages; nothing if a record lacks them."""
    known = [traffic_of(one.rounds) for one in members]
    totals = [one for one in known if one is not None]
    if len(totals) < len(known):
        return {}
    means = (statistics.fmean(one) / 1e6 for one in zip(*totals, strict=True))
    return dict(zip(("MB down", "MB up"), means, strict=True))


def _measures(members: Sequence[Finished]) -> Record:
    """Mean and, of several seeds, standard deviation of what the summaries measure."""
    found: Record = {}
    for name in (name for name in members[0].summary if name not in ("seed", "rounds")):
        held = [one.summary.get(name) for one in members]
        values = [value for value in held if isinstance(value, float)]
        if values and len(values) == len(held):
            found[name] = statistics.fmean(values)
            if len(values) > 1:
                found[f"{name}{SPREAD}"] = statistics.stdev(values)
    return found
