"""The config: round trips, and refusals of one sentence that name the key and the mend."""

import tomllib
from pathlib import Path

import pytest

from fedmuon.config import Config, dump, flatten, load, parse, unflatten
from fedmuon.errors import InputError


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
