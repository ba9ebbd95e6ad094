"""The command `certify`: all certificates of the risk of a run's model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option

import fedmuon.experiments.cli.completion as completion
import fedmuon.experiments.cli.options as options
from fedmuon.core.errors import InputError
from fedmuon.core.files import require_writable, write_bytes
from fedmuon.experiments.certifying.rows import GUESS
from fedmuon.experiments.cli.output import print_path, tell, warn

if TYPE_CHECKING:
    from fedmuon.experiments.certifying.groups import GroupCertificates
    from fedmuon.experiments.certifying.rows import RiskCertificates


def certify(
    run_dir: Annotated[
        Path | None,
        Argument(help="Run folder, unless --plan is set.", autocompletion=completion.run_folders),
    ] = None,
    plan: Annotated[
        Path | None,
        Option(help="Config of a private run: compute its limits before it is trained."),
    ] = None,
    overrides: options.Overrides = None,
    confidence: Annotated[
        float, Option(help="Probability with which each certified limit holds.")
    ] = 0.95,
    settings: Annotated[
        int | None,
        Option(
            help=(
                "Number of settings from which this run's setting was chosen by looking at the "
                "same samples. The limits pay for all of them. The default is the number of "
                "settings in the folder of the sweep that contains the run, or 1."
            )
        ),
    ] = None,
    output_noise: Annotated[
        float | None,
        Option(
            help=(
                "Standard deviation of noise on the entries of a published model. A run with "
                "certificates then has a limit of the error rate of this model. The default is "
                "[stability] output-noise of the run."
            )
        ),
    ] = None,
    per: Annotated[
        str | None,
        Option(
            help=(
                "Limit the error of each `class` or each `client` instead. All limits of a table "
                "hold together, so they also hold for the worst class or client."
            ),
            autocompletion=completion.among("class", "client"),
        ),
    ] = None,
    probes: Annotated[
        int,
        Option(
            help=(
                "Number of random probes with which derivatives predict the gap of the loss, such "
                "as 8. The prediction certifies nothing."
            )
        ),
    ] = 0,
    average: Annotated[
        bool,
        Option(
            "--average",
            help=(
                "Certify the average of the models of the last rounds, which a run with "
                "\\[output] average saves, and not the final model."
            ),
        ),
    ] = False,
    guess: Annotated[
        float,
        Option(
            help=(
                "The train error that you expect, fixed before you look at the samples. Each value "
                "is valid. The certified limits from privacy are smallest if it is right."
            )
        ),
    ] = GUESS,
    width: Annotated[
        float | None,
        Option(
            help=(
                "With --plan: find the smallest noise with which the certified error exceeds the "
                "expected train error by at most this number."
            )
        ),
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Also draw the limits into this .png, .pdf or .svg file.")
    ] = None,
    latex: Annotated[
        Path | None, Option(help="Also write the limits into this .tex file, as a table.")
    ] = None,
) -> None:
    """Compute upper limits of the error and loss of a run's final model on new samples.

    The limits follow from held-out samples, from the noise of a private run, and from the stability
    bound. Each row names its assumptions and its costs, or the reason why there is no limit. With
    --plan, the limits of a private run follow from its config, before it is trained. The run folder
    stores the limits, and `fedmuon show` shows them.

    Example: [bold]fedmuon certify runs/a[/]
    Example: [bold]fedmuon certify runs/a --settings 12 --plot certificates.svg[/]
    Example: [bold]fedmuon certify runs/a --per class[/]
    """
    if (run_dir is None) == (plan is None):
        raise InputError(
            "Pass the folder of a finished run, such as `fedmuon certify runs/a`, or --plan and a "
            "config, but not both."
        )
    if plan is not None and (output_noise or probes or per is not None or average):
        raise InputError(
            "--output-noise, --probes, --per and --average belong to a run folder. Leave them out "
            "with --plan."
        )
    if per is not None and (output_noise or probes or average):
        raise InputError(
            "--output-noise, --probes and --average have no effect on the limits of single classes "
            "or clients. Leave them out, or leave out --per."
        )
    if plan is not None:
        if plot is not None:
            raise InputError(
                "--plot draws the certificates of a run folder. Leave it out with --plan."
            )
        _require_files(None, latex)
        _tell_planned(
            plan, overrides, confidence, 1 if settings is None else settings, width, guess, latex
        )
        return
    if width is not None or overrides:
        raise InputError("--width and --set belong to --plan. Leave them out for a run folder.")
    assert run_dir is not None
    if run_dir.is_file():
        raise InputError(
            f"{run_dir} is a file and not a run folder. For the limits before training, use --plan "
            f"{run_dir}. For those of a trained model, choose the folder of its run."
        )
    _require_files(plot, latex)
    if per is not None:
        _tell_groups(run_dir, per, confidence, settings, guess, plot, latex)
        return
    from fedmuon.experiments.certifying import certify as certifying  # torch
    from fedmuon.experiments.certifying import shown, stored
    from fedmuon.experiments.certifying.latex import of_run

    compute = partial(
        certifying.certify,
        run_dir,
        confidence,
        settings,
        output_noise=output_noise,
        probes=probes,
        guess=guess,
        average=average,
    )
    certificates, not_stored = stored.computed(run_dir, compute)
    tell(certificates.record(), *shown.tables(certificates))
    warn(not_stored)
    _save(certificates, plot, partial(of_run, certificates), latex)


def _require_files(plot: Path | None, latex: Path | None) -> None:
    """Raise InputError if the figure or the LaTeX table cannot be written to its file."""
    if latex is not None and latex.suffix.lower() != ".tex":
        raise InputError(f"{latex} is not a .tex file. Choose a file name that ends in .tex.")
    if plot is not None:
        from fedmuon.analysis.report.style import kind_of  # matplotlib

        kind_of(plot)
    for file in (plot, latex):
        if file is not None:
            require_writable(file)


def _tell_groups(
    run_dir: Path,
    per: str,
    confidence: float,
    settings: int | None,
    guess: float,
    plot: Path | None,
    latex: Path | None,
) -> None:
    """Print the limits of the error of each class or client."""
    from fedmuon.experiments.certifying.group_tables import group_tables  # torch
    from fedmuon.experiments.certifying.groups import certify_groups
    from fedmuon.experiments.certifying.latex import of_groups

    certificates = certify_groups(run_dir, per, confidence, settings, guess=guess)
    tell(certificates.record(), *group_tables(certificates))
    _save(certificates, plot, partial(of_groups, certificates), latex)


def _tell_planned(
    file: Path,
    overrides: list[str] | None,
    confidence: float,
    settings: int,
    width: float | None,
    guess: float,
    latex: Path | None,
) -> None:
    """Print the limits that a private run will have."""
    from fedmuon.config.load import load
    from fedmuon.experiments.certifying import planned  # torch
    from fedmuon.experiments.certifying.latex import of_plan

    record = planned.plan(load(file, overrides or []), confidence, settings, width, guess)
    tell(record, planned.table(record), Text(planned.note(record)))
    if latex is not None:
        _write(of_plan(record), latex)


def _save(
    certificates: "RiskCertificates | GroupCertificates",
    plot: Path | None,
    table: Callable[[], str],
    latex: Path | None,
) -> None:
    """Write the figure and the LaTeX table that the caller asks for."""
    if plot is not None:
        from fedmuon.analysis.report import style
        from fedmuon.experiments.certifying.figure import figure_of

        style.saved_as(figure_of(certificates), plot)
        print_path("Figure:", plot)
    if latex is not None:
        _write(table(), latex)


def _write(table: str, file: Path) -> None:
    """Write a LaTeX table to a file, and print its path."""
    write_bytes(file, table.encode())
    print_path("Table:", file)
