"""Commands that run experiments: `run`, `deploy-demo`; and `doctor`, before the first of them."""

from typing import Annotated

from typer import Option

from fedmuon.experiments.cli.options import (
    ConfigFile,
    OutFolder,
    Overrides,
    Resume,
    chosen_config,
    chosen_folder,
    console,
    resumable,
    where,
)


def run(
    config: ConfigFile = None,
    out: OutFolder = None,
    overrides: Overrides = None,
    resume: Resume = False,
    engine: Annotated[
        str | None, Option(help="inline, ray or deployment: who runs the clients.")
    ] = None,
    ray_address: Annotated[str | None, Option(help="A running Ray cluster to use.")] = None,
    verbose: Annotated[
        bool, Option("--verbose", help="Show what Flower and Ray have to say.")
    ] = False,
) -> None:
    """Run one federated experiment and write its run directory.

    Example: [bold]fedmuon run --set local.lr=0.02 --set data.name=fashion-mnist --out runs/a[/]
    """
    from fedmuon.experiments.cli.show import Progress, summary_table
    from fedmuon.experiments.run import execute

    changes = [*(overrides or [])]
    changes += [f"engine.name={engine}"] if engine else []
    changes += [f"engine.ray-address={ray_address}"] if ray_address else []
    chosen = chosen_config(config, changes, resume, out)
    folder = chosen_folder(out, chosen, resume)
    ended = resume and (folder / "summary.json").exists()
    with resumable(folder, ["run"]):
        with Progress(console) as progress:
            summary = execute(chosen, folder, resume, progress.watch, progress.begin, verbose)
        console.print(summary_table(summary))
        said = "The run had ended before; its results are in" if ended else "Results are in"
        console.print(said, where(folder), soft_wrap=True)


def deploy_demo(
    config: ConfigFile = None,
    out: OutFolder = None,
    overrides: Overrides = None,
    insecure: Annotated[
        bool, Option("--insecure", help="Without TLS and without SuperNode keys.")
    ] = False,
) -> None:
    """Run one experiment on a SuperLink and a SuperNode a client, started and stopped here.

    Without a config: 3 rounds of 2 of 3 clients on synthetic data.
    Example: [bold]fedmuon deploy-demo --set federation.rounds=5 --out runs/deployed[/]
    """
    from fedmuon.experiments.cli.show import Progress, summary_table
    from fedmuon.experiments.engines.deploy import DEMO, DEPLOYED, deploy

    changes = [*DEPLOYED, *([] if config else DEMO), *(overrides or [])]
    chosen = chosen_config(config, changes, False)
    assert chosen is not None
    folder = chosen_folder(out, chosen)
    with resumable(folder, ["run"]):
        with Progress(console) as progress:
            summary = deploy(chosen, folder, not insecure, progress.watch, progress.begin)
        console.print(summary_table(summary))
        console.print("Results are in", where(folder), soft_wrap=True)
        console.print("What each process said is in", where(folder / "logs"), soft_wrap=True)


def doctor() -> None:
    """Say what this machine has: devices, data sources and how to get the others, versions."""
    from fedmuon.experiments.cli.doctor import tables

    for table in tables():
        console.print(table)
