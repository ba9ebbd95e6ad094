"""What the file of a suite of training runs says: variants, a sweep, claims, published numbers."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from fedmuon.config.schema import Natural
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar, Table, validate

Key = Annotated[str, Field(pattern=r"^[a-z-]+\.[a-z-]+$")]
Nested = dict[str, dict[str, Scalar]]


class Sweep(Table):
    """A config key whose values multiply every variant; curves are drawn at one of them."""

    key: Key
    values: Annotated[list[float | int], Field(min_length=1)]
    label: str
    curves: float | int | None = None  # the last if it is not said
    # how a config spells a value, if not as a number: taylor-{}
    written: Annotated[str, Field(pattern=r"^$|\{\}")] = ""
    # variants that run once, the same at every value
    fixed: list[str] = Field(default_factory=list)
    follow: str = ""  # the variant whose curves are drawn at all values

    def at(self, x: float) -> Nested:
        """The config's table with the key at this value."""
        table, _, key = self.key.partition(".")
        return {table: {key: self.written.format(f"{x:g}") if self.written else x}}


class Claim(Table):
    """`better` ends at or below `than` (above in accuracy), reaches its train loss sooner, or ends
    near it: within that share of the larger.

    Along a sweep, falling and rising say it of the variant `better` from each value to the next.
    """

    better: str
    than: str = ""
    kind: Literal["terminal", "sooner", "near", "falling", "rising"] = "terminal"
    measure: str = "train_loss"
    sentence: str = ""
    within: Annotated[float, Field(gt=0, lt=1)] = 0.02


class PublishedTimes(Table):
    """Train losses of variants at seconds of the paper's own machine."""

    seconds: Annotated[list[float], Field(min_length=1)]
    losses: dict[str, list[float]]


class Times(Table):
    """A table of train losses at even parts of the training seconds of the variant `of`."""

    of: str
    parts: Annotated[int, Field(ge=2)] = 5
    # by data set
    published: dict[str, PublishedTimes] = Field(default_factory=dict)


class Suite(Table):
    """The file; `published` has numbers by data set and variant, which `source` names, and `also`
    stands beside every verdict."""

    title: str
    seeds: Annotated[list[Natural], Field(min_length=1)]
    variants: Annotated[dict[str, Nested], Field(min_length=1)]
    base: Nested = Field(default_factory=dict)
    sweep: Sweep | None = None
    times: Times | None = None
    claims: dict[str, Claim] = Field(default_factory=dict)
    published: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    source: str = "published"
    note: str = ""
    also: str = ""

    def sweeps(self, variant: str) -> bool:
        """Whether the variant runs at every value of a sweep."""
        return self.sweep is not None and variant not in self.sweep.fixed


def suite_of(content: dict[str, Any]) -> Suite:
    """The file's content, with every variant that it names among its variants."""
    suite = validate(Suite, content)
    for place, name in _named(suite):
        if name not in suite.variants:
            known = ", ".join(suite.variants)
            raise InputError(f"[{place}] names {name!r}, which is no variant: {known}")
    for key, claim in suite.claims.items():
        if claim.kind in ("falling", "rising") and not suite.sweep:
            raise InputError(f"[claims.{key}] kind = '{claim.kind}' needs a [sweep]: add one")
    if suite.times and suite.sweep:
        raise InputError("[times] is for a suite without a [sweep]: leave one of them out")
    return suite


def _named(suite: Suite) -> Iterator[tuple[str, str]]:
    """The places of the file that name a variant."""
    for key, claim in suite.claims.items():
        others = [] if claim.kind in ("falling", "rising") else [claim.than]
        yield from ((f"claims.{key}", name) for name in (claim.better, *others))
    for data, held in suite.published.items():
        yield from ((f"published.{data}", name) for name in held)
    if sweep := suite.sweep:
        followed = [sweep.follow] if sweep.follow else []
        yield from (("sweep", name) for name in (*sweep.fixed, *followed))
    if suite.times:
        yield "times", suite.times.of
        for data, table in suite.times.published.items():
            yield from ((f"times.published.{data}", name) for name in table.losses)
