"""Aggregators that limit the effect of hostile clients: centered clipping and geometric median.

Both treat a reply as one vector that contains all entries of the model, or of a returned state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmuon.core.errors import InputError, shown
from fedmuon.optim.aggregator import Aggregator
from fedmuon.tasks.base import Params


def below_half(replies: int) -> int:
    """Return the largest number of hostile replies that is less than half of all replies.

    Args:
        replies: The number of replies in a round.
    """
    return (replies - 1) // 2


def centered_clipping(radius: float = 0.0, iterations: int = 1) -> Aggregator:
    """Return the aggregator centered clipping (Karimireddy et al. 2021).

    From the center v, each reply x_i moves the center by at most `radius` / K: v <- v + mean of
    (x_i - v) min(1, radius / ||x_i - v||). The center of a round is the result of the previous
    round, and that of the first round is the first model.

    Args:
        radius: The largest distance from the center that counts. With 0, it is the median of the
            distances in each iteration.
        iterations: Number of times that the center moves in a round.

    Returns:
        The aggregator. Its state is the center.

    Raises:
        InputError: If `radius` or `iterations` is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from fedmuon import aggregators
        >>> replies = [SimpleNamespace(params={"w": torch.tensor([x])}) for x in (1.0, 2.0, 90.0)]
        >>> aggregators.centered_clipping(3.0)(replies, {"w": torch.tensor([0.0])})[0]
        {'w': tensor([2.])}
    """
    if not 0 <= radius < float("inf"):
        raise InputError(
            f"[federation.options] radius = {shown(radius)} is not valid for centered-clipping. "
            "Use a number above 0, or 0 for the median distance."
        )
    _require_count("iterations", iterations, "centered-clipping")

    def apply(replies: Sequence[Any], state: Mapping[str, Tensor]) -> tuple[Params, Params]:
        rows, center = _rows(replies), _flat(state)
        for _ in range(iterations):
            moves = rows - center
            sizes = moves.norm(dim=1)
            limit = sizes.quantile(0.5) if radius == 0 else sizes.new_tensor(radius)
            # A reply at the center has size 0, and does not move it.
            factors = (limit / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)).clamp_max(1)
            center = center + (factors[:, None] * moves).mean(0)
        combined = _like(center, replies[0].params)
        return combined, combined

    return Aggregator(apply, init=dict, tolerates=below_half)


def geometric_median(iterations: int = 32, smoothing: float = 1e-6) -> Aggregator:
    """Return the aggregator for the geometric median, by smoothed Weiszfeld steps.

    The geometric median has the smallest sum of distances to all replies. Each step takes the mean
    of the replies with weights 1 / max(smoothing, distance) (RFA, Pillutla et al. 2022). The steps
    start from the median of each entry.

    Args:
        iterations: Number of steps.
        smoothing: Distances below this number count as this number.

    Returns:
        The aggregator.

    Raises:
        InputError: If `iterations` or `smoothing` is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from fedmuon import aggregators
        >>> replies = [SimpleNamespace(params={"w": torch.tensor([x])}) for x in (1.0, 2.0, 90.0)]
        >>> aggregators.geometric_median()(replies)["w"].round(decimals=3)
        tensor([2.])
    """
    _require_count("iterations", iterations, "geometric-median")
    if not 0 < smoothing < float("inf"):
        raise InputError(
            f"[federation.options] smoothing = {shown(smoothing)} is not valid for "
            "geometric-median. Use a number above 0."
        )

    def apply(replies: Sequence[Any]) -> Params:
        rows = _rows(replies)
        ordered, half = rows.sort(0).values, (len(rows) - 1) // 2
        center = (ordered[half] + ordered[len(rows) - 1 - half]) / 2
        for _ in range(iterations):
            weights = 1 / (rows - center).norm(dim=1).clamp_min(smoothing)
            center = (weights[:, None] * rows).sum(0) / weights.sum()
        return _like(center, replies[0].params)

    return Aggregator(apply, tolerates=below_half)


def _require_count(option: str, count: Any, name: str) -> None:
    if type(count) is not int or count < 1:
        raise InputError(
            f"[federation.options] {option} = {shown(count)} is not valid for {name}. Use an "
            "integer of 1 or more."
        )


def _rows(replies: Sequence[Any]) -> Tensor:
    """Return the replies as the rows of a matrix in float64."""
    return torch.stack([_flat(reply.params) for reply in replies])


def _flat(params: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in params.values()])


def _like(flat: Tensor, params: Mapping[str, Tensor]) -> Params:
    """Return a row as tensors with the names, shapes and dtypes of `params`."""
    parts = flat.split([value.numel() for value in params.values()])
    return {
        # The memory layout of the replies, so that a resumed run rounds in the same way.
        name: torch.empty_like(value).copy_(part.view(value.shape))
        for (name, value), part in zip(params.items(), parts, strict=True)
    }
