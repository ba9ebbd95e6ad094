"""The command `certify`: all certificates of the risk of a run's model."""

from pathlib import Path
from typing import Annotated

from typer import Option

from fedmuon.experiments.cli.options import RunFolder
from fedmuon.experiments.cli.output import print_path, tell


def certify(
    run_dir: RunFolder,
    confidence: Annotated[
        float, Option(help="Probability with which each certified limit holds.")
    ] = 0.95,
    settings: Annotated[
        int,
        Option(
            help=(
                "Number of settings from which this run's setting was chosen by looking at the "
                "same samples. The limits pay for all of them."
            )
        ),
    ] = 1,
    plot: Annotated[
        Path | None, Option(help="Also draw the limits into this .png, .pdf or .svg file.")
    ] = None,
) -> None:
    """Compute upper limits of the error and loss of a run's final model on new samples.

    The limits follow from held-out samples, from the noise of a private run, and from the stability
    bound. Each row names its assumptions and its costs, or the reason why there is no limit.

    Example: [bold]fedmuon certify runs/a[/]
    Example: [bold]fedmuon certify runs/a --settings 12 --plot certificates.svg[/]
    """
    from fedmuon.experiments.certifying import certify as certifying  # torch
    from fedmuon.experiments.certifying import shown

    found = certifying.certify(run_dir, confidence, settings)
    tell(found.record(), *shown.tables(found))
    if plot is not None:
        from fedmuon.analysis.report import style

        style.saved_as(shown.figure(found), plot)
        print_path("Figure:", plot)
