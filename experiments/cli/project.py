"""Commands to begin with: `new`, `make-text`, `doctor`; and `score-text`."""

import keyword
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated, Any

import tomli_w
from rich.table import Table
from typer import Argument, Option

from fedmuon.core.errors import InputError
from fedmuon.data import text
from fedmuon.experiments.cli.options import console, print_path

TEMPLATES = Path(__file__).resolve().parents[1] / "project"
LONGEST = 32  # maximum characters of a Flower app's name
TAKEN = ("tests", "runs")  # folders of the project
NODES = 2  # that Flower simulates by default


def new(
    project: Annotated[Path, Argument(help="A new folder; its name is the package's.")],
) -> None:
    """Write a project with your own model, data and optimizer, to run with fedmuon or Flower.

    Example: [bold]fedmuon new demo[/], then [bold]cd demo[/] and [bold]pytest[/]
    """
    name = project.absolute().name
    found = find_spec(name) if name.isidentifier() else None
    if keyword.iskeyword(name) or not re.fullmatch("[a-z][a-z0-9_]*", name):
        close = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_0123456789")
        advice = f"try {close}" if close and not keyword.iskeyword(close) else "choose another"
        raise InputError(
            f"{name!r} is no name of a Python package (small letters, digits, _): {advice}"
        )
    if len(name) > LONGEST:
        raise InputError(
            f"{name!r} is longer than {LONGEST} characters, the maximum for a Flower app: choose a "
            "shorter name"
        )
    if name in TAKEN or (found is not None and found.origin is not None):
        raise InputError(f"{name!r} is the name of another package: choose one of your own")
    if project.exists() and not (project.is_dir() and not any(project.iterdir())):
        raise InputError(f"{project} is there already: choose a new or an empty folder")
    for place, content in _files(name).items():
        file = project / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    print_path("The project is in", project)
    print_path("Its two commands are in", project / "README.md")


def _files(name: str) -> dict[str, str]:
    """Path in the project -> content."""

    from fedmuon.config.load import nested, parse  # the config

    def fill(template: str) -> str:
        content = (TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
        return Template(content).substitute(package=name, app=name.replace("_", "-"))

    places = {"README.md": "README.md", "gitignore": ".gitignore", "config.toml": "config.toml"}
    parts = ("__init__.py", "model.py", "data.py", "recipe.py")
    places |= {part: f"{name}/{part}" for part in parts}
    places["test.py"] = f"tests/test_{name}.py"
    found = {place: fill(template) for template, place in places.items()}
    # Flower's run config: every key of the experiment, for the clients that Flower simulates.
    tables: dict[str, Any] = tomllib.loads(found["config.toml"])
    tables["federation"] |= {"clients": NODES, "per-round": NODES}
    held = {"out": "", "options": "", **nested(parse(tables))}
    run_config = tomli_w.dumps({"tool": {"flwr": {"app": {"config": held}}}})
    return {"pyproject.toml": f"{fill('pyproject.toml')}{run_config}", **found}


def make_text(
    folder: Annotated[Path, Argument(help="Where to write the train, dev and test files.")],
    form: Annotated[str, Option("--format", help="e2e (CSV) or dart (JSON).")] = "e2e",
    tables: Annotated[int, Option(help="How many, 10 to 5000.")] = 500,
    domain: Annotated[
        str, Option("--about", help="restaurants, or lodgings with other wordings.")
    ] = "restaurants",
    seed: Annotated[int, Option(help="Another seed gives another text.")] = 0,
) -> None:
    """Write synthetic tables and sentences in the format of E2E or DART; no line is from them.

    Example: [bold]fedmuon make-text data/e2e[/], then
    [bold]fedmuon run --set data.name=e2e --set data.folder=data/e2e --set task.name=network
    --set task.model=gpt[/]
    """
    for file in text.make_text(folder, form, tables, domain, seed):
        print_path("made up", file)


def score_text(
    written: Annotated[Path, Argument(help="A text file with one sentence per line.")],
    references: Annotated[
        Path, Argument(help="The references of each sentence in lines, with an empty line between.")
    ],
) -> None:
    """Score sentences against references: BLEU, ROUGE-L, METEOR, NIST and CIDEr.

    METEOR matches words and their stems, without synonyms. NIST and CIDEr are those of mteval-v13a
    and pycocoevalcap.

    Example: [bold]fedmuon score-text written.txt references.txt[/]
    """
    from fedmuon.experiments.text_scores import SHOWN, scores_of_files  # the scorers

    found = scores_of_files(written, references)
    table = Table("score", "value")
    for name, value in found.items():
        table.add_row(SHOWN[name][0], f"{value:.4f}")
    console.print(table)


def doctor() -> None:
    """Show what this machine has: devices and their speed, data sources, and versions."""
    from fedmuon.experiments.inspect.doctor import tables  # torch

    for table in tables():
        console.print(table)
