"""Runs of which a file was changed since they ended: whoever looks at them is told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from conftest import quick, small
from typer.testing import CliRunner

import fedmuon
from fedmuon.core import files
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.locks import held
from fedmuon.experiments.cli import app
from fedmuon.experiments.inspect.index import runs_below
from fedmuon.experiments.inspect.status import RunStatus
from fedmuon.experiments.inspect.watch import about, runs_of
from fedmuon.experiments.report import gather, write_report
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import neighbours
from fedmuon.runs.directory import FIXED

pytestmark = pytest.mark.usefixtures("undrawn")


def without_last_line(text: str) -> str:
    """Each line that is left has its own check, and agrees with it."""
    return text[: text.rindex("\n", 0, -1) + 1]


CHANGES: dict[str, Callable[[str], str]] = {
    "config.toml": lambda text: text.replace("lr = 0.05", "lr = 0.06"),
    "rounds.jsonl": without_last_line,
    "summary.json": lambda text: text.replace("5", "6", 1),
    "neighbours.csv": without_last_line,
    "bound.json": lambda text: text.replace("5", "6", 1),
}
TO_COME = "the runs on neighbouring data sets are not finished"
OF_NEIGHBOURS = ("neighbours.csv", "bound.json")


def changed(folder: Path, name: str) -> None:
    text = (folder / name).read_text()
    other = CHANGES[name](text)
    assert other != text
    (folder / name).write_text(other)


def asked(*command: str) -> Result:
    return CliRunner().invoke(app, list(command), env={"COLUMNS": "100"})


def why(*command: str) -> str:
    return str(asked(*command).exception)


def listed(folder: Path) -> dict[str, str]:
    """The state of each run, as `ls` says it."""
    rows = json.loads(asked("ls", str(folder), "--json").stdout)["runs"]
    return {one["run"]: one["state"] for one in rows}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plain runs, of two seeds, and two with neighbours."""
    root = tmp_path_factory.mktemp("changed") / "runs"
    for seed in (0, 1):
        seeded, trials = {"seed": seed}, {"trials": 2}
        execute(small(federation=seeded), root / f"plain {seed}")
        neighbours.execute(small(federation=seeded, stability=trials), root / f"near {seed}")
    return root


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(runs, tmp_path / "runs")


@pytest.mark.parametrize("name", quick(CHANGES, ["rounds.jsonl", "bound.json"]))
def test_whoever_looks_at_a_changed_run_is_told_the_file(copied: Path, name: str) -> None:
    """Of what each shows: `compare` shows nothing of neighbours."""
    folder = copied / "near 0"
    assert {*listed(copied).values()} == {"finished"}
    commands = ["show", "report", *([] if name in OF_NEIGHBOURS else ["compare"])]
    assert all(asked(one, str(folder)).exit_code == 0 for one in commands)
    changed(folder, name)
    for one in commands:
        said = why(one, str(folder))
        assert f"{folder / name} does not match its checksum in {folder / 'SHA256SUMS'}" in said
        assert "with --out" in said and "out=" not in said
    text = " ".join(asked("ls", str(copied)).stdout.split())
    assert (
        text.count("│ damaged") == 1
        and f"{folder}: damaged: {folder / name} does not match its checksum" in text
    )
    assert [run for run, state in listed(copied).items() if state == "damaged"] == ["near 0"]


@pytest.mark.parametrize("name", quick(FIXED, ["config.toml", "schedule.npy"]))
def test_whoever_looks_at_a_run_that_lacks_a_file_is_told_so(copied: Path, name: str) -> None:
    """Whether it has ended or has rounds alone; one without rounds may be about to write it."""
    folder, half = copied / "plain 0", copied / "half"
    shutil.copytree(folder, half)
    (half / "summary.json").unlink()
    for one in (folder, half):
        (one / name).unlink()
    for one in ("show", "report", "compare"):
        said = why(one, str(folder))
        assert f"{folder / name} is missing" in said or f"cannot read the config {folder}" in said
    assert f"{half / name} is missing" in why("show", str(half))
    states = listed(copied)
    damaged = {run for run, state in states.items() if state == "damaged"}
    assert damaged == {"half", "plain 0"} and len(states) == 5
    assert {about(one, copied / one)["state"] for one in damaged} == {"damaged"}
    assert len(runs_of(copied)) == 5
    said = asked("report", str(copied)).stderr
    assert str(folder / name) in said and str(half / name) in said
    if name != "config.toml":
        (half / "rounds.jsonl").write_text("")
        assert not RunStatus(half).damage


@pytest.mark.parametrize("name", ["plain 0", "near 0"])
def test_a_report_of_a_folder_leaves_out_what_is_damaged_and_says_so(
    copied: Path, name: str
) -> None:
    """On the page and in the terminal; all others are on it."""
    whole = write_report(copied).read_text(encoding="utf-8")
    assert "Left out" not in whole and len(gather(copied)) == 3
    changed(copied / name, "rounds.jsonl")
    done = asked("report", str(copied))
    assert done.exit_code == 2 and "The report is" in done.stdout
    (said,) = done.stderr.splitlines()
    assert (
        f"left out: {copied / name / 'rounds.jsonl'} does not match its checksum" in said
        and "--out" in said
    )
    page = (copied / "report.html").read_text(encoding="utf-8")
    assert (
        "Left out" in page
        and f"{copied / name / 'rounds.jsonl'} does not match its checksum" in page
    )
    assert len(gather(copied)) == (3 if name == "plain 0" else 2)
    for one in copied.iterdir():
        if one.is_dir() and (one / "rounds.jsonl").exists():
            (one / "rounds.jsonl").write_text("")
    with pytest.raises(InputError, match=r"rounds\.jsonl does not match its checksum"):
        write_report(copied)


@pytest.fixture
def begun(copied: Path) -> Path:
    """A run among others that was stopped after its first neighbours."""

    def stop(record: object) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        neighbours.execute(small(stability={"trials": 2}), copied / "begun", on_round_end=stop)
    return copied / "begun"


def told_of(folder: Path) -> tuple[str, str, str]:
    """What a report of its parent says of it: on stderr, and above and in the drawing of runs."""
    done = asked("report", str(folder.parent))
    (said,) = done.stderr.splitlines()
    page = (folder.parent / "report.html").read_text(encoding="utf-8")
    above, below = page.split("All runs</h3>")
    return said, " ".join(above.split()), below


@pytest.mark.slow
def test_a_run_whose_neighbours_are_to_come_is_unfinished_and_drawn(begun: Path) -> None:
    """Stopped, in another terminal just now, or failed; and left out only if it is damaged."""
    again = f"fedmuon stability --out {begun} --resume"
    said, above, below = told_of(begun)
    assert said == f"fedmuon: unfinished: {begun}: {TO_COME}, resume with: {again}"
    assert "Unfinished</h3>" in above and again in above and "Left out" not in above
    assert "begun" in below and ", unfinished, 8 of 8 rounds" in below
    with held(begun):
        said, above, below = told_of(begun)
    assert "is still running them. Wait until that process ends" in said and "Left out" not in above
    assert ", running, " in below
    with pytest.raises(InputError, match=f"{TO_COME}, resume with:"):
        write_report(begun)
    (begun / "failed.txt").write_text("a neighbour is not finite: lower lr")
    assert "begun: failed: a neighbour is not finite: lower lr" in told_of(begun)[0]
    changed(begun, "rounds.jsonl")
    said, above, below = told_of(begun)
    assert "left out" in said and "Unfinished" not in above and "begun" not in below


def test_a_run_with_neighbours_may_have_no_schedule_yet(begun: Path) -> None:
    """neighbours.csv is older than that."""
    for file in begun.iterdir():
        if file.name not in ("config.toml", "neighbours.csv", "SHA256SUMS"):
            file.unlink()
    said, above, below = told_of(begun)
    assert "unfinished: " in said and "Left out" not in above
    assert ", unfinished, 0 of 8 rounds" in below


def test_runs_with_neighbours_are_told_apart_by_their_folders(copied: Path) -> None:
    titles = [one.title for one in gather(copied)]
    assert titles[0].endswith("(near 0)") and titles[1].endswith("(near 1)")
    assert titles[0].removesuffix("(near 0)") == titles[1].removesuffix("(near 1)")
    assert not gather(copied / "near 0")[0].title.endswith(")")  # where there is no other
    page = write_report(copied).read_text(encoding="utf-8")
    assert f"{titles[0]}</h2>" in page and f"{titles[1]}</h2>" in page


def test_compare_refuses_a_damaged_run_by_name_and_leaves_it_out_of_a_folder(copied: Path) -> None:
    """In the words of who asks."""
    changed(copied / "plain 0", "rounds.jsonl")
    bad, good = str(copied / "plain 0"), str(copied / "plain 1")
    said = why("compare", bad, good)
    assert f"{bad}/rounds.jsonl does not match its checksum" in said and "with --out" in said
    with pytest.raises(
        InputError, match=r"rounds\.jsonl does not match its checksum .* with out=$"
    ):
        fedmuon.compare([bad, good])
    done = asked("compare", str(copied))
    (said,) = done.stderr.splitlines()
    assert done.exit_code == 0 and "plain 1" in done.stdout and "plain 0" not in done.stdout
    assert f"left out: {bad}/rounds.jsonl does not match its checksum" in said and said.endswith(
        "with --out"
    )
    found = fedmuon.compare(copied)
    (left,) = found.left_out
    assert left.endswith("with out=") and f"Left out: {left}" in str(found)
    assert bad in found._repr_html_() and not fedmuon.compare([good]).left_out


def test_compare_says_of_what_is_no_finished_run_why(tmp_path: Path) -> None:
    """No folder, no run, and one that failed, which no --resume finishes."""
    assert "does not exist. Choose a folder" in why("compare", str(tmp_path / "none"))
    assert "contains no run" in why("compare", str(tmp_path))
    (tmp_path / "config.toml").touch()
    (tmp_path / "failed.txt").write_text("the loss is not finite (round 3): lower lr")
    said = why("compare", str(tmp_path))
    assert "failed (the loss is not finite" in said and "--resume" not in said


def test_compare_says_how_to_finish_a_run_in_the_words_of_who_asks(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    assert why("compare", str(tmp_path)).endswith(
        "Finish it with --resume, or choose a finished run."
    )
    with pytest.raises(InputError, match=r"Finish it with resume=True, or choose"):
        fedmuon.compare(tmp_path)


def test_a_private_run_that_ended_is_not_run_again_for_want_of_its_summary(tmp_path: Path) -> None:
    """Its noise would be drawn anew and its epsilon spent twice; one that was broken off while it
    ended has its checkpoint, and goes on."""
    noisy = {"noise": 1.0, "bound": 1.0, "lot": 8.0}
    config, out = small(local={"recipe": "dp-sgd"}, privacy=noisy), tmp_path / "a"
    execute(config, out)
    ledger, model = ((out / name).read_bytes() for name in ("ledger.jsonl", "model.safetensors"))
    (out / "summary.json").unlink()
    said = asked("ls", str(tmp_path)).output
    assert "lost" in said and "without its summary.json" in " ".join(said.split())
    assert "--resume" not in said
    with pytest.raises(
        InputError,
        match=r"without its summary\.json\. The privacy budget of this run",
    ):
        execute(None, out, resume=True)
    assert (out / "ledger.jsonl").read_bytes() == ledger
    assert (out / "model.safetensors").read_bytes() == model


TENSORS = ("model.safetensors", "momentum.safetensors", "initial.safetensors")
BINARY = (*TENSORS, "partition.npz", "schedule.npy")


def flipped(file: Path) -> None:
    """One bit, in a copy of its own."""
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


DAMAGED = [(name, damage) for name in BINARY for damage in (flipped, Path.unlink)]


@pytest.mark.parametrize(("name", "damage"), quick(DAMAGED, DAMAGED[::3]))
def test_whoever_looks_at_a_finished_run_is_told_of_tensors_and_samples(
    copied: Path, name: str, damage: Callable[[Path], None]
) -> None:
    """One bit, or the whole file: of the run that is named, and of one among others."""
    for kind in ("plain 0", "near 0"):
        damage(copied / kind / name)
    for kind in ("plain 0", "near 0"):
        bad = copied / kind
        said = f"{bad / name} {'does not match' if (bad / name).exists() else 'is missing'}"
        for one in ("show", "report", "compare"):
            told = why(one, str(bad))
            assert said in told and told.endswith("start a new run in another folder with --out")
        assert about("x", bad)["state"] == "damaged" and said in about("x", bad)["why"]
        with pytest.raises(InputError, match=r"with out=$"):
            fedmuon.compare([bad])
        done = asked("ls", str(copied))
        assert done.exit_code == 0 and f"{bad}: damaged: {said}" in " ".join(done.stdout.split())
        rest = asked("compare", str(copied))
        assert rest.exit_code == 0 and f"left out: {said}" in rest.stderr and "1" in rest.stdout
    assert listed(copied) == {
        "near 0": "damaged", "near 1": "finished", "plain 0": "damaged", "plain 1": "finished",
    }  # fmt: skip
    assert len(gather(copied)) == 2


@pytest.mark.parametrize("name", quick(TENSORS, ["momentum.safetensors"]))
def test_a_list_reads_no_large_file_whole(
    copied: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors it sees that they are there, and as long as their head says; `show` sees all."""
    monkeypatch.setattr("fedmuon.runs.directory.LARGE", 64)
    file = copied / "plain 0" / name
    read = []
    whole = files.read_bytes
    monkeypatch.setattr(files, "read_bytes", lambda path: read.append(path.name) or whole(path))
    (run,) = (one for one in runs_below(copied) if one.path == file.parent)
    assert not run.damage and not {*BINARY} & {*read} and "summary.json" in read
    flipped(file)
    assert (
        not RunStatus(file.parent, brief=True).damage and str(file) in RunStatus(file.parent).damage
    )
    file.write_bytes(file.read_bytes()[:-4])
    assert f"{file} is not a readable" in RunStatus(file.parent, brief=True).damage
    file.unlink()
    assert f"{file} is missing" in RunStatus(file.parent, brief=True).damage


@pytest.mark.parametrize("name", ["config.toml", "rounds.jsonl", "neighbours.csv", "bound.json"])
def test_a_result_of_a_changed_run_is_refused(copied: Path, name: str) -> None:
    changed(copied / "near 0", name)
    found = fedmuon.StabilityResult(copied / "near 0")
    with pytest.raises(InputError, match=rf"{name} does not match its checksum .* with out=$"):
        getattr(found, name.partition(".")[0])


def test_a_result_of_a_damaged_model_is_refused(copied: Path) -> None:
    for damage, said in ((flipped, "does not match its checksum"), (Path.unlink, "is missing")):
        damage(file := copied / "plain 0" / "model.safetensors")
        with pytest.raises(InputError, match=rf"{file} {said}.* with out=$"):
            _ = fedmuon.Result(file.parent).model
