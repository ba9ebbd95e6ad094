"""Choose the parameters that Muon updates, and show the choice as a table.

A tensor [out, ...] counts as the matrix [out, -1]. Muon updates the hidden matrices. The auxiliary
optimizer updates vectors and scalars (biases, norms, and tensors with one row or one column),
embeddings, normalizations, and the first and the last layer. The first and the last layer are the
first and the last registered module with a matrix. Frozen layers count, and adapters such as LoRA
do not, so the matrices of adapters are hidden matrices. A tensor [1, ..., n] outside a convolution
counts as an embedding of tokens or positions. If a model has no hidden matrix, such as a network
with two layers, Muon updates the largest matrix. A parameter with several names (tied weights) must
be a hidden matrix under every name.

Models of the library transformers tell how many attention heads they have. If asked, each head of
the query, key and value projections is a matrix of its own. The layer Conv1D of GPT-2 stores its
weights as [in, out], so that its columns are outputs.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedmuon.core.errors import InputError, shown
from fedmuon.optim.heads import (
    Heads,
    heads_by_module,
    heads_of,
    is_projection,
    rows_by_head,
    rows_by_kind,
)
from fedmuon.optim.muon import matrix_shape
from fedmuon.optim.shards import require_matrices
from fedmuon.tasks.models import owned_parameters

FUSED = {"in_proj_weight": 3, "c_attn": 3, "qkv": 3}  # part of a name -> number of fused matrices
GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}  # matrices per recurrent weight
BASES = ("base", "base_layer", "original")  # usual names of the layer that LoRA adapts
UNKNOWN = "heads unknown"  # the rows of a projection are not those of the heads in the config
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Route(NamedTuple):
    """The optimizer of one parameter, and the reason.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the parameter.
        matrices: A tuple (count, m, n), if Muon updates the parameter as `count` matrices of shape
            m x n, else None. If the matrices have different numbers of rows, m is the largest.
        optimizer: "muon" or "aux".
        reason: The reason, such as "hidden", "vector", "first layer" or "embedding".
        param: The parameter itself.
        rows: Numbers of rows of the matrices, if Muon cuts the parameter by its outputs.
        transposed: Whether the parameter is stored as [in, out], as in the layer Conv1D of GPT-2.

    Example:
        >>> import torch
        >>> from fedmuon.optim import routing_table
        >>> route = routing_table(torch.nn.Sequential(torch.nn.Linear(4, 4)))[0]
        >>> route.name, route.optimizer, route.matrices
        ('0.weight', 'muon', (1, 4, 4))
    """

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, int, int] | None
    optimizer: str  # "muon" or "aux"
    reason: str
    param: Tensor
    rows: tuple[int, ...] = ()
    transposed: bool = False


class RoutingTable(tuple[Route, ...]):
    """The routes of all parameters of a model: a tuple of `Route` that you can print as a table.

    Example:
        >>> import torch
        >>> from fedmuon.optim import routing_table
        >>> sizes = (8, 16), (16, 16), (16, 2)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        >>> print(routing_table(model))
        name      shape    matrices  optimizer  reason
        0.weight  16 x 8   -         aux        first layer
        0.bias    16       -         aux        vector
        1.weight  16 x 16  16 x 16   muon       hidden
        1.bias    16       -         aux        vector
        2.weight  2 x 16   -         aux        last layer
        2.bias    2        -         aux        vector
    """

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("name", "shape", "matrices", "optimizer", "reason")]
        for route in self:
            view = "-"
            if route.matrices is not None:
                count, *shape = route.matrices
                view = f"{count} of {_times(shape)}" if count > 1 else _times(shape)
            if len({*route.rows}) > 1 and route.matrices is not None:
                view = ", ".join(f"{rows} x {route.matrices[2]}" for rows in route.rows)
            rows.append((route.name, _times(route.shape), view, route.optimizer, route.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def routing_table(
    model: nn.Module,
    *,
    to_muon: Sequence[str] = (),
    to_aux: Sequence[str] = (),
    fused: Mapping[str, int] = FUSED,
    ends: bool = True,
    split_heads: bool = False,
) -> RoutingTable:
    """List every trainable parameter once, with its optimizer and the reason.

    Args:
        model: The model. Parameters with `requires_grad=False` are left out.
        to_muon: Name patterns, such as "blocks.*.weight", of parameters that Muon must update.
        to_aux: Name patterns of parameters that the auxiliary optimizer must update.
        fused: Mapping from a part of a parameter name to a number k. A matrix [k d, d] or [d, k d]
            with this part in its name is cut into k square matrices.
        ends: Whether the first and the last layer go to the auxiliary optimizer. Use False for a
            part of a network, such as one block.
        split_heads: Whether each head of query, key and value projections is one matrix. The
            numbers of heads are read from the config of the model.

    Returns:
        A tuple with one route per parameter, which prints as a table.

    Raises:
        InputError: If a pattern matches no name, `model` is not a module, the matrices of the model
            are stored as flat parts, or no projection can be split into heads.

    Example:
        >>> import torch
        >>> from fedmuon.optim import routing_table
        >>> sizes = (8, 16), (16, 16), (16, 2)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        >>> [route.name for route in routing_table(model) if route.optimizer == "muon"]
        ['1.weight']
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is {shown(model)}, but it must be an nn.Module. Pass the model itself "
            "and not its parameters, because parameters alone do not show to which layer they "
            "belong."
        )
    for which, patterns in (("to_muon", to_muon), ("to_aux", to_aux)):
        if isinstance(patterns, str):
            raise InputError(
                f"{which} is one string, but it must be a list of patterns. Use "
                f"{which}=[{patterns!r}]."
            )
        if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
            raise InputError(
                f"{which} is {shown(patterns)}, but it must be a list of name patterns, such as "
                f'{which}=["*.weight"].'
            )
    require_matrices(model)
    trainable = [
        (name, layer, param)
        for name, layer, _, param in owned_parameters(model)
        if param.requires_grad
    ]
    for pattern in (*to_muon, *to_aux):
        if not any(fnmatchcase(name, pattern) for name, _, _ in trainable):
            raise InputError(
                f"No parameter name matches the pattern {pattern!r}. To see all names, run "
                "print(routing_table(model))."
            )
    layers = _layers(model)
    outer = {id(layers[0]): "first layer", id(layers[-1]): "last layer"} if layers and ends else {}
    uses: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for name, layer, param in trainable:
        uses.setdefault(param, []).append((name, layer))
    reasons: dict[Tensor, str] = {}
    for param, owners in uses.items():
        candidates = (
            _reason(param, name, layer, None if "lora" in name else outer.get(id(layer)))
            for name, layer in owners
        )
        reasons[param] = next(filter(None, candidates), "")
        for patterns, forced in ((to_muon, ""), (to_aux, "named")):
            if any(fnmatchcase(name, pattern) for name, _ in owners for pattern in patterns):
                reasons[param] = forced
    largest = None if not all(reasons.values()) else _largest(reasons)
    table = RoutingTable(
        _route(param, uses[param], "" if param is largest else reason, fused, param is largest)
        for param, reason in reasons.items()
    )
    return _refined(table, model, bool(fused), True) if split_heads else table


def param_groups_for_muon(
    model: nn.Module,
    *,
    to_muon: Sequence[str] = (),
    to_aux: Sequence[str] = (),
    fused: Mapping[str, int] = FUSED,
) -> list[dict[str, Any]]:
    """Make the parameter groups of `MuonWithAux`: hidden matrices first, then all others.

    Args:
        model: The model. Parameters with `requires_grad=False` are left out.
        to_muon: Name patterns, such as "blocks.*.weight", of parameters that Muon must update.
        to_aux: Name patterns of parameters that the auxiliary optimizer must update.
        fused: Mapping from a part of a parameter name to a number k. A matrix [k d, d] or [d, k d]
            with this part in its name is cut into k square matrices.

    Returns:
        One group with `use_muon: True` for each value of `blocks` (1, or k for fused matrices), and
            one group with `use_muon: False`. The groups contain pairs (name, parameter).

    Raises:
        InputError: If a pattern matches no name, or if Muon would update no parameter.

    Example:
        >>> import torch
        >>> from fedmuon.optim import param_groups_for_muon
        >>> sizes = (8, 16), (16, 16), (16, 2)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        >>> [(group["use_muon"], len(group["params"])) for group in param_groups_for_muon(model)]
        [(True, 1), (False, 5)]
    """
    return _groups_of(routing_table(model, to_muon=to_muon, to_aux=to_aux, fused=fused))


def groups(
    model: nn.Module,
    *,
    split_qkv: bool = True,
    split_heads: bool = False,
    ends: bool = True,
    to_muon: Sequence[str] = (),
    to_aux: Sequence[str] = (),
    show: bool = True,
) -> list[dict[str, Any]]:
    """Make the parameter groups of `MuonWithAux`, and print the optimizer of each parameter.

    Muon updates the hidden matrices. A filter [out, in, kh, kw] is the matrix [out, in kh kw]. The
    auxiliary optimizer, AdamW by default, updates embeddings, class tokens, the first and the last
    layer, norms and vectors. The first and the last layer are those that the model declares first
    and last. If the model calls other layers first or last, use `to_muon` and `to_aux`. If no
    matrix is left for Muon, Muon updates the largest matrix.

    Args:
        model: The model. Parameters with `requires_grad=False` are left out.
        split_qkv: Whether a parameter that contains the query, key and value projections counts as
            three matrices instead of one. With grouped-query attention, their numbers of rows are
            read from the config of the model.
        split_heads: Whether each head of the query, key and value projections counts as one matrix.
            The numbers of heads are read from the config of a model of the library transformers,
            or from nn.MultiheadAttention.
        ends: Whether the first and the last layer go to the auxiliary optimizer. Use False for a
            part of a network, such as one encoder layer.
        to_muon: Name patterns, such as "blocks.*.weight", of parameters that Muon must update.
        to_aux: Name patterns of parameters that the auxiliary optimizer must update.
        show: Whether to print the table.

    Returns:
        One group with `use_muon: True` for each way to cut a parameter into matrices, and one group
            with `use_muon: False`.

    Raises:
        InputError: If a pattern matches no name, if no projection can be split into heads, or if
            Muon would update no parameter.

    Example:
        >>> import torch
        >>> from fedmuon.optim import MuonWithAux, groups
        >>> sizes = (8, 16), (16, 16), (16, 2)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        >>> optimizer = MuonWithAux(groups(model, show=False), muon={"lr": 0.02}, aux={"lr": 3e-4})
        >>> len(optimizer.param_groups)
        2
    """
    fused = FUSED if split_qkv else {}
    table = routing_table(model, to_muon=to_muon, to_aux=to_aux, fused=fused, ends=ends)
    table = _refined(table, model, split_qkv, split_heads)
    if show:
        sizes = {which: [route.param.numel() for route in table if route.optimizer == which]
                 for which in ("muon", "aux")}  # fmt: skip
        print(table)
        print(*(f"{which}: {len(entries)} parameters, {sum(entries):,} entries"
                for which, entries in sizes.items()), sep="; ")  # fmt: skip
    return _groups_of(table)


def _refined(
    table: RoutingTable, model: nn.Module, split_qkv: bool, split_heads: bool
) -> RoutingTable:
    """Return the routes with details that the layers of a model show, and not the shapes alone.

    These are the heads of attention, ties, custom norms, weights [in, out], and factors of
    adapters, which are never fused matrices.
    """
    declared, adapters = heads_by_module(model), _adapters(model)
    uses: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for name, layer, _, param in owned_parameters(model):
        uses.setdefault(param, []).append((name, layer))
    routes = []
    for route in table:
        layer = uses[route.param][0][1]
        if not route.matrices:
            is_norm = route.reason == "vector" and type(layer).__name__.lower().endswith("norm")
            ties = ", ".join(other for other, _ in uses[route.param][1:])
            reason = ("norm" if is_norm else route.reason) + (f", tied to {ties}" if ties else "")
            routes.append(route._replace(reason=reason))
        elif "lora" in route.name or id(layer) in adapters:
            matrices = (1, *matrix_shape(route.param.shape))
            routes.append(route._replace(matrices=matrices, reason="hidden"))
        else:
            transposed = any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)
            heads = heads_of(route.name, declared)
            route = route._replace(transposed=transposed)
            routes.append(_cut(route, heads, split_qkv, split_heads))
    if split_heads:
        _require_heads(routes)
    return RoutingTable(routes)


def _cut(route: Route, heads: Heads | None, split_qkv: bool, split_heads: bool) -> Route:
    """Return the route with one matrix per head or per kind of projection, if this is asked for."""
    outputs, inputs = route.shape[0], prod(route.shape[1:])
    if route.transposed:
        outputs, inputs = inputs, outputs
    rows, reason = (), "fused"
    if split_heads and is_projection(route.name):
        if not (rows := rows_by_head(route.name, outputs, heads)):
            return route._replace(reason=f"{route.reason}, {UNKNOWN}")
        reason = f"{len(rows)} heads" if len(rows) > 1 else "1 head"
    elif split_qkv:
        rows = rows_by_kind(route.name, outputs, heads)
    if not rows:
        return route
    return route._replace(rows=rows, matrices=(len(rows), max(rows), inputs), reason=reason)


def _require_heads(routes: Sequence[Route]) -> None:
    """Raise an error if no projection is split into heads."""
    if not any(route.rows and "head" in route.reason for route in routes):
        raise InputError(
            "split_heads is True, but no query, key or value projection of this model can be split "
            "into heads. The model needs a config with num_attention_heads, as in the library "
            "transformers, and trained projections with names such as q_proj. Leave out "
            "split_heads."
        )


def _groups_of(table: RoutingTable) -> list[dict[str, Any]]:
    hidden: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for route in table:
        if route.matrices:
            key = (1 if route.rows else route.matrices[0], route.rows, route.transposed)
            hidden.setdefault(key, []).append((route.name, route.param))
    if not hidden:
        raise InputError(
            "No parameter of this model is a hidden matrix, so Muon would update nothing. Name "
            'parameters with to_muon=["*.weight"], or use torch.optim.AdamW alone.'
        )
    muon_groups: list[dict[str, Any]] = []
    for (blocks, rows, transposed), params in sorted(hidden.items(), key=lambda item: item[0]):
        group = {"params": params, "use_muon": True, "blocks": blocks}
        group |= {"rows": rows} if rows else {}
        muon_groups.append(group | ({"transposed": True} if transposed else {}))
    others = [(route.name, route.param) for route in table if not route.matrices]
    return [*muon_groups, {"params": others, "use_muon": False}] if others else muon_groups


def _is_matrix(param: Tensor) -> bool:
    """Return whether the tensor, as a matrix [out, -1], has several rows and several columns."""
    return param.ndim >= 2 and param.shape[0] > 1 and param.shape[1:].numel() > 1


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers with a matrix, in the order of the model.

    Frozen layers count, and adapters do not. The first and the last layer are therefore those of
    the model to which the adapters belong.
    """
    adapters = _adapters(model)
    return [
        layer
        for layer in model.modules()
        if id(layer) not in adapters and any(_is_matrix(weight) for weight in _weights(layer))
    ]


def _weights(layer: nn.Module) -> list[Tensor]:
    """Return the parameters of a layer, and its weight if the weight is a buffer."""
    stored = layer._buffers.get("weight")  # a pretrained weight that is never trained
    return [*layer.parameters(recurse=False), *([] if stored is None else [stored])]


def _is_frozen(layer: nn.Module) -> bool:
    """Return whether the layer itself has matrices, none of which is trained."""
    matrices = [weight for weight in _weights(layer) if _is_matrix(weight)]
    return bool(matrices) and not any(matrix.requires_grad for matrix in matrices)


def _adapters(model: nn.Module) -> set[int]:
    """Return the ids of the modules that adapt a frozen layer, such as those of LoRA.

    An adapter is next to a frozen layer with a name in `BASES`, or its name contains "lora".
    """
    ids: set[int] = set()
    for name, parent in model.named_modules():
        if "lora" in name.lower():
            ids.add(id(parent))
        children = dict(parent.named_children())
        if parent is not model and any(
            _is_frozen(child) for key, child in children.items() if key in BASES
        ):
            others = [child for key, child in children.items() if key not in BASES]
            ids |= {id(module) for child in others for module in child.modules()}
    return ids


def _reason(param: Tensor, name: str, module: nn.Module, end: str | None) -> str:
    """Return why a parameter is not a hidden matrix, or an empty string for a hidden matrix."""
    if isinstance(module, _NORMS):
        return "norm"
    # A class token or a table of positions has the shape [1, ..., n], and is not a filter.
    token = param.ndim > 2 and param.shape[0] == 1 and not isinstance(module, _ConvNd)
    if token or isinstance(module, _EMBEDDINGS):
        return "embedding"
    if not _is_matrix(param):
        return "vector"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase) and "weight_ih" not in name:
        return ""  # maps hidden units to hidden units, even in the first or the last layer
    return end or ""


def _largest(reasons: Mapping[Tensor, str]) -> Tensor | None:
    """Return the largest matrix that no name pattern matches, if possible not an embedding."""
    matrices = [
        param
        for param, reason in reasons.items()
        if reason in ("first layer", "last layer", "embedding") and _is_matrix(param)
    ]
    return max(
        matrices,
        key=lambda param: (reasons[param] != "embedding", param.numel()),
        default=None,
    )


def _route(
    param: Tensor,
    uses: Sequence[tuple[str, nn.Module]],
    reason: str,
    fused: Mapping[str, int],
    largest: bool,
) -> Route:
    shape, (name, owner) = tuple(param.shape), uses[0]
    if reason:
        return Route(name, shape, None, "aux", reason, param)
    if param.ndim < 2:
        raise InputError(
            f"the parameter {name} has shape {shape}, which is not a matrix. Remove this "
            "parameter from to_muon."
        )
    short, long = sorted((param.shape[0], param.shape[1:].numel()))
    counts = (  # numbers of square matrices side by side
        count
        for part, count in fused.items()
        if long == count * short and any(part in name for name, _ in uses)
    )
    blocks = next(counts, 1)
    if "weight_ih" in name or "weight_hh" in name:  # one matrix per gate, stacked vertically
        gates = GATES.get(type(owner), 1)
        blocks = gates if shape[0] >= param.shape[1:].numel() else blocks
    role = "largest matrix" if largest else "fused" if blocks > 1 else "hidden"
    return Route(name, shape, (blocks, *matrix_shape(param.shape, blocks)), "muon", role, param)


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
