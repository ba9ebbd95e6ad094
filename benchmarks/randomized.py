"""Compare randomized with full Newton-Schulz, and an exact polar factor with both.

    python -m benchmarks.randomized [--device cpu] [--sides 2048 4096] [--rank 254] [--exact 1024]

All methods run in turn on the same matrix, in an order that rotates. Times are medians, and ratios
are medians over turns. The note of a row contains the ratio of the operation counts of Nesterov
Muon (section 2): q (4 d1 d0^2 + 2 d0^3) for the full method, and (4 h + 6) m n l +
q (4 n l^2 + 2 l^3) for the randomized method. `share` is the rate of these operations divided by
the best rate of a square product.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from benchmarks import page
from benchmarks.optimizer import turns
from benchmarks.page import Row
from fedmuon.optim.flops import Sketch, newton_schulz_flops, randomized_flops
from fedmuon.orthogonalize import exact_sign, newton_schulz, randomized_polar, schedule
from fedmuon.tasks.matrix import rate, supported

Works = dict[str, Callable[[], object]]


def matrix(side: int, device: str) -> Tensor:
    """Return a matrix [side, side] of standard normal entries, always with the same seed."""
    return torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(device)


def best_product(side: int, device: str) -> float:
    """Return the best rate of a square float32 product on this machine, in flop/s."""
    place = torch.device(device)
    kernels = supported(torch.float32, place)
    return max(rate(name, side, side, side, torch.float32, place, 1) for name in kernels)


def arithmetic(side: int, width: int, power: int, steps: int) -> tuple[float, float]:
    """Return the operations of the full and the randomized method, as Nesterov Muon counts them."""
    polynomials = schedule("quintic", steps)
    full = newton_schulz_flops(side, side, polynomials)
    return full, randomized_flops(side, side, polynomials, Sketch(width, 0, power))


def low_rank(side: int, asked: argparse.Namespace) -> Iterator[Row]:
    """Compare both sketches with full Newton-Schulz."""
    m, width = matrix(side, asked.device), asked.rank + 2
    sketched = partial(randomized_polar, m, asked.rank, 2, asked.power, asked.steps)
    works: Works = {"full": partial(newton_schulz, m, asked.steps, "quintic")}
    for sketch in ("gaussian", "kaczmarz"):
        works[sketch] = partial(
            lambda name: sketched(sketch=name, generator=np.random.default_rng(0)), sketch
        )
    found = turns(works, asked.device, asked.budget)
    full, small = arithmetic(side, width, asked.power, asked.steps)
    peak = best_product(min(side, 2048), asked.device)
    note = (
        f"l = {width}, q = {asked.steps}, h = {asked.power}: flop ratio {full / small:.1f}, best "
        f"product {peak / 1e9:.0f} GFLOP/s, {len(found)} turns"
    )
    whole = median(turn["full"] for turn in found)
    yield Row(f"{side} x {side}, q = {asked.steps} steps", whole, share=full / whole / peak)
    for name in list(works)[1:]:
        seconds = median(turn[name] for turn in found)
        ratio = median(turn["full"] / turn[name] for turn in found)
        figure = f"{side} x {side}, {name} sketch / full"
        yield Row(figure, seconds, whole, ratio, note=note, share=small / seconds / peak)
        note = ""


def exact(side: int, asked: argparse.Namespace) -> Iterator[Row]:
    """Compare an exact polar factor with the Newton-Schulz steps that approximate it."""
    m = matrix(side, asked.device)
    works: Works = {
        "steps": partial(newton_schulz, m, asked.steps, "quintic"),
        "SVD": partial(_by_svd, m),
        "exact_sign": partial(exact_sign, m),
    }
    found = turns(works, asked.device, asked.budget)
    steps = median(turn["steps"] for turn in found)
    for name in list(works)[1:]:
        seconds = median(turn[name] for turn in found)
        ratio = median(turn["steps"] / turn[name] for turn in found)
        yield Row(f"{side} x {side}, {name} / {asked.steps} steps", seconds, steps, ratio)


def _by_svd(m: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(m, full_matrices=False)
    return u @ vh


def measured(asked: argparse.Namespace) -> Iterator[Row]:
    """Return all rows of this benchmark."""
    for side in asked.sides:
        yield from low_rank(side, asked)
    if asked.exact:
        yield from exact(asked.exact, asked)


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sides", nargs="*", type=int, default=[2048, 4096])
    parser.add_argument(
        "--exact", type=int, default=1024, help="size of the matrix for the exact factor; 0: none"
    )
    parser.add_argument("--rank", type=int, default=254)
    parser.add_argument("--power", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds per size")
    asked = parser.parse_args()
    page.tell(measured(asked), asked.rows)


if __name__ == "__main__":
    main()
