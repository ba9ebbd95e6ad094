"""Options that several commands share, and the classes of commands and groups.

Each command loads only its own file. At the top of a file, an import may load numpy and rich, but
no slower package. Slower packages are imported when a command runs, because `fedmuon --help` loads
all files and must be quick. A comment at each late import names the slow package: the config
(pydantic), torch, scipy, Ray, Flower or matplotlib. The commands that show runs (`look.py`) do not
load numpy either.
"""

import contextlib
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.text import Text
from typer import Argument, Context, Option
from typer.core import TyperCommand, TyperGroup, TyperOption

import fedmuon.experiments.cli.completion as completion
from fedmuon.core.errors import NOTHING_SAVED, InputError, Interrupted, instead, near
from fedmuon.core.files import AFRESH
from fedmuon.experiments.cli.output import complain, console, style, warn
from fedmuon.runs.directory import RunDirectory

if TYPE_CHECKING:
    from fedmuon.config.load import Config

ConfigFile = Annotated[
    Path | None,
    Argument(
        help=(
            "Config file (TOML). Without a file, the default config trains 20 clients on the "
            "data set `mnist5k`."
        )
    ),
]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Change one config key. You can repeat this option.",
        autocompletion=completion.settings,
    ),
]
OutFolder = Annotated[
    Path | None, Option("--out", help="Run folder. Default: a new folder in runs/.")
]
Resume = Annotated[
    bool,
    Option(
        "--resume",
        help=(
            "Resume the interrupted run in the folder of --out. The result is bit-identical to "
            "the result without interruption."
        ),
    ),
]
EngineName = Annotated[
    str | None,
    Option(
        "--engine",
        help=(
            "Where the clients run: in this process (`inline`), in Ray workers (`ray`) or on "
            "Flower SuperNodes (`deployment`)."
        ),
        autocompletion=completion.value_of("engine.name"),
    ),
]
NeighbourUnit = Annotated[
    str | None,
    Option(
        "--neighbours",
        help=(
            "What differs between neighbouring data sets: one sample (`samples`, the default), "
            "all samples of one client (`clients`), or one client without samples "
            "(`removed-clients`)."
        ),
        autocompletion=completion.value_of("stability.unit"),
    ),
]
RayAddress = Annotated[
    str | None, Option(help="Address of a running Ray cluster, such as 10.0.0.1:6379.")
]
DataName = Annotated[
    str | None,
    Option(
        "--data",
        help="Name of the data source. `fedmuon list data` shows the names.",
        autocompletion=completion.value_of("data.name"),
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
        help=(
            "Values of one config key: a list such as `1,2,4`, or a range such as "
            "`0.01:10:log7` (7 values, logarithmic) or `0:1:lin5` (5 values, linear). You can "
            "repeat this option."
        ),
        autocompletion=completion.settings,
    ),
]
RunFolder = Annotated[Path, Argument(help="Run folder.", autocompletion=completion.run_folders)]


def count(text: str) -> int:
    """Parse an integer that is at least 1."""
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise typer.BadParameter(f"{text} is not an integer that is at least 1")


Jobs = Annotated[
    int | None,
    Option(
        "--jobs",
        parser=count,
        metavar="INTEGER",
        help="Number of runs at the same time, each in a separate process. Default: 1.",
    ),
]


# Commands without --json: `watch` is a server, and `init` writes TOML.
WITHOUT_JSON = ("watch", "init")


class Group(TyperGroup):
    """A group of commands that suggests a similar name for an unknown command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command whose name is in the arguments."""
        name = args[0]
        if not (name.startswith("-") or ctx.resilient_parsing or name in self.commands):
            advice = instead(name, self.commands, "choose one of")
            ctx.fail(f"{name!r} is not a command of {ctx.command_path}: {advice}")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command with the options --json and --quiet.

    For an unknown option, the command suggests a similar option, or `--set` if the option is a
    config key. You can paste the examples of its help into a shell.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        if name not in WITHOUT_JSON:
            self.params.append(_switch("--json", "as_json", "Print the result as one JSON object."))
        self.params.append(_switch("--quiet", "quiet", "Print only results and errors."))

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments. An error about an unknown option suggests what to write."""
        style.as_json = style.quiet = False
        options = {
            name
            for parameter in self.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        for place, argument in enumerate(args if "--set" in options else ()):
            option, _, value = argument.partition("=")
            if not option.startswith("--") or option in options:
                continue
            names = (option[2:], option[2:].replace("_", "-"))
            keys = [key for key in completion.keys("") if {key, key.partition(".")[2]} & {*names}]
            if keys:
                value = value or next(iter(args[place + 1 :]), "VALUE")
                raise InputError(
                    f"{option} is not an option but a config key: write --set {keys[0]}={value}"
                )
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            close = near(error.option_name, options)
            advice = f"did you mean {close[0]}?" if close else "use --help to see its options"
            raise click.UsageError(
                f"{error.option_name} is not an option of {ctx.command_path}: {advice}", ctx
            ) from None

    def format_help(self, ctx: Context, formatter: Any) -> None:
        """Print the help, with the examples at the end.

        Rich's tables would break or pad the lines of the examples, so they are not used here.
        """
        written = self.help
        self.help, examples = apart(written or "")
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = written
        for place, (lead, commands) in enumerate(examples):
            line = "\n" * (place > 0) + f" {lead}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            for command in commands:
                console.print(Text(broken(command), style="bold"), soft_wrap=True)


def _switch(option: str, name: str, words: str) -> TyperOption:
    """Return an option without a value (a switch) that sets an attribute of `style`."""

    def store(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        setattr(style, name, value)

    return TyperOption(
        param_decls=[option], is_flag=True, default=False, expose_value=False, is_eager=True,
        callback=store, help=words, rich_help_panel="Output",
    )  # fmt: skip


WIDE = 79  # maximum characters of a line
TYPED = re.compile(r"\[bold\](.*?)\[/\]", re.DOTALL)
LEAD = re.compile(r"(.*[.])?\s*([^.]*:)", re.DOTALL)  # sentences, and the lead of a command


def apart(text: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """Split a docstring into its text and its examples, without markup.

    An example consists of its introduction, which ends in a colon, and its commands. If a command
    has no introduction, it stays part of the text.
    """
    prose: list[str] = []
    examples: list[tuple[str, list[str]]] = []
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        before, *others = TYPED.split(line)
        if not (others and (match := LEAD.fullmatch(before.strip()))):
            prose.append(TYPED.sub(r"\1", line))
            continue
        examples.append((match[2], others[::2]))
        prose.append(" ".join(filter(None, (match[1], others[-1].lstrip(" .,;")))))
    return "\n\n".join(filter(None, prose)), examples


def broken(command: str) -> str:
    """Break a long command into lines that end in a backslash, so that a shell joins them.

    An option and its value stay on one line.
    """
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
    profile: bool = False,
) -> list[str]:
    """Return the changes of --set and of the options that set a key.

    Raises:
        InputError: If an option and --set change the same key.
    """
    options = {
        "--engine": ("engine.name", engine),
        "--ray-address": ("engine.ray-address", ray_address),
        "--data": ("data.name", data),
        "--seed": ("federation.seed", seed),
        "--clients": ("output.clients", "true" if clients else None),
        "--profile": ("output.profile", "true" if profile else None),
    }
    changes = [*(overrides or [])]
    for option, (key, value) in options.items():
        if value is None:
            continue
        if any(change.partition("=")[0].strip() == key for change in changes):
            raise InputError(f"{option} and --set {key} set the same key: use only one of them")
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
        resume: Whether a run is resumed. If no file is given, the changes apply to the config of
            the resumed run.
        out: The run folder.
        named: Whether --set was given. With --set, a new run starts if `out` contains no run yet.

    Returns:
        The config, or None if a resumed run uses its saved config without changes.
    """
    from fedmuon.config import incompatible, load  # the config

    if resume and not file and not overrides:
        return None
    config_file = out / "config.toml" if resume and out and not file else None
    if out and config_file and not config_file.exists():
        config_file = None if named else RunDirectory(out).config_to_resume()
    config = load.load(file or config_file, overrides)
    if incompatible.has_no_noise(config):
        warn(
            "[privacy] noise is 0, so the run is not private and epsilon is infinite. "
            "To make the run private, set noise above 0."
        )
    return config


def chosen_folder(out: Path | None, config: "Config | None", resume: bool = False) -> Path:
    """Return the folder for the results: `out`, or a new folder named after config and time."""
    if out is not None:
        return out
    if resume or config is None:
        raise InputError("--resume needs --out. Add --out with the run folder to resume.")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.data.name}-{config.local.recipe}-seed{config.federation.seed}-{stamp}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")


@contextlib.contextmanager
def resumable(folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Print what was saved, and how to resume, if the work on a folder is interrupted.

    If `command` is empty, the work cannot be resumed.
    """
    try:
        yield
    except Interrupted as wish:
        directory, saved_round, damage = RunDirectory(folder), None, ""
        if begun := any((folder / name).exists() for name in ("config.toml", "suite.lock")):
            with contextlib.suppress(InputError):  # a damaged folder: --resume will say so
                damage = directory.lost()
            saved_round = directory.saved_round()
        if not begun:
            saved = NOTHING_SAVED
        elif damage:
            saved = f"{folder} {damage}: {AFRESH}"
        elif not command:
            saved = f"this command cannot be resumed: {AFRESH}"
        else:
            progress = f"the checkpoint of round {saved_round} is saved"
            if saved_round is None:
                has_results = any(
                    (folder / name).exists() for name in ("summary.json", "suite.lock")
                )
                progress = (
                    "all finished parts are saved" if has_results else "no round is saved yet"
                )
            resume_command = shlex.join(["fedmuon", *command, "--out", str(folder), "--resume"])
            saved = f"{progress}, resume with: {resume_command}"
        complain(f"interrupted: {saved}")
        raise SystemExit(wish.exit_code) from None


def given_in(context: Context, *but: str) -> list[str]:
    """Return the names of the options that the command line contains.

    The result leaves out --json, --quiet, and the parameters in `but`.
    """
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in (*but, "json", "quiet")
        and (source := context.get_parameter_source(parameter.name)) is not None
        and source.name == "COMMANDLINE"
    ]
