"""`fedmuon show --clients`, its picture, and the same on pages."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small

from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import main
from fedmuon.experiments.inspect import client_figure, page
from fedmuon.experiments.inspect import clients as looked
from fedmuon.experiments.inspect.status import run_status
from fedmuon.experiments.run import execute
from fedmuon.runs.directory import client_records

CONFIG = {"data": {"client-test": 0.4}, "federation": {"clients": 12, "per-round": 4, "rounds": 10},
          "local": {"recipe": "fedavg", "lr": 0.5, "steps": 2},
          "output": {"clients": True}}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clients") / "run"
    execute(small(**{**CONFIG, "data": {**CONFIG["data"], "train": 200}}), folder)
    return folder


def test_distributions_are_of_the_last_record_of_each_client(run: Path) -> None:
    records, last = client_records(run), {}
    for one in records:
        last[one["client"]] = one
    found = looked.distributions(records)
    assert 10 < len(last) <= 12 and len(records) == 40
    for name in ("client_test_accuracy", "loss_after", "drift", "cosine", "participations"):
        values = sorted(one[name] for one in last.values())
        low = name in ("client_test_accuracy", "cosine", "participations")
        two = values[:2] if low else values[-2:]  # a tenth of 11 or 12 clients, rounded up
        assert found[name] == pytest.approx({
            "min": values[0], "worst tenth": sum(two) / 2, "median": statistics.median(values),
            "mean": sum(values) / len(values), "max": values[-1],
        }, rel=1e-12)  # fmt: skip
    first = {one["client"]: one["drift"] for one in reversed(records)}
    assert found["drift"]["mean"] != pytest.approx(statistics.fmean(first.values()))
    by, worst = looked.worst_clients(records)
    assert by == "client_test_accuracy" and len(worst) == len(last)
    assert [one[by] for one in worst] == sorted(one[by] for one in last.values())


def test_without_test_samples_the_largest_loss_is_worst() -> None:
    records = [
        {"round": 1, "client": i, "loss_after": one} for i, one in enumerate((1.0, 3.0, 2.0))
    ]
    by, worst = looked.worst_clients(records)
    assert by == "loss_after" and [one["client"] for one in worst] == [1, 2, 0]
    assert set(looked.distributions(records)) == {"loss_after"}


def test_the_picture_shows_each_client_once_and_each_round(run: Path) -> None:
    records = client_records(run)
    last = looked.last_of_each(records)
    panels: list[Any] = client_figure.clients_figure(records).axes
    loss, accuracy, drift = panels
    for axes, name in ((loss, "loss_after"), (accuracy, "client_test_accuracy")):
        bars = [(one.get_x(), one.get_x() + one.get_width(), one.get_height())
                for one in axes.patches]  # fmt: skip
        for left, right, height in bars[:-1]:  # the last bar has its right edge, too
            inside = [one for one in last if left <= one[name] < right]
            assert height == pytest.approx(len(inside), abs=1)
        assert sum(height for *_, height in bars) == len(last)
    (median,) = drift.lines
    (band,) = drift.collections
    ends = band.get_paths()[0].vertices
    for number in range(1, 11):
        values = [one["drift"] for one in records if one["round"] == number]
        assert median.get_ydata()[number - 1] == pytest.approx(np.median(values))
        of_round = ends[ends[:, 0] == number][:, 1]
        assert [of_round.min(), of_round.max()] == pytest.approx(np.quantile(values, [0.1, 0.9]))


def test_the_command_prints_tables_of_80_columns_and_draws(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(["show", str(run), "--clients", "--figure", str(tmp_path / "clients.png")])
    said = capfd.readouterr().out
    assert not end.value.code and (tmp_path / "clients.png").stat().st_size > 10_000
    assert "worst clients by test accuracy" in said and "of 12 clients took part" in said
    lines = said.split("The figure")[0].splitlines()
    assert max(map(len, lines)) <= 80 and sum("│" in one for one in lines) == 8 + 5
    with pytest.raises(SystemExit) as end:
        main(["show", str(run), "--figure", str(tmp_path / "run.png")])
    assert not end.value.code and (tmp_path / "run.png").stat().st_size > 10_000


def test_a_run_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    execute(small(federation={"rounds": 1}), tmp_path / "run")
    with pytest.raises(
        InputError, match=r"has no records of clients\. Run it again .* clients = true"
    ):
        client_records(tmp_path / "run")
    assert client_figure.clients_picture(tmp_path / "run") == []
    assert len(page.of_run(run_status(tmp_path / "run")).pictures) == 1


def test_pages_have_the_picture(run: Path) -> None:
    names = [one.name for one in page.of_run(run_status(run)).pictures]
    assert names == ["curves", "client-records"]


def test_before_the_first_round_there_is_a_sentence() -> None:
    assert looked.client_tables([], 3) == [
        "No round is finished yet, so there are no client records."
    ]
