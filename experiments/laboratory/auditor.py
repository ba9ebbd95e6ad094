"""Who guesses the coins of canaries: all releases are seen, and nothing else of a run."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from fedmuon.experiments.laboratory.planted import Canaries
from fedmuon.privacy.mechanism import Mechanism
from fedmuon.tasks.base import Params, Points
from fedmuon.transforms.base import Chain, Context, Link, State
from fedmuon.transforms.recipes import Recipe

SLIGHT, MOST_POINTS = 0.1, 16  # of the noise's own variance; points of an integral


@dataclass(eq=False)
class Auditor:
    """Who sees every release and knows the canaries' gradients, but no coin.

    A release is R = (sum + noise) / lot. In each tensor the entry at a canary's place is, but for
    the canary, about N(0, v) with v the mean square of all entries of lot R, and at least the
    noise's own variance. With the canary in the lot the logarithm of the likelihood ratio is

        x = y - s / 2,    y = sum_w a_w z_w / v_w,    s = sum_w a_w^2 / v_w,

    where z_w is lot R_w along the canary, of length a_w. As lots are secret, one release says
    ln(1 - q + q e^x), and a score is the sum over releases.
    """

    canaries: Canaries
    mechanism: Mechanism
    rates: np.ndarray  # by client
    found: dict[tuple[int, int, int], tuple[np.ndarray, float]] = field(default_factory=dict)

    def watching(self, recipe: Recipe) -> Recipe:
        """The recipe, whose releases are seen here before its chain goes on."""
        links = tuple(_watched(link, self.look) for link in recipe.chain.links)
        return dataclasses.replace(recipe, chain=Chain(links))

    def look(self, released: Params, draws: Sequence[Callable[..., Any]]) -> None:
        """At what the clients of a cohort release, one draw and one row of the stack a client."""
        for k, draw in enumerate(draws):
            assert isinstance(draw, partial)
            _, round, client, step = draw.args
            one = {name: value[k] for name, value in released.items()}
            self.found[round, client, step] = self._along(one, self.of[client])

    def _along(self, released: Params, own: Canaries) -> tuple[np.ndarray, float]:
        """y of these canaries, and s."""
        least = (self.mechanism.noise * self.mechanism.clipping.bound) ** 2
        lot, y, s = self.mechanism.lot, torch.zeros(len(own.rows)), 0.0
        seen = own.along(released)
        for name, length in self.canaries.lengths(self.mechanism.clipping).items():
            spread = max(least, lot**2 * float(released[name].square().mean()))
            y += (length * lot / spread) * seen[name].float().cpu()
            s += length**2 / spread
        return y.numpy(), s

    @cached_property
    def of(self) -> dict[int, Canaries]:
        """The canaries of each client."""
        return {client: self.canaries.of(client) for client in range(len(self.rates))}

    def scores(self) -> np.ndarray:
        """The sums over all releases [m]."""
        total = np.zeros(len(self.canaries.rows))
        for client in range(len(self.rates)):
            seen = [one for (_, who, _), one in self.found.items() if who == client]
            if seen and (own := self.canaries.clients == client).any():
                y, s = (np.stack(part) for part in zip(*seen, strict=True))
                total[own] = told(y, s, self.rates[client])
        return total

    def scores_of_model(self, first: Params, last: Params) -> np.ndarray:
        """From the model alone, [1, ...] before and after: how far it went against the gradient of
        each canary, in units of all entries' root mean square, less the median."""
        moved = {name: (first[name] - last[name])[0] for name in first}
        every = self.canaries.along(moved)
        scale = {name: float(value.square().mean().sqrt()) or 1.0 for name, value in moved.items()}
        found = sum(value.double().cpu().numpy() / scale[name] for name, value in every.items())
        return np.asarray(found - np.median(found))


def told(y: np.ndarray, s: np.ndarray, rate: float) -> np.ndarray:
    """The log-likelihood ratio of y [T, m] with the canary, (1 - q) N(b, s_t) + q N(b + s_t, s_t),
    and without it, N(b, s_t).

    Here b is what other samples do at a canary's places in every release: N(0, t^2), where t^2 is
    what the variance over canaries of the mean over time has beyond noise and canaries. Without it
    the ratio is sum_t ln(1 - q + q exp(y_t - s_t / 2)); else b is integrated out, on a grid around
    its mean given y, wide enough for both cases.
    """
    steps, mean = len(y), float(s.mean())
    ours = (rate * mean) ** 2 / 4 + rate * (1 - rate) * mean**2 / steps / 2
    shared = float(np.var(y.mean(0))) - mean / steps - ours
    if shared <= SLIGHT * mean / steps:
        return _ratio(y - s[:, None] / 2, rate)
    precision = float((1 / s).sum()) + 1 / shared
    center, spread = (y / s[:, None]).sum(0) / precision, precision**-0.5
    low = -rate * mean / spread - 3
    grid = np.linspace(low, 3, max(7, min(MOST_POINTS, math.ceil(3 - low)))) * spread
    # Up to what no b changes, ln P(b | y) without the canary is -(b - center)^2 precision / 2.
    weights = -(grid**2) * precision / 2
    within = [
        weight + _ratio(y - (center + b) - s[:, None] / 2, rate)
        for b, weight in zip(grid, weights, strict=True)
    ]
    return np.logaddexp.reduce(within) - np.logaddexp.reduce(weights)


def _ratio(x: np.ndarray, rate: float) -> np.ndarray:
    """sum_t ln(1 - q + q e^x)."""
    return np.logaddexp(math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + x).sum(0)


def _watched(link: Link, look: Callable[..., None]) -> Link:
    """The link, what it is given of the data being looked at."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        def released(points: Points) -> Any:
            found = context.released(points)
            look(found.gradient, context.draws)
            return found

        return link.update(direction, state, dataclasses.replace(context, released=released))

    return dataclasses.replace(link, update=update)
