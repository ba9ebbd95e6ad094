"""Whether models know more than a guess."""

import numpy as np

from fedmuon.analysis.report.numbers import number

ABOVE = 0.05  # what is no further above a guess's accuracy, or half of that if less, is near it


def luck(classes: int, held_out: int) -> float:
    """The accuracy up to which a model cannot be told from a guess among the classes: three
    standard deviations above 1/classes on so many held-out samples."""
    guess = 1 / classes
    return float(guess + 3 * np.sqrt(guess * (1 - guess) / held_out))


def near_chance(accuracies: np.ndarray, classes: int, held_out: int) -> str:
    """How many of the runs that ended so know hardly more than a guess; nothing if none does. A
    run without an accuracy has diverged."""
    guess, known = 1 / classes, accuracies[np.isfinite(accuracies)]
    near = known[known <= max(luck(classes, held_out), guess + min(ABOVE, guess / 2))]
    if classes < 2 or not len(near):
        return ""
    who = "Every run" if len(near) == len(known) else f"{len(near)} of {len(known)} runs"
    who += " that lasted" * (len(known) < len(accuracies))
    ends = dict.fromkeys(number(end, 3) for end in (near.min(), near.max()))
    return (
        f"{who} ended near chance, with an accuracy of {' to '.join(ends)}: a guess among "
        f"{classes} classes has {number(guess, 3)}."
    )
