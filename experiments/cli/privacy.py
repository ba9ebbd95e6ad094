"""Privacy commands: `privacy epsilon`, `sigma`, `correlated`, `tuned`, `spent`, `audit`."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument, Context, Option

import fedmuon.experiments.accounts as accounts
import fedmuon.experiments.cli.completion as completion
from fedmuon.core.errors import InputError, require_at_most
from fedmuon.experiments.cli.options import (
    Command,
    DataName,
    EngineName,
    Overrides,
    RunFolder,
    changes_of,
    chosen_config,
    chosen_folder,
    given_in,
    resumable,
)
from fedmuon.experiments.cli.output import live, print_path, tell, warn
from fedmuon.experiments.cli.show import Progress
from fedmuon.experiments.tables import facts
from fedmuon.privacy.accounting import composition, tuning
from fedmuon.privacy.mechanisms.buffered import (
    least_possible,
    noise_of_buffers,
    optimized,
    optimized_band,
)
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling, lots_of, noise_of_momentum

app = typer.Typer(
    help="Compute epsilon from noise or noise from epsilon, and audit private training.",
    no_args_is_help=True,
)

NOISE = (
    "Noise multiplier σ: the standard deviation of the noise of one parameter block, divided by "
    "the clipping bound C."
)
LOT = (
    "Number of examples in a lot, the batch of one private step. For Poisson sampling, this is the "
    "expected number."
)
POPULATION = "Number of examples that the client has."
STEPS = "Number of private steps in the whole run."
DELTA = "Privacy parameter δ, which should be well below 1 / population."
Noise = Annotated[float, Option("--noise", help=NOISE)]
Lot = Annotated[float, Option("--lot", help=LOT)]
Population = Annotated[int, Option("--population", help=POPULATION)]
Steps = Annotated[int, Option("--steps", help=STEPS)]
Delta = Annotated[float, Option("--delta", help=DELTA)]
Blocks = Annotated[
    int,
    Option(
        "--blocks",
        help=(
            "Number of parameter blocks. Each step clips every block to C, and publishes all "
            "blocks with noise."
        ),
    ),
]
Mode = Annotated[
    str,
    Option(
        "--mode",
        help=(
            "Whether the blocks of a step share one lot. `joint` assumes that they do, as in a "
            "real run. `per-release` assumes that a separate lot is drawn for each block. "
            "The epsilons in Table 3 of DP-Muon use `per-release`, and are therefore too small."
        ),
        autocompletion=completion.among("joint", "per-release"),
    ),
]
Adjacency = Annotated[
    str,
    Option(
        "--adjacency",
        help=(
            "How neighbouring data sets differ. With `zero-out`, an example contributes 0 "
            "instead of its gradient. With `add-remove`, an example is added or removed, and "
            "--population is a public number. With `replace-one`, an example is replaced by any "
            "other example."
        ),
        autocompletion=completion.among("zero-out", "add-remove", "replace-one"),
    ),
]
Sampling = Annotated[
    str,
    Option(
        "--sampling",
        help=(
            "How lots are drawn. `poisson` draws each example independently, which lowers "
            "epsilon. `shuffle` and `cyclic` cut lots from a public order of the examples, "
            "which does not lower epsilon. `balls-in-bins` puts each example into one random, "
            "secret lot, and the steps use these lots in turn. `balls-in-bins` estimates "
            "epsilon by Monte Carlo, and works only with `fedmuon privacy epsilon`."
        ),
        autocompletion=completion.among("poisson", "shuffle", "cyclic", "balls-in-bins"),
    ),
]
Band = Annotated[
    int,
    Option(
        "--band",
        help=(
            "Number of consecutive steps whose noise is correlated. 1 means independent noise. "
            "A number above 1 needs --sampling cyclic."
        ),
    ),
]
BufferCount = Annotated[
    int,
    Option(
        "--buffers",
        help=(
            "Number of buffers of BLT noise, a kind of correlated noise that needs --sampling "
            "cyclic. BLT noise is optimized for the number of steps. Use either --buffers or "
            "--band."
        ),
    ),
]
Memory = Annotated[
    float,
    Option(
        "--momentum",
        help=(
            "Momentum β for which the correlated noise is optimized. With β = 1, the noise is "
            "optimized for sums of gradients. A number other than 1 needs --band or --buffers."
        ),
    ),
]
NESTEROV = "Assume Nesterov momentum, which looks one step ahead."
Ahead = Annotated[
    bool,
    Option("--nesterov", help=f"{NESTEROV} Needs --momentum below 1, and --band or --buffers."),
]
MaxLot = Annotated[
    int,
    Option(
        "--max-lot",
        help=(
            "Maximum size of a Poisson lot. Larger lots are cut to this size, and delta "
            "includes the probability of a cut. 0 means no maximum."
        ),
    ),
]
Accountant = Annotated[
    str,
    Option(
        "--accountant",
        help=(
            "Accountant that computes epsilon. `pld` is the built-in accountant. "
            "`dp-accounting` is the Python package dp-accounting, which takes longer to load."
        ),
        autocompletion=completion.among("pld", "dp-accounting"),
    ),
]
MOST_OPTIMIZED, MOST_BOUNDED = 10_000, 1000  # maximum steps, so that a command takes seconds


@app.command(cls=Command)
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
        int | None,
        Option(
            help="Number of Monte Carlo draws for --sampling balls-in-bins. Default: 1,000,000."
        ),
    ] = None,
    accountant: Accountant = "pld",
) -> None:
    """Compute the epsilon that a noise multiplier spends, with lower and upper bounds.

    Example: [bold]fedmuon privacy epsilon --noise 1.1 --lot 256 --population 60000 --steps 2000
    --delta 1e-5[/]
    """
    if sampling == accounts.BINS:
        idle = {"--max-lot": max_lot != 0, "--accountant": accountant != "pld"}
        for option, used in idle.items():
            if used:
                raise InputError(
                    f"{option} has no effect with --sampling balls-in-bins. Remove {option}."
                )
        correlation = band, (momentum, nesterov), buffers
        setting = noise, lot, population, steps, delta, blocks, mode, adjacency
        result = accounts.answer_of_bins(*setting, correlation, 10**6 if trials is None else trials)
        show(result, delta, population)
        return
    if trials is not None:
        raise InputError(
            "--trials has an effect only with --sampling balls-in-bins. Remove --trials."
        )
    arguments = noise, lot, population, steps, delta, blocks, mode, adjacency, sampling
    correlation = band, (momentum, nesterov), buffers
    answer, cut = accounts.epsilon_and_cut(*arguments, correlation, max_lot, accountant)
    extra = {"lots_cut_with_probability": cut} if max_lot else {}
    show({**vars(answer), **extra}, delta, population)


@app.command(cls=Command)
def sigma(
    epsilon: Annotated[float, Option(help="Maximum epsilon that the run may spend.")],
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
) -> None:
    """Compute the smallest noise multiplier whose epsilon is at most a given value.

    Example: [bold]fedmuon privacy sigma --epsilon 8 --lot 256 --population 60000 --steps 2000
    --delta 1e-5 --blocks 4[/]
    """
    arguments = epsilon, lot, population, steps, delta, blocks, mode, adjacency, sampling
    correlation = band, (momentum, nesterov), buffers
    noise, answer, cut = accounts.noise_and_cut(*arguments, correlation, max_lot)
    result = {"noise": noise, **vars(answer)}
    result |= {"lots_cut_with_probability": cut} if max_lot else {}
    show(result, delta, population)


@app.command(cls=Command)
def correlated(
    lot: Lot,
    population: Population,
    steps: Steps,
    momentum: Annotated[
        float,
        Option(
            help=(
                "Momentum β. With β = 1, the command compares the noise in sums of gradients "
                "instead of the noise in a momentum."
            )
        ),
    ] = 0.95,
    nesterov: Annotated[bool, Option("--nesterov", help=NESTEROV)] = False,
    band: Annotated[
        int, Option(help="Number of consecutive steps whose noise is correlated.")
    ] = 16,
    buffers: Annotated[
        int, Option(help="Number of buffers of BLT noise, a kind of correlated noise.")
    ] = 2,
) -> None:
    """Compare kinds of correlated noise at equal epsilon.

    The comparison uses the noise in the momentum, which Muon orthogonalizes. The command assumes
    cyclic lots. In the table, each name in parentheses is a value of the config key \\[privacy]
    noise-correlation. With at most 1000 steps, the last row of the table is a lower bound for every
    kind of correlation.

    Example: [bold]fedmuon privacy correlated --lot 256 --population 10000 --steps 200 --nesterov[/]
    """
    require_at_most(1e5, steps=steps)
    accounts.rate(lot, population)
    accounts.require_momentum(momentum, nesterov)
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
    target = [*forms][-1]
    noise = {"independent": of_band(np.ones(1))}
    for name, form in forms.items():
        key = "momentum" if name != "for sums" else "sqrt-toeplitz"
        in_band = FixedOrderSampling("cyclic", band, *form).coefficients(steps)
        noise[f"band of {band} {name} ({key})"] = of_band(in_band)
    if steps <= MOST_OPTIMIZED:
        best = optimized_band(steps, apart, band, *of_momentum)
        noise[f"band of {band} {target}, optimized"] = of_band(best)
    for name, form in forms.items():
        key = "blt-momentum" if name != "for sums" else "blt"
        noise[f"{buffers} buffers {name} ({key})"] = of_buffers(*form)
    if steps <= MOST_BOUNDED:
        noise["lower bound for any correlation"] = least_possible(steps, apart, *of_momentum)
    tell(
        {"noise": noise},
        facts(
            f"noise in one entry of the {'sum' if momentum == 1 else 'momentum'}, relative to "
            "one release of all examples with the same ε",
            [(name, f"{value:.4g}") for name, value in noise.items()],
        ),
    )


@app.command(cls=Command)
def tuned(
    runs: Annotated[
        float, Option(help=("Expected number of runs, of which only the best run is published."))
    ],
    noise: Noise,
    lot: Lot,
    population: Population,
    steps: Steps,
    delta: Delta,
    blocks: Blocks = 1,
    shape: Annotated[
        str,
        Option(
            help="Distribution of the number of runs: `logarithmic` or `geometric`.",
            autocompletion=completion.among("logarithmic", "geometric"),
        ),
    ] = "logarithmic",
    adjacency: Adjacency = "zero-out",
    draw: Annotated[
        bool,
        Option(
            "--draw",
            help=(
                "Also draw the number of runs at random. Draw the number of runs only once, "
                "before the first run."
            ),
        ),
    ] = False,
) -> None:
    """Compute the epsilon of publishing only the best of several private runs.

    The epsilon is valid under three conditions. You draw the settings of each run at random from a
    list. You keep the random number of runs secret. You publish nothing about the other runs. To
    compare the runs, you may use only their releases and public data (Papernot and Steinke 2022).

    Example: [bold]fedmuon privacy tuned --runs 20 --noise 1.1 --lot 256 --population 60000
    --steps 2000 --delta 1e-5[/]
    """
    share = accounts.rate(lot, population)
    answer = tuning.answer(noise, share, steps, delta, blocks, runs, shape, adjacency)
    extra = {"runs_drawn": tuning.draw(runs, shape)} if draw else {}
    show({**answer, **extra}, delta, population)


@app.command(cls=Command)
def spent(
    folder: RunFolder,
    delta: Annotated[
        float | None, Option(help="Privacy parameter δ. Default: the δ of the run.")
    ] = None,
    accountant: Accountant = "pld",
) -> None:
    """Compute the epsilon that each client of a private run has spent so far.

    The command reads the run's ledger. The run may be unfinished. For a folder of `run --seeds` or
    `sweep`, the command shows the epsilon of each run, and the epsilon that all runs spend
    together.

    Example: [bold]fedmuon privacy spent runs/private[/]
    """
    from fedmuon.experiments import spending  # torch

    if not (folder / spending.LEDGER).exists() and (runs := spending.runs_of(folder)):
        record = spending.spent_of_runs(runs, delta, accountant)
        tell(record, spending.table_of_runs(record))
        return
    record = spending.spent(folder, delta, accountant)
    tell(record, spending.table(record))


def show(answer: dict[str, Any], delta: float, population: int) -> None:
    """Print an answer of the accountant, with a note if delta is large for this population."""
    note = " ".join(filter(None, (answer["note"], composition.loose(delta, population))))
    answer = {**answer, "note": note}
    tell(answer, facts("", answer.items()))


# `privacy audit` audits a setting with many simulated runs, or one real run with many canaries.

OF_A_SETTING = ("--noise", "--lot", "--population", "--steps", "--delta")
OF_MANY_RUNS = (*OF_A_SETTING, "--blocks", "--trials", "--code")
OF_A_CONFIG = ("--canaries", "--sees", "--out", "--set", "--data", "--engine")


@app.command(cls=Command)
def audit(
    context: Context,
    run: Annotated[
        Path | None,
        Argument(
            help=("For --one-run: a config file to train, or the run folder of a finished audit.")
        ),
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
            help=(
                "Number of simulated runs with the canary. The command simulates the same "
                "number of runs without the canary. Default: 2000 with --code release, "
                "otherwise 100000."
            )
        ),
    ] = None,
    seed: Annotated[
        int | None,
        Option(
            help=(
                "Random seed of the simulated runs (default: 0). With --one-run, the training "
                "run uses this seed. In real training steps, lots, noise and the coins of "
                "canaries are secret and do not depend on the seed."
            )
        ),
    ] = None,
    code: Annotated[
        str,
        Option(
            help=(
                "What is simulated. `projected` simulates only one number per noisy gradient, "
                "the component along the canary. `release` simulates private training steps of "
                "a small network, and is fast only for few steps and blocks."
            ),
            autocompletion=completion.among("projected", "release"),
        ),
    ] = "projected",
    one_run: Annotated[
        bool,
        Option(
            "--one-run", help=("Train one run with many canaries, instead of simulating many runs.")
        ),
    ] = False,
    canaries: Annotated[
        int | None,
        Option(
            help=(
                "Number of canaries for --one-run. Default: half of the samples. If "
                "privacy.level=client, the default is half of the clients."
            )
        ),
    ] = None,
    sees: Annotated[
        str,
        Option(
            help=(
                "What the attack of --one-run sees. With `releases`, the attack sees every "
                "noisy result that the run publishes. With `model`, the attack sees only the "
                "final model."
            ),
            autocompletion=completion.among("releases", "model"),
        ),
    ] = "releases",
    out: Annotated[
        Path | None,
        Option("--out", help="Run folder for --one-run. Default: a new folder in runs/."),
    ] = None,
    overrides: Overrides = None,
    engine: EngineName = None,
    data: DataName = None,
) -> None:
    """Audit epsilon: compute a lower bound with an attack, and the accountant's upper bound.

    The attack tries to detect inserted examples (canaries). Without --one-run, the command
    simulates many runs of the setting that the options describe.

    Example: [bold]fedmuon privacy audit --noise 2.3395 --lot 1024 --population 42043 --steps 410
    --delta 8e-6 --blocks 49[/]

    With the training code instead of a simulation: [bold]fedmuon privacy audit --code release
    --noise 1 --lot 8 --population 16 --steps 2 --delta 0.05 --blocks 2[/]

    With --one-run, the command trains a config once, with many canaries. The options --engine,
    --data and --seed change keys of this config. A secret coin per canary decides whether the
    run trains on the canary. The command saves the coins next to the run folder.

    For one run: [bold]fedmuon privacy audit --one-run config.toml --out runs/audited[/]
    """
    options = given_in(context)
    if one_run:
        from fedmuon.experiments.auditing import one_run as auditing  # torch, scipy

        if unread := _among(options, OF_MANY_RUNS):
            raise InputError(
                f"--one-run does not accept {unread}, which only audits of many runs use. Remove "
                f"{unread}, or leave --one-run out."
            )
        if run is not None and run.is_dir():
            if unread := _among(options, (*OF_A_CONFIG, "--seed")):
                raise InputError(
                    f"{run} is the folder of an audited run, so the command only shows its "
                    f"audit. Remove {unread}, or pass a config file instead of the folder to "
                    "start a new audit."
                )
            record = auditing.read_finished(run)
            tell(record, auditing.table(record))
            return
        config = chosen_config(run, changes_of(overrides, engine, data=data, seed=seed), False)
        assert config is not None
        folder = chosen_folder(out, config)
        with resumable(folder, []), Progress(live()) as progress:
            record = auditing.execute(
                config, folder, canaries, sees, None,
                progress.on_round_end, progress.on_start, warn,
            )  # fmt: skip
        tell(record, auditing.table(record))
        print_path("The run is in", folder)
        print_path(
            "The coins, which show the canaries that were included, are in", auditing.coins(folder)
        )
        return
    if unread := _among(options, ("run", *OF_A_CONFIG)):
        raise InputError(
            f"an audit of many runs does not accept {unread}. Add --one-run, or remove {unread}."
        )
    if noise is None or lot is None or population is None or steps is None or delta is None:
        missing = ", ".join(option for option in OF_A_SETTING if option not in options)
        raise InputError(
            f"an audit of many runs also needs {missing}. Add {missing}, or use --one-run with a "
            "config."
        )
    from fedmuon.experiments.auditing import trials as auditing  # scipy

    require_at_most(1e9, noise=noise)
    setting = auditing.Setting(noise, accounts.rate(lot, population), steps, blocks)
    record = auditing.audit(setting, delta, trials, seed or 0, code, lot, population, warn)
    tell(record, auditing.table(record))


def _among(options: list[str], unread: tuple[str, ...]) -> str:
    """Return the options on the command line that have no effect."""
    return ", ".join(
        option if option.startswith("-") else option.upper()
        for option in options
        if option in unread
    )
