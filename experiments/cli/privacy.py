"""Commands of the accountant: `privacy epsilon`, `sigma`, `tuned`, `audit` and `spent`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedmuon.experiments.cli.audit import audit
from fedmuon.experiments.cli.options import AsJson, WithKeys, refuse, require_at_most, tell
from fedmuon.experiments.cli.setting import (
    Accountant,
    Adjacency,
    Band,
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

if TYPE_CHECKING:
    from fedmuon.privacy.accounting.composition import Answer

app = typer.Typer(
    help="What a private run spends: epsilon for a noise, noise for an epsilon, and an audit.",
    no_args_is_help=True,
)


def alike(
    lot: float, population: int, steps: int, sampling: str, band: int, mode: str, adjacency: str
) -> tuple[float, float, int]:
    """(s, rate, steps) of Poisson lots with s times less noise that spend the same.

    Lots in a fixed order spend the same as one release of all examples.
    """
    from fedmuon.config.incompatible import in_turns
    from fedmuon.privacy.accounting.composition import event, require_supported
    from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling, lots_of

    share = rate(lot, population)
    if sampling not in ("shuffle", "cyclic"):
        require_supported(adjacency, sampling)
    if band != 1 and sampling != "cyclic":
        refuse("--band is of noise that cancels: give --sampling cyclic, or leave it out")
    if sampling not in ("shuffle", "cyclic"):
        return 1.0, share, steps
    require_supported(adjacency)
    event(1.0, share, steps)  # rejects impossible steps
    if mode != "joint":
        refuse(f"--mode {mode} is of Poisson lots: leave --mode or --sampling out")
    if why := in_turns(lot, 0.0, adjacency):
        refuse(why)
    fixed_order = FixedOrderSampling("shuffle" if sampling == "shuffle" else "cyclic", band)
    if band > 1:
        require_at_most(1e7, steps=steps)
    return fixed_order.alike(steps, lots_of(population, lot)), 1.0, 1


@app.command(cls=WithKeys)
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
    band: Band = 1,
    accountant: Accountant = "pld",
    as_json: AsJson = False,
) -> None:
    """The epsilon that a noise multiplier spends, with both ends of the bracket.

    Example: [bold]fedmuon privacy epsilon --noise 1.1 --lot 256 --population 60000 --steps 2000
    --delta 1e-5[/]
    """
    from fedmuon.privacy.accounting import composition

    over, share, many = alike(lot, population, steps, sampling, band, mode, adjacency)
    answer = composition.epsilon(
        noise / over, share, many, delta, blocks, mode, adjacency, accountant=accountant
    )
    show(described(answer, sampling, delta, population), as_json)


@app.command(cls=WithKeys)
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
    band: Band = 1,
    as_json: AsJson = False,
) -> None:
    """The least noise multiplier of a block that spends at most an epsilon.

    Example: [bold]fedmuon privacy sigma --epsilon 8 --lot 256 --population 60000 --steps 2000
    --delta 1e-5 --blocks 4[/]
    """
    from fedmuon.privacy.accounting.calibration import noise_for

    over, share, many = alike(lot, population, steps, sampling, band, mode, adjacency)
    noise, answer = noise_for(epsilon, share, many, delta, blocks, mode, adjacency)
    found = described(answer, sampling, delta, population)
    show({"noise": over * noise, **found}, as_json)


@app.command(cls=WithKeys)
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
    from fedmuon.privacy.accounting import tuning
    from fedmuon.privacy.accounting.composition import loose

    share = rate(lot, population)
    answer = tuning.answer(noise, share, steps, delta, blocks, runs, shape, adjacency)
    answer["note"] = " ".join(filter(None, (answer["note"], loose(delta, population))))
    show({**answer, **({"runs_drawn": tuning.draw(runs, shape)} if draw else {})}, as_json)


app.command(cls=WithKeys)(audit)


@app.command(cls=WithKeys)
def spent(
    folder: Annotated[Path, Argument(help="The folder of a private run.")],
    delta: Annotated[float | None, Option(help="Instead of the delta of the run.")] = None,
    accountant: Accountant = "pld",
    as_json: AsJson = False,
) -> None:
    """What each client of a run has spent, by the run's ledger; a run may still be going on.

    Example: [bold]fedmuon privacy spent runs/private[/]
    """
    from fedmuon.experiments import spending

    record = spending.spent(folder, delta, accountant)
    tell(record, as_json, spending.table(record))


def described(answer: "Answer", sampling: str, delta: float, population: int) -> dict[str, Any]:
    """An answer of the accountant, with how lots are drawn, and what to know of its delta."""
    from fedmuon.privacy.accounting.composition import loose

    note = " ".join(filter(None, (answer.note, loose(delta, population))))
    return {**vars(answer), "sampling": sampling, "note": note}


def show(answer: dict[str, Any], as_json: bool) -> None:
    """An answer of the accountant, for machines or for people."""
    from fedmuon.experiments.tables import facts

    tell(answer, as_json, facts("", answer.items()))
