"""What is pinned has hashes, what is built holds what it should, and set-up says why it fails."""

import ast
import importlib.util
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packages import archives, audit, licences, pins
from packages.pins import Pin, Pins


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("archives")
    return {
        target: archives.build(archives.ROOT, folder / target, target)
        for target in ("sdist", "wheel")
    }


@pytest.fixture(scope="module")
def judged() -> dict[str, str]:
    return licences.judged()


def all_pins() -> tuple[Pins, dict[str, Pins]]:
    constraints = pins.parse(pins.CONSTRAINTS.read_text(encoding="utf-8"))
    return constraints, {name: pins.read(name) for name in pins.NAMES}


def test_every_pin_has_hashes_and_every_hash_a_pin() -> None:
    constraints, files = all_pins()
    assert pins.flaws(constraints, files) == []
    assert len(constraints) > 100 and set(files["torch"]) == {"torch"}
    assert not any(name.startswith(pins.CUDA) for name in files["dev"])  # not for processors alone


@pytest.mark.parametrize(("change", "said"), [
    (lambda dev, bench: dev.update(six=replace(dev["six"], hashes=())), "six in dev has no hash."),
    (lambda dev, bench: bench.pop("pfl"), "pfl has no hashes."),
    (lambda dev, bench: dev.update(odd=Pin("odd", "1.0", hashes=("0" * 64,))),
     "odd in dev is not in constraints.txt."),
    (lambda dev, bench: dev.update(six=replace(dev["six"], version="1.16.0")),
     "six in dev has another version than in constraints.txt."),
    (lambda dev, bench: bench.update(six=dev["six"]), "six is in dev and in bench."),
])  # fmt: skip
def test_a_wrong_pin_is_seen(change: Callable[[Pins, Pins], None], said: str) -> None:
    constraints, files = all_pins()
    change(files["dev"], files["bench"])
    assert pins.flaws(constraints, files) == [said]


def test_pins_are_read_as_they_are_written() -> None:
    for line in ("six>=1", "six", "-e .", "six==1 --hash=sha256:ab", "a==1\nA==1"):
        with pytest.raises(ValueError, match="pin"):
            pins.parse(line)
    pin = Pin("nvidia-nvtx", "13.0.85", "sys_platform == 'linux'", ("ab" * 32, "cd" * 32))
    assert pins.parse(f"# why\n{pin}\n") == {"nvidia-nvtx": pin}


UNPINNED = ("hub", "mlflow", "tensorboard", "wandb")  # services of others, taken as they are


def test_every_requirement_of_ours_is_pinned() -> None:
    project = tomllib.loads((pins.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [
        one for name in extras if name not in UNPINNED for one in extras[name]
    ]
    named = {pins.normal(one.partition("[")[0].split(">")[0].split("=")[0]) for one in wanted}
    assert named - {"fedmuon"} <= set(all_pins()[0])


def test_the_extra_llm_reads_gguf_files() -> None:
    """transformers 5 needs both packages, and does not require them itself."""
    project = tomllib.loads((pins.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {one.partition(">")[0] for one in project["optional-dependencies"]["llm"]}
    assert names == {"fedmuon[lm]", "accelerate", "gguf"}


def test_no_text_installs_an_extra_from_a_registry() -> None:
    """fedmuon is in no package registry, so the extras are installed from a clone."""
    folders = "analysis", "clients", "docs", "examples", "experiments", "fedmuon", "server"
    paths = [path for folder in folders for path in (pins.ROOT / folder).rglob("*")]
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in (*paths, pins.ROOT / "README.md")
        if path.suffix in {".md", ".py", ".tmpl"} and path.is_file()
    }
    assert len(texts) > 300 and [str(p) for p, text in texts.items() if "'fedmuon[" in text] == []


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(built: dict[str, Path]) -> None:
    packages = archives.installed(archives.tracked(*archives.PACKAGES))
    held = archives.names(built["wheel"])
    assert archives.differences(held, packages) == []
    suite = "fedmuon/experiments/suites/A1.toml"
    report = "fedmuon/analysis/report/assets/"
    page = {f"fedmuon/experiments/inspect/assets/page.{kind}" for kind in ("html", "css", "js")}
    assert {suite, "fedmuon/py.typed", "fedmuon/experiments/project/model.py.tmpl", *page} <= held
    report_files = "page.css", "glossary.toml", "captions.toml", "report.html", "overlay.html"
    assert {f"{report}{file}" for file in report_files} <= held
    assert {name.partition("/")[0] for name in held if ".dist-info/" not in name} == {"fedmuon"}
    stray = held - {suite} | {"tests/conftest.py"}
    assert archives.differences(stray, packages) == [f"without {suite}", "with tests/conftest.py"]


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True])  # the tests run from an editable one
def test_one_name_is_enough(built: dict[str, Path], tmp_path: Path, editable: bool) -> None:
    """Installed, everything is found beside folders that are called as our packages are."""
    what = ("--editable", archives.ROOT) if editable else (built["wheel"],)
    bins = archives.environment(tmp_path / "home", *what)
    folder = archives.folder_of_others(tmp_path / "mine")
    (folder / "use.py").write_text(archives.SCRIPT.read_text())
    lie = archives.said((bins / "python", "use.py", "inline"), folder).split()
    root = archives.ROOT if editable else tmp_path / "home"
    assert len(lie) == 5 and all(Path(place).is_relative_to(root) for place in lie)
    with pytest.raises(RuntimeError, match="the wrong analysis"):  # the control
        archives.said((bins / "python", "-c", "import analysis"), folder)
    for path in ("", "."):
        bound = archives.said((bins / "fedmuon", "bound", "--lr", "0.001", "--json"), folder, path)
        assert json.loads(bound)["status"] == "certified"
    archives.said((bins / "fedmuon", "new", "demo"), folder, ".")
    assert (folder / "demo" / "pyproject.toml").exists()


def test_the_sdist_holds_the_tests_and_the_pins(built: dict[str, Path]) -> None:
    held = archives.names(built["sdist"])
    assert archives.tracked("tests", "benchmarks", "requirements", *archives.PACKAGES) <= held
    assert {"Makefile", "constraints.txt", "pyproject.toml", "LICENSE", "README.md"} <= held
    assert not any(name.startswith(("runs/", ".ci/", ".venv/")) for name in held)


@pytest.mark.slow
def test_archives_are_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    """Built a second time, and from the sdist, with the type checker's links in it, instead of the
    tree."""
    tree = archives.unpack(built["sdist"], tmp_path)
    (tree / ".layout").mkdir()
    for package in archives.PACKAGES:
        (tree / ".layout" / package).symlink_to(f"../{package}")
    for name, source in (("again", archives.ROOT), ("unpacked", tree)):
        for target in ("sdist", "wheel"):
            second = archives.build(source, tmp_path / name, target)
            assert second.read_bytes() == built[target].read_bytes()


def test_every_licence_is_accepted(judged: dict[str, str]) -> None:
    assert licences.refused(judged) == []
    assert {"torch", "flwr", "ray", "numpy", "certifi"} <= set(judged) and len(judged) > 80


def test_a_licence_is_accepted_by_name_or_by_choice() -> None:
    for terms in ("GPL-3.0-only", "AGPL-3.0-or-later", "MIT AND GPL-2.0-only", "LicenseRef-Ours",
                  "Apache-2.0 WITH Unheard-exception", "unknown", ""):  # fmt: skip
        (said,) = licences.refused({"mit-one": "MIT", "other": terms})
        assert said.startswith("other comes under "), terms
    for terms in ("GPL-3.0-only OR MIT", "(MIT AND PSF-2.0)", "MPL-2.0"):
        assert licences.refused({"one": terms}) == []


def test_the_page_names_every_dependency_and_its_version(judged: dict[str, str]) -> None:
    """docs/dependencies.md has what `python -m packages.licences` prints."""
    page = (pins.ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w.-]+) \| (\d[\w.]*) \| ", page, re.MULTILINE))
    constraints = all_pins()[0]
    assert {name: pin.version for name, pin in constraints.items() if name in rows} == rows
    assert set(judged) <= set(rows)


def said(**of: object) -> dict[str, list[dict[str, object]]]:
    return {"dependencies": [{"name": "six", **of}]}


def test_no_answer_is_not_called_sound() -> None:
    flaw = {"id": "CVE-1", "fix_versions": ["1.18"]}
    assert audit.verdict(said(version="1.17.0", vulns=[]))[0] == 0
    text = "six 1.17.0 has CVE-1, fixed in 1.18."
    assert audit.verdict(said(version="1.17.0", vulns=[flaw])) == (1, text)
    assert audit.verdict(said(skip_reason="not found"))[0] == audit.verdict(None)[0] == 2


# Set-up says what it does, and why it fails in one line.

SCRIPT = Path(__file__).resolve().parents[2] / "requirements" / "install.py"


def load() -> Any:
    """The script as a module; it lies outside the packages, since it runs before them."""
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load()

UNREACHABLE = """WARNING: Retrying after connection broken by 'NewConnectionError(...)'
ERROR: Could not find a version that satisfies the requirement six (from versions: none)
ERROR: No matching distribution found for six"""


@pytest.mark.parametrize(("output", "said"), [
    (UNREACHABLE, "the package registry cannot be reached. Check the network"),
    ("ERROR: No matching distribution found for six==9", "does not have six==9, which is pinned"),
    ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Expected aa\n  Got bb", "Got bb"),
    ("ERROR: [Errno 28] No space left on device", "the disk is full. The environment needs 3 GB"),
    ("line\n" * 99 + "ERROR: of another kind", "ERROR: of another kind"),
])  # fmt: skip
def test_set_up_says_why_it_fails(output: str, said: str) -> None:
    text = install.reason(output)
    assert said in text and text.count("\n") < 20


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_set_up_names_a_python_that_would_do(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.sys, "version_info", version)
    monkeypatch.setattr(
        install.shutil, "which", lambda name: name if name == "python3.12" else None
    )
    with pytest.raises(install.FailedError, match=r"Run `make run PYTHON=python3\.12`"):
        install.check_python()
    monkeypatch.setattr(install.shutil, "which", lambda _: None)
    with pytest.raises(install.FailedError, match="Install one of them and run"):
        install.check_python()


@pytest.mark.slow
def test_set_up_ends_with_one_line_where_the_registry_is_out_of_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("INDEX_URL", "http://127.0.0.1:9/"), ("FIND_LINKS", "")):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(install, "VERIFIED", (*install.VERIFIED, "--retries", "0"))
    monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path), "docs"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(SystemExit) as ended:
        install.main()
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and "Set-up took" not in out
    assert f"Downloading and verifying {install.count_packages('docs')} packages" in out
    assert error.startswith("Set-up failed: the package registry cannot be reached.")
    assert error.count("\n") == 1


def test_an_old_python_can_read_the_set_up() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 7))
    with pytest.raises(SyntaxError):  # the control
        ast.parse("match 1:\n    case 1:\n        pass", feature_version=(3, 7))
