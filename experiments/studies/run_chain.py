"""Run a chain of links on a custom gradient oracle: the loop that numerical studies share."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmuon.optim.chain import Chain, Context
from fedmuon.privacy.mechanisms.gaussian import Released
from fedmuon.tasks.base import Params, Points

# (step, params) -> (loss [S], gradient); what is random in it is a function of the step
Oracle = Callable[[int, Params], tuple[Tensor, Params]]
Draws = Callable[..., np.random.Generator]  # (what, step=..., block=...)


def run_chain(
    chain: Chain, params: Params, oracle: Oracle, steps: int, draws: Draws | Sequence[Draws]
) -> Iterator[tuple[int, Params]]:
    """Yield (k, X_k) before step k, for k = 0 .. steps - 1, and (steps, X_steps) at the end.

    A sequence of draws holds one generator per replica, so replicas share no draw.
    """
    states = chain.init(params, {})
    every = draws if isinstance(draws, Sequence) else [draws]
    for step in range(steps):
        yield step, params
        at_step = partial(oracle, step)
        now = [partial(draw, step=step) for draw in every]
        context = Context(params, at_step, now, partial(_released, at_step))
        params, states = chain.step(params, states, context)
    yield steps, params


def _released(gradient: Callable[[Params], tuple[Tensor, Params]], points: Points) -> Released:
    """sum_k c_k (noisy gradient at X_k); it has the step's noise once, because sum_k c_k = 1."""
    found = [(share, gradient(at)[1]) for share, at in points]
    return Released(
        {
            name: torch.stack([share * slope[name] for share, slope in found]).sum(0)
            for name in found[0][1]
        }
    )
