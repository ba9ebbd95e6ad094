"""The config: its round trips, its refusals, and that what is said of every key holds."""

import ast
import inspect
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from conftest import small
from flwr.common.config import flatten_dict, fuse_dicts

from docs.making import config_page
from fedmuon.config import describe
from fedmuon.config.describe import KEYS
from fedmuon.config.load import (
    Config,
    absolute_paths,
    dump,
    flatten,
    load,
    nested,
    parse,
    unflatten,
)
from fedmuon.config.names import LISTS, NAMES, OPTIONS
from fedmuon.config.schema import FIELDS, NEEDS, TABLES_OF_A_CONFIG
from fedmuon.core.errors import InputError, instead, near
from fedmuon.core.registry import import_object
from fedmuon.core.tables import validate
from fedmuon.data.partition import PARTITIONS
from fedmuon.data.readers import READERS
from fedmuon.experiments.engines.processes import importable
from fedmuon.federated.build import resolve
from fedmuon.optim.aggregators import AGGREGATORS
from fedmuon.optim.schedules import SCHEDULES
from fedmuon.runs.callbacks import CALLBACKS
from fedmuon.server.run_config import packed, unpacked

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "config.md"
EVERY = [f"{table}.{key}" for table, keys in NEEDS.items() for key in keys if key != "options"]
MAKERS = {
    "data.name": READERS, "federation.partition": PARTITIONS, "federation.aggregate": AGGREGATORS,
    "local.schedule": SCHEDULES, "output.callback": CALLBACKS,
}  # fmt: skip


def test_the_page_is_made_of_the_descriptions() -> None:
    """`make reference` writes what is committed; and would mend a page that says otherwise."""
    text = PAGE.read_text(encoding="utf-8")
    assert config_page.written(text) == text, "give `make reference`"
    other = text.replace("η, the step size", "no such thing").replace(
        "## `[local]`", "## `[local]` "
    )
    assert other != text and config_page.written(other) == text
    sections = re.findall(r"^## `\[([a-z]+)\]`", text, re.MULTILINE)
    assert sections == [*Config.model_fields]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)
        assert len(rows) == len(set(rows)), "a key has two rows"


def test_every_key_is_described_and_no_other() -> None:
    said = [f"{table}.{key}" for table, keys in KEYS.items() for key in keys]
    assert sorted(said) == sorted(EVERY) and [*KEYS] == [*NEEDS]


def tables_of_keys(source: str) -> list[set[Any]]:
    """Dictionaries in a file that are written out with more than half of the keys of a table."""
    tables = [set(fields) for fields in FIELDS.values() if len(fields) > 4]
    written = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict))
    named: list[set[Any]] = [
        {one.value for one in node.keys if isinstance(one, ast.Constant)} for node in written
    ]
    return [keys for keys in named if any(len(keys & one) > len(one) / 2 for one in tables)]


def test_a_key_is_declared_once() -> None:
    """In the schema; every other table of keys is derived from it. Only the generated typed.py
    repeats them, and test_docstrings.py compares it with the schema."""
    fields = [(table, key) for table, held in FIELDS.items() for key in held]
    assert len(fields) == len(set(fields))
    written = {ROOT / "fedmuon/config/typed.py"}
    for file in sorted({*(ROOT / "fedmuon").rglob("*.py")} - written):
        assert not tables_of_keys(file.read_text(encoding="utf-8")), file
    again = "OTHER = {" + ", ".join(f"{key!r}: 1" for key in FIELDS["privacy"]) + "}"
    assert tables_of_keys(again)


@pytest.mark.parametrize("key", EVERY)
def test_what_is_said_of_a_key_is_so(key: str) -> None:
    """Its default is the model's, is among the values, and names that are listed are taken."""
    found = describe.find(key)
    table, name = key.split(".")
    field = FIELDS[table][name]
    assert json.loads(found.default) == field.default
    assert tomllib.loads(f"v = {found.default}")["v"] == field.default
    assert found.what and (found.readers == "always") == (NEEDS[table][name] == ())
    listed = [one.strip("`") for one in found.values.split(", ")]
    if isinstance(field.default, str) and field.default and key != "privacy.inner-weights":
        assert field.default in listed
    for one in listed:
        if re.fullmatch(r"[a-z][a-z0-9-]*", one) and one not in ("inf", "true", "false"):
            validate(TABLES_OF_A_CONFIG[table], {name: one})


def test_every_choice_has_a_list() -> None:
    assert set(LISTS.values()) == set(NAMES)


def test_options_have_the_defaults_of_their_makers() -> None:
    """And there is no option of a built-in name that is not said."""
    for key, makers in MAKERS.items():
        for name in makers:
            maker = makers[name]
            given = inspect.signature(
                maker.__init__ if isinstance(maker, type) else maker
            ).parameters
            taken = {
                one.name.replace("_", "-"): one.default
                for one in given.values()
                if one.default is not one.empty and one.kind is not one.VAR_KEYWORD
            }
            if key == "data.name":  # whose readers are given keys of the table, too
                own = {"client"}  # also a key, for data passed in Python; files take the option
                taken = {one: taken[one] for one in taken if one not in {*KEYS["data"]} - own}
                taken = {one: taken[one] for one in taken if one not in ("n", "seed", "separation")}
            said = OPTIONS.get(key, {}).get(name, {})
            for option, default in taken.items():
                assert said[option][0] == ("" if default is None else json.dumps(default)), name
            assert {one for one, (default, _) in said.items() if default} <= set(taken)


@pytest.mark.parametrize(("asked", "said"), [
    ("local.lrr", "did you mean local.lr"),
    ("lrr", "did you mean local.lr"),
    ("privacy.epsilo", "did you mean privacy.epsilon?"),
    ("epsilo", "did you mean privacy.epsilon?"),
    ("steps", "Use local.steps or orthogonalizer.steps"),
    ("engine.threads", "OMP_NUM_THREADS"),
    ("privacy.gamma", "its new name is privacy.lookahead"),
    ("xyzzy", "one of the tables data, federation"),
    ("", "one of the tables data, federation"),
])  # fmt: skip
def test_near_misses_are_told_what_is_near(asked: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        describe.find(asked)


def test_a_name_alone_is_enough_where_one_table_has_it() -> None:
    assert describe.find("lora_rank").whole == describe.find("lora-rank").whole == "task.lora-rank"


@pytest.mark.parametrize(("limits", "said"), [
    ({"ge": 1, "le": 10**9}, "1 to 10⁹"),
    ({"ge": 0, "le": 2**63 - 1}, "0 to 2⁶³ − 1"),
    ({"ge": 1e-15, "le": 1e15}, "above 0"),
    ({"ge": 1e-15}, "above 0, `inf`"),
    ({"ge": 0, "le": 1e15}, "0 or more"),
    ({"ge": 0, "lt": 1}, "0 to below 1"),
    ({"gt": 0, "lt": 1}, "above 0, below 1"),
    ({"gt": 0, "le": 1}, "above 0 to 1"),
    ({"gt": 0, "le": 1e7}, "above 0"),
    ({"ge": 1e-3, "le": 10**9}, "0.001 to 10⁹"),
    ({"ge": 1, "le": 1024}, "1 to 1024"),
])  # fmt: skip
def test_limits_in_words(limits: dict[str, float], said: str) -> None:
    assert describe._range(limits) == said


def test_numbers_are_taken_within_their_limits_alone() -> None:
    seen = set()
    for key in map(describe.find, EVERY):
        default = FIELDS[key.table][key.name].default
        if isinstance(default, bool) or not isinstance(default, int | float):
            continue
        seen.add(key.values)
        taken, refused = [], [math.nan, "x", -1e-300]
        if key.values.startswith("above 0"):
            refused.append(0.0)
            taken.append(1e-300 if key.name == "lambda" else 1e-15)
        if key.values in ("above 0", "0 or more"):
            greatest = 1e7 if key.table == "faults" else 1e15
            taken.append(greatest)
            refused += [1.01 * greatest, math.inf]
        if "inf" in key.values:
            taken.append(math.inf)
        for value in taken:
            validate(TABLES_OF_A_CONFIG[key.table], {key.name: value})
        for value in refused:
            with pytest.raises(InputError, match=key.name):
                validate(TABLES_OF_A_CONFIG[key.table], {key.name: value})
    assert {"above 0", "0 or more", "0 to below 1"} <= seen


# Round trips and refusals


def test_round_trips() -> None:
    config = load(None, ["local.lr=0.25", "data.name=digits", "data.train=1000", "data.alpha=inf"])
    assert parse(tomllib.loads(dump(config))) == config
    assert unflatten(flatten(config)) == config
    assert all(isinstance(value, str | int | float | bool) for value in flatten(config).values())
    assert config != Config()


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[local]\nlr = 0.5\nsteps = 2\n")
    config = load(file, ["local.lr=0.25"])
    assert (config.local.lr, config.local.steps) == (0.25, 2)


@pytest.mark.parametrize(("override", "words"), [
    ("local.lrr=1", "[local] lrr: did you mean lr"),
    ("lokal.lr=1", "[lokal]: did you mean local"),
    ("local.lr=abc", "[local] lr = 'abc'"),
    ("local.lr=-1", "[local] lr = -1"),
    ("local.lr=nan", "[local] lr = nan is not valid: nan is not a number"),
    ("local.lr=0", "[local] lr = 0 is not valid: set a number above 0 (1e-15 or more)"),
    ("local.lr=1e16", "set a number of at most 1e+15"),
    ("local.momentum=1", "set a number below 1"),
    ("federation.rounds=1000001", "set a number of at most 1000000"),
    ("faults.deadline=0", "set a number above 0"),
    ("engine.threads=2", "unknown key [engine] threads: set the environment variable OMP_"),
    ("engine.workers=2", "unknown key [engine] workers: Ray starts as many workers as fit"),
    ("compute.threads=2", "unknown key [compute]: the valid names are data, federation"),
    ("engine.thread=2", "unknown key [engine] thread: the valid names are"),
    ("local.steps=1.5", "[local] steps = 1.5"),
    ("federation.per-round=21", "per-round = 21 exceeds clients = 20"),
    ("data.minimum=500", "is too small, because each of 20 clients needs minimum = 500"),
    ("orthogonalizer.lambda=0", "[orthogonalizer] lambda = 0"),
    ("orthogonalizer.coefficients=septic", "septic"),
    ("local.recipe=quicksand", "fedavg, fedavgm, local-muon, fedmuon"),
    ("data.name=imagenet", "mnist5k"),
    ("nonsense", "table.key=value"),
])  # fmt: skip
def test_refusals_name_the_key_and_the_mend(override: str, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        load(None, [override])
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_number_of_clients_in_a_column_is_unknown_before_the_data_is_read() -> None:
    column = ["federation.partition=column", "data.name=csv", "data.folder=table.csv"]
    sizes = ["federation.per-round=30", "data.minimum=40", "data.train=700"]
    config = load(None, [*column, *sizes])
    assert config.federation.per_round == 30 > config.federation.clients
    for clients, words in ((29, "per-round = 30 exceeds clients = 29"), (30, "is too small")):
        with pytest.raises(InputError, match=words):
            load(None, [*column, *sizes, f"federation.clients={clients}"])


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[local\n")
    with pytest.raises(InputError, match="not valid TOML"):
        load(file)
    with pytest.raises(InputError, match="cannot read"):
        load(tmp_path / "missing.toml")


@pytest.mark.parametrize("name", ["npz", "csv", "parquet"])
def test_a_table_of_ones_own_has_a_folder(name: str) -> None:
    assert load(None, [f"data.name={name}", "data.folder=mine"]).data.folder == "mine"


def test_what_is_suggested_is_a_slip_away() -> None:
    tables = ("data", "task", "local", "engine", "output")
    for name, close in (("lokal", "local"), ("egnine", "engine"), ("outputs", "output")):
        assert instead(name, tables) == f"did you mean {close}?"
    for name in ("compute", "x", ""):
        assert instead(name, tables) == "use one of data, task, local, engine, output"
    assert near("lr", ["lr", "lrs", "lr"], 3) == ["lr", "lrs"]


# Flower's run config with options of the user's, and files that other folders find

RECIPE = """
from fedmuon import links
def mine(lr, bound=1.0, whole=1, word="a", switch=True):
    return [links.gradient(), links.descend(lr * bound)]
"""
BROUGHT = {"bound": 0.5, "whole": 2, "word": 'it\'s "b" = c', "switch": False}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config that names a recipe in a file beside it, read in another folder."""
    (tmp_path / "mine.py").write_text(RECIPE)
    tables = nested(small())
    tables["local"] |= {"recipe": "./mine.py:mine", "options": BROUGHT}
    tables["orthogonalizer"] = {}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(tables))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    resolved = resolve(load(Path("config.toml")))
    monkeypatch.chdir("elsewhere")
    return resolved


def by_flower(file: str) -> dict:
    """What the ServerApp is handed of a file for --run-config."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return fuse_dicts(flatten_dict(table), flatten_dict(tomllib.loads(file)))


def test_options_pass_flower(own: Config, tmp_path: Path) -> None:
    run_config = by_flower(tomli_w.dumps(packed(own, tmp_path / "out")))
    assert run_config["out"] == str(tmp_path / "out")
    assert unpacked(run_config, "inline") == own
    assert unpacked(run_config, "ray").engine.name == "ray"
    assert dict(unpacked(run_config, "ray").local.options) == BROUGHT


def test_options_by_themselves_do_not(own: Config) -> None:
    """The control: without the one key for all, Flower refuses them."""
    with pytest.raises(ValueError, match="not present"):
        by_flower(tomli_w.dumps(nested(own)))


def test_options_of_an_app_of_ones_own_stand_in_its_config(own: Config) -> None:
    assert unpacked(flatten(own), "inline") == own


@pytest.mark.parametrize("text", ["{", "[1]", '{"local": 3}', "3", "[" * 100_000])
def test_options_that_are_none_are_one_sentence(text: str) -> None:
    with pytest.raises(InputError, match="is not a JSON object of tables") as refusal:
        unpacked({"options": text}, "ray")
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_a_file_is_found_from_another_folder(own: Config, tmp_path: Path) -> None:
    assert own.local.recipe == f"{tmp_path.resolve() / 'mine.py'}:mine"
    assert import_object(own.local.recipe, "[local] recipe").__name__ == "mine"
    assert resolve(own) == own


def test_paths_become_whole_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = absolute_paths(load(None, ["data.name=csv", "data.folder=table.csv"]))
    assert found.data.folder == str(tmp_path.resolve() / "table.csv")
    plain, named = small(), load(None, ["task.name=torch.nn:Linear"])
    assert resolve(plain).local == plain.local and absolute_paths(named) == named


def test_another_process_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of this folder is found, and does not stand before an installed one."""
    for name in ("mypackage", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("ours = True\n")
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PYTHONPATH": importable()}
    code = "import mypackage, numpy; assert not hasattr(numpy, 'ours'); numpy.zeros(1)"
    command = [sys.executable, "-P", "-c", code]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path.parent)
