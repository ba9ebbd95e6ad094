"""The command `flops`: what an optimizer step costs."""

from typing import Annotated

import typer

from fedmuon.experiments.cli.options import console, require_at_most


def flops(
    model: Annotated[
        str,
        typer.Option("--model", help="cnn, mlp, ..., gpt2-small, or 002's nanogpt and airbench."),
    ] = "nanogpt",
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="muon, adamw, sgd or normalized-sgd.")
    ] = "muon",
    aux: Annotated[
        str, typer.Option("--aux", help="Beside muon, for what it does not orthogonalize.")
    ] = "adamw",
    steps: Annotated[int, typer.Option("--steps", help="Newton-Schulz steps, q.")] = 5,
    coefficients: Annotated[
        str, typer.Option("--coefficients", help="A schedule: cubic, quintic, jordan, taylor-4...")
    ] = "quintic",
    rank: Annotated[int, typer.Option("--rank", help="Of the randomized map; 0: full.")] = 0,
    oversample: Annotated[int, typer.Option("--oversample", help="Columns beside rank.")] = 10,
    power: Annotated[int, typer.Option("--power", help="Power iterations, h.")] = 1,
    sketch: Annotated[str, typer.Option("--sketch", help="gaussian or kaczmarz.")] = "gaussian",
    nesterov: Annotated[bool, typer.Option("--nesterov/--polyak", help="Momentum.")] = True,
    decay: Annotated[bool, typer.Option("--decay", help="Count a weight decay.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in flop.")] = False,
) -> None:
    """The arithmetic of one optimizer step by parameter, beside the published one where there is.

    Example: [bold]fedmuon flops --model nanogpt --rank 200 --steps 7[/]
    """
    import json

    from fedmuon.experiments.laboratory import flops as account
    from fedmuon.optim.flops import Rule, Sketch

    require_at_most(1000, steps=steps, power=power)
    require_at_most(1e9, rank=rank, oversample=oversample)
    drawn = Sketch(rank, oversample, power, sketch) if rank else None
    rest = Rule(aux, nesterov, decay)
    rule = Rule(optimizer, nesterov, decay, steps, coefficients, drawn, rest)
    found = account.record(model, rule)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for table in account.tables(found):
        console.print(table)
    if found["table_2"]:
        console.print(account.NOTE)
