"""The status of a run folder: what the run has done, whether it can resume, and its settings."""

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path

from fedmuon.analysis.report.numbers import digits, in_bytes
from fedmuon.config.describe import SYMBOLS
from fedmuon.config.hostile import hostile_clients
from fedmuon.config.incompatible import is_private
from fedmuon.config.load import Config, load
from fedmuon.config.methods import PRIVATE, has
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import IN_PYTHON, handed_over
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, SUMS, mendable, read_text, require_sound
from fedmuon.core.locks import writer
from fedmuon.core.tables import attribute
from fedmuon.experiments.certifying import stored
from fedmuon.experiments.tables import NOT_RELEASED
from fedmuon.runs.directory import (
    Record,
    RunDirectory,
    answered,
    from_start,
    positions,
    traffic_of,
)

NEIGHBOURS, BOUND = "neighbours.csv", "bound.json"
NO_MEASURES = ("round", "bytes_down", "bytes_up", "train_seconds", "seconds")
# Name, times of the last change of content and of attributes in ns, and size of each file.
Changed = tuple[tuple[str, int, int, int], ...]

# Line of the card -> the keys that it shows if the run uses them.
LINES = {
    "data": ("data.name", "data.train", "data.test", "data.alpha"),
    "clients": ("federation.clients", "federation.per-round", "federation.rounds", "local.steps",
                "federation.aggregate", "federation.adapters", "federation.subspace-rounds",
                "federation.subspace-bases", "federation.adapter-ranks"),
    "task": ("task.name", "task.model"),
    "recipe": ("local.recipe", "local.lr", "local.momentum", "local.batch", "local.schedule"),
    "map": ("orthogonalizer.name", "orthogonalizer.lambda", "orthogonalizer.steps",
            "orthogonalizer.rank"),
    "messages": ("compression.uplink", "compression.downlink", "compression.share",
                 "compression.levels", "compression.rank", "compression.iterations",
                 "compression.feedback"),
    "graph": ("federation.graph", "federation.edge-share", "federation.graph-file",
              "federation.varying-graph"),
    "devices": ("devices.mode", "devices.select", "devices.deadline", "devices.buffer",
                "devices.threshold", "devices.threshold-growth", "devices.mixing",
                "devices.staleness-power", "devices.speeds", "devices.bandwidths",
                "devices.availability", "devices.dropout"),
    "hostile": ("attacks.kind", "attacks.share", "attacks.clients", "attacks.from-round",
                "attacks.strength"),
    "defence": ("robust.ball", "robust.radius", "robust.aux-radius", "robust.state-radius",
                "robust.mixing"),
    "privacy": ("privacy.noise", "privacy.bound", "privacy.lot", "privacy.epsilon"),
    "computed": ("engine.name", "engine.dtype", "engine.device", "federation.seed"),
}  # fmt: skip
SHORT = SYMBOLS | {
    "federation.aggregate": "average", "federation.adapters": "adapters",
    "federation.subspace-rounds": "new bases after", "federation.subspace-bases": "bases",
    "federation.adapter-ranks": "ranks",
    "data.test": "test", "local.batch": "batch", "local.schedule": "schedule", "privacy.lot": "lot",
    "privacy.epsilon": "ε asked", "federation.seed": "seed",
    "compression.uplink": "up", "compression.downlink": "down", "compression.share": "share",
    "compression.levels": "levels", "compression.rank": "rank",
    "compression.iterations": "iterations", "compression.feedback": "feedback",
    "federation.edge-share": "edge share", "federation.graph-file": "file",
    "federation.varying-graph": "varying",
    "devices.select": "asked", "devices.deadline": "seconds", "devices.buffer": "buffer",
    "devices.threshold": "threshold", "devices.threshold-growth": "growth",
    "devices.mixing": "mixing", "devices.staleness-power": "staleness power",
    "devices.speeds": "speeds", "devices.bandwidths": "bandwidths",
    "devices.availability": "available", "devices.dropout": "dropout",
    "attacks.share": "share", "attacks.clients": "clients", "attacks.from-round": "from round",
    "attacks.strength": "strength",
    "robust.ball": "ball", "robust.radius": "radius", "robust.aux-radius": "aux radius",
    "robust.state-radius": "state radius", "robust.mixing": "mixing",
}  # fmt: skip
# Values in the next tables and keys that are left out, because they have no effect
UNSET = ("none", "constant", "always", "factors", "random", "", 0)
SPARSE = ("compression", "devices", "attacks", "robust", "federation.adapters",
          "federation.subspace-rounds", "federation.subspace-bases", "federation.adapter-ranks",
          "federation.varying-graph")  # fmt: skip
NAMED = 10  # most numbers of clients in a line
SETTLED = 2 * 10**9  # ns; a file changed more recently may change again without a new time stamp
_listings: dict[Path, tuple[tuple[int, int, int], list[Path], Path | None]] = {}


@dataclass(frozen=True)
class RunStatus:
    """The status of a run folder.

    If `brief` is True, large files are only partly checked, so that runs can be listed quickly. If
    `recalled` is True, the index of runs supplied the status of an intact finished run.
    """

    path: Path
    brief: bool = False
    recalled: bool = False

    @cached_property
    def config(self) -> Config:
        """Return the resolved config."""
        RunDirectory(self.path).require_config()
        file = self.path / "config.toml"
        with mendable(file, "read"):
            status = file.stat()
        return _loaded(file, (status.st_mtime_ns, status.st_ctime_ns, status.st_size))

    @cached_property
    def rounds(self) -> list[Record]:
        """Return the records of the rounds so far, up to the first damaged record.

        Raises:
            InputError: If the run has finished and one of its files is damaged.
        """
        directory = RunDirectory(self.path)
        if self.recalled:
            if len(records := directory.records()) < self.totals["rounds"]:
                raise InputError(f"{self.path} changed while it was read: repeat the command")
            return records
        if self.summary is not None:
            directory.require_unchanged(self.brief)
        directory.require_fixed()
        return directory.records()

    @cached_property
    def totals(self) -> Record:
        """Return the numbers that all rounds determine.

        `rounds` is the number of rounds, `seconds` is their duration, `measures` contains the last
        value of every measure, and `traffic` is the result of `traffic_of`.
        """
        last: dict[str, float] = {}
        for record in self.rounds:
            last |= {
                name: value
                for name, value in record.items()
                if isinstance(value, float) and name not in NO_MEASURES
            }
        return {
            "rounds": len(self.rounds),
            "seconds": self.rounds[-1]["seconds"] if self.rounds else None,
            "measures": last,
            "traffic": traffic_of(self.rounds),
        }

    @cached_property
    def summary(self) -> Record | None:
        """Return the content of summary.json, or None while the run is unfinished."""
        return RunDirectory(self.path).summary()

    @property
    def from_start(self) -> list[Record]:
        """Return the records for curves, starting with the untrained model if it was evaluated."""
        return from_start(self.rounds, self.summary)

    @cached_property
    def bound(self) -> Record | None:
        """Return the content of bound.json, or None if it was not written yet or is not needed."""
        if not (self.path / BOUND).exists():
            return None
        require_sound(self.path, [BOUND, NEIGHBOURS])
        return json.loads(read_text(self.path / BOUND))

    @property
    def risk(self) -> str:
        """Return the command of the certificates of the risk as a sentence, for a finished run."""
        if self.summary is None:
            return ""
        return stored.origin(self.path, handed_over(self.config))

    @cached_property
    def damage(self) -> str:
        """Return why the files cannot be trusted and what to do, or "" if they are intact."""
        try:
            _ = self.config, self.rounds, self.bound, self.state
        except InputError as error:
            return str(error)
        return ""

    def require_unchanged(self) -> None:
        """Raise an error if a file of a finished run is damaged."""
        if self.summary is not None and (reason := _changes(self.path, self._changed, self.brief)):
            raise InputError(reason)

    @property
    def private(self) -> bool:
        """Return whether the run is private, so that its measurements are not released."""
        ledger = self.path / "ledger.jsonl"  # also exists for private custom recipes
        return is_private(self.config) or ledger.exists()

    @property
    def note(self) -> str:
        """Return a note that is important for a reader of the run's numbers."""
        return NOT_RELEASED if self.private else ""

    @property
    def measures(self) -> dict[str, float]:
        """Return the last value of every measure in the records of the rounds."""
        return self.totals["measures"]

    def curve(self, name: str, x: str = "rounds") -> list[tuple[float, float]]:
        """Return the curve of a measure as pairs of a position on the axis `x` and a value.

        The curve starts with the untrained model if that model was evaluated.
        """
        records = self.from_start
        places = positions(records, x, str(self.path))
        return [
            (at, record[name]) for at, record in zip(places, records, strict=True) if name in record
        ]

    @property
    def ended(self) -> bool:
        """Return whether the run and all of its neighbours have finished."""
        begun = (self.path / NEIGHBOURS).exists()
        return self.summary is not None and ((self.path / BOUND).exists() or not begun)

    @property
    def again(self) -> str:
        """Return the command that resumes the run."""
        command = "stability" if (self.path / NEIGHBOURS).exists() else "run"
        if handed_over(self.config):
            return f"fedmuon.{command}(out={str(self.path)!r}, resume=True){IN_PYTHON}"
        return shlex.join(["fedmuon", command, "--out", str(self.path), "--resume"])

    @property
    def state(self) -> str:
        """Return `finished`, `unfinished`, `running: HOLDER`, `failed: WHY` or `lost: WHY`.

        For a failed private run, the text also says whether the run can be resumed. A failed run
        without privacy would fail again.
        """
        if self.ended:
            return "finished"
        if holder := writer(self.path):
            return f"running: {holder}"
        if not (failure := RunDirectory(self.path).failure()):
            return (
                f"lost: {reason}" if (reason := _lost(self.path, self._changed)) else "unfinished"
            )
        failed = f"failed: {failure}"
        if not self.private or self.summary is not None:
            return failed
        if reason := _lost(self.path, self._changed):
            return f"{failed}; the run cannot be resumed: {reason}"
        if self.config.privacy.insecure_reproducible_noise:
            return f"{failed}; a resumed run would draw the same noise and fail again: {AFRESH}"
        if not _is_finite(self.path, self._changed):
            return f"{failed}; the last checkpoint also contains NaN or infinity: {AFRESH}"
        return f"{failed}; a resumed run draws new noise and may succeed, resume with: {self.again}"

    def card(self) -> list[tuple[str, str]]:
        """Return the settings and the state of the run, as pairs (name, text)."""
        lines = settings(self.config) | {"state": self.state}
        if self.rounds:
            completed, seconds = len(self.rounds), (self.summary or self.rounds[-1])["seconds"]
            total = self.config.federation.rounds
            ending = " and the final evaluation" if self.summary else ""
            lines["state"] += f", {completed} of {total} rounds{ending} in {digits(seconds)} s"
            if sent := traffic_of(self.rounds):
                down, up = (in_bytes(size) for size in sent)
                both_ways = f"{down} to clients, {up} to the server"
                gossip = has(self.config.local.recipe, "gossip")
                lines["traffic"] = f"{up} between nodes" if gossip else both_ways
            lines["replies"] = _replies_of(self.rounds, self.config.federation.clients)
        if self.summary is not None:
            lines["workers"] = _memory_of(self.summary.get("workers", []))
            lines["stopped"] = str(self.summary.get("stopped", ""))
            lines["commit"] = str(self.summary["git_commit"] or "")[:12]
        return [(name, words) for name, words in lines.items() if words]

    @property
    def _changed(self) -> Changed:
        return changed(self.path)


def changed(folder: Path) -> Changed:
    """Return the names, times and sizes of all files of a folder, which show whether it changed."""
    with os.scandir(folder) as entries:
        files = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
    return tuple(
        (name, status.st_mtime_ns, status.st_ctime_ns, status.st_size) for name, status in files
    )


def _replies_of(rounds: Sequence[Record], clients: int) -> str:
    """Return, as text, how many replies were used and how many clients sent them.

    A reply that was discarded because it was too late counts as unused. The text is empty if all
    replies were used.
    """
    used = [answered(record) for record in rounds]
    late = [age for record in rounds for age in record.get("staleness", ())]
    discarded = sum(record.get("discarded", 0) for record in rounds)
    expected = sum(len(record["participants"]) for record in rounds) + discarded
    received = sum(map(len, used))
    if expected == received and not late:
        return ""
    words = (
        f"{received} of {expected} used, from {len({*chain.from_iterable(used)})} of "
        f"{clients} clients"
    )
    return words + (f", mean staleness {digits(sum(late) / len(late))}" if late else "")


def _memory_of(workers: list[Record]) -> str:
    """Return, as text, the number of Ray workers at the end of the run and their peak memory.

    The text is empty if the run had no Ray workers.
    """
    if not workers:
        return ""
    nodes = len({worker["node"] for worker in workers})
    words = f"{len(workers)} on {nodes} node{'s' * (nodes != 1)}, peak memory "
    for name, where in (("memory", ""), ("gpu_memory", "; GPU ")):
        if sizes := sorted(worker[name] for worker in workers if name in worker):
            low, high = in_bytes(sizes[0]), in_bytes(sizes[-1])
            words += where + (low if low == high else f"{low} to {high}")
    return words


# These functions read whole files, so each result is cached until a file of the folder changes.


@lru_cache(1024)
def _loaded(file: Path, changed: tuple[int, int, int]) -> Config:
    """Return a config. `fedmuon watch` needs it every second."""
    return load(file)


@lru_cache(1024)
def _lost(folder: Path, changed: Changed) -> str:
    """Return why a run cannot be resumed and what to do, or "" if it can be resumed."""
    directory = RunDirectory(folder)
    try:
        directory.require_resumable()
        directory.require_intact()
    except InputError as error:
        return str(error)
    return ""


@lru_cache(1024)
def _changes(folder: Path, changed: Changed, brief: bool) -> str:
    """Return which file of a finished run is damaged and what to do, or "" if none is damaged."""
    try:
        RunDirectory(folder).require_unchanged(brief)
    except InputError as error:
        return str(error)
    return ""


@lru_cache(1024)
def _is_finite(folder: Path, changed: Changed) -> bool:
    """Return whether all values of the last checkpoint are finite."""
    return RunDirectory(folder).is_finite()


def is_run(folder: Path) -> bool:
    """Return whether the folder contains a run, damaged or not.

    The folder contains a run if it has a config with checksums, or the last file that is written
    before the first round.
    """
    has_files = all((folder / name).is_file() for name in ("config.toml", SUMS))
    return has_files or (folder / "schedule.npy").is_file()


def run_status(folder: Path) -> RunStatus:
    """Return the run in a folder, or raise an InputError if there is none."""
    if not is_run(folder):
        if (folder / "suite.lock").is_file():
            raise InputError(
                f"{folder} contains a suite, sweep or gap that has not finished. To continue it, "
                "repeat its command with --resume. Its finished runs are in "
                f"{folder / 'runs'}."
            )
        raise InputError(
            f"{folder} is not a run folder. Pass a run folder; `fedmuon ls` lists them."
        )
    return RunStatus(folder)


def folders_below(folder: Path) -> dict[Path, Path]:
    """Return the folders of all runs in the folder and below it, ordered by path.

    Each folder leads to the last file that the run has written before its first round.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Pass a folder that contains runs.")
    runs, waiting = {}, [folder]
    while waiting:
        place = waiting.pop()
        below, begun = _listing(place)
        if begun:
            runs[place] = begun
        waiting += reversed(below)
    return runs


def _listing(folder: Path) -> tuple[list[Path], Path | None]:
    """Return the subfolders of a folder, and the file that `folders_below` returns for a run.

    `fedmuon watch` needs them every second, so they are stored until the folder changes. Links to
    folders are left out.
    """
    now = time.time_ns()
    try:
        status = folder.stat()
        stamp = status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        if (cached := _listings.get(folder)) and cached[0] == stamp:
            return cached[1:]
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, PermissionError):  # the folder was removed, or cannot be read
        return [], None
    begun = folder / "schedule.npy"  # missing if the run is damaged or has just begun
    begun = begun if begun.exists() else folder / "config.toml"
    listing = [folder / name for name in names], begun if is_run(folder) else None
    if max(stamp[:2]) < now - SETTLED:
        _listings[folder] = stamp, *listing
    return listing


def _some(numbers: Sequence[int]) -> str:
    """Return the first numbers as text, such as `1 4 7`."""
    return " ".join(map(str, numbers[:NAMED])) + " ..." * (len(numbers) > NAMED)


def settings(config: Config) -> dict[str, str]:
    """Return the settings in the papers' symbols, such as `η = 0.1`, one for each line."""
    lines = {}
    for line, keys in LINES.items():
        words = []
        for key in (candidate for candidate in keys if reads(config, candidate)):
            table, _, name = key.partition(".")
            section = getattr(config, table)
            value = getattr(section, attribute(type(section), name))
            if {table, key} & {*SPARSE} and value in UNSET:
                continue
            if key == "local.batch" and not value:
                if config.local.recipe in PRIVATE:
                    continue  # the run draws lots instead
                value = "full"
            if key == "federation.aggregate" and value == "mean":
                if has(config.local.recipe, "gossip"):  # the line of the graph says it
                    continue
                votes = has(config.local.recipe, "votes")
                value = "majority of the votes" if votes else "mean with equal weights"
            text = f"{value:g}" if isinstance(value, float) else f"{value}"
            text = text.lower() if isinstance(value, bool) else text
            words.append(f"{SHORT[key]} = {text}" if key in SHORT else text)
        if line == "hostile" and config.attacks.share and words:
            words[1:1] = [f"clients = {_some(hostile_clients(config))}"]
        lines[line] = ", ".join(words)
    return {line: words for line, words in lines.items() if words}
