"""What several commands share: types of options, the console, and how results are printed.

A command loads its own file only. The files import at their top what needs only numpy and rich, and
the rest when a command runs, so that `fedmuon --help`, which loads all of them, is quick. A comment
at such an import names what it loads that is slower: the config (pydantic), torch, scipy, Ray,
Flower, matplotlib. Looking at runs (`look.py`) does not even load numpy.
"""

import contextlib
import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Context, Option
from typer.core import TyperCommand

from fedmuon.core.errors import NOTHING_SAVED, InputError, Interrupted, plain, shown
from fedmuon.core.files import AFRESH
from fedmuon.runs.directory import RunDirectory

if TYPE_CHECKING:
    from fedmuon.config.load import Config

console = Console()

ConfigFile = Annotated[
    Path | None, Argument(help="A TOML file. Without one, the defaults: mnist5k, N=20, K=5.")
]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Change one key; may be repeated.",
        autocompletion=lambda incomplete: near(incomplete, end="="),
    ),
]
OutFolder = Annotated[
    Path | None, Option("--out", help="The run directory; a new one below runs/ by default.")
]
Resume = Annotated[
    bool, Option("--resume", help="Resume the interrupted run in --out, bit-identically.")
]
EngineName = Annotated[
    str | None,
    Option(
        "--engine",
        help="inline, ray or deployment: where the clients run.",
        autocompletion=lambda incomplete: near(incomplete, "engine.name"),
    ),
]
RayAddress = Annotated[str | None, Option(help="A running Ray cluster to use.")]
DataName = Annotated[
    str | None,
    Option(
        "--data",
        help="A source of samples, as `fedmuon list data` names them.",
        autocompletion=lambda incomplete: near(incomplete, "data.name"),
    ),
]
Seed = Annotated[
    int | None, Option("--seed", help="Random seed for everything except privacy noise.")
]
GivenGrid = Annotated[
    list[str] | None,
    Option(
        "--grid",
        metavar="TABLE.KEY=VALUES",
        help="Values of one key: a,b,c, or lo:hi:log7, or lo:hi:lin5; may be repeated.",
        autocompletion=lambda incomplete: near(incomplete, end="="),
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")]


def count(text: str) -> int:
    """Parse a number of things, 1 or more."""
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise typer.BadParameter(f"{text} is no count: give a whole number from 1 on")


Jobs = Annotated[
    int | None,
    Option(
        "--jobs",
        parser=count,
        metavar="INTEGER",
        help="Runs at the same time, each in a process of its own; 1 by default.",
    ),
]


def near(begun: str, key: str = "", end: str = "") -> list[str]:
    """What begins like this, for completion in shells: keys `table.key`, or the values of a key."""
    from fedmuon.config import describe, schema  # the config

    known = [f"{table}.{name}{end}" for table, keys in schema.NEEDS.items() for name in keys]
    if key:
        known = describe.find(key).values.removesuffix(", or yours").split(", ")
    return [one for one in known if one.startswith(begun)]


class WithKeys(TyperCommand):
    """A command that suggests `--set` for an unknown option that is a key of the config, and whose
    examples can be pasted into a shell."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments; reject an unknown option that is a key."""
        known = {name for one in self.params for name in (*one.opts, *one.secondary_opts)}
        for place, argument in enumerate(args if "--set" in known else ()):
            option, _, value = argument.partition("=")
            if not option.startswith("--") or option in known:
                continue
            found = [one for one in near("") if one.partition(".")[2] == option[2:]]
            if found:
                value = value or next(iter(args[place + 1 :]), "VALUE")
                raise InputError(
                    f"{option} is no option, but a key of the config: write --set "
                    f"{found[0]}={value}"
                )
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Context, formatter: Any) -> None:
        """Print the help, and the examples last: rich's tables would break their lines anywhere and
        fill them with spaces."""
        written = self.help
        self.help, examples = apart(written or "")
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = written
        for place, (lead, commands) in enumerate(examples):
            line = "\n" * (place > 0) + f" {lead}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            for one in commands:
                console.print(Text(broken(one), style="bold"), soft_wrap=True)


WIDE = 79  # maximum characters of a line
TYPED = re.compile(r"\[bold\](.*?)\[/\]", re.DOTALL)
LEAD = re.compile(r"(.*[.])?\s*([^.]*:)", re.DOTALL)  # sentences, and what introduces a command


def apart(text: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """Split a docstring into its prose and its examples, without markup.

    An example is the words that introduce it and its commands. A command without an introduction
    stays in its sentence.
    """
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
    """Break a command into lines that fit and that a shell joins again, options with their value on
    one line."""
    lines, wide = [""], min(WIDE, shutil.get_terminal_size().columns - 1)
    for word in re.split(r" (?=-)", command):
        if lines[-1] and len(f"{lines[-1]} {word} \\") > wide:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}".removeprefix(" " * (len(lines) == 1))
    return "\n".join(lines)


def changes_of(
    overrides: list[str] | None,
    engine: str | None = None,
    ray_address: str | None = None,
    data: str | None = None,
    seed: int | None = None,
    clients: bool = False,
) -> list[str]:
    """Add the options that stand for a key to the changes of --set; reject a key given twice."""
    asked = {
        "--engine": ("engine.name", engine),
        "--ray-address": ("engine.ray-address", ray_address),
        "--data": ("data.name", data),
        "--seed": ("federation.seed", seed),
        "--clients": ("output.clients", "true" if clients else None),
    }
    changes = [*(overrides or [])]
    for option, (key, value) in asked.items():
        if value is None:
            continue
        if any(one.partition("=")[0].strip() == key for one in changes):
            raise InputError(f"{option} and --set {key} say the same key: give one of them")
        changes.append(f"{key}={value}")
    return changes


def chosen_config(
    file: Path | None,
    overrides: list[str],
    resume: bool,
    out: Path | None = None,
    named: bool = False,
) -> "Config | None":
    """Load the experiment that the command line describes.

    Args:
        file: A config file.
        overrides: Changes of single keys.
        resume: Whether a run is resumed. Without a file, its own config is changed.
        out: The folder of that run.
        named: Whether --set was given. If so, and `out` holds no run yet, one begins.

    Returns:
        The config; None if a resumed run is to use its own as it is.
    """
    from fedmuon.config import incompatible, load  # the config

    if resume and not file and not overrides:
        return None
    there = out / "config.toml" if resume and out and not file else None
    if out and there and not there.exists():
        there = None if named else load.to_resume(out)
    chosen = load.load(file or there, overrides)
    if incompatible.has_no_noise(chosen):
        complain("[privacy] noise is 0, so nothing is private: epsilon is infinite")
    return chosen


def chosen_folder(out: Path | None, config: "Config | None", resume: bool = False) -> Path:
    """The folder for the results: `out`, or a new one named after the experiment and the time."""
    if out is not None:
        return out
    if resume or config is None:
        raise InputError("--resume needs --out: name the run directory to resume")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.data.name}-{config.local.recipe}-seed{config.federation.seed}-{stamp}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")


@contextlib.contextmanager
def resumable(folder: Path, command: Sequence[str]) -> Iterator[None]:
    """If the work on the folder is interrupted, say what was saved and how to resume.

    An empty command means that the work cannot be resumed.
    """
    try:
        yield
    except Interrupted as wish:
        directory, done, why = RunDirectory(folder), None, ""
        if begun := any((folder / name).exists() for name in ("config.toml", "suite.lock")):
            with contextlib.suppress(InputError):  # a damaged folder: --resume will say so
                why = directory.lost()
            done = directory.saved_round()
        if not begun:
            saved = NOTHING_SAVED
        elif why:
            saved = f"{folder} {why}: {AFRESH}"
        elif not command:
            saved = f"this cannot be resumed: {AFRESH}"
        else:
            held = f"a checkpoint of round {done} is written"
            if done is None:
                some = any((folder / name).exists() for name in ("summary.json", "suite.lock"))
                held = "what was finished is saved" if some else "no round is saved yet"
            again = shlex.join(["fedmuon", *command, "--out", str(folder), "--resume"])
            saved = f"{held}, resume with: {again}"
        complain(f"interrupted: {saved}")
        raise SystemExit(wish.exit_code) from None


def given_in(context: Context, *but: str) -> list[str]:
    """The options on the command line, each by its first name, without the parameters in `but`."""
    return [
        one.opts[0]
        for one in context.command.params
        if one.name is not None
        and one.name not in but
        and (source := context.get_parameter_source(one.name)) is not None
        and source.name == "COMMANDLINE"
    ]


def require_at_most(most: float, **given: float | None) -> None:
    """Reject numbers so large that nothing could be computed, or not within a lifetime."""
    for name, value in given.items():
        if value is not None and abs(value) > most:
            text = f"{value:.6g}" if abs(value) < 1e300 else shown(value)  # floats end there
            raise InputError(f"{name} = {text} is refused: give a number of at most {most:g}")


def print_path(words: str, path: Path) -> None:
    """Print words and a path on one line, so that the path can be copied."""
    console.print(words, Text(plain(path, None), style="bold"), soft_wrap=True)


def print_plain(sentence: str) -> None:
    """Print a sentence on one line, its [brackets] as they are."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def tell(record: dict[str, Any], as_json: bool, *tables: object) -> None:
    """Print the record as one JSON object, or else the tables."""
    if as_json:
        typer.echo(json.dumps(record, indent=2, allow_nan=False))
        return
    for one in tables:
        console.print(one)


def complain(sentence: str) -> None:
    """Print a sentence, if there is one, on stderr; its [brackets] are tables of the config."""
    if not sentence:
        return
    text = Text.assemble(("fedmuon: ", "bold red"), plain(sentence, None))
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
