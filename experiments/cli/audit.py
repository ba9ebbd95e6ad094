"""`privacy audit`: of a setting, by many simulated runs; or of one real run, by many canaries."""

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Context, Option

from fedmuon.experiments.cli.options import (
    AsJson,
    DataName,
    EngineName,
    Overrides,
    changes_of,
    chosen_config,
    chosen_folder,
    complain,
    console,
    given_in,
    refuse,
    require_at_most,
    resumable,
    tell,
    where,
)
from fedmuon.experiments.cli.setting import (
    DELTA,
    LOT,
    NOISE,
    POPULATION,
    STEPS,
    Blocks,
    rate,
)

SHORT = ("--data", "--engine")
OF_A_SETTING = ("--noise", "--lot", "--population", "--steps", "--delta")
OF_MANY_RUNS = (*OF_A_SETTING, "--blocks", "--trials", "--code")
OF_A_CONFIG = ("--canaries", "--sees", "--out", "--set", *SHORT)


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
            help="Of the trials, 0 by default, or with --one-run of the run: lots, noise of steps "
            "and coins are secret."
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
            help="With --one-run: whose places they take; half of all samples, or at level client "
            "of all clients."
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
        if unread := _among(given, OF_MANY_RUNS):
            refuse(f"--one-run reads no {unread}, which is for audits of many runs: leave it out")
        if run is None or not run.is_dir():
            changes = changes_of(overrides, engine, data=data, seed=seed)
            _audit_run(run, canaries, sees, out, changes, as_json)
        elif unread := _among(given, (*OF_A_CONFIG, "--seed")):
            refuse(f"{run} is a folder whose audit is shown, by no {unread}: leave it out")
        else:
            _show_audit(run, as_json)
        return
    if unread := _among(given, ("run", *OF_A_CONFIG)):
        refuse(f"audits of many runs read no {unread}: add --one-run, or leave it out")
    if noise is None or lot is None or population is None or steps is None or delta is None:
        missing = ", ".join(one for one in OF_A_SETTING if one not in given)
        refuse(f"{missing} is missing: give the whole setting, or a config to --one-run")
    from fedmuon.experiments.auditing import trials as trial
    from fedmuon.privacy.audit import Setting

    require_at_most(1e9, noise=noise)
    setting = Setting(noise, rate(lot, population), steps, blocks)
    record = trial.audit(setting, delta, trials, seed or 0, code, lot, population, _note)
    tell(record, as_json, trial.table(record))


def _note(said: str) -> None:
    """What to know before an audit runs, if anything."""
    if said:
        complain(said)


def _among(given: list[str], unread: tuple[str, ...]) -> str:
    """Those of what is given that nothing reads."""
    return ", ".join(one if one.startswith("-") else one.upper() for one in given if one in unread)


def _show_audit(folder: Path, as_json: bool) -> None:
    """What the folder of an audited run says."""
    from fedmuon.experiments.auditing import one_run

    record = one_run.of_finished(folder)
    tell(record, as_json, one_run.table(record))


def _audit_run(
    file: Path | None,
    canaries: int | None,
    sees: str,
    out: Path | None,
    changes: list[str],
    as_json: bool,
) -> None:
    """A run of the config with canaries."""
    from fedmuon.experiments.auditing import one_run
    from fedmuon.experiments.cli.show import Progress

    config = chosen_config(file, changes, False)
    assert config is not None
    folder = chosen_folder(out, config)
    shown = Console(quiet=True) if as_json else console  # FORCE_COLOR has a bar even in a pipe
    with resumable(folder, []), Progress(shown) as progress:
        record = one_run.execute(
            config, folder, canaries, sees, None, progress.watch, progress.begin, _note
        )
    tell(record, as_json, one_run.table(record))
    if not as_json:
        console.print("The run is in", where(folder), soft_wrap=True)
        console.print("The coins are in", where(one_run.coins(folder)), soft_wrap=True)
