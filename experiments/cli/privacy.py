"""Commands of the accountant: `privacy epsilon`, `sigma`, `audit` and `spent`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fedmuon.experiments.cli.options import AsJson, refuse, require_at_most, tell

app = typer.Typer(
    help="What a private run spends: epsilon for a noise, noise for an epsilon, and an audit.",
    no_args_is_help=True,
)

Noise = Annotated[
    float, Option("--noise", help="sigma: noise of one block over its clipping bound C.")
]
Lot = Annotated[float, Option("--lot", help="Expected size of a Poisson lot.")]
Population = Annotated[int, Option("--population", help="Examples of the client.")]
Steps = Annotated[int, Option("--steps", help="T: noisy releases over the whole run.")]
Delta = Annotated[float, Option("--delta", help="Should be well below 1/population.")]
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
Sampling = Annotated[str, Option("--sampling", help="poisson; others are refused.")]
Accountant = Annotated[
    str, Option("--accountant", help="pld: quick; dp-accounting: that library, slower to start.")
]
MOST_PEOPLE = 10**12


def rate(lot: float, population: int) -> float:
    """The probability with which an example is in a lot."""
    from fedmuon.tables import shown

    if not 1 <= population <= MOST_PEOPLE:
        refuse(f"population = {shown(population)} must lie between 1 and {MOST_PEOPLE:,}")
    if not 0 < lot <= population:
        refuse(f"lot = {lot:g} must be positive and at most the population = {population}")
    return lot / population


@app.command()
def epsilon(
    noise: Noise,
    lot: Lot,
    population: Population,
    steps: Steps,
    delta: Delta,
    blocks: Blocks = 1,
    mode: Mode = "joint",
    adjacency: Adjacency = "zero-out",
    sampling: Sampling = "poisson",
    accountant: Accountant = "pld",
    as_json: AsJson = False,
) -> None:
    """The epsilon that a noise multiplier spends, with both ends of the bracket.

    Example: [bold]fedmuon privacy epsilon --noise 1.1 --lot 256 --population 60000 --steps 2000
    --delta 1e-5[/]
    """
    from fedmuon.privacy import accounting

    accounting.require_supported(adjacency, sampling)
    share = rate(lot, population)
    answer = accounting.epsilon(
        noise, share, steps, delta, blocks, mode, adjacency, accountant=accountant
    )
    show(vars(answer), as_json)


@app.command()
def sigma(
    epsilon: Annotated[float, Option(help="The most that may be spent.")],
    lot: Lot,
    population: Population,
    steps: Steps,
    delta: Delta,
    blocks: Blocks = 1,
    mode: Mode = "joint",
    adjacency: Adjacency = "zero-out",
    sampling: Sampling = "poisson",
    as_json: AsJson = False,
) -> None:
    """The least noise multiplier of a block that spends at most an epsilon.

    Example: [bold]fedmuon privacy sigma --epsilon 8 --lot 256 --population 60000 --steps 2000
    --delta 1e-5 --blocks 4[/]
    """
    from fedmuon.privacy import accounting
    from fedmuon.privacy.calibration import noise_for

    accounting.require_supported(adjacency, sampling)
    noise, answer = noise_for(epsilon, rate(lot, population), steps, delta, blocks, mode, adjacency)
    show({"noise": noise, **vars(answer)}, as_json)


@app.command()
def audit(
    noise: Noise,
    lot: Lot,
    population: Population,
    steps: Steps,
    delta: Delta,
    blocks: Blocks = 1,
    trials: Annotated[
        int | None,
        Option(
            help="Runs with the canary, and as many without: 100000, or 2000 where real steps run."
        ),
    ] = None,
    seed: Annotated[int, Option(help="Of the trials; the lots and noise of steps are secret.")] = 0,
    code: Annotated[
        str,
        Option(
            help="projected: what a release is along the canary; release: real private steps of a "
            "small network (for a few steps and blocks)."
        ),
    ] = "projected",
    as_json: AsJson = False,
) -> None:
    """A lower bound on epsilon from canaries, beside what both modes of the accountant claim.

    Example: [bold]fedmuon privacy audit --noise 2.3395 --lot 1024 --population 42043 --steps 410
    --delta 8e-6 --blocks 49[/]

    Of the code that trains: [bold]fedmuon privacy audit --code release --noise 1 --lot 8
    --population 16 --steps 2 --delta 0.05 --blocks 2[/]
    """
    from fedmuon.experiments.laboratory import audit as canaries
    from fedmuon.privacy.audit import Setting

    require_at_most(1e9, noise=noise)
    setting = Setting(noise, rate(lot, population), steps, blocks)
    record = canaries.audit(setting, delta, trials, seed, code, lot, population)
    tell(record, as_json, canaries.table(record))


@app.command()
def spent(
    folder: Annotated[Path, Argument(help="The folder of a private run.")],
    delta: Annotated[float | None, Option(help="Instead of the delta of the run.")] = None,
    accountant: Accountant = "pld",
    as_json: AsJson = False,
) -> None:
    """What each client of a run has spent, by the run's ledger; a run may still be going on.

    Example: [bold]fedmuon privacy spent runs/private[/]
    """
    from fedmuon.experiments.laboratory import spending

    record = spending.spent(folder, delta, accountant)
    tell(record, as_json, spending.table(record))


def show(answer: dict[str, Any], as_json: bool) -> None:
    """An answer of the accountant, for machines or for people."""
    from fedmuon.experiments.laboratory.facts import facts

    tell(answer, as_json, facts("", answer.items()))
