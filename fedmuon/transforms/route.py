"""Links for some of the parameters: hidden matrices go one way, the rest another."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Context, Link, State

# torch.optim.AdamW's defaults
MEMORY, SQUARE_MEMORY, FLOOR, DECAY = 0.9, 0.999, 1e-8, 0.01


def only(chosen: Callable[[str], bool], link: Link) -> Link:
    """The link for the parameters of chosen names; the others pass, and keep their states."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        mine = {name: value for name, value in direction.items() if chosen(name)}
        found, after = link.update(mine, state, context)
        return direction | found, state | after

    return Link(link.name, link.init, update)


def adamw() -> Link:
    """m / (sqrt(v) + eps) + decay X with bias-corrected moments, to be scaled by -lr (Loshchilov
    and Hutter 2019). The state holds m and v of every parameter met, and the steps made."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        done = state.get("steps", torch.zeros(())) + 1
        after, found = {"steps": done}, {}
        for name, value in direction.items():
            first, second = (state.get(f"{which} {name}") for which in ("mean", "square"))
            mean = _ema(first, value, MEMORY)
            square = _ema(second, value.square(), SQUARE_MEMORY)
            step = _corrected(mean, MEMORY, done) / (
                _corrected(square, SQUARE_MEMORY, done).sqrt() + FLOOR
            )
            found[name] = step.add_(context.params[name], alpha=DECAY)
            after |= {f"mean {name}": mean, f"square {name}": square}
        return found, after

    return Link("adamw", lambda params: {}, update)


def _ema(old: Tensor | None, value: Tensor, memory: float) -> Tensor:
    return value * (1 - memory) if old is None else old.lerp(value, 1 - memory)


def _corrected(moment: Tensor, memory: float, steps: Tensor) -> Tensor:
    """An average that began at 0, over the weight it has had so far."""
    return moment / (1 - memory ** float(steps))
