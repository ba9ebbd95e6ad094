"""Files of samples, words and weights as no program should have written them."""

from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import base, mutations, samples, values
from tests.fuzz.calls import call, judged, snapshot
from tests.fuzz.outcome import Case, Outcome

KIND = "files"
FORMS: dict[str, dict[str, Any]] = {
    "idx": {"data": {"name": "idx"}},
    "mnist": {"data": {"name": "mnist"}},
    "cifar-bin": {"data": {"name": "cifar10"}},
    "cifar-py": {"data": {"name": "cifar10"}},
    "e2e": {"data": {"name": "e2e", "context": 40}},
    "dart": {"data": {"name": "dart", "context": 40}},
    "text": {"data": {"name": "text", "context": 4}},
    "weights": {"data": {"name": "text", "context": 4}},
    "tokenizer": {"data": {"name": "e2e", "context": 40}},
}
DECODER = {"name": "network", "model": "gpt", "width": 8, "depth": 1, "heads": 1}
OF_TEXT = ("e2e", "dart", "text", "weights", "tokenizer")
TYPES = (0x08, 0x09, 0x0B, 0x0C, 0x0D, 0x0E, 0x0F, 0)
ENDS = (0, 1, 127, 128, 255, -1, -128, 32767, -32768, 2**31 - 1, -(2**31))


def draw(rng: Random) -> Case:
    """A form, with headers, labels or bytes that are not as they should be."""
    form = rng.choice(list(FORMS))
    suffix = {"e2e": ".csv", "dart": ".json", "tokenizer": ".json"}.get(form, "")
    case: Case = {"kind": KIND, "form": form, "gzip": rng.random() < 0.2, "header": {}}
    if form in ("idx", "mnist") and rng.random() < 0.6:
        case["header"] = _header(rng)
    elif rng.random() < 0.3:
        case["text"] = values.text(rng) * rng.choice((1, 3, 200))
    count = rng.choice((0, 1, 1, 2)) if case["header"] or "text" in case else rng.choice((1, 1, 2))
    case["mutations"] = [
        {"file": rng.random(), **mutations.drawn(rng, suffix)} for _ in range(count)
    ]
    case["network"] = form in OF_TEXT or rng.random() < 0.3
    return case


def perform(case: Case, place: Path) -> Outcome:
    """Write sound files, disturb them, and train on what is left."""
    folder = place / "data"
    folder.mkdir()
    samples.MAKERS[case["form"]](folder, case)
    mutations.spoil(folder, case["mutations"])
    base.write(place / "c.toml", base.toml(base.tables(base.READ, _layer(case, folder))))
    before = snapshot(place)
    return judged(call(["run", "c.toml", "--out", "out"], place), place, before)


def _layer(case: Case, folder: Path) -> dict[str, dict[str, Any]]:
    data = {
        **FORMS[case["form"]]["data"],
        "folder": str(folder),
        "train": 24,
        "test": 8,
        "minimum": 2,
    }
    found: dict[str, dict[str, Any]] = {"data": data, "federation": {"rounds": 1}}
    if case["network"]:
        found["task"] = DECODER if case["form"] in OF_TEXT else {"name": "network", "model": "mlp"}
        found["local"] = {"batch": 2, "lr": 0.01, "steps": 1}
    if case["form"] == "weights":
        found["task"] = {**DECODER, "weights": str(folder / "weights")}
        data["folder"] = str(folder / "words")
    if case["form"] == "tokenizer":
        data |= {"tokenizer": str(folder / "pieces"), "folder": str(folder / "tables")}
    return found


def _header(rng: Random) -> dict[str, Any]:
    """What an IDX file says of itself, or holds as labels."""
    found: dict[str, Any] = {"of": rng.choice(("images", "labels"))}
    what = rng.choice(("type", "shape", "ends", "ends", "ends", "dimensions", "value"))
    if what == "type":
        found["type"] = rng.choice(TYPES)
    elif what == "shape":
        found["shape"] = [rng.choice((0, 1, 60, 2**16, 2**31, 2**32 - 1)) for _ in range(3)]
    elif what == "dimensions":
        found["dimensions"] = rng.choice((0, 1, 2, 4, 33, 64, 255))
    elif what == "value":
        found |= {
            "of": "images",
            "type": rng.choice((0x0D, 0x0E)),
            "value": rng.choice(("nan", "inf", "-inf", "3e38", "1e308", "5e-324")),
        }
    else:
        found |= {
            "of": "labels",
            "type": rng.choice((0x08, 0x09, 0x0B, 0x0C)),
            "label": rng.choice(ENDS),
        }
    return found
