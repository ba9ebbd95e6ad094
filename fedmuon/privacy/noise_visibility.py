"""Who can know the noise of a release, and what this means for an epsilon."""

import dataclasses

from fedmuon.core.choices import NoiseSource
from fedmuon.privacy.accounting.composition import Answer

REPEATABLE = (
    "Lots and noise follow from the seed (insecure-reproducible-noise): nothing is private."
)
PREDICTABLE = (
    "Lots and noise are PCG64's (noise-source), which is no cryptographic generator: what it has "
    "put out may give its secret state away."
)
STOPPED = (
    "A callback ended this run by what it saw of it, which was not released: no ledger counts what "
    "its length tells."
)
CAVEATS = {"secret": "", "predictable": PREDICTABLE, "repeatable": REPEATABLE}


def secrecy(repeatable: bool, source: NoiseSource) -> str:
    """Who can know noise of this source: a key of `CAVEATS`."""
    if repeatable:
        return "repeatable"
    return "secret" if source == "secure" else "predictable"


def uncertified(answer: Answer, why: str = REPEATABLE) -> Answer:
    """The answer without its certificate, and with the reason in its note."""
    note = f"{why} {answer.note}".strip()
    return dataclasses.replace(answer, certified=False, note=note)
