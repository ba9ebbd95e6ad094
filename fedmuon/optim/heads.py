"""Rows of attention projections that belong together: queries, keys, values, and their heads.

A projection has one row per output. Separate projections of queries, keys and values have
H size, K size and K size rows. H is the number of heads of queries, K the number of heads of keys
and values, and `size` the number of outputs of one head. K < H is grouped-query attention. A fused
projection contains all three, as in GPT-2 (`c_attn`), Phi-3 (`qkv_proj`) and torch
(`in_proj_weight`). A few models, such as GPT-NeoX (`query_key_value`), store the queries, keys and
values of one head next to each other. There, only heads are consecutive rows.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

QUERIES = ("q_proj", "q_lin", "q_attn", "query", "wq", "q", "q_proj_weight")
KEYS_OR_VALUES = (
    *("k_proj", "k_lin", "key", "wk", "k", "k_proj_weight"),
    *("v_proj", "v_lin", "value", "wv", "v", "v_proj_weight"),
)
FUSED_IN_ORDER = ("c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj_weight")
FUSED_BY_HEAD = ("query_key_value",)


class Heads(NamedTuple):
    """Numbers of attention heads of a model or layer."""

    queries: int
    keys: int
    size: int

    @property
    def fused(self) -> tuple[int, int, int]:
        """Numbers of rows of the queries, keys and values in a fused projection."""
        return self.queries * self.size, self.keys * self.size, self.keys * self.size


def heads_by_module(model: nn.Module) -> dict[str, Heads]:
    """Return the heads that the modules of a model declare, by names of modules.

    A module of transformers has a config. torch's nn.MultiheadAttention has attributes.
    """
    declared = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            declared[name] = Heads(module.num_heads, module.num_heads, module.head_dim)
        elif (heads := _heads_of_config(getattr(module, "config", None))) is not None:
            declared[name] = heads
    return declared


def _heads_of_config(config: Any) -> Heads | None:
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    if getattr(config, "multi_query", False):
        keys = 1
    size, width = getattr(config, "head_dim", None), getattr(config, "hidden_size", None)
    if size is None and isinstance(width, int) and isinstance(queries, int) and queries:
        size = width // queries
    if isinstance(queries, int) and isinstance(keys, int) and isinstance(size, int):
        return Heads(queries, keys, size)
    return None


def heads_of(name: str, declared: dict[str, Heads]) -> Heads | None:
    """Return the heads that the nearest module around a parameter declares."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next((declared[prefix] for prefix in prefixes if prefix in declared), None)


def is_projection(name: str) -> bool:
    """Return whether a parameter, by its name, makes queries, keys or values."""
    return _has(name, (*QUERIES, *KEYS_OR_VALUES, *FUSED_IN_ORDER, *FUSED_BY_HEAD))


def rows_by_kind(name: str, outputs: int, heads: Heads | None) -> tuple[int, ...]:
    """Return the numbers of rows of queries, keys and values, if they are fused and differ."""
    differ = heads is not None and heads.queries != heads.keys and sum(heads.fused) == outputs
    return heads.fused if heads and differ and _has(name, FUSED_IN_ORDER) else ()


def rows_by_head(name: str, outputs: int, heads: Heads | None) -> tuple[int, ...]:
    """Return the number of rows of each head, or nothing if the numbers do not fit the layer."""
    if heads is None:
        return ()
    if _has(name, (*FUSED_IN_ORDER, *FUSED_BY_HEAD)):  # or keys and values of other tokens alone
        counts = (heads.queries + 2 * heads.keys, 2 * heads.keys)
    elif _has(name, QUERIES):
        counts = (heads.queries,)
    else:
        counts = (heads.keys,)
    fitting = [count for count in counts if count * heads.size == outputs]
    return (heads.size,) * fitting[0] if fitting and is_projection(name) else ()


def _has(name: str, parts: Iterable[str]) -> bool:
    return not {*name.split(".")}.isdisjoint(parts)
