"""A run without `out` lies in a temporary folder, which goes with its last result or with Python;
`Result.save` keeps a copy."""

import copy
import dataclasses
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import quick
from cut_off import interrupted

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.core.files import Temporary
from fedmuon.experiments import api
from fedmuon.experiments.results import Result

SMALL = {
    "data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
    "federation": {"clients": 3, "per-round": 2, "rounds": 1},
    "local": {"steps": 1},
    "stability": {"trials": 2},
}


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Let each `gc.collect` look only at objects of these tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, with none of other tests' results among them."""
    found = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


def held(place: Path) -> list[str]:
    gc.collect()
    return sorted(one.name for one in place.iterdir())


@pytest.mark.parametrize("call", [fedmuon.run, fedmuon.stability, fedmuon.plan])
def test_a_call_leaves_nothing_when_its_result_is_gone(call, place: Path) -> None:
    result = call(SMALL)
    if isinstance(result, Result):
        assert held(place) == [result.path.name] and result.summary["rounds"] == 1
    del result
    assert held(place) == []


def test_copies_and_comparisons_keep_the_folder_and_what_was_pickled_does_not(place: Path) -> None:
    result = fedmuon.run(SMALL)
    others: list[Any] = [copy.copy(result), copy.deepcopy(result), dataclasses.replace(result)]
    others.append(fedmuon.compare({"a": [result]}))
    path = result.path
    assert others[:3] == [result] * 3
    del result
    pickled = pickle.loads(pickle.dumps(others[0]))  # this one keeps nothing, nor removes it
    assert pickled == others[0] and pickled.temporary is None
    del pickled
    while others:
        gc.collect()
        assert path.is_dir()
        others.pop()
    gc.collect()
    assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_the_process_removes_nothing() -> None:
    one = [Temporary()]
    path = one[0].path
    child = multiprocessing.get_context("fork").Process(target=one.clear)
    child.start()
    child.join()
    assert child.exitcode == 0 and path.is_dir()
    one.clear()
    assert not path.exists()


def test_the_end_of_python_removes_it(place: Path) -> None:
    held_by = "from fedmuon.core.files import Temporary; held = Temporary()"
    program = f"{held_by}; print(held.path.is_dir())"
    environment = os.environ | {"TMPDIR": str(place)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert done.stdout == b"True\n" and held(place) == []


@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGHUP], [signal.SIGTERM]))
def test_a_signal_that_ends_python_removes_it(place: Path, number: signal.Signals) -> None:
    program = (
        f"import os, signal, time; signal.signal({number}, signal.SIG_DFL); "  # nohup ignores it
        "from fedmuon.core.files import Temporary; kept = Temporary(); "
        f"print(kept.path.is_dir(), flush=True); os.kill(os.getpid(), {number}); time.sleep(10)"
    )
    environment = os.environ | {"TMPDIR": str(place)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert (done.stdout, done.returncode) == (b"True\n", -number) and held(place) == []
    # negative control: nothing can remove the folder of a process that is killed with kill -9
    program = program.replace(f", {number})", ", 9)")
    subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert len(held(place)) == 1


def test_a_handler_of_the_program_stays(place: Path) -> None:
    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        kept = Temporary()
        assert signal.getsignal(signal.SIGTERM) is own and kept.path.is_dir()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_that_was_broken_off_can_be_resumed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "BROKEN_OFF", broken_off := [])
    with pytest.raises(KeyboardInterrupt):
        fedmuon.run(SMALL, callbacks=[interrupted])
    assert held(place) == [one.path.name for one in broken_off]
    assert fedmuon.run(out=broken_off[0].path, resume=True).summary["rounds"] == 1
    broken_off.clear()
    with pytest.raises(InputError, match="recipe"):
        fedmuon.run(SMALL, recipe="none")
    assert held(place) == [] and not broken_off


def test_a_saved_result_lies_where_it_was_saved(place: Path, tmp_path: Path) -> None:
    result = fedmuon.stability(SMALL)
    before, files = result.path, {one.name: one.read_bytes() for one in result.path.iterdir()}
    assert result.save(tmp_path / "new" / "kept") is result
    assert result.path == tmp_path / "new" / "kept" and result.neighbours
    assert {one.name: one.read_bytes() for one in result.path.iterdir()} == files
    assert held(place) == [] and not before.exists()
    assert held(tmp_path / "new") == ["kept"]
    again = Result(result.path)
    assert again.summary == result.summary
    again.save(tmp_path / "more")  # of a folder that stays
    assert result.path.is_dir() and again.path != result.path
    (tmp_path / "plain").mkdir()
    assert again.path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_nothing_is_saved_over_what_is_there_or_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fedmuon.run(SMALL)
    before = result.path
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for taken in (tmp_path, tmp_path / "file", tmp_path / "nowhere", before):
        with pytest.raises(InputError, match=r"exists: choose another path"):
            result.save(taken)
    with pytest.raises(InputError, match="lies inside the run folder"):
        result.save(before / "copy")
    with pytest.raises(InputError, match="cannot write"):
        result.save(tmp_path / "file" / "below")

    def fails(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copy2", fails)
    with pytest.raises(InputError, match="No space left"):
        result.save(tmp_path / "kept")
    assert result.path == before and result.path.is_dir()
    assert held(tmp_path) == ["file", "nowhere"]
