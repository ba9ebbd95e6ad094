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

    def init(params: Params) -> State:
        return link.init({name: value for name, value in params.items() if chosen(name)})

    return Link(link.name, init, update, link.lasting)


def adamw(decay: float = DECAY) -> Link:
    """m / (sqrt(v) + eps) + decay X with bias-corrected moments, to be scaled by -lr (Loshchilov
    and Hutter 2019). The state holds m and v of every parameter, and the steps made [S]."""

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        state = {"steps": first.new_zeros(len(first))}
        for name, value in params.items():
            state |= {f"{which} {name}": torch.zeros_like(value) for which in ("mean", "square")}
        return state

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        after, found = {"steps": state["steps"] + 1}, {}
        done = float(after["steps"][0])
        for name, value in direction.items():
            mean = state[f"mean {name}"].lerp(value, 1 - MEMORY)
            square = state[f"square {name}"].lerp(value.square(), 1 - SQUARE_MEMORY)
            root = _corrected(square, SQUARE_MEMORY, done).sqrt_().add_(FLOOR)
            step = _corrected(mean, MEMORY, done).div_(root)
            found[name] = step.add_(context.params[name], alpha=decay)
            after |= {f"mean {name}": mean, f"square {name}": square}
        return found, after

    return Link("adamw", init, update, lasting=True)


def _corrected(moment: Tensor, memory: float, steps: float) -> Tensor:
    """An average that began at 0, over the weight it has had so far."""
    return moment / (1 - memory**steps)
