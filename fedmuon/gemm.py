"""One matrix product behind one function, and a short measurement that chooses its kernel.

Which library multiplies fastest depends on the processor: MKL (`torch`) holds back on some AMD
parts, where oneDNN's convolution (`channels-last`, float32 only) or OpenBLAS (`numpy`) is ahead.
All kernels are exact up to rounding: relative error at most k * eps for an inner length k.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import conv2d

Kernel = Callable[[Tensor, Tensor], Tensor]


def _channels_last(a: Tensor, b: Tensor) -> Tensor:
    """A 1x1 convolution over a channels-last image is a matrix product; oneDNN runs it."""
    rows, inner = a.shape
    image = a.contiguous().view(1, rows, 1, inner).permute(0, 3, 1, 2)
    out = conv2d(image, b.T.contiguous().view(-1, inner, 1, 1))
    return out.permute(0, 2, 3, 1).reshape(rows, -1)


def _numpy(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(a.numpy() @ b.numpy())


KERNELS: dict[str, Kernel] = {"torch": torch.mm, "channels-last": _channels_last, "numpy": _numpy}


def supported(dtype: torch.dtype, device: torch.device) -> list[str]:
    """The kernels that can run here, the plainest first."""
    if device.type != "cpu":
        return ["torch"]
    return list(KERNELS) if dtype == torch.float32 else ["torch", "numpy"]


def multiply(a: Tensor, b: Tensor, kernel: str = "torch") -> Tensor:
    """a [m, k] times b [k, n], by the named kernel; either may be a transposed view."""
    return KERNELS[kernel](a, b)


def rate(
    kernel: str, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, repeats: int = 3
) -> float:
    """Flop per second of the best of a few products [m, k] x [k, n]^T, as the tasks ask for."""
    a, b = (
        torch.ones(m, k, dtype=dtype, device=device),
        torch.ones(n, k, dtype=dtype, device=device),
    )
    multiply(a, b.T, kernel)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        multiply(a, b.T, kernel)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * m * k * n / best


def fastest(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel that multiplies [m, k] x [k, n] fastest here; one must win by 5% to displace."""
    best, best_rate = "torch", 0.0
    for kernel in supported(dtype, device):
        measured = rate(kernel, m, k, n, dtype, device)
        if measured > 1.05 * best_rate:
            best, best_rate = kernel, measured
    return best
