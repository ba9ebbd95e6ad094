"""Pairs of low-rank factors among the parameters of a model, and means of their products.

A low-rank adapter (LoRA: Hu et al. 2022, arXiv:2106.09685) changes a weight W [m, n] by s B A, with
the factors A [r, n] and B [m, r] and a fixed scale s. Names tell which parameters are factors:

| library           | A                                             | B                        |
|-------------------|-----------------------------------------------|--------------------------|
| PEFT              | `X.lora_A.weight`, `X.lora_A.default.weight`  | the same with `lora_B`   |
| loralib           | `X.lora_A`                                    | `X.lora_B`               |
| fedmuon's decoder | `X.c_attn.down.weight`                        | `X.c_attn.up.weight`     |

Tensors have a leading axis [S, ...] for S replicas. The scale s is not needed here, because it
multiplies the product and its mean alike.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.tasks.base import Params

_A = re.compile(r"(^|\.)(lora_A)(?=\.|$)|(?<=\.c_attn)(\.)(down)(?=\.weight$)")
_OTHER = {"lora_A": "lora_B", "down": "up"}
SHOWN = 8  # number of layer names in an error


@dataclass(frozen=True)
class Pair:
    """The names of the two factors of an adapter.

    Attributes:
        layer: Name of the layer that the adapter changes.
        a: Name of the factor A [r, n].
        b: Name of the factor B [m, r].
    """

    layer: str
    a: str
    b: str


def find_pairs(names: Iterable[str], pattern: str = "*") -> tuple[Pair, ...]:
    """Return the pairs of factors among parameter names, in the order of the names.

    Args:
        names: Names of parameters.
        pattern: Pattern of the layer names, such as `*.q_proj`.
    """
    known, pairs = dict.fromkeys(names), []
    for name in known:
        if (match := _A.search(name)) is None:
            continue
        start, end = match.span(2) if match[2] else match.span(4)
        layer = name[:start].rstrip(".")
        other = name[:start] + _OTHER[name[start:end]] + name[end:]
        if other in known and fnmatchcase(layer, pattern):
            pairs.append(Pair(layer, name, other))
    return tuple(pairs)


def require_pairs(names: Iterable[str], setting: str, pattern: str = "*") -> tuple[Pair, ...]:
    """Return the pairs of factors among parameter names, of which there must be at least one.

    Args:
        names: Names of parameters.
        setting: The setting that needs adapters, as errors name it.
        pattern: Pattern of the layer names.

    Raises:
        InputError: If there is no pair, or the pattern matches no layer with a pair.
    """
    known = [*names]
    if pairs := find_pairs(known, pattern):
        return pairs
    adapted = [pair.layer for pair in find_pairs(known)]
    layers = list(dict.fromkeys(adapted or (name.rpartition(".")[0] or name for name in known)))
    listed = ", ".join(layers[:SHOWN]) + (", ..." if len(layers) > SHOWN else "")
    if adapted:
        raise InputError(
            f"{setting} selects adapters with the pattern {pattern!r}, which matches no layer with "
            f"an adapter. The layers with adapters are {listed}. Use a pattern that matches some "
            "of them."
        )
    raise InputError(
        f"{setting} needs low-rank adapters, but no trained parameter of the model is a factor "
        f"such as X.lora_A.weight with X.lora_B.weight. The layers are {listed or 'unnamed'}. Add "
        "adapters to the model: in a config with [task] lora-rank = 8, in Python with the package "
        "peft."
    )


def factors_of(params: Mapping[str, Tensor], pair: Pair) -> tuple[Tensor, Tensor]:
    """Return the factors A [S, r, n] and B [S, m, r] of a pair as matrices."""
    a, b = params[pair.a].flatten(2), params[pair.b].flatten(2)
    if a.shape[1] != b.shape[2]:
        raise InputError(
            f"the factors {pair.a} and {pair.b} have the shapes {tuple(params[pair.a].shape[1:])} "
            f"and {tuple(params[pair.b].shape[1:])}, so they have no product B A. Give both the "
            "same rank."
        )
    return a, b


def product(params: Mapping[str, Tensor], pair: Pair) -> Tensor:
    """Return the product B A [S, m, n] of a pair."""
    a, b = factors_of(params, pair)
    return b @ a


def product_norm(left: Tensor, right: Tensor) -> Tensor:
    """Return the Frobenius norms [S] of products of [S, m, k] and [S, k, n].

    The product itself, of size m x n, is never computed.
    """
    upper = torch.linalg.qr(left, mode="r").R
    lower = torch.linalg.qr(right.mT, mode="r").R
    return torch.linalg.matrix_norm(upper @ lower.mT)


def stacked_mean(
    models: Sequence[Params], weights: Sequence[float], pair: Pair
) -> tuple[Tensor, Tensor]:
    """Return tensors L [S, m, K r] and R [S, K r, n] with the product L R = sum_i w_i B_i A_i."""
    factors = [factors_of(model, pair) for model in models]
    weighted = [weight * b for weight, (_, b) in zip(weights, factors, strict=True)]
    return torch.cat(weighted, 2), torch.cat([a for a, _ in factors], 1)


def mean_error(
    models: Sequence[Params], weights: Sequence[float], pair: Pair
) -> tuple[Tensor, Tensor]:
    """Return how far the product of mean factors is from the mean of the products.

    The first result is ||mean(B A) - mean(B) mean(A)|| [S], and the second is ||mean(B A)||. With
    weights of sum 1, the difference is mean((B - mean B) (A - mean A)), the covariance of the
    factors, in which nothing cancels.
    """
    factors = [factors_of(model, pair) for model in models]
    mean_a, mean_b = (
        torch.stack([weight * f for weight, f in zip(weights, part, strict=True)]).sum(0)
        for part in zip(*factors, strict=True)
    )
    outer = [weight * (b - mean_b) for weight, (_, b) in zip(weights, factors, strict=True)]
    error = product_norm(torch.cat(outer, 2), torch.cat([a - mean_a for a, _ in factors], 1))
    return error, product_norm(*stacked_mean(models, weights, pair))


def relative(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return sqrt(sum of squares of the first norms / sum of squares of the second norms) [S].

    The ratio is 0 where the second norms are 0, such as before the first step, with B = 0.
    """
    above, below = (torch.stack(norms).square().sum(0) for norms in zip(*parts, strict=True))
    return (above / torch.where(below > 0, below, 1)).sqrt()
