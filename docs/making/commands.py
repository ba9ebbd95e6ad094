"""The reference of the command line, from the command itself."""

import re
from collections.abc import Iterator

import click
import typer

from fedmuon.experiments.cli import app


def reference() -> str:
    """Every command with its arguments and options, as Markdown."""
    return "\n\n".join(section(name, command) for name, command in every(app_as_click()))


def app_as_click() -> click.Group:
    """The `fedmuon` command."""
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    return command


def every(group: click.Group, above: str = "fedmuon") -> Iterator[tuple[str, click.Command]]:
    """The commands in their order, by the words that call them."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every(command, f"{above} {name}")
        else:
            yield f"{above} {name}", command


def section(name: str, command: click.Command) -> str:
    """One command."""
    rows = [row(one) for one in command.params if not getattr(one, "hidden", False)]
    head = "| option | default | what it is |\n|---|---|---|\n"
    return "\n\n".join([f"## `{name}`", prose(command.help or ""), head + "\n".join(rows)])


def row(one: click.Parameter) -> str:
    """How an option or argument is spelled, what it is by default, and what it is."""
    argument = isinstance(one, click.Argument)
    spelled = (one.human_readable_name or "").upper() if argument else ", ".join(
        (*one.opts, *one.secondary_opts)
    )  # fmt: skip
    default = "required" if one.required else shown(one.default)
    help_ = prose(str(getattr(one, "help", "") or "")).replace("|", "\\|")
    return f"| `{spelled}` | {default} | {help_} |"


def shown(default: object) -> str:
    """A default as one would type it; nothing where there is none."""
    if default is None or default == () or default is False or callable(default):
        return ""
    return f"`{default}`"


def prose(text: str) -> str:
    """Help without rich's marks; what it has in bold is typed, hence code."""
    text = re.sub(
        r"\[bold\](.*?)\[/(?:bold)?\]", lambda one: f"`{_line(one[1])}`", text, flags=re.S
    )
    paragraphs = (_line(one) for one in text.replace("\b", "").split("\n\n"))
    return "\n\n".join(paragraphs).replace("<", "&lt;")


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
