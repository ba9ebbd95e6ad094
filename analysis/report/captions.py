"""What a reader should see in each figure of a report."""

from typing import Any

import numpy as np

TITLES = {
    "phase": "Step size and regularization (001, Figure 2)",
    "scaling-lr": "Step size",
    "scaling-lambda": "Regularization",
    "scaling-n": "Sample size (001, Figures 3a and 3b)",
    "exposure": "Exposure and perturbation (001, Figure 3c)",
    "gap": "Gap beside bound (001, Table 2)",
    "census": "Every neighbour beside its client's certificate",
    "curves": "Loss and accuracy by round",
    "curves-seconds": "Loss and accuracy by seconds of training",
    "terminal": "Where the variants end",
    "followed": "Loss and accuracy along the sweep: ",
    "clients": "What each client has spent",
    "epsilon": "Accuracy at each ε",
}
_LINES = "Points are runs and lines their means; every other setting is averaged over. "
CAPTIONS = {
    "phase": (
        "The bound and the mean perturbation ‖X − X′‖_F, each averaged over all runs with that η "
        "and λ. Both should grow to the right and upwards. A bound of B or more, the range of the "
        "loss, is vacuous: no gap exceeds it."
    ),
    "scaling-lr": _LINES + "Bound and perturbation should rise with η.",
    "scaling-lambda": _LINES + "Bound and perturbation should rise with 1/√λ.",
    "scaling-n": _LINES
    + (
        "Both should fall with n. The perturbation should fall with slope −1, as replacing one of "
        "n samples moves a client's gradient by at most 2G/n_i; the bound falls more slowly, "
        "because part of it shrinks only like 1/√n."
    ),
    "exposure": (
        "Each point is a run and one neighbour of it. Samples of clients that took part more, and "
        "that hold fewer samples, should move the model more."
    ),
    "gap": (
        "Each run's measured gap, with the interval for its finite held-out set, should lie below "
        "its bound."
    ),
    "census": (
        "First every neighbour that was run, client by client with the smallest perturbation at "
        "the left of its strip; then which share of all neighbours moved the model how much at "
        "most."
    ),
    "curves": "Lower losses and higher accuracies are better.",
    "curves-seconds": (
        "The same against the seconds that the rounds took, evaluation left out: a variant that "
        "needs fewer rounds wins here only if its rounds are not dearer by more."
    ),
    "followed": "A line is one value of the sweep.",
    "clients": (
        "Every client has an account of its own: how large its share of examples in a lot is, and "
        "how often it took part. A colour is a seed, whose line stands for all variants that spend "
        "alike."
    ),
    "epsilon": (
        "Each mark is where the runs with one noise multiplier end, at the ε that this noise "
        "spends. Higher and further left is better. Accuracies were measured on held-out samples "
        "and are not released, and what was tried to find step sizes and bounds is in no ε."
    ),
    "terminal": "Each mark is where the runs with that value end.",
}
# What is said only where something of that label was drawn, or an axis has that scale.
_SCALING = {"mean certificate": "The certificate is the mean over the neighbours that were tried."}
OF_LABELS = {
    **dict.fromkeys(("scaling-lr", "scaling-lambda", "scaling-n"), _SCALING),
    "clients": {
        "target": "The noise is the least that keeps the client with the most below the target: "
        "no point may lie above the dashed line.",
    },
    "exposure": {
        "certificate": "No point may lie above the certificate.",
        "the same label": "A replacement that keeps the label moves the model less than one that "
        "does not, so each kind has its own mark.",
        "zero, off the log axes": "Neighbours of clients that never took part moved nothing; they "
        "are counted, and marked at the foot, because a log axis has no zero.",
    },
    "gap": {
        "bound with $C_{hp}$ = 1": "Diamonds are the same bound with C_hp = 1, a value nothing "
        "proves.",
        "bound, constants of all models": "Squares stand on the constants of all models, as 001 "
        "has them.",
        "symlog": "As bounds dwarf the gaps, the axis is linear near zero and logarithmic beyond.",
    },
    "census": {
        "certificate": "A bar is the client's certificate: no point may lie above it.",
        "0, off the log axis": "Clients that never took part have perturbation 0, which a log axis "
        "cannot show; crosses mark them.",
        "largest of": "The dashed line is the largest that so few random ones would show on "
        "average.",
    },
}


def of_drawn(name: str, figure: Any) -> str:
    """What is said of a figure because of what was drawn in it."""
    return " ".join(
        sentence
        for label, sentence in OF_LABELS.get(name, {}).items()
        if any(one.startswith(label) for one in _drawn(figure))
    )


def _drawn(figure: Any) -> list[str]:
    """The labels of everything that has finite points, and the scales of the axes."""
    pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    held = [(one, str(label)) for pair in pairs for one, label in pair]
    labels = [label for one, label in held if _seen(one)]
    return [*labels, *(axes.get_yscale() for axes in figure.axes)]


def _seen(drawn: Any) -> bool:
    """Whether anything of a line is there; what is no line is."""
    ends = np.asarray(drawn.get_ydata(), dtype=float) if hasattr(drawn, "get_ydata") else [0.0]
    return bool(np.isfinite(ends).any())
