"""Tables of a run's clients: the distribution of their last records, and the worst of them."""

from collections.abc import Iterable, Sequence

import numpy as np
from rich.table import Table

from fedmuon.analysis.report.numbers import digits
from fedmuon.core.files import Record
from fedmuon.experiments.tables import columns

# Names of measures as tables have them, in this order. Other scores of a task follow.
WORDS = {
    "client_test_accuracy": "test accuracy", "client_test_loss": "test loss",
    "loss_after": "loss after", "loss_before": "loss before", "drift": "drift",
    "momentum_norm": "momentum norm", "cosine": "cosine to the mean", "samples": "samples",
    "participations": "rounds taken part",
}  # fmt: skip
RANKED_BY = ("client_test_accuracy", "client_test_loss", "loss_after")  # the first that is there
COUNTS = ("samples", "participations")
LOW_IS_WORST = ("client_test_accuracy", "cosine", *COUNTS)
SHOWN = 5  # of the worst clients


def last_of_each(records: Sequence[Record]) -> list[Record]:
    """The last record of each client, in the order of the clients."""
    last = {one["client"]: one for one in records}
    return [last[client] for client in sorted(last)]


def distributions(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """For each measure, over the last records of the clients that have it: minimum, mean of the
    worst tenth, median, mean and maximum."""
    last = last_of_each(records)
    others = dict.fromkeys(
        name for one in last for name in one if name not in WORDS and name.startswith("client_test")
    )
    found = {}
    for name in (*WORDS, *others):
        values = np.sort([float(one[name]) for one in last if name in one])
        if not len(values):
            continue
        tenth = -(-len(values) // 10)
        worst = values[:tenth] if name in LOW_IS_WORST else values[-tenth:]
        found[name] = {
            "min": float(values[0]),
            "worst tenth": float(worst.mean()),
            "median": float(np.median(values)),
            "mean": float(values.mean()),
            "max": float(values[-1]),
        }
    return found


def worst_clients(records: Sequence[Record]) -> tuple[str, list[Record]]:
    """By what clients are ranked, and their last records, the worst first: by the accuracy on their
    own test samples, then by the loss after their steps."""
    last = last_of_each(records)
    name = known_names(RANKED_BY, last)[0] if known_names(RANKED_BY, last) else RANKED_BY[-1]
    sign = 1.0 if name in LOW_IS_WORST else -1.0
    known = [one for one in last if name in one]
    return name, sorted(
        known, key=lambda one: (sign * one[name], -one.get("loss_after", np.inf), one["client"])
    )


def client_tables(records: Sequence[Record], clients: int) -> list[Table | str]:
    """The distribution over clients, and the worst of them; `clients` is N."""
    last = last_of_each(records)
    if not last:
        return ["No round is finished yet, so there are no records of clients."]
    found = distributions(records)
    head = list(next(iter(found.values())))
    rows = [
        [word_of(name), *(_cell(name, value) for value in one.values())]
        for name, one in found.items()
    ]
    title = f"last record of each client, {len(last)} of {clients} took part"
    parts: list[Table | str] = [columns(title, ("", *head), rows)]
    parts.append(
        "Worst tenth: the mean of the lowest tenth for accuracies, cosines and counts, and of the "
        "highest tenth for all other columns."
    )
    by, worst = worst_clients(records)
    names = known_names(dict.fromkeys((by, "loss_after", "drift", "cosine", "samples")), worst)
    cells = [
        [str(one["client"]), str(one["round"]), *(_cell(name, one.get(name)) for name in names)]
        for one in worst[:SHOWN]
    ]
    shown = ["client", "round", *map(word_of, names)]
    shown = ["cosine" if one == WORDS["cosine"] else one for one in shown]
    parts.append(columns(f"worst clients by {word_of(by)}", shown, cells, left=0))
    return parts


def known_names(names: Iterable[str], records: Sequence[Record]) -> list[str]:
    """The names that some of the records have."""
    return [name for name in names if any(name in one for one in records)]


def word_of(name: str) -> str:
    return WORDS.get(name, name.removeprefix("client_").replace("_", " "))


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    whole = name in COUNTS and float(value).is_integer()
    return f"{value:.0f}" if whole else digits(value)
