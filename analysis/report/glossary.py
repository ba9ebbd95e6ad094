"""What the words and symbols of a page mean: of those that occur on it."""

import re

# term: (what it looks like on a page, what it means)
_TERMS = {
    "η": (
        r"η",
        "The step size of a local step.",
    ),
    "λ": (
        r"λ",
        "The regularization of the smoothed polar factor: a singular value s becomes "
        "s/√(s² + λ), and 1/√λ is the map's Lipschitz constant.",
    ),
    "α": (
        r"label skew|\bα\b",
        "Of data: how evenly labels are spread over clients (Dirichlet; small is skewed). Of "
        "noise: its tail index; the noise has moments below α (2 is Gaussian).",
    ),
    "κ": (
        r"κ",
        "In 003: the gain of DiSK's filter, 1 being no filter. In 004: the degree of a "
        "Newton–Schulz polynomial.",
    ),
    "γ": (
        r"γ",
        "In 003: how far ahead DiSK looks for its second gradient.",
    ),
    "σ": (
        r"\bσ\b",
        "The standard deviation of the noise; of privacy's, in units of the clipping bound.",
    ),
    "n, N, K, E, R": (
        r"participants a round|local steps",
        "Training samples; clients; clients that take part in a round; local steps a round; "
        "rounds.",
    ),
    "X⁰": (
        r"X⁰",
        "The model before the first round.",
    ),
    "neighbour": (
        r"perturbation|[Cc]ensus",
        "The same run with one training sample replaced, and every other draw the same.",
    ),
    "perturbation": (
        r"perturbation",
        "‖X − X′‖_F: how far a neighbour's last model is from the run's.",
    ),
    "Y_i(C), exposure": (
        r"Y_i|[Ee]xposure",
        "How much the schedule C of who took part lets the steps of client i amplify a "
        "difference in its data (001, Theorem 4.1).",
    ),
    "Ψ": (
        r"Ψ",
        "A bound on all exposures at once when the schedule is drawn uniformly, except with "
        "probability ρ (001, (15)).",
    ),
    "certificate": (
        r"[Cc]ertificate",
        "Δ_i Y_i(C): a proved bound on the perturbation of every neighbour in a sample of "
        "client i; Δ_i is the most by which one sample moves the client's gradient.",
    ),
    "census": (
        r"[Cc]ensus",
        "Every training sample was replaced once, each by one other sample: all neighbours of "
        "that kind were run, not a few drawn.",
    ),
    "gap": (
        r"\b[Gg]aps?\b",
        "Population loss minus training loss, at the clients' label shares; its interval is "
        "that of the finite held-out set.",
    ),
    "bound": (
        r"\b[Bb]ounds?\b",
        "What theory allows the measured quantity to be at most; of a gap, 001, Theorem 4.1, "
        "except with probability δ.",
    ),
    "B, vacuous": (
        r"≥ B|bound / B|over B|range B|vacuous",
        "B is the range of the loss. A bound of B or more is vacuous: no gap can exceed it.",
    ),
    "sharp, paper": (
        r"\bsharp\b",
        "Constants of a map: `paper` as published, `sharp` proved here and never larger.",
    ),
    "explicit, C_hp": (
        r"C_hp|\bexplicit\b",
        "C_hp is the constant that 001 leaves open in its high-probability bound; the explicit "
        "form is proved, 1 is what the printed tables appear to use.",
    ),
    "ε, δ": (
        r"zero-out|add-remove|privacy",
        "Differential privacy: what one example, or one client, can change in the law of all "
        "releases; δ is the probability outside of ε.",
    ),
    "zero-out, add-remove": (
        r"zero-out|add-remove",
        "What an ε compares: the data with one example made to add 0, or with one example more "
        "or less.",
    ),
    "joint, per-release": (
        r"\b[Jj]oint(ly)?\b|per-release",
        "Joint: all blocks of a step are one release on one lot. Per-release: as if each had a "
        "lot of its own, which certifies nothing.",
    ),
    "‖·‖_*": (
        r"‖_\*|[Nn]uclear norm",
        "The nuclear norm: the sum of the singular values.",
    ),
    "undecided": (
        r"undecided",
        "The interval has values for the claim and values against it.",
    ),
    "not testable at this scale": (
        r"not testable at this scale",
        "The runs leave no interval (one seed), learned nothing that could be compared, have no "
        "bound, or one that no outcome could exceed.",
    ),
}


def terms_of(text: str) -> dict[str, str]:
    """The terms that occur in the text, with their meanings."""
    return {name: meaning for name, (seen, meaning) in _TERMS.items() if re.search(seen, text)}
