"""The privacy accountant and audits as functions: `epsilon`, `sigma`, `audit` and `audit_run`.

`fedmuon privacy` computes the same values. `epsilon` and `sigma` do not import torch.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmuon.core.errors import InputError, require_at_most, shown
from fedmuon.core.files import Record, Temporary
from fedmuon.privacy.accounting import composition
from fedmuon.privacy.accounting.composition import EpsilonResult
from fedmuon.privacy.accounting.truncated import account_cut, cut_probability, delta_left
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling, lots_of

MOST_PEOPLE = 10**12
BINS, CONFIDENCE = "balls-in-bins", 0.999
OPTION = re.compile(r"--([a-z][a-z-]*)")


@dataclass(frozen=True)
class NoiseResult:
    """The smallest noise multiplier that meets a target epsilon.

    Attributes:
        noise: Noise multiplier σ of one block: the standard deviation of the noise divided by the
            clipping bound.
        spent: The epsilon that this noise spends, which is at most the target.

    Example:
        >>> import fedmuon
        >>> found = fedmuon.sigma(epsilon=8, lot=256, population=60_000, steps=100, delta=1e-5)
        >>> found.spent.epsilon <= 8
        True
    """

    noise: float
    spent: EpsilonResult


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit that tests a claimed epsilon with many simulated runs.

    Attributes:
        epsilon_at_least: The largest lower bound on epsilon.
        counted: The lower bound that uses only the trial counts.
        tilted: The lower bound that also uses the declared Gaussian noise, or None if it was not
            computed.
        joint: The epsilon that the accountant certifies.
        per_release: The epsilon, without a certificate, of a mechanism in which each block draws
            its own lot.
        below_joint: Whether the lower bound is at most the certified epsilon. If it is False, the
            audit refutes the certified epsilon.
        refutes_per_release: Whether counts alone refute `per_release`.
        confidence: Confidence with which the lower bounds hold.
        trials: Number of trials with the canary. The number of trials without the canary is the
            same.
        delta: Privacy parameter δ.
        note: A warning if the number of trials is too small to test the claim, otherwise "".
        record: All numbers, as `fedmuon privacy audit --json` prints them.

    Example:
        >>> import fedmuon
        >>> found = fedmuon.audit(noise=1.0, lot=8, population=16, steps=2, delta=0.05, trials=2000)
        >>> found.below_joint
        True
    """

    epsilon_at_least: float
    counted: float
    tilted: float | None
    joint: float
    per_release: float
    below_joint: bool
    refutes_per_release: bool
    confidence: float
    trials: int
    delta: float
    note: str
    record: Record = dataclasses.field(repr=False)


@dataclass(frozen=True)
class RunAuditResult:
    """The result of an audit of one run with many canaries.

    Attributes:
        path: The run folder NAME. The secret coins are stored next to this folder, in `NAME-coins`.
        epsilon: The epsilon of the run's ledger.
        epsilon_at_least: The largest lower bound on epsilon that uses only the guess counts.
        declared: A lower bound that assumes the declared mechanism, but not its noise level.
        below: Whether both lower bounds are at most the epsilon of the ledger. If it is False,
            the audit refutes the epsilon of the ledger.
        canaries: Number of canaries.
        guesses: Number of guesses about whether a canary was included.
        right: Number of right guesses.
        confidence: Confidence with which the lower bounds hold.
        delta: Privacy parameter δ.
        note: A warning if the number of canaries is too small to test the claim, otherwise "".
        record: All numbers of the audit, as in the file one-run.json.
        temporary: The temporary folder, if the run is stored in one.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 2, "rounds": 2},
        ...          "local": {"recipe": "dp-sgd", "steps": 1},
        ...          "privacy": {"noise": 2.0, "lot": 8.0, "delta": 1e-3}}
        >>> found = fedmuon.audit_run(small, canaries=10)
        >>> found.canaries, found.right <= found.guesses
        (10, True)
    """

    path: Path
    epsilon: float
    epsilon_at_least: float
    declared: float
    below: bool
    canaries: int
    guesses: int
    right: int
    confidence: float
    delta: float
    note: str
    record: Record = dataclasses.field(repr=False)
    temporary: Temporary | None = dataclasses.field(default=None, repr=False, compare=False)


# The numbers of a setting, which the command line shares.


def rate(lot: float, population: int) -> float:
    """Return the probability that an example is in a lot."""
    if not 1 <= population <= MOST_PEOPLE:
        raise InputError(
            f"--population is {shown(population)}, but it must be between 1 and {MOST_PEOPLE:,}."
        )
    if not 0 < lot <= population:
        raise InputError(
            f"--lot is {lot:g}, but it must be positive and at most --population = {population}."
        )
    return lot / population


def _require_adjacency(adjacency: str) -> None:
    """Raise an error if no accountant supports this adjacency."""
    if adjacency not in composition.ADJACENCIES:
        raise InputError(
            f"--adjacency is '{adjacency}', but it must be one of "
            f"{', '.join(composition.ADJACENCIES)}."
        )


def alike(
    lot: float,
    population: int,
    steps: int,
    sampling: str,
    mode: str,
    adjacency: str,
    correlation: tuple[int, tuple[float, bool], int],
) -> tuple[float, float, int]:
    """Replace the sampling by Poisson sampling that spends the same epsilon.

    Lots in a fixed order are replaced by one release of all examples. `correlation` describes
    correlated noise by its band, its momentum and its number of buffers. The momentum is a pair:
    beta, and whether the momentum is Nesterov momentum.

    Returns:
        A divisor s, the sampling rate and the number of steps. Poisson lots with this rate and this
        number of steps spend the same epsilon if their noise is divided by s.
    """
    band, momentum, buffers = correlation
    share = rate(lot, population)
    if sampling == BINS:
        raise InputError(
            "With balls-in-bins, fedmuon can compute the epsilon of a given noise, but not the "
            "noise for a given epsilon. Use `fedmuon privacy epsilon`, or use another --sampling "
            "such as poisson."
        )
    if sampling not in ("poisson", "shuffle", "cyclic"):
        raise InputError(
            f"--sampling is '{sampling}', but it must be poisson, shuffle or cyclic. To compute an "
            f"epsilon, it can also be {BINS}."
        )
    _require_adjacency(adjacency)
    option = "--buffers" if buffers else "--band"
    if (band != 1 or buffers) and sampling != "cyclic":
        raise InputError(
            f"{option} has an effect only with --sampling cyclic. Add --sampling cyclic, or "
            f"remove {option}."
        )
    _require_correlation(sampling, band, momentum, buffers)
    if sampling not in ("shuffle", "cyclic"):
        return 1.0, share, steps
    composition.event(1.0, share, steps)  # rejects impossible steps
    if mode != "joint":
        raise InputError(
            f"--mode is '{mode}', which supports only --sampling poisson, but --sampling is "
            f"'{sampling}'. Remove --mode or --sampling."
        )
    if adjacency == "add-remove":
        raise InputError(
            f"--adjacency is 'add-remove', but in the fixed order of --sampling {sampling}, adding "
            "one example moves other examples to other lots. Use --adjacency zero-out or "
            "replace-one, or --sampling poisson."
        )
    if lot != int(lot):
        raise InputError(
            f"--lot is {lot:g}, but --sampling {sampling} cuts lots of a fixed size from an order "
            "of the examples. Set --lot to an integer, or use --sampling poisson."
        )
    lots = lots_of(population, lot)
    fixed_order = fixed_order_of(sampling, steps, lots, band, momentum, buffers)
    return fixed_order.alike(steps, lots), 1.0, 1


def _require_correlation(
    sampling: str, band: int, momentum: tuple[float, bool], buffers: int
) -> None:
    """Raise an error for a momentum without correlated noise, or Nesterov momentum with beta = 1.

    For balls-in-bins, `sampling` is "cyclic".
    """
    beta, nesterov = momentum
    if momentum != (1.0, False) and band == 1 and not buffers:
        option = "--nesterov" if beta == 1 else "--momentum"
        needed = ["--band or --buffers"]
        if sampling != "cyclic":
            needed.insert(0, "--sampling cyclic")
        if nesterov and beta == 1:
            needed.insert(-1, "--momentum below 1")
        *before, last = needed
        listed = ", ".join([*before, f"and {last}"]) if before else last
        raise InputError(
            f"{option} has an effect only on correlated noise. Add {listed}, or remove {option}."
        )
    require_momentum(*momentum)


def require_momentum(beta: float, nesterov: bool) -> None:
    """Raise an error for Nesterov momentum without a momentum below 1."""
    if nesterov and beta == 1:
        raise InputError(
            "--nesterov needs --momentum below 1, but --momentum is 1. Set --momentum to a number "
            "below 1, such as 0.95, or remove --nesterov."
        )


def fixed_order_of(
    sampling: str, steps: int, lots: int, band: int, momentum: tuple[float, bool], buffers: int
) -> FixedOrderSampling:
    """Return a sampling in a fixed order with the correlated noise that the options describe."""
    if band != 1 and buffers:
        raise InputError(
            "--band and --buffers are two ways to correlate the noise. Remove one of them."
        )
    _require_correlation("cyclic", band, momentum, buffers)
    if buffers:
        require_at_most(1e5, steps=steps)
        from fedmuon.privacy.mechanisms.buffered import optimized  # scipy

        buffer_weights = optimized(steps, lots, buffers, *momentum)
        return FixedOrderSampling("cyclic", 0, *momentum, buffer_weights)
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
    """Return the epsilons of secret balls-in-bins lots and of the same lots in a public order.

    `correlation` describes the noise by its band, its momentum and its number of buffers.
    """
    from fedmuon.privacy.accounting.balls_in_bins import epsilon_of_bins  # scipy

    _require_adjacency(adjacency)
    composition.require_delta(delta)
    joint = composition.event(noise, rate(lot, population), steps, blocks, mode).noise_multiplier
    if adjacency == "replace-one":
        raise InputError(
            f"--adjacency is '{adjacency}', but balls-in-bins supports only --adjacency zero-out "
            "and --adjacency add-remove. Remove --adjacency."
        )
    if mode != "joint":
        raise InputError(
            f"--mode is '{mode}', but balls-in-bins supports only --mode joint. Remove --mode."
        )
    require_at_most(1e5, steps=steps)
    bins = lots_of(population, lot)
    ordered = fixed_order_of("cyclic", steps, bins, *correlation)
    fixed = composition.epsilon(noise / ordered.alike(steps, bins), 1.0, 1, delta, blocks).upper
    estimate = epsilon_of_bins(
        ordered.coefficients(steps), steps, bins, joint, delta, trials, CONFIDENCE
    )
    upper = min(estimate.upper, fixed)
    return {
        "epsilon": upper,
        "lower": min(estimate.lower, upper),
        "upper": upper,
        "in_a_public_order": fixed,
        "mode": mode,
        "accountant": f"Monte Carlo, {estimate.trials:,} trials",
        "adjacency": adjacency,
        "sampling": BINS,
        "bins": bins,
        "confidence": CONFIDENCE,
        "certified": False,
        "note": (
            f"The lower and the upper bound hold with a confidence of {CONFIDENCE:.1%} over the "
            "trials, but they are not proved. Training does not support balls-in-bins: [privacy] "
            "sampling is poisson, shuffle or cyclic."
        ),
    }


def cut_of(
    most: int, lot: float, population: int, steps: int, sampling: str, mode: str, adjacency: str
) -> float:
    """Return a bound on the probability that a lot exceeds `most`.

    If `most` is 0, the result is 0.
    """
    if not most:
        return 0.0
    allowed = {
        "--sampling": (sampling, ("poisson",)),
        "--mode": (mode, ("joint",)),
        "--adjacency": (adjacency, ("zero-out", "replace-one")),
    }
    for option, (value, supported) in allowed.items():
        if value not in supported:
            raise InputError(
                f"{option} is '{value}', but --max-lot works only with {option} "
                f"{' or '.join(supported)}. Remove --max-lot, or change {option}."
            )
    if most < lot:
        raise InputError(
            f"--max-lot is {most}, but it must be at least --lot = {lot:g}. Increase --max-lot, "
            "or remove it."
        )
    return min(1.0, steps * cut_probability(population, rate(lot, population), most))


def epsilon_and_cut(
    noise: float,
    lot: float,
    population: int,
    steps: int,
    delta: float,
    blocks: int,
    mode: str,
    adjacency: str,
    sampling: str,
    correlation: tuple[int, tuple[float, bool], int],
    max_lot: int,
    accountant: str,
) -> tuple[EpsilonResult, float]:
    """Return the epsilon of a run, and a bound on the probability that a lot exceeds `max_lot`.

    `correlation` describes correlated noise by three values: its band, its momentum and its number
    of buffers.
    """
    divisor, share, n_steps = alike(lot, population, steps, sampling, mode, adjacency, correlation)
    cut = cut_of(max_lot, lot, population, steps, sampling, mode, adjacency)
    result = account_cut(
        lambda at: composition.epsilon(
            noise / divisor, share, n_steps, at, blocks, mode, adjacency, accountant=accountant
        ),
        delta,
        cut,
    )
    if cut and math.isinf(result.upper):
        raise InputError(
            f"with --max-lot {max_lot}, a lot is cut with probability up to {cut:.2g}. This "
            f"probability uses up the whole delta = {delta:g}. Increase --max-lot."
        )
    return dataclasses.replace(result, sampling=sampling), cut


def noise_and_cut(
    epsilon: float,
    lot: float,
    population: int,
    steps: int,
    delta: float,
    blocks: int,
    mode: str,
    adjacency: str,
    sampling: str,
    correlation: tuple[int, tuple[float, bool], int],
    max_lot: int,
) -> tuple[float, EpsilonResult, float]:
    """Return the smallest noise for an epsilon.

    The result also contains the epsilon that this noise spends, and a bound on the probability that
    lots are truncated.
    """
    divisor, share, n_steps = alike(lot, population, steps, sampling, mode, adjacency, correlation)
    cut = cut_of(max_lot, lot, population, steps, sampling, mode, adjacency)
    left = delta_left(delta, cut, epsilon)
    if cut and left < composition.LEAST_DELTA:
        raise InputError(
            f"with --max-lot {max_lot}, a lot is cut with probability up to {cut:.2g}. At epsilon "
            f"= {epsilon:g}, this probability uses up the whole delta = {delta:g}. Increase "
            "--max-lot."
        )
    noise, result = composition.noise_for(epsilon, share, n_steps, left, blocks, mode, adjacency)
    if cut:
        result = account_cut(
            lambda at: composition.epsilon(noise, share, n_steps, at, blocks, mode, adjacency),
            delta,
            cut,
        )
    return divisor * noise, dataclasses.replace(result, sampling=sampling), cut


# The public functions.


@contextlib.contextmanager
def _by_keyword() -> Iterator[None]:
    """Make error messages name Python keywords instead of command-line options."""
    try:
        yield
    except InputError as error:
        message = OPTION.sub(lambda match: match[1].replace("-", "_"), str(error))
        error.args = (message, *error.args[1:])
        raise


@_by_keyword()
def epsilon(
    *,
    noise: float,
    lot: float,
    population: int,
    steps: int,
    delta: float,
    blocks: int = 1,
    mode: str = "joint",
    adjacency: str = "zero-out",
    sampling: str = "poisson",
    band: int = 1,
    buffers: int = 0,
    momentum: float = 1.0,
    nesterov: bool = False,
    max_lot: int = 0,
    accountant: str = "pld",
) -> EpsilonResult:
    """Compute the epsilon that private training spends.

    The blocks of a step share one lot, and together form one Gaussian release. The multiplier of
    this release is noise / sqrt(blocks) (DP-Muon, Theorem 2.1).

    Args:
        noise: Noise multiplier σ of one block: the standard deviation of the noise divided by the
            clipping bound.
        lot: Expected size of a Poisson lot, or the size of lots in a fixed order.
        population: Number of examples from which the lots are drawn.
        steps: Number T of noisy releases in the whole run.
        delta: Privacy parameter δ, well below 1 / population.
        blocks: Number m of blocks that are clipped separately and released together.
        mode: How ε is computed. "joint" computes a certified ε. "per-release" reproduces Table 3 of
            DP-Muon, and its ε is not certified.
        adjacency: How two data sets differ. "zero-out": one example contributes 0. "add-remove":
            one example is absent. "replace-one": one example is replaced by any other example.
        sampling: "poisson" draws each example independently, which amplifies privacy. "shuffle" and
            "cyclic" use lots in a fixed order, without amplification.
        band: Number of steps whose noise is correlated, for the sampling "cyclic". Use 1 for
            independent noise.
        buffers: Number of buffers of BLT noise (buffered linear Toeplitz), for the sampling
            "cyclic". Pass `band` or `buffers`, not both.
        momentum: The momentum beta of the optimizer, for which the correlated noise is optimized.
            Use 1 to optimize the noise for prefix sums. Another value needs `band` or `buffers`.
        nesterov: Whether the momentum is Nesterov momentum, which looks one step ahead. Needs
            `momentum` below 1, and `band` or `buffers`.
        max_lot: Maximum size of a Poisson lot, or 0 for no maximum. Larger lots are truncated, and
            δ includes the probability of a truncated lot.
        accountant: "pld" for the built-in accountant, or "dp-accounting" for the package of this
            name, which takes longer to load.

    Returns:
        An upper and a lower bound on ε, and the assumptions under which they hold.

    Raises:
        InputError: If a number is out of range, or no accountant supports the combination.

    Example:
        >>> import fedmuon
        >>> setting = {"noise": 2.3395, "lot": 1024, "population": 42043, "steps": 410}
        >>> found = fedmuon.epsilon(**setting, delta=8e-6, blocks=49)
        >>> round(found.epsilon, 2), found.certified
        (61.98, True)
    """
    setting = noise, lot, population, steps, delta, blocks, mode, adjacency, sampling
    correlation = band, (momentum, nesterov), buffers
    return epsilon_and_cut(*setting, correlation, max_lot, accountant)[0]


@_by_keyword()
def sigma(
    *,
    epsilon: float,
    lot: float,
    population: int,
    steps: int,
    delta: float,
    blocks: int = 1,
    mode: str = "joint",
    adjacency: str = "zero-out",
    sampling: str = "poisson",
    band: int = 1,
    buffers: int = 0,
    momentum: float = 1.0,
    nesterov: bool = False,
    max_lot: int = 0,
) -> NoiseResult:
    """Find the smallest noise multiplier that spends at most a target epsilon.

    Args:
        epsilon: Target ε.
        lot: Expected size of a Poisson lot, or the size of lots in a fixed order.
        population: Number of examples from which the lots are drawn.
        steps: Number T of noisy releases in the whole run.
        delta: Privacy parameter δ, well below 1 / population.
        blocks: Number m of blocks that are clipped separately and released together.
        mode: How ε is computed. "joint" computes a certified ε. "per-release" reproduces Table 3 of
            DP-Muon, and its ε is not certified.
        adjacency: How two data sets differ: "zero-out", "add-remove" or "replace-one".
        sampling: How lots are chosen: "poisson", "shuffle" or "cyclic".
        band: Number of steps whose noise is correlated, for the sampling "cyclic". Use 1 for
            independent noise.
        buffers: Number of buffers of BLT noise (buffered linear Toeplitz), for the sampling
            "cyclic". Pass `band` or `buffers`, not both.
        momentum: The momentum beta of the optimizer, for which the correlated noise is optimized.
            Use 1 to optimize the noise for prefix sums. Another value needs `band` or `buffers`.
        nesterov: Whether the momentum is Nesterov momentum, which looks one step ahead. Needs
            `momentum` below 1, and `band` or `buffers`.
        max_lot: Maximum size of a Poisson lot, or 0 for no maximum. Larger lots are truncated, and
            δ includes the probability of a truncated lot.

    Returns:
        The noise multiplier with four digits, and the epsilon that this noise spends.

    Raises:
        InputError: If a number is out of range, or no accountant supports the combination.

    Example:
        >>> import fedmuon
        >>> setting = {"lot": 256, "population": 60_000, "steps": 2000, "delta": 1e-5}
        >>> found = fedmuon.sigma(epsilon=8, **setting, blocks=4)
        >>> round(found.noise, 2)
        1.03
    """
    setting = epsilon, lot, population, steps, delta, blocks, mode, adjacency, sampling
    correlation = band, (momentum, nesterov), buffers
    return NoiseResult(*noise_and_cut(*setting, correlation, max_lot)[:2])


@_by_keyword()
def audit(
    *,
    noise: float,
    lot: float,
    population: int,
    steps: int,
    delta: float,
    blocks: int = 1,
    trials: int | None = None,
    seed: int = 0,
    code: str = "projected",
) -> AuditResult:
    """Compute a lower bound on epsilon from many simulated runs with and without a canary.

    Args:
        noise: Noise multiplier σ of one block: the standard deviation of the noise divided by the
            clipping bound.
        lot: Expected size of a Poisson lot.
        population: Number of examples from which the lots are drawn.
        steps: Number T of noisy releases in a run.
        delta: Privacy parameter δ.
        blocks: Number m of blocks that are clipped separately and released together.
        trials: Number of runs with the canary. The number of runs without the canary is the same.
            The default is 100,000, or 2,000 for `code="release"`.
        seed: Random seed of the trials.
        code: The part under test. "projected" tests the accountant: it draws only the component of
            each release along the canary. "release" tests the training code: it takes private steps
            of a small network.

    Returns:
        The lower bounds and the epsilons that the accountant claims.

    Raises:
        InputError: If a number is out of range, or the trials would run for half an hour or more.

    Example:
        >>> import fedmuon
        >>> found = fedmuon.audit(noise=1.0, lot=8, population=16, steps=2, delta=0.05, trials=2000)
        >>> found.epsilon_at_least <= found.joint
        True
    """
    from fedmuon.experiments.auditing import trials as auditing  # imports scipy
    from fedmuon.privacy.audit import Setting

    setting = Setting(noise, rate(lot, population), steps, blocks)
    record = auditing.audit(setting, delta, trials, seed, code, lot, population)
    return AuditResult(
        tilted=record.get("tilted"), record=record, **_fields(AuditResult, record, "tilted")
    )


@_by_keyword()
def audit_run(
    config: Any = None,
    *,
    canaries: int | None = None,
    sees: str = "releases",
    out: str | Path | None = None,
) -> RunAuditResult:
    """Train one private run with many canaries, and compute a lower bound on its epsilon.

    Args:
        config: The settings of a private run: the path of a TOML file, a dictionary of tables, or a
            `fedmuon.Config`. The engine must be "inline".
        canaries: Number of canaries. The default is half the number of samples, or half the number
            of clients at client level.
        sees: The data that the guesses use: "releases", or only the final "model", which gives
            weaker bounds.
        out: A new run folder. Without `out`, the folder is temporary, as for `run`.

    Returns:
        The lower bounds, and the epsilon of the run's ledger.

    Raises:
        InputError: If the run is not private, or its mechanism cannot be audited.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 2, "rounds": 2},
        ...          "local": {"recipe": "dp-sgd", "steps": 1},
        ...          "privacy": {"noise": 2.0, "lot": 8.0, "delta": 1e-3}}
        >>> found = fedmuon.audit_run(small, canaries=10)
        >>> found.below
        True
    """
    from fedmuon.experiments import api  # imports torch
    from fedmuon.experiments.auditing import one_run

    run_config = api.configured(config)
    temporary = Temporary() if out is None else None
    folder = temporary.path / "run" if temporary is not None else Path(out or "")
    record = one_run.execute(run_config, folder, canaries, sees)
    return RunAuditResult(
        path=folder, record=record, temporary=temporary, note=record.get("note", ""),
        **_fields(RunAuditResult, record, "path", "temporary", "note"),
    )  # fmt: skip


def _fields(kind: type, record: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the entries of a record that are fields of the result class."""
    names = {field.name for field in dataclasses.fields(kind)} - {"record", *others}
    return {name: record[name] for name in names}
