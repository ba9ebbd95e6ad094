"""Certificates as LaTeX tables."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import small
from test_certify import PRIVATE
from typer.testing import CliRunner

import fedmuon
from fedmuon.config.load import dump
from fedmuon.core.errors import InputError
from fedmuon.experiments.certifying import latex
from fedmuon.experiments.certifying.groups import GroupCertificate, GroupCertificates
from fedmuon.experiments.certifying.planned import plan
from fedmuon.experiments.certifying.rows import RiskCertificate, RiskCertificates
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute

ODD = "a_b & 50% {x}^~#$\\ X⁰"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    execute(small(PRIVATE), folder)
    return folder


def tables(run: Path) -> list[str]:
    """One table of each kind, with odd signs in names."""
    row = RiskCertificate(ODD, ODD, "certified", 0.25, 0.125, 0.9, method=ODD)
    odd = RiskCertificates([row], {"error": 0.1}, {}, 10, 5, 3, 0.9)
    group = GroupCertificate("held-out samples", ODD, 12, 0.1, 0.4)
    groups = GroupCertificates("class", [group], {}, 0.9, 2, {"held-out samples": 1}, {}, [])
    return [
        latex.of_run(fedmuon.certify(run)),
        latex.of_groups(fedmuon.certify_groups(run, per="class")),
        latex.of_plan(plan(small(PRIVATE))),
        latex.of_run(odd),
        latex.of_groups(groups),
    ]


def test_every_special_sign_is_escaped(run: Path) -> None:
    for text in tables(run):
        assert text.isascii()
        bare = re.sub(r"\\.", "", text.replace(r"\\", ""))
        assert not set("#%") & set(bare) and bare.count("$") % 2 == 0
        assert all(
            line.count(" & ") == text.splitlines()[6].count(" & ")
            for line in text.splitlines()
            if line.endswith(r" \\")
        )


def test_each_limit_has_a_line_and_refused_rows_have_none(run: Path) -> None:
    certificates = fedmuon.certify(run)
    text = latex.of_run(certificates)
    limits = [row.value for row in certificates.rows if row.value is not None]
    lines = [line for line in text.splitlines() if line.endswith(r" \\")][1:]
    assert len(lines) == len(limits) < len(certificates.rows)
    for line, limit in zip(lines, limits, strict=True):
        shown = float(line.rpartition("&")[2].strip(r" \$"))
        assert limit <= shown <= limit * (1 + 1e-3)  # rounded up
    assert "with probability 0.95." in text and "refused" not in text
    several = latex.of_run(fedmuon.certify(run, settings=12))
    assert "probability 0.95 for all 12 settings together." in several


def test_without_limits_there_is_no_table() -> None:
    refused = RiskCertificate("stability", "loss", "refused", refusal="no ball.")
    with pytest.raises(InputError, match=r"no limit to write: no ball\.$"):
        latex.of_run(RiskCertificates([refused], {}, {}, 10, 0, 1, 0.95))


def test_the_command_writes_the_table(run: Path, tmp_path: Path) -> None:
    file, config = tmp_path / "a.tex", tmp_path / "a.toml"
    config.write_text(dump(small(PRIVATE)), encoding="utf-8")
    for words in ([str(run)], [str(run), "--per", "class"], ["--plan", str(config)]):
        done = CliRunner().invoke(app, ["certify", *words, "--latex", str(file)])
        assert done.exit_code == 0 and str(file) in done.output.replace("\n", "")
        assert file.read_text(encoding="utf-8").startswith("\\begin{table}")
    done = CliRunner().invoke(app, ["certify", str(run), "--latex", "a.txt"])
    assert isinstance(done.exception, InputError) and ".tex" in str(done.exception)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_the_tables_compile(run: Path, tmp_path: Path) -> None:
    head = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    content = f"{head}\n{''.join(tables(run))}\n\\end{{document}}\n"
    (tmp_path / "a.tex").write_text(content, encoding="utf-8")
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True).returncode == 0
