"""Store the results of suites in docs/results/SUITE.json, which is part of the repository.

python -m docs.making.results runs/dp-bias        stores the results in that folder
python -m docs.making.results runs/A3=A3-mnist5k  stores them beside those of A3 on other data
python -m docs.making.results --rule lm rank      applies the rule for tuning to stored claims
"""

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Picture
from fedmuon.analysis.report.verdicts import HOLDS, INCONCLUSIVE, REFUTED, current, with_command
from fedmuon.core.errors import InputError
from fedmuon.experiments.report import of_suite
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.studies.training import Claim as Asked
from fedmuon.experiments.studies.training import Training
from fedmuon.experiments.studies.training_findings import tuning_note, untuned

FOLDER = Path(__file__).resolve().parent.parent / "results"
FACTS = (
    "suite", "title", "kind", "data", "scale", "seeds", "seconds", "again", "machine", "versions",
)  # fmt: skip
SEARCHING = (
    "federated-comparison",
    "language-models",
    "robust",
    "systems",
)  # kinds of suites that search for step sizes
LARGEST = 60_000  # largest size of a stored picture, in bytes


def keep(
    folder: Path, into: Path = FOLDER, more: Mapping[str, Any] | None = None, name: str = ""
) -> Path:
    """Store the claims of a finished suite with their verdicts and circumstances.

    The first picture of the suite is stored in the same folder.

    Args:
        folder: Folder of the finished suite.
        into: Folder to write to.
        more: Further entries to store.
        name: Name of the stored file without suffix. Default: the name of the suite.

    Returns:
        The path of the stored file.
    """
    about, found = json.loads((folder / "suite.json").read_text(encoding="utf-8")), of_suite(folder)
    kept = {name: about[name] for name in FACTS if name in about} | dict(more or {})
    into.mkdir(exist_ok=True)
    stem = into / (name or about["suite"])
    kept["picture"] = draw(found.pictures, stem)
    afresh = (with_command(one, about) if one.command else one for one in found.claims)
    kept["claims"] = [one.record() for one in afresh]  # commands do not assume the folder
    file = stem.with_name(f"{stem.name}.json")
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def draw(pictures: Sequence[Picture], stem: Path, largest: int = LARGEST) -> dict[str, str] | None:
    """Save the first picture in the first form that is small enough.

    The forms are SVG or PNG with few colours, wide or narrow.

    Returns:
        The file name, title and caption; or None if there is no picture or all forms are too large.
    """
    for kind in KINDS:
        stem.with_name(f"{stem.name}.{kind}").unlink(missing_ok=True)
    for one in pictures[:1]:
        for drawn in (one.draw(False), one.draw(True)):
            for kind, as_bytes in KINDS.items():
                if len(content := as_bytes(drawn)) <= largest:
                    file = stem.with_name(f"{stem.name}.{kind}")
                    file.write_bytes(content)
                    return {"file": file.name, "title": one.title, "caption": one.caption}
    return None


def in_few_colours(figure: Figure) -> bytes:
    """Return the figure as a PNG with as many colours as fit, at least 48 and at most 256."""
    with Image.open(io.BytesIO(style.image(figure, "png"))) as every:
        for colours in (256, 128, 48):  # a colour bar needs many
            buffer = io.BytesIO()
            every.convert("RGB").quantize(colours).save(buffer, "png", optimize=True)
            if buffer.tell() <= LARGEST:
                break
    return buffer.getvalue()


KINDS: dict[str, Callable[[Figure], bytes]] = {
    "svg": partial(style.image, kind="svg"),
    "png": in_few_colours,
}


def read(suite: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Return the stored result of a suite, or None if there is no stored result.

    `suite` is the name of the stored file, which can also name a suite and other data. Verdicts
    with names of earlier versions get their current names.
    """
    file = folder / f"{suite}.json"
    if not file.exists():
        return None
    held = json.loads(file.read_text(encoding="utf-8"))
    for claim in held.get("claims", ()):
        claim["verdict"] = current(claim["verdict"])
    return held


def ruled(held: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the rule for tuned methods to the stored claims of a suite of kind `training`.

    No run is computed again. The claims of the suite's file are the first stored claims.

    Args:
        held: The stored result. If the suite's file has more claims by now, the result stays
            without them.
    """
    if held["kind"] in SEARCHING:
        return _ruled_by_ends(held)
    work = find(held["suite"], held["data"], held["scale"], {})
    if not isinstance(work, Training):
        raise InputError(f"the suite {held['suite']} does not compare tuned methods")
    about = {
        "tuning": work.tuning(), "again": held["again"], "scale": held["scale"],
        "sweep": work.suite.sweep and work.suite.sweep.model_dump(),
    }  # fmt: skip
    claims = [dict(one) for one in held["claims"]]
    for stored, asked in zip(claims, work.suite.claims.values(), strict=False):
        claim = asked.model_dump()
        if not _is_of(stored["claim"], asked):
            continue
        why, note = untuned(claim, about), tuning_note(claim, about)
        if why or note not in stored["also"]:
            before = work.suite.also if why else stored["also"]
            stored["also"] = " ".join(filter(None, (before, note)))
        if why and current(stored["verdict"]) in (HOLDS, REFUTED, INCONCLUSIVE):
            _leave_open(stored, why)
            stored["command"] = f"fedmuon tune {held['suite']}" if not claim["untuned"] else ""
    return {**held, "claims": claims}


def _is_of(sentence: str, claim: Asked) -> bool:
    """Return whether a stored sentence is that of a claim of the suite's file."""
    if claim.sentence:
        return sentence == claim.sentence
    return claim.better in sentence and claim.than in sentence


def _ruled_by_ends(held: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the rule to a suite that searched for step sizes and stored how many are at an end."""
    claims = [dict(one) for one in held["claims"]]
    inside = next(one for one in claims if one["claim"].startswith("Every chosen step size"))
    if current(inside["verdict"]) == REFUTED:
        why = f"{inside['detail']}, and the stored result does not say which methods have them"
        for one in claims:
            if "best step size" in one["claim"] and current(one["verdict"]) in (HOLDS, REFUTED):
                _leave_open(one, why)
    return {**held, "claims": claims}


def _leave_open(claim: dict[str, Any], why: str) -> None:
    """Set the verdict of a stored claim to inconclusive, with the reason."""
    claim |= {"verdict": INCONCLUSIVE, "why": why}
    if "p" in claim:
        claim["p"] = {REFUTED: 1.0, HOLDS: 1.0}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rule"]:
        for name in sys.argv[2:]:
            file = FOLDER / f"{name}.json"
            text = json.dumps(ruled(json.loads(file.read_text("utf-8"))), indent=1,
                              ensure_ascii=False)  # fmt: skip
            file.write_text(text + "\n", encoding="utf-8")
            print(file)
    else:
        for one in sys.argv[1:]:
            source, _, name = one.partition("=")
            print(keep(Path(source), name=name))
