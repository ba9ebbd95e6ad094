"""Aggregators: how the server combines the replies of a round, by name or with a custom function.

A custom function receives the replies of one replica at a time. Each reply has `.client`, `.params`
and `.states` (name -> tensor), `.samples` (n_i) and `.loss`. Replies are in the order of the
clients. The function returns a mapping of names to tensors like `.params`, and must not store
anything between calls. The same function also combines the states that clients return. `.part`
says what `.params` contains: "model", or the name of the state.

If an aggregator needs a state that lasts from round to round, declare the state: `Aggregator(apply,
init=init)`, with `init(params) -> state` and `apply(replies, state) -> (params, state)`. States are
mappings of names to tensors. The server stores the state in every checkpoint. The model and each
returned client state have separate aggregator states. Stability bounds exist only for `mean` and
`by-samples`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fedmuon.core.errors import Guard, InputError, mapping, object_name
from fedmuon.core.hidden_state import HiddenState
from fedmuon.core.registry import Registry, unfit
from fedmuon.optim.aggregator import Aggregator, Function, mean
from fedmuon.optim.robust_aggregators import below_half, centered_clipping, geometric_median
from fedmuon.tasks.base import Params

__all__ = [
    "Aggregator",
    "by_samples",
    "centered_clipping",
    "geometric_median",
    "krum",
    "mean",
    "median",
    "trimmed_mean",
]


# Custom aggregators


def as_aggregator(found: Any, guard: Guard | None = None) -> Aggregator:
    """Convert a function of replies, or an `Aggregator`, to an aggregator.

    With a guard, errors in the aggregator name the guard's object. The guard also rejects an
    aggregator that stores something between calls.
    """
    if not isinstance(found, Aggregator):
        if not callable(found):
            kinds = "a function of the replies, or a fedmuon.Aggregator"
            raise unfit(found, "aggregator", kinds, "" if guard is None else guard.named)
        found = Aggregator(cast(Function, found))
    if guard is None:
        return found
    apply = found.apply
    with guard:
        hidden_state = HiddenState(apply)

    def read(result: Any) -> Any:
        if found.init is None:
            result = dict(result) if isinstance(result, Mapping) else None
        elif not isinstance(result, tuple | list) or len(result) != 2:
            raise TypeError(
                f"the function returns a {type(result).__name__}, but a pair (params, state) is "
                "required"
            )
        if name := hidden_state.changed():
            raise InputError(
                f"your aggregate {object_name(apply)} changes {name} when it is called, but a "
                "resumed run would lose this change. Use fedmuon.Aggregator(apply, "
                "init=init) with init(params) -> state and apply(replies, state) -> (params, "
                "state), or store the value in a state of the recipe that the server's rule "
                "updates."
            )
        return result if found.init is None else (mapping(result[0]), mapping(result[1]))

    init, shares = found.init, found.shares
    return replace(
        found,
        apply=guard.calling(apply, read),
        init=None if init is None else guard.calling(init, mapping),
        shares=None if shares is None else guard.calling(shares, lambda raw: list(map(float, raw))),
    )


# Built-in aggregators


AGGREGATORS: Registry[Aggregator] = Registry()


AGGREGATORS.add("mean")(mean)
AGGREGATORS.add("centered-clipping")(centered_clipping)
AGGREGATORS.add("geometric-median")(geometric_median)


@AGGREGATORS.add("by-samples")
def by_samples() -> Aggregator:
    """Return the aggregator for the mean weighted by sample counts n_i (McMahan et al. 2017).

    Returns:
        The aggregator. The weight of a client is its sample count divided by the sum of the sample
            counts of all participants.

    Example:
        >>> from types import SimpleNamespace
        >>> from fedmuon import aggregators
        >>> replies = [SimpleNamespace(samples=1), SimpleNamespace(samples=3)]
        >>> aggregators.by_samples().shares(replies)
        [0.25, 0.75]
    """

    def shares(replies: Sequence[Any]) -> list[float]:
        total = sum(reply.samples for reply in replies)
        return [reply.samples / total for reply in replies]

    def apply(replies: Sequence[Any]) -> Params:
        weights = shares(replies)
        total = {name: value * weights[0] for name, value in replies[0].params.items()}
        for reply, weight in zip(replies[1:], weights[1:], strict=True):
            for name, value in reply.params.items():
                total[name].add_(value, alpha=weight)
        return total

    return Aggregator(apply, stacked=True, shares=shares)


@AGGREGATORS.add("median")
def median() -> Aggregator:
    """Return the aggregator that computes the median of each model entry over the replies.

    With an even number of replies, the median is the mean of the two middle values.

    Returns:
        The aggregator.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from fedmuon import aggregators
        >>> replies = [SimpleNamespace(params={"w": torch.tensor([[x]])}) for x in (1.0, 2.0, 90.0)]
        >>> aggregators.median()(replies)
        {'w': tensor([[2.]])}
    """

    def middle(values: Tensor) -> Tensor:
        ordered, half = values.sort(0).values, (len(values) - 1) // 2
        return (ordered[half] + ordered[len(values) - 1 - half]) / 2

    return Aggregator(
        lambda replies: _entrywise(replies, middle), stacked=True, tolerates=below_half
    )


@AGGREGATORS.add("trimmed-mean")
def trimmed_mean(trim: float = 0.2) -> Aggregator:
    """Return the aggregator for the trimmed mean of each model entry (Yin et al. 2018).

    For each entry, the trimmed mean leaves out the smallest and the largest values.

    Args:
        trim: The share of the K values to leave out at each end, at least 0 and below 0.5. The
            floor(trim K) smallest and the floor(trim K) largest values are left out.

    Returns:
        The aggregator.

    Raises:
        InputError: If `trim` is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from fedmuon import aggregators
        >>> replies = [SimpleNamespace(params={"w": torch.tensor([[x]])}) for x in (0.0, 2.0, 90.0)]
        >>> aggregators.trimmed_mean(0.4)(replies)
        {'w': tensor([[2.]])}
    """
    if not 0 <= trim < 0.5:
        raise InputError(
            f"[federation.options] trim = {trim} is not valid. Use a share of 0 or more and "
            "below 0.5."
        )

    def trimmed(values: Tensor) -> Tensor:
        cut = int(trim * len(values))
        return values.sort(0).values[cut : len(values) - cut].mean(0)

    return Aggregator(
        lambda replies: _entrywise(replies, trimmed),
        stacked=True,
        tolerates=lambda replies: int(trim * replies),
    )


@AGGREGATORS.add("krum")
def krum(faulty: int = 1) -> Aggregator:
    """Return the aggregator Krum, which chooses one reply (Blanchard et al. 2017).

    The chosen reply has the smallest sum of squared distances to its K - faulty - 2 nearest other
    replies.

    Args:
        faulty: Number of faulty clients to tolerate. A round needs at least faulty + 3 replies.

    Returns:
        The aggregator.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from fedmuon import aggregators
        >>> params = [{"w": torch.tensor([x])} for x in (1.0, 1.1, 1.3, 90.0)]
        >>> replies = [SimpleNamespace(params=one) for one in params]
        >>> aggregators.krum(faulty=1)(replies)
        {'w': tensor([1.])}
    """

    def apply(replies: Sequence[Any]) -> Params:
        count = len(replies) - faulty - 2
        if faulty < 0:
            raise InputError(
                f"faulty = {faulty} is not valid for krum ([federation.options]). Use an integer "
                "of 0 or more."
            )
        if count < 1:
            largest = len(replies) - 3  # krum needs three replies even for faulty = 0
            lower = f", or lower [federation.options] faulty to {largest}" if largest >= 0 else ""
            raise InputError(
                f"krum cannot use faulty = {faulty} with {len(replies)} replies in a round, "
                f"because it needs at least faulty + 3 = {faulty + 3} replies. Raise [federation] "
                f"per-round to {faulty + 3} (and clients, if it is smaller){lower}."
            )
        flat = torch.stack(
            [torch.cat([value.flatten() for value in reply.params.values()]) for reply in replies]
        )
        apart = torch.cdist(flat[None], flat[None], compute_mode="donot_use_mm_for_euclid_dist")[0]
        nearest = apart.square().sort(1).values[:, 1 : count + 1].sum(1)
        best = flat.index_select(0, nearest.argmin(keepdim=True))[0]  # does not synchronize a GPU
        like = replies[0].params
        parts = best.split([value.numel() for value in like.values()])
        return {
            name: part.view(value.shape).to(value.dtype)
            for (name, value), part in zip(like.items(), parts, strict=True)
        }

    # Krum is proved for 2 faulty + 2 < K (Blanchard et al. 2017, Proposition 2).
    return Aggregator(apply, tolerates=lambda replies: max(0, min(faulty, (replies - 3) // 2)))


def _entrywise(replies: Sequence[Any], combine: Callable[[Tensor], Tensor]) -> Params:
    names = replies[0].params
    return {name: combine(torch.stack([reply.params[name] for reply in replies])) for name in names}
