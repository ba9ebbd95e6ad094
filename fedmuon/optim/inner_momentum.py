"""Inner momentum of DP-Muon-IM: average each example's gradient over past models, then clip.

    g_i = a_0 grad f_i(x_t) + a_1 grad f_i(x_{t-1}) + ... + a_s grad f_i(x_{t-s}),  sum_j a_j = 1
    release( sum_i clip(g_i, C) + noise )

The usual momentum averages releases, whose gradients were clipped before. Inner momentum averages
before clipping, so the norm of the average is clipped. This norm is at most the average of the
norms. Before step s, each missing model is the first model.

**Account.** The past models were computed from earlier releases, so they are public. Given the
earlier releases, g_i is a function of example i alone, and its clipped norm is at most C. One step
therefore is one release of the sensitivity of DP-Muon, and costs the same privacy. A clip of every
gradient before the average would have the same sensitivity, but is another method.

**Norms.** The norm of g_i needs the inner products between models: with G_ij = sum_t slope_ijt
read_ijt^T for layer inputs `read` and output gradients `slope`, ||sum_j a_j G_ij||^2 is the sum of
a_j a_k (slope_ijt . slope_iku) (read_ijt . read_iku) over all j, k, t and u. `Outer` in
`fedmuon.tasks.per_example.gradients` computes this sum, because its axis T runs over positions and
models. The sum of the norms of the models is only an upper bound of the norm of g_i.
"""

from collections.abc import Sequence

from fedmuon.optim.chain import Context, Link, State
from fedmuon.tasks.base import Params, Points


def inner_momentum(weights: Sequence[float]) -> Link:
    """Return the first link of a private chain, which releases gradients averaged over past models.

    Args:
        weights: The weights a_0, ..., a_s of the current model and of the s models before it.

    Returns:
        A link whose state contains the s past models. The server averages them like a momentum.
    """
    ages = range(1, len(weights))

    def init(params: Params) -> State:
        # Cloned, because a file of states cannot contain one tensor twice.
        return {_past(age, name): params[name].clone() for age in ages for name in params}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        params = context.params
        # The current model is last, because the mechanism reads the round's variables from it.
        points: Points = [
            (weights[age], {name: state[_past(age, name)] for name in params})
            for age in reversed(ages)
            if weights[age]  # a gradient with the weight 0 need not be computed
        ]
        gradient = context.released([*points, (weights[0], params)]).gradient
        after = {
            _past(age, name): params[name] if age == 1 else state[_past(age - 1, name)]
            for age in ages
            for name in params
        }
        return gradient, after

    return Link("gradient", init, update, lasting=len(weights) > 1)


def _past(age: int, name: str) -> str:
    """Return the name under which the state contains a parameter of the model `age` steps ago."""
    return f"before-{age} {name}"
