"""kill -9 again and again, of runs whose clients keep states: the same model and states."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from . import jobs
from .jobs import Job
from .laboratory import OTHER, REFUSED, Laboratory, Trial

RECIPES = ("scaffold", "fedmuon-corrected")
SHARE = 20  # of 100 kills, for each recipe
LIFE = 0.15  # of the job's time: the longest time between two kills
CHANGES = (
    "federation.clients=6", "federation.per-round=3", "federation.rounds=80", "local.steps=3",
    "data.client-test=0.3", "output.clients=true", "output.checkpoint-every=2",
)  # fmt: skip
Key = tuple[int, int]  # a client, and the round after which it has the state
States = dict[Key, dict[str, np.ndarray]]


@dataclass
class Figures:
    """What the trials of one recipe did."""

    kills: int = 0  # of a process that was still at work
    runs: int = 0
    states: int = 0  # that were compared


def scenario(lab: Laboratory) -> None:
    """Each recipe until it was killed often enough; a run that ends before gives way to another."""
    for recipe in RECIPES:
        print(f"{recipe}: {tried(lab, recipe, max(1, round(lab.kills * SHARE / 100)))}", flush=True)


def tried(lab: Laboratory, recipe: str, kills: int) -> Figures:
    job, found = of(recipe), Figures()
    wanted = every_state(job, lab.place / f"every-state-{recipe}")
    draws = lab.draws(f"states {recipe}")
    while found.kills < kills:
        found.runs += 1
        with lab.trial(f"kill -9 again: {recipe}", f"run {found.runs}") as trial:
            if why := killed(trial, job, wanted, draws, kills, found):
                trial.verdict = OTHER, why
                break
            outcome, why = trial.go_on(job)
            trial.verdict = (OTHER, f"lost: {why}") if outcome == REFUSED else (outcome, why)
    return found


def of(recipe: str) -> Job:
    return Job(recipe, "run", jobs.settings(jobs.BASE, CHANGES, [f"local.recipe={recipe}"]))


def killed(
    trial: Trial, job: Job, wanted: States, draws: random.Random, kills: int, found: Figures
) -> str:
    """Kill and resume one run; which state of a client is not as it should be after a kill."""
    seconds = trial.laboratory.reference(job).seconds
    while found.kills < kills:
        ended = trial.kill_after(job.resume(trial.out), draws.random() * LIFE * seconds)
        if ended.code == 0:
            return ""
        if ended.code != -9:
            return f"exit code {ended.code}: {ended.err[-800:]}"
        found.kills += 1
        for key, state in held_states(trial.out / "client-states"):
            found.states += 1
            if why := unlike(state, wanted.get(key)):
                return f"the state of client {key[0]} after round {key[1]}: {why}"
    return ""


def held_states(folder: Path) -> Iterator[tuple[Key, dict[str, np.ndarray]]]:
    """Every state in the whole files of a folder of states."""
    for file in sorted(folder.glob("[0-9]*.safetensors")):
        arrays = load_file(file)
        pairs = zip(arrays.pop("client").tolist(), arrays.pop("round").tolist(), strict=True)
        for row, key in enumerate(pairs):
            yield key, {name: one[row] for name, one in arrays.items()}


def unlike(state: dict[str, np.ndarray], wanted: dict[str, np.ndarray] | None) -> str:
    """How a state differs from the one of an undisturbed run, bit by bit."""
    if wanted is None:
        return "an undisturbed run has none"
    if set(state) != set(wanted):
        return f"it has {sorted(state)} for {sorted(wanted)}"
    other = [name for name, one in state.items() if one.tobytes() != wanted[name].tobytes()]
    return f"{other[0]} differs" if other else ""


def every_state(job: Job, out: Path) -> States:
    """The states of every client after every round of an undisturbed run."""
    # These load torch, which the processes that are killed have by themselves.
    import torch

    from fedmuon.config.load import load
    from fedmuon.experiments.run import execute
    from fedmuon.federated.client_states import ClientStates, flat_states

    found: States = {}
    write = ClientStates.write

    def written(store: ClientStates, client: int, round: int, states: dict) -> None:
        write(store, client, round, states)
        found[client, round] = {k: one.numpy() for k, one in flat_states(states).items()}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ClientStates.write = written  # type: ignore[method-assign]
    try:
        changes = [one.removeprefix("--set=") for one in job.given]
        execute(load(None, changes), out)
    finally:
        ClientStates.write = write  # type: ignore[method-assign]
        torch.set_num_threads(threads)
    return found
