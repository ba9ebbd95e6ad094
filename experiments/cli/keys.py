"""Commands that say what a config can have: `config explain`, `config init`, `list`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from fedmuon.core.errors import instead
from fedmuon.experiments.cli.options import WithKeys, console, near_keys, refuse, where

if TYPE_CHECKING:
    from fedmuon.config.describe import Key

app = typer.Typer(help="What a config can say: every key, and a file to begin with.",
                  no_args_is_help=True)  # fmt: skip
KINDS = ("suites", "data", "recipes", "maps", "aggregators", "partitions", "models", "tasks",
         "schedules", "callbacks")  # fmt: skip


def _kinds_that_begin(begun: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(begun)]


@app.command(cls=WithKeys)
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
    from fedmuon.config import describe
    from fedmuon.config.schema import TABLES_OF_A_CONFIG

    if not key:
        _show("Tables of a config", {name: describe.title(name) for name in TABLES_OF_A_CONFIG})
    elif key in TABLES_OF_A_CONFIG:
        rows = [(one.name, one.default, one.what) for one in describe.keys(key)]
        _show_rows(f"[{key}]: {describe.title(key)}", ("key", "default", "what it is"), rows)
    else:
        _explain_key(describe.find(key))


def _explain_key(found: "Key") -> None:
    """A key, the names that it can have, and their options."""
    from fedmuon.config.name_texts import NAMES, OPTIONS
    from fedmuon.experiments.tables import facts

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
        _show("", known)
    rows = [
        (name, option, default, what)
        for name, options in OPTIONS.get(found.whole, {}).items()
        for option, (default, what) in options.items()
    ]
    if rows:
        title = f"[{found.table}.options]: --set {found.table}.options.OPTION=VALUE"
        _show_rows(title, ("name", "option", "default", "what it is"), rows)


def _show(title: str, known: Mapping[str, str]) -> None:
    _show_rows(title, ("name", "what it is"), list(known.items()))


def _show_rows(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Words in columns."""
    from rich.markup import escape

    from fedmuon.experiments.tables import columns

    cells = [[escape(one) for one in row] for row in rows]
    console.print(columns(escape(title), head, cells, len(head)))


@app.command(cls=WithKeys)
def init(
    file: Annotated[Path | None, Argument(help="A new file; without one, it is printed.")] = None,
) -> None:
    """Write a config with every key, its default, and what it is.

    Example: [bold]fedmuon config init config.toml[/], then [bold]fedmuon run config.toml[/]
    """
    from fedmuon.config.describe import commented
    from fedmuon.core.files import mendable, write_bytes

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
    from fedmuon.config.name_texts import LISTS, NAMES

    if kind not in KINDS:
        refuse(f"there is no list of {kind!r}: {instead(kind, KINDS, 'choose one of')}")
    if kind == "suites":
        _show("suites: fedmuon suite NAME", _suites())
    else:
        _show(f"{kind}: --set {LISTS[kind]}=NAME", NAMES[LISTS[kind]])


def _suites() -> dict[str, str]:
    """The shipped suites and their titles."""
    from fedmuon.experiments.suites.contents import read, shipped

    return {name: str(read(name)["title"]) for name in sorted(shipped())}
