"""The config: round trips, and refusals of one sentence that name the key and the mend."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest

from fedmuon.aggregators import AGGREGATORS
from fedmuon.config import Config, dump, flatten, load, parse, unflatten
from fedmuon.data.partition import PARTITIONS
from fedmuon.errors import InputError
from fedmuon.reading import NEEDS
from fedmuon.schedules import SCHEDULES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"


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


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("local.lrr=1", "[local] lrr: did you mean lr"),
        ("lokal.lr=1", "[lokal]: did you mean local"),
        ("local.lr=abc", "[local] lr = 'abc'"),
        ("local.lr=-1", "[local] lr = -1"),
        ("local.lr=nan", "[local] lr = nan"),
        ("local.steps=1.5", "[local] steps = 1.5"),
        ("federation.per-round=21", "per-round = 21 exceeds clients = 20"),
        ("data.minimum=500", "train = 4000 cannot give 20 clients minimum = 500"),
        ("orthogonalizer.lambda=0", "[orthogonalizer] lambda = 0"),
        ("orthogonalizer.coefficients=septic", "septic"),
        ("local.recipe=fedprox", "fedavg, fedavgm, local-muon, fedmuon"),
        ("data.name=imagenet", "mnist5k"),
        ("nonsense", "table.key=value"),
    ],
)
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
