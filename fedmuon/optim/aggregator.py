"""An aggregator, which combines the replies of a round, and the plain mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.tasks.base import Params, stack_results

Function = Callable[..., Any]  # (replies) -> params, or (replies, state) -> (params, state)
Init = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Aggregator:
    """A function that combines the replies of a round.

    Attributes:
        apply: Function `(replies) -> params`, or with `init`, `(replies, state) -> (params,
            state)`.
        stacked: Whether `apply` accepts the replies of all replicas `[replicas, ...]` at once.
        averages: Whether the aggregator is the plain mean, with weight 1/K per reply, as the theory
            assumes.
        shares: For a weighted mean, a function that receives the replies and returns one weight per
            reply, with sum 1.
        init: Function that receives the parameters and returns the first state.
        tolerates: For a robust aggregator, a function that receives the number of replies and
            returns how many of them may be hostile.

    Raises:
        InputError: If `apply`, `shares`, `init` or `tolerates` is not a function, or a plain mean
            has a state.

    Example:
        >>> import fedmuon
        >>> def first(replies):
        ...     return replies[0].params
        >>> fedmuon.Aggregator(first).averages
        False
    """

    apply: Function
    stacked: bool = False
    averages: bool = False
    shares: Callable[[Sequence[Any]], Sequence[float]] | None = None
    init: Init | None = None
    tolerates: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        for name in ("apply", "shares", "init", "tolerates"):
            if (function := getattr(self, name)) is not None and not callable(function):
                raise InputError(
                    f"{name} of an Aggregator has type {type(function).__name__}, but it must be a "
                    "function. Pass a function."
                )
        if self.init is not None and self.averages:
            raise InputError(
                "an Aggregator with averages = True is the plain mean, which has no state, but "
                "`init` is set. Leave init out, or set averages = False."
            )

    def __call__(self, replies: Sequence[Any], *state: Mapping[str, Tensor]) -> Any:
        """Combine the replies. If a state is passed, also return the next state."""
        return self.apply(replies, *state)

    def combine(self, replies: Sequence[Any], state: Params | None = None) -> tuple[Params, Params]:
        """Combine the replies of a stack of models, and validate the result.

        Args:
            replies: Replies whose tensors have a leading replica axis `[replicas, ...]`.
            state: The aggregator's state `[replicas, ...]`, or None if the aggregator has no state.

        Returns:
            The combined parameters, and the next state (empty if the aggregator has no state).

        Raises:
            InputError: If the function returns names, shapes or dtypes that differ from the
                replies.
        """

        def applied(
            replies: Sequence[Any], state: Params | None, like: Params
        ) -> tuple[Params, Params]:
            if state is None:
                return _check_result(self.apply(replies), like), {}
            combined, after = self.apply(replies, dict(state))
            after = _check_result(after, state, "its state")
            # Cloned, because a file of states cannot contain one tensor twice.
            return _check_result(combined, like), {
                name: value.clone() for name, value in after.items()
            }

        def at(tree: Params, s: int) -> Params:
            return {name: value[s] for name, value in tree.items()}

        like = replies[0].params
        if not like:  # a state without tensors
            return {}, dict(state or {})
        if self.stacked:
            return applied(replies, state, like)
        models, after = [], []
        for s in range(len(next(iter(like.values())))):
            alone = [
                replace(
                    reply,
                    params=at(reply.params, s),
                    states={
                        link: at(state_of_link, s) for link, state_of_link in reply.states.items()
                    },
                    loss=reply.loss[s],
                )
                for reply in replies
            ]
            combined, new = applied(alone, None if state is None else at(state, s), at(like, s))
            models.append(combined)
            after.append(new)
        return stack_results(models), stack_results(after)


def _check_result(result: Any, like: Params, subject: str = "each parameter") -> Params:
    """Reject a result whose names, shapes, dtypes or devices differ from those in `like`."""
    if not isinstance(result, Mapping) or set(result) != set(like):
        wrong = (
            "has other names" if isinstance(result, Mapping) else f"is a {type(result).__name__}"
        )
        raise InputError(
            f"[federation] aggregate must return one tensor for {subject}, but its result {wrong}. "
            "Return a mapping of "
            f"{', '.join(sorted(like)[:3])}{', ...' if len(like) > 3 else ''} to tensors."
        )
    for name, value in result.items():
        expected = like[name]
        alike = isinstance(value, Tensor) and (
            (value.shape, value.dtype, value.device, value.layout)
            == (expected.shape, expected.dtype, expected.device, expected.layout)
        )
        if not alike:
            wrong = f"a {type(value).__name__}"
            if isinstance(value, Tensor):
                wrong += f" of shape {tuple(value.shape)}, {value.dtype} on {value.device}"
            raise InputError(
                f"[federation] aggregate returns {wrong} for {name}, but the replies contain a "
                f"Tensor of shape {tuple(expected.shape)}, {expected.dtype} on {expected.device}. "
                "Return a dense tensor with the shape, dtype and device of the replies."
            )
    # Drop a graph that the function created. Keep the graph of the replies, for the adjoint.
    return {
        name: value if like[name].requires_grad else value.detach()
        for name, value in result.items()
    }


def mean() -> Aggregator:
    """Return the aggregator for the plain mean, with weight 1/K per reply.

    Source: Stability note, eqs. (4) and (5).

    Returns:
        The aggregator that the Stability note assumes.

    Example:
        >>> from fedmuon import aggregators
        >>> aggregators.mean().averages
        True
    """

    def apply(replies: Sequence[Any]) -> Params:
        count = len(replies)
        total = {name: value / count for name, value in replies[0].params.items()}
        for reply in replies[1:]:
            for name, value in reply.params.items():
                total[name].add_(value, alpha=1 / count)
        return total

    return Aggregator(apply, stacked=True, averages=True, shares=equal_shares)


def equal_shares(replies: Sequence[Any]) -> list[float]:
    """Return the weight 1/K of each of K replies."""
    return [1 / len(replies)] * len(replies)
