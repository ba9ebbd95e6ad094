"""Commands that answer from theory alone: `stationarity`."""

from typing import Annotated

import typer

from fedmuon.experiments.cli.options import console, refuse, require_at_most


def stationarity(
    paper: Annotated[
        str,
        typer.Option(
            "--paper", help="000: DP-Muon; 002: Nesterov, heavy tails; 004: Newton-Schulz."
        ),
    ] = "002",
    steps: Annotated[int, typer.Option("--steps", help="The horizon, K or T.")] = 1000,
    rule: Annotated[
        str, typer.Option("--schedule", help="heavy-tailed, or alpha-free; of 002.")
    ] = "heavy-tailed",
    alpha: Annotated[float, typer.Option("--alpha", help="Tail index of the noise.")] = 2.0,
    gap: Annotated[float, typer.Option("--gap", help="f(X_0) - f*")] = 1.0,
    smoothness: Annotated[float, typer.Option("--smoothness", "--l0", help="L")] = 1.0,
    sigma0: Annotated[float, typer.Option("--sigma0", help="Noise of a sample.")] = 1.0,
    sigma1: Annotated[
        float, typer.Option("--sigma1", help="Noise in proportion to the gradient.")
    ] = 0.0,
    batch: Annotated[
        int, typer.Option("--batch", help="Samples of a gradient, or of a lot on average.")
    ] = 1,
    rank: Annotated[int, typer.Option("--rank", help="min(m, n), which bounds the rank.")] = 10,
    gamma: Annotated[float, typer.Option("--gamma", help="Alignment lost; of 002.")] = 0.0,
    nu: Annotated[float, typer.Option("--nu", help="Overshoot of the map; of 002.")] = 0.0,
    delta0: Annotated[
        float, typer.Option("--delta0", help="Initial residual, 1 - (s_r / |M|_F)^2; of 000, 004.")
    ] = 0.99,
    degree: Annotated[int, typer.Option("--degree", help="Taylor degree; of 000, 004.")] = 2,
    iterations: Annotated[int, typer.Option("--q", help="Newton-Schulz steps; of 000, 004.")] = 5,
    noise: Annotated[
        float, typer.Option("--noise", help="Noise of a lot's sum over the clip; of 000.")
    ] = 1.0,
    columns: Annotated[
        int, typer.Option("--columns", help="max(m, n), 0 for a square; of 000.")
    ] = 0,
    tail: Annotated[
        float, typer.Option("--tail", help="K with E exp(|G|_F^2 / K^2) <= e; of 000.")
    ] = 1.0,
    clip: Annotated[
        float | None, typer.Option("--clip", help="C, instead of the rule's; of 000.")
    ] = None,
    excess: Annotated[
        float | None,
        typer.Option("--excess", help="E(|G|_F - C)_+, instead of what the tail has; of 000."),
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="eta, instead of the rule's.")] = None,
    beta: Annotated[float | None, typer.Option("--beta", help="Instead of the rule's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
) -> None:
    """How small the gradient gets, as a number, with the schedule and what it stands on.

    Example: [bold]fedmuon stationarity --paper 002 --steps 100000 --alpha 1.5 --batch 64[/]
    """
    import json

    from fedmuon.experiments.laboratory import stationarity as calculator

    require_at_most(1000, q=iterations, degree=degree)
    require_at_most(
        1e15, steps=steps, alpha=alpha, gap=gap, smoothness=smoothness, sigma0=sigma0,
        sigma1=sigma1, batch=batch, rank=rank, gamma=gamma, nu=nu, noise=noise, columns=columns,
        tail=tail, clip=clip, excess=excess, lr=lr, beta=beta,
    )  # fmt: skip
    problem = calculator.Problem(
        steps, gap, smoothness, sigma0, sigma1, alpha, batch, rank, lr, beta
    )
    if paper == "000":
        private = calculator.Private(noise, columns, tail, clip, excess)
        record = calculator.dp_muon(problem, private, delta0, degree, iterations)
    elif paper == "002":
        record = calculator.nesterov(problem, rule, gamma, nu)
    elif paper == "004":
        record = calculator.newton_schulz(problem, delta0, degree, iterations)
    else:
        refuse(f"no bound of paper {paper!r} is known: use 000, 002 or 004")
    if as_json:
        typer.echo(json.dumps(record, indent=2, allow_nan=False))
    else:
        console.print(calculator.table(record))
