"""Looking at runs: what is drawn is what was measured, what is listed is what is there."""

import io
import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import fedmuon
from fedmuon.analysis.report.numbers import digits, in_bytes
from fedmuon.config.hostile import hostile_clients
from fedmuon.config.load import parse
from fedmuon.core.errors import Interrupted, NonFinite
from fedmuon.core.locks import LOCK, held, writer
from fedmuon.experiments.cli import app
from fedmuon.experiments.cli.show import CLIENT_LOSS, TEST_GAP, accounts
from fedmuon.experiments.inspect import plots, status
from fedmuon.experiments.inspect.page import of_run, of_runs
from fedmuon.experiments.inspect.status import NEIGHBOURS, RunStatus
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import neighbours
from fedmuon.experiments.stability.neighbours import MEANINGS
from fedmuon.experiments.tables import columns
from fedmuon.runs.directory import AUDIT, FAILED

WIDTHS = (80, 120)
NOISY = {"lot": 5.0, "noise": 1.0}


def said(*command: str, width: int = 80, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(command), env={"COLUMNS": str(width)})
    assert done.exit_code == code, done.output + str(done.exception)
    return done.output


def refused(*command: str) -> str:
    return str(CliRunner().invoke(app, list(command)).exception)


def dots(lines: Sequence[str]) -> np.ndarray:
    """The picture that a reader sees, [4 rows, 2 columns] a character: dots 1 2 3 7 are on the left
    from above, 4 5 6 8 on the right."""
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]  # of bits 0, 1, ...
    picture = np.zeros((4 * len(lines), 2 * len(lines[0])), bool)
    for row, line in enumerate(lines):
        for column, one in enumerate(line):
            for bit, (down, right) in enumerate(places):
                picture[4 * row + down, 2 * column + right] = (ord(one) - 0x2800) >> bit & 1
    return picture


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 30), st.integers(1, 8)
)
def test_a_curve_goes_through_its_points(values: list[float], width: int, height: int) -> None:
    """Every point has its dot at its place, and each column between has one."""
    points = [(float(x), y) for x, y in enumerate(values)]
    picture = dots(plots.braille(points, width, height))[::-1]  # from below
    assert picture.shape == (4 * height, 2 * width)
    low, high, wide, tall = min(values), max(values), 2 * width - 1, 4 * height - 1
    for x, y in points:
        column = x / (len(values) - 1) * wide if len(values) > 1 else wide // 2
        row = (y - low) / (high - low) * tall if low < high else tall // 2
        near = [(round(row + a), round(column + b)) for a in (-1e-6, 1e-6) for b in (-1e-6, 1e-6)]
        assert any(picture[place] for place in near)
    if len(values) > 1:
        assert picture.any(axis=0).all()


def test_another_curve_is_another_picture() -> None:
    """A rising one goes from the lower left to the upper right, a falling one does not."""
    up, down = (
        dots(plots.braille([(x, sign * float(x)) for x in range(10)], 12, 4)) for sign in (1, -1)
    )
    assert up[-1, 0] and up[0, -1] and not (up[0, 0] or up[-1, -1])
    assert down[0, 0] and down[-1, -1] and not (down[-1, 0] or down[0, -1])


@given(st.lists(st.floats(-1e9, 1e9), max_size=60), st.integers(1, 30))
def test_a_sparkline_is_as_high_as_its_parts(values: list[float], width: int) -> None:
    found = plots.sparkline(values, width)
    assert len(found) == min(width, len(values))
    parts = [np.mean(part) for part in np.array_split(values, len(found))] if found else []
    heights = [plots.BARS.index(one) for one in found]
    if len(values) <= width:  # each is by itself
        order = np.argsort(parts, kind="stable")
        assert (np.diff(np.array(heights)[order]) >= 0).all()
    if found and min(parts) < max(parts) and len(values) <= width:
        assert min(heights) == 0 and max(heights) == len(plots.BARS) - 1


def test_what_is_not_finite_is_left_out_of_curves() -> None:
    points = [(1, float("nan")), (2, 1.0), (3, float("inf")), (4, 2.0)]
    assert plots.panel("x", points, 30, 4) == plots.panel("x", [points[1], points[3]], 30, 4)
    assert "no finite value" in plots.panel("x", points[:1], 40, 4)[1]
    assert plots.sparkline([float("nan"), 1.0, 2.0], 9) == plots.sparkline([1.0, 2.0], 9)


@given(st.integers(24, 90), st.integers(2, 9), st.lists(st.floats(-1e9, 1e9), min_size=1))
def test_a_panel_is_as_large_as_it_should_be(width: int, height: int, ys: list[float]) -> None:
    lines = plots.panel("test loss", [*enumerate(ys)], width, height)
    assert [len(line) for line in lines] == [width] * (height + 2)
    assert digits(max(ys)) in lines[1] and digits(min(ys)) in lines[height]


@pytest.mark.parametrize(("value", "text"), [
    (0.82, "0.8200"), (1234.2, "1234"), (98765.4, "98765"), (1e-5, "1.000e−05"), (-0.5, "−0.5000"),
    (float("nan"), "nan"), (1.5e7, "1.500e+07"), (0.0, "0.000"),
])  # fmt: skip
def test_the_rule_of_digits(value: float, text: str) -> None:
    assert digits(value) == text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_table_fits_or_turns_to_rows(width: int) -> None:
    """Nothing is cut off, at any width; where there is room, the rows stay rows."""
    head = ["run", *(f"measure {n}" for n in range(6))]
    rows = [[f"a run of many words {n}", *("0.1234" for _ in range(6))] for n in range(2)]
    console = Console(width=width, file=io.StringIO())
    console.print(columns("a title", head, rows))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert text.count("0.1234") == 12
    assert (text.count("measure 3") == 1) == (width == 120)


# Runs of the tests below: finished, of two seeds; other; unfinished; private; damaged.
@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("looking") / "runs"
    for seed in (0, 1):
        execute(small(federation={"seed": seed}), root / f"a{seed}")
    execute(small(local={"lr": 0.2}), root / "deep" / "b")
    shutil.copytree(root / "a0", root / "half")
    (root / "half" / "summary.json").unlink()
    shutil.copytree(root / "a0", root / "odd")
    (root / "odd" / "config.toml").write_text("[data]\n")
    execute(small(local={"recipe": "dp-sgd"}, privacy=NOISY), root / "p")
    return root


@pytest.mark.parametrize("width", WIDTHS)
def test_show(runs: Path, width: int) -> None:
    """Card, curves and numbers of a run fit the terminal."""
    text = said("show", str(runs / "a0"), width=width)
    *lines, command = text.splitlines()
    assert max(map(len, lines)) <= width and command.endswith(f"fedmuon certify {runs / 'a0'}")
    for words in ("N = 6, K = 3, R = 8, E = 1", "η = 0.05", "λ = 0.1", "finished, 8 of 8 rounds"):
        assert words in text
    summary = json.loads((runs / "a0" / "summary.json").read_text())
    for name in ("train_loss", "test_loss", "accuracy"):
        assert f"{name.replace('_', ' ')} {digits(summary[name])}" in text
    assert any(0x2800 <= ord(one) < 0x2900 for one in text)
    assert "not released" not in text and "resume with" not in text
    private = " ".join(said("show", str(runs / "p"), width=120).split())
    assert "not released" in private and "model.safetensors" in private and "zero-out" in private
    # The second bound exceeds the first one, and says why.
    assert "(a looser upper bound on the same ε)" in private
    summary = json.loads((runs / "p" / "summary.json").read_text())
    account = summary["privacy"]
    assert account["rdp"] > account["epsilon"]
    (table,) = accounts({"privacy": account | {"rdp": account["epsilon"]}})  # the only bound
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    assert "by RDP" in console.file.getvalue() and "looser" not in console.file.getvalue()


def test_a_page_has_the_unseen_loss_before_and_the_client_loss_last(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "a0", tmp_path / "a")
    status = RunStatus(tmp_path / "a")
    assert status.summary is not None
    status.summary["unseen_loss_before"] = 0.75
    names = [name for name, _ in of_run(status).numbers]
    assert ("unseen loss before", digits(0.75)) in of_run(status).numbers
    assert names[-1] == "client loss" and names[0] == "train loss"


def test_show_says_how_to_go_on(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "half"
    shutil.copytree(runs / "half", out)
    again = f"fedmuon run --out {out} --resume"
    assert f"unfinished, resume with: {again}" in said("show", str(out))
    said(*again.split()[1:])
    assert "resume with" not in said("show", str(out))


@pytest.mark.usefixtures("undrawn")
def test_show_as_a_page(runs: Path, tmp_path: Path) -> None:
    said("show", str(runs / "a0"), "--html", str(tmp_path / "new" / "a.html"))
    text = (tmp_path / "new" / "a.html").read_text()
    summary = json.loads((runs / "a0" / "summary.json").read_text())
    assert digits(summary["test_loss"]) in text and "data:image/svg" in text
    assert "http" not in text.replace("http-equiv", "") and "0 of 0" not in text
    assert not (runs / "a0" / "report.html").exists()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[local]\nlr = 0.1\n")
    assert "is not a run folder" in refused("show", str(tmp_path))
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "suite.lock").write_text("[]")
    assert "repeat its command with --resume" in refused("show", str(tmp_path / "unfinished"))
    assert "is not a folder" in refused("ls", str(tmp_path / "nowhere"))
    assert "no runs in" in said("ls", str(tmp_path))
    assert json.loads(said("ls", str(tmp_path), "--json")) == {"runs": []}


@pytest.mark.parametrize("width", [60, *WIDTHS])
def test_ls(runs: Path, width: int) -> None:
    text = said("ls", str(runs), width=width)
    table = [line for line in text.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, table)) <= width
    order = [line.split("│")[1].strip() for line in table if line.startswith("│")]
    assert order == ["a0", "a1", "deep/b", "half", "odd", "p"]
    assert "damaged" in table[-2] and "unfinished" in table[-3] and "8/8" in table[-3]
    assert text.count("resume with: ") == 1 and "not" in text and "released" in text
    assert ("test loss" in text) == (width == 120)


def test_ls_is_sorted_by_any_column(runs: Path) -> None:
    def order(*options: str) -> list[tuple]:
        rows = json.loads(said("ls", str(runs), "--json", *options))["runs"]
        return [(one["run"], one.get(options[1].replace("-", "_"))) for one in rows]

    for column in ("accuracy", "test-loss", "seed", "recipe", "rounds"):
        for reverse in ([], ["--reverse"]):
            found = [value for _, value in order("--sort", column, *reverse)]
            known = [one for one in found if one is not None]
            assert known == sorted(known, reverse=bool(reverse)) and len(known) == 5
            assert found[-1] is None  # of the damaged run
    assert "there is no column 'speed'" in refused("ls", str(runs), "--sort", "speed")
    table = said("ls", str(runs), "--sort", "train-loss")
    assert "train loss" in table  # which else is the first to make room


def test_who_writes_is_said(tmp_path: Path) -> None:
    """A lock whose holder is dead says nobody."""
    assert writer(tmp_path) == ""
    with held(tmp_path):
        assert f"process {os.getpid()} " in writer(tmp_path)
    (tmp_path / LOCK).write_text("process 2147483647 on elsewhere (fedmuon run)")
    assert "elsewhere" in writer(tmp_path)
    (tmp_path / LOCK).write_text(f"process 4194305 on {socket.gethostname()} (fedmuon run)")
    assert writer(tmp_path) == ""


def test_neighbours_are_run_also_where_their_run_was_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their command is named from the first file on; `run` ends the run alone."""
    out, config = tmp_path / "s", small(stability={"trials": 3})
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("fedmuon.runs.observers.evaluation.evaluate", stopping)
        neighbours.execute(config, out)
    again = f"fedmuon stability --out {out} --resume"
    assert RunStatus(out).again == again
    assert not RunStatus(out).summary and f"unfinished, resume with: {again}" in said(
        "show", str(out)
    )
    assert f"resume with: {again}" in said("run", "--out", str(out), "--resume")
    assert RunStatus(out).summary and f"unfinished, resume with: {again}" in said(
        "ls", str(tmp_path)
    )
    said(*again.split()[1:])
    assert RunStatus(out).ended and "resume with" not in said("ls", str(tmp_path))
    neighbours.execute(config, tmp_path / "whole")
    for name in (NEIGHBOURS, "config.toml", "model.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert "resume with" not in said("run", "--out", str(out), "--resume")


def stopping(*given: object) -> None:
    raise Interrupted


def test_objects_handed_over_are_gone_on_with_in_python(tmp_path: Path) -> None:
    tables = {"data": {"name": "synthetic", "train": 60, "test": 20},
              "federation": {"rounds": 1, "clients": 2}}  # fmt: skip
    fedmuon.run(tables, schedule=lambda round: 1.0, out=tmp_path / "own")
    assert "fedmuon.run(out=" in RunStatus(tmp_path / "own").again
    (tmp_path / "own" / NEIGHBOURS).write_text("trial\n")
    assert "fedmuon.stability(out=" in (again := RunStatus(tmp_path / "own").again)
    assert "resume=True" in again


@pytest.mark.parametrize("width", [80, 40])
def test_a_dense_table_has_one_line_per_row_where_it_fits(width: int) -> None:
    """Forty rows at 80 columns; the controls are too narrow, or a table that is not dense."""
    head = ["lr", "steps", "lambda", "momentum", "validation loss", "test accuracy", ""]
    rows = [[f"0.03162{k:02}", "1", "0.1", "0.5", "0.7474 ± 0.038", "0.2750 ± 0.32", "best"]
            for k in range(40)]  # fmt: skip
    for dense in (True, False):
        console = Console(width=width, file=io.StringIO())
        console.print(columns("a title", head, rows, 4, dense))
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        whole = [line for line in lines if all(cell in line for cell in rows[0][1:])]
        assert len(whole) == (40 if dense and width == 80 else 0)


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_has_a_column_a_key_and_spreads_beside_means(runs: Path, width: int) -> None:
    folders = [str(runs / name) for name in ("a0", "a1", "deep/b")]
    text = said("compare", *folders, width=width)
    found = fedmuon.compare(folders)
    assert max(map(len, text.splitlines())) <= width
    assert "lr" in text and "0.05" in text and "0.2" in text
    for row in found.rows:
        assert digits(row["accuracy"]) in text
    spread = digits(found.rows[0]["accuracy ±"], 2)
    assert text.count("± is half of the 95% interval of the mean") == 1
    alone = said("compare", *folders[1:], width=width)  # of one seed each
    assert "±" not in alone
    lines = [line.split("│") for line in text.splitlines() if spread in line]
    assert any(cell.strip() == spread for line in lines for cell in line)


def test_compare_has_the_keys_that_only_some_rows_have(runs: Path) -> None:
    """On the terminal before the measurements, on a page after them."""
    folders = [runs / "a0", runs / "p"]
    text = said("compare", *map(str, folders), width=200)
    heads = [cell.strip() for cell in text.splitlines()[1].split("┃")]
    for key in ("recipe", "noise", "lot"):
        assert heads.index(key) < heads.index("seeds") < heads.index("accuracy")
    assert text.count("spent epsilon") == 1
    page = of_runs([RunStatus(one) for one in folders])
    assert page.head.index("seeds") < page.head.index("accuracy") < page.head.index("lot")
    assert "spent epsilon" in page.head and "not released" in page.note


def test_a_page_names_runs_by_their_folders_and_has_each_key_once(runs: Path) -> None:
    page = of_runs([RunStatus(runs / name) for name in ("a0", "a1", "deep/b")])
    assert [row[0] for row in page.numbers] == ["a0, a1", "deep/b"]
    assert page.head[:2] == ("run", "seeds") and page.head.count("lr") == 1
    row = fedmuon.compare([runs / "a0", runs / "a1"]).rows[0]
    place = page.head.index("accuracy")
    assert page.head[place + 1] == "± 95%" and place < page.head.index("lr") < len(page.head) - 1
    assert page.numbers[0][place] == digits(row["accuracy"])
    (picture,) = page.pictures
    (legend,) = picture.draw(False).legends
    assert [one.get_text() for one in legend.get_texts()][:2] == ["a0, a1", "deep/b"]


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_names_the_folders_of_every_row(runs: Path, tmp_path: Path, width: int) -> None:
    """In one table if it fits, else in two; also of runs that no key tells apart."""
    folders = [str(runs / name) for name in ("a0", "a1", "deep/b")]
    lines = said("compare", *folders, width=width).splitlines()
    assert sum("a0, a1" in line for line in lines) == sum("deep/b" in line for line in lines)
    assert sum("deep/b" in line for line in lines) == (1 if width == 120 else 2)
    many = [shutil.copytree(runs / "a0", tmp_path / str(n)) for n in range(2)]
    assert "│ 0 " in (text := said("compare", *map(str, many))) and "│ 1 " in text


def test_compare_leaves_out_what_a_run_does_not_read(runs: Path, tmp_path: Path) -> None:
    """The number of neighbours tells runs apart only if they have some."""
    plain = [runs / "a0", tmp_path / "a1"]
    execute(small(stability={"trials": 7}), plain[1])
    (row,) = fedmuon.compare(plain).rows  # of two seeds
    assert row["seeds"] == 2 and not any("." in key for key in row)
    near = [shutil.copytree(folder, tmp_path / f"near-{folder.name}") for folder in plain]
    for folder in near:
        (folder / "neighbours.csv").write_text("trial\n")
    assert [row["stability.trials"] for row in fedmuon.compare(near).rows] == [10, 7]
    shown = fedmuon.compare([near[1], plain[1]]).rows
    assert [row.get("stability.trials") for row in shown] == [7, None]


def test_what_cannot_be_gone_on_with_is_lost(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "half", tmp_path / "half")
    (tmp_path / "half" / AUDIT).write_text("{}")
    text = " ".join(said("ls", str(tmp_path)).split())
    assert (
        " lost " in text
        and "contains an audit that did not finish" in text
        and "resume with" not in text
    )


@pytest.mark.parametrize("file", ["partition.npz", "checkpoint.safetensors", "rounds.jsonl"])
def test_what_is_damaged_is_lost_and_what_is_whole_is_not(tmp_path: Path, file: str) -> None:
    """With the reason that --resume would give."""
    interrupted(out := tmp_path / "run")
    assert "resume with: " in said("ls", str(tmp_path)) and RunStatus(out).state == "unfinished"
    content = (out / file).read_bytes()
    (out / file).write_bytes(content[: len(content) // 3])
    text = " ".join(said("ls", str(tmp_path)).split())
    assert " lost " in text and "resume with: " not in text and f"{out}: lost: " in text
    why = RunStatus(out).state.removeprefix("lost: ")
    for one in (why, refused("run", "--out", str(out), "--resume")):
        assert str(out / file) in one or "every checkpoint" in one
        assert "start a new run" in one


def in_round_5(error: BaseException) -> Callable[[Mapping[str, Any], object], None]:
    """A callback that raises the error."""

    def stop(record: Mapping[str, Any], state: object) -> None:
        if record["round"] == 5:
            raise error

    return stop


def interrupted(out: Path) -> None:
    with pytest.raises(Interrupted):
        execute(small(output={"checkpoint-every": 8}), out, callbacks=[in_round_5(Interrupted())])


def test_a_run_that_failed_says_why_and_does_not_ask_to_go_on(tmp_path: Path) -> None:
    """The reason is gone when it has ended well."""
    out, way = tmp_path / "run", {"recipe": "fedavg", "lr": 1e15, "weight-decay": 1e15}
    with pytest.raises(NonFinite) as error:
        execute(small(local=way, federation={"rounds": 30}), out)
    text = " ".join(said("ls", str(tmp_path)).split())
    assert " failed " in text and f"{out}: failed: {error.value}" in text
    assert "resume with" not in text and "failed: " in said("show", str(out))
    interrupted(other := tmp_path / "other")
    (other / FAILED).write_text("once")
    execute(None, other, resume=True)
    assert not (other / FAILED).exists() and RunStatus(other).state == "finished"


def failing(out: Path, **privacy: bool) -> str:
    """What the state of a private run that failed in round 5 says after the reason."""
    config = small(local={"recipe": "dp-sgd"}, privacy=NOISY | privacy)
    with pytest.raises(NonFinite):
        execute(config, out, callbacks=[in_round_5(NonFinite("made up"))])
    first, then = RunStatus(out).state.split("; ")
    assert first == "failed: made up"
    return then


def test_a_private_run_that_failed_says_whether_it_can_be_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "secret"
    again = f"fedmuon run --out {out} --resume"
    assert failing(out).endswith(f"resume with: {again}") and again in said("ls", str(tmp_path))
    said(*again.split()[1:])
    assert RunStatus(out).state == "finished"
    then = failing(tmp_path / "repeatable", **{"insecure-reproducible-noise": True})
    assert "resume with" not in then and "start a new run" in then
    way = {"recipe": "dp-sgd", "lr": 1e15, "weight-decay": 1e15}
    with pytest.raises(NonFinite):
        execute(small(local=way, privacy=NOISY, federation={"rounds": 30}), tmp_path / "infinite")
    state = RunStatus(tmp_path / "infinite").state
    assert (
        "checkpoint also contains NaN or infinity: start a new run" in state
        and "resume with" not in state
    )


def test_gaps_of_two_kinds_have_two_names(runs: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_bytes((runs / "a0" / "config.toml").read_bytes())
    said("stability", str(config), "--trials", "2", "--out", str(tmp_path / "s"))
    text = said("show", str(tmp_path / "s"), width=120)
    assert "┃  test gap " in text and "│ population gap " in text and "│ gap " not in text
    assert "│ perturbations within their certificates " in text
    assert "│ population gap within the bound " in text
    said_once = " ".join(text.split())
    for meaning in (TEST_GAP, CLIENT_LOSS, MEANINGS):
        assert said_once.count(meaning) == 1
    plain = " ".join(said("show", str(runs / "a0"), width=120).split())
    assert TEST_GAP in plain and MEANINGS not in plain  # negative control: a run without neighbours


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("place", ["", "file/a.html"])
def test_a_page_that_cannot_be_written_names_no_option_of_others(
    runs: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    why = refused("show", str(runs / "a0"), "--html", str(tmp_path / place))
    assert str(tmp_path / place) in why and "choose another p" in why and "--out" not in why


def test_a_page_of_a_private_run_has_its_account(runs: Path) -> None:
    private, plain = (of_run(RunStatus(runs / name)) for name in ("p", "a0"))
    assert (
        "The run spent ε = " in private.note and "not released" in f"{private.title} {private.note}"
    )
    assert plain.note == "" and "released" not in plain.title


def test_the_card_says_how_much_memory_workers_took() -> None:
    """Nothing of a run without workers, as those of earlier versions are."""
    one = {"node": "a", "pid": 1, "replies": 3, "memory": 300_000_000, "gpu_memory": 2_000_000_000}
    other = {"node": "b", "pid": 1, "replies": 2, "memory": 410_000_000}
    assert status._memory_of([]) == ""
    assert status._memory_of([other]) == "1 on 1 node, peak memory 410 MB"
    assert status._memory_of([other, one]) == (
        "2 on 2 nodes, peak memory 300 MB to 410 MB; GPU 2 GB"
    )


def test_the_card_has_compression_devices_and_unused_replies(runs: Path, tmp_path: Path) -> None:
    """Counted by hand from the records; a run without them has no such lines."""
    plain = {name for name, _ in RunStatus(runs / "a0").card()}
    assert not plain & {"messages", "devices", "replies"}
    config = small(
        {
            "federation": {"clients": 6, "per-round": 2, "rounds": 3},
            "compression": {"uplink": "top-k", "share": 0.5, "feedback": "error"},
            "devices": {"mode": "deadline", "select": 4, "speeds": "log-normal"},
        }
    )
    execute(config, tmp_path / "late")
    found = RunStatus(tmp_path / "late")
    card = dict(found.card())
    assert card["messages"] == "up = top-k, share = 0.5, feedback = error"
    assert card["devices"] == "deadline, asked = 4, speeds = log-normal"
    counted = [set(one["participants"]) - set(one["dropped"]) for one in found.rounds]
    assert sum(map(len, counted)) == 6
    assert card["replies"] == f"6 of 12 used, from {len(set.union(*counted))} of 6 clients"
    buffered = small(
        {
            "federation": {"clients": 6, "per-round": 2, "rounds": 4},
            "devices": {"mode": "fedbuff", "buffer": 1, "speeds": "log-normal"},
        }
    )
    execute(buffered, tmp_path / "buffered")
    found = RunStatus(tmp_path / "buffered")
    ages = [age for one in found.rounds for age in one["staleness"]]
    assert len(ages) == 4
    assert dict(found.card())["replies"].endswith(f"mean staleness {digits(sum(ages) / 4)}")


def test_the_card_has_discarded_replies_and_graphs(tmp_path: Path) -> None:
    threshold = small(
        {"federation": {"rounds": 12}},
        devices={"mode": "threshold", "threshold": 2, "speeds": "log-normal", "speed-spread": 1.0},
    )
    execute(threshold, tmp_path / "threshold")
    found = RunStatus(tmp_path / "threshold")
    discarded = sum(record["discarded"] for record in found.rounds)
    card = dict(found.card())
    assert discarded and card["replies"].startswith(f"12 of {12 + discarded} used, from ")
    assert card["devices"] == "threshold, threshold = 2, speeds = log-normal"
    nodes = {"clients": 4, "per-round": 4, "rounds": 1, "graph": "exponential"}
    for varying, words in ((False, "exponential"), (True, "exponential, varying = true")):
        folder = tmp_path / words
        graph = {**nodes, "varying-graph": varying}
        execute(small({"federation": graph}, local={"recipe": "demuon"}), folder)
        card = dict(RunStatus(folder).card())
        assert card["graph"] == words
        edges = 4 if varying else 8
        assert card["traffic"] == f"{in_bytes(2 * edges * 21 * 8)} between nodes"


def test_a_title_of_compared_runs_says_what_0_means() -> None:
    few = {"federation": {"clients": 6, "per-round": 2, "rounds": 1}}
    asked = [{"mode": "deadline", "select": select, "deadline": 50.0} for select in (0, 4)]
    results = [fedmuon.run(small({**few, "devices": devices})) for devices in asked]
    assert [*fedmuon.compare(results).curves] == ["select=per-round", "select=4"]


def test_the_card_names_hostile_clients_and_defences() -> None:
    attacked = {
        "federation": {"aggregate": "mean"},
        "attacks": {"kind": "sign-flip", "share": 0.2},
        "robust": {"mixing": 1},
    }
    config = parse(attacked)
    lines, numbers = status.settings(config), hostile_clients(config)
    of_20 = " ".join(map(str, numbers))
    assert len(numbers) == 4 and lines["defence"] == "mixing = 1"
    assert lines["hostile"] == f"sign-flip, clients = {of_20}, share = 0.2"
    many = parse({**attacked, "federation": {"clients": 60}})
    assert status.settings(many)["hostile"].endswith(" ..., share = 0.2")
    assert not {"hostile", "defence"} & {*status.settings(parse({}))}


@pytest.mark.parametrize(
    ("recipe", "average"),
    [
        ("fedmuon", "average = mean with equal weights"),
        ("sign-muon", "average = majority of the votes"),
        ("demuon", "E = 5"),
    ],
)
def test_the_card_says_how_replies_are_combined(recipe: str, average: str) -> None:
    assert status.settings(parse({"local": {"recipe": recipe}}))["clients"].endswith(average)
