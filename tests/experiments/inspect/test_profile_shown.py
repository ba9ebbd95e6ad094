"""Profiles as tables, advice and figures."""

import json
from pathlib import Path

import pytest
from conftest import small
from typer.testing import CliRunner

from fedmuon.config.load import parse
from fedmuon.config.schema import NEEDS
from fedmuon.core.errors import InputError
from fedmuon.core.files import Record
from fedmuon.experiments.cli import app
from fedmuon.experiments.inspect.profile import (
    ADVICE,
    advice,
    columns_of,
    first_to_shorten,
    require_profile,
)
from fedmuon.experiments.inspect.profile_figure import LOOKS, mean_groups, profile_figure
from fedmuon.experiments.inspect.status import run_status
from fedmuon.experiments.run import execute
from fedmuon.runs.work_categories import CATEGORIES

KEYS = {f"{table}.{key}" for table, keys in NEEDS.items() for key in keys}
SERVER = {"process": "server", "seconds": {"messages": 2.0, "evaluation": 3.0, "idle": 15.0}}
BUSY = [
    {"process": f"worker {place}", "seconds": {"gradients": 6.0, "checks": 1.0, "idle": 5.0}}
    for place in (1, 2)
]
WAITING = [{"process": "worker 1", "seconds": {"gradients": 2.0, "idle": 8.0}}]


def test_every_category_has_advice_and_a_look_of_its_own() -> None:
    assert [*ADVICE] == [*LOOKS] == [*CATEGORIES]
    assert len({*LOOKS.values()}) == len(LOOKS)
    assert {key for about in ADVICE.values() for key, _, _ in about.keys} <= KEYS
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "profile.md").read_text("utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert rows[1:] == [*CATEGORIES]


@pytest.mark.parametrize(("processes", "expected"), [
    ([SERVER], ("idle", "server", 0.75)),
    ([SERVER, *BUSY], ("gradients", "2 workers", 0.5)),
    ([SERVER, *WAITING], ("evaluation", "server", 0.15)),
])  # fmt: skip
def test_the_first_category_to_shorten(
    processes: list[Record], expected: tuple[str, str, float]
) -> None:
    """With workers, theirs; if they wait most of the time, that of the server."""
    category, process, share = first_to_shorten(processes)
    assert (category, process, pytest.approx(share)) == expected


def test_workers_are_added_up() -> None:
    total = columns_of([SERVER, *BUSY])["2 workers"]
    assert total == {"gradients": 12.0, "checks": 2.0, "idle": 10.0}


def test_advice_names_only_keys_with_an_effect() -> None:
    mostly = [{"process": "run", "seconds": {"orthogonalization": 3.0, "gradients": 1.0}}]
    polar = advice(parse({}), mostly)
    assert polar.startswith("Look at orthogonalization first: 75% of the time.")
    assert "name = 'newton-schulz'" in polar and "steps" not in polar.split("To shorten")[1]
    schulz = {"orthogonalizer": {"name": "newton-schulz", "products": "bfloat16"}}
    words = advice(parse(schulz), mostly)
    assert "lower [orthogonalizer] steps" in words and "bfloat16" not in words
    assert "of the workers" in advice(parse({"engine": {"name": "ray"}}), [SERVER, *BUSY])


def test_advice_for_processes_that_wait() -> None:
    seconds = {"server": {"idle": 19.0, "messages": 1.0}, "worker": {"idle": 3.0, "checks": 1.0}}
    waiting = [{"process": name, "seconds": own} for name, own in seconds.items()]
    assert advice(parse({"engine": {"name": "ray"}}), waiting).startswith("Most of the time, all")
    seconds["server"]["messages"] = 3.0
    assert advice(parse({"engine": {"name": "ray"}}), waiting).startswith("Look at messages")


def test_the_mean_of_workers_counts_those_without_a_message() -> None:
    groups = [
        [{"first": 1, "last": 1, "seconds": {"data": 2.0}}],
        [
            {"first": 1, "last": 1, "seconds": {"data": 4.0, "idle": 1.0}},
            {"first": 2, "last": 2, "seconds": {"idle": 3.0}},
        ],
    ]
    seconds = [group["seconds"] for group in mean_groups(groups)]
    assert seconds == [{"data": 3.0, "idle": 0.5}, {"idle": 1.5}]


def test_commands_show_and_draw_a_profile(tmp_path: Path) -> None:
    out, figure, page = (str(tmp_path / name) for name in ("run", "a.png", "a.html"))
    run = CliRunner().invoke
    config = {"data": {"name": "synthetic", "train": 200}, "federation": {"rounds": 4}}
    execute(parse(config | {"output": {"profile": True}}), Path(out))
    shown = run(app, ["show", out, "--profile", "--figure", figure])
    assert shown.exit_code == 0, shown.output
    assert "where the time went" in shown.output and "Look at" in shown.output
    assert Path(figure).stat().st_size > 5000
    both = run(app, ["show", out, "--html", page])
    assert both.exit_code == 0 and "where the time went" in both.output
    assert "Where the time went" in Path(page).read_text("utf-8")
    record = json.loads(run(app, ["show", out, "--profile", "--json"]).output)
    assert record["processes"][0]["process"] == "run" and {*record["rounds"]} <= {*"1234"}
    for options, words in ((["--clients"], "Use one"), (["--x", "bytes"], "Remove --x")):
        rejected = run(app, ["show", out, "--profile", *options])
        assert rejected.exit_code != 0 and words in str(rejected.exception)


def test_a_run_without_a_profile_says_how_to_get_one(tmp_path: Path) -> None:
    execute(small(), tmp_path / "run")
    with pytest.raises(InputError, match="with --profile"):
        require_profile(run_status(tmp_path / "run"))


def test_long_bars_are_cut_and_their_heights_written() -> None:
    seconds = [50.0, *[1.0] * 7]
    rounds = [
        {"round": number, "profile_seconds": {"data": value}}
        for number, value in enumerate(seconds, 1)
    ]
    figure = profile_figure([{"process": "run", "seconds": {"data": 57.0}}], rounds, {})
    axes = figure.axes[1]
    assert axes.get_ylim()[1] == 1.5
    assert [text.get_text() for text in axes.texts] == ["round 1: 50 s"]
    workers = {"worker 1": [{"first": 1, "last": 8, "seconds": {"data": 1.0}}]}
    assert len(profile_figure([SERVER, *BUSY[:1]], rounds, workers).axes) == 3
