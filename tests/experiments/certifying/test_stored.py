"""Stored certificates: where they are shown, and when they are not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import small
from typer.testing import CliRunner

import fedmuon
from fedmuon.analysis.report.numbers import at_most
from fedmuon.core.files import announce
from fedmuon.experiments.certifying import stored
from fedmuon.experiments.cli import app
from fedmuon.experiments.inspect import page
from fedmuon.experiments.inspect.status import run_status
from fedmuon.experiments.report import write_report
from fedmuon.experiments.run import execute

PRIVATE = {"local": {"recipe": "dp-sgd", "steps": 2}, "privacy": {"noise": 12.0, "lot": 10}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    execute(small(PRIVATE), tmp_path / "run")
    return tmp_path / "run"


def done(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def certified(run: Path, **options: float) -> fedmuon.RiskCertificates:
    return fedmuon.certify(run, **options)  # pyright: ignore[reportArgumentType]


def test_show_names_the_command_until_limits_are_stored(run: Path) -> None:
    before = done("show", run)
    assert f"limits of the error on new samples, use: fedmuon certify {run}\n" in before
    assert "at most" not in before and not json.loads(done("show", run, "--json"))["certificates"]
    done("certify", run)
    after = done("show", run)
    assert (
        "on new samples, use" not in after
        and "Risk of the final model" in after
        and "at most" in after
    )


@pytest.mark.usefixtures("undrawn")
def test_every_view_shows_the_stored_rows(run: Path, tmp_path: Path) -> None:
    computed = json.loads(done("certify", run, "--json"))
    assert json.loads(done("show", run, "--json"))["certificates"] == computed
    limits = [row for row in computed["rows"] if row["value"] is not None]
    assert len(limits) == 7
    shown = done("show", run)
    pages = [page.write(run_status(run), tmp_path / "a.html"), write_report(run)]
    for text in (shown, *(place.read_text(encoding="utf-8") for place in pages)):
        assert "Risk of the final model" in text
        assert all(row["method"] in text and at_most(row["value"]) in text for row in limits)
        assert "the held-out samples chose nothing" in text
        assert f"fedmuon certify {run}" in text
    assert "Not shown: 2 refused" in shown


@pytest.mark.usefixtures("undrawn")
def test_a_run_with_neighbours_shows_them_too(tmp_path: Path) -> None:
    run = fedmuon.stability(small({"engine": {"dtype": "float64"}, "local": {"lr": 1e-5}}),
                            trials=2, out=tmp_path / "run").path  # fmt: skip
    assert "Risk of the final model" not in write_report(run).read_text(encoding="utf-8")
    certified(run)
    assert "Risk of the final model" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""),
        ({"settings": 12, "confidence": 0.9}, " --confidence 0.9 --settings 12"),
        ({"output_noise": 0.25}, " --output-noise 0.25"),
    ],
)
def test_the_command_has_the_options(run: Path, options: dict[str, float], words: str) -> None:
    certificates = certified(run, **options)
    command = stored.command(run, certificates)
    assert command == f"fedmuon certify {run}{words}" and command in done("show", run)
    (run / stored.FILE).unlink()
    done(*command.split()[1:])
    assert stored.current(run) == certificates


def test_certificates_read_back_unchanged(run: Path) -> None:
    assert stored.current(run) is None
    certificates = certified(run, settings=3)
    assert stored.current(run) == certificates != certified(run)
    assert stored.current(run) == certified(run)  # the latest ones


def test_a_changed_run_has_no_certificates(run: Path, tmp_path: Path) -> None:
    certified(run, settings=7)
    other = tmp_path / "other"
    execute(small({**PRIVATE, "federation": {"seed": 5}}), other)
    shutil.copy(run / stored.FILE, other)
    content = done("show", other)
    assert "the run has changed" in content and "Risk of the final model" not in content
    assert f"fedmuon certify {other} --settings 7" in content  # the same options
    assert not json.loads(done("show", other, "--json"))["certificates"]
    announce(run, {"neighbours.csv": b"moved"})  # a violated certificate would change the rows
    assert stored.current(run) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"check": 1}', "\0", "[" * 100_000])
def test_a_damaged_file_is_not_shown(run: Path, content: str) -> None:
    (run / stored.FILE).write_text(content)
    assert "certificates.json is damaged" in done("show", run)


def test_a_changed_number_is_noticed(run: Path) -> None:
    certified(run)
    text = (run / stored.FILE).read_text(encoding="utf-8")
    content = json.loads(text)
    content["certificates"]["rows"][0]["value"] /= 2
    (run / stored.FILE).write_text(json.dumps(content), encoding="utf-8")
    assert stored.read(run) == stored.StoredCertificates(None, stored.DAMAGED)
    (run / stored.FILE).write_text(json.dumps(json.loads(text)), encoding="utf-8")
    assert stored.current(run) is not None  # spaces do not matter


def test_another_version_computes_them_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certified(run)
    monkeypatch.setattr(stored, "version", lambda name: "99.0")
    assert stored.current(run) is None and "this is fedmuon 99.0" in done("show", run)


def test_a_folder_that_cannot_be_written_still_gets_its_rows(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, content: bytes) -> None:
        raise fedmuon.InputError(f"cannot write {path}")

    monkeypatch.setattr(stored, "write_bytes", fail)
    found = CliRunner().invoke(app, ["certify", str(run)])
    assert found.exit_code == 0 and "Clopper" in found.stdout
    assert "not stored: cannot write" in " ".join(found.stderr.split())
    assert certified(run).rows


def test_a_run_with_python_objects_is_certified_in_python(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    result = fedmuon.run(
        {"federation": {"clients": 2, "rounds": 1}, "local": {"recipe": "fedavg"}},
        data=(rng.standard_normal((60, 4)), rng.integers(0, 3, 60)),
        test=(rng.standard_normal((20, 4)), rng.integers(0, 3, 20)),
        out=tmp_path / "run",
    )
    fedmuon.certify(result, settings=2)
    words = "fedmuon.certify(result, settings=2) in Python, with the result of fedmuon.run"
    assert words in done("show", result.path)
    with pytest.raises(fedmuon.InputError, match=r"call fedmuon.certify\(result\) .* resume=True"):
        fedmuon.certify(result.path)


def test_show_loads_no_torch(run: Path) -> None:
    certified(run)
    script = (
        "import sys; from typer.testing import CliRunner; from fedmuon.experiments.cli import app; "
        f"result = CliRunner().invoke(app, ['show', {str(run)!r}]); "
        "assert 'Risk of the final' in result.output; "
        "print({'torch', 'numpy', 'matplotlib'} & {*sys.modules})"
    )
    words = [sys.executable, "-c", script]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == "set()\n"
