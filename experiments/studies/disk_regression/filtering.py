"""Which runs of noisy gradient descent are compared: as printed, or each method at its best."""

from dataclasses import dataclass

import numpy as np

from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.slopes import NORMAL

NAMES = ("noisy-gd", "low-pass", "disk")


@dataclass(frozen=True)
class Setting:
    """One step size and gain for all methods and levels, or the best of each at each level."""

    name: str
    tuned: bool


SETTINGS = (Setting("one step size", False), Setting("tuned", True))


def chosen(
    rows: Columns, setting: Setting, name: str, noise: float
) -> tuple[float, float, np.ndarray]:
    """(gain, step size, excess losses of the seeds) of a method at a noise level: of the runs of
    the setting, those with the lowest mean."""
    mine = (rows["method"] == name) & (rows["noise"] == noise)
    mine &= setting.tuned | (rows["shared"] == 1)
    excess = rows["loss"] - rows["floor"]
    kinds = np.unique(np.stack([rows["gain"][mine], rows["lr"][mine]], 1), axis=0)
    every = [
        (float(gain), float(lr), excess[mine & (rows["gain"] == gain) & (rows["lr"] == lr)])
        for gain, lr in kinds
    ]
    return min(every, key=lambda one: one[2].mean())


def compared(
    rows: Columns, setting: Setting, name: str, other: str, noise: float
) -> tuple[float, float]:
    """A method's excess loss minus another's, over the mean of the other's: a 95% interval.

    At one level, runs of one seed share their noise, so the differences are taken seed by seed.
    """
    mine, theirs = (chosen(rows, setting, one, noise)[2] for one in (name, other))
    change = (mine - theirs) / theirs.mean()
    reach = NORMAL * change.std(ddof=1) / np.sqrt(len(change))
    return float(change.mean() - reach), float(change.mean() + reach)
