"""Commands for projects and machines: `new`, `make-text`, `score-text`, `doctor`."""

import keyword
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated, Any

import tomli_w
from typer import Argument, Option

import fedmuon.experiments.cli.completion as completion
from fedmuon.core.errors import InputError
from fedmuon.data import text
from fedmuon.experiments.cli.output import tell, tell_files
from fedmuon.experiments.tables import columns

TEMPLATES = Path(__file__).resolve().parents[1] / "project"
LONGEST = 32  # maximum characters of a Flower app's name
TAKEN = ("tests", "runs")  # folders of the project
NODES = 2  # the number of nodes that Flower simulates by default


def new(
    project: Annotated[
        Path,
        Argument(help="Path of the new project folder, whose name becomes the package name."),
    ],
) -> None:
    """Create a project with templates for your own model, data and optimizer.

    You can run the project with fedmuon or with Flower.

    Example: [bold]fedmuon new demo[/], then [bold]cd demo[/] and [bold]pytest[/]
    """
    name = project.absolute().name
    spec = find_spec(name) if name.isidentifier() else None
    if keyword.iskeyword(name) or not re.fullmatch("[a-z][a-z0-9_]*", name):
        close = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_0123456789")
        advice = f"try {close}" if close and not keyword.iskeyword(close) else "choose another"
        raise InputError(
            f"{name!r} is not a valid package name: {advice}. A name begins with a lower-case "
            "letter, contains only lower-case letters, digits and _, and is not a Python keyword."
        )
    if len(name) > LONGEST:
        raise InputError(
            f"{name!r} has {len(name)} characters, but the name of a Flower app has at most "
            f"{LONGEST}. Choose a shorter name."
        )
    if name in TAKEN:
        raise InputError(
            f"{name!r} is the name of a folder inside every project. Choose another name."
        )
    if spec is not None and spec.origin is not None:
        raise InputError(
            f"{name!r} is the name of an installed Python package or module. Choose another name."
        )
    if project.exists() and not (project.is_dir() and not any(project.iterdir())):
        raise InputError(
            f"{project} already exists and is not an empty folder. Choose a new or empty folder."
        )
    for place, content in _files(name).items():
        file = project / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    tell_files(
        [("The project is in", project), ("Its two commands are listed in", project / "README.md")]
    )


def _files(name: str) -> dict[str, str]:
    """Return the files of a project: path in the project -> content."""
    from fedmuon.config.load import nested, parse  # the config

    def fill(template: str) -> str:
        content = (TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
        return Template(content).substitute(package=name, app=name.replace("_", "-"))

    places = {"README.md": "README.md", "gitignore": ".gitignore", "config.toml": "config.toml"}
    parts = ("__init__.py", "model.py", "data.py", "recipe.py")
    places |= {part: f"{name}/{part}" for part in parts}
    places["test.py"] = f"tests/test_{name}.py"
    files = {place: fill(template) for template, place in places.items()}
    # Flower's run config contains every key of the experiment, for NODES clients.
    tables: dict[str, Any] = tomllib.loads(files["config.toml"])
    tables["federation"] |= {"clients": NODES, "per-round": NODES}
    app_config = {"out": "", "options": "", **nested(parse(tables))}
    run_config = tomli_w.dumps({"tool": {"flwr": {"app": {"config": app_config}}}})
    return {"pyproject.toml": f"{fill('pyproject.toml')}{run_config}", **files}


def make_text(
    folder: Annotated[Path, Argument(help="Folder for the train, dev and test files.")],
    form: Annotated[
        str,
        Option(
            "--format",
            help="Format of the files: `e2e` (CSV) or `dart` (JSON).",
            autocompletion=completion.among("e2e", "dart"),
        ),
    ] = "e2e",
    tables: Annotated[int, Option(help="Number of tables to write, from 10 to 5000.")] = 500,
    domain: Annotated[
        str,
        Option(
            "--about",
            help=(
                "Subject of the sentences: `restaurants` or `lodgings`. Each subject has its "
                "own wording."
            ),
            autocompletion=completion.among("restaurants", "lodgings"),
        ),
    ] = "restaurants",
    seed: Annotated[int, Option(help="Random seed of the text.")] = 0,
) -> None:
    """Write synthetic tables and sentences in the format of E2E or DART.

    No line is copied from these data sets.

    Example: [bold]fedmuon make-text data/e2e[/], then
    [bold]fedmuon run --set data.name=e2e --set data.folder=data/e2e --set task.name=network
    --set task.model=gpt[/]
    """
    files = text.make_text(folder, form, tables, domain, seed)
    tell_files([("Written:", file) for file in files])


def score_text(
    written: Annotated[Path, Argument(help="Text file with one sentence per line.")],
    references: Annotated[
        Path,
        Argument(
            help=(
                "Text file with one reference per line. A sentence can have several references, "
                "one per line. Put an empty line before the references of the next sentence."
            )
        ),
    ],
) -> None:
    """Score sentences against references: BLEU, ROUGE-L, METEOR, NIST and CIDEr.

    METEOR matches words and their stems, without synonyms. NIST follows mteval-v13a, and CIDEr
    follows pycocoevalcap.

    Example: [bold]fedmuon score-text written.txt references.txt[/]
    """
    from fedmuon.experiments.text_scores import SHOWN, scores_of_files  # the scorers

    scores = scores_of_files(written, references)
    rows = [(SHOWN[name][0], f"{value:.4f}") for name, value in scores.items()]
    tell({"scores": scores}, columns("", ("score", "value"), rows))


def doctor() -> None:
    """Show the devices, data sources and package versions of this machine.

    The command measures the speed of each device, which takes some seconds.

    Example: [bold]fedmuon doctor[/]
    """
    from fedmuon.experiments.inspect.doctor import record, tables  # torch

    machine = record()
    tell(machine, *tables(machine))
