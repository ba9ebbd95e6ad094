"""Following a chain of links on an oracle of one's own: the loop that numerical studies share."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from torch import Tensor

from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Chain, Context

# (step, params) -> (loss [S], gradient); what is random in it is drawn for that step
Oracle = Callable[[int, Params], tuple[Tensor, Params]]
Draws = Callable[..., np.random.Generator]  # (what, step=..., block=...)


def walk(
    chain: Chain, params: Params, oracle: Oracle, steps: int, draws: Draws
) -> Iterator[tuple[int, Params]]:
    """(k, X_k) for k = 0 .. steps - 1, and then (steps, X_steps), each before its step is made."""
    states = chain.init(params, {})
    for step in range(steps):
        yield step, params
        context = Context(params, partial(oracle, step), [partial(draws, step=step)])
        params, states = chain.step(params, states, context)
    yield steps, params
