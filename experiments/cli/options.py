"""What several commands share: option types, the console, and where results go."""

import contextlib
import json
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Context, Option
from typer.core import TyperCommand

from fedmuon.errors import InputError, Interrupted, plain
from fedmuon.files import AFRESH

if TYPE_CHECKING:
    from fedmuon.config import Config

console = Console()

ConfigFile = Annotated[
    Path | None, Argument(help="A TOML file; without one, the defaults: mnist5k, N=20, K=5.")
]
Overrides = Annotated[
    list[str] | None,
    Option("--set", metavar="TABLE.KEY=VALUE", help="Change one key; may be repeated."),
]
OutFolder = Annotated[
    Path | None, Option("--out", help="The run directory; a new one below runs/ by default.")
]
Resume = Annotated[
    bool, Option("--resume", help="Go on with --out where it was interrupted, to the same bytes.")
]
RayAddress = Annotated[str | None, Option(help="A running Ray cluster to use.")]
AsJson = Annotated[bool, Option("--json", help="One JSON object, no table.")]


class WithKeys(TyperCommand):
    """A command that says of an unknown option which key of the config is called so."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """As ever, but for such an option."""
        known = {name for one in self.params for name in (*one.opts, *one.secondary_opts)}
        for place, argument in enumerate(args if "--set" in known else ()):
            option, _, value = argument.partition("=")
            if option.startswith("--") and option not in known and (key := _key(option[2:])):
                said = value or next(iter(args[place + 1 :]), "VALUE")
                refuse(f"{option} is no option, but a key of the config: write --set {key}={said}")
        return super().parse_args(ctx, args)


def _key(name: str) -> str:
    """The first `table.key` of the config that is called so, if one is."""
    from fedmuon.reading import NEEDS

    return next((f"{table}.{name}" for table, keys in NEEDS.items() if name in keys), "")


def on_engine(
    overrides: list[str] | None, engine: str | None, ray_address: str | None
) -> list[str]:
    """The changes with those of --engine and --ray-address."""
    changes = [*(overrides or [])]
    changes += [f"engine.name={engine}"] if engine else []
    return changes + ([f"engine.ray-address={ray_address}"] if ray_address else [])


def chosen_config(
    file: Path | None, overrides: list[str], resume: bool, out: Path | None = None
) -> "Config | None":
    """The experiment asked for; None when a resumed run shall bring its own. What a command to
    resume sets without a file is held against the config in `out`."""
    from fedmuon import config

    if resume and not file and not overrides:
        return None
    there = out / "config.toml" if resume and out else None
    return config.load(file or (there if there and there.exists() else None), overrides)


def chosen_folder(out: Path | None, config: "Config | None", resume: bool = False) -> Path:
    """Where results go: the folder given, or a new one; there is nothing to resume in a new one."""
    if out is not None:
        return out
    if resume or config is None:
        refuse("--resume needs --out: name the run directory to go on with")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.data.name}-{config.local.recipe}-seed{config.federation.seed}-{stamp}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")


@contextlib.contextmanager
def resumable(folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Where work on the folder is interrupted, say what was saved and how to go on."""
    try:
        yield
    except Interrupted as wish:
        begun = any((folder / name).exists() for name in ("config.toml", "suite.lock"))
        complain(f"interrupted: {_next(folder, command) if begun else 'nothing was written yet'}")
        raise SystemExit(wish.exit_code) from None


def _next(folder: Path, command: Sequence[str]) -> str:
    """How to go on with what is in the folder, if that can be."""
    from fedmuon.storage import RunDirectory

    with contextlib.suppress(InputError):  # of what is damaged, which resuming says
        if why := RunDirectory(folder).lost():
            return f"{folder} {why}: {AFRESH}"
    again = shlex.join(["fedmuon", *command, "--out", str(folder), "--resume"])
    return f"what was finished is saved, go on with: {again}"


def sound(arguments: list[str] | None) -> list[str] | None:
    """The arguments of a command, none of which a system call can refuse to see whole."""
    for argument in arguments or ():
        if "\0" in argument:
            refuse(f"the argument {argument!r} holds a NUL character: leave it out")
    return arguments


def given_in(context: Context, *but: str) -> list[str]:
    """The options that stand on the command line, but for some, each as it is first called."""
    return [
        one.opts[0]
        for one in context.command.params
        if one.name is not None
        and one.name not in but
        and (source := context.get_parameter_source(one.name)) is not None
        and source.name == "COMMANDLINE"
    ]


def require_at_most(most: float, **given: float | None) -> None:
    """Refuse numbers beyond which nothing is computed, or not in anybody's time."""
    from fedmuon.tables import shown

    for name, value in given.items():
        if value is not None and abs(value) > most:
            text = f"{value:.6g}" if abs(value) < 1e300 else shown(value)  # no float holds more
            refuse(f"{name} = {text} is refused: give a number of at most {most:g}")


def refuse(sentence: str) -> NoReturn:
    """End the command with this sentence and exit code 2."""
    raise InputError(sentence)


def where(folder: Path) -> Text:
    """A path to be printed."""
    return Text(plain(folder, None), style="bold")


def tell(record: dict[str, Any], as_json: bool, *shown: object) -> None:
    """One JSON object on stdout, or what people read."""
    if as_json:
        typer.echo(json.dumps(record, indent=2, allow_nan=False))
        return
    for one in shown:
        console.print(one)


def complain(sentence: str) -> None:
    """One sentence on stderr; its [brackets] are tables of the config, not markup."""
    text = Text.assemble(("fedmuon: ", "bold red"), plain(sentence, None))
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
