"""What several commands share: option types, the console, and where results go."""

import contextlib
import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Context, Option
from typer.core import TyperCommand

from fedmuon.core.errors import NOTHING_SAVED, InputError, Interrupted, plain
from fedmuon.core.files import AFRESH

if TYPE_CHECKING:
    from fedmuon.config.load import Config

console = Console()

ConfigFile = Annotated[
    Path | None, Argument(help="A TOML file; without one, the defaults: mnist5k, N=20, K=5.")
]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Change one key; may be repeated.",
        autocompletion=lambda incomplete: near_keys(incomplete, "="),
    ),
]
OutFolder = Annotated[
    Path | None, Option("--out", help="The run directory; a new one below runs/ by default.")
]
Resume = Annotated[
    bool, Option("--resume", help="Go on with --out where it was interrupted, to the same bytes.")
]
EngineName = Annotated[
    str | None,
    Option(
        "--engine",
        help="inline, ray or deployment: who runs the clients.",
        autocompletion=lambda incomplete: near_values("engine.name", incomplete),
    ),
]
RayAddress = Annotated[str | None, Option(help="A running Ray cluster to use.")]
DataName = Annotated[
    str | None,
    Option(
        "--data",
        help="A source of samples, as `fedmuon list data` names them.",
        autocompletion=lambda incomplete: near_values("data.name", incomplete),
    ),
]
Seed = Annotated[int | None, Option("--seed", help="Of every draw but secret noise.")]
AsJson = Annotated[bool, Option("--json", help="One JSON object, no table.")]


def count(text: str) -> int:
    """A number of things, from 1 on."""
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise typer.BadParameter(f"{text} is no count: give a whole number from 1 on")


class WithKeys(TyperCommand):
    """A command that says of an unknown option which key of the config is called so, and whose
    examples can be pasted."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """As ever, but for such an option."""
        known = {name for one in self.params for name in (*one.opts, *one.secondary_opts)}
        for place, argument in enumerate(args if "--set" in known else ()):
            option, _, value = argument.partition("=")
            if option.startswith("--") and option not in known and (key := _key(option[2:])):
                said = value or next(iter(args[place + 1 :]), "VALUE")
                refuse(f"{option} is no option, but a key of the config: write --set {key}={said}")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Context, formatter: Any) -> None:
        """As ever, and last the examples."""
        written = self.help
        self.help, examples = apart(written or "")
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = written
        for place, (lead, commands) in enumerate(examples):
            said = "\n" * (place > 0) + f" {lead}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
            for one in commands:
                console.print(Text(broken(one), style="bold"), soft_wrap=True)


def _key(name: str) -> str:
    """The first `table.key` of the config that is called so, if one is."""
    from fedmuon.config.read_if import NEEDS

    return next((f"{table}.{name}" for table, keys in NEEDS.items() if name in keys), "")


def changes_of(
    overrides: list[str] | None,
    engine: str | None = None,
    ray_address: str | None = None,
    data: str | None = None,
    seed: int | None = None,
) -> list[str]:
    """The changes with those of options that are short for one; both of a key are refused."""
    asked = {
        "--engine": ("engine.name", engine),
        "--ray-address": ("engine.ray-address", ray_address),
        "--data": ("data.name", data),
        "--seed": ("federation.seed", seed),
    }
    changes = [*(overrides or [])]
    for option, (key, value) in asked.items():
        if value is None:
            continue
        if any(one.partition("=")[0].strip() == key for one in changes):
            refuse(f"{option} and --set {key} say the same key: give one of them")
        changes.append(f"{key}={value}")
    return changes


def near_keys(begun: str, end: str = "") -> list[str]:
    """The keys `table.key` that begin so, for shells that complete them."""
    from fedmuon.config.read_if import NEEDS

    names = (f"{table}.{key}{end}" for table, keys in NEEDS.items() for key in keys)
    return [name for name in names if name.startswith(begun)]


def chosen_config(
    file: Path | None,
    overrides: list[str],
    resume: bool,
    out: Path | None = None,
    named: bool = False,
) -> "Config | None":
    """The experiment asked for; None when a resumed run shall bring its own. What a command to
    resume sets without a file is compared with the config in `out`; where there is none, only
    settings that were `named` by --set begin an experiment, as the same command did before."""
    from fedmuon.config import load
    from fedmuon.config.incompatible import noiseless

    if resume and not file and not overrides:
        return None
    there = out / "config.toml" if resume and out and not file else None
    if out and there and not there.exists():
        there = None if named else load.to_resume(out)
    chosen = load.load(file or there, overrides)
    if noiseless(chosen):
        complain("[privacy] noise is 0, so nothing is private: epsilon is infinite")
    return chosen


def chosen_folder(out: Path | None, config: "Config | None", resume: bool = False) -> Path:
    """Where results go: the folder given, or a new one; there is nothing to resume in a new one."""
    if out is not None:
        return out
    if resume or config is None:
        refuse("--resume needs --out: name the run directory to go on with")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.data.name}-{config.local.recipe}-seed{config.federation.seed}-{stamp}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")


def near_values(key: str, begun: str) -> list[str]:
    """The values of a key that begin so."""
    from fedmuon.config.describe import find

    known = find(key).values.removesuffix(", or yours").split(", ")
    return [value for value in known if value.startswith(begun)]


@contextlib.contextmanager
def resumable(folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Where work on the folder is interrupted, say what was saved and how to go on; without a
    command nothing does."""
    try:
        yield
    except Interrupted as wish:
        complain(f"interrupted: {_saved(folder, command)}")
        raise SystemExit(wish.exit_code) from None


def _saved(folder: Path, command: Sequence[str]) -> str:
    """What is left of work that was interrupted, and how to go on with it, if that can be."""
    if not any((folder / name).exists() for name in ("config.toml", "suite.lock")):
        return NOTHING_SAVED
    from fedmuon.runs import checkpoints
    from fedmuon.runs.directory import RunDirectory

    directory = RunDirectory(folder)
    with contextlib.suppress(InputError):  # of what is damaged, which resuming says
        if why := directory.lost():
            return f"{folder} {why}: {AFRESH}"
    if not command:
        return f"that cannot be gone on with: {AFRESH}"
    done = checkpoints.round_of(folder)
    held = f"a checkpoint of round {done} is written"
    if done is None:
        some = any((folder / name).exists() for name in ("summary.json", "suite.lock"))
        held = "what was finished is saved" if some else "no round is saved yet"
    again = shlex.join(["fedmuon", *command, "--out", str(folder), "--resume"])
    return f"{held}, go on with: {again}"


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
    from fedmuon.core.tables import shown

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


# The examples of a command's help, apart from its prose: they are printed last, by themselves, as
# a table of rich's would break them anywhere and fill their lines with spaces.

WIDE = 79  # characters of a line at most
TYPED = re.compile(r"\[bold\](.*?)\[/\]", re.DOTALL)
LEAD = re.compile(r"(.*[.])?\s*([^.]*:)", re.DOTALL)  # sentences, and what introduces a command


def apart(text: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """A docstring's prose, and its commands with the words before them; markup is left out. A
    command that nothing introduces stays in its sentence."""
    prose: list[str] = []
    examples: list[tuple[str, list[str]]] = []
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        before, *others = TYPED.split(line)
        if not (others and (found := LEAD.fullmatch(before.strip()))):
            prose.append(TYPED.sub(r"\1", line))
            continue
        examples.append((found[2], others[::2]))
        prose.append(" ".join(filter(None, (found[1], others[-1].lstrip(" .,;")))))
    return "\n\n".join(filter(None, prose)), examples


def broken(command: str) -> str:
    """The command on lines that fit, an option beside its value; a shell joins them again."""
    lines, wide = [""], min(WIDE, shutil.get_terminal_size().columns - 1)
    for word in re.split(r" (?=-)", command):
        if lines[-1] and len(f"{lines[-1]} {word} \\") > wide:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}".removeprefix(" " * (len(lines) == 1))
    return "\n".join(lines)
