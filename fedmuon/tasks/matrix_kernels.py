"""One matrix product behind one function, and a short measurement that chooses its kernel.

Which library multiplies fastest depends on the processor: MKL (`torch`) holds back on some AMD
parts, where oneDNN's convolution (`channels-last`, float32 only) or OpenBLAS (`numpy`) is ahead.
All kernels are exact up to rounding: relative error at most k * eps for an inner length k.
`fused` is torch's, but for thin gradients, which `fedmuon.tasks.fused` has in one pass.
"""

import importlib
import math
import timeit
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fedmuon.core.threads import spread

Kernel = Callable[[Tensor, Tensor], Tensor]
FUSED = (torch.float32, torch.float64)


def _channels_last(a: Tensor, b: Tensor) -> Tensor:
    """A 1x1 convolution over a channels-last image is a matrix product; oneDNN runs it."""
    rows, inner = a.shape
    image = a.contiguous().view(1, rows, 1, inner).permute(0, 3, 1, 2)
    out = conv2d(image, b.T.contiguous().view(-1, inner, 1, 1))
    return out.permute(0, 2, 3, 1).reshape(rows, -1)


def _numpy(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(a.numpy() @ b.numpy())


KERNELS: dict[str, Kernel] = {
    "torch": torch.mm,
    "channels-last": _channels_last,
    "numpy": _numpy,
    "fused": torch.mm,
}


def supported(dtype: torch.dtype, device: torch.device) -> list[str]:
    """The kernels that can run here, the plainest first."""
    if device.type != "cpu":
        return ["torch"]
    found = ["torch", "channels-last", "numpy"] if dtype == torch.float32 else ["torch", "numpy"]
    return [*found, "fused"] if dtype in FUSED and find_spec("numba") else found


@lru_cache
def compiles() -> bool:
    """Whether numba is there, fits to the NumPy that is, and has a place to keep what it made."""
    try:
        importlib.import_module("fedmuon.tasks.fused")
    except Exception:  # whatever a library raises that does not fit
        return False
    return True


def multiply(a: Tensor, b: Tensor, kernel: str = "torch") -> Tensor:
    """a [m, k] times b [k, n], by the named kernel; either may be a transposed view."""
    return KERNELS[kernel](a, b)


def rate(
    kernel: str, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, repeats: int = 3
) -> float:
    """Flop per second of the best of a few products [m, k] x [k, n]."""
    a, b = _ones(m, k, dtype, device), _ones(n, k, dtype, device)
    return 2.0 * m * k * n / _best(lambda: multiply(a, b.T, kernel), device, repeats)


def fastest(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel for gradients: products [m, k] x [k, n] and [m, n] x [n, k], torch in between.

    As a piece of a step does them, in one thread; NumPy's library, which has threads of its own, is
    none of these. A kernel must win by 5% to displace a plainer one.
    """
    return spread([partial(_fastest, m, k, n, dtype, device)])[0]


def _fastest(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    a, b = _ones(m, k, dtype, device), _ones(n, k, dtype, device)

    def gradient(kernel: str) -> None:
        multiply(multiply(a, b.T, kernel).mul_(1e-3).exp_(), b, kernel)

    best, least = "torch", math.inf
    for kernel in [one for one in supported(dtype, device) if one not in ("numpy", "fused")]:
        seconds = _best(lambda kernel=kernel: gradient(kernel), device, 5)
        if 1.05 * seconds < least:
            best, least = kernel, seconds
    return best


def _ones(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(rows, columns, dtype=dtype, device=device)


def _best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls after one to warm up."""

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    finished()
    return min(timeit.repeat(finished, number=1, repeat=repeats))
