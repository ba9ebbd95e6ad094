"""`fedmuon doctor`: what this machine has, and how to get what it lacks."""

import os

import torch
from rich.markup import escape
from rich.table import Table

from fedmuon.data.sources import available
from fedmuon.experiments.tables import columns
from fedmuon.runs.provenance import processor, versions
from fedmuon.tasks.matrix import rate, supported


def tables() -> list[Table]:
    """Devices with their measured GEMM rates, data sources, and versions."""
    sources = [
        (name, "[green]yes[/]" if found else "[yellow]no[/]", escape(where))
        for name, found, where in available()
    ]
    return [
        columns("Devices", ("device", "dtype", "kernel", "GFLOP/s"), _rates(), 3),
        columns("Data sources", ("name", "here", "where, or how to get it"), sources, 3),
        columns("Versions", ("package", "version"), versions().items(), 2),
    ]


def _rates() -> list[tuple[str, str, str, str]]:
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [
        (_name(device), str(dtype)[6:], kernel, f"{speed / 1e9:.0f}")
        for device in devices
        for dtype in (torch.float32, torch.float64)
        for kernel in supported(dtype, device)
        for speed in [rate(kernel, 2048, 784, 1024, dtype, device)]
    ]


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({os.cpu_count()} x {processor()})"
