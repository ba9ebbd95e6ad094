"""Options that state the setting of a private mechanism."""

from typing import Annotated

from typer import Option

from fedmuon.experiments.cli.options import refuse

NOISE = "sigma: noise of one block over its clipping bound C."
LOT = "Expected size of a Poisson lot, or the size of those that take turns."
POPULATION = "Examples of the client."
STEPS = "T: noisy releases over the whole run."
DELTA = "Should be well below 1/population."
Noise = Annotated[float, Option("--noise", help=NOISE)]
Lot = Annotated[float, Option("--lot", help=LOT)]
Population = Annotated[int, Option("--population", help=POPULATION)]
Steps = Annotated[int, Option("--steps", help=STEPS)]
Delta = Annotated[float, Option("--delta", help=DELTA)]
Blocks = Annotated[int, Option("--blocks", help="m: blocks clipped to C each, released together.")]
Mode = Annotated[
    str, Option("--mode", help="joint certifies; per-release reproduces 000's Table 3.")
]
Adjacency = Annotated[
    str,
    Option(
        "--adjacency",
        help="zero-out: an example may add 0 instead; add-remove: it is there or not, and the "
        "population is a public number; replace-one: it is any other.",
    ),
]
Sampling = Annotated[
    str,
    Option(
        "--sampling",
        help="poisson: each example on its own, which amplifies; shuffle or cyclic: lots take "
        "turns, without amplification.",
    ),
]
Band = Annotated[
    int,
    Option("--band", help="With cyclic: steps whose noise cancels, itself one; 1: independent."),
]
Accountant = Annotated[
    str, Option("--accountant", help="pld: quick; dp-accounting: that library, slower to start.")
]
MOST_PEOPLE = 10**12


def rate(lot: float, population: int) -> float:
    """The probability with which an example is in a lot."""
    from fedmuon.core.tables import shown

    if not 1 <= population <= MOST_PEOPLE:
        refuse(f"population = {shown(population)} must lie between 1 and {MOST_PEOPLE:,}")
    if not 0 < lot <= population:
        refuse(f"lot = {lot:g} must be positive and at most the population = {population}")
    return lot / population
