"""Tables of a run's clients: the distribution over their last records, and the worst clients."""

from collections.abc import Iterable, Sequence

import numpy as np
from rich.table import Table

from fedmuon.analysis.report.numbers import digits
from fedmuon.core.files import Record
from fedmuon.experiments.tables import columns

# Measure -> the words for it in tables, in this order. Other scores of a task follow.
WORDS = {
    "client_test_accuracy": "test accuracy", "client_test_loss": "test loss",
    "loss_after": "loss after", "loss_before": "loss before", "drift": "drift",
    "momentum_norm": "momentum norm", "cosine": "cosine to the mean", "samples": "samples",
    "participations": "rounds taken part",
}  # fmt: skip
RANKED_BY = ("client_test_accuracy", "client_test_loss", "loss_after")  # use the first available
COUNTS = ("samples", "participations")
LOW_IS_WORST = ("client_test_accuracy", "cosine", *COUNTS)
SHOWN = 5  # number of worst clients in the table


def last_of_each(records: Sequence[Record]) -> list[Record]:
    """Return the last record of each client, ordered by client."""
    last = {record["client"]: record for record in records}
    return [last[client] for client in sorted(last)]


def distributions(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return statistics of each measure over the last records of the clients.

    The statistics are the minimum, the mean of the worst tenth, the median, the mean and the
    maximum. Clients without the measure are left out.
    """
    last = last_of_each(records)
    others = dict.fromkeys(
        name
        for record in last
        for name in record
        if name not in WORDS and name.startswith("client_test")
    )
    statistics = {}
    for name in (*WORDS, *others):
        values = np.sort([float(record[name]) for record in last if name in record])
        if not len(values):
            continue
        tenth = -(-len(values) // 10)
        worst = values[:tenth] if name in LOW_IS_WORST else values[-tenth:]
        statistics[name] = {
            "min": float(values[0]),
            "worst tenth": float(worst.mean()),
            "median": float(np.median(values)),
            "mean": float(values.mean()),
            "max": float(values[-1]),
        }
    return statistics


def worst_clients(records: Sequence[Record]) -> tuple[str, list[Record]]:
    """Return the measure that ranks the clients, and their last records from worst to best.

    The measure is the first one in `RANKED_BY` that the records contain. If two clients are equal,
    the loss after the local steps determines their order.
    """
    last = last_of_each(records)
    name = known_names(RANKED_BY, last)[0] if known_names(RANKED_BY, last) else RANKED_BY[-1]
    sign = 1.0 if name in LOW_IS_WORST else -1.0
    ranked = [record for record in last if name in record]
    return name, sorted(
        ranked,
        key=lambda record: (
            sign * record[name],
            -record.get("loss_after", np.inf),
            record["client"],
        ),
    )


def client_tables(records: Sequence[Record], clients: int) -> list[Table | str]:
    """Return a table of the distribution over clients, and a table of the worst clients.

    `clients` is the number of clients N.
    """
    last = last_of_each(records)
    if not last:
        return ["No round is finished yet, so there are no client records."]
    statistics = distributions(records)
    head = list(next(iter(statistics.values())))
    rows = [
        [word_of(name), *(_cell(name, value) for value in summary.values())]
        for name, summary in statistics.items()
    ]
    title = f"last record of each client; {len(last)} of {clients} clients took part"
    parts: list[Table | str] = [columns(title, ("", *head), rows)]
    parts.append(
        "Worst tenth: the mean of the lowest tenth for accuracies, cosines and counts, and of the "
        "highest tenth for all other columns."
    )
    by, worst = worst_clients(records)
    names = known_names(dict.fromkeys((by, "loss_after", "drift", "cosine", "samples")), worst)
    cells = [
        [
            client_label(record["client"], record.get("name")),
            str(record["round"]),
            *(_cell(name, record.get(name)) for name in names),
        ]
        for record in worst[:SHOWN]
    ]
    headings = ["client", "round", *map(word_of, names)]
    headings = ["cosine" if heading == WORDS["cosine"] else heading for heading in headings]
    parts.append(columns(f"worst clients by {word_of(by)}", headings, cells, left=0))
    return parts


def known_names(names: Iterable[str], records: Sequence[Record]) -> list[str]:
    """Return the names that appear in at least one of the records."""
    return [name for name in names if any(name in record for record in records)]


def client_label(client: int | str, name: str | None = None) -> str:
    """Return the number of a client, with its name in the column of clients if there is one."""
    return str(client) if name is None else f"{client} ({name})"


def word_of(name: str) -> str:
    return WORDS.get(name, name.removeprefix("client_").replace("_", " "))


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    is_whole = name in COUNTS and float(value).is_integer()
    return f"{value:.0f}" if is_whole else digits(value)
