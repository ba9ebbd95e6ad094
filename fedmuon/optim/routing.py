"""Which parameters Muon takes: a rule, and a table that shows its result.

Muon takes the hidden matrices. The auxiliary optimizer takes vectors and scalars (biases, norms),
embeddings, normalizations, and the first and the last layer. These are the first and last modules,
in the order of registration, that own a tensor of two or more axes. A parameter with several names
(tied weights) is hidden only if it is hidden under all of them.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedmuon.core.errors import InputError
from fedmuon.optim.muon import matrix_shape
from fedmuon.tasks.models import owned_parameters

FUSED = {"in_proj_weight": 3, "c_attn": 3, "qkv": 3}  # part of a name -> matrices in one
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Route(NamedTuple):
    """One parameter: `matrices` is (count, m, n) as Muon sees it, None for the auxiliary."""

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, int, int] | None
    optimizer: str  # "muon" or "aux"
    reason: str
    param: Tensor


class RoutingTable(tuple[Route, ...]):
    """The routes of a model; print it."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("name", "shape", "matrices", "optimizer", "reason")]
        for one in self:
            view = "-"
            if one.matrices is not None:
                count, *shape = one.matrices
                view = f"{count} of {_times(shape)}" if count > 1 else _times(shape)
            rows.append((one.name, _times(one.shape), view, one.optimizer, one.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def routing_table(
    model: nn.Module,
    *,
    to_muon: Sequence[str] = (),
    to_aux: Sequence[str] = (),
    fused: Mapping[str, int] = FUSED,
) -> RoutingTable:
    """Every trainable parameter once, with its optimizer and the reason.

    Args:
        model: The model.
        to_muon: Name patterns ("blocks.*.weight") that override the rule.
        to_aux: The same for the auxiliary optimizer.
        fused: Part of a name -> k. A matrix [k d, d] or [d, k d] with this part in its name is cut
            into its k square matrices.
    """
    found = [
        (name, layer, param)
        for name, layer, _, param in owned_parameters(model)
        if param.requires_grad
    ]
    for pattern in (*to_muon, *to_aux):
        if not any(fnmatchcase(name, pattern) for name, _, _ in found):
            raise InputError(
                f"No parameter name matches {pattern!r}: print(routing_table(model)) lists them."
            )
    layers = [layer for _, layer, param in found if param.ndim >= 2]
    ends = {id(layers[0]): "first layer", id(layers[-1]): "last layer"} if layers else {}
    rows = []
    for param in dict.fromkeys(param for _, _, param in found):
        names = [name for name, _, one in found if one is param]
        owners = [layer for _, layer, one in found if one is param]
        reasons = [_reason(param, layer, ends.get(id(layer))) for layer in owners]
        reason = next(filter(None, reasons), "")
        for patterns, forced in ((to_muon, ""), (to_aux, "named")):
            if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
                reason = forced
        rows.append(_route(names, param, reason, fused))
    return RoutingTable(rows)


def param_groups_for_muon(
    model: nn.Module,
    *,
    to_muon: Sequence[str] = (),
    to_aux: Sequence[str] = (),
    fused: Mapping[str, int] = FUSED,
) -> list[dict[str, Any]]:
    """Groups for `MuonWithAux`: hidden matrices by their number of blocks, then all others.

    The arguments are those of `routing_table`. Each group has `use_muon`, `blocks` if that is True,
    and its parameters with their names.
    """
    table = routing_table(model, to_muon=to_muon, to_aux=to_aux, fused=fused)
    hidden: dict[int, list[tuple[str, Tensor]]] = {}
    for one in table:
        if one.matrices:
            hidden.setdefault(one.matrices[0], []).append((one.name, one.param))
    if not hidden:
        raise InputError(
            "No parameter of this model is a hidden matrix, so Muon would never act: name some by "
            'to_muon=["*.weight"], or use torch.optim.AdamW alone.'
        )
    groups: list[dict[str, Any]] = [
        {"params": params, "use_muon": True, "blocks": blocks}
        for blocks, params in sorted(hidden.items())
    ]
    others = [(one.name, one.param) for one in table if not one.matrices]
    return [*groups, {"params": others, "use_muon": False}] if others else groups


def _reason(param: Tensor, module: nn.Module, end: str | None) -> str:
    """Why the parameter is no hidden matrix; empty if it is one."""
    if param.ndim < 2:
        return "norm" if isinstance(module, _NORMS) else "vector"
    if isinstance(module, _EMBEDDINGS):
        return "embedding"
    return "norm" if isinstance(module, _NORMS) else end or ""


def _route(names: list[str], param: Tensor, reason: str, fused: Mapping[str, int]) -> Route:
    shape, name = tuple(param.shape), names[0]
    if reason:
        return Route(name, shape, None, "aux", reason, param)
    if param.ndim < 2:
        raise InputError(f"{name} of shape {shape} is no matrix: take it out of to_muon.")
    short, long = sorted((param.shape[0], param.shape[1:].numel()))
    counts = (  # of square matrices side by side
        count
        for part, count in fused.items()
        if long == count * short and any(part in name for name in names)
    )
    blocks = next(counts, 1)
    matrices = (blocks, *matrix_shape(param.shape, blocks))
    return Route(name, shape, matrices, "muon", "fused" if blocks > 1 else "hidden", param)


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
