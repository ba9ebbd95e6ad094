"""What is pinned has hashes, what is built holds what it should, whoever builds it."""

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packages import apart, archives, audit, licences, pins
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


def without_hash(files: dict[str, Pins]) -> None:
    files["dev"]["six"] = replace(files["dev"]["six"], hashes=())


def missing(files: dict[str, Pins]) -> None:
    del files["bench"]["pfl"]


def added(files: dict[str, Pins]) -> None:
    files["dev"]["unheard-of"] = Pin("unheard-of", "1.0", hashes=("0" * 64,))


def another_version(files: dict[str, Pins]) -> None:
    files["dev"]["six"] = replace(files["dev"]["six"], version="1.16.0")


def twice(files: dict[str, Pins]) -> None:
    files["bench"]["six"] = files["dev"]["six"]


@pytest.mark.parametrize(("change", "said"), [
    (without_hash, "six in dev has no hash."),
    (missing, "pfl has no hashes."),
    (added, "unheard-of in dev is not in constraints.txt."),
    (another_version, "six in dev has another version than in constraints.txt."),
    (twice, "six is in dev and in bench."),
])  # fmt: skip
def test_a_wrong_pin_is_seen(change: Callable[[dict[str, Pins]], None], said: str) -> None:
    constraints, files = all_pins()
    change(files)
    assert pins.flaws(constraints, files) == [said]


@pytest.mark.parametrize("line", ["six>=1", "six", "-e .", "six==1 --hash=sha256:ab", "a==1\nA==1"])
def test_what_is_no_pin_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="pin"):
        pins.parse(line)


def test_pins_are_read_as_they_are_written() -> None:
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


@pytest.mark.slow
def test_the_wheel_holds_the_rooms_and_nothing_else(built: dict[str, Path]) -> None:
    rooms = archives.installed(archives.tracked(*archives.ROOMS))
    held = archives.names(built["wheel"])
    assert archives.differences(held, rooms) == []
    suite = "fedmuon/experiments/suites/A1.toml"
    report = "fedmuon/analysis/report/assets/"
    page = {f"fedmuon/experiments/inspect/assets/page.{kind}" for kind in ("html", "css", "js")}
    assert {suite, "fedmuon/py.typed", "fedmuon/experiments/project/model.py.tmpl", *page} <= held
    report_files = "page.css", "glossary.toml", "captions.toml", "report.html", "overlay.html"
    assert {f"{report}{file}" for file in report_files} <= held
    assert {name.partition("/")[0] for name in held if ".dist-info/" not in name} == {"fedmuon"}
    stray = held - {suite} | {"tests/conftest.py"}
    assert archives.differences(stray, rooms) == [f"without {suite}", "with tests/conftest.py"]


@pytest.mark.slow
@pytest.mark.parametrize("editable", [
    pytest.param(False, id="wheel"),
    pytest.param(True, id="editable", marks=pytest.mark.slow),  # as the tests are run from
])  # fmt: skip
def test_one_name_is_enough(built: dict[str, Path], tmp_path: Path, editable: bool) -> None:
    """Installed, everything is found beside folders that are called as our rooms are."""
    what = ("--editable", archives.ROOT) if editable else (built["wheel"],)
    bins = apart.environment(tmp_path / "home", *what)
    folder = apart.folder_of_others(tmp_path / "mine")
    (folder / "use.py").write_text(apart.SCRIPT.read_text())
    lie = apart.said((bins / "python", "use.py", "inline"), folder).split()
    root = archives.ROOT if editable else tmp_path / "home"
    assert len(lie) == 5 and all(Path(place).is_relative_to(root) for place in lie)
    with pytest.raises(RuntimeError, match="the wrong analysis"):  # the control
        apart.said((bins / "python", "-c", "import analysis"), folder)
    for path in ("", "."):
        bound = apart.said((bins / "fedmuon", "bound", "--lr", "0.001", "--json"), folder, path)
        assert json.loads(bound)["status"] == "certified"
    apart.said((bins / "fedmuon", "new", "demo"), folder, ".")
    assert (folder / "demo" / "pyproject.toml").exists()


def test_the_sdist_holds_the_tests_and_the_pins(built: dict[str, Path]) -> None:
    held = archives.names(built["sdist"])
    assert archives.tracked("tests", "benchmarks", "requirements", *archives.ROOMS) <= held
    assert {"Makefile", "constraints.txt", "pyproject.toml", "LICENSE", "README.md"} <= held
    assert not any(name.startswith(("runs/", ".ci/", ".venv/")) for name in held)


@pytest.mark.slow
def test_archives_are_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    """Built a second time, and from the sdist, with the type checker's links in it, instead of the
    tree."""
    tree = archives.unpack(built["sdist"], tmp_path)
    (tree / ".house").mkdir()
    for room in archives.ROOMS:
        (tree / ".house" / room).symlink_to(f"../{room}")
    for name, source in (("again", archives.ROOT), ("unpacked", tree)):
        for target in ("sdist", "wheel"):
            second = archives.build(source, tmp_path / name, target)
            assert second.read_bytes() == built[target].read_bytes()


def test_every_licence_is_accepted(judged: dict[str, str]) -> None:
    assert licences.refused(judged) == []
    assert {"torch", "flwr", "ray", "numpy", "certifi"} <= set(judged) and len(judged) > 80


@pytest.mark.parametrize("terms", [
    "GPL-3.0-only",
    "AGPL-3.0-or-later",
    "MIT AND GPL-2.0-only",
    "Apache-2.0 WITH Unheard-exception",
    "LicenseRef-Ours",
    "unknown",
    "",
])  # fmt: skip
def test_a_licence_that_nobody_accepted_is_refused(terms: str) -> None:
    (said,) = licences.refused({"mit-one": "MIT", "other": terms})
    assert said.startswith("other comes under ")


@pytest.mark.parametrize("terms", ["GPL-3.0-only OR MIT", "(MIT AND PSF-2.0)", "MPL-2.0"])
def test_a_choice_of_licences_is_enough(terms: str) -> None:
    assert licences.refused({"one": terms}) == []


def test_the_page_names_every_dependency_and_its_version(judged: dict[str, str]) -> None:
    """docs/dependencies.md has what `python -m packages.licences` prints."""
    page = (pins.ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w.-]+) \| (\d[\w.]*) \| ", page, re.MULTILINE))
    constraints = all_pins()[0]
    assert {name: pin.version for name, pin in constraints.items() if name in rows} == rows
    assert set(judged) <= set(rows)


def said(**of: object) -> dict[str, list[dict[str, object]]]:
    """What pip-audit writes of one package."""
    return {"dependencies": [{"name": "six", **of}]}


def test_no_answer_is_not_called_sound() -> None:
    flaw = {"id": "CVE-1", "fix_versions": ["1.18"]}
    assert audit.verdict(said(version="1.17.0", vulns=[]))[0] == 0
    assert audit.verdict(said(version="1.17.0", vulns=[flaw])) == (
        1,
        "six 1.17.0 has CVE-1, mended in 1.18.",
    )
    assert audit.verdict(said(skip_reason="not found"))[0] == audit.verdict(None)[0] == 2
