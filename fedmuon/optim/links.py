"""The links of local chains. Each function returns a `Link`, a gradient transformation.

    links.gradient(), links.momentum(0.9), links.orthogonalize(map), links.descend(0.1)

To write a custom link, use `fedmuon.Link(name, init, update)` or `links.stateless(name, update)`.
The link must return new tensors, because other links and the model also use the tensors that the
link receives.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedmuon.core.device import at_hand, to_device
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw
from fedmuon.optim.chain import (
    PERSONAL,
    Chain,
    Context,
    Link,
    Number,
    State,
    gaussian_like,
    per_replica,
    stateless,
    zeros,
)
from fedmuon.optim.orthogonalizers import Map, as_orthogonalizer, map_of_value
from fedmuon.privacy.mechanisms.gaussian import Quantile
from fedmuon.tasks.base import Params, Points, Released, concatenate

__all__ = ["Chain", "Context", "Link", "Params", "adamw", "align", "block_periodic", "descend",
           "gradient", "momentum", "normalize", "normalize_rows", "only",
           "orthogonalize", "renormalize", "stateless", "zeros"]  # fmt: skip

LOG_BOUND = "log-bound"  # name of a state: the logarithm of the clipping bound [S]
EQUAL = 1e-12  # a share c this close to 1 counts as 1, because gamma is a rounded quotient
# Defaults of torch.optim.AdamW
ADAM_MEMORY, ADAM_SQUARE_MEMORY, ADAM_EPS, ADAM_DECAY = 0.9, 0.999, 1e-8, 0.01
STACKED_ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 26}  # largest useful stack of matrices, in entries
ROW_EPS = 1e-10  # eps of NorMuon's divisions
PROBES = 1024  # maximum number of probes for one matrix at one step
POLARGRAD = "polargrad"  # an adjustment that depends on M: <M, Orth(M)>, in `map_matrices`
# The scale s(m, n) of an orthogonalized step, with the names of torch.optim.Muon
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "none": lambda m, n: 1.0,
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match-rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "scion": lambda m, n: math.sqrt(m / n),
    POLARGRAD: lambda m, n: 1.0,
}


# The first link: the gradient, or its release by a privacy mechanism


def gradient() -> Link:
    """Return a link that computes the batch's gradient at X, usually the first link of a chain.

    Returns:
        A link whose state is the loss of the last step `[replicas]`.

    Example:
        >>> from fedmuon import links
        >>> links.gradient().name
        'gradient'
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        loss, slope = context.gradient(context.params)
        return slope, {"loss": loss}

    return Link("gradient", lambda params: {}, update)


def private_gradient() -> Link:
    """Return the first link of a private chain, which computes the lot's noisy clipped gradient.

    This link does not compute a loss.
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        return context.released([(1.0, context.params)]).gradient, state

    return Link("gradient", lambda params: {}, update)


def disk_filter(gain: float, reach: float) -> Link:
    """Return the link of DiSK, which filters private gradients (DiSK, Algorithm 2).

        g_t = release( c grad f(x_t + gamma d_{t-1}) + (1 - c) grad f(x_t) )
        g~_t = (1 - kappa) g~_{t-1} + kappa g_t,   g~_{-1} = g_0
        d_t = x_{t+1} - x_t,   c = (1 - kappa) / (kappa gamma)

    Each example's two gradients are first combined and then clipped, so the sensitivity of a step
    is that of DP-SGD. With gamma = (1 - kappa) / kappa, a step needs only one gradient.

    Args:
        gain: The gain kappa of the filter, where 1 means no filter.
        reach: The factor gamma. Infinity means the low-pass filter of DOPPLER (DiSK, A.5), which
            uses gradients at x_t only.

    Returns:
        The first link of a chain. The state of the link contains g~, the last x, and the number of
            steps of each replica.
    """
    share = (1 - gain) / (gain * reach)

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        state = {"steps": first.new_zeros(len(first))}
        for name, value in params.items():
            # Cloned, because a file of states cannot contain one tensor twice.
            state |= {f"gradient {name}": torch.zeros_like(value), f"before {name}": value.clone()}
        return state

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        params, begun = context.params, has_stepped(state)
        points: Points = [(1.0, params)]
        if abs(share) > EQUAL:
            ahead = {}
            for name, value in params.items():  # d is 0 at the first step
                moved = per_replica(begun, value) * (value - state[f"before {name}"])
                ahead[name] = value + reach * moved
            alone = abs(share - 1) < EQUAL
            points = [(1.0, ahead)] if alone else [(share, ahead), (1 - share, params)]
        gradients = context.released(points).gradient
        weight = 1 + begun * (gain - 1)
        after, smooth = {"steps": state["steps"] + 1}, {}
        for name, value in gradients.items():
            previous = state[f"gradient {name}"]
            smooth[name] = previous + per_replica(weight, value) * (value - previous)
            after |= {f"gradient {name}": smooth[name], f"before {name}": params[name]}
        return smooth, after

    return Link("gradient", init, update, lasting=True)


def adaptive_bound(link: Link, quantile: Quantile, bound: float) -> Link:
    """Return a first link whose clipping bound adapts to a quantile of the gradient norms.

    The first clipping bound is `bound`. The link's state contains the logarithm of each replica's
    bound. The server averages these logarithms over the clients.
    """

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        logarithm = first.new_full((len(first),), math.log(bound), dtype=torch.float64)
        return link.init(params) | {LOG_BOUND: logarithm}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        inner, shares = dict(state), []
        log_bound = inner.pop(LOG_BOUND)

        def released(points: Points) -> Released:
            result = context.released(points, log_bound.exp())
            shares.append(result.kept)
            return result

        direction, inner = link.update(direction, inner, replace(context, released=released))
        moved = quantile.moved(log_bound, to_device(shares[0], log_bound.device, log_bound.dtype))
        return direction, inner | {LOG_BOUND: moved}

    return replace(link, init=init, update=update, lasting=True)


# From a gradient to a step


def momentum(memory: Number, form: str = "ema") -> Link:
    """Return a link that accumulates the incoming directions G in a momentum C.

    The table shows the new C and the outgoing direction of each form. FedMuon averages the state C
    on the server.

    | form         | state C               | direction             | used in                       |
    |--------------|-----------------------|-----------------------|-------------------------------|
    | ema          | beta C + (1 - beta) G | C                     | Stability note (1), torch     |
    | ema-nesterov | beta C + (1 - beta) G | beta C + (1 - beta) G | torch.optim.Muon              |
    | polyak       | beta C + G            | C                     | DP-Muon, Nesterov Muon        |
    | nesterov     | beta C + G            | beta C + G            | Nesterov Muon, eq. (1)        |

    The paper Newton–Schulz convergence also uses `polyak`. In the column "direction", C is the new
    state. From a zero state, `ema` is (1 - beta) times `polyak`, and `ema-nesterov` is (1 - beta)
    times `nesterov`. If the orthogonalizer ignores scale, both forms of such a pair take the same
    steps. An orthogonalizer with `lam` or `eps` depends on scale.

    Args:
        memory: The coefficient beta of the momentum, one number or one per replica `[replicas]`.
        form: Name of a form in the table.

    Returns:
        A link whose state C lasts between rounds. C has the shapes of the model.

    Example:
        >>> import torch
        >>> from fedmuon import links
        >>> link = links.momentum(0.9)
        >>> state = link.init({"w": torch.zeros(1, 1)})
        >>> direction, state = link.update({"w": torch.ones(1, 1)}, state, None)
        >>> round(direction["w"].item(), 3)
        0.1
    """
    average, ahead = form.startswith("ema"), form.endswith("nesterov")

    def mixed(state: State, direction: Params) -> State:
        beta = {name: per_replica(memory, value) for name, value in direction.items()}
        if average:
            return {
                name: state[name].lerp(value, 1 - beta[name]) for name, value in direction.items()
            }
        return {name: value + beta[name] * state[name] for name, value in direction.items()}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        state = mixed(state, direction)
        return (mixed(state, direction) if ahead else state), state

    return Link("momentum", zeros, update, lasting=True)


def adamw(decay: float = ADAM_DECAY) -> Link:
    """Return a link that computes the direction of AdamW from gradients.

    The direction is m / (sqrt(v) + eps) + decay X, where m and v are the bias-corrected moments and
    X is the model. The next link, `descend`, multiplies this direction by -lr. beta_1, beta_2 and
    eps are the defaults of torch.optim.AdamW. Source: Loshchilov and Hutter 2019.

    Args:
        decay: Decoupled weight decay.

    Returns:
        A link whose state lasts between rounds. The state contains m and v of every parameter, and
            the number of steps `[replicas]`.

    Example:
        >>> from fedmuon import links
        >>> links.adamw().lasting
        True
    """

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        state = {"steps": first.new_zeros(len(first))}
        for name, value in params.items():
            state |= {f"{which} {name}": torch.zeros_like(value) for which in ("mean", "square")}
        return state

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        count = state["steps"] + 1
        after, directions = {"steps": count}, {}
        # This number is equal in all replicas. Reading it on a GPU would synchronize.
        steps: Number = float(count[0]) if at_hand(count.device) else count.double()
        for name, value in direction.items():
            mean = state[f"mean {name}"].lerp(value, 1 - ADAM_MEMORY)
            square = state[f"square {name}"].lerp(value.square(), 1 - ADAM_SQUARE_MEMORY)
            # The averages start at 0, so divide them by the total weight of their terms.
            square_weight = per_replica(1 - ADAM_SQUARE_MEMORY**steps, square)
            root = (square / square_weight).sqrt_().add_(ADAM_EPS)
            step = (mean / per_replica(1 - ADAM_MEMORY**steps, mean)).div_(root)
            directions[name] = step.add_(context.params[name], alpha=decay)
            after |= {f"mean {name}": mean, f"square {name}": square}
        return directions, after

    return Link("adamw", init, update, lasting=True)


def align(share: float) -> Link:
    """Return a link that mixes a direction O with the last global direction D.

    The result is (1 - share) O + share D. The server sets the state D. Source: Stability note,
    Remark 3.2.

    Args:
        share: The weight alpha of the global direction, from 0 to 1.

    Returns:
        A link with the state `global-direction`.

    Example:
        >>> from fedmuon import links
        >>> links.align(0.5).name
        'global-direction'
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        mixed = {name: value.lerp(state[name], share) for name, value in direction.items()}
        return mixed, state

    return Link("global-direction", zeros, update)


def proximal(weight: float) -> Link:
    """Return the link of FedProx, which adds weight (x - X) to a gradient.

    x is the client's current model, and X is the model that the client received.
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        if weight == 0:
            return direction, state
        pulled = {
            name: value.add(context.params[name] - state[name], alpha=weight)
            for name, value in direction.items()
        }
        return pulled, state

    return Link("proximal", dict, update)


def personal_model(lr: Number, weight: float, decay: float = 0.0) -> Link:
    """Return the link of Ditto, which trains a client's own model v.

    Each step computes v <- v - lr (G(v) + weight (v - X) + decay v), where X is the model that the
    client received, and G(v) is the gradient on the batch of this step. The direction passes
    unchanged.

    Args:
        lr: Step size, one number or one per replica [replicas].
        weight: The strength lambda of the pull towards X.
        decay: Decoupled weight decay.
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        _, slope = context.gradient(state)
        after = {}
        for name, value in state.items():
            towards = slope[name].add(value - context.received[name], alpha=weight)
            towards = towards.add(value, alpha=decay) if decay else towards
            after[name] = value - towards * per_replica(lr, value) * context.factor
        return direction, after

    return Link(PERSONAL, dict, update)


def shift(name: str, sign: float) -> Link:
    """Return a link that adds its state C, multiplied by `sign`, to the direction.

    `name` is the name of the link and of its state. Only the client rule and the server rule of the
    recipe change C.
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        moved = {key: value.add(state[key], alpha=sign) for key, value in direction.items()}
        return moved, state

    return Link(name, zeros, update)


def normalize() -> Link:
    """Return a link that divides a direction G by its Frobenius norm: G / ||G||_F.

    Each replica has one norm over all its parameters. A zero direction stays zero.

    Returns:
        A link without a state.

    Example:
        >>> import torch
        >>> from fedmuon import links
        >>> direction, _ = links.normalize().update({"w": torch.tensor([[3.0, 4.0]])}, {}, None)
        >>> direction["w"]
        tensor([[0.6000, 0.8000]])
    """

    def update(direction: Params, context: Context) -> Params:
        squares = sum(value.flatten(1).square().sum(1) for value in direction.values())
        size = torch.as_tensor(squares).sqrt()
        inverse = torch.where(size > 0, 1 / size, size)
        return {name: value * per_replica(inverse, value) for name, value in direction.items()}

    return stateless("normalize", update)


def descend(lr: Number, others: Mapping[str, Number] | None = None, decay: float = 0.0) -> Link:
    """Return the update -lr (direction + decay X), times the step-size factor of the round.

    This is the last link of a chain. Source: Stability note, eq. (3).

    Args:
        lr: Step size η, one number or one per replica `[replicas]`.
        others: Mapping from a parameter name to a step size, for parameters that do not use `lr`.
        decay: Decoupled weight decay.

    Returns:
        A link without a state.

    Example:
        >>> import torch
        >>> from fedmuon import links
        >>> model = {"w": torch.ones(1, 2)}
        >>> context = links.Context(model, lambda at: (torch.zeros(1), at), draws=[])
        >>> moved, _ = links.descend(0.1).update({"w": torch.ones(1, 2)}, {}, context)
        >>> moved["w"]
        tensor([[-0.1000, -0.1000]])
    """
    rates = others or {}

    def update(direction: Params, context: Context) -> Params:
        if decay:
            direction = {
                name: value.add(context.params[name], alpha=decay)
                for name, value in direction.items()
            }
        moved = {
            name: value * -per_replica(rates.get(name, lr), value)
            for name, value in direction.items()
        }
        if context.factor == 1:
            return moved
        return {name: value * context.factor for name, value in moved.items()}

    return stateless("descend", update)


def renormalize(routes: Mapping[str, int] | None = None) -> Link:
    """Return a link after `descend` that scales each new matrix to the Frobenius norm sqrt(m).

    Here m is the number of rows. Jordan's code for CIFAR-10 scales weights in this way before each
    step. A matrix that is 0 does not change.

    Args:
        routes: Mapping from a parameter name to the number of matrices that Muon trains in this
            parameter. Parameters with 0 matrices pass unchanged. By default, every parameter is
            scaled.

    Returns:
        A link without a state. Its direction is the new model minus the old model.

    Raises:
        InputError: If a scaled parameter is a vector.

    Example:
        >>> import torch
        >>> from fedmuon import links
        >>> model = {"w": torch.ones(1, 4, 1)}
        >>> context = links.Context(model, lambda at: (torch.zeros(1), at), draws=[])
        >>> moved, _ = links.renormalize().update({"w": torch.ones(1, 4, 1)}, {}, context)
        >>> (model["w"] + moved["w"]).norm().item()
        2.0
    """

    def scaled(old: Tensor, update: Tensor) -> Tensor:
        if update.ndim < 3:
            raise InputError(
                "links.renormalize scales matrices, but a parameter is a vector. Add its name "
                "with the number 0 to the argument `routes`."
            )
        new = old + update
        size = new.flatten(1).norm(dim=1)
        factor = torch.where(size > 0, math.sqrt(new.shape[1]) / size, 1.0)
        return new * per_replica(factor, new) - old

    def update(direction: Params, context: Context) -> Params:
        return {
            name: scaled(context.params[name], value)
            if routes is None or routes.get(name)
            else value
            for name, value in direction.items()
        }

    return stateless("renormalize", update)


# A link for some of the parameters


def only(chosen: Callable[[str], bool], link: Link) -> Link:
    """Return a link that applies another link to some parameters, and does not change the others.

    Args:
        chosen: Function that receives a parameter name, and returns whether the link applies to
            this parameter.
        link: The link.

    Returns:
        A link with the state of `link` for the chosen parameters.

    Raises:
        InputError: If an argument has the wrong type.

    Example:
        >>> from fedmuon import links
        >>> links.only(lambda name: name.endswith("weight"), links.normalize()).name
        'normalize'
    """
    if not callable(chosen):
        raise InputError(
            f"the first argument of links.only is a {type(chosen).__name__}, but it must be a "
            "function of a parameter name. Pass a function that returns True or False."
        )
    if not isinstance(link, Link):
        raise InputError(
            f"the second argument of links.only is a {type(link).__name__}, but it must be a Link. "
            "Pass a link such as links.normalize()."
        )
    return _only_where(lambda name, value: chosen(name), link)


def _only_where(selects: Callable[[str, Tensor], bool], link: Link) -> Link:
    """Return a link that applies another link only where `chosen(name, value)` is true."""

    def part(values: Params) -> Params:
        return {name: value for name, value in values.items() if selects(name, value)}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        changed, after = link.update(part(direction), state, context)
        return direction | changed, state | after

    return replace(link, init=lambda params: link.init(part(params)), update=update)


# Orthogonalization


def orthogonalize(
    orthogonalizer: Any,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    shards: int = 1,
) -> Link:
    """Return a link that orthogonalizes each matrix and multiplies the result by a scale.

    Args:
        orthogonalizer: A `fedmuon.Orthogonalizer`, or a function on stacks `[..., m, n]`.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter.
            Parameters with 0 matrices, or without an entry, pass unchanged. A recipe function
            receives this mapping as its argument `routes`. By default, all parameters with two or
            more axes are matrices.
        shards: Number of pieces into which each matrix is cut along its longer side. Each piece is
            orthogonalized separately (see `block_periodic`).

    Returns:
        A link without a state.

    Raises:
        InputError: If `shards` is not an integer >= 1, or the orthogonalizer cannot be called.

    Example:
        >>> import torch
        >>> from fedmuon import links, orthogonalizers
        >>> link = links.orthogonalize(orthogonalizers.clipped_sign(gamma=0.1))
        >>> direction, _ = link.update({"w": 5 * torch.eye(2)[None]}, {}, None)
        >>> direction["w"].round(decimals=3)
        tensor([[[1., 0.],
                 [0., 1.]]])
    """
    if not isinstance(shards, int) or shards < 1:
        raise InputError(f"shards is {shards!r}, but it must be an integer of 1 or more.")
    apply = map_of_value(as_orthogonalizer(orthogonalizer))
    link = map_matrices(apply, adjust, True, routes, shards)
    if routes is None:
        return _only_where(lambda name, value: value.ndim > 2, link)
    return only(lambda name: bool(routes.get(name)), link)


def map_matrices(
    apply: Map,
    adjust: str = "none",
    grouped: bool = False,
    blocks: Mapping[str, int] | None = None,
    shards: int = 1,
) -> Link:
    """Return a link that applies a map to every matrix and scales the result.

    See Stability note, eq. (2). A parameter [S, out, ...] is a stack of S matrices of shape [out,
    -1].

    Args:
        apply: The map.
        adjust: A name in `ADJUSTMENTS`. "original" is sqrt(max(1, m/n)), the scale of Jordan.
            "match-rms" is 0.2 sqrt(max(m, n)), which matches the root mean square of AdamW's steps
            (arXiv:2502.16982). "scion" is sqrt(m/n), the spectral ball of Scion (arXiv:2502.07529).
            "polargrad" is <M, Orth(M)> of the momentum M, which is the nuclear norm of M if Orth is
            exact (PolarGrad, arXiv:2505.21799, in the form that averages gradients first).
        grouped: Whether the map may receive small matrices of equal shape as one stack. Use False
            for a map with random draws.
        blocks: Mapping from a parameter name to the number of matrices that the parameter contains
            side by side, if more than one.
        shards: Number of pieces, cut along the longer side of a matrix, to which the map is applied
            separately.
    """
    counts = blocks or {}

    def update(direction: Params, context: Context) -> Params:
        pieces: dict[tuple[str, int], Tensor] = {}  # (name, number in it) -> matrices [S, m, n]
        longer = {}  # the longer axis of each parameter's matrices, along which they are cut
        for name, value in direction.items():
            if value.ndim < 3:
                raise InputError(
                    f"the parameter {name} is a vector, but only matrices can be orthogonalized. "
                    f"Add {{{name!r}: 0}} to the argument `routes`, so that the auxiliary step "
                    f"updates {name}."
                )
            longer[name], cut = _matrices(value, counts.get(name, 1), shards)
            pieces |= {(name, place): piece for place, piece in enumerate(cut)}
        number = {piece: block for block, piece in enumerate(pieces)}
        images: dict[tuple[str, int], Tensor] = {}
        for names in _stacks(pieces) if grouped else [[name] for name in pieces]:
            stack = concatenate([pieces[name] for name in names])
            scale = ADJUSTMENTS[adjust](*stack.shape[-2:])
            image = apply(stack, context, number[names[0]])
            image = image if scale == 1 else image * scale
            if adjust == POLARGRAD:
                image = image * (stack * image).sum((-2, -1), keepdim=True)
            images |= zip(names, image.chunk(len(names)), strict=True)
        parts: dict[str, list[Tensor]] = {name: [] for name in direction}  # to be joined again
        for name, place in pieces:
            parts[name].append(images[name, place])
        return {
            name: concatenate(parts[name], longer[name]).reshape(value.shape)
            for name, value in direction.items()
        }

    return stateless("orthogonalize", update)


def cut(value: Tensor, count: int) -> list[Tensor]:
    """Cut a parameter [S, out, ...] into its `count` stacks of matrices [S, m, n]."""
    return _matrices(value, count)[1]


def _matrices(value: Tensor, count: int, shards: int = 1) -> tuple[int, list[Tensor]]:
    """Cut a parameter into `count` stacks of matrices, and each stack into `shards` pieces.

    Return the axis of the cuts, and the pieces."""
    axis = 1 if value.shape[1] >= value.shape[2:].numel() else 2
    matrices = value.flatten(2).chunk(count, axis)
    if shards == 1:
        return axis, list(matrices)
    return axis, [
        shard for m in matrices for shard in m.tensor_split(min(shards, m.shape[axis]), axis)
    ]


def block_periodic(whole: Link, sharded: Link, period: int) -> Link:
    """Return the link of MuonBP, which orthogonalizes pieces of matrices, but sometimes whole ones.

    Whole matrices are used in steps 1, 1 + P, 1 + 2 P and so on. On model-parallel devices, only
    steps with whole matrices need communication. Here, all pieces are on one device, so this link
    reproduces MuonBP's effect on training, not on communication. To use the step sizes of the
    paper, pass adjust="match-rms" to both links.

    Source: MuonBP (arXiv:2510.16981), Algorithm 1.

    Args:
        whole: A link from `orthogonalize`.
        sharded: The same link with `shards` above 1.
        period: The period P, an integer of at least 1.

    Returns:
        A link whose state is the number of steps `[replicas]`. If a recipe does not send this
            state, every round starts with a step on whole matrices.

    Raises:
        InputError: If `period` is not an integer >= 1.

    Example:
        >>> from fedmuon import links, orthogonalizers
        >>> polar = orthogonalizers.smoothed_polar()
        >>> pieces = links.orthogonalize(polar, shards=4)
        >>> links.block_periodic(links.orthogonalize(polar), pieces, period=5).name
        'orthogonalize'
    """

    if not isinstance(period, int) or period < 1:
        raise InputError(f"period is {period!r}, but it must be an integer of 1 or more.")

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        return {"steps": first.new_zeros(len(first))}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        steps = round(float(state["steps"][0]))  # equal in all replicas
        link = whole if steps % period == 0 else sharded
        return link.update(direction, {}, context)[0], {"steps": state["steps"] + 1}

    return Link("orthogonalize", init, update, lasting=True)


def normalize_rows(
    orthogonal: Link, memory: float, blocks: Mapping[str, int] | None = None
) -> Link:
    """Return the link of NorMuon, which scales rows of orthogonalized matrices to similar sizes.

    A row belongs to one neuron, and is divided by its running root mean square. A step with the
    orthogonalized matrix O computes

        v <- memory v + (1 - memory) mean of the squares of each row of O
        N = O / (sqrt(v) + 1e-10),   step = N ||O||_F / (||N||_F + 1e-10)

    A tensor [out, ...] has `out` rows. The step has the same Frobenius norm as O, as in the
    authors' code. In the paper, the root mean square of the step is 0.2. Both steps are equal if
    Orth is exact, O has full rank, and the scale is "match-rms".

    Source: NorMuon (arXiv:2510.05491), Algorithm 1. A bias correction of v would cancel in the
    step.

    Args:
        orthogonal: The link that orthogonalizes.
        memory: The coefficient beta_2 in the update of v, at least 0 and below 1.
        blocks: Mapping from a parameter name to the number of matrices in this parameter, like
            `routes` of `orthogonalize`. Vectors and parameters with 0 matrices pass unchanged.

    Returns:
        A link whose state contains v `[replicas, matrices, rows, 1]` of every parameter. If a
            recipe does not send this state, each round starts with v = 0.

    Raises:
        InputError: If `memory` is out of range.

    Example:
        >>> from fedmuon import links, orthogonalizers
        >>> polar = links.orthogonalize(orthogonalizers.smoothed_polar())
        >>> links.normalize_rows(polar, memory=0.95).lasting
        True
    """
    if not 0 <= memory < 1:
        raise InputError(f"memory is {memory!r}, but it must be at least 0 and below 1.")
    counts, prefix = blocks or {}, "rows "

    def parts(values: Params) -> Iterator[tuple[str, Tensor, int, list[Tensor]]]:
        for name, value in values.items():
            if value.ndim > 2 and counts.get(name, 1):
                yield name, value, *_matrices(value, counts.get(name, 1))

    def init(params: Params) -> State:
        row_state = {}
        for name, _, _, pieces in parts(params):
            row_state[prefix + name] = torch.stack(
                [p.new_zeros(*p.shape[:2], 1) for p in pieces], 1
            )
        return orthogonal.init(params) | row_state

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        inner = {key: value for key, value in state.items() if not key.startswith(prefix)}
        images, after = orthogonal.update(direction, inner, context)
        scaled = {}
        for name, value, axis, pieces in parts(images):
            stack = torch.stack(pieces, 1)  # [S, matrices, m, n]
            squares = state[prefix + name].lerp(stack.square().mean(-1, keepdim=True), 1 - memory)
            even = even_rows(stack, squares)
            scaled[name] = concatenate(list(even.unbind(1)), axis).reshape(value.shape)
            after = {**after, prefix + name: squares}
        return images | scaled, after

    return replace(orthogonal, init=init, update=update, lasting=True)


def even_rows(matrices: Tensor, squares: Tensor) -> Tensor:
    """Return NorMuon's step for matrices [..., m, n] with mean squares [..., m, 1] of their rows.

    Each row is divided by the root of its mean square. Then each matrix is scaled back to the norm
    that it had before the division.
    """
    even = matrices / (squares.sqrt() + ROW_EPS)
    size, new = (torch.linalg.matrix_norm(x, keepdim=True) for x in (matrices, even))
    return even * (size / (new + ROW_EPS))


def _stacks(pieces: Mapping[tuple[str, int], Tensor]) -> Iterator[list[tuple[str, int]]]:
    """Yield groups of matrices of equal shape that are small enough to stack."""
    alike: dict[object, list[tuple[str, int]]] = {}
    for name, value in pieces.items():
        alike.setdefault((value.shape, value.device), []).append(name)
    for names in alike.values():
        first = pieces[names[0]]
        size = max(1, STACKED_ENTRIES.get(first.device.type, 1 << 26) // max(1, first.numel()))
        for start in range(0, len(names), size):
            yield names[start : start + size]


# The bias correction of DP-MuonBC (DP-Muon, section 4). Gaussian noise in the momentum changes the
# mean of an orthogonalized step. The correction undoes this change to leading order:
#
#     M^ = M / s_t,   O = 2 Q(M^) - mean_j [Q(M^ + rho_t U_j) + Q(M^ - rho_t U_j)] / 2
#
# U_j is standard Gaussian, and rho_t is the standard deviation of the noise in an entry of M^. Q
# alone has the bias (rho^2 / 2) Laplacian Q. The second term has twice this bias, so the bias of O
# is -(rho^4 / 4) times the bilaplacian. Probes are post-processing and cost no privacy.
#
# Let f be the released gradient, or the output of a Kalman filter, and m the momentum. Assume a
# path of gradients that noise does not change (DP-Muon). The noise of an entry of (f, m) is then
# linear in the draws w of the releases, which are independent and have equal variance:
#
#     f <- (1 - kappa) f + kappa w,   m <- mu m + f                                            (1)
#
# The first step sets f <- w; without a filter, kappa = 1. All clients start a round from the
# server's (f, m) and add their own draws. Client i therefore has (f, m)_i = Phi c + o_i. The matrix
# Phi, from (1), and the distribution of o_i are the same for all clients. The o_i are independent
# of each other and of c, whichever clients took part before. The server's next state is
# sum_i p_i (f, m)_i = Phi c + sum_i p_i o_i, with the covariance
#
#     Cov(Phi c) + (sum_i p_i^2) Cov(o).                                                       (2)
#
# The states `common`, Cov(Phi c), and `own`, Cov(o), are therefore stored separately. The noise of
# one client has the covariance `common + own`.


def bias_correction(
    orthogonal: Link,
    probes: int,
    noise: float,
    memory: float,
    average: bool = False,
    gain: float = 1.0,
) -> Link:
    """Return the link of DP-MuonBC: orthogonalize a momentum, and correct the bias due to noise.

    The comment before this function explains the correction.

    Args:
        orthogonal: The link that orthogonalizes, without a state.
        probes: Number of random probes U_j for the correction.
        noise: Standard deviation of the noise in each entry of a released gradient.
        memory: The momentum coefficient mu in M <- mu M + g~.
        average: Whether the incoming direction is (1 - mu) M instead of M.
        gain: The gain kappa of the Kalman filter before the momentum, or 1 without a filter.

    Returns:
        A link whose state contains, for each replica, the number of steps and the moments of the
            noise.
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        state = noise_moments(state, memory, gain)
        total = (1 - memory ** state["steps"]) / (1 - memory)
        scale = total * (1 - memory) if average else total
        unit = {name: value / per_replica(scale, value) for name, value in direction.items()}
        width = noise * (state["common"] + state["own"])[:, 2].sqrt() / total
        return unbiased(orthogonal, unit, width, context, probes), state

    return Link("orthogonalize", no_noise, update, lasting=True, averaged=average_noise)


def unbiased(
    orthogonal: Link, unit: Params, width: Tensor, context: Context, probes: int
) -> Params:
    """Orthogonalize noisy matrices, and correct the bias due to the noise.

    Args:
        orthogonal: The link that orthogonalizes.
        unit: The matrices M^, whose first axis numbers the replicas.
        width: For each replica, the standard deviation rho of the noise in each entry of M^.
        context: The context of the local step.
        probes: Number of random probes for the correction.
    """

    def mapped(matrices: Params) -> Params:
        return orthogonal.update(matrices, {}, context)[0]

    smooth = []
    for number in range(probes):
        shift = {
            name: per_replica(width, value) * probe(value, context, block, number)
            for block, (name, value) in enumerate(unit.items())
        }
        above = mapped({name: value + shift[name] for name, value in unit.items()})
        below = mapped({name: value - shift[name] for name, value in unit.items()})
        smooth.append({name: (above[name] + below[name]) / 2 for name in unit})
    return {
        name: 2 * value - sum(image[name] for image in smooth) / probes
        for name, value in mapped(unit).items()
    }


def probe(matrix: Tensor, context: Context, block: int, number: int) -> Tensor:
    """Draw probe `number` of block `block`, a standard normal tensor."""
    return gaussian_like(matrix, context, Draw.PROBE, block * PROBES + number)


def no_noise(params: Params) -> State:
    """Return the state of `noise_moments` before the first step."""
    first = next(iter(params.values()))
    moments = {name: first.new_zeros(len(first), 3) for name in ("common", "own")}
    return {"steps": first.new_zeros(len(first)), **moments}


def noise_moments(state: State, memory: float, gain: float) -> State:
    """Update the moments of the noise in a client's state after a local step.

    The moments are E f^2, E f m and E m^2, divided by the variance of w. The comment before
    `bias_correction` defines f, m and w. Without a filter, E m^2 of a single client after t steps
    is (1 - mu^(2t)) / (1 - mu^2). Divided by s_t^2, this is the paper's (1 - mu) / (1 + mu) (1 +
    mu^t) / (1 - mu^t).
    """
    weight = 1 + has_stepped(state) * (gain - 1)

    def carried(moments: Tensor) -> Tensor:
        f, cross, m = moments.unbind(-1)
        f, cross = (1 - weight) ** 2 * f, memory * (1 - weight) * cross
        return torch.stack([f, cross + f, memory**2 * m + 2 * cross + f], -1)

    own_moments = carried(state["own"]) + weight[:, None] ** 2
    return {"steps": state["steps"] + 1, "common": carried(state["common"]), "own": own_moments}


def average_noise(state: State, squares: float) -> State:
    """Update the moments of the noise after the server has averaged the clients' states.

    The noise of the averaged state is common to all clients of the next round. `squares` is the sum
    of the squared weights with which the server averages.
    """
    common = state["common"] + squares * state["own"]
    return {**state, "common": common, "own": torch.zeros_like(common)}


def has_stepped(state: State) -> Tensor:
    """Return 1 for each replica [S] whose number of `steps` is above 0, else 0."""
    return (state["steps"] > 0).to(state["steps"].dtype)
