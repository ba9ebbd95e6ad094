"""`fedmuon doctor`: what this machine has, and how to get what it lacks."""

import os
import platform

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedmuon.data.sources import available
from fedmuon.drive import versions
from fedmuon.gemm import rate, supported


def report(console: Console) -> None:
    """Print devices with their measured GEMM rates, data sources, and versions."""
    console.print(_devices())
    console.print(_sources())
    console.print(_versions())


def _devices() -> Table:
    table = Table(title="Devices", title_justify="left")
    for column in ("device", "dtype", "kernel", "GFLOP/s"):
        table.add_column(column, justify="right" if column == "GFLOP/s" else "left")
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        for dtype in (torch.float32, torch.float64):
            for kernel in supported(dtype, device):
                speed = rate(kernel, 2048, 784, 1024, dtype, device) / 1e9
                table.add_row(_name(device), str(dtype)[6:], kernel, f"{speed:.0f}")
    return table


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({os.cpu_count()} x {platform.processor() or platform.machine()})"


def _sources() -> Table:
    table = Table(title="Data sources", title_justify="left")
    for column in ("name", "here", "where, or how to get it"):
        table.add_column(column)
    for name, found, where in available():
        table.add_row(name, "[green]yes[/]" if found else "[yellow]no[/]", escape(where))
    return table


def _versions() -> Table:
    table = Table(title="Versions", title_justify="left")
    table.add_column("package")
    table.add_column("version")
    for name, version in versions().items():
        table.add_row(name, version)
    return table
