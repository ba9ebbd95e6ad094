"""How far one example can move a sum: clipping rules and their sensitivity (000, section 2).

Of a family G = (G_1, ..., G_m) of blocks, one for each parameter tensor, an example contributes

    block            min(1, C / ||G_i||_F) G_i           its whole is at most C sqrt(m)
    flat             min(1, C / ||G||) G                 at most C
    automatic        C G_i / ||G_i||_F                   at most C sqrt(m)
    automatic-flat   C G / ||G||                         at most C

and 0 where the gradient is 0. Automatic clipping (003, section 5) needs no threshold to tune.

In floating point a clipped norm may exceed C by rounding, at most by the factor 1 + `slack`: for
that much more noise is drawn (`release.py`), while the sums stay what they are. An
example whose gradient is not finite contributes 0, which is a function of that example alone.
Squared norms below the smallest normal number over eps have lost their digits: automatic rules make
0 of such a gradient, too, and the others take it for no shorter than that.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmuon.core.errors import InputError

RULES = ("block", "flat", "automatic", "automatic-flat")


def slack(dtype: torch.dtype) -> float:
    """How far a clipped norm that was computed in this precision may exceed C, relatively.

    4.9e-4 in float32 and 2.3e-10 in float64, where sums have nothing wider to be made in: room for
    sums in whatever order a processor takes (`accurate_norms.py`), for as much more noise.
    """
    return (2**20 if dtype == torch.float64 else 4096) * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Clipping:
    """A rule and its bound C, the same for every block; C = inf clips nothing.

    The tensors named in `joint_block` are one block: 000 releases all that Muon leaves to another
    optimizer as one.
    """

    rule: str = "block"
    bound: float = 1.0
    joint_block: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise InputError(f"clipping rule '{self.rule}' is unknown: use {', '.join(RULES)}")
        if not self.bound > 0 or (self.automatic and math.isinf(self.bound)):
            raise InputError(
                f"clipping bound = {self.bound} must be positive (finite if automatic)"
            )

    @property
    def automatic(self) -> bool:
        """Whether every gradient is scaled to C, short ones too."""
        return self.rule.startswith("automatic")

    @property
    def joint(self) -> bool:
        """Whether one norm is taken over all parameters."""
        return self.rule.endswith("flat")

    def blocks(self, params: Collection[str]) -> int:
        """m: how many vectors of norm at most C one example contributes to a release."""
        return 1 if self.joint else len(self._groups(params))

    def sensitivity(self, params: Collection[str]) -> float:
        """The L2 norm of all that one example adds to the sums: C sqrt(m)."""
        return self.bound * math.sqrt(self.blocks(params))

    def factors(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Squared norms of each example's blocks [..., n] -> what each block is multiplied by; 0
        where the square is not finite."""
        found: dict[str, Tensor] = {}
        for names in self._groups(squares):
            whole = torch.stack([squares[name] for name in names]).sum(0)
            found |= dict.fromkeys(names, self._factor(whole))
        return found

    def _groups(self, names: Collection[str]) -> list[list[str]]:
        """The names of each block's tensors."""
        if self.joint:
            return [list(names)]
        several = [name for name in names if name in self.joint_block]
        alone = [[name] for name in names if name not in self.joint_block]
        return [*alone, several] if several else alone

    def _factor(self, square: Tensor) -> Tensor:
        if math.isinf(self.bound):
            return torch.ones_like(square)
        info = torch.finfo(square.dtype)
        known = info.tiny / info.eps
        ratio = self.bound * square.clamp(min=known).rsqrt()
        if not self.automatic:
            ratio = ratio.clamp(max=1.0)
        there = square.isfinite() & (square >= known if self.automatic else True)
        return torch.where(there, ratio, 0.0)
