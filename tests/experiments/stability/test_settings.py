"""Named settings: their files, the option, and what a run without a useful bound names."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedmuon
from fedmuon.config.load import load
from fedmuon.core.errors import InputError
from fedmuon.experiments import settings
from fedmuon.experiments.cli import app

ROOT = Path(__file__).resolve().parents[3]
TINY = ["data.train=60", "data.test=40", "data.minimum=2", "federation.clients=3",
        "federation.per-round=2", "federation.rounds=2"]  # fmt: skip


def command(*words: str, changes: list[str]) -> str:
    done = CliRunner().invoke(app, [*words, *(f"--set={one}" for one in changes)])
    assert done.exit_code == 0, done.exception or done.output
    return " ".join(done.output.split())


def test_each_setting_is_a_config_and_stands_on_its_page() -> None:
    page = (ROOT / "docs" / "how-to" / "stability.md").read_text(encoding="utf-8")
    assert [*settings.descriptions()] == ["controlled", "certified"]
    for name, description in settings.descriptions().items():
        assert description.endswith(").") and load(settings.path_of(name))
        body = settings.path_of(name).read_text(encoding="utf-8").partition("\n")[2]
        lines = [line.partition("#")[0].rstrip() for line in body.splitlines()]
        shown = [line.partition("#")[0].rstrip() for line in page.splitlines()]
        assert "\n".join(lines) in "\n".join(shown), name
    with pytest.raises(InputError, match=r"no setting .controled.*controlled"):
        settings.path_of("controled")


def test_the_option_runs_the_setting_and_draws_its_neighbours(tmp_path: Path) -> None:
    out, picture = tmp_path / "run", tmp_path / "neighbours.png"
    words = ("stability", "--setting=controlled", "--trials=2", f"--out={out}")
    said = command(*words, changes=TINY)
    assert "certified" in said and "--setting controlled" not in said
    assert "lambda = 0.1" in (out / "config.toml").read_text(encoding="utf-8")
    said = command("show", str(out), f"--figure={picture}", changes=[])
    assert "The neighbours are in" in said and picture.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(fedmuon.InputError, match="both describe the run"):
        fedmuon.stability({}, setting="controlled")
    both = CliRunner().invoke(app, ["stability", str(out / "config.toml"), "--setting=certified"])
    assert isinstance(both.exception, InputError) and "both describe the run" in str(both.exception)


def test_a_vacuous_bound_names_a_setting_with_a_useful_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = command("stability", "--trials=1", f"--out={out}", changes=[*TINY, "local.lr=5.0"])
    assert "fedmuon stability --setting controlled" in said
