"""The Gaussian mechanism: draw a lot, sum clipped gradients, add noise (DP-Muon, Alg. 1, eq. (4)).

`Mechanism` draws lots and makes the releases of a run. `release` and `release_on_grid` add noise to
clipped sums. Everything that a private step returns is computed from these releases.

**Clipping at a quantile of the norms** (`Quantile`) estimates the quantile privately, and adapts
the clipping bound C_t in each step (Andrew, Thakkar, McMahan and Ramaswamy 2021):

    C_{t+1} = C_t exp(-eta (b~_t - gamma)),   b~_t = (sum_i (b_i - 1/2) + N(0, s_b^2)) / lot + 1/2

If contributions have a single block, b_i is 1 if the norm of contribution i is at most C_t, and
otherwise 0. With m blocks, b_i is the share of the blocks that are not clipped at C_t. C_t tends to
the bound at which a share gamma is not clipped. C_t depends only on earlier releases, so a step may
use C_t as its clipping bound. A contribution may be an example's gradient or a client's update.

*Account.* A step releases the sums, with noise s_g C_t, and the count, with noise s_b. A
contribution adds a vector of norm at most C_t sqrt(m) to the sums, and b_i - 1/2 to the count. This
number lies in [-1/2, 1/2]. Both additions, divided by the noise, form a vector of squared norm at
most m / s_g^2 + 1 / (4 s_b^2), for every C_t. If

    s_g^-2 = s^-2 - (2 sqrt(m) s_b)^-2                                                         (1)

this squared norm is m / s^2, so the release costs as much as a release of multiplier s without a
count. For m = 1, (1) is the formula of Andrew et al. (section 3.1). The config therefore sets s,
the account uses s, and the sums have the slightly larger noise s_g. The noise s_b must exceed s /
(2 sqrt(m)).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from fedmuon.config.incompatible import CUT, UNTRUE, in_turns
from fedmuon.core.choices import Arithmetic, NoiseSource
from fedmuon.core.device import is_finite, to_device, with_deferred_checks
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.core.rng import Draw
from fedmuon.privacy.accounting.composition import require_supported
from fedmuon.privacy.mechanisms import lattice
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling, Past, lots_of
from fedmuon.privacy.noise import (
    Draws,
    Normal,
    Streams,
    keyed_streams,
    normals,
    poisson_rows,
    secrecy,
    secret_streams,
    words_of,
)
from fedmuon.tasks.base import Batch, Params, Points, Released, Task, blocks
from fedmuon.tasks.per_example.clipping import Clipping, slack
from fedmuon.tasks.per_example.variables import TrainedSpace

REACH = math.log(1e15)  # bound on ln C: noisy counts could move C out of the range of float32
SHARE = 20.0  # the default noise of a count is lot / SHARE (Andrew et al. 2021, section 3.1)


def sums_of_lots(
    task: Task, points: Points, batches: Sequence[Batch], clipping: Clipping
) -> Params:
    """Return the sums of clipped gradients. Raise an error if the model is not finite."""
    for _, params in points:
        require_finite(params, "the model is")
    return task.clipped(points, batches, clipping)[1]


def require_finite(public: Params, what: str) -> None:
    """Raise an error if numbers that are already public are not finite.

    An error about the loss of a lot would reveal something about the lot's examples. An error about
    public numbers reveals nothing. If an entry of a tensor is not finite, the sum of all entries is
    not finite either. The function therefore tests only the sums, which is five times as fast.
    """
    if not all(is_finite(value.sum()) for value in public.values()):
        raise NonFinite(f"{what} not finite in a step of a private run. Lower [local] lr.")


def release(
    sums: Params, clipping: Clipping, noise_multiplier: float, expected_lot: float, drawn: Normal
) -> Released:
    """Add Gaussian noise to the clipped sums, and divide the result by the expected lot size.

    The noise has the standard deviation sigma C', where C' = C (1 + slack) is slightly larger than
    the clipping bound C. The slack covers rounding errors of the computed norms
    (`fedmuon.tasks.per_example.clipping`). The sums of an empty lot are zero and get the same
    noise. All m blocks together are one release of sensitivity C sqrt(m), whose noise multiplier is
    sigma / sqrt(m).

    Args:
        sums: Mapping from a block's name to the sum of its clipped gradients.
        clipping: The clipping rule, which contains the bound C.
        noise_multiplier: The noise multiplier sigma. With 0, no noise is added.
        expected_lot: The expected lot size, which is public. The actual lot size is not public.
        drawn: Function that receives a shape and the number of a block, and draws standard normal
            entries.
    """
    _require_sound(clipping, noise_multiplier, expected_lot)
    if noise_multiplier == 0:
        return Released({name: value / expected_lot for name, value in sums.items()})
    scale, gradient = noise_multiplier * clipping.bound, Params()
    for block, (name, value) in enumerate(sums.items()):
        entries = to_device(drawn(tuple(value.shape), block), value.device, value.dtype)
        gradient[name] = (value + scale * (1 + slack(value.dtype)) * entries) / expected_lot
    return Released(gradient)


def release_on_grid(
    sums: Params, clipping: Clipping, noise_multiplier: float, expected_lot: float, streams: Streams
) -> Released:
    """Make the same release as `release`, but with exact noise on a lattice (`lattice.py`)."""
    _require_sound(clipping, noise_multiplier, expected_lot)
    reach = max(clipping.bound * (1 + slack(value.dtype)) for value in sums.values())
    step, integers = lattice.noisy(
        sums, reach, noise_multiplier, lambda block: [words_of(stream) for stream in streams(block)]
    )
    per = step / expected_lot
    return Released({name: (integers[name].mul_(per)).to(sums[name].dtype) for name in sums})


def _require_sound(clipping: Clipping, noise: float, lot: float) -> None:
    if noise < 0:
        raise InputError(f"the noise multiplier is {noise}, but it must be 0 or more.")
    if not lot > 0:
        raise InputError(f"the expected lot size is {lot}, but it must be positive.")
    if noise and math.isinf(clipping.bound):
        raise InputError(
            f"the clipping bound is infinite, but noise = {noise} needs a finite clipping bound. "
            "Set a finite clipping bound such as 1.0, or set noise = 0."
        )


@dataclass(frozen=True)
class Quantile:
    """Settings for a clipping bound that adapts to a quantile of the norms.

    Attributes:
        wanted: The share gamma of contributions that should not be clipped.
        rate: The step size eta with which ln C adapts.
        noise: The standard deviation s_b of the noise that is added to the count.
    """

    wanted: float
    rate: float
    noise: float

    @property
    def about(self) -> dict[str, float]:
        """The settings as a table for the summary of a run."""
        return {"quantile": self.wanted, "count_noise": self.noise}

    def of_sums(self, noise: float, blocks: int) -> float:
        """Return the noise multiplier s_g of the sums by eq. (1).

        `noise` is the noise multiplier s of the account.
        """
        left = 1 - (noise / (2 * self.noise)) ** 2 / blocks if self.noise else 1.0 - bool(noise)
        if left <= 0:
            raise InputError(
                f"[privacy] count-noise = {self.noise:g} is too small: the noisy counts alone "
                f"use up the privacy budget of noise = {noise:g}, and nothing remains for the "
                f"sums. Set count-noise above {noise / (2 * math.sqrt(blocks)):.3g}."
            )
        return noise / math.sqrt(left)

    def moved(self, log_bound: Tensor, share: Tensor) -> Tensor:
        """Return the logarithm of the next clipping bound, clamped to a safe range."""
        return (log_bound - self.rate * (share - self.wanted)).clamp(-REACH, REACH)


@dataclass(frozen=True)
class Counting(Clipping):
    """Clipping that also counts how many contributions are not clipped.

    The count is the sum of b_i - 1/2 over all examples. b_i is the share of the blocks of example i
    that are not clipped. With a single block, b_i is therefore 0 or 1.

    An example whose gradient is not finite may be left out. This example then adds 0 to the count.
    """

    counted: list[Tensor] = field(default_factory=list, compare=False)

    def factors(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the clipping factors, and count the factors that are 1."""
        factors = super().factors(squares)
        unclipped = [(factors[names[0]] == 1).double() for names in self._groups(squares)]
        self.counted.append((torch.stack(unclipped).mean(0) - 0.5).sum())
        return factors

    def total(self) -> float:
        """Return the count, which is the sum of b_i - 1/2 over all examples so far."""
        return math.fsum(float(term) for term in self.counted)


def counted_sums(
    task: Task, points: Points, batch: Batch, clipping: Counting
) -> tuple[Params, float]:
    """Return the clipped sums of one client's lot, and the count of unclipped contributions."""
    clipping.counted.clear()
    return sums_of_lots(task, points, [batch], clipping), clipping.total()


@dataclass(frozen=True)
class Mechanism:
    """The settings with which private steps draw lots and make releases.

    Attributes:
        clipping: The clipping rule and the bound C. With a `quantile`, the bound adapts to the
            quantile of the norms.
        noise: The noise multiplier sigma of the account. The standard deviation of the noise is
            sigma C.
        lot: The expected size of a lot. Sums are divided by this number.
        repeatable: Whether lots and noise are drawn from the run's seed. Otherwise, they are secret
            and cannot be repeated.
        public_rate: The sampling probability, if it is public. With 0, the sampling probability is
            lot / (number of the client's samples).
        adjacency: The adjacency of the account (`fedmuon.privacy.accounting.dominating_pairs`).
            Add-remove needs a public rate, because no rate may depend on the number of samples.
        source: The generator of secret draws.
        arithmetic: `continuous` uses `release`, and `grid` uses `release_on_grid`. `auto` uses the
            grid for secret noise.
        fixed_order: Settings for lots in a fixed order (`fedmuon.privacy.mechanisms.fixed_order`).
            With None, lots are Poisson samples.
        quantile: Settings for a clipping bound that adapts to a quantile of the norms. With None,
            the bound is fixed.
        max_lot: The maximum size of a Poisson lot (`fedmuon.privacy.accounting.truncated`). With
            0, no lot is cut.
        space: The variables that are trained. Their gradients are clipped, and get noise. With
            None, all parameters are trained.
    """

    clipping: Clipping
    noise: float
    lot: float
    repeatable: bool = False
    public_rate: float = 0.0
    adjacency: str = "zero-out"
    source: NoiseSource = "secure"
    arithmetic: Arithmetic = "auto"
    fixed_order: FixedOrderSampling | None = None
    quantile: Quantile | None = None
    max_lot: int = 0
    space: TrainedSpace | None = None

    def __post_init__(self) -> None:
        require_supported(self.adjacency)
        if self.max_lot and (self.public_rate or self.adjacency == "add-remove"):
            raise InputError(CUT)
        if self.max_lot and self.fixed_order is not None:
            raise InputError(
                f"max_lot is {self.max_lot}, but max_lot limits only Poisson lots, and "
                "fixed_order is set. Set max_lot = 0, or leave fixed_order out."
            )
        if self.max_lot and self.max_lot < self.lot:
            raise InputError(
                f"max_lot is {self.max_lot}, but it must be at least lot = {self.lot:g}. Raise "
                "max_lot, or set max_lot = 0 for lots without a limit."
            )
        if self.adjacency == "add-remove" and not self.public_rate and self.fixed_order is None:
            raise InputError(UNTRUE)
        for name, choices in (("source", NoiseSource), ("arithmetic", Arithmetic)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise InputError(
                    f"{name} '{value}' is unknown. Use {' or '.join(get_args(choices))}."
                )
        if self.fixed_order is not None and (
            problem := in_turns(self.lot, self.public_rate, self.adjacency)
        ):
            raise InputError(problem)
        if self.arithmetic == "grid" and self._needs_reals:
            option = (
                "quantile" if self.quantile is not None else "fixed_order with correlated noise"
            )
            raise InputError(
                f"arithmetic is 'grid', but {option} needs continuous noise. Set arithmetic = "
                f"'auto', or leave {option} out."
            )

    @property
    def _correlated(self) -> bool:
        return self.fixed_order is not None and self.fixed_order.correlated

    @property
    def _needs_reals(self) -> bool:
        """Whether correlated noise or quantile clipping requires continuous noise."""
        return self.quantile is not None or self._correlated

    @cached_property
    def _past(self) -> Past | None:
        if self.fixed_order is None or not self._correlated:
            return None
        return self.fixed_order.past()

    @property
    def on_grid(self) -> bool:
        """Whether releases are on a lattice."""
        secret = not self.repeatable and not self._needs_reals
        return self.arithmetic == "grid" or (self.arithmetic == "auto" and secret)

    @property
    def again(self) -> bool:
        """Whether a round can be repeated bit-identically.

        Secret noise is different in each attempt. Correlated noise depends on earlier rounds.
        """
        return self.repeatable and not self._correlated

    @property
    def secrecy(self) -> str:
        """The secrecy class of the noise (`fedmuon.privacy.noise`)."""
        return secrecy(self.repeatable, self.source)

    @property
    def public_population(self) -> float:
        """The public number of samples per client, or 0 if each client uses its actual number."""
        return self.lot / self.public_rate if self.public_rate else 0.0

    @property
    def spread(self) -> float:
        """The standard deviation of the noise in an entry of a released gradient.

        The slack of `release` adds up to 0.05% to this value in float32. The slack is not included,
        because it is negligible for bias corrections.
        """
        return self.noise * self.clipping.bound / self.lot if self.noise else 0.0

    def trained(self, params: Params) -> Params:
        """Return the variables whose gradients are released, for a model in its first round."""
        return params if self.space is None else self.space.active(params, 0)

    def blocks(self, params: Params) -> int:
        """Return the number of blocks of a release. Each block is clipped separately."""
        return self.clipping.blocks(self.trained(params))

    def _clipping(self, points: Points, round: int) -> Clipping:
        """Return the clipping rule for the variables of a round."""
        if self.space is None:
            return self.clipping
        return replace(self.clipping, variables=self.space.variables(points[-1][1], round))

    def rate(self, size: int) -> float:
        """Return the probability that a sample is in a lot.

        In a fixed order, the result is 1 divided by the number of lots per epoch.
        """
        if self.fixed_order is not None:
            return 1 / lots_of(size, self.lot)
        return self.public_rate or min(1.0, self.lot / size)

    def rows(self, draw: Draws, size: int) -> np.ndarray:
        """Draw a Poisson lot, and return its row numbers.

        Keep the row numbers as secret as the noise.
        """
        if self.fixed_order is not None:
            raise InputError(
                "Mechanism.rows draws Poisson lots, but this mechanism has sampling = "
                f"'{self.fixed_order.sampling}'. Call mechanism.fixed_order.rows() instead."
            )
        rng = draw(Draw.LOT) if self.repeatable else secret_streams(1, self.source)(0)[0]
        rows = poisson_rows(rng, size, self.rate(size))
        if 0 < self.max_lot < len(rows):  # the choice is as random and as secret as the lot
            selected = np.argsort(words_of(rng)(len(rows)), kind="stable")[: self.max_lot]
            rows = rows[np.sort(selected)]
        return rows

    def releases(
        self,
        task: Task,
        batches: Sequence[Batch],
        draws: Sequence[Draws],
        step: int = 0,
        round: int = 0,
    ) -> Callable[..., Released]:
        """Return a function that computes the private release of one step.

        The returned function can be called only once, because the account counts one release per
        step.

        Args:
            task: The task, which computes clipped sums.
            batches: One lot per client.
            draws: The random draws of each client in this step.
            step: The number of the step in the run. Correlated noise depends on this number.
            round: The round. The variables that are trained can depend on this number.

        Returns:
            A function that receives the points and returns the release. With quantile clipping, the
                function also receives the clients' clipping bounds.
        """
        streams = self._streams(draws)
        calls: list[bool] = []

        def released(points: Points, bounds: Tensor | None = None) -> Released:
            if calls:
                raise InputError(
                    "a private step requests a second release, but the privacy account counts "
                    "one release per step. Call context.released in only one link of the chain, "
                    "and pass the result to the other links."
                )
            calls.append(True)
            clipping = self._clipping(points, round)
            if self.quantile is not None:
                if bounds is None:
                    raise InputError(
                        "clipping at a quantile needs the current clipping bounds, but "
                        "context.released was called without clipping bounds. Call "
                        "context.released(points, bounds) with one bound per client, such as "
                        "bounds = torch.ones(len(batches))."
                    )
                drawn = [normals(self._streams([draw])) for draw in draws]
                result = self._at_quantile(
                    self.quantile, clipping, task, points, batches, bounds, drawn
                )
            else:
                # Clipping may be repeated. A release may not, even if its result is discarded.
                sums = with_deferred_checks(
                    task.device, lambda: sums_of_lots(task, points, batches, clipping)
                )
                if self.on_grid and self.noise:
                    result = release_on_grid(sums, clipping, self.noise, self.lot, streams)
                else:
                    entries = normals(streams)
                    if self._past is not None:
                        entries = self._past.at(step, entries)
                    result = release(sums, clipping, self.noise, self.lot, entries)
            require_finite(result.gradient, "the released gradient is")
            return result

        return released

    def _streams(self, draws: Sequence[Draws]) -> Streams:
        return keyed_streams(draws) if self.repeatable else secret_streams(len(draws), self.source)

    def _at_quantile(
        self,
        quantile: Quantile,
        clipping: Clipping,
        task: Task,
        points: Points,
        batches: Sequence[Batch],
        bounds: Tensor,
        drawn: Sequence[Normal],
    ) -> Released:
        """Make a release in which each client has its own clipping bound."""
        if len(bounds) > len(batches):
            raise InputError(
                "[privacy] quantile supports only one model per run, because each model needs its "
                f"own clipping bound, but {len(bounds) // len(batches)} models run together. Run "
                "one model at a time, or set quantile = 0."
            )
        split_points = [(c, blocks(params, len(batches))) for c, params in points]
        gradients, shares = [], []
        for k, bound in enumerate(bounds):
            counting = Counting(
                clipping.rule, float(bound), clipping.joint_block, clipping.variables
            )
            client_points = [(c, stack[k]) for c, stack in split_points]
            # Clipping may be repeated, but the release may not: see `releases`.
            total, count = with_deferred_checks(
                task.device, partial(counted_sums, task, client_points, batches[k], counting)
            )
            noise = quantile.of_sums(self.noise, counting.blocks(total))
            gradients.append(release(total, counting, noise, self.lot, drawn[k]).gradient)
            last = float(drawn[k]((1, 1), len(total))) if self.noise else 0.0
            shares.append((count + quantile.noise * last) / self.lot + 0.5)
        gradient = {
            name: torch.cat([client_gradient[name] for client_gradient in gradients])
            for name in gradients[0]
        }
        return Released(gradient, torch.tensor(shares, dtype=torch.float64))
