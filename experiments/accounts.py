"""The privacy accountant and audits as functions: `epsilon`, `sigma`, `audit` and `audit_run`.

They do what `fedmuon privacy` does. The first two answer without torch.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmuon.core.errors import InputError
from fedmuon.core.files import Record, Temporary
from fedmuon.experiments.cli.privacy import alike, cut_of, rate
from fedmuon.privacy.accounting import composition
from fedmuon.privacy.accounting.composition import EpsilonResult
from fedmuon.privacy.accounting.truncated import account_cut, delta_left

OPTION = re.compile(r"--([a-z][a-z-]*)")


@dataclass(frozen=True)
class NoiseResult:
    """The least noise that meets a target epsilon.

    Attributes:
        noise: Noise multiplier sigma of one block: noise over clipping bound.
        spent: The epsilon that this noise spends, at most the target.

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
    """What an audit of many simulated runs shows about a claimed epsilon.

    Attributes:
        epsilon_at_least: The largest lower bound on epsilon.
        counted: The lower bound from counts of the trials alone.
        tilted: The lower bound that also uses the declared Gaussian noise; None if not computed.
        joint: The epsilon that the accountant certifies.
        per_release: The epsilon if each block had drawn its own lot. Nothing certifies it.
        below_joint: Whether the lower bound is at most the certified epsilon, as it must be.
        refutes_per_release: Whether counts alone refute `per_release`.
        confidence: Confidence with which the lower bounds hold.
        trials: Number of trials with the canary, and of trials without it.
        delta: Privacy parameter δ.
        note: A warning if so few trials cannot test the claim; may be empty.
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
    """What an audit of one run with many canaries shows.

    Attributes:
        path: The run folder. The secret coins lie next to it, in `NAME-coins`.
        epsilon: The epsilon of the run's ledger.
        epsilon_at_least: The largest lower bound on epsilon from counts alone.
        declared: A lower bound that trusts the declared mechanism and doubts only its noise.
        below: Whether both lower bounds are at most the epsilon of the ledger, as they must be.
        canaries: Number of canaries.
        guesses: Number of guesses about them.
        right: Number of right guesses.
        confidence: Confidence with which the lower bounds hold.
        delta: Privacy parameter δ.
        note: A warning if so few canaries cannot test the claim; may be empty.
        record: All numbers, the content of one-run.json.
        temporary: The temporary folder, if the run lies in one.

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


@contextlib.contextmanager
def _by_keyword() -> Iterator[None]:
    """Let messages name keywords where the command line has options."""
    try:
        yield
    except InputError as error:
        said = OPTION.sub(lambda one: one[1].replace("-", "_"), str(error))
        error.args = (said, *error.args[1:])
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
    max_lot: int = 0,
    accountant: str = "pld",
) -> EpsilonResult:
    """Compute the epsilon that private training spends.

    The blocks of a step share their lot. Together they are one Gaussian release with the multiplier
    noise / sqrt(blocks) (DP-Muon, Theorem 2.1).

    Args:
        noise: Noise multiplier sigma of one block: noise over clipping bound.
        lot: Expected size of a Poisson lot, or the size of lots in a fixed order.
        population: Number of examples that lots are drawn from.
        steps: Number T of noisy releases in the whole run.
        delta: Privacy parameter δ, well below 1 / population.
        blocks: Number m of blocks that are clipped each and released together.
        mode: "joint" certifies. "per-release" reproduces Table 3 of DP-Muon and certifies nothing.
        adjacency: How two data sets differ. "zero-out": an example adds 0 instead. "add-remove": it
            is there or not. "replace-one": it is any other example.
        sampling: "poisson" draws each example independently, which amplifies privacy. "shuffle" and
            "cyclic" use lots in a fixed order, without amplification.
        max_lot: Maximum size of a Poisson lot; larger lots are cut, which counts in δ. 0: none.
        accountant: "pld", or "dp-accounting" for that library, which is slower to start.

    Returns:
        ε with both ends of its bracket, and what it assumes.

    Raises:
        InputError: If a number is out of range, or no account covers the combination.

    Example:
        >>> import fedmuon
        >>> setting = {"noise": 2.3395, "lot": 1024, "population": 42043, "steps": 410}
        >>> found = fedmuon.epsilon(**setting, delta=8e-6, blocks=49)
        >>> round(found.epsilon, 2), found.certified
        (61.98, True)
    """
    over, share, many = alike(lot, population, steps, sampling, 1, mode, adjacency)
    cut = cut_of(max_lot, lot, population, steps, sampling, mode, adjacency)
    found = account_cut(
        lambda at: composition.epsilon(
            noise / over, share, many, at, blocks, mode, adjacency, accountant=accountant
        ),
        delta,
        cut,
    )
    return dataclasses.replace(found, sampling=sampling)


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
    max_lot: int = 0,
) -> NoiseResult:
    """Find the least noise multiplier that spends at most a target epsilon.

    Args:
        epsilon: Target ε.
        lot: Expected size of a Poisson lot, or the size of lots in a fixed order.
        population: Number of examples that lots are drawn from.
        steps: Number T of noisy releases in the whole run.
        delta: Privacy parameter δ, well below 1 / population.
        blocks: Number m of blocks that are clipped each and released together.
        mode: "joint" certifies. "per-release" reproduces Table 3 of DP-Muon and certifies nothing.
        adjacency: How two data sets differ: "zero-out", "add-remove" or "replace-one".
        sampling: "poisson", "shuffle" or "cyclic".
        max_lot: Maximum size of a Poisson lot; larger lots are cut, which counts in δ. 0: none.

    Returns:
        The noise multiplier, to four digits, and the epsilon that it spends.

    Raises:
        InputError: If a number is out of range, or no account covers the combination.

    Example:
        >>> import fedmuon
        >>> setting = {"lot": 256, "population": 60_000, "steps": 2000, "delta": 1e-5}
        >>> found = fedmuon.sigma(epsilon=8, **setting, blocks=4)
        >>> round(found.noise, 2)
        1.03
    """
    over, share, many = alike(lot, population, steps, sampling, 1, mode, adjacency)
    cut = cut_of(max_lot, lot, population, steps, sampling, mode, adjacency)
    left = delta_left(delta, cut, epsilon)
    if cut and left < composition.LEAST_DELTA:
        raise InputError(
            f"max_lot = {max_lot} cuts a lot with probability up to {cut:.2g}. At epsilon = "
            f"{epsilon:g} this leaves nothing of delta = {delta:g}. Raise max_lot."
        )
    noise, found = composition.noise_for(epsilon, share, many, left, blocks, mode, adjacency)
    if cut:
        found = account_cut(
            lambda at: composition.epsilon(noise, share, many, at, blocks, mode, adjacency),
            delta,
            cut,
        )
    return NoiseResult(over * noise, dataclasses.replace(found, sampling=sampling))


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
    """Bound epsilon from below by many simulated runs with and without a canary.

    Args:
        noise: Noise multiplier sigma of one block: noise over clipping bound.
        lot: Expected size of a Poisson lot.
        population: Number of examples that lots are drawn from.
        steps: Number T of noisy releases in a run.
        delta: Privacy parameter δ.
        blocks: Number m of blocks that are clipped each and released together.
        trials: Number of runs with the canary, and of runs without it. By default 100,000, or 2,000
            for `code="release"`.
        seed: Random seed of the trials.
        code: "projected" draws what a release is along the canary, which tests the accountant.
            "release" takes real private steps of a small network, which tests the training code.

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
    from fedmuon.experiments.auditing import trials as auditing  # scipy
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
    """Train one private run with many canaries, and bound its epsilon from below.

    Args:
        config: The settings of a private run: the path of a TOML file, a dictionary of tables, or a
            `fedmuon.Config`. The engine must be "inline".
        canaries: Number of canaries. By default half as many as there are samples (or clients, at
            client level).
        sees: What the guesses use: "releases", or the final "model" alone, which is weaker.
        out: A new run folder. Without it the folder is temporary, as for `run`.

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
    from fedmuon.experiments import api  # torch
    from fedmuon.experiments.auditing import one_run

    chosen = api.configured(config)
    kept = Temporary() if out is None else None
    folder = kept.path / "run" if kept is not None else Path(out or "")
    record = one_run.execute(chosen, folder, canaries, sees)
    return RunAuditResult(
        path=folder, record=record, temporary=kept, note=record.get("note", ""),
        **_fields(RunAuditResult, record, "path", "temporary", "note"),
    )  # fmt: skip


def _fields(kind: type, record: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """The fields of a result that its record has."""
    names = {one.name for one in dataclasses.fields(kind)} - {"record", *others}
    return {name: record[name] for name in names}
