"""The links behind the gradient: momentum, AdamW, scaling, mixing with the global direction, and
the step itself; and any link for some of the parameters."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedmuon.core.device import at_hand
from fedmuon.optim.chain import Context, Link, Number, State, per_replica, stateless, zeros
from fedmuon.tasks.base import Params

# torch.optim.AdamW's defaults
MEMORY, SQUARE_MEMORY, FLOOR, DECAY = 0.9, 0.999, 1e-8, 0.01


def momentum(memory: Number, form: str = "ema") -> Link:
    """The state that FedMuon averages on the server, in one of the forms that papers and code use;
    `memory` is beta, which may differ per replica.

    | form         | state C               | direction             | where                         |
    |--------------|-----------------------|-----------------------|-------------------------------|
    | ema          | beta C + (1 - beta) G | C                     | 001 (1), torch, not Nesterov  |
    | ema-nesterov | beta C + (1 - beta) G | beta C + (1 - beta) G | torch.optim.Muon              |
    | polyak       | beta C + G            | C                     | 000, 002, 004                 |
    | nesterov     | beta C + G            | beta C + G            | 002 Algorithm 3               |

    The right-hand C is the new one in the third column. The ema forms are the others times 1 - beta
    from the same start: a map that ignores scale cannot tell them; one with lambda or eps can.
    """
    average, ahead = form.startswith("ema"), form.endswith("nesterov")

    def mixed(state: State, direction: Params) -> State:
        kept = {name: per_replica(memory, value) for name, value in direction.items()}
        if average:
            return {
                name: state[name].lerp(value, 1 - kept[name]) for name, value in direction.items()
            }
        return {name: value + kept[name] * state[name] for name, value in direction.items()}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        state = mixed(state, direction)
        return (mixed(state, direction) if ahead else state), state

    return Link("momentum", zeros, update, lasting=True)


def only(chosen: Callable[[str, Tensor], bool], link: Link) -> Link:
    """The link for the chosen parameters (name, value [S, ...]); the others pass, and keep their
    states."""

    def mine(values: Params) -> Params:
        return {name: value for name, value in values.items() if chosen(name, value)}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        found, after = link.update(mine(direction), state, context)
        return direction | found, state | after

    return replace(link, init=lambda params: link.init(mine(params)), update=update)


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
        done = _number(after["steps"])
        for name, value in direction.items():
            mean = state[f"mean {name}"].lerp(value, 1 - MEMORY)
            square = state[f"square {name}"].lerp(value.square(), 1 - SQUARE_MEMORY)
            # Averages that began at 0, over the weight that they have had so far.
            root = (square / _weight(SQUARE_MEMORY, done, square)).sqrt_().add_(FLOOR)
            step = (mean / _weight(MEMORY, done, mean)).div_(root)
            found[name] = step.add_(context.params[name], alpha=decay)
            after |= {f"mean {name}": mean, f"square {name}": square}
        return found, after

    return Link("adamw", init, update, lasting=True)


def _number(steps: Tensor) -> Number:
    """The steps made, the same in every replica: one number, or float64 [S] where asking costs."""
    return float(steps[0]) if at_hand(steps.device) else steps.double()


def _weight(memory: float, steps: Number, template: Tensor) -> Number:
    """What an average that began at 0 has had of the whole weight."""
    return per_replica(1 - memory**steps, template)


def align(share: float) -> Link:
    """(1 - alpha) O + alpha Delta_G (001 Remark 3.2); the state Delta_G is the server's to set."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        mixed = {name: value.lerp(state[name], share) for name, value in direction.items()}
        return mixed, state

    return Link("global-direction", zeros, update)


def normalize() -> Link:
    """D / ||D||_F over all parameters of a replica together; 0 stays 0."""

    def update(direction: Params, context: Context) -> Params:
        squares = sum(value.flatten(1).square().sum(1) for value in direction.values())
        size = torch.as_tensor(squares).sqrt()
        inverse = torch.where(size > 0, 1 / size, size)
        return {name: value * per_replica(inverse, value) for name, value in direction.items()}

    return stateless("normalize", update)


def descend(lr: Number, others: Mapping[str, Number] | None = None, decay: float = 0.0) -> Link:
    """-eta times the direction (001 (3)), and times decay X beside it; eta is times the round's
    factor, and may differ per replica, and by parameter: `others` names those that do not take
    `lr`."""
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
