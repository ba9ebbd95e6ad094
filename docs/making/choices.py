"""Tables of stored results for the pages that help to choose."""

import re

from docs.making import results
from docs.making.papers import table

ENDS = re.compile(r"(.+) ends at least as accurate as (.+), each at its own best step sizes\.")
PRIVATE = re.compile(r"(.+) ends with an accuracy at or above that of (.+) at every ε, zero-out\.")
AT_EPSILON = re.compile(r"[\d.]+ against [\d.]+ \((\S+ ± \S+)\) at (\d+)")


def compared(name: str, *method: str) -> str:
    """Return a table that compares a method with the other methods of a suite.

    The numbers are the differences of their accuracies in percentage points.
    """
    held = results.read(name)
    if held is None:
        raise ValueError(f"docs/results has no results of the suite {name}: run `make results`")
    first, rows, head = " ".join(method), [], ["compared with"]
    for claim in held["claims"]:
        if (said := ENDS.fullmatch(claim["claim"])) and said[1] == first:
            places = dict(part.split(": ") for part in claim["detail"].split("; "))
            head = ["compared with", *places]
            rows.append([said[2], *places.values()])
    return table(head, rows)


def private(name: str) -> str:
    """Return a table of accuracy differences between private optimizers.

    Each ε has its own column.
    """
    held = results.read(name)
    if held is None:
        raise ValueError(f"docs/results has no results of the suite {name}: run `make results`")
    rows, epsilons = [], []
    for claim in held["claims"]:
        if said := PRIVATE.fullmatch(claim["claim"]):
            found = AT_EPSILON.findall(claim["detail"])
            epsilons = [f"ε = {one}" for _, one in found]
            rows.append([f"{said[1]} − {said[2]}", *(one for one, _ in found)])
    return table(["difference of accuracies", *epsilons], rows)
