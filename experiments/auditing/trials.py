"""`fedmuon privacy audit`: check the accountant with simulated runs, half of them with a canary.

The fast mode `projected` draws only the component of each release along the canary, and tests the
claim of the accountant. `release` takes real private steps of a small network, and tests whether
these steps satisfy the claim.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from rich.table import Table

from fedmuon.core.errors import InputError
from fedmuon.experiments.tables import columns
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.privacy.audit import (
    CONFIDENCE,
    Setting,
    both_bounds,
    counted,
    limits_of_trials,
    projected,
    require_enough,
    trials,
)

TRIALS = {"projected": 100_000, "release": 2_000}  # default number of trials
MOST = 4_000_000  # maximum number of released tensors, plus 2 per release: about half an hour
MOST_TRIALS = 10**7
MEANINGS = {
    "counted": (">=", "uses only the counts of the trials; cannot exceed about ln(trials)"),
    "tilted": (">=", "assumes the declared Gaussian noise; needs more trials than 1/delta"),
    "joint": ("<=", "epsilon that the accountant certifies"),
    "per_release": ("<=", "epsilon if each block had drawn its own lot"),
}


def audit(
    setting: Setting,
    delta: float,
    count: int | None,
    seed: int,
    code: str,
    lot: float,
    population: int,
    say: Callable[[str], None] = lambda note: None,
) -> dict[str, Any]:
    """Compare the lower bounds from canaries with the accountant's claim in both modes.

    Args:
        setting: The mechanism under audit.
        delta: The privacy parameter δ.
        count: Number of trials with the canary. The number of trials without the canary is the
            same. None uses `TRIALS`.
        seed: Seed of all random numbers that are not secret.
        code: `projected` or `release`.
        lot: The expected size of a lot, for `release`.
        population: The number of examples, for `release`.
        say: Called before the trials, with a note if there are too few trials to test the claim,
            otherwise with "".
    """
    if code not in TRIALS:
        raise InputError(f"code '{code}' is unknown: use {' or '.join(TRIALS)}")
    count = TRIALS[code] if count is None else count
    if not 1 <= count <= MOST_TRIALS:
        raise InputError(
            f"--trials is {count}, but it must be at least 1 and at most {MOST_TRIALS:,}."
        )
    if seed < 0:
        raise InputError(f"--seed is {seed}, but it must be at least 0.")
    require_enough(count)
    rng = np.random.default_rng(seed)
    joint, per_release = (
        epsilon(*setting[:3], delta, setting.blocks, mode) for mode in ("joint", "per-release")
    )
    if code == "projected":
        limits = {"note": ""}
        say("")
        bounds = both_bounds(trials(setting, projected(setting, rng), count), delta, rng)
    else:  # use counts only, because the noise is under audit; `tilted` would assume it
        limits = limits_of_trials(count, delta, joint.upper)
        say(limits["note"])
        if 2 * count * setting.steps * (setting.blocks + 2) > MOST:
            raise InputError(
                f"{count} trials of {setting.steps} steps with {setting.blocks} blocks take half "
                "an hour or more with --code release. Use fewer trials, or --code projected."
            )
        # This module imports torch, which `projected` does not need.
        from fedmuon.experiments.auditing import private_step

        # `rng` draws the network's parameters. Lots and noise use a secret generator.
        step = private_step.step(setting.noise_multiplier, lot, population, setting.blocks, rng)
        bounds = (counted(trials(setting, step.observe, count), delta),)
    best = max(bound.epsilon for bound in bounds)
    return {
        "epsilon_at_least": best,
        **{bound.method: bound.epsilon for bound in bounds},
        "joint": joint.upper,
        "per_release": per_release.rdp,
        "below_joint": best <= joint.upper,
        "refutes_per_release": bounds[0].epsilon > per_release.rdp,  # bounds[0] uses only counts
        "adjacency": joint.adjacency,
        "sampling": joint.sampling,
        "confidence": CONFIDENCE,
        **limits,
        "trials": count,
        "code": code,
        "delta": delta,
        **setting._asdict(),
    }


def table(record: dict[str, Any]) -> Table:
    """Return the record as a table for printing."""
    rows = [
        (name, f"{sign} {record[name]:.4f}", meaning)
        for name, (sign, meaning) in MEANINGS.items()
        if name in record
    ]
    printed = columns("audit by canaries", ("epsilon", "", ""), rows, left=3)
    hold = "lower bounds hold together" if "tilted" in record else "lower bound holds"
    words = [
        f"The audit simulated {record['trials']} trials with the canary and {record['trials']} "
        f"trials without it (code: {record['code']}, adjacency: {record['adjacency']}, delta = "
        f"{record['delta']:g}). The {hold} with {record['confidence']:.0%} confidence.",
        *filter(None, [record["note"]]),
    ]
    if not record["below_joint"]:
        words.append(
            "The joint epsilon is refuted: the code releases more than the accountant counts."
        )
    if record["refutes_per_release"]:
        words.append("The per-release epsilon is refuted.")
    printed.caption, printed.caption_justify = " ".join(words), "left"
    return printed
