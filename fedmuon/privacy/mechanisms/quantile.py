"""Clipping at a quantile of the norms, which is followed privately (Andrew, Thakkar, McMahan and
Ramaswamy 2021).

    C_{t+1} = C_t exp(-eta (b~_t - gamma)),   b~_t = (sum_i (b_i - 1/2) + N(0, s_b^2)) / lot + 1/2

b_i says how much of contribution i is not clipped at C_t: 1 if its norm is at most C_t, else 0, or
the share of its m blocks that are. Then C_t goes where a share gamma is not clipped. It follows
from what was released before, so that a step may clip at it; a contribution may be an example's
gradient or a client's update.

**Account.** A step releases the sums, with noise s_g C_t, and the count, with noise s_b. To these a
contribution adds a vector of norm C_t sqrt(m) at most and b_i - 1/2, which is in [-1/2, 1/2]: over
the noise, a vector of norm^2 m / s_g^2 + 1 / (4 s_b^2) at most, whatever C_t is. That is m / s^2,
so that the release is accounted for as one of multiplier s without a count, if

    s_g^-2 = s^-2 - (2 sqrt(m) s_b)^-2                                                         (1)

which is their formula (section 3.1) at m = 1. So s is what is asked for and accounted for, and sums
have the slightly larger noise s_g; s_b must exceed s / (2 sqrt(m)).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedmuon.core.device import unasked
from fedmuon.core.errors import InputError
from fedmuon.privacy.mechanisms.release import Released, clipped_sums, release
from fedmuon.privacy.noise import Normal
from fedmuon.tasks.base import Batch, Params, Points, Task, blocks
from fedmuon.tasks.per_example.clipping import Clipping

REACH = math.log(1e15)  # of ln C: noisy counts alone would carry it out of what float32 holds
SHARE = 20.0  # a count's noise is the lot over this (Andrew et al. 2021, section 3.1)


@dataclass(frozen=True)
class Quantile:
    """Which one, gamma; how fast its logarithm is followed, eta; and s_b, the noise of a count."""

    wanted: float
    rate: float
    noise: float

    @property
    def about(self) -> dict[str, float]:
        """What a summary says of it."""
        return {"quantile": self.wanted, "count_noise": self.noise}

    def of_sums(self, noise: float, blocks: int) -> float:
        """s_g of (1), where the release is to be one of multiplier s = `noise`."""
        left = 1 - (noise / (2 * self.noise)) ** 2 / blocks if self.noise else 1.0 - bool(noise)
        if left <= 0:
            raise InputError(
                f"[privacy] count-noise = {self.noise:g} leaves nothing of noise = {noise:g} for "
                f"the sums: raise it above {noise / (2 * math.sqrt(blocks)):.3g}"
            )
        return noise / math.sqrt(left)

    def moved(self, log_bound: Tensor, share: Tensor) -> Tensor:
        """ln C_{t+1} from ln C_t and b~_t, between the bounds that a config may have."""
        return (log_bound - self.rate * (share - self.wanted)).clamp(-REACH, REACH)


@dataclass(frozen=True)
class Counting(Clipping):
    """A clipping that adds up b_i - 1/2 of all examples whose factors it is asked for.

    One whose gradient is not finite may be left out: its part, 0, is its own, too.
    """

    counted: list[Tensor] = field(default_factory=list, compare=False)

    def factors(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As of any clipping."""
        found = super().factors(squares)
        kept = [(found[names[0]] == 1).double() for names in self._groups(squares)]
        self.counted.append((torch.stack(kept).mean(0) - 0.5).sum())
        return found

    def total(self) -> float:
        """The sum over all examples so far."""
        return math.fsum(float(one) for one in self.counted)


@dataclass(frozen=True)
class CountedRelease:
    """A step's sums, each client's clipped at its own bound, with what was not clipped: `noise` is
    the multiplier s of (1), `lot` what sums are divided by."""

    quantile: Quantile
    clipping: Clipping
    noise: float
    lot: float
    task: Task

    def of(
        self, points: Points, batches: Sequence[Batch], bounds: Tensor, drawn: Sequence[Normal]
    ) -> Released:
        """At the bounds [K], with the noise of each client's own draws."""
        if len(bounds) > len(batches):
            raise InputError(
                "clipping that follows a quantile follows that of one model: run it alone"
            )
        each = [(c, blocks(params, len(batches))) for c, params in points]
        found = [
            self._one([(c, own[k]) for c, own in each], batches[k], drawn[k], float(bound))
            for k, bound in enumerate(bounds)
        ]
        names = found[0].gradient
        kept = torch.stack([one.kept for one in found if one.kept is not None])
        return Released(
            {name: torch.cat([one.gradient[name] for one in found]) for name in names}, kept
        )

    def _one(self, points: Points, batch: Batch, drawn: Normal, bound: float) -> Released:
        """A client's, by (1)."""
        at = Counting(self.clipping.rule, bound, self.clipping.joint_block)

        def sums() -> tuple[Params, float]:
            at.counted.clear()
            return clipped_sums(self.task, points, [batch], at), at.total()

        total, count = unasked(self.task.device, sums)
        noise = self.quantile.of_sums(self.noise, at.blocks(total))
        found = release(total, at, noise, self.lot, drawn)
        last = float(drawn((1, 1), len(total))) if self.noise else 0.0
        kept = (count + self.quantile.noise * last) / self.lot + 0.5
        return Released(found.gradient, torch.tensor(kept, dtype=torch.float64))
