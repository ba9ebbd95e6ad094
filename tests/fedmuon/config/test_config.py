"""The config: round trips, and refusals of one sentence that name the key and the mend."""

import inspect
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from fedmuon.config.load import Config, dump, flatten, load, parse, unflatten
from fedmuon.config.schema import NEEDS
from fedmuon.core.errors import InputError, instead, near
from fedmuon.core.tables import validate
from fedmuon.data.partition import PARTITIONS
from fedmuon.optim.aggregators import AGGREGATORS
from fedmuon.optim.schedules import SCHEDULES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "config.md"


def test_the_page_has_every_key_with_its_default_and_no_other() -> None:
    page, found = PAGE.read_text(encoding="utf-8"), {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        if not (table := re.match(r"`\[([a-z]+)\]`", section)):
            continue
        for line in re.findall(r"^\| `.*$", section, re.MULTILINE):
            key, default, *_, readers = (cell.strip(" `") for cell in line.strip("|").split(" | "))
            found[table[1], key] = (tomllib.loads(f"v = {default}")["v"], readers == "always")
    assert found == {
        (name, field.alias): (field.default, NEEDS[name][field.alias or ""] == ())
        for name, table in Config.model_fields.items()
        for field in type(table.default).model_fields.values()
        if field.alias != "options"
    }


def ranges() -> Iterator[tuple[str, type[BaseModel], str, str]]:
    """Every number's table, its model, key and values of the page."""
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        if table := re.match(r"`\[([a-z]+)\]`", section):
            model = type(Config.model_fields[table[1]].default)
            for line in re.findall(r"^\| `.*$", section, re.MULTILINE):
                key, default, values = (one.strip(" `") for one in line.split(" | ")[:3])
                if re.fullmatch(r"[0-9.e+-]+", default):
                    yield table[1], model, key.strip("| `"), values


def test_the_page_has_the_least_and_greatest_numbers() -> None:
    seen = set()
    for table, model, key, values in ranges():
        seen.add(values)
        taken, refused = [], [math.nan, "x", -1e-300]
        if values.startswith("above 0"):
            refused.append(0.0)
            taken.append(1e-300 if key == "lambda" else 1e-15)
        if values in ("above 0", "0 or more"):
            greatest = 1e7 if table == "faults" else 1e15
            taken.append(greatest)
            refused += [1.01 * greatest, math.inf]
        if "inf" in values:
            taken.append(math.inf)
        for value in taken:
            validate(model, {key: value})
        for value in refused:
            with pytest.raises(InputError, match=key):
                validate(model, {key: value})
    assert {"above 0", "0 or more", "0 to below 1"} <= seen


def test_the_page_has_the_options_of_built_in_names() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Options")[2]
    for makers in (AGGREGATORS, PARTITIONS, SCHEDULES):
        for name in makers:
            maker = makers.get(name)
            assert maker is not None
            for option, one in inspect.signature(maker).parameters.items():
                if one.default is not one.empty:
                    (line,) = [row for row in section.splitlines() if f"| `{name}` |" in row]
                    assert f"`{option.replace('_', '-')}`" in line and f"`{one.default}`" in line


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
    ("local.lr=nan", "[local] lr = nan is refused: nan is no number"),
    ("local.lr=0", "[local] lr = 0 is refused: give a number above 0 (1e-15 or more)"),
    ("local.lr=1e16", "give a number of at most 1e+15"),
    ("local.momentum=1", "give a number below 1"),
    ("federation.rounds=1000001", "give a number of at most 1000000"),
    ("faults.deadline=0", "give a number above 0"),
    ("engine.threads=2", "unknown key [engine] threads: set OMP_NUM_THREADS"),
    ("engine.workers=2", "unknown key [engine] workers: there are as many as fit"),
    ("compute.threads=2", "unknown key [compute]: known here are data, federation"),
    ("engine.thread=2", "unknown key [engine] thread: known here are"),
    ("local.steps=1.5", "[local] steps = 1.5"),
    ("federation.per-round=21", "per-round = 21 exceeds clients = 20"),
    ("data.minimum=500", "train = 4000 cannot give 20 clients minimum = 500"),
    ("orthogonalizer.lambda=0", "[orthogonalizer] lambda = 0"),
    ("orthogonalizer.coefficients=septic", "septic"),
    ("local.recipe=fedprox", "fedavg, fedavgm, local-muon, fedmuon"),
    ("data.name=imagenet", "mnist5k"),
    ("nonsense", "table.key=value"),
])  # fmt: skip
def test_refusals_name_the_key_and_the_mend(override: str, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        load(None, [override])
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


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
    """Less than that is a guess, as another table for one that only ends alike: all are named."""
    tables = ("data", "task", "local", "engine", "output")
    for name, close in (("lokal", "local"), ("egnine", "engine"), ("outputs", "output")):
        assert instead(name, tables) == f"did you mean {close}?"
    for name in ("compute", "x", ""):
        assert instead(name, tables) == "use one of data, task, local, engine, output"
    assert near("lr", ["lr", "lrs", "lr"], 3) == ["lr", "lrs"]
