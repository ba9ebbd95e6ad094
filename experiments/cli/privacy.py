"""Commands of the privacy accountant: `privacy epsilon`, `sigma`, `tuned`, `audit`, `spent`."""

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from typer import Argument, Context, Option

from fedmuon.config.incompatible import in_turns
from fedmuon.core.errors import InputError, shown
from fedmuon.experiments.cli.options import (
    AsJson,
    DataName,
    EngineName,
    Overrides,
    WithKeys,
    changes_of,
    chosen_config,
    chosen_folder,
    complain,
    console,
    given_in,
    print_path,
    require_at_most,
    resumable,
    tell,
)
from fedmuon.experiments.cli.show import Progress
from fedmuon.experiments.tables import facts
from fedmuon.privacy.accounting import composition, tuning
from fedmuon.privacy.accounting.balls_in_bins import epsilon_of_bins
from fedmuon.privacy.accounting.truncated import account_cut, cut_probability, delta_left
from fedmuon.privacy.mechanisms.buffered import (
    least_possible,
    noise_of_buffers,
    optimized,
    optimized_band,
)
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling, lots_of, noise_of_momentum

app = typer.Typer(
    help="What a private run spends: epsilon for a noise, noise for an epsilon, and an audit.",
    no_args_is_help=True,
)

NOISE = "sigma: noise of one block over its clipping bound C."
LOT = "Expected size of a Poisson lot, or the size of lots in a fixed order."
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
        help="poisson: each example on its own, which amplifies; shuffle or cyclic: lots in a "
        "fixed order, without amplification; balls-in-bins (for epsilon): each example in a "
        "secret one of the lots that take turns, accounted for by Monte Carlo.",
    ),
]
Band = Annotated[
    int,
    Option("--band", help="With cyclic: steps whose noise cancels, itself one; 1: independent."),
]
BufferCount = Annotated[
    int,
    Option(
        "--buffers",
        help="With cyclic: buffers, optimized for these steps, that correlate noise (BLT) instead "
        "of a band.",
    ),
]
Memory = Annotated[
    float,
    Option(
        "--momentum",
        help="With --band or --buffers: beta of the momentum that is to have least noise; 1 is for "
        "sums.",
    ),
]
Ahead = Annotated[bool, Option("--nesterov", help="Whether this momentum looks ahead.")]
MaxLot = Annotated[
    int,
    Option(
        "--max-lot",
        help="Maximum size of a Poisson lot; larger ones are cut, which delta counts. 0: none.",
    ),
]
Accountant = Annotated[
    str, Option("--accountant", help="pld: quick; dp-accounting: that library, slower to start.")
]
MOST_PEOPLE = 10**12
BINS, CONFIDENCE = "balls-in-bins", 0.999
MOST_OPTIMIZED, MOST_BOUNDED = 10_000, 1000  # steps, above which it takes longer than seconds


def rate(lot: float, population: int) -> float:
    """The probability that an example is in a lot."""
    if not 1 <= population <= MOST_PEOPLE:
        raise InputError(f"population = {shown(population)} must lie between 1 and {MOST_PEOPLE:,}")
    if not 0 < lot <= population:
        raise InputError(
            f"lot = {lot:g} must be positive and at most the population = {population}"
        )
    return lot / population


def alike(
    lot: float,
    population: int,
    steps: int,
    sampling: str,
    band: int,
    mode: str,
    adjacency: str,
    momentum: tuple[float, bool] = (1.0, False),
    buffers: int = 0,
) -> tuple[float, float, int]:
    """(s, rate, steps) of Poisson lots that spend the same with s times less noise.

    Lots in a fixed order spend the same as one release of all examples. `momentum` is beta and
    whether it looks ahead, where correlated noise is for a momentum.
    """
    share = rate(lot, population)
    if sampling == BINS:
        raise InputError(
            "balls in bins are accounted for by Monte Carlo, which finds no noise: ask for the "
            "epsilon of a noise by fedmuon privacy epsilon"
        )
    if sampling not in ("shuffle", "cyclic"):
        composition.require_supported(adjacency, sampling)
    named = "--buffers" if buffers else "--band"
    if (band != 1 or buffers) and sampling != "cyclic":
        raise InputError(
            f"{named} is of noise that cancels: give --sampling cyclic, or leave it out"
        )
    if sampling not in ("shuffle", "cyclic"):
        return 1.0, share, steps
    composition.require_supported(adjacency)
    composition.event(1.0, share, steps)  # rejects impossible steps
    if mode != "joint":
        raise InputError(f"--mode {mode} is of Poisson lots: leave --mode or --sampling out")
    if why := in_turns(lot, 0.0, adjacency):
        raise InputError(why)
    lots = lots_of(population, lot)
    fixed_order = fixed_order_of(sampling, steps, lots, band, momentum, buffers)
    return fixed_order.alike(steps, lots), 1.0, 1


def fixed_order_of(
    sampling: str, steps: int, lots: int, band: int, momentum: tuple[float, bool], buffers: int
) -> FixedOrderSampling:
    """Lots that take turns, with the noise that the options name."""
    if band != 1 and buffers:
        raise InputError("noise is correlated by --band or by --buffers: leave one of them out")
    if momentum != (1.0, False) and band == 1 and not buffers:
        raise InputError(
            "--momentum is of noise that cancels: give --band or --buffers, or leave it out"
        )
    if buffers:
        require_at_most(1e5, steps=steps)
        found = optimized(steps, lots, buffers, *momentum)
        return FixedOrderSampling("cyclic", 0, *momentum, found)
    if band > 1:
        require_at_most(1e7, steps=steps)
    return FixedOrderSampling("shuffle" if sampling == "shuffle" else "cyclic", band, *momentum)


def answer_of_bins(
    noise: float,
    lot: float,
    population: int,
    steps: int,
    delta: float,
    blocks: int,
    mode: str,
    adjacency: str,
    correlation: tuple[int, tuple[float, bool], int],
    trials: int,
) -> dict[str, Any]:
    """The epsilon of balls in bins, beside that of the same lots in a public order.

    `correlation` is the band, the momentum and the buffers.
    """
    composition.require_supported(adjacency)
    composition.require_delta(delta)
    joint = composition.event(noise, rate(lot, population), steps, blocks, mode).noise_multiplier
    if adjacency == "replace-one" or mode != "joint":
        raise InputError(
            "balls in bins have a proved pair for mode joint and for zero-out or add-remove: leave "
            "--mode and --adjacency out"
        )
    require_at_most(1e5, steps=steps)
    bins = lots_of(population, lot)
    ordered = fixed_order_of("cyclic", steps, bins, *correlation)
    fixed = composition.epsilon(noise / ordered.alike(steps, bins), 1.0, 1, delta, blocks).upper
    found = epsilon_of_bins(
        ordered.coefficients(steps), steps, bins, joint, delta, trials, CONFIDENCE
    )
    upper = min(found.upper, fixed)
    return {
        "epsilon": upper,
        "lower": min(found.lower, upper),
        "upper": upper,
        "in_a_public_order": fixed,
        "mode": mode,
        "accountant": f"Monte Carlo, {found.trials:,} trials",
        "adjacency": adjacency,
        "sampling": BINS,
        "bins": bins,
        "confidence": CONFIDENCE,
        "certified": False,
        "note": f"Both ends hold with a confidence of {CONFIDENCE:.1%} over the trials, and are "
        "not proved. Runs draw no such lots: [privacy] sampling has poisson, shuffle and cyclic.",
    }


def cut_of(
    most: int, lot: float, population: int, steps: int, sampling: str, mode: str, adjacency: str
) -> float:
    """The probability that one of the lots exceeds `most`; 0 without a maximum."""
    if not most:
        return 0.0
    if sampling != "poisson" or mode != "joint" or adjacency == "add-remove":
        raise InputError(
            "--max-lot is for Poisson lots, mode joint, and an adjacency whose data sets have the "
            "same size: zero-out or replace-one"
        )
    if most < lot:
        raise InputError(f"--max-lot {most} is below --lot {lot:g}: raise it, or leave it out")
    return min(1.0, steps * cut_probability(population, rate(lot, population), most))


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
    buffers: BufferCount = 0,
    momentum: Memory = 1.0,
    nesterov: Ahead = False,
    max_lot: MaxLot = 0,
    trials: Annotated[
        int | None, Option(help="Monte Carlo draws for balls-in-bins: 1,000,000 by default.")
    ] = None,
    accountant: Accountant = "pld",
    as_json: AsJson = False,
) -> None:
    """The epsilon that a noise multiplier spends, with both ends of the bracket.

    Example: [bold]fedmuon privacy epsilon --noise 1.1 --lot 256 --population 60000 --steps 2000
    --delta 1e-5[/]
    """
    of_momentum = momentum, nesterov
    if sampling == BINS:
        if max_lot or accountant != "pld":
            raise InputError("balls-in-bins reads no --max-lot and --accountant: leave them out")
        correlation = band, of_momentum, buffers
        setting = noise, lot, population, steps, delta, blocks, mode, adjacency
        found = answer_of_bins(*setting, correlation, 10**6 if trials is None else trials)
        show(found, delta, population, as_json)
        return
    if trials is not None:
        raise InputError("--trials is for --sampling balls-in-bins: leave it out")
    over, share, many = alike(
        lot, population, steps, sampling, band, mode, adjacency, of_momentum, buffers
    )
    cut = cut_of(max_lot, lot, population, steps, sampling, mode, adjacency)
    answer = account_cut(
        lambda at: composition.epsilon(
            noise / over, share, many, at, blocks, mode, adjacency, accountant=accountant
        ),
        delta,
        cut,
    )
    if cut and math.isinf(answer.upper):
        raise InputError(
            f"--max-lot {max_lot} cuts a lot with probability up to {cut:.2g}, which leaves "
            f"nothing of delta = {delta:g}: raise it"
        )
    more = {"lots_cut_with_probability": cut} if max_lot else {}
    show({**vars(answer), "sampling": sampling, **more}, delta, population, as_json)


@app.command(cls=WithKeys)
def sigma(
    epsilon: Annotated[float, Option(help="The maximum that may be spent.")],
    lot: Lot,
    population: Population,
    steps: Steps,
    delta: Delta,
    blocks: Blocks = 1,
    mode: Mode = "joint",
    adjacency: Adjacency = "zero-out",
    sampling: Sampling = "poisson",
    band: Band = 1,
    buffers: BufferCount = 0,
    momentum: Memory = 1.0,
    nesterov: Ahead = False,
    max_lot: MaxLot = 0,
    as_json: AsJson = False,
) -> None:
    """The least noise multiplier of a block that spends at most an epsilon.

    Example: [bold]fedmuon privacy sigma --epsilon 8 --lot 256 --population 60000 --steps 2000
    --delta 1e-5 --blocks 4[/]
    """
    of_momentum = momentum, nesterov
    over, share, many = alike(
        lot, population, steps, sampling, band, mode, adjacency, of_momentum, buffers
    )
    cut = cut_of(max_lot, lot, population, steps, sampling, mode, adjacency)
    left = delta_left(delta, cut, epsilon)
    if cut and left < composition.LEAST_DELTA:
        raise InputError(
            f"--max-lot {max_lot} cuts a lot with probability up to {cut:.2g}, which at epsilon = "
            f"{epsilon:g} leaves nothing of delta = {delta:g}: raise it"
        )
    noise, answer = composition.noise_for(epsilon, share, many, left, blocks, mode, adjacency)
    if cut:
        answer = account_cut(
            lambda at: composition.epsilon(noise, share, many, at, blocks, mode, adjacency),
            delta,
            cut,
        )
    found = {"noise": over * noise, **vars(answer), "sampling": sampling}
    found |= {"lots_cut_with_probability": cut} if max_lot else {}
    show(found, delta, population, as_json)


@app.command(cls=WithKeys)
def correlated(
    lot: Lot,
    population: Population,
    steps: Steps,
    momentum: Annotated[float, Option(help="beta of the momentum; 1 is for sums.")] = 0.95,
    nesterov: Ahead = False,
    band: Annotated[int, Option(help="Steps whose noise cancels, itself one.")] = 16,
    buffers: Annotated[int, Option(help="Buffers that correlate noise without a band.")] = 2,
    as_json: AsJson = False,
) -> None:
    """How much noise a momentum has at equal epsilon, by how the noise of steps is correlated.

    Lots are cyclic ones. The momentum is what Muon orthogonalizes. The names in brackets are those
    of \\[privacy] noise-correlation. For at most 1000 steps it also shows what no correlation of
    noise can fall below.

    Example: [bold]fedmuon privacy correlated --lot 256 --population 10000 --steps 200 --nesterov[/]
    """
    require_at_most(1e5, steps=steps)
    rate(lot, population)
    apart, of_momentum = lots_of(population, lot), (momentum, nesterov)

    def of_band(coefficients: Any) -> float:
        return noise_of_momentum(coefficients, steps, apart, *of_momentum)

    def of_buffers(memory: float, ahead: bool) -> float:
        return noise_of_buffers(
            optimized(steps, apart, buffers, memory, ahead), steps, apart, *of_momentum
        )

    forms = {"for sums": (1.0, False), "for the momentum": of_momentum}
    if momentum == 1:
        del forms["for the momentum"]
    ours = [*forms][-1]
    noise = {"independent": of_band(np.ones(1))}
    for name, form in forms.items():
        key = "momentum" if name != "for sums" else "sqrt-toeplitz"
        in_band = FixedOrderSampling("cyclic", band, *form).coefficients(steps)
        noise[f"band of {band} {name} ({key})"] = of_band(in_band)
    if steps <= MOST_OPTIMIZED:
        best = optimized_band(steps, apart, band, *of_momentum)
        noise[f"band of {band} {ours}, optimized"] = of_band(best)
    for name, form in forms.items():
        key = "blt-momentum" if name != "for sums" else "blt"
        noise[f"{buffers} buffers {name} ({key})"] = of_buffers(*form)
    if steps <= MOST_BOUNDED:
        noise["no correlation is below"] = least_possible(steps, apart, *of_momentum)
    tell(
        {"noise": noise},
        as_json,
        facts(
            f"noise in an entry of the {'sum' if momentum == 1 else 'momentum'}, over that of one "
            "release of all examples that spends the same ε",
            [(name, f"{value:.4g}") for name, value in noise.items()],
        ),
    )


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
    """What publishing the best of several private runs spends, if their number is secret.

    Each run takes random settings from a list. The number of runs is random, too, and nothing about
    the other runs is published. Runs are compared only by what they released and by public data
    (Papernot, Steinke 2022).

    Example: [bold]fedmuon privacy tuned --runs 20 --noise 1.1 --lot 256 --population 60000
    --steps 2000 --delta 1e-5[/]
    """
    share = rate(lot, population)
    answer = tuning.answer(noise, share, steps, delta, blocks, runs, shape, adjacency)
    more = {"runs_drawn": tuning.draw(runs, shape)} if draw else {}
    show({**answer, **more}, delta, population, as_json)


@app.command(cls=WithKeys)
def spent(
    folder: Annotated[Path, Argument(help="The folder of a private run.")],
    delta: Annotated[float | None, Option(help="Instead of the delta of the run.")] = None,
    accountant: Accountant = "pld",
    as_json: AsJson = False,
) -> None:
    """What each client of a run has spent by the run's ledger, also while the run lasts.

    Example: [bold]fedmuon privacy spent runs/private[/]
    """
    from fedmuon.experiments import spending  # torch

    record = spending.spent(folder, delta, accountant)
    tell(record, as_json, spending.table(record))


def show(answer: dict[str, Any], delta: float, population: int, as_json: bool) -> None:
    """Print an answer of the accountant; its note says if delta is large for the population."""
    note = " ".join(filter(None, (answer["note"], composition.loose(delta, population))))
    answer = {**answer, "note": note}
    tell(answer, as_json, facts("", answer.items()))


# `privacy audit`: a setting, by many simulated runs; or one real run, by many canaries.

OF_A_SETTING = ("--noise", "--lot", "--population", "--steps", "--delta")
OF_MANY_RUNS = (*OF_A_SETTING, "--blocks", "--trials", "--code")
OF_A_CONFIG = ("--canaries", "--sees", "--out", "--set", "--data", "--engine")


@app.command(cls=WithKeys)
def audit(
    context: Context,
    run: Annotated[
        Path | None,
        Argument(help="With --one-run: a config, or the folder of a run that was audited."),
    ] = None,
    noise: Annotated[float | None, Option("--noise", help=NOISE)] = None,
    lot: Annotated[float | None, Option("--lot", help=LOT)] = None,
    population: Annotated[int | None, Option("--population", help=POPULATION)] = None,
    steps: Annotated[int | None, Option("--steps", help=STEPS)] = None,
    delta: Annotated[float | None, Option("--delta", help=DELTA)] = None,
    blocks: Blocks = 1,
    trials: Annotated[
        int | None,
        Option(
            help="Runs with the canary, and as many without: 100000, or 2000 where real steps run."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        Option(
            help="Random seed of the trials, 0 by default, or with --one-run of the run. Lots, "
            "noise of steps and coins are secret."
        ),
    ] = None,
    code: Annotated[
        str,
        Option(
            help="projected: what a release is along the canary; release: real private steps of a "
            "small network (for a few steps and blocks)."
        ),
    ] = "projected",
    one_run: Annotated[
        bool, Option("--one-run", help="Train the config RUN once, with many canaries.")
    ] = False,
    canaries: Annotated[
        int | None,
        Option(
            help="With --one-run: how many; by default half as many as there are samples, or at "
            "level client clients."
        ),
    ] = None,
    sees: Annotated[
        str, Option(help="With --one-run: releases, or the final model alone (weaker).")
    ] = "releases",
    out: Annotated[
        Path | None,
        Option("--out", help="With --one-run: the run directory; a new one below runs/."),
    ] = None,
    overrides: Overrides = None,
    engine: EngineName = None,
    data: DataName = None,
    as_json: AsJson = False,
) -> None:
    """A lower bound on epsilon from canaries, beside what the accountant claims.

    Example: [bold]fedmuon privacy audit --noise 2.3395 --lot 1024 --population 42043 --steps 410
    --delta 8e-6 --blocks 49[/]

    Of the code that trains: [bold]fedmuon privacy audit --code release --noise 1 --lot 8
    --population 16 --steps 2 --delta 0.05 --blocks 2[/]

    With --one-run, --engine, --data and --seed are short for keys of the config.
    Of one whole run, whose coins are kept beside its folder: [bold]fedmuon privacy audit --one-run
    config.toml --out runs/audited[/]
    """
    given = given_in(context)
    if one_run:
        from fedmuon.experiments.auditing import one_run as auditing  # torch, scipy

        if unread := _among(given, OF_MANY_RUNS):
            raise InputError(
                f"--one-run reads no {unread}, which is for audits of many runs: leave it out"
            )
        if run is not None and run.is_dir():
            if unread := _among(given, (*OF_A_CONFIG, "--seed")):
                raise InputError(
                    f"{run} is a folder whose audit is shown, by no {unread}: leave it out"
                )
            record = auditing.read_finished(run)
            tell(record, as_json, auditing.table(record))
            return
        config = chosen_config(run, changes_of(overrides, engine, data=data, seed=seed), False)
        assert config is not None
        folder = chosen_folder(out, config)
        shown = Console(quiet=True) if as_json else console  # FORCE_COLOR has a bar even in a pipe
        with resumable(folder, []), Progress(shown) as progress:
            record = auditing.execute(
                config, folder, canaries, sees, None,
                progress.on_round_end, progress.on_start, complain,
            )  # fmt: skip
        tell(record, as_json, auditing.table(record))
        if not as_json:
            print_path("The run is in", folder)
            print_path("The coins are in", auditing.coins(folder))
        return
    if unread := _among(given, ("run", *OF_A_CONFIG)):
        raise InputError(f"audits of many runs read no {unread}: add --one-run, or leave it out")
    if noise is None or lot is None or population is None or steps is None or delta is None:
        missing = ", ".join(one for one in OF_A_SETTING if one not in given)
        raise InputError(f"{missing} is missing: give the whole setting, or a config to --one-run")
    from fedmuon.experiments.auditing import trials as auditing  # scipy

    require_at_most(1e9, noise=noise)
    setting = auditing.Setting(noise, rate(lot, population), steps, blocks)
    record = auditing.audit(setting, delta, trials, seed or 0, code, lot, population, complain)
    tell(record, as_json, auditing.table(record))


def _among(given: list[str], unread: tuple[str, ...]) -> str:
    """The options on the command line that nothing would read."""
    return ", ".join(one if one.startswith("-") else one.upper() for one in given if one in unread)
