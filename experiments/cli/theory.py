"""Commands that evaluate the theory: `bound`, `stationarity` and `flops`."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

import fedmuon.experiments.cli.completion as completion
from fedmuon.analysis.theory.checks import at_least, probability, whole
from fedmuon.core.errors import InputError, require_at_most
from fedmuon.experiments.cli.options import NeighbourUnit, Overrides, given_in
from fedmuon.experiments.cli.output import note, tell

if TYPE_CHECKING:  # the other commands of this file do not need the config
    from fedmuon.config.load import Config


def bound(
    run_dir: Annotated[
        Path | None,
        Argument(
            help="Run folder. Without a run folder, the options describe the run.",
            autocompletion=completion.run_folders,
        ),
    ] = None,
    overrides: Overrides = None,
    lr: Annotated[float | None, Option(help="Step size η.")] = None,
    beta: Annotated[float | None, Option(help="Momentum β.")] = None,
    l_orth: Annotated[
        float | None,
        Option(help="Lipschitz constant of the orthogonalizer. Default: the proved constant."),
    ] = None,
    l_g: Annotated[
        float | None,
        Option(
            help=(
                "Lipschitz constant L_g of the gradient. Default: the proved constant of the "
                "matrix task."
            )
        ),
    ] = None,
    lam: Annotated[
        float | None,
        Option("--lambda", help=("Smoothing λ of the orthogonalizer `smoothed-polar`.")),
    ] = None,
    rounds: Annotated[int | None, Option(help="Number of rounds R.")] = None,
    local_steps: Annotated[int | None, Option(help="Local steps E per round.")] = None,
    clients: Annotated[int | None, Option(help="Number of clients N.")] = None,
    per_round: Annotated[int | None, Option(help="Clients per round K.")] = None,
    size: Annotated[int | None, Option(help="Samples per client. Default: 200.")] = None,
    batch: Annotated[int | None, Option(help="Batch size. 0 means the full batch.")] = None,
    unit: NeighbourUnit = None,
    delta: Annotated[
        float | None, Option(help="Probability δ with which the bound may fail.")
    ] = None,
    c_hp: Annotated[
        str | None,
        Option(
            help=(
                "Constant C_hp of the bound: `explicit`, `sharp`, `variance` (only for a "
                "finished run), or a number."
            ),
            autocompletion=completion.among("explicit", "sharp", "variance"),
        ),
    ] = None,
    kind: Annotated[
        str | None,
        Option(
            help=(
                "Lipschitz constant of the orthogonalizer: `sharp` (tight) or `paper` (published)."
            ),
            autocompletion=completion.value_of("stability.lipschitz"),
        ),
    ] = None,
    constants: Annotated[
        str | None,
        Option(
            help=(
                "Models for which the constants of the task are valid: `ball` (models that a "
                "run can reach), or `global` (all models). Without a run folder, `ball` needs "
                "`--set task.initial=zero`. Otherwise, the bound uses `global`."
            ),
            autocompletion=completion.value_of("stability.constants"),
        ),
    ] = None,
    rho: Annotated[
        float | None,
        Option(
            help=(
                "Probability that the random choice of clients makes the bound fail. This "
                "option has an effect only if not all clients take part in a round (K < N). "
                "Default: 0.01."
            )
        ),
    ] = None,
    hostile: Annotated[
        int | None,
        Option(
            help=(
                "Number of hostile clients. Then the command computes how far they can move the "
                "final model, if the server clips the change of each client (`[robust] ball`)."
            )
        ),
    ] = None,
) -> None:
    """Compute the generalization bound of a setting or a run, with its assumptions.

    Example: [bold]fedmuon bound --lr 0.01 --lambda 0.1 --rounds 50 --local-steps 1 --size 1000[/]
    """
    from fedmuon.experiments.stability import certificates as calculator  # the config

    options = {
        "--lr": ("local.lr", lr), "--beta": ("local.momentum", beta),
        "--lambda": ("orthogonalizer.lambda", lam), "--rounds": ("federation.rounds", rounds),
        "--local-steps": ("local.steps", local_steps),
        "--clients": ("federation.clients", clients),
        "--per-round": ("federation.per-round", per_round), "--batch": ("local.batch", batch),
        "--delta": ("stability.delta", delta), "--c-hp": ("stability.c-hp", c_hp),
        "--kind": ("stability.lipschitz", kind), "--constants": ("stability.constants", constants),
        "--neighbours": ("stability.unit", unit),
    }  # fmt: skip
    written = {
        f"{key}={value}": name for name, (key, value) in options.items() if value is not None
    }
    arguments = {"size": size, "rho": rho, "l_orth": l_orth, "l_g": l_g}
    if hostile is not None:
        unused = {"--delta": delta, "--c-hp": c_hp, "--constants": constants, "--rho": rho,
                  "--neighbours": unit}  # fmt: skip
        for name, value in unused.items():
            if value is not None:
                raise InputError(
                    f"{name} has no effect with --hostile, because this bound never fails and "
                    f"holds for any samples of the clients. Remove {name}."
                )
    case = setting_of(run_dir, [*written, *(overrides or [])], arguments, written)
    if hostile is not None:
        from fedmuon.experiments.stability.hostile import hostile_report, hostile_table

        record = hostile_report(case, hostile, run_dir is not None)
        tell(record, hostile_table(record))
        return
    record = calculator.report(case, calculator.certify(case))
    tell(record, calculator.table(record))
    if run_dir is not None:
        command = shlex.join(["fedmuon", "certify", str(run_dir)])
        note(f"To compare the bound with limits from held-out samples, use: {command}")


def setting_of(
    folder: Path | None,
    changes: list[str],
    given: dict[str, Any],
    written: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Return the setting that the command line describes.

    `given` contains values of the options size, rho, l_orth and l_g. `written` contains the option
    of each change that was not written with --set.
    """
    # The other commands of this file do not need the config.
    from fedmuon.config.load import load
    from fedmuon.experiments.stability.certificates import from_parameters

    values = {name: value for name, value in given.items() if value is not None}
    checks = {"l_orth": at_least, "l_g": at_least, "rho": probability, "size": whole}
    for name, value in values.items():
        checks[name](f"--{name.replace('_', '-')}", value)
    if folder is None:
        size = values.pop("size", 200)
        config = load(None, ["data.train=1_000_000_000", "data.minimum=1", *changes])
        _require_random_clients("rho" in values, config)
        return from_parameters(config, size, **values)
    rejected = [
        written.get(change, f"--set {change}")
        for change in changes
        if not change.startswith("stability.")
    ]
    if rejected := rejected + ["--size"] * ("size" in values):
        extra = " and ".join(rejected)
        raise InputError(
            f"{extra} cannot change the run in {folder}, which has its own parameters. "
            f"Remove {extra}. With a run folder, use only --neighbours, --delta, "
            "--c-hp, --kind, --constants, --rho, --l-orth and --l-g."
        )
    # This module loads torch, which a bound from parameters does not need.
    from fedmuon.experiments.stability.finished_run import from_directory

    rho = values.pop("rho", None)
    case = from_directory(folder, changes, rho)
    _require_random_clients(rho is not None, case.config)
    return dataclasses.replace(case, **values)


def _require_random_clients(has_rho: bool, config: "Config") -> None:
    """Raise InputError if --rho is passed, but all clients take part in every round."""
    clients = config.federation.clients
    if has_rho and config.federation.per_round == clients:
        raise InputError(
            f"--rho has no effect, because all {clients} clients take part in every round, so no "
            "choice of clients is random. Remove --rho, or set --per-round below --clients."
        )


def stationarity(
    context: Context,
    run_dir: Annotated[
        Path | None,
        Argument(
            help=(
                "Run folder. Then γ, ν, δ₀, the polar error, the step size, the momentum and the "
                "number of steps come from this run, which is repeated. Without a run folder, "
                "the options describe the run."
            ),
            autocompletion=completion.run_folders,
        ),
    ] = None,
    paper: Annotated[
        str,
        Option(
            help=(
                "Paper that proves the bound: `000` (DP-Muon), `002` (Nesterov Muon), `003` "
                "(DiSK) or `004` (Newton-Schulz convergence)."
            ),
            autocompletion=completion.among("000", "002", "003", "004"),
        ),
    ] = "002",
    steps: Annotated[int, Option(help="Number of training steps (K or T in the papers).")] = 1000,
    rule: Annotated[
        str,
        Option(
            "--schedule",
            help=(
                "Schedule of the step size: `heavy-tailed` or `alpha-free`. Used by Nesterov Muon."
            ),
            autocompletion=completion.among("heavy-tailed", "alpha-free"),
        ),
    ] = "heavy-tailed",
    alpha: Annotated[
        float,
        Option(
            help=(
                "Tail index α of the gradient noise, above 1 and at most 2. Used by Nesterov Muon."
            )
        ),
    ] = 2.0,
    gap: Annotated[
        float,
        Option(help="Initial suboptimality f(X_0) - f*, where f* is the infimum of the loss f."),
    ] = 1.0,
    smoothness: Annotated[
        float, Option("--smoothness", "--l0", help="Smoothness L of the loss.")
    ] = 1.0,
    sigma0: Annotated[
        float,
        Option(
            help=(
                "Level σ₀ of the noise in one sample's gradient that does not depend on the "
                "full gradient. Used by Nesterov Muon, DiSK and Newton-Schulz convergence."
            )
        ),
    ] = 1.0,
    sigma1: Annotated[
        float,
        Option(
            help=(
                "Level σ₁ of the noise in one sample's gradient, per unit of the norm of the "
                "full gradient. Used by Nesterov Muon."
            )
        ),
    ] = 0.0,
    batch: Annotated[
        int,
        Option(
            help=(
                "Number of samples per gradient. For Poisson lots, set the expected number of "
                "samples."
            )
        ),
    ] = 1,
    rank: Annotated[
        int, Option(help="Maximum rank of the m x n matrix, which is its smaller side min(m, n).")
    ] = 10,
    gamma: Annotated[
        float,
        Option(
            help=(
                "Error γ of the orthogonalizer O: <M, O(M)> is at least (1 - γ) times the nuclear "
                "norm of M. Used by Nesterov Muon."
            )
        ),
    ] = 0.0,
    nu: Annotated[
        float,
        Option(
            help=(
                "Error ν of the orthogonalizer: the operator norm of its result is at most 1 + ν. "
                "Used by Nesterov Muon."
            )
        ),
    ] = 0.0,
    singular: Annotated[
        str,
        Option(
            help=(
                "Singular values of the momentum, such as `1,0.5,0.1`. The command computes γ "
                "and ν from the singular values, so leave --gamma and --nu out. Used by "
                "Nesterov Muon."
            )
        ),
    ] = "",
    coefficients: Annotated[
        str,
        Option(
            help=(
                "Coefficient schedule of the orthogonalizer. Used by Nesterov Muon with "
                "--singular and without --sketch."
            )
        ),
    ] = "quintic",
    sketch: Annotated[
        int,
        Option(
            help=("Rank of the sketch. 0 means no sketch. Used by Nesterov Muon with --singular.")
        ),
    ] = 0,
    oversample: Annotated[
        int,
        Option(
            help=(
                "Number of columns that the sketch has in addition to its rank. Used by "
                "Nesterov Muon with --sketch."
            )
        ),
    ] = 10,
    power: Annotated[
        int | None,
        Option(
            help=(
                "Number of power iterations h. The default is the smallest number for which the "
                "theorem holds. Used by Nesterov Muon with --sketch."
            )
        ),
    ] = None,
    delta0: Annotated[
        float,
        Option(
            help=(
                "Initial residual 1 - (s_r / |M|_F)^2, where s_r is the smallest positive "
                "singular value of the momentum M. Used by DP-Muon and Newton-Schulz convergence."
            )
        ),
    ] = 0.99,
    degree: Annotated[
        int,
        Option(
            help=(
                "Degree of the Taylor coefficients. Used by DP-Muon and Newton-Schulz convergence."
            )
        ),
    ] = 2,
    iterations: Annotated[
        int,
        Option(
            "--q",
            help=(
                "Number of Newton-Schulz steps. Used by DP-Muon and Newton-Schulz convergence. "
                "Nesterov Muon uses this number only with --singular and without --sketch."
            ),
        ),
    ] = 5,
    noise: Annotated[
        float,
        Option(
            help=(
                "Noise multiplier: standard deviation of the noise in a lot's gradient sum, "
                "divided by the clipping bound. Used by DP-Muon and DiSK."
            )
        ),
    ] = 1.0,
    columns: Annotated[
        int,
        Option(
            help=(
                "Larger side max(m, n) of the m x n matrix. 0 means that the matrix is square. "
                "Used by DP-Muon and DiSK."
            )
        ),
    ] = 0,
    tail: Annotated[
        float,
        Option(
            help="Tail constant K of the gradient G: E exp(|G|_F^2 / K^2) <= e. Used by DP-Muon."
        ),
    ] = 1.0,
    moment: Annotated[
        float,
        Option(
            help=(
                "Moment G_2 of the gradient G: E |G|_F^2 <= G_2^2. Set either --moment or "
                "--tail. Used by DP-Muon (Corollary B.6)."
            )
        ),
    ] = 0.0,
    clip: Annotated[
        float | None,
        Option(
            help=(
                "Clipping bound C. For DP-Muon, the default comes from the schedule. For DiSK, "
                "the default is 1. Used by DP-Muon and DiSK."
            )
        ),
    ] = None,
    excess: Annotated[
        float | None,
        Option(
            help=(
                "Mean excess E(|G|_F - C)_+ of the gradient norm over the clipping bound. By "
                "default, the excess is computed from --tail or --moment. Used by DP-Muon."
            )
        ),
    ] = None,
    gain: Annotated[float, Option(help="Gain kappa of the filter. Used by DiSK.")] = 0.7,
    reach: Annotated[float, Option(help="Look-ahead gamma of the filter. Used by DiSK.")] = -1.0,
    lr: Annotated[
        float | None, Option(help="Step size η. By default, the schedule sets η.")
    ] = None,
    beta: Annotated[
        float | None, Option(help="Momentum β. By default, the schedule sets β.")
    ] = None,
) -> None:
    """Compute a bound on the gradient norm after training, with its schedule and assumptions.

    If only some papers use an option, its description names these papers. With a run folder, the
    command repeats the run and measures its orthogonalizer. Then use only --paper (002 or 004),
    --gap, --smoothness, --sigma0, --sigma1 and --alpha.

    Example: [bold]fedmuon stationarity --paper 002 --steps 100000 --alpha 1.5 --batch 64[/]
    Example: [bold]fedmuon stationarity runs/a --paper 004 --sigma0 0.1[/]
    """
    from fedmuon.experiments import rates  # takes longer to load than all other commands here

    if run_dir is not None:
        rates.require_of_run(paper, given_in(context, "paper", "run_dir"))
    else:
        rates.require_read(paper, given_in(context, "paper"))
    require_at_most(1000, q=iterations, degree=degree)
    require_at_most(
        1e15, steps=steps, alpha=alpha, gap=gap, smoothness=smoothness, sigma0=sigma0,
        sigma1=sigma1, batch=batch, rank=rank, gamma=gamma, nu=nu, noise=noise, columns=columns,
        tail=tail, moment=moment, clip=clip, excess=excess, gain=gain, reach=reach, lr=lr,
        beta=beta,
    )  # fmt: skip
    drawn = rates.Noise(alpha, sigma0, sigma1, batch)
    if run_dir is not None:
        # This module loads torch, which a bound from parameters does not need.
        from fedmuon.experiments.stability.step_quality import of_run

        record = rates.of_run(paper, of_run(run_dir), drawn, gap, smoothness)
        tell(record, rates.table(record))
        return
    problem = rates.Problem(steps, gap, smoothness, drawn, rank, lr, beta)
    if paper == "000":
        private = rates.Private(noise, columns, tail, clip, excess, moment)
        record = rates.dp_muon(problem, private, delta0, degree, iterations)
    elif paper == "002":
        inexact_map = rates.InexactMap(
            singular, coefficients, iterations, sketch, oversample, power
        )
        quality = inexact_map.quality() if singular else {"gamma": gamma, "nu": nu}
        record = rates.nesterov(problem, rule, quality["gamma"], quality["nu"]) | quality
    elif paper == "003":
        private = rates.Private(noise, columns, clip=clip)
        record = rates.disk(problem, private, gain, reach)
    else:
        record = rates.newton_schulz(problem, delta0, degree, iterations)
    tell(record, rates.table(record))


def flops(
    model: Annotated[
        str,
        Option(
            help=(
                "Model, such as `cnn`, `mlp` or `gpt2-small`. `nanogpt` and `airbench` are the "
                "models of the paper Nesterov Muon."
            )
        ),
    ] = "nanogpt",
    optimizer: Annotated[
        str,
        Option(
            help="Optimizer: `muon`, `adamw`, `sgd` or `normalized-sgd`.",
            autocompletion=completion.among("muon", "adamw", "sgd", "normalized-sgd"),
        ),
    ] = "muon",
    aux: Annotated[
        str,
        Option(help="Optimizer of the parameters that --optimizer muon does not train."),
    ] = "adamw",
    steps: Annotated[int, Option(help="Number of Newton-Schulz steps q.")] = 5,
    coefficients: Annotated[
        str,
        Option(
            help=(
                "Coefficient schedule of the Newton-Schulz steps, such as `cubic`, `quintic`, "
                "`jordan` or `taylor-4`."
            ),
            autocompletion=completion.value_of("orthogonalizer.coefficients"),
        ),
    ] = "quintic",
    rank: Annotated[
        int,
        Option(
            help="Rank of the sketch in the orthogonalizer `randomized-polar`. 0 means no sketch."
        ),
    ] = 0,
    oversample: Annotated[
        int, Option(help="Number of columns that the sketch has in addition to its rank.")
    ] = 10,
    power: Annotated[int, Option(help="Number of power iterations h.")] = 1,
    sketch: Annotated[
        str,
        Option(
            help="Kind of sketch: `gaussian` or `kaczmarz`.",
            autocompletion=completion.value_of("orthogonalizer.sketch"),
        ),
    ] = "gaussian",
    nesterov: Annotated[
        bool, Option("--nesterov/--polyak", help="Form of the momentum: Nesterov or Polyak.")
    ] = True,
    decay: Annotated[
        bool, Option("--decay", help="Also count the operations of weight decay.")
    ] = False,
) -> None:
    """Count the floating-point operations of one optimizer step, per parameter.

    If a paper states this number, the command also shows the published number.

    Example: [bold]fedmuon flops --model nanogpt --rank 200 --steps 7[/]
    """
    from fedmuon.experiments import step_flops as account  # torch

    require_at_most(1000, steps=steps, power=power)
    require_at_most(1e9, rank=rank, oversample=oversample)
    drawn = account.Sketch(rank, oversample, power, sketch) if rank else None
    aux_rule = account.Rule(aux, nesterov, decay)
    rule = account.Rule(optimizer, nesterov, decay, steps, coefficients, drawn, aux_rule)
    record = account.record(model, rule)
    tell(record, *account.tables(record))
