"""A run as it lies in its folder, finished or not, and how to go on with it."""

import json
import shlex
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from fedmuon.config import load as tables
from fedmuon.config.load import Config
from fedmuon.config.user_objects import IN_PYTHON, handed_over
from fedmuon.core.choices import PRIVATE
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, SUMS, read_text, require_sound
from fedmuon.core.locks import writer
from fedmuon.experiments.results import NOT_RELEASED
from fedmuon.runs.directory import Record, RunDirectory

NEIGHBOURS, BOUND = "neighbours.csv", "bound.json"
NO_MEASURES = ("round", "train_seconds", "seconds")
Changed = tuple[tuple[int, int], ...]  # when, and to how many bytes, each file of a folder was


@dataclass(frozen=True)
class Seen:
    """A run directory; of one in a list, a `brief` look at large files is enough."""

    path: Path
    brief: bool = False

    @cached_property
    def config(self) -> Config:
        """The resolved config."""
        RunDirectory(self.path).require_config()
        return tables.load(self.path / "config.toml")

    @cached_property
    def rounds(self) -> list[Record]:
        """The records of the rounds that are done, as far as they are sound; of a finished run all,
        or a refusal."""
        directory = RunDirectory(self.path)
        if self.summary is not None:
            directory.require_unchanged(self.brief)
        directory.require_fixed()
        return directory.records()

    @cached_property
    def summary(self) -> Record | None:
        """What summary.json says; None of an unfinished run."""
        return RunDirectory(self.path).summary()

    @cached_property
    def bound(self) -> Record | None:
        """What bound.json says; None without neighbours, or before they were all run."""
        if not (self.path / BOUND).exists():
            return None
        require_sound(self.path, [BOUND, NEIGHBOURS])
        return json.loads(read_text(self.path / BOUND))

    @cached_property
    def damage(self) -> str:
        """Why what it shows cannot be trusted, and what to do; nothing where it can."""
        try:
            _ = self.config, self.rounds, self.bound, self.state
        except InputError as error:
            return str(error)
        return ""

    def require_unchanged(self) -> None:
        """Reject a finished run of which a file is damaged."""
        if self.summary is not None and (why := _changes(self.path, self._changed, self.brief)):
            raise InputError(why)

    @property
    def private(self) -> bool:
        """Whether what it measured is not released."""
        named = self.config.local.recipe in PRIVATE or self.config.privacy.level == "client"
        return named or (self.path / "ledger.jsonl").exists()  # of a recipe of the user's, too

    @property
    def note(self) -> str:
        """What to know of its numbers."""
        return NOT_RELEASED if self.private else ""

    @property
    def measures(self) -> dict[str, float]:
        """The last value of everything that its rounds measured."""
        last: dict[str, float] = {}
        for record in self.rounds:
            last |= {
                name: value
                for name, value in record.items()
                if isinstance(value, float) and name not in NO_MEASURES
            }
        return last

    def curve(self, name: str) -> list[tuple[float, float]]:
        """(round, value) of a measure, where it was taken."""
        return [(one["round"], one[name]) for one in self.rounds if name in one]

    @property
    def ended(self) -> bool:
        """Whether nothing remains to be done: the run, and its neighbours if it has some."""
        begun = (self.path / NEIGHBOURS).exists()
        return self.summary is not None and ((self.path / BOUND).exists() or not begun)

    @property
    def lost(self) -> str:
        """Why it cannot be gone on with, and what to do; nothing where it can."""
        return _lost(self.path, self._changed)

    @property
    def _changed(self) -> Changed:
        there = (one.stat() for one in sorted(self.path.iterdir()) if one.is_file())
        return tuple((one.st_mtime_ns, one.st_size) for one in there)

    @property
    def again(self) -> str:
        """The command that goes on with it."""
        command = "stability" if (self.path / NEIGHBOURS).exists() else "run"
        if handed_over(self.config):
            return f"fedmuon.{command}(out={str(self.path)!r}, resume=True){IN_PYTHON}"
        return shlex.join(["fedmuon", command, "--out", str(self.path), "--resume"])

    @property
    def state(self) -> str:
        """`finished`, `running` and by whom, `failed` or `lost` and why, or `unfinished`."""
        if self.ended:
            return "finished"
        if holder := writer(self.path):
            return f"running: {holder}"
        if why := RunDirectory(self.path).failure():
            return f"failed: {why}{self._after_failure}"
        return f"lost: {why}" if (why := self.lost) else "unfinished"

    @property
    def _after_failure(self) -> str:
        """Whether a private run that failed can be gone on with, and how; any other would end the
        same."""
        if not self.private or self.summary is not None:
            return ""
        if why := self.lost:
            return f"; and it is lost: {why}"
        if self.config.privacy.insecure_reproducible_noise:
            return f"; its noise would be the same again: {AFRESH}"
        if not _is_finite(self.path, self._changed):
            return f"; its last checkpoint is not finite either: {AFRESH}"
        return f"; its noise is drawn anew, so it may end well: go on with: {self.again}"


@lru_cache(1024)
def _lost(folder: Path, changed: Changed) -> str:
    """`lost` of a run whose files were changed so last: reading them whole, once, is enough."""
    directory = RunDirectory(folder)
    try:
        directory.require_resumable()
        directory.require_intact()
    except InputError as error:
        return str(error)
    return ""


@lru_cache(1024)
def _changes(folder: Path, changed: Changed, brief: bool) -> str:
    """Which file of a finished run is damaged, and what to do, in the same way."""
    try:
        RunDirectory(folder).require_unchanged(brief)
    except InputError as error:
        return str(error)
    return ""


@lru_cache(1024)
def _is_finite(folder: Path, changed: Changed) -> bool:
    """Whether the last checkpoint is, in the same way."""
    return RunDirectory(folder).is_finite()


def is_run(folder: Path) -> bool:
    """Whether a run lies there, whole or not: its config and its sums, or what it had last of all
    before its first round."""
    both = all((folder / name).is_file() for name in ("config.toml", SUMS))
    return both or (folder / "schedule.npy").is_file()


def seen(folder: Path) -> Seen:
    """The run in a folder; refused where there is none."""
    if not is_run(folder):
        raise InputError(f"{folder} is no run directory: name one, or list them by `fedmuon ls`")
    return Seen(folder)


def below(folder: Path) -> list[Seen]:
    """Every run in the folder and below it, in order of their paths."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: name one that holds runs")
    places = {
        file.parent for name in ("config.toml", "schedule.npy") for file in folder.rglob(name)
    }
    return [Seen(place, brief=True) for place in sorted(places) if is_run(place)]
