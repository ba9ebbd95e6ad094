"""Generate the command-line reference from the commands."""

import re
from collections.abc import Iterator

import click
import typer

from fedmuon.experiments.cli import EXIT_CODES, PANELS, app
from fedmuon.experiments.cli.options import apart

OUTPUT = "Output"  # panel of --json and --quiet, which the page describes only once


def reference() -> str:
    """Return the reference of all commands as Markdown, grouped by the panels of the help."""
    return "\n\n".join(
        f"## {panel}\n\n" + "\n\n".join(
            section(name, command)
            for name, command in every(app_as_click())
            if name.split()[1] in commands
        )
        for panel, commands in PANELS.items()
    )  # fmt: skip


def exit_codes() -> str:
    """Return a table of the exit codes as Markdown."""
    rows = "\n".join(f"| {code} | {what} |" for code, what in EXIT_CODES.items())
    return f"| exit code | meaning |\n|---|---|\n{rows}"


def app_as_click() -> click.Group:
    """Return the `fedmuon` command as a click group."""
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    return command


def every(group: click.Group, above: str = "fedmuon") -> Iterator[tuple[str, click.Command]]:
    """Yield the full name and the object of each command, in order."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every(command, f"{above} {name}")
        else:
            yield f"{above} {name}", command


def section(name: str, command: click.Command) -> str:
    """Return the section of one command: usage, description, options and examples."""
    described, examples = apart(command.help or "")
    shown_ = [
        one for one in command.params
        if not getattr(one, "hidden", False) and getattr(one, "rich_help_panel", "") != OUTPUT
    ]  # fmt: skip
    arguments = [one for one in shown_ if isinstance(one, click.Argument)]
    usage = " ".join([name, *map(usage_of, arguments), "[OPTIONS]"])
    parts = [f"### `{name}`", f"Usage: `{usage}`", escaped(described)]
    if shown_:
        head = "| option | default | description |\n|---|---|---|\n"
        parts.append(head + "\n".join(map(row, shown_)))
    for lead, commands in examples:
        lines = "\n".join(commands)
        parts.append(f"{escaped(lead)}\n\n```sh\n{lines}\n```")
    return "\n\n".join(parts)


def usage_of(argument: click.Argument) -> str:
    """Return how the usage line of a command shows an argument."""
    name = (argument.human_readable_name or "").upper() + "..." * (argument.nargs == -1)
    return name if argument.required else f"[{name}]"


def row(one: click.Parameter) -> str:
    """Return the table row of an option or argument.

    The row contains the spelling, the default and the description.
    """
    argument = isinstance(one, click.Argument)
    spelled = (one.human_readable_name or "").upper() if argument else ", ".join(
        (*one.opts, *one.secondary_opts)
    )  # fmt: skip
    default = "required" if one.required else shown(one.default)
    help_ = escaped(str(getattr(one, "help", "") or "")).replace("|", "\\|")
    return f"| `{spelled}` | {default} | {help_} |"


def shown(default: object) -> str:
    """Return a default value as a user would type it. If there is no default, the result is ""."""
    if default is None or default in ((), False, "") or callable(default):
        return ""
    return f"`{default}`"


def escaped(text: str) -> str:
    """Return text as Markdown, with one line per paragraph and without HTML."""
    paragraphs = (re.sub(r"\s+", " ", one).strip() for one in text.split("\n\n"))
    return "\n\n".join(paragraphs).replace("\\[", "[").replace("<", "&lt;")
