"""Commands that write what one begins with: `new`, a Flower app of one's own, and `make-text`."""

import keyword
import os
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated, Any

import torch
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from fedmuon.data.sources import available
from fedmuon.experiments.cli.options import console, refuse, where
from fedmuon.experiments.tables import columns
from fedmuon.runs.provenance import processor, versions
from fedmuon.tasks.matrix_kernels import rate, supported

TEMPLATES = Path(__file__).resolve().parents[1] / "project"
LONGEST = 32  # of a Flower app's name
TAKEN = ("tests", "runs")  # folders of the project
NODES = 2  # that Flower simulates by default


def new(
    project: Annotated[Path, Argument(help="A new folder; its name is the package's.")],
) -> None:
    """Write a project with a model, data and a recipe of its own: run it by fedmuon or Flower.

    Example: [bold]fedmuon new demo[/], then [bold]cd demo[/] and [bold]pytest[/]
    """
    name = project.absolute().name
    _require_name(name)
    if project.exists() and not (project.is_dir() and not any(project.iterdir())):
        refuse(f"{project} is there already: choose a new or an empty folder")
    for place, text in _files(name).items():
        file = project / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    console.print("The project is in", where(project), soft_wrap=True)
    console.print("Its two commands are in", where(project / "README.md"), soft_wrap=True)


def _require_name(name: str) -> None:
    """Refuse what names no package, no Flower app, or one that is installed."""
    found = find_spec(name) if name.isidentifier() else None
    if keyword.iskeyword(name) or not re.fullmatch("[a-z][a-z0-9_]*", name):
        close = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_0123456789")
        mend = f"try {close}" if close and not keyword.iskeyword(close) else "choose another"
        refuse(f"{name!r} is no name of a Python package (small letters, digits, _): {mend}")
    if len(name) > LONGEST:
        refuse(f"{name!r} is longer than {LONGEST} characters, as long as Flower's apps are called")
    if name in TAKEN or (found is not None and found.origin is not None):
        refuse(f"{name!r} is the name of another package: choose one of your own")


def _files(name: str) -> dict[str, str]:
    """Place in the project -> content."""
    places = {"README.md": "README.md", "gitignore": ".gitignore", "config.toml": "config.toml"}
    parts = ("__init__.py", "model.py", "data.py", "recipe.py")
    places |= {part: f"{name}/{part}" for part in parts}
    places["test.py"] = f"tests/test_{name}.py"
    found = {place: _filled(template, name) for template, place in places.items()}
    run_config = _run_config(found["config.toml"])
    return {"pyproject.toml": f"{_filled('pyproject.toml', name)}{run_config}", **found}


def _filled(template: str, name: str) -> str:
    text = (TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(package=name, app=name.replace("_", "-"))


def _run_config(text: str) -> str:
    """The experiment as Flower's run config: every key, for as many clients as it simulates."""
    import tomli_w

    from fedmuon.config.load import nested, parse

    tables: dict[str, Any] = tomllib.loads(text)
    tables["federation"] |= {"clients": NODES, "per-round": NODES}
    held = {"out": "", "options": "", **nested(parse(tables))}
    return tomli_w.dumps({"tool": {"flwr": {"app": {"config": held}}}})


def make_text(
    folder: Annotated[Path, Argument(help="Where to write the train, dev and test files.")],
    form: Annotated[str, Option("--format", help="e2e (CSV) or dart (JSON).")] = "e2e",
    tables: Annotated[int, Option(help="How many, 10 to 5000.")] = 500,
    domain: Annotated[
        str, Option("--about", help="restaurants, or lodgings with other wordings.")
    ] = "restaurants",
    seed: Annotated[int, Option(help="Another seed makes up others.")] = 0,
) -> None:
    """Make up tables and sentences in the format of E2E or DART; no line is from these corpora.

    Example: [bold]fedmuon make-text data/e2e[/], then
    [bold]fedmuon run --set data.name=e2e --set data.folder=data/e2e --set task.name=network
    --set task.model=gpt[/]
    """
    from fedmuon.data.text import make_text as write

    for file in write(folder, form, tables, domain, seed):
        console.print("made up", where(file))


# `fedmuon doctor`: what this machine has, and how to get what it lacks.


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
