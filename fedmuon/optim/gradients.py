"""The first link: where a direction comes from.

DiSK: a Kalman filter with a constant gain over privatized gradients (003, Algorithm 2).

    g_t = release( c grad f(x_t + gamma d_{t-1}) + (1 - c) grad f(x_t) )
    g~_t = (1 - kappa) g~_{t-1} + kappa g_t,   g~_{-1} = g_0
    d_t = x_{t+1} - x_t,   c = (1 - kappa) / (kappa gamma)

The two gradients of an example are combined before its one clip, so a step has the sensitivity of
DP-SGD's. At gamma = (1 - kappa) / kappa it needs one evaluation; kappa = 1 is no filter;
gamma = inf leaves the low-pass filter of the gradients at x_t.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from fedmuon.core.device import sent
from fedmuon.optim.chain import Context, Link, State, has_stepped, per_replica
from fedmuon.privacy.mechanisms.gaussian import Quantile, Released
from fedmuon.tasks.base import Params, Points

LOG_BOUND = "log-bound"
EQUAL = 1e-12  # how near to 1 c counts as 1: gamma is a rounded quotient


def gradient() -> Link:
    """The mini-batch or full-batch gradient at X; its state is the last loss [S]."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        loss, slope = context.gradient(context.params)
        return slope, {"loss": loss}

    return Link("gradient", lambda params: {}, update)


def released() -> Link:
    """What the Gaussian mechanism releases of the lot's gradient at X; no loss leaves the data."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        return context.released([(1.0, context.params)]).gradient, state

    return Link("gradient", lambda params: {}, update)


def adapting(link: Link, quantile: Quantile, bound: float) -> Link:
    """The same first link, whose release is clipped at a bound that follows a quantile of norms,
    from `bound`; its logarithm [S] is kept beside the link's state, and averaged over clients."""

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        logarithm = first.new_full((len(first),), math.log(bound), dtype=torch.float64)
        return link.init(params) | {LOG_BOUND: logarithm}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        own, kept = dict(state), []
        log_bound = own.pop(LOG_BOUND)

        def released(points: Points) -> Released:
            found = context.released(points, log_bound.exp())
            kept.append(found.kept)
            return found

        direction, own = link.update(direction, own, replace(context, released=released))
        moved = quantile.moved(log_bound, sent(kept[0], log_bound.device, log_bound.dtype))
        return direction, own | {LOG_BOUND: moved}

    return replace(link, init=init, update=update, lasting=True)


def filtered(gain: float, reach: float) -> Link:
    """The first link of a chain; `gain` is kappa, `reach` gamma. Its state holds g~, the last x and
    the steps made [S]."""
    share = (1 - gain) / (gain * reach)

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        state = {"steps": first.new_zeros(len(first))}
        for name, value in params.items():
            # A copy: a file of states holds no tensor twice.
            state |= {f"gradient {name}": torch.zeros_like(value), f"before {name}": value.clone()}
        return state

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        found = context.released(_points(share, reach, context.params, state)).gradient
        weight = 1 + has_stepped(state) * (gain - 1)
        after, smooth = {"steps": state["steps"] + 1}, {}
        for name, value in found.items():
            held = state[f"gradient {name}"]
            smooth[name] = held + per_replica(weight, value) * (value - held)
            after |= {f"gradient {name}": smooth[name], f"before {name}": context.params[name]}
        return smooth, after

    return Link("gradient", init, update, lasting=True)


def _points(share: float, reach: float, params: Params, state: State) -> Points:
    """Where gradients are taken, and with which weights; d is 0 at the first step, whatever the
    first model is."""
    if share == 0:
        return [(1.0, params)]

    def ahead(name: str, value: Tensor) -> Tensor:
        moved = per_replica(has_stepped(state), value) * (value - state[f"before {name}"])
        return value + reach * moved

    point = {name: ahead(name, value) for name, value in params.items()}
    return [(1.0, point)] if abs(share - 1) < EQUAL else [(share, point), (1 - share, params)]
