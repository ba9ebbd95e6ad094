"""`fedmuon unlearn`: forget samples of a finished run."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedmuon.experiments.cli.options import AsJson, console, refuse, tell, where


def unlearn(
    run_dir: Annotated[Path, Argument(help="A finished run, with full batches, in float64.")],
    sample: Annotated[
        list[int], Option("--sample", help="Its index in the source (train_index); once for each.")
    ],
    epsilon: Annotated[float, Option(help="How well tests may tell it from retraining.")] = 1.0,
    delta: Annotated[float, Option(help="And how often they may beyond.")] = 1e-5,
    out: Annotated[
        Path | None, Option("--out", help="A folder for the model; beside the run by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forget samples: the run's model with the noise that hides whether they were trained on.

    Nobody who sees unlearned.safetensors can tell it, beyond (epsilon, delta), from the model of a
    run without them plus the same noise: of one release, as several add up. unlearn.json is for the
    owner's eyes alone.
    Example: [bold]fedmuon unlearn runs/a --sample 17 --epsilon 1 --out runs/a-without-17[/]
    """
    from fedmuon.experiments.unlearning import execute, table

    if len(set(sample)) < len(sample):
        refuse("a sample is named twice: name each once")
    folder = out or run_dir.with_name(f"{run_dir.name}-unlearned")
    record = execute(run_dir, sample, epsilon, delta, folder)
    tell(record, as_json, table(record))
    if not as_json:
        console.print("The noisy model is in", where(folder), soft_wrap=True)
