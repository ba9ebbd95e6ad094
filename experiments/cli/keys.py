"""Commands that explain what a config can contain: `config explain`, `config init`, `list`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument

import fedmuon.experiments.cli.completion as completion
from fedmuon.config.methods import rule_of
from fedmuon.config.names import (
    ADAPTERS,
    ATTACKS,
    CLOSED_LISTS,
    COMPRESSORS,
    DOWNLINK,
    FEATURES,
    LISTS,
    NAMES,
    OPTIONS,
    SAME_LIST,
)
from fedmuon.core.errors import InputError, instead, near
from fedmuon.core.files import mendable, write_bytes
from fedmuon.experiments.cli.options import Command
from fedmuon.experiments.cli.output import print_path, tell
from fedmuon.experiments.settings import descriptions
from fedmuon.experiments.tables import columns, facts

app = typer.Typer(
    help="Explain config keys, or write a config file with every key and its default.",
    no_args_is_help=True,
)
# Key -> name -> description.
SAID = {
    **NAMES,
    "compression.uplink": COMPRESSORS,
    "compression.downlink": DOWNLINK,
    "data.features": FEATURES,
    "federation.adapters": ADAPTERS,
    "attacks.kind": ATTACKS,
}


@app.command(cls=Command)
def explain(
    key: Annotated[
        str,
        Argument(
            help=(
                "A key such as `local.lr`, or a table such as `local`. Without a key or table, "
                "all tables are listed."
            ),
            autocompletion=completion.tables_and_keys,
        ),
    ] = "",
) -> None:
    """Explain a config key: its meaning, values, default, and when it has an effect.

    With the name of a table, list the keys of the table.

    Example: [bold]fedmuon config explain local.lr[/]
    """
    from fedmuon.config import describe, schema  # the config

    if not key:
        titles = {name: describe.title(name) for name in schema.TABLES_OF_A_CONFIG}
        table = _table("Tables of a config", ("table", "description"), [*titles.items()])
        tell({"tables": titles}, table)
        return
    if key in schema.TABLES_OF_A_CONFIG:
        described = describe.keys(key)
        rows = [(entry.name, entry.default, entry.what) for entry in described]
        table = _table(f"[{key}]: {describe.title(key)}", ("key", "default", "description"), rows)
        tell({"table": key, "keys": [vars(entry) for entry in described]}, table)
        return
    described = describe.find(key)
    choices = SAID.get(described.whole, {})
    accepts_objects = described.whole in NAMES
    names = "one of these names, or your own object as package.module:object"
    lines = {
        "description": described.what,
        "default": described.default,
        "values": names if accepts_objects else described.values,
        "used by": described.readers,
        "set by": described.setting,
    }
    parts = [facts(f"[{described.table}] {described.name}", lines.items())]
    if choices:
        parts.append(_table("", ("name", "description"), [*choices.items()]))
    options = [
        (name, option, default, description)
        for name, options in OPTIONS.get(described.whole, {}).items()
        for option, (default, description) in options.items()
    ]
    head = ("name", "option", "default", "description")
    if options:
        title = f"[{described.table}.options]: --set {described.table}.options.OPTION=VALUE"
        parts.append(_table(title, head, options))
    listed = [dict(zip(head, row, strict=True)) for row in options]
    tell({**vars(described), "names": choices, "options": listed}, *parts)


@app.command(cls=Command)
def init(
    file: Annotated[
        Path | None,
        Argument(help=("Path of the new config file. Without a path, the config is printed.")),
    ] = None,
) -> None:
    """Write a config with every key, its default and its meaning.

    Example: [bold]fedmuon config init config.toml[/], then [bold]fedmuon run config.toml[/]
    """
    from fedmuon.config.describe import commented  # the config

    if file is None:
        typer.echo(commented(), nl=False)
        return
    if file.exists():
        raise InputError(f"{file} already exists. Choose another name, or remove the file.")
    with mendable(file, "write"):
        write_bytes(file, commented().encode())
    print_path("Config written to", file)


def names(
    kind: Annotated[
        str,
        Argument(help=", ".join(completion.LISTED), autocompletion=completion.lists),
    ],
) -> None:
    """List the names that a config or a command accepts.

    Example: [bold]fedmuon list optimizers[/]
    """
    kinds = completion.LISTED
    if kind not in (*kinds, *SAME_LIST):
        close = near(kind, (*kinds, *SAME_LIST))
        advice = f"did you mean {close[0]}?" if close else instead(kind, kinds, "choose one of")
        raise InputError(f"there is no list {kind!r}: {advice}")
    if kind == "suites":
        from fedmuon.experiments.suites.contents import read, shipped  # the config

        choices = {name: str(read(name)["title"]) for name in sorted(shipped())}
        use = "fedmuon suite NAME"
    elif kind == "settings":
        choices, use = descriptions(), "fedmuon stability --setting NAME"
    else:
        key = {**LISTS, **CLOSED_LISTS}[SAME_LIST.get(kind, kind)]
        choices, use = SAID[key], f"--set {key}=NAME"
        if key == "local.recipe":
            choices = {name: f"{words}; {rule_of(name)}" for name, words in choices.items()}
    table = _table(f"{kind}: {use}", ("name", "description"), [*choices.items()])
    tell({"list": kind, "use": use, "names": choices}, table)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    cells = [[escape(cell) for cell in row] for row in rows]
    return columns(escape(title), head, cells, len(head))
