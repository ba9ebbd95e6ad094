"""`fedmuon doctor`: what this machine has, as tables of devices, data sources and versions."""

import os

import torch
from rich.markup import escape
from rich.table import Table

from fedmuon.data.readers import available
from fedmuon.experiments.tables import columns
from fedmuon.runs.provenance import processor, versions
from fedmuon.tasks import matrix


def tables() -> list[Table]:
    """Measure each kernel on each device, and look for data sources and packages."""
    devices = {torch.device("cpu"): f"cpu ({os.cpu_count()} x {processor()})"}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        devices[device] = f"{device} ({torch.cuda.get_device_name(device)})"
    rates = []
    for device, name in devices.items():
        for dtype in (torch.float32, torch.float64):
            for kernel in matrix.supported(dtype, device):
                speed = matrix.rate(kernel, 2048, 784, 1024, dtype, device)
                rates.append((name, str(dtype)[6:], kernel, f"{speed / 1e9:.0f}"))
    sources = [
        (name, "[green]yes[/]" if found else "[yellow]no[/]", escape(where))
        for name, found, where in available()
    ]
    return [
        columns("Devices", ("device", "dtype", "kernel", "GFLOP/s"), rates, 3),
        columns("Data sources", ("name", "here", "where, or how to get it"), sources, 3),
        columns("Versions", ("package", "version"), versions().items(), 2),
    ]
