"""`fedmuon privacy audit --one-run`: train a run with canaries, and audit its releases.

The usual training code runs the config and writes its ledger. Canaries replace some samples, or
some clients at client level (`canaries.py`). Runs that differ in one coin have zero-out adjacency,
because no sampling rate depends on a coin. Zero-out is a special case of the other adjacencies
(`dominating_pairs.py`), so an epsilon that this audit refutes is also refuted for the other
adjacencies. The number of guesses is chosen before the run, by a rehearsal that draws likelihood
ratios from the declared mechanism. The coins are stored in a separate folder.
"""

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.table import Table

from fedmuon.analysis.report.numbers import number
from fedmuon.config.facts import FACTS
from fedmuon.config.load import Config
from fedmuon.config.methods import PRIVATE
from fedmuon.core import files
from fedmuon.core.arrays import array_bytes, read_tensors
from fedmuon.core.choices import is_own
from fedmuon.core.demands import Demand, Fact, Trait, require_allowed
from fedmuon.core.errors import InputError
from fedmuon.core.files import finite
from fedmuon.core.locks import held
from fedmuon.experiments.auditing.canaries import ClientAuditor, ExampleAuditor, require_classes
from fedmuon.experiments.tables import columns
from fedmuon.federated.accountant import client_name
from fedmuon.federated.build import resolve
from fedmuon.federated.experiment import Experiment
from fedmuon.optim.client_privacy import level_of
from fedmuon.privacy import audit
from fedmuon.privacy.accounting.composition import account, merge
from fedmuon.privacy.accounting.dominating_pairs import hardest
from fedmuon.privacy.audit import CONFIDENCE, Guesses, Setting
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.runs.directory import AUDIT, Record, RunDirectory
from fedmuon.runs.loop import OnRoundEnd, OnStart, train
from fedmuon.runs.prepare import prepare

ODDS = (
    "The audit refutes the certified epsilon at this confidence. This happens in at most one of "
    "twenty correct runs. Before you search for an error, repeat the audit. A new audit includes "
    "other canaries at random."
)
# The assumption of each bound. All bounds use the tail of the same number of right guesses, so the
# largest bound fails no more often than a single bound may fail.
BOUNDS = {
    "binomial": "only the counts of right guesses (Steinke, Nasr, Jagielski 2023)",
    "trade_off": "only the counts of right guesses (Mahloujifar et al. 2024)",
    "declared": "the declared mechanism, of which only sigma may be wrong",
}
COINS = "canaries.npz"
LEAST = 10  # minimum number of canaries
# Maximum number of rehearsed canaries, and maximum number of normal variates for the rehearsal.
REHEARSALS, NUMBERS = 10_000, 2**23
SEES = ("releases", "model")
ENTRIES = "its canaries are entries of all parameters"
BY_ONE_RUN: Demand[Config] = Demand(
    lambda subject: "an audit by one run",
    {
        Trait.OTHER_PROCESSES: "it must see the releases",
        Trait.SENDS_VARIABLES: "its canaries are entries of parameters",
        Trait.TRAINS_VARIABLES: ENTRIES,
        Trait.HOSTILE_CLIENTS: "it needs the releases of clients that follow the mechanism",
    },
)
KNOWN_LAW: Demand[Mechanism] = Demand(  # of the releases of a mechanism
    lambda mechanism: "an audit by one run",
    {
        Trait.FIXED_ORDER: "it supports only Poisson lots",
        Trait.ADAPTS_CLIPPING: "it supports only a fixed clipping bound",
        Trait.TRAINS_VARIABLES: ENTRIES,
    },
)
OF_EXAMPLES: Demand[Config] = Demand(
    lambda config: "" if config.privacy.level == "client" else "an audit by one run",
    {Trait.HOLDS_OUT_SAMPLES: "it draws its canaries from all training samples"},
)


def _fixed_order(mechanism: Mechanism) -> str:
    order = mechanism.fixed_order
    return f"[privacy] sampling = '{order.sampling}'" if order else ""


def _quantile(mechanism: Mechanism) -> str:
    quantile = mechanism.quantile
    return f"[privacy] quantile = {quantile.wanted:g}" if quantile else ""


def _space(mechanism: Mechanism) -> str:
    return "" if mechanism.space is None else "this value of [federation] adapters"


LAW_FACTS = (  # facts of a mechanism that change the law of its releases
    Fact(Trait.FIXED_ORDER, _fixed_order, "Set [privacy] sampling = 'poisson'"),
    Fact(Trait.ADAPTS_CLIPPING, _quantile, "Leave [privacy] quantile out of the config"),
    Fact(Trait.TRAINS_VARIABLES, _space, "Set [federation] adapters = 'factors'"),
)


def execute(
    config: Config,
    out: Path,
    canaries: int | None = None,
    sees: str = "releases",
    rng: np.random.Generator | None = None,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
    say: Callable[[str], None] = lambda note: None,
) -> Record:
    """Train the config with canaries, guess their coins, and record which claims are refuted.

    Args:
        config: A private run with the engine "inline".
        out: A new folder for the run.
        canaries: Number of canaries. None means half of the samples, or half of the clients at
            client level.
        sees: The data that the guesses use: `releases`, or only the final `model`.
        rng: The generator of the coins. With None, the coins cannot be reproduced.
        on_round_end: Called with the record of each round.
        on_start: Called with the number of finished rounds and the number of all rounds.
        say: Called before the run with a note on the limits of the audit, or with "" if there are
            no limits.

    Returns:
        The record of the audit, which is also written to `one-run.json`.
    """
    start, rng = time.monotonic(), rng or np.random.default_rng()
    config = resolve(config)
    count = max(LEAST, _most_canaries(config)[0] // 2) if canaries is None else canaries
    _require_auditable(config, count, sees)
    with held(out):
        run = prepare(config, out, require=_require_known_law)
        files.write_bytes(out / AUDIT, json.dumps({"canaries": count, "finished": False}).encode())
        kind = ClientAuditor if config.privacy.level == "client" else ExampleAuditor
        auditor = kind.draw(run, count, rng)
        claimed = auditor.claim(run)
        settings = [claimed.settings[client] for client in auditor.clients]
        ratios = rehearse(settings, rng)
        guess_count = count // 8
        if sees == "releases":
            guess_count = audit.worthwhile(ratios, count, 1 - CONFIDENCE)
        shares: Record = {}  # the shares of a cohort's noise, only under distributed trust
        if isinstance(auditor, ClientAuditor) and auditor.level.shared:
            shares = {"shares": auditor.level.cohort, "honest": auditor.level.shares}
        raised = audit.MORE_HONEST if shares else audit.MORE_CANARIES
        limits = audit.limits_of_guesses(count, guess_count, claimed, raised)
        say(limits["note"])
        summary = train(*auditor.with_canaries(run), on_round_end, on_start)
        if sees == "releases":
            scores = auditor.scores()
        else:
            first, last = (
                {name: value[None] for name, value in read_tensors(out / file)[0].items()}
                for file in ("initial.safetensors", "model.safetensors")
            )
            scores = auditor.scores_of_model(first, last)
        guesses, part = audit.guess_coins(scores, auditor.included, guess_count), 1.0
        if isinstance(auditor, ClientAuditor) and shares:
            share_count = shares["shares"] if sees == "model" else auditor.shares_seen
            shares["shares_seen"], part = share_count, share_count / shares["shares"]
        record = {
            **judge(guesses, out, summary["privacy"], auditor.adjacency, part),
            "sees": sees, **shares, **limits,
            "train_seconds": float(run.directory.records()[-1]["train_seconds"]),
            "seconds": round(time.monotonic() - start, 3),
        }  # fmt: skip
        _write(out, record, auditor, scores)
    return record


def _most_canaries(config: Config) -> tuple[int, str]:
    """Return the maximum number of canaries, and the word for what they replace."""
    if config.privacy.level == "client":
        return config.federation.clients, "clients"
    return config.data.train, "samples"


def _require_auditable(config: Config, canaries: int, sees: str) -> None:
    if sees not in SEES:
        raise InputError(f"--sees {sees} is unknown: use {' or '.join(SEES)}")
    recipe = config.local.recipe
    if recipe not in PRIVATE and not is_own(recipe) and config.privacy.level != "client":
        raise InputError(
            f"[local] recipe = '{recipe}' makes no privacy claim, so there is nothing to audit. "
            "Choose a recipe dp-... or disk-..., or set [privacy] level = 'client'."
        )
    require_allowed(config, (BY_ONE_RUN, OF_EXAMPLES), FACTS)
    limit, whose = _most_canaries(config)
    if canaries < LEAST:
        raise InputError(
            f"the number of canaries is {canaries}, but it must be at least {LEAST}, because "
            "fewer canaries show nothing. Increase --canaries, or use more data."
        )
    if canaries > limit:
        raise InputError(
            f"the number of canaries is {canaries}, but it must be at most {limit}, because "
            f"canaries replace {whose}. Lower --canaries."
        )


def _require_known_law(experiment: Experiment) -> None:
    """Raise an error if the run cannot be audited.

    The releases must contain noise, the likelihood of the releases must be known, and the samples
    must have labels that can mark canaries.
    """
    released = level_of(experiment.recipe.stages) or experiment.recipe.mechanism
    if released is None or not released.noise:
        raise InputError(
            "the run adds no noise, so there is no privacy to audit. Set [privacy] noise above 0."
        )
    if isinstance(released, Mechanism):
        require_allowed(released, (KNOWN_LAW,), LAW_FACTS)
        require_classes(experiment.shards)


def rehearse(settings: list[Setting], rng: np.random.Generator) -> np.ndarray:
    """Draw log-likelihood ratios of synthetic canaries, half of which are included.

    The declared mechanism draws the ratios, as if no other example had an entry at the canary's
    place. The number of synthetic canaries of a setting is proportional to the number of its
    entries in `settings`.
    """
    ratios = []
    for setting, count in sorted(Counter(settings).items()):
        trials = min(REHEARSALS, NUMBERS // max(1, setting.steps))
        share = max(1, round(trials * count / len(settings) / 2))
        if not setting.steps:
            ratios.append(np.zeros(2 * share))
            continue
        tried = audit.trials(setting, audit.projected(setting, rng), max(audit.FEWEST, share))
        ratios += [part[:share] for part in tried]
    return np.concatenate(ratios)


def judge(
    guesses: Guesses, out: Path, private: Record, adjacency: str, part: float = 1.0
) -> Record:
    """Return the bounds from the guesses, and the guarantee of the run's ledger.

    Args:
        guesses: The guesses.
        out: The run folder.
        private: The table "privacy" of the run's summary.
        adjacency: The adjacency of two runs that differ in one coin.
        part: The fraction of the noise variance that the guesses see.
    """
    delta = private["delta"]
    ledger = Ledger.read(out / "ledger.jsonl")
    events = {}
    for client in ledger.clients():  # all releases of one client have the same rate and noise
        (events[client_name(client)],) = merge(ledger.events(client))
    counted = audit.bounds_by_counts(guesses, delta)
    times = audit.noise_below(
        guesses, hardest(events.values()), private["epsilon"], delta, CONFIDENCE
    )
    worst = events[private["client"]]
    quieter = dataclasses.replace(worst, noise_multiplier=times * worst.noise_multiplier)
    declared = account([quieter], delta).lower if np.isfinite(times) else 0.0
    noise = worst.noise_multiplier if private["unit"] == "client" else private["noise"]
    at_least = max(counted.values())
    return {
        "epsilon_at_least": at_least,
        **counted,
        "declared": declared,
        "noise_at_most": finite(times * noise / math.sqrt(part)),
        "epsilon": private["epsilon"],
        "epsilon_adjacency": private["adjacency"],
        "certified": private["certified"],
        "below": max(at_least, declared) <= private["epsilon"],
        "delta": delta,
        "confidence": CONFIDENCE,
        "canaries": guesses.canaries,
        "guesses": guesses.made,
        "right": guesses.right,
        "adjacency": adjacency,
        "unit": private["unit"],
    }


def coins(out: Path) -> Path:
    """Return the path of the coins of the run in `out`. The file is not in the run folder."""
    return out.with_name(f"{out.name}-coins") / COINS


def _write(
    out: Path, record: Record, auditor: ExampleAuditor | ClientAuditor, scores: np.ndarray
) -> None:
    content = {AUDIT: (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()}
    file = coins(out)
    with files.mendable(file, "write"):
        file.parent.mkdir(parents=True, exist_ok=True)
    held_apart = {**auditor.places, "included": auditor.included, "scores": scores}
    files.write_bytes(file, array_bytes(**held_apart))
    files.announce(out, content)
    files.write_bytes(out / AUDIT, content[AUDIT])


def read_record(folder: Path) -> Record | None:
    """Return the record of a finished audit, or None if no audit finished in this folder."""
    finished = (folder / AUDIT).exists() and (folder / "summary.json").exists()
    if not finished or AUDIT not in files.sums_of(folder):
        return None
    files.require_sound(folder, [AUDIT])
    return json.loads(files.read_text(folder / AUDIT))


def read_finished(folder: Path) -> Record:
    """Return the record of a finished audit.

    Raises:
        InputError: If the run is not finished, or had no canaries.
    """
    if (record := read_record(folder)) is not None:
        return record
    run = RunDirectory(folder)
    if run.summary() is None:
        raise InputError(
            f"{folder} contains no finished audited run. Pass a config file to start an audit, "
            "or the folder of a finished audited run."
        )
    run.require_resumable()
    raise InputError(
        f"{folder} was trained without canaries, so it cannot be audited. Audit its config "
        f"instead: fedmuon privacy audit --one-run {folder / 'config.toml'} --out another-folder"
    )


def table(record: Record) -> Table:
    """Return the record as a table for printing."""
    noise = record["noise_at_most"]
    sigma = "sigma may have any value" if noise is None else f"sigma is at most {number(noise)}"
    rows = [
        ("binomial", f">= {record['binomial']:.4f}", BOUNDS["binomial"]),
        ("trade-off", f">= {record['trade_off']:.4f}", BOUNDS["trade_off"]),
        ("declared", f">= {record['declared']:.4f}", f"if only sigma may be wrong: {sigma}"),
        ("certified" if record["certified"] else "accounted for", f"<= {record['epsilon']:.4f}",
         f"by the run's ledger, {record['epsilon_adjacency']}"),
    ]  # fmt: skip
    printed = columns("audit by one run", ("epsilon", "", ""), rows, left=3)
    words = [
        f"The attack saw the {record['sees']}, and {record['right']} of its {record['guesses']} "
        f"guesses about {record['canaries']} canaries are right. Unit: {record['unit']}; "
        f"adjacency: {record['adjacency']}; delta = {number(record['delta'], 3)}. Each bound "
        f"holds with {record['confidence']:.0%} confidence. The audit took "
        f"{record['seconds']:.1f} s, of which training took {record['train_seconds']:.1f} s."
    ]
    words += [*collusion(record), record.get("note", ""), "" if record["below"] else ODDS]
    printed.caption, printed.caption_justify = " ".join(filter(None, words)), "left"
    return printed


def collusion(record: Record) -> list[str]:
    """Return notes about an audit under distributed trust."""
    if "shares" not in record:
        return []
    shares, honest = record["shares_seen"], record["honest"]
    words = f"In the audit, a sum contains up to {shares} of {record['shares']} shares of noise"
    if shares == honest:
        return [f"{words}, the same number that epsilon counts."]
    return [
        f"{words}, but epsilon counts only {honest} shares. Therefore the audit is a weaker test "
        "of epsilon."
    ]
