"""Run directories and suites with a file damaged, exchanged or gone, through every reader."""

from pathlib import Path
from random import Random

from tests.fuzz import base, mutations
from tests.fuzz.calls import call, judged, snapshot
from tests.fuzz.outcome import Case, Outcome, other

KIND = "folders"
READERS = {
    "run": (["run", "--resume", "--out"], ["bound", "--json"], ["stability", "--resume", "--out"]),
    "private": (["privacy", "spent", "--json"], ["run", "--resume", "--out"]),
    "network": (["run", "--resume", "--out"], ["bound", "--json"]),
    "stopped": (["run", "--resume", "--out"], ["bound", "--json"]),
    "stopped-private": (["run", "--resume", "--out"], ["privacy", "spent", "--json"]),
    "stability": (["stability", "--resume", "--out"], ["report"], ["bound", "--json"]),
    "suite": (["suite", "suite.toml", "--resume", "--out"], ["report"]),
}
# What a run in progress, or a suite that makes its tables anew from its cells, may change before it
# finds what is wrong with another of its files.
STOPPED = ("rounds.jsonl", "checkpoint.safetensors", "checkpoint-previous.safetensors",
           "ledger.jsonl", ".lock", "SHA256SUMS")  # fmt: skip
TABLES = ("runs.csv", "neighbours.csv", "summary.csv", "suite.json", "suite.lock", "SHA256SUMS")
MOVING = {"stopped": STOPPED, "stopped-private": STOPPED, "suite": TABLES}


def draw(rng: Random) -> Case:
    """A template, a reader of it, and one to three mutations; files are chosen when it runs."""
    name = rng.choice(list(READERS))
    count = rng.choice((1, 1, 1, 2, 3))
    suffix = rng.choice((".json", ".jsonl", ".csv", ".toml", ".npz", ".npy", ".safetensors", ""))
    return {
        "kind": KIND,
        "template": name,
        "reader": rng.choice(READERS[name]),
        "suffix": suffix,
        "mutations": [{"file": rng.random(), **mutations.drawn(rng, suffix)} for _ in range(count)],
    }


def perform(case: Case, place: Path) -> Outcome:
    held = base.copied(place.parent, case["template"], place)
    (place / "suite.toml").write_bytes((place.parent / "templates/suite.toml").read_bytes())
    mutations.spoil(held, case["mutations"], case["suffix"])
    before = snapshot(place)
    ending = call([*case["reader"], case["template"]], place)
    outcome = judged(ending, place, before, MOVING.get(case["template"], ()))
    if outcome.end != "done" or outcome.why:
        return outcome
    reference = base.reference(place.parent, case["template"], tuple(case["reader"]))
    if case["reader"][0] in ("run", "stability", "suite"):
        odd = [name for name, held in reference.files.items() if _bytes(place / name) != held]
    else:
        odd = ["what is printed"] if ending.out != reference.said else []
        page = place / case["template"] / "report.html"
        odd += ["report.html"] if page.exists() and base.told(page) != reference.page else []
    return other(f"accepted with another result: {odd[0]}") if odd else outcome


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
