"""Compute the epsilon of private runs, and add the epsilon to the tables of a suite."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedmuon.analysis.report.numbers import number
from fedmuon.config.load import Config, load
from fedmuon.core.errors import InputError
from fedmuon.core.files import finite, require_regular
from fedmuon.experiments.inspect.clients import client_label
from fedmuon.experiments.tables import adjacency_of, columns, released_by
from fedmuon.federated.accountant import client_name, delta_of, epsilons, protected
from fedmuon.privacy.accounting.composition import loose
from fedmuon.privacy.accounting.truncated import TOO_OFTEN
from fedmuon.privacy.mechanisms.client_level import EACH, EVERYONE
from fedmuon.privacy.noise import CAVEATS, STOPPED
from fedmuon.runs.data_notes import read_client_names
from fedmuon.runs.directory import AUDIT, LEDGER_LOST, Record, RunDirectory

UNFINISHED = (
    "The run has not ended. If you stop the run because of values that the run did not release, "
    "such as accuracies, epsilon does not cover this decision."
)
LEDGER = "ledger.jsonl"
Rows = Sequence[Mapping[str, Any]]


def spent(folder: Path, delta: float | None = None, accountant: str = "pld") -> Record:
    """Compute the epsilon of each client, with lower and upper bounds, from the ledger of a run.

    The record's `never_part` counts the clients that took part in no round so far. These clients
    have spent epsilon = 0 at every delta. The participants are public and are drawn without looking
    at samples. Therefore, the data of such a client do not change the distribution of the releases.
    This is true for every adjacency. If secret draws amplify privacy, `never_part` is 0, because
    the epsilon describes the random draw and not its outcome. Therefore, with random (Poisson)
    cohorts, a client that was never drawn still has the amplified epsilon. A sample that was in no
    Poisson lot has the amplified epsilon, too.

    Args:
        folder: The folder of a private run, which may still be running.
        delta: The privacy parameter δ. The default is the delta of the run.
        accountant: `pld` for the built-in accountant, or `dp-accounting` for the package of this
            name.
    """
    file = folder / LEDGER
    directory = RunDirectory(folder)
    if not file.exists():
        if directory.released():
            raise InputError(f"{folder} {LEDGER_LOST}. Restore {LEDGER} from a copy.")
        below = next(iter(sorted(folder.glob(f"*/{LEDGER}"))), None)
        raise InputError(
            f"{folder} has no {LEDGER}, so it is not the folder of a private run. Pass the "
            "folder of a private run" + (f", such as {below.parent}." if below else ".")
        )
    if (folder / "config.toml").exists():
        directory.require_sound()
    # The run may still be running, so read the ledger last: it is written before the other files.
    rounds, head, ledger = directory.rounds_begun(), directory.ledger_head(), directory.ledger()
    if not ledger.about:
        raise InputError(
            f"{file} is empty, because the run was interrupted before its first release. Nothing "
            "has been released yet."
        )
    ledger.require(rounds, head)
    summary, doubt = directory.summary(), CAVEATS[ledger.about["noise"]]
    setup: tuple[Config, np.ndarray] | None = None  # the config, and the sizes of the clients
    split = folder / "partition.npz"
    if (folder / "config.toml").exists() and split.exists():
        with np.load(require_regular(split)) as arrays:
            setup = load(folder / "config.toml"), np.bincount(arrays["client"])
    if (goal := delta) is None:
        public = ledger.about["rate_from"] == "public"
        goal = summary["privacy"]["delta"] if summary else _delta(folder, setup, public)
    answers = epsilons(ledger, goal, accountant)
    stopped = bool((summary or {}).get("stopped"))
    names = ("epsilon", "lower", "upper", "rdp")
    assumptions = ("adjacency", "rate_from", "sampling", "unit", "trust", "honest", "shares")
    called = dict(enumerate(read_client_names(folder)))
    clients = {
        str(client_name(client)): (
            {name: finite(getattr(answer, name)) for name in names}
            | ({"name": called[client]} if client in called else {})
        )
        for client, answer in answers.items()
    }
    largest = max((answer.upper for answer in answers.values()), default=0.0)
    cut = any(TOO_OFTEN in answer.note for answer in answers.values())
    endless = TOO_OFTEN if cut else "A release had no noise, so epsilon is infinite."
    notes = (
        STOPPED if stopped else "",
        doubt,
        "" if answers else "Nothing has been released yet.",
        "" if summary else UNFINISHED,
        "" if math.isfinite(largest) else endless,
        "" if setup is None else loose(goal, protected(*setup)),
    )
    secret = ledger.about.get("unit") == "client" and ledger.about["sampling"] == "poisson"
    never_part = 0
    if setup is not None and not secret:
        never_part = setup[0].federation.clients - len(ledger.clients())
    return {
        "delta": goal,
        "mode": "joint",
        **{name: ledger.about[name] for name in assumptions if name in ledger.about},
        "epsilon": finite(largest),
        "certified": math.isfinite(largest) and not (doubt or stopped),
        "note": " ".join(filter(None, notes)),
        "clients": clients,
        "never_part": never_part,
        **_audited(folder),
    }


def _audited(folder: Path) -> Record:
    """Return the result of an audit of this run, or {} if there was no audit."""
    if not (folder / AUDIT).exists():
        return {}
    from fedmuon.experiments.auditing import one_run  # imports scipy, which only audits need

    record = one_run.read_record(folder)
    if record is None:
        return {}
    names = ("epsilon_at_least", "confidence", "delta")
    bound = max(one_run.BOUNDS, key=lambda name: record[name])
    best = {"bound": bound, "best": record[bound], "basis": one_run.BOUNDS[bound],
            "said": " ".join(one_run.collusion(record))}  # fmt: skip
    return {"audit": {**{name: record[name] for name in names}, **best}}


def _delta(folder: Path, setup: tuple[Config, np.ndarray] | None, public: bool) -> float:
    """Return the delta of a run that is still running."""
    if setup is None:
        raise InputError(
            f"{folder} does not contain the delta of the run. Add --delta, such as --delta 1e-5."
        )
    privacy = setup[0].privacy
    if public and privacy.level == "example" and not (privacy.delta or privacy.public_population):
        raise InputError(
            f"the run in {folder} has not ended, so its delta is not known yet. Add --delta, such "
            "as --delta 1e-5."
        )
    return delta_of(*setup)


def table(record: Record) -> Table:
    """Return the record as a table for printing."""
    rows = [
        (
            client_label(client, entry.get("name")),
            *(_shown(entry[name]) for name in ("upper", "lower", "rdp")),
        )
        for client, entry in record["clients"].items()
    ]
    head = ("client", "epsilon", "at least", "RDP")
    trust = f", trust {record['trust']}, unit client" if "unit" in record else ""
    delta = number(record["delta"], 3)
    title = f"joint, {record['adjacency']}, {released_by(record)}{trust}, delta {delta}"
    rich_table = columns(title, head, rows)
    if record["never_part"]:
        rich_table.add_row(f"{record['never_part']} never took part", *[_shown(0.0)] * 3)
    rich_table.add_section()
    rich_table.add_row("maximum", _shown(record["epsilon"]))
    words = [record["note"]]
    if (audit := record.get("audit")) is not None:
        rich_table.add_row(f"audited, {audit['bound']}", "", f">= {audit['best']:.4f}", "")
        words.append(
            f"The bound of the audit uses {audit['basis']}, at delta = "
            f"{number(audit['delta'], 3)}, and holds with {audit['confidence']:.0%} confidence."
        )
        words.append(audit["said"])
    rich_table.caption = " ".join(filter(None, words)) or None
    return rich_table


def runs_of(folder: Path) -> list[Path]:
    """Return the private runs of a folder that `run --seeds` or `sweep` wrote."""
    return [ledger.parent for ledger in sorted(folder.glob(f"runs/*/{LEDGER}"))]


def spent_of_runs(
    folders: Sequence[Path], delta: float | None = None, accountant: str = "pld"
) -> Record:
    """Compute the epsilon of each of several runs on the same data, and of all runs together."""
    runs = {folder.name: spent(folder, delta, accountant) for folder in folders}
    return {"runs": runs, **together([account_of(run) for run in runs.values()])}


def account_of(private: Mapping[str, Any]) -> Record:
    """Return the epsilon of one run and its assumptions, from a summary or from `spent`."""
    level = "client" if private.get("unit") == "client" else "example"
    values = {name: private[name] for name in ("epsilon", "delta", "certified")}
    return {**values, "adjacency": adjacency_of(private), "level": level}


def together(accounts: Sequence[Record]) -> Record:
    """Return the largest epsilon of several runs, and the sum of all their epsilons.

    The sum is what all runs together spend.
    """
    epsilons = [
        math.inf if account["epsilon"] is None else account["epsilon"] for account in accounts
    ]
    deltas = [account["delta"] for account in accounts]
    return {
        "epsilon": finite(max(epsilons)),
        "delta": max(deltas),
        "epsilon_of_all": finite(sum(epsilons)),
        "delta_of_all": sum(deltas),
        **{name: " or ".join(sorted({account[name] for account in accounts}))
           for name in ("adjacency", "level")},
        "certified": all(account["certified"] for account in accounts),
        "accounts": len(accounts),
    }  # fmt: skip


def table_of_runs(record: Record) -> Table:
    """Return the result of `spent_of_runs` as a table for printing."""
    rows = [
        (escape(name), _shown(run["epsilon"]), number(run["delta"], 3))
        for name, run in record["runs"].items()
    ]
    title = f"joint, {record['adjacency']}, level {record['level']}"
    rich_table = columns(title, ("run", "epsilon", "delta"), rows)
    rich_table.add_section()
    delta, delta_of_all = (number(record[name], 3) for name in ("delta", "delta_of_all"))
    rich_table.add_row("maximum", _shown(record["epsilon"]), delta)
    rich_table.add_row("all runs (sum)", _shown(record["epsilon_of_all"]), delta_of_all)
    notes = dict.fromkeys(run["note"] for run in record["runs"].values())
    rich_table.caption = " ".join(filter(None, notes)) or None
    return rich_table


def _shown(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4f}"


def privacy_record(config: Config, summary: Mapping[str, Any]) -> Record:
    """Return the part of a run's summary that a suite stores about privacy.

    For a run that is not private, the result is {}.
    """
    private = summary.get("privacy")
    if private is None:
        return {}
    values = {name: private.get(name) for name in ("epsilon", "certified", "clients", "noise")}
    assumptions = {
        "adjacency": adjacency_of(private),
        "sampling": private.get("sampling", "poisson"),
    }
    return {"privacy": {**values, **assumptions, "target": config.privacy.epsilon}}


def with_privacy_columns(
    made: Mapping[str, Rows], heads: Sequence[Record], records: Sequence[Record]
) -> Mapping[str, Rows]:
    """Add columns with the certified epsilon, and a table of clients, to the tables of a suite.

    `epsilon` is nan for an unfinished run.
    """
    clients = [
        head
        | {
            "client": EVERYONE if client == EACH else int(client),
            "epsilon": value,
            "target": record["privacy"]["target"],
        }
        | _compared(record["privacy"])
        for head, record in zip(heads, records, strict=True)
        for client, value in (record.get("privacy", {}).get("clients") or {}).items()
    ]
    if not clients:
        return made
    runs = []
    for row, record in zip(made["runs"], records, strict=True):
        privacy = record.get("privacy") or {}
        epsilon = privacy.get("epsilon")
        spent = {"epsilon": math.nan if epsilon is None else epsilon, **_compared(privacy)}
        runs.append({**row, **spent, "certified": bool(privacy.get("certified"))})
    return {**made, "runs": runs, "clients": clients}


def _compared(privacy: Mapping[str, Any]) -> Record:
    """Return the adjacency and the sampling for which an epsilon holds.

    Runs of early versions of fedmuon did not store them. These runs used zero-out adjacency and
    Poisson sampling.
    """
    missing = {"adjacency": "zero-out", "sampling": "poisson"} if privacy else {}
    return {name: privacy.get(name, missing.get(name, "")) for name in ("adjacency", "sampling")}
