"""Study `dp-text`: private fine-tuning on tables and sentences, beside 000, Tables 1 and 2."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.columns import Columns
from fedmuon.analysis.report.findings import Findings, Rows, number, spread
from fedmuon.analysis.report.slopes import paired
from fedmuon.analysis.report.verdicts import (
    AT_MOST_ONE,
    NEGATIVE,
    POSITIVE,
    Claim,
    Effect,
    counted,
    unknown,
)
from fedmuon.experiments.studies.findings import assemble

MEASURES = {"nll": "NLL per target token", "bleu": "BLEU", "rouge_l": "ROUGE-L"}
PAIRS = (
    ("DP-Adam", "DP-SGD", "nll"),
    ("DP-Muon", "DP-Adam", "nll"),
    ("DP-MuonBC", "DP-Muon", "nll"),
    ("DP-Muon", "DP-Adam", "bleu"),
    ("DP-Muon", "DP-Adam", "rouge_l"),
)  # better, than, in what: what 000 prints for E2E
STANDS_ON = (
    "All releases of a step are accounted jointly, by Poisson lots, zero-out; a private "
    "example is one pair of a table and a sentence, so a table with several sentences is several "
    "examples. DP-SGD and DP-Adam clip the whole gradient, the Muon methods each matrix and, as "
    "one block, all that is left, as in 000. Head and embedding are one parameter, which 000 "
    "keeps as two. Step sizes were chosen without accounting for the "
    "choice. BLEU is sacrebleu's with effective order, ROUGE-L rouge-score's F1 with stems, of the "
    "nearest reference."
)
MADE_UP = (
    " The text is made up: a small grammar writes tables and sentences in the corpus's format, and "
    "the decoder begins from public text of the same kind about something else. Numbers on it say "
    "nothing about the real corpora."
)


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """The findings of such a folder."""
    published = about["settings"]["published"].get(about["data"], {})
    stands_on = STANDS_ON + (MADE_UP if about["made_up"] else "")
    table = partial(numbers, published)
    return assemble("dp-text", folder, about, claims, table, stands_on, ("ends", "curves"))


def claims(ends: Columns, curves: Columns) -> Sequence[Claim]:
    """What was spent, and 000's orders."""
    return [within(ends), *(ordered(ends, *pair) for pair in PAIRS)]


def within(ends: Columns) -> Claim:
    """The ledger of every run answers at most the epsilon that was asked for."""
    spent, target = ends["epsilon"], ends["target"]
    return Claim(
        "Every run spends at most its ε (zero-out, Poisson lots), all releases of a step accounted "
        "jointly.",
        Effect.exact("spent over asked for", spent / target),
        AT_MOST_ONE,
        f"{spent.min():.4f} to {spent.max():.4f} of {number(float(target.max()))}, "
        f"δ = {number(ends['delta'].max(), 3)}, up to {ends['blocks'].max():.0f} blocks a step",
    )


def ordered(ends: Columns, better: str, than: str, measure: str) -> Claim:
    """The mean over seeds is better, beyond the interval of the differences seed by seed."""
    sign = 1 if measure == "nll" else -1
    one, other = (ends[measure][ends["method"] == name] for name in (better, than))
    word = "lower" if sign > 0 else "higher"
    sentence = f"{better} has a {word} {MEASURES[measure]} than {than}."
    if not len(one) or len(one) != len(other):
        return unknown(sentence, "one of them was not run")
    if not np.isfinite([one.mean(), other.mean()]).all():
        lost = np.isnan(one).any()
        return counted(sentence, 0.0 if lost else np.nan, "seeds", "a run diverged")
    wins = int((sign * one < sign * other).sum())
    detail = f"{number(one.mean())} against {number(other.mean())}; in {wins} of {len(one)} seeds"
    away, half = one.mean() - other.mean(), paired(list(zip(one, other, strict=True)))[1]
    found = Effect.around(f"{MEASURES[measure]}, {better} − {than}", away, half)
    return Claim(sentence, found, NEGATIVE if sign > 0 else POSITIVE, detail)


def numbers(published: Mapping[str, Mapping[str, float]], ends: Columns, curves: Columns) -> Rows:
    """Means over seeds with standard deviations, and below each what 000 prints."""
    lines: Rows = [("method", "noise σ", "blocks", *MEASURES.values())]
    for name in dict.fromkeys(ends["method"].tolist()):
        mine = ends["method"] == name
        about = (number(float(ends[key][mine].mean())) for key in ("noise", "blocks"))
        lines.append((name, *about, *(spread(ends[key][mine]) for key in MEASURES)))
        if held := published.get(name):
            lines.append(("  000, GPT-2", "", "", *(number(held.get(key)) for key in MEASURES)))
    return lines
