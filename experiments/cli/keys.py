"""Commands that explain what a config can contain: `config explain`, `config init`, `list`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from typer import Argument

from fedmuon.core.choices import LISTS, NAMES, OPTIONS
from fedmuon.core.errors import InputError, instead
from fedmuon.core.files import mendable, write_bytes
from fedmuon.experiments.cli.options import WithKeys, console, near, print_path
from fedmuon.experiments.tables import columns, facts

app = typer.Typer(help="What a config can contain: every key, and a file to begin with.",
                  no_args_is_help=True)  # fmt: skip
KINDS = ("suites", "data", "recipes", "maps", "aggregators", "partitions", "models", "tasks",
         "schedules", "callbacks")  # fmt: skip


@app.command(cls=WithKeys)
def explain(
    key: Annotated[
        str,
        Argument(
            help="table.key, a key alone, or a table.",
            autocompletion=lambda incomplete: near(incomplete),
        ),
    ] = "",
) -> None:
    """Explain a key: its meaning, its values, and what reads it. For a table, list its keys.

    Example: [bold]fedmuon config explain local.lr[/]
    """
    from fedmuon.config import describe, schema  # the config

    if not key:
        tables = [(name, describe.title(name)) for name in schema.TABLES_OF_A_CONFIG]
        _show("Tables of a config", ("name", "what it is"), tables)
        return
    if key in schema.TABLES_OF_A_CONFIG:
        rows = [(one.name, one.default, one.what) for one in describe.keys(key)]
        _show(f"[{key}]: {describe.title(key)}", ("key", "default", "what it is"), rows)
        return
    found = describe.find(key)
    known = NAMES.get(found.whole)
    lines = {
        "what it is": found.what,
        "default": found.default,
        "values": "these names, or package.module:object of yours" if known else found.values,
        "read by": found.readers,
        "set by": found.setting,
    }
    console.print(facts(f"[{found.table}] {found.name}", lines.items()))
    if known:
        _show("", ("name", "what it is"), [*known.items()])
    options = [
        (name, option, default, what)
        for name, options in OPTIONS.get(found.whole, {}).items()
        for option, (default, what) in options.items()
    ]
    if options:
        title = f"[{found.table}.options]: --set {found.table}.options.OPTION=VALUE"
        _show(title, ("name", "option", "default", "what it is"), options)


@app.command(cls=WithKeys)
def init(
    file: Annotated[
        Path | None, Argument(help="A new file; without one, the config is printed.")
    ] = None,
) -> None:
    """Write a config with every key, its default, and its meaning.

    Example: [bold]fedmuon config init config.toml[/], then [bold]fedmuon run config.toml[/]
    """
    from fedmuon.config.describe import commented  # the config

    if file is None:
        typer.echo(commented(), nl=False)
        return
    if file.exists():
        raise InputError(f"{file} is there already: choose another name")
    with mendable(file, "write"):
        write_bytes(file, commented().encode())
    print_path("The config is", file)


def names(
    kind: Annotated[
        str,
        Argument(
            help=", ".join(KINDS),
            autocompletion=lambda incomplete: [one for one in KINDS if one.startswith(incomplete)],
        ),
    ],
) -> None:
    """List the names that a config or a command accepts.

    Example: [bold]fedmuon list recipes[/]
    """
    if kind not in KINDS:
        raise InputError(f"there is no list of {kind!r}: {instead(kind, KINDS, 'choose one of')}")
    head = ("name", "what it is")
    if kind != "suites":
        _show(f"{kind}: --set {LISTS[kind]}=NAME", head, [*NAMES[LISTS[kind]].items()])
        return
    from fedmuon.experiments.suites.contents import read, shipped  # the config

    suites = [(name, str(read(name)["title"])) for name in sorted(shipped())]
    _show("suites: fedmuon suite NAME", head, suites)


def _show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of words."""
    cells = [[escape(one) for one in row] for row in rows]
    console.print(columns(escape(title), head, cells, len(head)))
