"""Rules of the server, which compute the next model from the old model and the clients' mean."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmuon.core.device import with_deferred_checks
from fedmuon.core.errors import InputError
from fedmuon.optim.chain import (
    Chain,
    Context,
    Link,
    Number,
    States,
    forbidden_gradient,
    per_replica,
    stateless,
    zeros,
)
from fedmuon.optim.recipe import ServerRule
from fedmuon.tasks.base import Params


def replace_by_mean(old: Params, mean: Params, states: States) -> tuple[Params, States]:
    """Return the mean of the clients' models as the next model (Stability note, eq. (4))."""
    return mean, states


def remember_direction(lr: Number, steps: int, others: Mapping[str, Number]) -> ServerRule:
    """Return a server rule that averages the models and stores the global direction D.

    D = (X - mean) / (lr E), where X is the old model, mean is the mean of the clients' models, and
    E is the number of local steps. Source: Stability note, Remark 3.2.

    Args:
        lr: Step size of the clients.
        steps: The number E of local steps of the clients.
        others: Mapping from a parameter name to a step size, for parameters that do not use `lr`.
    """

    def rule(
        old: Params, mean: Params, states: States, factor: float = 1.0
    ) -> tuple[Params, States]:
        count = factor * steps
        moved = {name: old[name] - mean[name] for name in old}
        rates = {name: per_replica(others.get(name, lr), old[name]) * count for name in old}
        direction = {name: moved[name] / rates[name] for name in old} if count else zeros(old)
        return mean, {**states, "global-direction": direction}

    return rule


def server_step(lr: float, memory: float, nesterov: bool = False) -> ServerRule:
    """Return a server rule that takes a step of SGD with momentum.

    With D, the mean of the clients' models minus X, the rule computes v <- memory v + D. The next
    model is X + lr v, or X + lr (D + memory v) with Nesterov's look-ahead.
    """

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        if lr == 1 and memory == 0:
            return mean, states  # exactly FedAvg, bit for bit
        if memory == 0:
            return {name: old[name].lerp(mean[name], lr) for name in old}, states
        moved = {name: mean[name] - old[name] for name in old}
        velocity = {name: moved[name] + memory * states["momentum"][name] for name in old}
        ahead = {name: moved[name] + memory * velocity[name] for name in old}
        step = ahead if nesterov else velocity
        after = {name: old[name] + lr * step[name] for name in old}
        return after, {**states, "momentum": velocity}

    return rule


def server_chain(method: str, links: Sequence[Link]) -> ServerRule:
    """Return a server rule that takes one step of a chain, for clients that return directions.

    The mean of the clients' directions takes the place of a gradient.

    Args:
        method: Name of the method, for errors.
        links: The links, which continue with the server's states of the same names.
    """

    def no_draws(*_: Any, **__: Any) -> Any:
        raise InputError(
            f"in {method}, the server orthogonalizes and cannot draw random numbers, but this "
            "orthogonalizer needs random numbers. Choose an orthogonalizer without random draws, "
            "such as newton-schulz."
        )

    def rule(old: Params, mean: Params, states: States, factor: float) -> tuple[Params, States]:
        chain = Chain((stateless("mean", lambda direction, context: mean), *links))
        context = Context(old, forbidden_gradient, [no_draws], factor=factor)
        params, after = with_deferred_checks(
            next(iter(old.values())).device,
            lambda: chain.step(old, chain.init(old, states), context),
        )
        return params, {**states, **after}

    return rule


def adaptive_step(
    kind: str, lr: float, memory: float, square_memory: float, tau: float
) -> ServerRule:
    """Return a server rule that takes a step of Adam, Yogi or Adagrad.

    Let D be the mean of the clients' models minus X, and b = square_memory. The rule computes
    m <- memory m + (1 - memory) D. Then "adam" sets v <- b v + (1 - b) D^2, "yogi" sets
    v <- v - (1 - b) D^2 sign(v - D^2), and "adagrad" sets v <- v + D^2. The next model is
    X + lr m / (sqrt(v) + tau), without bias correction. v starts at tau^2.

    Source: Reddi et al. 2021, Algorithm 2.
    """

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        updated, momentum, squares = {}, {}, {}
        for name, before in old.items():
            moved = mean[name] - before
            square, v = moved.square(), states["square"][name]
            momentum[name] = m = moved.lerp(states["momentum"][name], memory)
            if kind == "adam":
                v = square.lerp(v, square_memory)
            elif kind == "yogi":
                v = v - (1 - square_memory) * square * (v - square).sign()
            else:
                v = v + square
            squares[name] = v
            updated[name] = before + lr * m / (v.sqrt() + tau)
        return updated, {**states, "momentum": momentum, "square": squares}

    return rule
