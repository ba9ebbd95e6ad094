"""The index of runs: with it, commands print what they print without it, whatever changed."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import private, small
from matplotlib.figure import Figure
from typer.testing import CliRunner

from fedmuon.analysis.report import style
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.locks import LOCK
from fedmuon.experiments.cli import app
from fedmuon.experiments.inspect import index, status
from fedmuon.experiments.inspect.listing import comparison
from fedmuon.experiments.report import write_report
from fedmuon.experiments.run import execute
from fedmuon.runs import directory

COUNT = index.FEWEST + 2


@pytest.fixture(autouse=True)
def curves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a report hold the points of their curves, and are not rendered, which takes nearly
    all the time."""

    def image(figure: Figure, kind: str) -> bytes:
        curves = [line.get_xydata() for axes in figure.axes for line in axes.lines]
        points = b"".join(np.ascontiguousarray(curve).tobytes() for curve in curves)
        return f'<svg id="{hashlib.sha256(points).hexdigest()}"/>'.encode()

    monkeypatch.setattr(style, "image", image)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    execute(small(), folder)
    return folder


@pytest.fixture
def runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of copies of one run, and an empty cache folder."""
    monkeypatch.setattr(index, "SETTLED", 0)
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path / "cache"))
    for number in range(COUNT):
        shutil.copytree(run, tmp_path / "runs" / f"r{number:02}")
    return tmp_path / "runs"


def outputs(runs: Path) -> list[str]:
    """What the commands print, and the page of the report without its time-dependent parts."""
    found = []
    for command in ("ls", "compare"):
        done = CliRunner().invoke(app, [command, str(runs)], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output + str(done.exception)
        found.append(done.output)
    said: list[str] = []
    found.append(write_report(runs, said.append).read_text("utf-8"))
    for name in ("report.html", "claims.json", "figures", "tables"):
        place = runs / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    return [*found, *said]


def without_index(runs: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    with monkeypatch.context() as context:
        context.setenv("FEDMUON_CACHE", os.devnull)  # no folder can be created below it
        return outputs(runs)


def recalled(runs: Path) -> list[bool]:
    return [one.recalled for one in index.runs_below(runs)]


def edited(file: Path) -> None:
    """Change one byte, but neither the size nor the time of the last change."""
    before, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def unfinished(run: Path) -> None:
    for name in ("summary.json", "model.safetensors", "momentum.safetensors"):
        (run / name).unlink()


def running(run: Path) -> None:
    unfinished(run)
    (run / LOCK).write_text(f"process {os.getpid()} on {os.uname().nodename} (fedmuon run)")


def replaced(run: Path) -> None:
    """Put a run with another seed in the place of the run."""
    shutil.rmtree(run)
    execute(small(federation={"seed": 4}), run)


CHANGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda run: None,
    "touched": lambda run: (run / "config.toml").touch(),
    "deleted": shutil.rmtree,
    "added": lambda run: shutil.copytree(run, run.with_name("new")),
    "renamed": lambda run: run.rename(run.with_name("new")),
    "replaced": replaced,
    "unfinished": unfinished,
    "running": running,
    "config edited": lambda run: edited(run / "config.toml"),
    "summary edited": lambda run: edited(run / "summary.json"),
    "records edited": lambda run: edited(run / "rounds.jsonl"),
    "model edited": lambda run: edited(run / "model.safetensors"),
    "file missing": lambda run: (run / "partition.npz").unlink(),
    "checksums missing": lambda run: (run / "SHA256SUMS").unlink(),
}  # fmt: skip


QUICK = ("summary edited", "running")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, change in CHANGES.items()
    ],
)
def test_with_an_index_the_output_is_the_same_after_every_change(
    runs: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    assert recalled(runs) == [False] * COUNT and recalled(runs) == [True] * COUNT
    change(runs / "r07")
    expected = without_index(runs, monkeypatch)
    assert outputs(runs) == expected  # some runs are not in the index
    assert outputs(runs) == expected  # it is complete
    assert sum(recalled(runs)) >= COUNT - 1


def test_an_index_that_ignores_the_times_of_files_fails_the_same_comparison(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_key", lambda files: str(sorted(one[0] for one in files)))
    assert recalled(runs) == [False] * COUNT
    edited(runs / "r07/summary.json")
    assert recalled(runs) == [True] * COUNT
    assert outputs(runs) != without_index(runs, monkeypatch)


def test_an_entry_with_another_time_or_of_another_run_is_not_used(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recalled(runs)
    entries = index._read(index.place(runs))
    known = dict(entries["r00"])
    entries["r00"] |= {"files": entries["r01"]["files"], "totals": known["totals"] | {"rounds": 99}}
    index._write(index.place(runs), entries)
    assert recalled(runs) == [False] + [True] * (COUNT - 1)
    assert index._read(index.place(runs))["r00"] == known
    # A file that has just changed may change again within the resolution of its time.
    monkeypatch.setattr(index, "SETTLED", 10**12)
    (runs / "r00/config.toml").touch()
    assert recalled(runs) == recalled(runs) == [False] + [True] * (COUNT - 1)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def in_its_place(file: Path) -> None:
    file.unlink()
    (file / "folder").mkdir(parents=True)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": cut,
    "flipped": edited,
    "no text": lambda file: file.write_bytes(b"\xff\x00\n\xff"),
    "named pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "folder": in_its_place,
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_index_only_costs_time(
    runs: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    recalled(runs)
    damage(index.place(runs))
    expected = without_index(runs, monkeypatch)
    assert recalled(runs) == [False] * COUNT
    assert outputs(runs) == expected


def test_an_index_of_another_version_is_not_used(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recalled(runs) == [False] * COUNT
    monkeypatch.setattr(index, "_maker", lambda: "another version")
    assert recalled(runs) == [False] * COUNT and recalled(runs) == [True] * COUNT


def test_a_brief_check_does_not_vouch_for_large_files(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ls` reads only a part of a large file, but `compare` reads all of it."""
    for module in (directory, index):
        monkeypatch.setattr(module, "LARGE", 10)
    edited(runs / "r03/model.safetensors")
    assert recalled(runs) == [False] * COUNT and recalled(runs) == [True] * COUNT
    (why,) = comparison({"": [runs]}).left_out
    assert "r03/model.safetensors does not match its checksum" in why
    assert recalled(runs) == [True] * 3 + [False] + [True] * (COUNT - 4)


def test_curves_of_recalled_runs_are_read_when_they_are_needed(runs: Path) -> None:
    first = comparison({"": [runs]})
    again = comparison({"": [runs]})
    assert first == again and [*first.curves] == [*again.curves] and len(again.curves) == COUNT
    name = next(iter(again.curves))
    assert again.curves[name][0][-1]["train_loss"] > 0
    third = comparison({"": [runs]})
    (third.folders[name][0] / "rounds.jsonl").unlink()
    with pytest.raises(ValueError, match="changed while it was read"):
        _ = third.curves[name]


def test_a_run_that_is_removed_while_runs_are_listed_is_damaged(runs: Path) -> None:
    folders = [*status.folders_below(runs)]
    shutil.rmtree(runs / "r01")
    found = index.statuses(folders, brief=True)
    assert [one.path.name for one in found if one.damage] == ["r01"]


def test_few_runs_have_no_index(runs: Path) -> None:
    for number in range(index.FEWEST - 1, COUNT):
        shutil.rmtree(runs / f"r{number:02}")
    assert recalled(runs) == recalled(runs) == [False] * (index.FEWEST - 1)
    assert not index.place(runs).exists()


def test_a_private_run_is_not_in_the_index(runs: Path) -> None:
    shutil.rmtree(runs / "r04")
    execute(private(1, noise=1.0), runs / "r04")
    assert recalled(runs) == [False] * COUNT
    assert recalled(runs) == [number != 4 for number in range(COUNT)]
    assert "r04" not in index.place(runs).read_text()


def test_without_a_cache_folder_there_is_no_index(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without_index(runs, monkeypatch)
    monkeypatch.delenv("FEDMUON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nouser/x")
    assert outputs(runs) == expected
    assert recalled(runs) == recalled(runs) == [False] * COUNT


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_one_of_many_paths_without_a_run_is_rejected(runs: Path, kind: str) -> None:
    if kind == "file":
        (runs / "other").write_text("text")
    paths = [*sorted(one for one in runs.iterdir() if one.is_dir()), runs / "other"]
    with pytest.raises(InputError) as few:
        comparison({"": paths[-2:]})
    for _ in range(2):  # without an index, and with one
        with pytest.raises(InputError) as many:
            comparison({"": paths})
        assert str(many.value) == str(few.value) and str(runs / "other") in str(few.value)
    done = CliRunner().invoke(app, ["compare", *map(str, paths)])
    assert isinstance(done.exception, InputError)  # the command prints it


@pytest.mark.parametrize("changes", [
    {}, {"task": {"name": "network"}, "local": {"aux-lr": 1e-3}},
    {"data": {"options": {"digest": "a", "numbers": [1, 2.5], "text": "b"}}},
    {"local": {"recipe": "dp-muon"}, "privacy": {"delta": 1e-7, "noise": 1.0, "lot": 6.0}},
])  # fmt: skip
def test_a_config_comes_back_from_the_index(changes: dict[str, dict[str, object]]) -> None:
    config = small(**changes)
    back = index._config(json.loads(json.dumps(index._changes(config))))
    assert back == config and back.to_toml() == config.to_toml()
    assert index._config({name: {} for name in Config.model_fields}) != config  # it can fail


def test_the_page_of_watch_sees_runs_that_appear_and_disappear(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "SETTLED", 0)
    for change in (lambda: None, lambda: shutil.rmtree(runs / "r01"),
                   lambda: shutil.copytree(runs / "r02", runs / "deep/er/new"),
                   lambda: (runs / "r03/config.toml").unlink(),
                   lambda: (runs / "r03/schedule.npy").unlink()):  # fmt: skip
        change()
        stored = [*status.folders_below(runs)]
        status._listings.clear()
        assert stored == [*status.folders_below(runs)]
        assert stored == sorted(
            {file.parent for name in ("config.toml", "schedule.npy") for file in runs.rglob(name)}
        )
