"""The command that would decide what these runs leave open: full scale, or more seeds; or, where
both cannot, that nothing shipped decides it, and why.

An interval of n seeds is Student's: it shrinks like t(n) / sqrt(n), t(n) being the quantile at
97.5% with n - 1 degrees of freedom, so that an effect at distance d from the end of its rule, known
up to h, takes as many as make that d / h of what it was.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.slopes import half_width
from fedmuon.analysis.report.verdicts import FAILS, HOLDS, UNTESTABLE, Claim

NOTHING = "nothing shipped decides it: {}"
SHORT = "Such a change shortens the interval, and may not decide."
FEW = 5  # seeds, of which an interval can be seen
MARGIN, MOST = 1.5, 100  # of the variance, as effects are guesses; times as many as one would run


def with_range(claim: Claim, about: Mapping[str, Any]) -> Claim:
    """The claim about a gap, whose interval is as long as a record says, and why; with the changes
    that shorten it, if with them these runs would decide, or if larger ones are left to make."""
    notes, changes = about.get("gap_notes", []), tuple(about.get("gap_changes", ()))
    useful = bool(changes) and claim.holds is None and not claim.limit
    decides = _decide(about.get("gap_then", ()))
    short = useful and not decides
    why = " ".join([*notes, *[SHORT] * short])
    also = "; ".join(filter(None, (claim.also, why)))
    kept = useful and (decides or about.get("scale") == "small")
    return replace(claim, also=also, changes=changes if kept else ())


def _decide(then: Sequence[str]) -> bool:
    """Whether runs whose verdicts would be these decide: all hold, but for those that test nothing,
    whose bound is vacuous, or all fail; one of many that fails may do so by chance."""
    return {*then} - {UNTESTABLE} == {HOLDS} or {*then} == {FAILS}


def with_changes(words: Sequence[str], changes: Sequence[str]) -> list[str]:
    """A command with these changes of its config."""
    return [*words, *(word for change in changes for word in ("--set", change))]


def with_command(claim: Claim, about: Mapping[str, Any], folder: Path | None = None) -> Claim:
    """The claim of a suite, whose suite.json is `about`, with what would decide it: in its folder,
    if that is given and can go on to more seeds, or else in a new one."""
    if claim.verdict in (HOLDS, FAILS) or not str(about["again"]).startswith("fedmuon suite "):
        return claim
    words = with_changes(of_all_seeds(shlex.split(about["again"])), claim.changes)
    if about["scale"] == "small" or claim.changes:
        end = "full" if about["scale"] == "small" else "shorter"
        return replace(claim, command=_command(words, f"{about['suite']}-{end}"))
    seeds, times = about.get("seeds"), times_as_many(claim, count_of(about.get("seeds")))
    if why := _why_not(claim, bool(seeds), times):
        return replace(claim, also="; ".join(filter(None, (claim.also, NOTHING.format(why)))))
    words += ["--seeds", str(math.ceil(count_of(seeds) * times))]
    if folder is not None and about.get("kind") == "training" and seeds == [*range(len(seeds))]:
        return replace(claim, command=shlex.join([*words, "--out", str(folder), "--resume"]))
    return replace(claim, command=_command(words, f"{about['suite']}-more"))


def _why_not(claim: Claim, seeds: bool, times: float) -> str:
    """Why more seeds than full scale has, which was run, would not decide it, if so."""
    effect = claim.effect
    if np.isnan(effect.value).any():
        return "an effect of it could not be measured"
    if not (seeds and effect.seeded):
        return "more seeds would not shorten its interval"
    if math.isinf(times) and np.isnan(effect.high - effect.low)[np.isfinite(effect.value)].any():
        return "its interval is not known"
    return f"it takes more than {MOST:g} times as many seeds" if times > MOST else ""


def count_of(seeds: Any) -> int:
    """How many a suite's file asks for, in a list or as a number."""
    return len(seeds) if isinstance(seeds, list) else int(seeds or 0)


def times_as_many(claim: Claim, seeds: int) -> float:
    """How many times as many seeds would leave every interval on one side of its rule's ends."""
    effect, rule = claim.effect, claim.rule
    if np.isnan(effect.value).any() or not seeds:
        return math.inf
    with np.errstate(invalid="ignore"):  # an infinite effect is beyond doubt
        beyond = claim.rule.refuses(effect.low, effect.high)  # decides where longer ones do
        longer = np.where(beyond, effect.longer, 1.0)
        half = np.where(np.isinf(effect.value), 0.0, longer * (effect.high - effect.low) / 2)
    if np.isnan(half).any():
        return FEW / seeds if effect.seeded and seeds < FEW else math.inf
    ends = [end for end in (rule.low, rule.high) if math.isfinite(end)]
    near = np.min([np.abs(effect.value - end) for end in ends], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shorter = np.where(half > near, half / near, 0.0).max()
    many = np.arange(seeds, MOST * seeds + 1)
    enough = _width(many) * math.sqrt(MARGIN) * shorter <= _width(many[:1])
    return float(many[enough.argmax()] / seeds) if enough.any() else math.inf


def _width(seeds: np.ndarray) -> np.ndarray:
    """t(n) / sqrt(n); of a single seed, whose interval is not over seeds, the normal one."""
    free = np.where(seeds > 1, seeds - 1.0, np.inf)
    return half_width(1 / np.sqrt(seeds), free)


def of_all_seeds(words: list[str]) -> list[str]:
    """These words without `--seed N` or `--seeds N`, which override the file's seeds."""
    for option in {"--seed", "--seeds"}.intersection(words):
        at = words.index(option)
        words = words[:at] + words[at + 2 :]
    return words


def _command(words: list[str], folder: str) -> str:
    """The command of these words at full scale."""
    at = words.index("--scale") + 1
    return shlex.join([*words[:at], "full", *words[at + 1 :], "--out", f"runs/{folder}"])
