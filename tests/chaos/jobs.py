"""The commands that are disturbed: small, quick, and one of each kind that writes a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.small_suites import STABILITY, STUDY, TRAINING

BASE = (
    "data.name=synthetic", "data.train=60", "data.test=40", "data.dimension=5", "data.classes=3",
    "data.minimum=5", "federation.clients=4", "federation.per-round=2", "federation.rounds=8",
    "federation.seed=3", "local.lr=0.05", "local.steps=1",
    "engine.dtype=float64", "engine.device=cpu", "output.evaluate-every=4",
)  # fmt: skip
RUN = (*BASE, "orthogonalizer.lambda=0.1", "output.checkpoint-every=2")
PRIVATE = (
    "local.recipe=dp-sgd", "privacy.epsilon=4", "privacy.lot=5", "privacy.bound=0.2",
    "privacy.delta=1e-3", "federation.rounds=4",
)  # fmt: skip
# late replies, one-bit votes, and nodes without a server
METHODS = {
    "threshold": ("local.recipe=ringmaster", "devices.mode=threshold", "devices.threshold=3"),
    "threshold without constants": ("local.recipe=ringmaster-free", "devices.mode=threshold"),
    "fedasync": ("devices.mode=fedasync", "orthogonalizer.lambda=0.1"),
    "vote": ("local.recipe=sign-muon",),
    "gossip": ("local.recipe=demuon", "federation.graph=ring"),
}
SUITES = {"training": TRAINING, "stability": STABILITY, "study": STUDY}


@dataclass(frozen=True)
class Job:
    """`fedmuon COMMAND GIVEN --out FOLDER`. Secret noise has no bytes to compare with."""

    name: str
    command: str
    given: tuple[str, ...]
    secret: bool = False

    def is_in(self, other: "Job") -> bool:
        """Whether the other asks for all that it asks for: with `--resume` it goes on with that."""
        return self.command == other.command and set(self.given) <= set(other.given)

    def start(self, out: Path) -> list[str]:
        return [self.command, *self.given, "--out", str(out)]

    def resume(self, out: Path) -> list[str]:
        """The one that goes on with it, or begins it if nothing was written yet."""
        begun = self.command != "suite" and (out / "config.toml").exists()
        given = [self.command, "--out", str(out)] if begun else self.start(out)
        return [*given, "--resume"]


def settings(*changes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"--set={one}" for group in changes for one in group)


def run(*changes: str, name: str = "run") -> Job:
    return Job(name, "run", settings(RUN, changes))


def private(name: str = "private run") -> Job:
    return Job(name, "run", settings(BASE, PRIVATE), secret=True)


def repeatable() -> Job:
    """A private run whose noise follows from the seed, so that bytes can be compared."""
    changes = ("privacy.insecure-reproducible-noise=true",)
    return Job("repeatable run", "run", settings(BASE, PRIVATE, changes))


def census() -> Job:
    """A run and all of its neighbours, in several stacks."""
    return Job("census", "stability", (*settings(RUN, ["stability.neighbours=all"]),))


def of_methods() -> list[Job]:
    """A run of each method in METHODS, with a checkpoint after every second round."""
    changes = ("federation.clients=6", "federation.rounds=24", "output.checkpoint-every=2")
    base = [one for one in BASE if not one.startswith("federation.per-round")]
    return [Job(name, "run", settings(base, changes, given)) for name, given in METHODS.items()]


def suite(place: Path, kind: str) -> Job:
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{kind}.toml"
    file.write_text(SUITES[kind])
    few = ("--data", "synthetic", "--scale", "small") if kind == "training" else ()
    return Job(f"suite: {kind}", "suite", (str(file), *few))


def every(place: Path, quick: bool = False) -> list[Job]:
    """One of each; suites' files are written to `place`. Quick: without suites."""
    suites = [suite(place, kind) for kind in (() if quick else SUITES)]
    return [run(), private(), repeatable(), census(), *suites]
