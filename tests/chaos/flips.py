"""Bits that flip, and files cut short, lengthened or gone; then everything that reads them.

What is read must come out as from the undamaged folder, or be refused.
"""

import random
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .folders import PICTURES, contents, difference, digests
from .jobs import Job
from .laboratory import OTHER, REFUSED, SAME, Laboratory, Trial, Verdict, improper
from .nursery import Ended

LOCKS = (".lock", ".driver.lock")
FLIPS = 2  # of every class of bytes of every file
CLASSES = {"names": rb"[A-Za-z_][A-Za-z_-]*", "numbers": rb"[0-9.e+-]+",
           "whitespace": rb"[ \n\t\r]+", "marks": rb"[\"'{}\[\]:,=#]+"}  # fmt: skip


@dataclass(frozen=True)
class Damage:
    file: str
    kind: str
    place: int = 0
    bit: int = 0

    def do(self, folder: Path) -> None:
        file = folder / self.file
        held = bytearray(file.read_bytes())
        if self.kind == "gone":
            file.unlink()
            return
        if self.kind == "cut":
            del held[self.place :]
        elif self.kind == "longer":
            held += b"x\x00{1}\n"[self.place :]
        else:
            held[self.place] ^= 1 << self.bit
        file.write_bytes(held)


def damages(folder: Path, draws: random.Random, flips: int = FLIPS) -> Iterator[Damage]:
    """Of every kind of file but pictures and locks: each class of bytes, the ends, the length."""
    for file in _each_kind(folder, draws):
        name = str(file.relative_to(folder))
        held = file.read_bytes()
        for kind, places in _classes(file.suffix, held).items():
            for place in draws.sample(places, min(flips, len(places))):
                yield Damage(name, kind, place, draws.randrange(8))
        yield from (Damage(name, "cut", place) for place in {0, len(held) // 2, len(held) - 1})
        yield from (Damage(name, "longer"), Damage(name, "longer", 5), Damage(name, "gone"))


def _each_kind(folder: Path, draws: random.Random) -> list[Path]:
    """Its files; of those that every cell of a suite has, one cell's."""
    kinds: dict[tuple[str, ...], list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        place, name = file.relative_to(folder).parts[:-1], file.name
        if not file.is_file() or name in LOCKS or file.suffix in PICTURES:
            continue
        of_cell = file.suffix if len(place) == 1 else name  # cells/CELL.json, runs/CELL/NAME
        kinds.setdefault((*place[:1], of_cell if place else name), []).append(file)
    return sorted(draws.choice(files) for files in kinds.values())


def _classes(suffix: str, held: bytes) -> dict[str, list[int]]:
    """Class -> where its bytes are; of binary files: header, body, and both ends."""
    ends = {"ends": sorted({0, len(held) - 1})} if held else {}
    if suffix in (".safetensors", ".npz", ".npy"):
        header = 8 + int.from_bytes(held[:8], "little") if suffix == ".safetensors" else 128
        header = min(header, len(held))
        split = {"header": list(range(header)), "body": list(range(header, len(held)))}
        return {**split, **ends}
    found = {
        kind: [place for one in re.finditer(words, held) for place in range(*one.span())]
        for kind, words in CLASSES.items()
    }
    return {**found, **ends}


@dataclass(frozen=True)
class Case:
    """A folder to damage, and the commands that read it. `job` goes on in it, others look."""

    name: str
    folder: Path
    job: Job
    looks: tuple[tuple[str, ...], ...]


def scenario(lab: Laboratory) -> None:
    for case in cases(lab):
        tried(lab, case, damages(case.folder, lab.draws(f"flip {case.name}")))


def tried(lab: Laboratory, case: Case, every: Iterable[Damage]) -> None:
    told = {look: _looked(lab, case.folder, look) for look in case.looks}
    lab.side_by_side(case.job, (partial(_tried, lab, case, told, damage) for damage in every))


def _tried(
    lab: Laboratory, case: Case, told: Mapping[tuple[str, ...], Ended], damage: Damage
) -> None:
    for look in (*case.looks, ("--resume",)):
        with lab.trial(f"damage: {case.name}", f"{damage}, {' '.join(look)}") as trial:
            trial.copy(case.folder)
            damage.do(trial.out)
            resumed = look not in told
            trial.verdict = _resume(trial, case) if resumed else _look(trial, look, told[look])


def cases(lab: Laboratory) -> list[Case]:
    run, _, repeatable, census, *suites = lab.jobs()
    bound, spent = ("bound", "--json"), ("privacy", "spent", "--json")
    whole = [
        Case(f"finished {job.name}", lab.reference(job).folder, job, looks)
        for job, looks in (
            (run, (bound,)), (repeatable, (spent,)), (census, (bound, ("report",))),
            *((job, (("report",),)) for job in suites[::2]),
        )
    ]  # fmt: skip
    cut = [
        Case(f"interrupted {job.name}", interrupted(lab, job), job, looks)
        for job, looks in ((run, ()), (repeatable, (spent,)), (census, ()),
                           *((one, ()) for one in suites[:1]))
    ]  # fmt: skip
    return whole + cut


def interrupted(lab: Laboratory, job: Job) -> Path:
    """The job's folder, killed somewhere between its first result and its end."""
    folder = lab.place / f"interrupted-{job.name.replace(' ', '-')}"
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        child, end = lab.nursery.start(job.start(folder)), time.monotonic() + 20
        while not _midway(folder, job) and time.monotonic() < end:
            time.sleep(0.0005)
        child.send(signal.SIGKILL)
        child.wait()
        if _midway(folder, job):
            return folder
    raise AssertionError(f"no moment found to interrupt {job.name}")


def _midway(folder: Path, job: Job) -> bool:
    if job.command == "suite":
        return any(folder.glob("cells/*.json")) and not (folder / "suite.json").exists()
    if job.command == "stability":
        file = folder / "neighbours.csv"
        return file.exists() and not (folder / "bound.json").exists()
    return (folder / "checkpoint.safetensors").exists() and not (folder / "summary.json").exists()


def _looked(lab: Laboratory, folder: Path, look: tuple[str, ...]) -> Ended:
    """What a reader says of a folder; its path is left out of that."""
    copy = lab.place / "looked"
    shutil.copytree(folder, copy)
    ended = _ask(lab, copy, look)
    assert ended.code == 0, ended
    shutil.rmtree(copy)
    return ended


def _ask(lab: Laboratory, folder: Path, look: tuple[str, ...]) -> Ended:
    options = [one for one in look if one.startswith("--")]
    words = [one for one in look if not one.startswith("--")]
    ended = lab.nursery.run([*words, str(folder), *options])
    return Ended(ended.code, ended.out.replace(str(folder), "OUT"), ended.err, 0.0)


def _look(trial: Trial, look: tuple[str, ...], told: Ended) -> Verdict:
    before = digests(trial.out)
    ended = _ask(trial.laboratory, trial.out, look)
    if ended.code == 0:
        same = ended.out == told.out
        return (SAME, "") if same else (OTHER, f"exit code 0: {ended.out[-800:]}")
    why = improper(ended, before, digests(trial.out))
    return (OTHER, why) if why else (REFUSED, "")


def _resume(trial: Trial, case: Case) -> Verdict:
    """Go on: to the bytes of the reference, or not at all."""
    before = digests(trial.out)
    ended = trial.laboratory.nursery.run(case.job.resume(trial.out), 60)
    if ended.code:
        why = improper(ended, before, digests(trial.out))
        return (OTHER, why) if why else (REFUSED, "")
    reference = trial.laboratory.reference(case.job)
    repeated = (trial.out / "ledger.jsonl").exists()
    wanted = contents(reference.folder, repeated)
    why = difference(contents(trial.out, repeated), wanted)
    return (OTHER, f"exit code 0, but {why}") if why else (SAME, "")
