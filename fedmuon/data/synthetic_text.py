"""Synthetic tables and sentences in the file formats of E2E and DART, if the corpora are missing.

They contain nothing from the corpora. A private run can learn `restaurants`, with `lodgings`, which
has other names and wordings, as public data.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator

PARTS = {"train": 0.8, "dev": 0.1, "test": 0.1}  # shares of the tables
LEAST, MOST = 10, 5000  # number of tables: each part has one, and more different ones exist
FORMATS = ("e2e", "dart")
SYLLABLES = ("ba", "do", "ka", "li", "mo", "na", "po", "ra", "su", "ti", "vel", "zan")
# Domain -> field -> its values, and two wordings of each.
DOMAINS: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, str]]]] = {
    "restaurants": {
        "name": ((), ("{} serves", "At {} you eat")),
        "food": (("Thai", "Greek", "Indian", "Welsh"), (" {} food", " {} dishes")),
        "area": (("riverside", "centre", "harbour"), (" by the {}", " at the {}")),
        "price": (("cheap", "moderate", "high"), (" at {} prices", ", prices are {}")),
    },
    "lodgings": {
        "name": ((), ("{} offers rooms", "Guests sleep at {}")),
        "view": (("garden", "lake", "street", "castle"), (" facing the {}", " over the {}")),
        "area": (("old town", "hills", "station"), (" in the {}", " near the {}")),
        "rooms": (("small", "large", "quiet"), (", they are {}", " that are {}")),
    },
}


def make_text(
    folder: str | Path, form: str, tables: int = 500, domain: str = "restaurants", seed: int = 0
) -> list[Path]:
    """Write made-up-train, -dev and -test with one or two sentences per table.

    No table is in two parts.

    Args:
        folder: Where to write.
        form: `e2e` or `dart`.
        tables: Number of tables.
        domain: `restaurants` or `lodgings`.
        seed: Seed of all draws.

    Returns:
        The files.

    Raises:
        InputError: If an option is out of range or the folder is not writable.
    """
    if form not in FORMATS or domain not in DOMAINS:
        raise InputError(
            f"no text of the format {form} is made up about {domain}: choose a format of "
            f"{', '.join(FORMATS)} and a domain of {', '.join(DOMAINS)}"
        )
    if not LEAST <= tables <= MOST:
        raise InputError(f"{tables} tables cannot be made up: ask for {LEAST} to {MOST}")
    if seed < 0:
        raise InputError(f"seed = {seed} is negative: use 0 or more")
    place, entries = Path(folder).expanduser(), _entries(tables, domain, seed)
    edges = np.cumsum([0.0, *PARTS.values()]) * len(entries)
    contents = {}
    for part, low, high in zip(PARTS, edges, edges[1:], strict=False):
        of = entries[round(low) : round(high)]
        file = place / f"made-up-{part}{'.csv' if form == 'e2e' else '.json'}"
        contents[file] = _csv(of) if form == "e2e" else _json(of)
    _write(place, contents)
    return list(contents)


def _write(place: Path, contents: Mapping[Path, str]) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        for file, text in contents.items():
            file.write_text(text, encoding="utf-8", newline="")
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise InputError(
            f"cannot write to {place} ({getattr(error, 'strerror', error)}): name a folder that is "
            "writable and has room"
        ) from None


Entry = tuple[dict[str, str], list[str]]  # fields in order, name first; sentences


def _entries(tables: int, domain: str, seed: int) -> list[Entry]:
    rng = generator(seed, Draw.SYNTHETIC, block=list(DOMAINS).index(domain))
    found: dict[str, Entry] = {}
    while len(found) < tables:
        # A name, the first field, and each of the others with probability 1/2.
        name = "".join(_pick(SYLLABLES, rng) for _ in range(2)).capitalize()
        _, first, *others = DOMAINS[domain]
        kept = [first, *(field for field in others if rng.random() < 0.5)]
        values = {field: _pick(DOMAINS[domain][field][0], rng) for field in kept}
        fields = {"name": name, **values}
        sentences = {_sentence(domain, fields, rng) for _ in range(2)}
        found.setdefault(str(fields), (fields, sorted(sentences)))
    return list(found.values())


def _sentence(domain: str, fields: dict[str, str], rng: np.random.Generator) -> str:
    said = (_pick(DOMAINS[domain][name][1], rng).format(value) for name, value in fields.items())
    return "".join(said) + "."


def _pick(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]


def _csv(entries: list[Entry]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("mr", "ref"))
    for fields, sentences in entries:
        table = ", ".join(f"{field}[{value}]" for field, value in fields.items())
        writer.writerows((table, sentence) for sentence in sentences)
    return text.getvalue()


def _json(entries: list[Entry]) -> str:
    held: list[dict[str, Any]] = [
        {
            "tripleset": [
                [fields["name"], field.upper(), value]
                for field, value in fields.items()
                if field != "name"
            ],
            "annotations": [{"source": "made-up", "text": sentence} for sentence in sentences],
        }
        for fields, sentences in entries
    ]
    return json.dumps(held, indent=1) + "\n"
