"""Files of training suites: sweeps, what is refused, and that every shipped one can be run."""

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import quick
from made_training import TINY, read, training

from fedmuon.analysis.report.comparisons import at_seconds, parts, sweep_curves, trend
from fedmuon.config.load import Config
from fedmuon.config.schema import reads
from fedmuon.core.errors import InputError
from fedmuon.experiments.report import gather
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies import training_findings
from fedmuon.experiments.studies.training import Suite, settings, suite_of
from fedmuon.experiments.suites import contents, suite
from fedmuon.federated.client_data import read_source

SWEEP = """
[sweep]
key = "local.steps"
values = [1, 3]
label = "local steps"
"""


def test_a_sweep_multiplies_the_variants(tmp_path: Path) -> None:
    work = training(tmp_path, TINY + SWEEP, scale="small")
    assert [(one.variant, one.x, one.config.local.steps) for one in work.cells][1::2] == [
        ("FedMuon, E = 1", 3, 3), ("FedAvg", 3, 3),
    ]  # fmt: skip
    suite.execute(work, tmp_path / "out")
    (part,) = gather(tmp_path / "out")
    assert "at every local steps" in part.claims[0].sentence
    assert part.claims[0].verdict == "not tested here"  # of one seed
    assert part.claims[0].detail.startswith("2 of 2 values")
    assert part.pictures[0].name == "terminal"
    assert part.pictures[1].title.endswith("at local steps = 3")
    assert all(picture.draw(narrow).axes for picture in part.pictures for narrow in (True, False))


SPELLED = """
[sweep]
key = "orthogonalizer.coefficients"
values = [1, 2, 5]
written = "taylor-{}"
label = "degree"
fixed = ["FedAvg"]
follow = "FedMuon, E = 1"

[claims.trend]
kind = "rising"
better = "FedMuon, E = 1"
measure = "train_seconds"
"""
TIMES = """
[times]
of = "FedAvg"
parts = 3

[times.published.digits]
seconds = [10, 20]

[times.published.digits.losses]
FedAvg = [0.75, 0.125]
"""


def test_a_fixed_variant_runs_once_and_stands_at_every_value(tmp_path: Path) -> None:
    named = '[base.orthogonalizer]\nname = "newton-schulz"\n'
    work = training(tmp_path, TINY + named + SPELLED, scale="small")
    assert [(one.variant, one.x, one.config.orthogonalizer.coefficients) for one in work.cells] == [
        ("FedMuon, E = 1", 1, "taylor-1"), ("FedMuon, E = 1", 2, "taylor-2"),
        ("FedMuon, E = 1", 5, "taylor-5"), ("FedAvg", None, "cubic"),
    ]  # fmt: skip
    suite.execute(work, tmp_path / "out")
    rows = read(tmp_path / "out" / "runs.csv")
    fixed = [row for row in rows if row["variant"] == "FedAvg"]
    assert [float(row["x"]) for row in fixed] == [1, 2, 5]
    assert len({row["train_loss"] for row in fixed}) == 1 and len(rows) == 6
    (part,) = gather(tmp_path / "out")
    lines = next(one for one in part.pictures if one.name == "followed").draw(False).axes[1].lines
    assert [line.get_label() for line in lines] == [
        "degree = 1", "degree = 2", "degree = 5", "FedAvg",
    ]  # fmt: skip
    drawn = [np.asarray(line.get_ydata())[-1] for line in lines]
    ends = [float(row["accuracy"]) for row in (*rows[:1], *rows[2:3], *rows[4:])]
    np.testing.assert_allclose(drawn, ends)


def test_losses_by_seconds_beside_published_ones(tmp_path: Path) -> None:
    suite.execute(training(tmp_path, TINY + TIMES, scale="small"), tmp_path / "out")
    (part,) = gather(tmp_path / "out")
    ((_, head, rows),) = part.more
    assert len(head) == 4 and [row[0] for row in rows] == [
        "a table (digits)", "FedMuon, E = 1", "FedAvg", "  a table (digits)",
    ]  # fmt: skip
    assert rows[0][1:] == ("at 10 s", "at 20 s", "–") and rows[3][1:] == ("0.75", "0.125", "–")
    ended = read(tmp_path / "out" / "runs.csv")[1]
    assert float(rows[2][3]) == pytest.approx(float(ended["train_loss"]), rel=1e-3)


def line(losses: list[float], seconds: list[float], seed: int, x: float = np.nan) -> list[tuple]:
    made = enumerate(zip(losses, seconds, strict=True), 1)
    return [("muon", x, seed, number, second, loss) for number, (loss, second) in made]


def test_the_last_part_is_the_end_to_the_last_bit() -> None:
    """End times whose third, three times, is a bit more: the last loss would be no number."""
    for end in (0.8469, 1.7365, 0.4848):
        assert end * 3 / 3 > end
        curves = columns(line([1.0, 0.5], [end / 2, end], 0))
        assert parts(curves, "muon", 3)[-1] == end
        assert at_seconds(curves, "muon", parts(curves, "muon", 3))[-1] == 0.5


def columns(*lines: list[tuple]) -> dict[str, np.ndarray]:
    names = ("variant", "x", "seed", "round", "train_seconds", "train_loss")
    cells = zip(*(row for one in lines for row in one), strict=True)
    return {name: np.array(column) for name, column in zip(names, cells, strict=True)}


def test_interpolation_in_time_is_within_a_seed() -> None:
    """Means of interpolated losses: 2 s is 0.5 in one run, and 0.4 in the other, twice as slow."""
    curves = columns(line([0.6, 0.4], [1, 3], seed=0), line([0.8, 0.4], [0, 2], seed=1))
    np.testing.assert_allclose(parts(curves, "muon", 2), [1, 2])  # of the shorter run
    np.testing.assert_allclose(at_seconds(curves, "muon", np.array([1.0, 2.0])), [0.6, 0.45])
    assert np.isnan(at_seconds(curves, "muon", np.array([0.5, 2.5]))).all()


def test_trends_are_from_each_value_to_the_next() -> None:
    claim = {"better": "muon", "measure": "train_loss", "kind": "falling", "sentence": ""}
    one = columns(line([0.5], [1], 0, 1), line([0.4], [1], 0, 2), line([0.3], [1], 0, 3))
    assert trend(claim, one, "rank").verdict == "not tested here"  # of one seed
    runs = {name: np.repeat(column, 2) for name, column in one.items()} | {
        "seed": np.tile([0, 1], 3)
    }
    assert trend(claim, runs, "rank").holds
    assert trend(claim | {"kind": "rising"}, runs, "rank").holds is False
    runs["train_loss"][2:4] = 0.55  # lower at the end than at the start, and yet not falling
    found = trend(claim, runs, "rank")
    assert found.holds is False and found.detail == "0.5 at 1, 0.55 at 2, 0.3 at 3"
    runs["train_loss"][2] = np.nan
    assert trend(claim, runs, "rank").holds is None
    assert trend(claim | {"measure": "epsilon"}, runs, "rank").holds is None


def test_followed_curves_are_those_of_one_variant() -> None:
    curves = columns(line([0.5, 0.4], [1, 2], 0, 1.0), line([0.3, 0.2], [1, 2], 0, 2.0))
    rows, names = sweep_curves(curves, {"label": "q", "follow": "muon", "fixed": []})
    assert names == ["q = 1", "q = 2"] and list(rows["variant"]) == ["q = 1"] * 2 + ["q = 2"] * 2
    np.testing.assert_array_equal(rows["train_loss"], curves["train_loss"])
    more = dict(rows) | dict.fromkeys(("test_loss", "accuracy"), rows["train_loss"])
    assert len(training_findings.draw_curves(more, names, "round").axes[1].lines) == 2


@pytest.mark.parametrize(("seeds", "why"), [
    ("[0, 0]", "contains a seed twice"), ("[]", "set at least one value"),
    ("3", r"set a list, such as \[0, 1\]"), ("[0, -1]", "set a number of at least 0"),
])  # fmt: skip
def test_seeds_that_cannot_be_are_refused_as_such(seeds: str, why: str, tmp_path: Path) -> None:
    text = re.sub(r"^seeds = .*", f"seeds = {seeds}", TINY, count=1, flags=re.MULTILINE)
    with pytest.raises(InputError, match=f"seeds.*{why}"):
        training(tmp_path, text, data="mnist5k")


@pytest.mark.parametrize(("old", "new", "why"), [
    ('than = "FedAvg"', 'than = "FedAdam"', "no such variant"),
    ("[published.digits.FedAvg]", "[published.digits.SGD]", "no such variant"),
    ('kind = "sooner"', 'kind = "later"', "not valid"),
    ("lr = 0.25", "rate = 0.25", "the valid names are"),
    ('kind = "training"', 'kind = "trainig"', "not a kind of suite: did you mean training"),
    ('kind = "training"', 'kind = "mining"', "not a kind of suite: choose one of"),
    ('kind = "sooner"', 'kind = "falling"', "has no .sweep."),
    ("[small]", '[times]\nof = "SGD"\n\n[small]', "no such variant"),
    ("[small]", TIMES + SWEEP + "[small]", "Remove one of the two tables"),
    ("[small]", SWEEP + 'follow = "SGD"\n\n[small]', "no such variant"),
    ("[small]", SWEEP + 'written = "taylor"\n\n[small]', "written"),
    ("[variants.FedAvg.local]", '[variants."fedmuon e 1".local]', "share the name"),
    ("[small]", SWEEP + 'lable = "x"\n\n[small]', r"\[sweep\] lable: did you mean label"),
    ("[small]", SWEEP + '"local.lr" = [0.1]\n\n[small]', r"\[sweep\] local.lr: the valid .* key,"),
    ("[claims.loss]", '[claims.loss]\nbettr = "x"', r"\[claims.loss\] bettr: did you mean better"),
    ("[small]", "[times.published.digits]\nsecond = [1]\n\n[small]",
     r"\[times.published.digits\] second: did you mean seconds"),
])  # fmt: skip
def test_what_is_refused(old: str, new: str, why: str, tmp_path: Path) -> None:
    text = TINY.replace(old, new) if "variants" not in old else "".join(
        part for part in TINY.replace(old, new).partition("[claims.loss]")[:1])  # fmt: skip
    with pytest.raises(InputError, match=why):
        training(tmp_path, text, data="mnist5k")


read_once = cache(contents.read)


def shipped() -> Iterator[tuple[str, str, str]]:
    """Every suite at both scales; those of runs for all data that their file names."""
    for name in sorted(contents.shipped()):
        content = read_once(name)
        named = {*content.get("for", {}), *content.get("published", {})}
        named = named | {content.get("data", "")} if content.get("kind") == "training" else set()
        for data in sorted(named - {""}) or [""]:
            yield from ((name, data, scale) for scale in ("small", "full"))


# how many cells some suites have at each scale
COUNTS = {"A4": {"small": 8, "full": 90}, "attribution": {"small": 9, "full": 9}}


def runs_of(name: str, data: str, scale: str) -> tuple[Suite, list[tuple[str, Any, Config]]]:
    """The suite of that name, and variant, value of the sweep and config of its runs."""
    content = read_once(name)
    held = {key: value for key, value in content.items() if key not in ("kind", "data")}
    found = suite_of(contents.at(held, data, scale))
    base = contents.merged(found.base, {"data": {"name": data}})
    made = [(one, x, contents.cell(setting)) for one, x, setting in settings(found, base, {})]
    return found, made


# The quick tests have each suite once, at full scale of its first data, and a few at small scale.
SHIPPED = [*shipped()]
FIRST = [max(cells) for _, cells in itertools.groupby(SHIPPED[1::2], lambda cell: cell[0])]


@pytest.mark.parametrize(("name", "data", "scale"), quick(SHIPPED, FIRST + SHIPPED[::16]))
def test_every_shipped_suite_can_be_run(name: str, data: str, scale: str) -> None:
    """Its settings are sound configs; no data are read, which not every machine has."""
    if read_once(name).get("kind") != "training":
        cells = kinds.find(name, None, scale, {}).cells
        assert len({one.name for one in cells}) == len(cells) > 0
        assert len(cells) == COUNTS.get(name, {}).get(scale, len(cells))
        return
    found, made = runs_of(name, data, scale)
    assert len(made) >= 2 * len(found.seeds)
    assert {one for one, _, _ in made} == set(found.variants)
    key = found.sweep.key if found.sweep else "data.name"
    told = {(one.model_dump_json(), None if reads(one, key) else x) for _, x, one in made}
    assert len(told) == len(made)  # no two runs are the same, but for draws beside a swept key


def test_sizes_are_those_of_each_runs_own_data() -> None:
    """All of a text is trained on but what is held out, whatever the windows: nearly the same
    tokens, where sizes of the first variant would be too many, or too few, for the others."""
    text, read = {}, {}
    for one in kinds.find("context", None, "full", {}).cells:
        data = one.config.data  # type: ignore[attr-defined]
        text[data.context] = (data.train * data.context, data.test * data.context)
        source = read_source(one.config)  # type: ignore[attr-defined]
        read[data.context] = data.train
        assert data.train == source.official_test
        assert data.train + data.test <= len(source.labels)
    (least, *_, most), held = sorted(train for train, _ in text.values()), text[128][1]
    assert most - least < 0.01 * most and {test for _, test in text.values()} == {held}
    assert len(set(read.values())) == 3 and held == 64_000


def test_the_published_suite_is_the_published_one() -> None:
    for data, rate, batch in (("mnist", {0.05, 0.01}, 64), ("cifar10", {0.03, 0.005}, 128)):
        content = contents.at(contents.read("cnn"), data, "full")
        held = {table["local"]["lr"] for table in content["variants"].values()}
        assert held == rate and content["base"]["local"]["batch"] == batch
        assert len(content["seeds"]) == 3 and len(content["variants"]) == 6
        federation = content["base"]["federation"]
        run = {"clients": 20, "per-round": 5, "rounds": 30}
        assert federation == {**run, "aggregate": "mean"}  # the published server has no weights


@pytest.mark.parametrize("scale", ["small", "full"])
def test_ablations_change_one_thing(scale: str) -> None:
    """Suite context: the same tokens a round, batch and all else; suite batch: an epoch a round."""
    names = {"federation.seed", "data.context", "data.train", "data.test", "local.steps"}
    configs = configs_of("context", scale)
    assert len({one.data.context * one.local.steps * one.local.batch for one in configs}) == 1
    assert len({_without(one, names) for one in configs}) == 1
    configs = configs_of("batch", scale)
    assert all(one.local.batch * one.local.steps == one.data.train for one in configs)
    for recipe in ("newton-schulz", "randomized-polar"):
        part = [one for one in configs if one.orthogonalizer.name == recipe]
        names = {"federation.seed", "local.batch", "local.steps", "federation.rounds"}
        assert len({one.local.batch for one in part}) == 3
        assert len({_without(one, names) for one in part}) == 1
    assert len({_without(one, {"federation.seed"}) for one in part}) == 3  # the negative control


def configs_of(name: str, scale: str) -> list[Config]:
    return [config for *_, config in runs_of(name, contents.read(name)["data"], scale)[1]]


def _without(config: Any, keys: set[str]) -> str:
    tables = config.model_dump()
    for key in keys:
        table, _, name = key.partition(".")
        tables[table].pop(name)
    return str(tables)


def test_a_suite_may_build_on_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('like = "dp-classification"\ntitle = "mine"\n[base.task]\nmodel = "tanh-cnn"\n')
    mine, below = contents.read(str(file)), contents.read("dp-classification")
    assert mine["title"] == "mine" and mine["base"]["task"]["model"] == "tanh-cnn"
    assert mine["variants"] == below["variants"] and below["base"]["task"]["model"] == "mlp"
    for like, why in (
        (f'"{file}"', "leads back to a suite"),
        ("3", "is not a name"),
        ('"no"', "suite no does not exist"),
    ):
        file.write_text(f"like = {like}\n")
        with pytest.raises(InputError, match=why):
            contents.read(str(file))
