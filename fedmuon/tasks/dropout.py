"""Dropout with keyed masks, which depend on the run's seed but not on the engine.

Each sample has a key. The key depends on the seed, the round, the client, the step, and the row of
the sample in the data of its client. An entry of a mask is a hash of three numbers: the key of the
sample, the number of the dropout layer in the order of calls, and the position of the entry. Masks
are therefore the same in every engine, after a resume, in all replicas, in parts of a batch, and
for a single example.

The mask of an example does not depend on the values of other examples. However, if an example is
removed, later examples move to other rows and get other masks. The privacy guarantee of private
steps with dropout therefore covers a zeroed or replaced example, but not a removed example.

While a `Masks` context is active, it replaces torch's dropout layers and functions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedmuon.core.errors import InputError
from fedmuon.core.rng import FIRST, SECOND, STRIDE

DIGITS = 53  # binary digits of a uniform number
DROPPED = -1.7580993408473766  # value of dropped entries in alpha dropout, for unit variance
RANDOM = (  # functions that draw from torch's global generator; dropout functions have rules
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like,
    torch.randint_like, torch.normal, torch.bernoulli, torch.multinomial, torch.poisson,
    Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.random_,
    Tensor.bernoulli, Tensor.multinomial, functional.rrelu, functional.gumbel_softmax,
)  # fmt: skip


@dataclass
class Shapes:
    """The dropouts and the other random functions that were used in one call.

    `inputs` contains the input shape of each dropout, and `others` the names of the other
    functions.
    """

    inputs: list[tuple[int, ...]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


class Masks(TorchFunctionMode):
    """Context that replaces dropout by keyed masks during one call of a module.

    Args:
        keys: Keys [n] of the samples. With None, nothing is dropped, as in an evaluation.
        axes: For each dropout, the axis of its input that runs over the samples.
        seen: If set, this object receives the input shapes of all dropouts, and nothing is dropped.
    """

    def __init__(
        self, keys: Tensor | None, axes: tuple[int, ...] = (), seen: Shapes | None = None
    ) -> None:
        super().__init__()
        self.keys, self.axes, self.seen, self.count = keys, axes, seen, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function, or its replacement if the function draws a dropout mask."""
        if self.seen is not None and func in RANDOM:
            self.seen.others.append(getattr(func, "__name__", str(func)))
        rule = RULES.get(func)
        return (rule(self, *args, **kwargs or {})) if rule else func(*args, **kwargs or {})

    def kept(self, like: Tensor, p: float, axes: int | None = None) -> Tensor | None:
        """Return a mask: 1 for kept entries, 0 for dropped entries. None keeps all entries.

        Args:
            like: The input of the dropout.
            p: Probability that an entry is dropped.
            axes: Number of leading axes. Entries that differ only in later axes share one mask
                entry.
        """
        if p == 0:
            return None
        if self.seen is not None:
            self.seen.inputs.append(tuple(like.shape))
        if self.keys is None:
            return None
        axis = self.axes[self.count] if self.count < len(self.axes) else 0
        number, self.count = self.count, self.count + 1
        shape = list(like.shape)
        if axes is not None:
            shape[axes:] = [1] * (len(shape) - axes)
        first = shape.pop(axis)
        n = len(self.keys)
        if first % n:
            raise InputError(
                f"a dropout layer receives an input of shape {tuple(like.shape)} for {n} "
                "samples, so its mask cannot be drawn separately for each sample. Make the first "
                "axis the axis of samples."
            )
        entries = first // n * math.prod(shape)
        places = torch.arange(1, entries + 1, device=self.keys.device)
        start = _mixed(self.keys + _signed((number + 1) * FIRST))
        drawn = _shifted(_mixed(start[:, None] + places * _signed(STRIDE)), 64 - DIGITS)
        mask = (drawn >= round(p * 2**DIGITS)).to(like.dtype)
        return mask.reshape(first, *shape).movedim(0, axis)


def _signed(number: int) -> int:
    """Return the last 64 bits of a number as a signed 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63


def _shifted(values: Tensor, by: int) -> Tensor:
    """Shift the bits to the right, and insert zeros at the left.

    The usual right shift of an int64 number would insert copies of the sign bit.
    """
    return (values >> by) & (2 ** (64 - by) - 1)


def _mixed(values: Tensor) -> Tensor:
    for shift, factor in ((30, FIRST), (27, SECOND)):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return values ^ _shifted(values, 31)


# Rules, which replace torch's functions


def _dropout(
    masks: Masks,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    axes: int | None = None,
) -> Tensor:
    mask = masks.kept(input, p, axes) if training else None
    return input if mask is None else input * (mask / (1 - p) if p < 1 else mask)


def _alpha(
    masks: Masks,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    axes: int | None = None,
) -> Tensor:
    mask = masks.kept(input, p, axes) if training else None
    if mask is None:
        return input
    scale = ((1 - p) * (1 + p * DROPPED**2)) ** -0.5 if p < 1 else 0.0
    return scale * (input * mask + DROPPED * (1 - mask)) - scale * DROPPED * p


def _attention(
    masks: Masks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as defined by torch. If there is no dropout, call torch's own function."""
    if dropout_p == 0:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, **options
        )
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(times, -3) for tensor in (key, value))
    logits = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = logits.new_ones(logits.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return _dropout(masks, logits.softmax(-1), dropout_p) @ value


# Torch's own code with a check disabled. Otherwise, it would call this mode a second time.
_code = functional.multi_head_attention_forward
_inner = FunctionType(
    _code.__code__,
    {**_code.__globals__, "has_torch_function": lambda *_: False},
    argdefs=_code.__defaults__,
)
_inner.__kwdefaults__ = _code.__kwdefaults__


def _heads(masks: Masks, *args: Any, **kwargs: Any) -> Any:
    with masks:
        return _inner(*args, **kwargs)


_of_channels = partial(_dropout, axes=2)
RULES: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: lambda masks, input, p, train: _dropout(masks, input, p, train),
    functional.dropout1d: _of_channels,
    functional.dropout2d: _of_channels,
    functional.dropout3d: _of_channels,
    torch.feature_dropout: lambda masks, input, p, train: _of_channels(masks, input, p, train),
    functional.alpha_dropout: _alpha,
    functional.feature_alpha_dropout: partial(_alpha, axes=2),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _heads,
}


def sample_axes(one: Shapes, two: Shapes) -> tuple[int, ...]:
    """Find the axis of the samples in the input of each dropout, from calls with two batch sizes.

    Raises:
        InputError: If an input has no axis of samples, or if the module uses a global random
            generator.
    """
    if one.others:
        raise InputError(
            f"the module draws random numbers from a global generator ({one.others[0]}), so two "
            "runs with the same seed would differ. Use nn.Dropout, whose masks follow the seed "
            "of the run, or draw no random numbers."
        )
    batch_axes = []
    for a, b in zip(one.inputs, two.inputs, strict=True):
        axes = [k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        if len(a) != len(b) or len(axes) != 1:
            raise InputError(
                f"a dropout layer of the module receives an input of shape {a}, which has no "
                "axis of samples. Apply dropout to a tensor that has separate values for each "
                "sample."
            )
        batch_axes.append(axes[0])
    return tuple(batch_axes)
