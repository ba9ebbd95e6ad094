"""`fedmuon privacy audit`: canaries against the accountant, through the release that trains.

`projected` draws what a release is along the canary; `release` clips the canary's gradients, draws
Poisson lots and calls `fedmuon.privacy.release` on tensors, then projects what came out.
"""

import math
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedmuon.errors import InputError
from fedmuon.privacy.accounting import epsilon
from fedmuon.privacy.audit import (
    Lots,
    Observe,
    Setting,
    counted,
    likelihood_ratio,
    projected,
    tilted,
    trials,
)

CODES = ("projected", "release")
SHAPE = (2, 3)  # of a block of the audited release
BOUND = 0.1  # C of 000; no number of an audit depends on it
__all__ = ["CODES", "audit", "likelihood_ratio", "real_lots", "real_release", "table"]


def real_release(setting: Setting, lot: float, bound: float = BOUND) -> Observe:
    """The release of training, with one canary whose gradient is clipped in every block."""
    import torch

    from fedmuon.privacy.clipping import Clipping
    from fedmuon.privacy.release import release

    clipping = Clipping("block", bound)
    names = [f"block{number}" for number in range(setting.blocks)]
    raw = {
        name: torch.full(SHAPE, 100.0 * bound * (-1) ** number, dtype=torch.float64)
        for number, name in enumerate(names)
    }
    factors = clipping.factors({name: value.square().sum()[None] for name, value in raw.items()})
    canary = {name: factors[name] * value for name, value in raw.items()}

    def observe(rng: np.random.Generator, held: np.ndarray) -> np.ndarray:
        def normal(shape: tuple[int, ...], block: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape))

        sums = np.empty(held.shape)
        for step, drawn in enumerate(torch.from_numpy(held.T.astype(np.float64))):
            given = {name: drawn[:, None, None] * value for name, value in canary.items()}
            found = release(given, clipping, setting.noise_multiplier, lot, normal).gradient
            along = sum((found[name] * canary[name]).sum((1, 2)) for name in names)
            sums[:, step] = torch.as_tensor(along).numpy() * lot / bound**2
        return sums / math.sqrt(setting.blocks)

    return observe


def real_lots(population: int) -> Lots:
    """The lots of training; the canary is the last of the examples."""
    from fedmuon.privacy.noise import poisson_rows

    def lots(rng: np.random.Generator, shape: tuple[int, int], rate: float) -> np.ndarray:
        held = [
            population - 1 in poisson_rows(rng, population, rate) for _ in range(math.prod(shape))
        ]
        return np.reshape(held, shape)

    return lots


def audit(
    setting: Setting, delta: float, count: int, seed: int, code: str, lot: float, population: int
) -> dict[str, Any]:
    """What canaries show, beside what the accountant claims in both of its modes."""
    if code not in CODES:
        raise InputError(f"code '{code}' is unknown: use {' or '.join(CODES)}")
    joint, printed = (epsilon(*setting[:3], delta, setting.blocks, mode) for mode in
                      ("joint", "per-release"))  # fmt: skip
    rng = np.random.default_rng(seed)
    if code == "release":
        found = trials(setting, real_release(setting, lot), count, rng, real_lots(population))
    else:
        found = trials(setting, projected(setting), count, rng)
    shown = [counted(found, delta), tilted(found, delta, rng)]
    best = max(bound.epsilon for bound in shown)
    return {
        "epsilon_at_least": best,
        **{bound.method: bound.epsilon for bound in shown},
        "joint": joint.upper,
        "per_release": printed.rdp,
        "below_joint": best <= joint.upper,
        "refutes_per_release": shown[0].epsilon > printed.rdp,
        "confidence": shown[0].confidence,
        "trials": count,
        "code": code,
        "delta": delta,
        **setting._asdict(),
    }


def table(record: dict[str, Any]) -> Table:
    """The same for people."""
    told = {
        "counted": "counts of the trials alone; up to about ln(trials)",
        "tilted": "where the noise is the declared Gaussian; needs more trials than 1/delta",
        "joint": "what the accountant certifies",
        "per_release": "what composing the blocks as if each drew its own lot would claim",
    }
    shown = Table("epsilon", "", "", title="audit by canaries", title_justify="left")
    for name, meaning in told.items():
        sign = ">=" if name in ("counted", "tilted") else "<="
        shown.add_row(escape(name), f"{sign} {record[name]:.4f}", meaning)
    shown.caption = (
        f"{record['trials']} trials with and as many without the canary ({record['code']}), "
        f"delta = {record['delta']:g}, confidence {record['confidence']:.0%} (counted) and 99.9% "
        "(tilted). "
        + ("The per-release claim is refuted." if record["refutes_per_release"] else "")
    )
    return shown
