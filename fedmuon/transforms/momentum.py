"""Momentum: the state that FedMuon averages on the server, in the forms that papers and code use.

| form           | state C              | direction            | where                         |
|----------------|----------------------|----------------------|-------------------------------|
| `ema`          | beta C + (1 - beta) G | C                    | 001 (1), torch without Nesterov |
| `ema-nesterov` | beta C + (1 - beta) G | beta C + (1 - beta) G | torch.optim.Muon              |
| `polyak`       | beta C + G           | C                    | 000, 002, 004                 |
| `nesterov`     | beta C + G           | beta C + G           | 002 Algorithm 3               |

The right-hand C is the new one in the third column. The ema forms are the others times 1 - beta
from the same start, so a map that ignores scale cannot tell them apart; one with lambda or eps can.
"""

from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Context, Link, Number, State, per_replica, zeros

FORMS = ("ema", "ema-nesterov", "polyak", "nesterov")


def momentum(memory: Number, form: str = "ema") -> Link:
    """The link of one of `FORMS`; `memory` is beta, which may differ per replica."""
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
