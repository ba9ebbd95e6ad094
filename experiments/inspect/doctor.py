"""`fedmuon doctor`: the devices, data sources and package versions of this machine."""

import os
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from fedmuon.data.readers import available
from fedmuon.experiments.tables import columns
from fedmuon.runs.provenance import processor, versions
from fedmuon.tasks import matrix


def record() -> dict[str, Any]:
    """Measure the speed of each kernel on each device, and look for data sources and packages."""
    devices = {torch.device("cpu"): f"cpu ({os.cpu_count()} x {processor()})"}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        devices[device] = f"{device} ({torch.cuda.get_device_name(device)})"
    rates = []
    for device, name in devices.items():
        for dtype in (torch.float32, torch.float64):
            for kernel in matrix.supported(dtype, device):
                speed = matrix.rate(kernel, 2048, 784, 1024, dtype, device)
                rates.append({"device": name, "dtype": str(dtype)[6:], "kernel": kernel,
                              "gflops": speed / 1e9})  # fmt: skip
    sources = [
        {"name": name, "available": is_available, "where": where}
        for name, is_available, where in available()
    ]
    return {"devices": rates, "data": sources, "versions": versions()}


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the result of `record` as tables."""
    rates = [
        (rate["device"], rate["dtype"], rate["kernel"], f"{rate['gflops']:.0f}")
        for rate in found["devices"]
    ]
    sources = [
        (
            source["name"],
            "[green]yes[/]" if source["available"] else "[yellow]no[/]",
            escape(source["where"]),
        )
        for source in found["data"]
    ]
    return [
        columns("Devices", ("device", "dtype", "kernel", "GFLOP/s"), rates, 3),
        columns(
            "Data sources", ("name", "available", "location, or how to get the data"), sources, 3
        ),
        columns("Versions", ("package", "version"), found["versions"].items(), 2),
    ]
