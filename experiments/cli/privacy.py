"""Commands of the accountant: `privacy epsilon`, `sigma`, `tuned`, `audit` and `spent`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fedmuon.experiments.cli.audit import audit
from fedmuon.experiments.cli.options import AsJson, tell
from fedmuon.experiments.cli.setting import (
    Accountant,
    Adjacency,
    Blocks,
    Delta,
    Lot,
    Mode,
    Noise,
    Population,
    Sampling,
    Steps,
    rate,
)

app = typer.Typer(
    help="What a private run spends: epsilon for a noise, noise for an epsilon, and an audit.",
    no_args_is_help=True,
)


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
def tuned(
    runs: Annotated[float, Option(help="How many runs are expected, of which one is published.")],
    noise: Noise,
    lot: Lot,
    population: Population,
    steps: Steps,
    delta: Delta,
    blocks: Blocks = 1,
    shape: Annotated[
        str, Option(help="The law of their number: logarithmic, or geometric.")
    ] = "logarithmic",
    adjacency: Adjacency = "zero-out",
    draw: Annotated[
        bool, Option("--draw", help="Draw the number of runs: once, before the first of them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What publishing the best of several private runs spends, where their number is secret.

    Each run takes settings drawn afresh from a list; the number of runs is drawn, and nothing of
    the others is published; they are compared by what they released and by public data alone
    (Papernot, Steinke 2022).

    Example: [bold]fedmuon privacy tuned --runs 20 --noise 1.1 --lot 256 --population 60000
    --steps 2000 --delta 1e-5[/]
    """
    from fedmuon.privacy import tuning

    share = rate(lot, population)
    answer = tuning.answer(noise, share, steps, delta, blocks, runs, shape, adjacency)
    show({**answer, **({"runs_drawn": tuning.draw(runs, shape)} if draw else {})}, as_json)


app.command()(audit)


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
