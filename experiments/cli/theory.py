"""Commands that compute from theory: `bound`, also of a run, `stationarity`, `flops`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option

from fedmuon.analysis.theory.checks import at_least
from fedmuon.core.errors import InputError
from fedmuon.experiments import rates
from fedmuon.experiments.cli.options import AsJson, Overrides, given_in, require_at_most, tell


def bound(
    run_dir: Annotated[
        Path | None, Argument(help="A run directory; without one, the options below.")
    ] = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
    lr: Annotated[float | None, Option(help="eta")] = None,
    beta: Annotated[float | None, Option(help="Memory of the momentum.")] = None,
    l_orth: Annotated[
        float | None, Option(help="Lipschitz constant of Orth; else the map's.")
    ] = None,
    l_g: Annotated[float | None, Option(help="Lg; else proved, of the matrix task.")] = None,
    lam: Annotated[
        float | None, Option("--lambda", help="lambda of the smoothed polar map.")
    ] = None,
    rounds: Annotated[int | None, Option(help="R")] = None,
    local_steps: Annotated[int | None, Option(help="E")] = None,
    clients: Annotated[int | None, Option(help="N")] = None,
    per_round: Annotated[int | None, Option(help="K")] = None,
    size: Annotated[int | None, Option(help="Samples of every client; 200 by default.")] = None,
    batch: Annotated[int | None, Option(help="0 is the full batch.")] = None,
    delta: Annotated[float | None, Option(help="Failure of the bound.")] = None,
    c_hp: Annotated[
        str | None, Option(help="explicit, sharp, variance (of a run), or a number.")
    ] = None,
    kind: Annotated[
        str | None, Option(help="Constant of the map: sharp, or paper (printed).")
    ] = None,
    constants: Annotated[
        str | None, Option(help="Those of the task: ball (where a run can get), or global.")
    ] = None,
    rho: Annotated[
        float | None, Option(help="Failure of random participation; 0.01, for K < N.")
    ] = None,
) -> None:
    """The generalization bound as a number, with its assumptions.

    Example: [bold]fedmuon bound --lr 0.01 --lambda 0.1 --rounds 50 --local-steps 1 --size 1000[/]
    """
    from fedmuon.experiments.stability import certificates as calculator  # the config

    options = {
        "local.lr": lr, "local.momentum": beta, "local.steps": local_steps, "local.batch": batch,
        "orthogonalizer.lambda": lam, "federation.rounds": rounds, "federation.clients": clients,
        "federation.per-round": per_round, "stability.delta": delta, "stability.c-hp": c_hp,
        "stability.lipschitz": kind, "stability.constants": constants,
    }  # fmt: skip
    changes = [f"{name}={value}" for name, value in options.items() if value is not None]
    given = {"size": size, "rho": rho, "l_orth": l_orth, "l_g": l_g}
    case = setting_of(run_dir, [*changes, *(overrides or [])], given)
    record = calculator.report(case, calculator.certify(case))
    tell(record, as_json, calculator.table(record))


def setting_of(folder: Path | None, changes: list[str], given: dict[str, Any]) -> Any:
    """The setting that the command line describes; `given` holds size, rho, l_orth and l_g."""
    # Commands of other groups need not load the config.
    from fedmuon.config.load import load
    from fedmuon.experiments.stability.certificates import from_parameters

    named = {name: value for name, value in given.items() if value is not None}
    for name in {"l_orth", "l_g"} & set(named):
        at_least(name, named[name])
    if folder is None:
        size = named.pop("size", 200)
        config = load(None, ["data.train=1_000_000_000", "data.minimum=1", *changes])
        return from_parameters(config, size, **named)
    own = [change for change in changes if not change.startswith("stability.")]
    if own or "size" in named:
        raise InputError(
            f"{folder} has its own parameters: beside a run directory give only --delta, --c-hp, "
            "--kind, --constants, --rho, --l-orth or --l-g"
        )
    # It imports torch, which a bound from parameters does without.
    from fedmuon.experiments.stability.finished_run import from_directory

    rho = named.pop("rho", None)
    return dataclasses.replace(from_directory(folder, changes, rho), **named)


def stationarity(
    context: Context,
    paper: Annotated[
        str, Option(help="000: DP-Muon; 002: Nesterov, heavy tails; 003: DiSK; 004: Newton-Schulz.")
    ] = "002",
    steps: Annotated[int, Option(help="The horizon, K or T.")] = 1000,
    rule: Annotated[
        str, Option("--schedule", help="heavy-tailed, or alpha-free; of 002.")
    ] = "heavy-tailed",
    alpha: Annotated[float, Option(help="Tail index of the noise; of 002.")] = 2.0,
    gap: Annotated[float, Option(help="f(X_0) - f*")] = 1.0,
    smoothness: Annotated[float, Option("--smoothness", "--l0", help="L")] = 1.0,
    sigma0: Annotated[float, Option(help="Noise of a sample; of 002, 003, 004.")] = 1.0,
    sigma1: Annotated[float, Option(help="Noise in proportion to the gradient; of 002.")] = 0.0,
    batch: Annotated[int, Option(help="Samples of a gradient, or of a lot on average.")] = 1,
    rank: Annotated[int, Option(help="min(m, n), which bounds the rank.")] = 10,
    gamma: Annotated[float, Option(help="Alignment lost; of 002.")] = 0.0,
    nu: Annotated[float, Option(help="Overshoot of the map; of 002.")] = 0.0,
    singular: Annotated[
        str,
        Option(
            help="Singular values of the momentum, as 1,0.5,0.1: they give gamma and nu; of 002."
        ),
    ] = "",
    coefficients: Annotated[str, Option(help="A schedule, with --singular; of 002.")] = "quintic",
    sketch: Annotated[int, Option(help="Rank of a sketch, with --singular; of 002.")] = 0,
    oversample: Annotated[int, Option(help="Columns beside --sketch; of 002.")] = 10,
    power: Annotated[
        int | None, Option(help="Power iterations h; the least that is proved by default; of 002.")
    ] = None,
    delta0: Annotated[
        float, Option(help="Initial residual, 1 - (s_r / |M|_F)^2; of 000, 004.")
    ] = 0.99,
    degree: Annotated[int, Option(help="Taylor degree; of 000, 004.")] = 2,
    iterations: Annotated[
        int, Option("--q", help="Newton-Schulz steps; of 000, 004, and of 002 with --singular.")
    ] = 5,
    noise: Annotated[float, Option(help="Noise of a lot's sum over the clip; of 000, 003.")] = 1.0,
    columns: Annotated[int, Option(help="max(m, n), 0 for a square; of 000, 003.")] = 0,
    tail: Annotated[float, Option(help="K with E exp(|G|_F^2 / K^2) <= e; of 000.")] = 1.0,
    moment: Annotated[
        float, Option(help="G_2 with E |G|_F^2 <= G_2^2, instead of a tail: B.6; of 000.")
    ] = 0.0,
    clip: Annotated[float | None, Option(help="C, instead of the rule's; of 000, 003.")] = None,
    excess: Annotated[
        float | None, Option(help="E(|G|_F - C)_+, instead of what the tail or moment has; of 000.")
    ] = None,
    gain: Annotated[float, Option(help="kappa; of 003.")] = 0.7,
    reach: Annotated[float, Option(help="gamma of 003.")] = -1.0,
    lr: Annotated[float | None, Option(help="eta, instead of the rule's.")] = None,
    beta: Annotated[float | None, Option(help="Instead of the rule's.")] = None,
    as_json: AsJson = False,
) -> None:
    """How small the gradient gets, as a number, with the schedule and its assumptions.

    Example: [bold]fedmuon stationarity --paper 002 --steps 100000 --alpha 1.5 --batch 64[/]
    """
    rates.require_read(paper, given_in(context, "paper", "as_json"))
    require_at_most(1000, q=iterations, degree=degree)
    require_at_most(
        1e15, steps=steps, alpha=alpha, gap=gap, smoothness=smoothness, sigma0=sigma0,
        sigma1=sigma1, batch=batch, rank=rank, gamma=gamma, nu=nu, noise=noise, columns=columns,
        tail=tail, moment=moment, clip=clip, excess=excess, gain=gain, reach=reach, lr=lr,
        beta=beta,
    )  # fmt: skip
    drawn = rates.Noise(alpha, sigma0, sigma1, batch)
    problem = rates.Problem(steps, gap, smoothness, drawn, rank, lr, beta)
    if paper == "000":
        private = rates.Private(noise, columns, tail, clip, excess, moment)
        record = rates.dp_muon(problem, private, delta0, degree, iterations)
    elif paper == "002":
        made = rates.InexactMap(singular, coefficients, iterations, sketch, oversample, power)
        quality = made.quality() if singular else {"gamma": gamma, "nu": nu}
        record = rates.nesterov(problem, rule, quality["gamma"], quality["nu"]) | quality
    elif paper == "003":
        private = rates.Private(noise, columns, clip=clip)
        record = rates.disk(problem, private, gain, reach)
    else:
        record = rates.newton_schulz(problem, delta0, degree, iterations)
    tell(record, as_json, rates.table(record))


def flops(
    model: Annotated[
        str, Option(help="cnn, mlp, ..., gpt2-small, or 002's nanogpt and airbench.")
    ] = "nanogpt",
    optimizer: Annotated[str, Option(help="muon, adamw, sgd or normalized-sgd.")] = "muon",
    aux: Annotated[str, Option(help="Beside muon, for what it does not orthogonalize.")] = "adamw",
    steps: Annotated[int, Option(help="Newton-Schulz steps, q.")] = 5,
    coefficients: Annotated[
        str, Option(help="A schedule: cubic, quintic, jordan, taylor-4...")
    ] = "quintic",
    rank: Annotated[int, Option(help="Of the randomized map; 0: full.")] = 0,
    oversample: Annotated[int, Option(help="Columns beside rank.")] = 10,
    power: Annotated[int, Option(help="Power iterations, h.")] = 1,
    sketch: Annotated[str, Option(help="gaussian or kaczmarz.")] = "gaussian",
    nesterov: Annotated[bool, Option("--nesterov/--polyak", help="Momentum.")] = True,
    decay: Annotated[bool, Option("--decay", help="Count a weight decay.")] = False,
    as_json: Annotated[bool, Option("--json", help="One JSON object, in flop.")] = False,
) -> None:
    """The arithmetic of one optimizer step by parameter, with the published number if there is one.

    Example: [bold]fedmuon flops --model nanogpt --rank 200 --steps 7[/]
    """
    from fedmuon.experiments import step_flops as account  # torch

    require_at_most(1000, steps=steps, power=power)
    require_at_most(1e9, rank=rank, oversample=oversample)
    drawn = account.Sketch(rank, oversample, power, sketch) if rank else None
    rest = account.Rule(aux, nesterov, decay)
    rule = account.Rule(optimizer, nesterov, decay, steps, coefficients, drawn, rest)
    found = account.record(model, rule)
    tell(found, as_json, *account.tables(found))
