"""What all scenarios share: references, how a trial is judged, and the table of all of them."""

import contextlib
import itertools
import json
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import jobs
from .folders import Contents, contents, difference, digests, ledger_lines
from .jobs import Job
from .nursery import HUNG, Ended, Nursery

SAME, REFUSED, OTHER = "same bytes", "refused", "other"
Verdict = tuple[str, str]  # one of these, and why
WIDE = 52  # of a row's name
HEAD = f"{'scenario':<{WIDE}}{'tried':>8}{SAME:>12}{REFUSED:>10}{OTHER:>8}"
GOES_ON = 5  # times that an interrupted command is asked to go on before that counts as a failure


@dataclass(frozen=True)
class Reference:
    """What a job gives when nothing disturbs it, and how long that takes."""

    folder: Path
    held: Contents
    seconds: float
    out: str


@dataclass
class Laboratory:
    """A place for trials. Everything that is drawn comes of the seed."""

    place: Path
    nurseries: Sequence[Nursery]
    seed: int
    kills: int
    quick: bool = False
    table: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    _references: dict[str, Reference] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _shown: int = 0
    _own: threading.local = field(default_factory=threading.local)

    @property
    def nursery(self) -> Nursery:
        """The one of this thread: each does one thing after the other."""
        return getattr(self._own, "nursery", self.nurseries[0])

    def side_by_side(self, job: Job, trials: Iterable[Callable[[], object]]) -> None:
        """Do these trials of a job, whose outcome hangs on no moment, in a thread a nursery."""
        self.reference(job)  # before it is asked for by several threads
        nurseries = iter(self.nurseries)

        def begin() -> None:
            self._own.nursery = next(nurseries)

        with ThreadPoolExecutor(len(self.nurseries), initializer=begin) as threads:
            try:
                for done in [threads.submit(one) for one in trials]:
                    done.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)  # those under way are awaited
                raise

    def draws(self, scenario: str) -> random.Random:
        return random.Random(f"{self.seed} {scenario}")

    def jobs(self) -> list[Job]:
        """One job of each kind; quick: those that draw no figures."""
        return jobs.every(self.place / "suites", self.quick)

    def reference(self, job: Job, real: bool = False) -> Reference:
        if job.name not in self._references:
            folder = self.place / f"reference-{len(self._references)}"
            ended = self.nursery.run(job.start(folder), 300, real=real)
            assert ended.code == 0, f"{job.name} fails undisturbed: {ended}"
            held = contents(folder)
            self._references[job.name] = Reference(folder, held, ended.seconds, ended.out)
        return self._references[job.name]

    @contextlib.contextmanager
    def trial(self, scenario: str, how: str) -> Iterator["Trial"]:
        """A folder for one trial, which is kept if the trial ends as no trial should."""
        one = Trial(self, self.place / f"trial-{next(self._numbers)}")
        one.folder.mkdir()
        try:
            yield one
        except Exception as error:
            one.verdict = OTHER, f"the trial itself failed: {error!r}"
        self._count(scenario, one.verdict[0])
        if one.verdict[0] != OTHER:
            shutil.rmtree(one.folder)
            return
        said = f"{scenario}, seed {self.seed}: {how}: {one.verdict[1][:1500]} (kept: {one.folder})"
        self.findings.append(said)
        print(f"OTHER {said}", file=sys.stderr, flush=True)

    def _count(self, scenario: str, outcome: str) -> None:
        """One more; with the first one of a new row those before it are said."""
        with self._counting:
            if scenario not in self.table:
                self.say()
            self.table.setdefault(scenario, Counter())[outcome] += 1

    def show(self) -> str:
        total: Counter[str] = sum(self.table.values(), Counter())
        return "\n".join([HEAD, *(_line(*row) for row in [*self.table.items(), ("all", total)])])

    def say(self) -> None:
        """Print the rows that were not yet printed, unless only tests look."""
        for row in [*self.table.items()][self._shown :] * (not self.quick):
            print(_line(*row), flush=True)
        self._shown = len(self.table)


@dataclass
class Trial:
    """One disturbance: `out` is disturbed, then `verdict` says what came of it."""

    laboratory: Laboratory
    folder: Path
    verdict: Verdict = (OTHER, "no verdict")

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def copy(self, folder: Path) -> None:
        shutil.copytree(folder, self.out)

    def kill_after(self, arguments: list[str], seconds: float) -> Ended:
        """Run the command for so long, and end it as a power cut would."""
        child = self.laboratory.nursery.start(arguments)
        time.sleep(seconds)
        child.send(signal.SIGKILL)
        return child.wait()

    def go_on(self, job: Job, between: Callable[[int], None] = lambda time: None) -> Verdict:
        """Resume until the job is done, and compare; `between` disturbs it again."""
        for number in range(GOES_ON):
            between(number)
            before, ledger = digests(self.out), ledger_lines(self.out)
            ended = self.laboratory.nursery.run(job.resume(self.out), 300)
            if ended.code != 0:
                why = improper(ended, before, digests(self.out))
                return (OTHER, why) if why else (REFUSED, ended.err)
            if ledger_lines(self.out)[: len(ledger)] != ledger:
                return OTHER, "lines of the ledger were lost or changed"
            return self.compare(job)
        return OTHER, f"not done after {GOES_ON} times"

    def compare(self, job: Job) -> Verdict:
        """The finished job beside its reference; of secret noise, what can be known."""
        reference = self.laboratory.reference(job)
        if job.secret:
            why = self._accounted(reference)
        else:
            repeated = (self.out / "ledger.jsonl").exists()
            wanted = contents(reference.folder, repeated) if repeated else reference.held
            why = difference(contents(self.out, repeated), wanted)
        return (OTHER, why) if why else (SAME, "")

    def _accounted(self, reference: Reference) -> str:
        """What is wrong with a finished private run of secret noise."""
        found, wanted = contents(self.out), reference.held
        for name in ("config.toml", "partition.npz", "schedule.npy", "initial.safetensors"):
            if found.get(name) != wanted[name]:
                return f"{name} differs"
        rounds = [(one["round"], one["participants"]) for one in wanted["rounds.jsonl"]]
        if [(one["round"], one["participants"]) for one in found["rounds.jsonl"]] != rounds:
            return "rounds.jsonl differs"
        told = [json.loads(line)["round"] for line in ledger_lines(self.out)[1:]]
        if not {one[0] - 1 for one in rounds} <= set(told):
            return f"the ledger has rounds {told}"
        spent = self.laboratory.nursery.run(["privacy", "spent", str(self.out), "--json"])
        if spent.code:
            return f"spent: {spent.err}"
        clients = {key: one["upper"] for key, one in json.loads(spent.out)["clients"].items()}
        certified = found["summary.json"]["privacy"]["clients"]
        return "" if clients == certified else f"spent {clients}, certified {certified}"


def _line(name: str, counts: Counter[str]) -> str:
    numbers = [sum(counts.values()), *(counts[one] for one in (SAME, REFUSED, OTHER))]
    return f"{name:<{WIDE}}{numbers[0]:>8}{numbers[1]:>12}{numbers[2]:>10}{numbers[3]:>8}"


# Notes that a run may print before its end: on the sizes of its clients, and on other programs.
NOTE = re.compile(
    r"fedmuon: (The sizes of the clients differ by more than a factor of 2, but |"
    r"(Other programs use about|This process may use only) \d+ of \d+ cores, but torch uses ).*"
)


def without_notes(said: str) -> str:
    """What a command said beside the notes, each of which is a line."""
    return "\n".join(one for one in said.strip().splitlines() if not NOTE.fullmatch(one))


def improper(ended: Ended, before: dict[str, str], after: dict[str, str]) -> str:
    """What is wrong with a refusal: nothing, if it is one sentence and touches nothing."""
    said = without_notes(ended.err)
    if ended.code == HUNG:
        return "it hung"
    if ended.code != 2 or "Traceback" in said:
        return f"exit code {ended.code}: {said[-1500:]}"
    if not said.startswith("fedmuon: ") or len(said.splitlines()) != 1:
        return f"not one sentence: {said}"
    changed = [name for name, digest in before.items() if after.get(name) != digest]
    return f"refused, but changed {changed}: {said}" if changed else ""
