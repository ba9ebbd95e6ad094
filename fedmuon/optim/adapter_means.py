"""Means of low-rank adapters: of their factors, with the error, or of their products.

A client i returns the factors A_i and B_i of an adapter, and the server gives it the weight w_i.
The mean of the products is P = sum_i w_i B_i A_i. The product of mean factors differs from P by the
covariance of the factors. `FactorError` measures this difference. `exact_mean` computes factors of
P, or of the nearest matrix of rank r, instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.optim.adapters import factors_of, find_pairs, mean_error, relative, stacked_mean
from fedmuon.optim.aggregator import Aggregator
from fedmuon.optim.chain import States
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Stage
from fedmuon.tasks.base import Params

ADAPTERS = "adapters"  # name of the server's state with the error of mean factors
ERROR, DISCARDED = "error", "discarded"


@dataclass(frozen=True)
class FactorError(Stage):
    """A stage that changes nothing, but measures the error of averaging factors.

    The server's state `adapters.error` [S] is ||P - mean(B) mean(A)|| / ||P|| of the last round,
    with Frobenius norms over all adapters.

    Attributes:
        shares: Function that returns the weight of each reply in the mean, with sum 1.
    """

    shares: Callable[[Sequence[Reply]], Sequence[float]]

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Return the replies unchanged, and the error of their mean factors."""
        models, weights = [reply.params for reply in replies], self.shares(replies)
        errors = [mean_error(models, weights, pair) for pair in find_pairs(models[0])]
        return replies, {ADAPTERS: {ERROR: relative(errors)}} if errors else {}

    def initial(self, model: Params, returned: Sequence[str]) -> States:
        """Return an error of 0, because all factors start equal."""
        return {ADAPTERS: {ERROR: _zero(model)}} if find_pairs(model) else {}


def exact_mean(mean: Aggregator) -> Aggregator:
    """Return an aggregator that averages the products of adapters, and `mean` for everything else.

    The new factors are balanced: with the singular value decomposition P = U S V^T,

        B = U_r S_r^(1/2),   A = S_r^(1/2) V_r^T,

    where r is the rank of the adapters. P is never computed. With the thin decompositions Q_L R_L
    of [w_1 B_1, ..., w_K B_K] and Q_R R_R of [A_1^T, ..., A_K^T], the decomposition of the
    K r x K r matrix R_L R_R^T gives that of P. The state `discarded` [S] is the Frobenius norm of
    what exceeds rank r, divided by that of P, over all adapters.

    Where a singular value is 0, a row of A that is 0, too, could never be trained. This row is a
    right singular vector instead, with the root mean square length of the clients' rows, as at the
    start of LoRA. Rows of 0, which a client of lower rank does not use, do not count. States of the
    same factors, such as momenta, become 0, because they belong to the former factors.

    Args:
        mean: A weighted mean.
    """

    def apply(replies: Sequence[Any], state: Params) -> tuple[Params, Params]:
        combined, _ = mean.combine(replies)
        pairs = find_pairs(combined)
        if replies[0].part != MODEL:
            reset = {name: torch.zeros_like(combined[name]) for p in pairs for name in (p.a, p.b)}
            return {**combined, **reset}, state
        assert mean.shares is not None  # required in `with_adapters`
        models, weights = [reply.params for reply in replies], mean.shares(replies)
        parts = []
        for pair in pairs:
            a, b = factors_of(combined, pair)
            left, right = stacked_mean(models, weights, pair)
            rows = torch.stack([factors_of(model, pair)[0] for model in models])
            a, b, norms = refactored(left, right, a.shape[1], _typical_length(rows))
            combined[pair.a] = a.reshape(combined[pair.a].shape)
            combined[pair.b] = b.reshape(combined[pair.b].shape)
            parts.append(norms)
        return combined, {DISCARDED: relative(parts)} if parts else state

    def init(params: Any) -> Params:
        return {DISCARDED: _zero(params)}

    if mean.shares is None or mean.init is not None:
        raise InputError(
            "the mean of the products of adapters needs a weighted mean without a state. Set "
            "[federation] aggregate = 'mean' or 'by-samples'."
        )
    return Aggregator(apply, stacked=True, shares=mean.shares, init=init)


def refactored(
    left: Tensor, right: Tensor, rank: int, length: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return balanced factors of the nearest matrices of this rank to the products L R.

    Args:
        left: L [S, m, k].
        right: R [S, k, n].
        rank: The rank r.
        length: Length [S] of a row of A whose singular value is 0.

    Returns:
        A [S, r, n], B [S, m, r], and the norms [S] of the discarded part and of L R.
    """
    outer, upper = torch.linalg.qr(left)
    inner, lower = torch.linalg.qr(right.mT)
    u, values, v = torch.linalg.svd(upper @ lower.mT, full_matrices=False)
    missing = rank - values.shape[1]
    if missing > 0:  # r exceeds the sides of the matrix, so more rows of A and B are 0
        values = torch.nn.functional.pad(values, (0, missing))
        u = torch.nn.functional.pad(u, (0, missing))
        v = torch.nn.functional.pad(v, (0, 0, 0, missing))
    kept = values[:, :rank]
    tiny = torch.finfo(values.dtype).eps * max(left.shape[1], right.shape[2]) * values[:, :1]
    zero = kept <= tiny
    roots = torch.where(zero, 0, kept).sqrt()
    b, a = outer @ u[:, :, :rank], v[:, :rank] @ inner.mT
    # The largest entry of each column of B is positive, so that the factors are unique.
    largest = b.gather(1, b.abs().argmax(1, keepdim=True)).sign()
    signs = torch.where(largest == 0, 1, largest)
    b, a = (
        b * signs * roots[:, None],
        a * signs.mT * torch.where(zero, length[:, None], roots)[..., None],
    )
    discarded = torch.linalg.vector_norm(values[:, rank:], dim=1)
    return a, b, (discarded, torch.linalg.vector_norm(values, dim=1))


def _typical_length(rows: Tensor) -> Tensor:
    """Return the root mean square length [S] of those rows [K, S, r, n] that are not 0."""
    squares = rows.square().sum(3)
    return (squares.sum((0, 2)) / (squares > 0).sum((0, 2)).clamp(min=1)).sqrt()


def _zero(params: Params) -> Tensor:
    first = next(iter(params.values()))
    return first.new_zeros(len(first))
