"""What private runs have spent: of a run's folder, and as columns of a suite's tables."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedmuon.analysis.report.numbers import number
from fedmuon.config import load as tables
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.files import finite, require_regular
from fedmuon.experiments.compare import adjacency_of
from fedmuon.experiments.tables import columns
from fedmuon.federated.accountant import client_name, delta_of, protected
from fedmuon.privacy.accounting.composition import loose
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms.client_level import EACH, EVERYONE
from fedmuon.privacy.noise_visibility import CAVEATS, STOPPED
from fedmuon.runs.directory import AUDIT, Record, RunDirectory

UNFINISHED = (
    "The run has not ended; should it be left by what it showed and did not release, its length is "
    "not accounted for."
)
Rows = Sequence[Mapping[str, Any]]


def spent(folder: Path, delta: float | None = None, accountant: str = "pld") -> Record:
    """Each client's epsilon with its bracket, from the ledger of a run; delta is the run's own
    unless it is given. `never_part` counts the clients that have spent nothing: see `_never`."""
    file = folder / "ledger.jsonl"
    if not file.exists():
        raise InputError(f"{folder} has no ledger.jsonl: name the folder of a private run")
    directory = RunDirectory(folder)
    if (folder / "config.toml").exists():
        directory.require_sound()
    # The run may be going on: what is read first is behind what is read last.
    done, head, ledger = len(directory.records()), directory.ledger_head(), Ledger.read(file)
    ledger.require(done, head)
    summary, doubt, held = directory.summary(), CAVEATS[ledger.about["noise"]], _dealt(folder)
    if (goal := delta) is None:
        public = ledger.about["rate_from"] == "public"
        goal = summary["privacy"]["delta"] if summary else _delta(folder, held, public)
    answers = ledger.epsilons(goal, accountant)
    stopped = bool((summary or {}).get("stopped"))
    names = ("epsilon", "lower", "upper", "rdp")
    clients = {
        str(client_name(client)): {name: finite(getattr(one, name)) for name in names}
        for client, one in answers.items()
    }
    most = max((one.upper for one in answers.values()), default=0.0)
    notes = (
        STOPPED if stopped else "",
        doubt,
        "" if answers else "Nothing was released yet.",
        "" if summary else UNFINISHED,
        "" if math.isfinite(most) else "A release without noise: epsilon is infinite.",
        "" if held is None else loose(goal, protected(*held)),
    )
    return {
        "delta": goal,
        "mode": "joint",
        **{name: ledger.about[name] for name in ("adjacency", "rate_from", "sampling")},
        **{
            name: ledger.about[name]
            for name in ("unit", "trust", "honest", "shares")
            if name in ledger.about
        },
        "epsilon": finite(most),
        "certified": math.isfinite(most) and not (doubt or stopped),
        "note": " ".join(filter(None, notes)),
        "clients": clients,
        "never_part": _never(ledger, held),
        **_audited(folder),
    }


def _never(ledger: Ledger, held: tuple[Config, np.ndarray] | None) -> int:
    """How many clients took part in no round so far, and have spent epsilon = 0 at every delta.

    Who takes part is known to all, and drawn without looking at samples: all releases have the same
    law whatever such a client holds, under each adjacency. Where secrecy amplifies, it is 0 of
    nobody: an epsilon is of the draw and not of its outcome, so that a client of Poisson cohorts
    (`EVERYONE`), or a sample of Poisson lots, that was never drawn has the amplified one.
    """
    secret = ledger.about.get("unit") == "client" and ledger.about["sampling"] == "poisson"
    return 0 if held is None or secret else held[0].federation.clients - len(ledger.clients())


def _audited(folder: Path) -> Record:
    """What an audit of this very run showed, if there was one."""
    if not (folder / AUDIT).exists():
        return {}
    from fedmuon.experiments.auditing import one_run  # and scipy, which no other account needs

    found = one_run.stored(folder)
    if found is None:
        return {}
    names = ("epsilon_at_least", "confidence", "delta")
    bound = max(one_run.BOUNDS, key=lambda name: found[name])
    best = {"bound": bound, "best": found[bound], "basis": one_run.BOUNDS[bound],
            "said": " ".join(one_run.collusion(found))}  # fmt: skip
    return {"audit": {**{name: found[name] for name in names}, **best}}


def _delta(folder: Path, held: tuple[Config, np.ndarray] | None, public: bool) -> float:
    """[privacy] delta of a run that has not ended, or what its examples make of 0."""
    if held is None:
        raise InputError(f"{folder} does not say at which delta: give --delta")
    privacy = held[0].privacy
    if public and privacy.level == "example" and not (privacy.delta or privacy.public_population):
        raise InputError(
            f"{folder} has not ended, and the public rate of its recipe's own mechanism leaves the "
            "delta open: give --delta"
        )
    return delta_of(*held)


def _dealt(folder: Path) -> tuple[Config, np.ndarray] | None:
    """The config of a run, and how many samples each client has [N]; None where it says neither."""
    file, split = folder / "config.toml", folder / "partition.npz"
    if not (file.exists() and split.exists()):
        return None
    with np.load(require_regular(split)) as held:
        return tables.load(file), np.bincount(held["client"])


def table(record: Record) -> Table:
    """The same for people."""
    rows = [
        (
            client,
            *(_said(held[name]) for name in ("upper", "lower", "rdp")),
        )
        for client, held in record["clients"].items()
    ]
    head = ("client", "epsilon", "at least", "RDP")
    of = f", trust {record['trust']}, unit client" if "unit" in record else ""
    delta = number(record["delta"], 3)
    about = f"joint, {record['adjacency']}, {released_by(record)}{of}, delta {delta}"
    shown = columns(about, head, rows)
    if record["never_part"]:
        shown.add_row(f"{record['never_part']} never took part", *[_said(0.0)] * 3)
    shown.add_section()
    shown.add_row("most", _said(record["epsilon"]))
    words = [record["note"]]
    if (found := record.get("audit")) is not None:
        shown.add_row(f"audited, {found['bound']}", "", f">= {found['best']:.4f}", "")
        words.append(
            f"The audit's bound stands on {found['basis']}; at delta = "
            f"{number(found['delta'], 3)}, with {found['confidence']:.0%} confidence."
        )
        words.append(found["said"])
    shown.caption = " ".join(filter(None, words)) or None
    return shown


def _said(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4f}"


def unreleased(summary: Mapping[str, Any] | None) -> str:
    """What the title of numbers says that were measured on the data of a private run themselves."""
    return ", measured and not released" if "privacy" in (summary or {}) else ""


def standing(private: Mapping[str, Any]) -> str:
    """What the epsilon of a summary compares, of what is released how."""
    held = f"{private['mode']}, {adjacency_of(private)}, {released_by(private)}"
    if "trust" in private:
        whom = f"clients whole, trust {private['trust']}"
        if "honest" in private:
            whom += f" ({private['honest']} of {private['shares']} shares of noise count)"
        return f"{held}, {whom}, multiplier {number(private['noise'])}"
    blocks = f"{private['blocks']} block" + "s" * (private["blocks"] != 1)
    return f"{held}, {blocks} of multiplier {number(private['noise'])}"


def released_by(private: Mapping[str, Any]) -> str:
    """Whom a release holds: lots of examples, or at client level cohorts."""
    if "trust" in private:
        return "poisson cohorts" if private["sampling"] == "poisson" else "cohorts known to all"
    return f"{private['sampling']} lots"


def privacy_record(config: Config, summary: Mapping[str, Any]) -> Record:
    """What a cell keeps of the summary of a private run; nothing of others."""
    private = summary.get("privacy")
    if private is None:
        return {}
    held = {name: private.get(name) for name in ("epsilon", "certified", "clients", "noise")}
    named = {"adjacency": adjacency_of(private), "sampling": private.get("sampling", "poisson")}
    return {"privacy": {**held, **named, "target": config.privacy.epsilon}}


def with_privacy_columns(
    made: Mapping[str, Rows], heads: Sequence[Record], records: Sequence[Record]
) -> Mapping[str, Rows]:
    """The tables of a suite; where runs are private, with what each certifies, and clients.csv."""
    if not (rows := _clients(heads, records)):
        return made
    runs = [{**row, **_certified(one)} for row, one in zip(made["runs"], records, strict=True)]
    return {**made, "runs": runs, "clients": rows}


def _certified(record: Record) -> Record:
    """The epsilon that a run certifies, and whether it does; nan for one that did not end."""
    held = record.get("privacy") or {}
    known, certified = held.get("epsilon"), bool(held.get("certified"))
    epsilon = math.nan if known is None else known
    return {"epsilon": epsilon, **_named(held), "certified": certified}


def _named(held: Mapping[str, Any]) -> Record:
    """What an epsilon compares; cells of earlier versions did not say, nor do runs without one."""
    unsaid = {"adjacency": "zero-out", "sampling": "poisson"} if held else {}
    return {name: held.get(name, unsaid.get(name, "")) for name in ("adjacency", "sampling")}


def _clients(heads: Sequence[Record], records: Sequence[Record]) -> Rows:
    """Every client that took part in a private run, with its own epsilon and the target."""
    return [
        head
        | {
            "client": EVERYONE if client == EACH else int(client),
            "epsilon": value,
            "target": one["privacy"]["target"],
        }
        | _named(one["privacy"])
        for head, one in zip(heads, records, strict=True)
        for client, value in (one.get("privacy", {}).get("clients") or {}).items()
    ]
