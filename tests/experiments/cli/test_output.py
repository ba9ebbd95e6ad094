"""What the command says of configs, of itself, and while it works."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import small
from rich.console import Console
from torch import nn
from typer.main import get_command
from typer.testing import CliRunner

import fedmuon
from docs.making import commands
from fedmuon.analysis.report.numbers import digits
from fedmuon.config import describe
from fedmuon.config.describe import KEYS, commented
from fedmuon.config.load import Config, load, parse
from fedmuon.config.names import ADAPTERS, COMPRESSORS, FEATURES, LISTS, NAMES, OPTIONS
from fedmuon.config.schema import NEEDS
from fedmuon.core.errors import AGAIN, NOTHING_SAVED, InputError, Interrupted
from fedmuon.core.files import write_bytes
from fedmuon.experiments.cli import app, main
from fedmuon.experiments.cli.completion import LISTED
from fedmuon.experiments.cli.completion import keys as completed
from fedmuon.experiments.cli.options import apart, changes_of, resumable
from fedmuon.experiments.cli.show import (
    MOST,
    Progress,
    Remembered,
    brief_routes,
    is_wanted,
    step_sizes,
)
from fedmuon.experiments.run import execute
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.suites.contents import shipped
from fedmuon.optim import routing_table

EVERY = [f"{table}.{key}" for table, keys in KEYS.items() for key in keys]


def said(*command: str, code: int = 0, **env: str) -> str:
    done = CliRunner().invoke(app, list(command), env={"COLUMNS": "80", **env})
    assert done.exit_code == code, done.output + str(done.exception)
    return " ".join(done.output.split())


def refused(*command: str) -> str:
    return str(CliRunner().invoke(app, list(command)).exception)


@pytest.mark.slow
def test_every_key_answers() -> None:
    for key in EVERY:
        found = describe.find(key)
        text = said("config", "explain", key, COLUMNS="2000")
        for words in (f"[{found.table}] {found.name}", found.what, found.default, found.readers):
            assert " ".join(words.split()) in text, key
        assert all(name in text for name in NAMES.get(key, ()))
        for name, options in OPTIONS.get(key, {}).items():
            assert name in text and all(option in text for option in options)
        assert found.setting in text
        assert load(None, [found.setting.removeprefix("--set ")]) == Config()


def typed(lines: str) -> list[list[str]]:
    """The words of each command that a shell finds in the lines of a help."""
    whole = [shlex.split(one) for one in lines.splitlines() if not one.startswith(" ")]
    return [one for one in whole if one]


@pytest.mark.parametrize(
    "width", [80, *(pytest.param(one, marks=pytest.mark.slow) for one in (60, 200))]
)
def test_examples_of_every_help_can_be_pasted(width: int) -> None:
    """They parse, and fit on their lines. Control: a shell without backslashes reads otherwise."""
    alone = 0
    for name, command in commands.every(commands.app_as_click()):
        env = {"COLUMNS": str(width)}
        shown = CliRunner().invoke(app, [*name.split()[1:], "--help"], env=env).output
        assert "[bold]" not in shown and "[/" not in shown
        tail = shown.rpartition("╯")[2].strip("\n")
        assert all(one == one.rstrip() and len(one) < width for one in tail.splitlines()), name
        said = re.findall(r"\[bold\](.*?)\[/\]", command.help or "", re.DOTALL)
        found = typed(tail.replace("\\\n", ""))
        assert found == [one.split() for one in said] and (found or name == "fedmuon doctor")
        alone += typed(tail.replace("\\\n", "\n")) != found
        for words in found:
            if words[0] == "fedmuon":
                require_parses(words[1:])
    assert alone > 3 or width == 200


def require_parses(words: list[str]) -> None:
    command: Any = commands.app_as_click()
    while isinstance(command, click.Group):
        _, command, words = command.resolve_command(click.Context(command), words)
    context = command.make_context(command.name, list(words))
    load(None, context.params.get("overrides") or [])


def test_what_a_help_says_beside_its_examples() -> None:
    assert apart("One.\n\nTwo is\n3. Example: [bold]a -b\nc[/], then [bold]d[/]\n\nE.") == (
        "One.\n\nTwo is 3.\n\nE.", [("Example:", ["a -b c", "d"])]
    )  # fmt: skip
    assert apart("One: [bold]a[/]\n\nOf two: [bold]b[/]")[1] == [
        ("One:", ["a"]),
        ("Of two:", ["b"]),
    ]
    assert apart("Use [bold]a ls[/] to see\nmore. It is quick.\n\nNow: [bold]b[/].") == (
        "Use a ls to see more. It is quick.", [("Now:", ["b"])]
    )  # fmt: skip
    assert apart("One. So: [bold]a[/] and [bold]b[/]. It takes\na minute.") == (
        "One. It takes a minute.", [("So:", ["a", "b"])]
    )  # fmt: skip


def test_tables_list_their_keys() -> None:
    assert all(table in said("config", "explain") for table in KEYS)
    for table, keys in KEYS.items():
        text = said("config", "explain", table)
        assert all(key in text for key in keys)


@pytest.mark.parametrize(("words", "why"), [
    ("config explain local.lrr", "did you mean local.lr?"),
    ("config explain local.Lr", "did you mean local.lr?"),
    ("config explain LOCAL.LR", "did you mean local.lr?"),
    ("config explain local.zzz", "the keys of [local] are recipe, steps"),
    ("config explain data.options", "set one of its options as data.options.OPTION=VALUE"),
    ("config explain faults.options", "the keys of [faults] are"),  # a control: it has none
    ("config explain zz.zzz", "with one of the tables data"),
    ("run --set local.Lr=3", "[local] Lr: did you mean lr?"),
    ("list nonsense", "choose one of suites, settings, data"),
])  # fmt: skip
def test_of_what_is_no_key_the_nearest_are_named(words: str, why: str) -> None:
    assert why in refused(*words.split())


@pytest.mark.parametrize("seeds", ["2.5", "0", "x"])
def test_seeds_that_are_no_count_are_refused_in_plain_words(seeds: str) -> None:
    text = said("suite", "A1", "--seeds", seeds, code=2, COLUMNS="200")
    assert f"{seeds} is not an integer that is at least 1" in text


@pytest.mark.parametrize("kind", ["suites", "compressors", "features", "adapters", *LISTS])
def test_lists_have_all_names(kind: str) -> None:
    others = {"suites": shipped(), "compressors": COMPRESSORS, "features": FEATURES,
              "adapters": ADAPTERS}  # fmt: skip
    known = others[kind] if kind in others else NAMES[LISTS[kind]]
    text = said("list", kind, COLUMNS="200")
    assert all(name in text for name in known) and len(known) > 1
    assert f"did you mean {kind}?" in refused("list", f"{kind}s")


def test_help_lists_and_version_say_what_there_is() -> None:
    assert f"choose one of {', '.join(LISTED)}" in refused("list", "foo")
    text = said("deploy-demo", "--help", COLUMNS="200")  # of its own defaults alone
    assert "3 clients train on synthetic data" in text and "mnist5k" not in text
    assert said("--version") == f"fedmuon {fedmuon.__version__}"


def test_the_config_to_begin_with_is_the_default_however_many_keys_are_set(tmp_path: Path) -> None:
    """Commented out they are the defaults, and so they are with the signs taken away."""
    text = commented()
    assert parse(tomllib.loads(text)) == Config()
    assert CliRunner().invoke(app, ["config", "init"]).output == text
    bare = re.sub(r"^#(?=[a-z])", "", text, flags=re.MULTILINE)
    tables = tomllib.loads(bare)
    assert {f"{table}.{key}" for table, keys in tables.items() for key in keys} == set(EVERY)
    assert parse(tables) == Config()
    assert parse(tomllib.loads(bare.replace("lr = 1.0", "lr = 0.5"))) != Config()
    assert max(map(len, text.splitlines())) <= 100
    file = tmp_path / "new.toml"
    said("config", "init", str(file))
    assert file.read_text() == text
    assert "already exists" in refused("config", "init", str(file))


@pytest.mark.parametrize(("words", "found"), [
    ("fedmuon ru", ["run"]),
    ("fedmuon run --set local.server-mom", ["local.server-momentum="]),
    ("fedmuon config explain privacy.kap", ["privacy.kappa"]),
    ("fedmuon list agg", ["aggregators"]),
    ("fedmuon run --see", ["--seed", "--seeds"]),
    ("fedmuon plan --data mni", ["mnist5k", "mnist"]),
    ("fedmuon stability --engine r", ["ray"]),
])  # fmt: skip
def test_shells_complete_commands_options_keys_and_lists(words: str, found: list[str]) -> None:
    asked = {"_FEDMUON_COMPLETE": "complete_bash", "COMP_WORDS": words,
             "COMP_CWORD": str(words.count(" "))}  # fmt: skip
    done = CliRunner().invoke(app, [], env=asked, prog_name="fedmuon")
    assert done.output.split() == found


def test_keys_that_are_completed_are_those_that_there_are() -> None:
    keys = [f"{table}.{key}" for table, held in NEEDS.items() for key in held]
    assert completed("") == keys and completed("nothing") == []


SHORT = {"--engine", "--ray-address", "--data", "--seed", "--set", "--out"}
LACKING = {  # what a command that runs something has no use for
    "plan": {"--out"},  # it writes nothing
    "deploy-demo": {"--engine", "--ray-address"},  # it is an engine
}


@pytest.mark.parametrize("name", ["run", "stability", "plan", "deploy-demo", "suite"])
def test_what_runs_something_has_the_same_options(name: str) -> None:
    command = get_command(app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    known = {option for one in command.params for option in one.opts}
    assert SHORT - known == LACKING.get(name, set())


def test_short_options_are_changes_and_no_second_word() -> None:
    found = changes_of(["local.lr=1"], "ray", "1.2.3.4:5", "digits", 7)
    assert found == ["local.lr=1", "engine.name=ray", "engine.ray-address=1.2.3.4:5",
                     "data.name=digits", "federation.seed=7"]  # fmt: skip
    assert changes_of(None) == [] and changes_of(None, seed=0) == ["federation.seed=0"]
    with pytest.raises(InputError, match=r"--seed and --set federation\.seed set"):
        changes_of(["federation.seed = 3"], seed=3)


@pytest.mark.parametrize(("given", "seeds", "again"), [
    ({"seed": 7}, {7}, "--seed 7"), ({"seeds": 5}, {0, 1, 2, 3, 4}, "--seeds 5"),
])  # fmt: skip
def test_a_suite_of_other_seeds_says_so(given: dict[str, int], seeds: set[int], again: str) -> None:
    three, found = (find("cnn", "digits", "full", {}, **one) for one in ({}, given))
    assert seeds == {cell.config.federation.seed for cell in found.cells}  # pyright: ignore
    assert len(seeds) * len(three.cells) == 3 * len(found.cells) and three.lock != found.lock
    assert found.request.again == f"fedmuon suite cnn --data digits --scale full {again}"


@pytest.mark.parametrize(("suite", "given", "why"), [
    ("dp-bias", {"seed": 1}, "the suite dp-bias has no seeds"),
    ("dp-bias", {"seeds": 1}, "has no effect: leave --seeds out"),
    ("heavy-tail", {"seed": 3}, "use --seeds and leave --seed out"),
    ("cnn", {"seed": 1, "seeds": 2}, "--seed sets a single seed, but --seeds"),
])  # fmt: skip
def test_seeds_that_a_suite_does_not_have(suite: str, given: dict[str, int], why: str) -> None:
    assert find("heavy-tail", None, "small", {}, seeds=3).request.repeats["seeds"] == 3
    with pytest.raises(InputError, match=why):
        find(suite, None, "small", {}, **given)


def test_options_reach_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = "--data synthetic --seed 5 --set data.train=400 --set federation.rounds=2"
    said("run", *given.split(), "--out", str(out))
    config = fedmuon.Result(out).config
    assert (config.data.name, config.federation.seed) == ("synthetic", 5)


def records(count: int, every: int = 10) -> Iterator[dict[str, float]]:
    """Rounds with a loss, every tenth with an accuracy."""
    for number in range(1, count + 1):
        looked = {"accuracy": 0.5 + number / 1000} if number % every == 0 else {}
        yield {"round": number, "client_loss": 1.0 / number, **looked}


def watched(file: io.StringIO, count: int, every: int = 10, **given: Any) -> Progress:
    """A bar, or lines, that saw so many rounds."""
    console = Console(file=file, width=80, force_terminal=given.pop("terminal", None))
    progress = Progress(console, **{"lines": True, **given})
    progress.on_start(0, count)
    for record in records(count, every):
        progress.on_round_end(record)
    return progress


def bar(progress: Progress, width: int = 80) -> str:
    """The one line of a bar."""
    shown = Console(width=width, file=(file := io.StringIO()))
    shown.print(progress.get_renderable())
    (line,) = file.getvalue().splitlines()
    assert "…" not in line
    return line


def test_a_run_of_a_network_prints_who_takes_its_parameters_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ["data.name=digits", "data.train=60", "data.test=20", "federation.clients=2",
                "federation.per-round=1", "federation.rounds=1", "task.name=network",
                "task.model=mlp"]  # fmt: skip
    words = ["run", *(f"--set={one}" for one in settings), f"--out={out}"]
    said = CliRunner().invoke(app, words).output
    assert brief_routes((out / "routes.txt").read_text()) in said
    assert said.count("first.weight") == 1
    again = CliRunner().invoke(app, ["run", f"--out={out}", "--resume"]).output
    other = CliRunner().invoke(app, [*words[:-1], "--set=local.recipe=fedavg", f"--out={out}-2"])
    assert "first.weight" not in again + other.output and (tmp_path / "run-2/routes.txt").exists()


def test_layers_that_differ_in_their_numbers_are_one_line() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)), nn.Linear(4, 2))
    lines = [line.split() for line in brief_routes(str(routing_table(net))).splitlines()]
    assert [line[:2] for line in lines[1:]] == [
        ["0.weight", "4"], ["*.bias", "(12)"], ["*.weight", "(11)"], ["12.weight", "2"],
        ["12.bias", "2"],
    ]  # fmt: skip


def test_the_second_step_size_is_stated_only_if_a_parameter_has_it() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    said = step_sizes(str(routing_table(net)), 0.02, 0.05, default=True)
    assert "lr = 0.02 for orthogonalized" in said and "aux-lr = 0.05 for all other" in said
    alone = str(routing_table(nn.Linear(4, 4, bias=False), ends=False))
    assert "muon" in alone and "aux" not in step_sizes(alone, 0.02, 0.05, default=True)


def test_what_was_last_known_stays_on_the_bar() -> None:
    """Between two evaluations the last accuracy, with the loss of every round and its curve."""
    progress = watched(file := io.StringIO(), 25, terminal=True)
    note = progress.tasks[0].fields["note"]
    assert "accuracy 0.5200" in note and "loss 0.04000" in note and note.endswith("▁")
    line = bar(progress)
    assert "25/25" in line and re.search(r"\d:\d\d:\d\d", line) and "accuracy 0.5200" in line
    assert file.getvalue() == ""  # and no lines


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_bar_has_both_times_whole_beside_the_longest_numbers(width: int) -> None:
    progress = Progress(Console(file=io.StringIO(), force_terminal=True, width=width))
    progress.on_start(0, 10_000)
    for number in range(1, 40):
        loss = {"client_loss": 1e-5 / number, "accuracy": 0.5}
        progress.on_round_end({"round": 1000 + number, **loss})
    line = bar(progress, width)
    assert len(re.findall(r"\d:\d\d:\d\d|-:--:--", line)) == 2
    assert "1039/10000" in line and "accuracy 0.5000" in line and "▁" in line


def test_long_rounds_have_a_remaining_time() -> None:
    """Rounds of two minutes, of which a window of 30 seconds would contain only one."""
    progress = Progress(Console(file=io.StringIO(), force_terminal=True))
    now = 0.0
    progress.get_time = lambda: now
    progress.on_start(0, 10)
    for record in records(4):
        now += 120
        progress.on_round_end(record)
    assert progress.tasks[0].time_remaining == pytest.approx(6 * 120)


def test_a_run_that_goes_on_begins_with_what_was_last_known() -> None:
    """Of the rounds before its checkpoint, not of later ones, which are computed again."""
    before = [*records(25)]
    progress = Progress(Console(file=io.StringIO(), force_terminal=True), before=before)
    progress.on_start(15, 40)
    note = progress.tasks[0].fields["note"]
    assert note.startswith(f"loss {1 / 15:.5f}  accuracy 0.5100  ") and progress.risen({}) == ""
    afresh = Progress(Console(file=io.StringIO(), force_terminal=True), before=before)
    afresh.on_start(0, 40)
    assert afresh.tasks[0].fields["note"] == ""


@pytest.mark.parametrize(("count", "least"), [(5, 5), (60, 60), (1000, MOST), (12345, MOST)])
def test_a_pipe_has_a_line_a_round_or_a_hundred(count: int, least: int) -> None:
    watched(file := io.StringIO(), count)
    lines = file.getvalue().splitlines()
    assert least <= len(lines) <= least + 1
    assert lines[-1].startswith(f"rounds {count}/{count}  loss ")
    said = [(int(one[1]), float(one[2])) for line in lines
            if (one := re.search(r"rounds (\d+)/.* accuracy ([\d.]+)", line))]  # fmt: skip
    measured = {r["round"]: digits(r["accuracy"]) for r in records(count) if "accuracy" in r}
    if count == least:
        assert said == [(round, float(value)) for round, value in measured.items()]


def test_a_pipe_says_of_what_is_measured_between_two_lines_in_which_round() -> None:
    """Once each: an accuracy of 25 rounds before is none of this round."""
    watched(file := io.StringIO(), 1000, every=25)
    said = [line.partition("  ")[::2] for line in file.getvalue().splitlines()]
    found = [(head, note.partition("accuracy ")[2]) for head, note in said if "accuracy" in note]
    assert found[:3] == [
        ("rounds 30/1000", "0.5250 in round 25"),
        ("rounds 50/1000", "0.5500"),
        ("rounds 80/1000", "0.5750 in round 75"),
    ]
    assert len(found) == 40


def test_commands_that_answer_in_json_print_no_lines() -> None:
    watched(file := io.StringIO(), 5, lines=False)
    assert file.getvalue() == ""


def test_a_long_run_is_remembered_in_little() -> None:
    kept = Remembered()
    for number in range(100_000):
        kept.add(float(number))
    assert MOST <= len(kept.values) <= 2 * MOST + 1
    assert kept.values == sorted(kept.values) and kept.values[0] == 0
    steps = {b - a for a, b in zip(kept.values, kept.values[1:], strict=False)}
    assert len(steps) == 1


def test_an_interruption_says_which_round_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(record: Mapping[str, Any], state: object) -> None:
        if record["round"] == 5:
            raise Interrupted

    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended, resumable(out, ["run"]):
        execute(small(), out, callbacks=[stop])
    text = capsys.readouterr().err
    assert ended.value.code == 130 and text.count("\n") == 1
    assert (
        f"the checkpoint of round 5 is saved, resume with: fedmuon run --out {out} --resume" in text
    )
    (out / "checkpoint.safetensors").unlink()  # as before the first
    for folder, command, words in (
        (tmp_path / "new", ["run"], NOTHING_SAVED),
        (out, ["run"], "no round is saved yet, resume with: fedmuon run"),
        (out, [], "this command cannot be resumed: start a new run"),
    ):
        with pytest.raises(SystemExit), resumable(folder, command):
            raise Interrupted
        assert words in capsys.readouterr().err


EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, *rest):
        name == "typing" and os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("command", [["-m", "fedmuon"], ["-c", "import fedmuon"]])
def test_the_command_hears_ctrl_c_before_its_package_is_imported(
    command: list[str], tmp_path: Path
) -> None:
    """A program that only imports the package keeps Python's own answer."""
    (tmp_path / "sitecustomize.py").write_text(EARLY)
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command, "--version"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": places},
    )  # fmt: skip
    if command == ["-m", "fedmuon"]:
        said = f"fedmuon: interrupted: {NOTHING_SAVED}\n"
        assert (done.returncode, done.stdout, done.stderr) == (130, "", said)
    else:
        assert done.returncode != 130 and "KeyboardInterrupt" in done.stderr


INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # where it was started to ignore them
class Finder:
    def find_spec(self, name, *rest):
        name == "typer" and os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Finder())
runpy.run_module("fedmuon", run_name="__main__")
"""
ENDING = """
import atexit, os, runpy, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # where it was started to ignore them
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(1)))
sys.argv = ["fedmuon", "--version"]
runpy.run_module("fedmuon", run_name="__main__")
"""


@pytest.mark.parametrize(("code", "ended", "words"), [
    (INTERRUPTED, 130, f"fedmuon: interrupted: {NOTHING_SAVED}\n"), (ENDING, -signal.SIGINT, ""),
], ids=["libraries are read", "the program ends"])  # fmt: skip
def test_an_interruption_of_a_process_has_no_traceback(code: str, ended: int, words: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (ended, words) and bool(done.stdout) == (not words)


def test_an_interruption_before_a_folder_is_chosen_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupt(*given: object, **named: object) -> None:
        raise Interrupted

    monkeypatch.setattr("fedmuon.experiments.cli.options.chosen_config", interrupt)
    with pytest.raises(SystemExit) as ended:
        main(["run"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"fedmuon: interrupted: {AGAIN}\n"


def test_an_interruption_while_an_error_is_printed_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    sentences: list[str] = []

    def interrupted_once(text: str) -> None:
        sentences.append(text)
        if len(sentences) == 1:
            raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr("fedmuon.experiments.cli.complain", interrupted_once)
    with pytest.raises(SystemExit) as ended:
        main(["tune", "nosuch"])
    assert ended.value.code == 143
    assert len(sentences) == 2 and sentences[1].startswith("interrupted: ")


@pytest.mark.usefixtures("undrawn")
def test_a_report_that_is_interrupted_does_not_say_that_nothing_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Between claims.json and the page."""

    def stopping(file: Path, content: bytes) -> None:
        write_bytes(file, content)
        if file.name == "claims.json":
            raise Interrupted

    execute(small(), tmp_path / "a")
    monkeypatch.setattr("fedmuon.analysis.report.write.write_bytes", stopping)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "a")])
    there = [(tmp_path / "a" / name).exists() for name in ("claims.json", "report.html")]
    assert ended.value.code == 130 and there == [True, False]
    assert capsys.readouterr().err == f"fedmuon: interrupted: {AGAIN}\n"


def test_an_audit_by_one_run_has_the_short_options_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Config] = []

    def execute(config: Config, *rest: object, **more: object) -> None:
        asked.append(config)
        raise InputError("seen")

    monkeypatch.setattr("fedmuon.experiments.auditing.one_run.execute", execute)
    audit = "privacy", "audit", "--one-run", "--out", str(tmp_path / "a")
    short = "--data", "synthetic", "--engine", "inline", "--seed", "5"
    assert refused(*audit, *short) == "seen"
    (one,) = asked
    assert (one.data.name, one.engine.name, one.federation.seed) == ("synthetic", "inline", 5)
    assert "set the same key" in refused(*audit, "--seed", "5", "--set", "federation.seed=5")
    assert "accept --seed" not in refused("privacy", "audit", "--seed", "5")
    for option in ("--data", "--engine"):
        assert f"does not accept {option}" in refused("privacy", "audit", option, "inline")
    shown = refused(*audit[:3], str(tmp_path), "--seed", "1")
    assert "only shows its audit. Remove --seed" in shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_only_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    def wanted(stdout: Any, progress: bool | None = None) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            return is_wanted(progress)

    monkeypatch.setenv("FORCE_COLOR", "1")  # asks for colours, not for progress
    closed = io.StringIO()
    closed.close()
    assert wanted(Terminal())
    assert not any(map(wanted, (io.StringIO(), closed, None)))
    assert wanted(io.StringIO(), True) and not wanted(Terminal(), False)
    found: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal())
        thread = threading.Thread(target=lambda: found.append(is_wanted(None)))
        thread.start()
        thread.join()
    assert found == [False]


def test_functions_show_progress_in_a_terminal_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    calls = {
        "rounds": lambda **more: fedmuon.run(config, **more),
        "neighbours": lambda **more: fedmuon.stability(config, trials=1, **more),
    }
    for counted, call in calls.items():
        shown = {}
        for name, stdout, more in (
            ("terminal", Terminal(), {}), ("pipe", io.StringIO(), {}),
            ("switched off", Terminal(), {"progress": False}),
        ):  # fmt: skip
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", stdout)
                call(**more)
            shown[name] = stdout.getvalue()
        assert counted in shown["terminal"]
        assert (shown["pipe"], shown["switched off"]) == ("", "")
