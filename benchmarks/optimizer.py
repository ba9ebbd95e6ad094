"""Compare one optimizer step with torch.optim.Muon on the same parameters, in one process.

    python -m benchmarks.optimizer [--device cpu] [--shapes 12x768x768 ...] [--budget 20]

torch.optim.Muon orthogonalizes in bfloat16. `bf16` is this package in the same precision, with the
same trajectory. `f32` is the default of this package. It is compared with `loop`, which does the
arithmetic of torch matrix by matrix in float32, because torch does not offer float32. `polar` is
the smoothed polar factor, which torch does not offer either. The optimizers run in turn, in an
order that rotates. Times are medians, and ratios are medians over turns. Then five Newton-Schulz
steps are compared with the best rate of a product in the same dtype. A step that would take more
than a minute is left out with a note. bfloat16 is that slow on processors without hardware support.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks import page
from benchmarks.page import Row
from fedmuon.optim import Muon
from fedmuon.optim.flops import newton_schulz_flops
from fedmuon.orthogonalize import newton_schulz, schedule, smoothed_polar
from fedmuon.tasks.matrix import rate, supported

SHAPES = ("12x768x768", "48x256x256", "12x784x10", "220x784x10", "1x2048x2048", "1x4096x4096")
MANY = ("256x128x128",)  # additional shape on a GPU
PATIENCE = 60.0  # longest step in seconds
JORDAN = A, B, C = (3.4445, -4.7750, 2.0315)
RIVAL = {"bf16": "torch", "f32": "loop", "polar": "torch"}
Make = Callable[[list[Tensor]], Optimizer]


class Loop(Optimizer):
    """Muon with torch's defaults (momentum 0.95, Nesterov, decay 0.1), by matrix, in float32."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix [m, n], one after the other."""
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            momentum = state.setdefault("momentum", torch.zeros_like(param))
            momentum.lerp_(param.grad, 0.05)
            z = param.grad.lerp(momentum, 0.95)
            tall = len(z) > z.shape[1]
            z = z.T if tall else z
            z = z / z.norm().clamp(min=1e-7)
            for _ in range(5):
                g = z @ z.T
                z = torch.addmm(z, torch.addmm(g, g, g, beta=B, alpha=C), z, beta=A)
            param.mul_(1 - 1e-4).add_(z.T if tall else z, alpha=-1e-3)


CONTESTANTS: dict[str, Make] = {
    "torch": torch.optim.Muon,
    "loop": Loop,
    "bf16": partial(Muon, ns_dtype=torch.bfloat16),
    "f32": Muon,
    "polar": partial(Muon, orthogonalizer=partial(smoothed_polar, lam=1e-4)),
}


def parameters(shape: str, device: str) -> list[Tensor]:
    """Return `count` random m x n matrices with random gradients, for a shape `COUNTxMxN`."""
    count, m, n = map(int, shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        param = torch.randn(m, n, generator=generator).to(device).requires_grad_()
        param.grad = torch.randn(m, n, generator=generator).to(device)
        found.append(param)
    return found


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def turns(works: dict[str, Callable[[], object]], device: str, budget: float) -> list[dict]:
    """Return the seconds of each call in each turn.

    Turns repeat until the budget is spent, at least once and at most 50 times. The first calls only
    warm up, unless they take more than a quarter of the budget. Then they are the only turn.
    """
    first = {name: seconds(work, device) for name, work in works.items()}
    if sum(first.values()) > budget / 4:
        return [first]
    found, start, names = [], time.perf_counter(), list(works)
    while not found or (len(found) < 50 and time.perf_counter() - start < budget):
        shift = len(found) % len(names)
        found.append({name: seconds(works[name], device) for name in names[shift:] + names[:shift]})
    return found


def too_slow(shape: str, device: str) -> str:
    """Return the reason why torch's step in bfloat16 is left out, or "" if it is not."""
    count, m, n = map(int, shape.split("x"))
    flop = count * newton_schulz_flops(m, n, schedule(JORDAN, 5))
    square = torch.eye(256, dtype=torch.bfloat16, device=device)
    took = seconds(lambda: torch.addmm(square, square @ square.T, square), device)
    speed = 4 * 256**3 / took  # includes a transposed product, which may be several times faster
    wanted = flop / speed
    if wanted <= PATIENCE:
        return ""
    return (
        f"torch left out: {flop / 1e9:.0f} GFLOP in bfloat16 at {speed / 1e9:.1f} GFLOP/s "
        f"are {wanted:.0f} s"
    )


def compare(shape: str, device: str, budget: float) -> Iterator[Row]:
    """Compare the variants of this package with their rivals on one shape."""
    smallest, reason = min(map(int, shape.split("x")[1:])), too_slow(shape, device)
    left_out = {"torch"} if reason else set()
    left_out |= {"polar"} if smallest > 768 else set()  # its eigenproblem would take too long
    made = {
        name: make(parameters(shape, device))
        for name, make in CONTESTANTS.items()
        if name not in left_out
    }
    found = turns({name: one.step for name, one in made.items()}, device, budget)
    times = {name: median(turn[name] for turn in found) for name in made}
    note = f"{len(found)} turns. {reason}".strip()
    for name in (name for name in RIVAL if name in made):
        rival = RIVAL[name]
        if rival in made:
            ratio = median(turn[rival] / turn[name] for turn in found)
            figure = f"{shape}, a step, {name} / {rival}"
            yield Row(figure, times[name], times[rival], ratio, note=note)
        else:
            yield Row(f"{shape}, a step, {name}", times[name], note=note)
        note = ""


def iteration(side: int, dtype: torch.dtype, device: str, budget: float) -> Row:
    """Measure five Newton-Schulz steps, which are 15 products of 2 n^3 flop.

    The share is their rate divided by the rate of the best product.
    """
    matrix = torch.randn(side, side).to(device, dtype)
    place = torch.device(device)
    products = {
        name: partial(rate, name, side, side, side, dtype, place, 1)
        for name in supported(dtype, place)
        if dtype.itemsize > 2 or name == "torch"
    }
    ours, best = [], []
    start = time.perf_counter()
    while not ours or (len(ours) < 9 and time.perf_counter() - start < budget):
        best.append(max(product() for product in products.values()))
        work = partial(newton_schulz, matrix, 5, JORDAN, 1e-7, "max")
        ours.append(15 * 2 * side**3 / seconds(work, device))
    share = median(mine / theirs for mine, theirs in zip(ours, best, strict=True))
    speed, peak = median(ours), median(best)
    figure = f"Newton-Schulz, {side} x {side}, {str(dtype).removeprefix('torch.')}"
    note = f"{speed / 1e9:.1f} GFLOP/s, best product {peak / 1e9:.1f}"
    return Row(figure, 15 * 2 * side**3 / speed, note=note, share=share)


def measured(shapes: Sequence[str], device: str, budget: float, side: int) -> Iterator[Row]:
    """Return all rows of this benchmark."""
    for shape in shapes:
        yield from compare(shape, device, budget)
    for dtype in (torch.float32, torch.bfloat16):
        yield iteration(side, dtype, device, budget)


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", nargs="*")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds per shape")
    parser.add_argument("--side", type=int, default=2048)
    asked = parser.parse_args()
    default = SHAPES + MANY * (asked.device == "cuda")
    shapes = default if asked.shapes is None else asked.shapes
    page.tell(measured(shapes, asked.device, asked.budget, asked.side), asked.rows)


if __name__ == "__main__":
    main()
