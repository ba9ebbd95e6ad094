"""Commands that say what a config can have: `config explain`, `config init`, `list`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from fedmuon.experiments.cli.options import console, near_keys, refuse, where

app = typer.Typer(help="What a config can say: every key, and a file to begin with.",
                  no_args_is_help=True)  # fmt: skip
KINDS = ("suites", "data", "recipes", "maps", "aggregators", "partitions", "models", "tasks",
         "schedules", "callbacks")  # fmt: skip


def _kinds_that_begin(begun: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(begun)]


@app.command()
def explain(
    key: Annotated[
        str,
        Argument(
            help="table.key, a key alone, or a table.",
            autocompletion=lambda incomplete: near_keys(incomplete),
        ),
    ] = "",
) -> None:
    """Say what a key is, what it can be, and who reads it; of a table, its keys.

    Example: [bold]fedmuon config explain local.lr[/]
    """
    from rich.markup import escape

    from fedmuon.experiments.laboratory.facts import columns, facts
    from fedmuon.reference import describe
    from fedmuon.reference.names import NAMES

    if not key:
        tables = [(name, escape(describe.title(name))) for name in describe.tables()]
        console.print(columns("Tables of a config", ("table", "what it has"), tables, 2))
    elif key in describe.tables():
        rows = [(one.name, one.default, escape(one.what)) for one in describe.keys(key)]
        title = f"[{key}]: {describe.title(key)}"
        console.print(columns(escape(title), ("key", "default", "what it is"), rows, 3))
    else:
        found = describe.find(key)
        known = NAMES.get(found.whole)
        lines = {
            "what it is": found.what,
            "default": found.default,
            "values": "these names, or package.module:object of yours" if known else found.values,
            "read by": found.readers,
            "set by": f"--set {found.whole}={json.loads(found.default)}",
        }
        console.print(facts(f"[{found.table}] {found.name}", lines.items()))
        if known:
            said = [(name, escape(what)) for name, what in known.items()]
            console.print(columns("", ("name", "what it is"), said, 2))


@app.command()
def init(
    file: Annotated[Path | None, Argument(help="A new file; without one, it is printed.")] = None,
) -> None:
    """Write a config with every key, its default, and what it is.

    Example: [bold]fedmuon config init config.toml[/], then [bold]fedmuon run config.toml[/]
    """
    from fedmuon.files import mendable, write_bytes
    from fedmuon.reference.template import commented

    if file is None:
        typer.echo(commented(), nl=False)
        return
    if file.exists():
        refuse(f"{file} is there already: choose another name")
    with mendable(file, "write"):
        write_bytes(file, commented().encode())
    console.print("The config is", where(file), soft_wrap=True)


def names(
    kind: Annotated[str, Argument(help=", ".join(KINDS), autocompletion=_kinds_that_begin)],
) -> None:
    """List what a config or a command can name.

    Example: [bold]fedmuon list recipes[/]
    """
    from rich.markup import escape

    from fedmuon.experiments.laboratory.facts import columns
    from fedmuon.reference.names import LISTS, NAMES

    if kind not in KINDS:
        refuse(f"there is no list of {kind!r}: choose one of {', '.join(KINDS)}")
    known = _suites() if kind == "suites" else NAMES[LISTS[kind]]
    asked = "fedmuon suite NAME" if kind == "suites" else f"--set {LISTS[kind]}=NAME"
    rows = [(name, escape(what)) for name, what in known.items()]
    console.print(columns(f"{kind}: {asked}", ("name", "what it is"), rows, 2))


def _suites() -> dict[str, str]:
    """The shipped suites and their titles."""
    from fedmuon.experiments.suites.contents import read, shipped

    return {name: str(read(name)["title"]) for name in sorted(shipped())}
