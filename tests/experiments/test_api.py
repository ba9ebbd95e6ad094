"""What `import fedmuon` offers: it does what the commands do, with objects and plain results."""

import inspect
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_off import interrupted
from scipy import stats
from torch import nn

import fedmuon
from fedmuon.experiments.cli import main

TINY = {
    "data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5, "classes": 3,
             "minimum": 5},
    "federation": {"clients": 4, "per-round": 2, "rounds": 4},
    "local": {"lr": 0.05, "steps": 1},
    "orthogonalizer": {"lambda": 0.1},
    "engine": {"dtype": "float64", "device": "cpu"},
    "output": {"evaluate-every": 2},
}  # fmt: skip

BARE = {name: table for name, table in TINY.items() if name != "orthogonalizer"}


def drawn() -> tuple[tuple[np.ndarray, np.ndarray], dict[str, Any]]:
    """Samples of two classes, and tables to run with them."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((80, 4)), rng.integers(2, size=80)
    return data, {**TINY, "data": {"minimum": 5}, "task": {}}


def test_every_public_name_is_there_and_documented() -> None:
    for name in fedmuon.__all__:
        found = getattr(fedmuon, name)
        assert name in dir(fedmuon) and (name == "__version__" or inspect.getdoc(found))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fedmuon.nothing  # noqa: B018


def test_a_run_is_the_command_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fedmuon.run(TINY, out=tmp_path / "a")
    again = fedmuon.run(fedmuon.Config.model_validate(TINY), out=str(tmp_path / "b"))
    assert capsys.readouterr().out == ""  # silent unless asked
    files = [(one.path / "model.safetensors").read_bytes() for one in (result, again)]
    assert files[0] == files[1]
    assert [one["round"] for one in result.rounds] == [1, 2, 3, 4]
    assert result.summary == json.loads((tmp_path / "a" / "summary.json").read_text())
    assert result.model["weight"].shape == (5, 3)
    assert list(result.to_pandas()["round"]) == [1, 2, 3, 4]
    loss, accuracy = result.plot().axes
    assert len(loss.lines) == 3 and len(accuracy.lines) == 1


def test_a_run_goes_on(tmp_path: Path) -> None:
    class Stopping(fedmuon.callbacks.Callback):
        def on_round(self, record: Mapping, state: object) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

    whole = fedmuon.run(TINY, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedmuon.run(TINY, out=tmp_path / "cut", callbacks=[Stopping()])
    resumed = fedmuon.run(out=tmp_path / "cut", resume=True)
    for name in ("model.safetensors", "momentum.safetensors", "config.toml"):
        assert (resumed.path / name).read_bytes() == (whole.path / name).read_bytes()
    with pytest.raises(fedmuon.InputError, match="resume=True needs out"):
        fedmuon.run(TINY, resume=True)


def test_given_objects_are_needed_again(tmp_path: Path) -> None:
    data, tables = drawn()
    result = fedmuon.run(tables, data=data, out=tmp_path / "a")
    assert fedmuon.run(data=data, out=tmp_path / "a", resume=True).summary == result.summary
    with pytest.raises(fedmuon.InputError, match="passed in Python"):
        fedmuon.run(out=tmp_path / "a", resume=True)
    other = data[0] + 1, data[1]
    (tmp_path / "a" / "summary.json").unlink()
    with pytest.raises(fedmuon.InputError, match="pass the same objects"):
        fedmuon.run(data=other, out=tmp_path / "a", resume=True)


def test_what_changed_between_two_runs_is_seen(tmp_path: Path) -> None:
    """Objects are read once a run, and again by the next one, even if they are the same objects."""
    data, tables = drawn()
    calls: list[int] = []

    def read() -> tuple[np.ndarray, np.ndarray]:
        calls.append(1)
        return data

    def initial(out: Path) -> bytes:
        return (out / "initial.safetensors").read_bytes()

    first = fedmuon.run(tables, data=data).summary["train_loss"]
    fedmuon.run(tables, data=read)
    with pytest.raises(KeyboardInterrupt):
        fedmuon.run(tables, data=data, out=tmp_path / "cut", callbacks=[interrupted])
    data[1][:] = 1 - data[1]
    assert fedmuon.run(tables, data=data).summary["train_loss"] != first
    assert fedmuon.run(tables, data=read).summary["train_loss"] != first and len(calls) == 2
    with pytest.raises(fedmuon.InputError, match="pass the same objects"):
        fedmuon.run(data=data, out=tmp_path / "cut", resume=True)
    module, bare = nn.Linear(4, 2), {**BARE, "data": {"minimum": 5}, "local": {"lr": 0.05}}
    for name in ("a", "b"):
        fedmuon.run(bare, data=data, task=module, recipe="fedavg", out=tmp_path / name)
        module.weight.data.fill_(5.0)
    assert initial(tmp_path / "a") != initial(tmp_path / "b")


def test_a_keyword_overrides_the_config(tmp_path: Path) -> None:
    result = fedmuon.run({**BARE, "federation": {**TINY["federation"], "aggregate": "median"}},
                         recipe="fedavg", aggregate="trimmed-mean", out=tmp_path / "a")  # fmt: skip
    assert result.config.local.recipe == "fedavg"
    assert result.config.federation.aggregate == "trimmed-mean"


def test_stability_and_bound(tmp_path: Path) -> None:
    result = fedmuon.stability(TINY, trials=3, out=tmp_path / "s")
    assert len(result.neighbours) == 3 and result.bound["status"] == "certified"
    assert all(one["perturbation"] <= one["certificate"] for one in result.neighbours)
    again = fedmuon.bound(result)
    assert again["value"] == result.bound["value"]
    assert fedmuon.bound(result, l_orth=again["l_orth"] * 2)["value"] >= again["value"]
    assert result.plot().axes
    with pytest.raises(fedmuon.InputError, match="its own config"):
        fedmuon.bound(result, size=3)


def test_schedules_stay_certified_and_tighten(tmp_path: Path) -> None:
    """Smaller steps have smaller certificates, and perturbations keep to them."""
    constant = fedmuon.stability(TINY, trials=4, out=tmp_path / "c")
    falling = fedmuon.stability(
        TINY, trials=4, schedule=fedmuon.schedules.cosine(4), out=tmp_path / "f"
    )
    assert falling.bound["status"] == "certified"
    assert falling.bound["max_certificate"] < constant.bound["max_certificate"]
    assert all(one["perturbation"] <= one["certificate"] for one in falling.neighbours)


def test_a_map_of_ones_own(tmp_path: Path) -> None:
    def half(m: torch.Tensor) -> torch.Tensor:
        return 0.5 * m

    with_constant = fedmuon.stability(
        BARE, trials=4, orthogonalizer=fedmuon.Orthogonalizer(half, 0.5), out=tmp_path / "a"
    )
    assert with_constant.bound["status"] == "claimed" and with_constant.bound["l_orth"] == 0.5
    assert all(one["perturbation"] <= one["certificate"] for one in with_constant.neighbours)
    without = fedmuon.stability(BARE, trials=4, orthogonalizer=half, out=tmp_path / "b")
    assert without.bound["status"] == "refused" and "Lipschitz" in without.bound["refusal"]
    moved = [[one["perturbation"] for one in run.neighbours] for run in (with_constant, without)]
    assert moved[0] == moved[1] and max(moved[0]) > 0


def steep_between(m: torch.Tensor) -> torch.Tensor:
    """Half of what is small or large, fifty times what lies between, where no probe is drawn."""
    size = m.norm(dim=(-2, -1), keepdim=True)
    return torch.where((size > 0.01) & (size < 2), 50 * m, 0.5 * m)


def test_a_map_that_breaks_its_word_violates_the_bound(tmp_path: Path) -> None:
    """Whoever reads the folder is told, and whose word it was; a map that keeps it is claimed."""
    from fedmuon.experiments.stability import neighbours_report
    from fedmuon.experiments.stability.neighbours import verdict_table

    kept, broken = (
        fedmuon.stability(
            BARE, trials=4, orthogonalizer=fedmuon.Orthogonalizer(given, 0.5), out=tmp_path / name
        )
        for name, given in (("kept", lambda m: 0.5 * m), ("broken", steep_between))
    )
    assert kept.bound["status"] == "claimed" and kept.bound["violation"] == 0
    assert any("claims L_orth" in one for one in kept.bound["assumptions"])
    ratio = max(one["perturbation"] / one["certificate"] for one in broken.neighbours
                if one["certificate"])  # fmt: skip
    assert broken.bound["status"] == "violated" and broken.bound["violation"] > 1
    assert broken.bound["violation"] <= ratio * (1 + 1e-9) and "times its" in broken.bound["note"]
    for result in (kept, broken):
        again = fedmuon.bound(result)
        assert {name: result.bound[name] for name in again} == again
    assert fedmuon.bound(broken, l_orth=1e6)["violation"] == 0  # another word, which holds
    assert "Violated" in neighbours_report.findings(broken.path).note
    assert neighbours_report.findings(kept.path).note == kept.bound["note"]
    assert "violated" in str(verdict_table(broken.path, broken.bound).title)


def test_runs_side_by_side(tmp_path: Path) -> None:
    found = []
    for recipe in ("fedmuon", "fedavg"):
        for seed in (0, 1):
            table = {**TINY["federation"], "seed": seed, "aggregate": "mean"}
            out = tmp_path / f"{recipe}{seed}"
            found.append(fedmuon.run({**BARE, "federation": table}, recipe=recipe, out=out))
    compared = fedmuon.compare([*found[:2], found[2].path, str(found[3].path)])
    assert [row["seeds"] for row in compared.rows] == [2, 2]
    assert [row["local.recipe"] for row in compared.rows] == ["fedmuon", "fedavg"]
    losses = [one.summary["test_loss"] for one in found[:2]]
    assert compared.rows[0]["test_loss"] == pytest.approx(np.mean(losses))
    low, high = stats.t.interval(0.95, 1, loc=np.mean(losses), scale=stats.sem(losses))
    assert compared.rows[0]["test_loss ±"] == pytest.approx((high - low) / 2)
    assert compared.rows[0]["test_loss ±"] != pytest.approx(np.std(losses, ddof=1))
    assert "recipe=fedavg" in repr(compared) and len(compared.to_pandas()) == 2
    assert "<td>recipe=fedavg</td>" in compared._repr_html_()
    for shown, count in ((compared, 1), (fedmuon.compare(found[0]), 0)):  # two seeds, and one
        for text in (repr(shown), shown._repr_html_()):
            assert text.count("± is half of the 95% interval of the mean") == count
    assert "<th>accuracy</th>" in found[0]._repr_html_()
    loss, _ = compared.plot().axes
    drawn = [one for one in loss.lines if len(np.asarray(one.get_xdata()))]  # others are the key's
    assert len(drawn) == 6 and len(loss.collections) == 4
    assert compared.plot()._repr_png_()[0][:4] == b"\x89PNG"  # pyright: ignore
    with pytest.raises(fedmuon.InputError, match="nothing to compare"):
        fedmuon.compare([])


def test_rows_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """The means of differences, with Student's interval, of the seeds that both rows have."""
    runs: dict[str, list[fedmuon.Result]] = {}
    for recipe, seeds in (("fedmuon", (3, 1, 2)), ("fedavg", (0, 1, 2, 3))):
        runs[recipe] = [
            fedmuon.run({**BARE, "federation": {**TINY["federation"], "seed": seed}}, recipe=recipe)
            for seed in seeds
        ]
    (row,) = fedmuon.compare(runs).differences("test-loss")
    ends = {name: {one.config.federation.seed: one.summary["test_loss"] for one in held}
            for name, held in runs.items()}  # fmt: skip
    away = np.array([ends["fedmuon"][seed] - ends["fedavg"][seed] for seed in (1, 2, 3)])
    half = 4.302652729911275 * away.std(ddof=1) / 3**0.5  # the t quantile at 0.975, from a table
    assert (row["first"], row["second"], row["seeds"]) == ("fedmuon", "fedavg", 3)
    assert row["mean"] == pytest.approx(away.mean())
    assert [row["low"], row["high"]] == pytest.approx([away.mean() - half, away.mean() + half])
    assert row["first higher"] == (away > 0).sum()
    with pytest.raises(fedmuon.InputError, match=r"'accurac'.* did you mean accuracy"):
        fedmuon.compare(runs).differences("accurac")
    one = {name: held[:2] for name, held in runs.items()}  # seeds 3 and 1, and seeds 0 and 1
    with pytest.raises(fedmuon.InputError, match=r"\[0, 1, 3\].* have 1 in common.*same seeds"):
        fedmuon.compare(one).differences()
    with pytest.raises(fedmuon.InputError, match="only one row"):
        fedmuon.compare(runs["fedavg"]).differences()


def test_a_run_can_end_early(tmp_path: Path) -> None:
    told = []

    class Tell(fedmuon.callbacks.Callback):
        def on_round(self, record: Mapping, state: object) -> None:
            told.append(record["round"])

        def on_end(self, result: dict) -> None:
            told.append(result["rounds"])

    early = fedmuon.callbacks.early_stopping("test_loss", patience=1, least=10.0)
    result = fedmuon.run(TINY, callbacks=[early, Tell()], out=tmp_path / "a")
    assert told == [1, 2, 3, 4] or told[-1] < 4
    assert "test_loss" in result.summary["stopped"] and result.summary["rounds"] == 4
    refused = fedmuon.bound(result)
    assert refused["status"] == "refused" and "early stopping" in refused["refusal"]
    named = {"evaluate-every": 1, "callback": "early-stopping",
             "options": {"patience": 2, "least": 10.0}}  # fmt: skip
    result = fedmuon.run({**TINY, "output": named}, out=tmp_path / "b")
    assert result.summary["rounds"] == 3 and result.summary["stopped"]
    seen: list[int] = []
    fedmuon.run(TINY, callbacks=[lambda record, state: seen.append(record["round"])])
    assert seen == [1, 2, 3, 4]


def test_what_callbacks_are_given_is_their_own(tmp_path: Path) -> None:
    """Whatever they do to it, the run is that without them."""

    class Meddling(fedmuon.callbacks.Callback):
        def on_round(self, record: Any, state: Any) -> None:
            assert record and all(v.isfinite().all() for v in state.params.values())
            for values in (state.params, *state.states.values()):
                for one in values.values():
                    one.fill_(float("nan"))
                values.clear()
            record["participants"].clear()
            record.clear()

        def on_end(self, result: Any) -> None:
            result["versions"].clear()
            result.clear()

    alone = fedmuon.run(TINY, out=tmp_path / "a")
    beside = fedmuon.run(TINY, out=tmp_path / "b", callbacks=[Meddling(), Meddling()])
    for name in ("model.safetensors", "momentum.safetensors"):
        assert (beside.path / name).read_bytes() == (alone.path / name).read_bytes()
    assert [one.keys() for one in beside.rounds] == [one.keys() for one in alone.rounds]
    assert beside.summary.keys() == alone.summary.keys()


def test_a_network_without_test_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = rng.standard_normal((30, 3)), rng.standard_normal(30)
    parts = [np.arange(10), np.arange(10, 25), np.arange(25, 30)]
    result = fedmuon.run(
        {"local": {"recipe": "fedavg", "lr": 0.1}, "federation": {"rounds": 3}},
        data=data, task=nn.Linear(3, 1), partition=parts, out=tmp_path / "a",
    )  # fmt: skip
    assert "test_loss" not in result.summary and result.summary["train_loss"] < 2
    assert (result.config.federation.clients, result.config.data.train) == (3, 30)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what trackers stand on
def test_trackers_are_fed_from_the_records(tmp_path: Path) -> None:
    """MLflow's own store and TensorBoard's own file, where they are installed."""
    mlflow = pytest.importorskip("mlflow")
    accumulated = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = [
        fedmuon.callbacks.mlflow("told", uri=str(tmp_path / "store")),
        fedmuon.callbacks.tensorboard(tmp_path / "board"),
    ]
    result = fedmuon.run(TINY, callbacks=trackers, out=tmp_path / "a")
    (run,) = mlflow.search_runs(experiment_names=["told"], output_format="list")
    assert run.data.metrics["test_loss"] == result.summary["test_loss"]
    assert run.info.status == "FINISHED"
    fedmuon.callbacks.mlflow("told").on_round({"round": 1, "seconds": 1.0}, None)  # and no end
    fedmuon.callbacks.mlflow("told").on_end({})
    board = accumulated.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    losses = {one["round"]: one["test_loss"] for one in result.rounds if "test_loss" in one}
    assert {one.step: one.value for one in board.Scalars("test_loss")} == pytest.approx(losses)


def logged(file: Path) -> list[bytes]:
    """The records in a file of wandb's: LevelDB's log behind a head of seven bytes."""
    data, place, found, parts = file.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # no record begins in a block's last bytes
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts, place = parts + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # whole, or the last part
            found, parts = [*found, parts], b""
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_is_fed_from_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Offline, its own file has every number of rounds.jsonl."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip("wandb")
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    tracker = fedmuon.callbacks.wandb("told", dir=str(tmp_path))
    result = fedmuon.run(TINY, callbacks=[tracker], out=tmp_path / "a")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = [proto.Record.FromString(one) for one in logged(file)]
    kept = [one.history.item for one in records if one.WhichOneof("record_type") == "history"]
    found = [{one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}
             for items in kept]  # fmt: skip
    ours = [{"_step" if k == "round" else k: v for k, v in one.items() if k != "participants"}
            for one in result.rounds]  # fmt: skip
    assert len(found) == len(ours) == 4
    assert all(one.items() <= theirs.items() for one, theirs in zip(ours, found, strict=True))
    capfd.readouterr()


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(fedmuon.InputError, match=r"pip install '\.\[wandb\]'"):
        fedmuon.callbacks.wandb()


NO_CONFIG, NO_LOCK = (
    "has no config.toml, so there is",
    "has no suite.lock, so there is no suite",
)


@pytest.mark.parametrize(("command", "why"), [
    ("run", NO_CONFIG), ("run --seed 1", NO_CONFIG), ("stability", NO_CONFIG),
    ("stability --trials 2", NO_CONFIG), ("stability --all", NO_CONFIG),
    ("stability --seed 1", NO_CONFIG), ("suite A1 --scale=small", f"{NO_LOCK} to resume"),
])  # fmt: skip
def test_nothing_is_resumed_where_a_run_was_killed_before_its_first_file(
    command: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else other defaults would begin; a config that is named says all."""
    (tmp_path / "SHA256SUMS").touch()
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--out", str(tmp_path), "--resume"])
    assert ended.value.code == 2 and f"{tmp_path} {why}" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["SHA256SUMS"]


def test_stability_resumes_with_keywords_what_is_there_alone(tmp_path: Path) -> None:
    with pytest.raises(fedmuon.InputError, match="leave resume=True out to begin"):
        fedmuon.stability(trials=2, out=tmp_path, resume=True)
    assert not any(tmp_path.iterdir())
    first = fedmuon.stability(TINY, trials=2, out=tmp_path / "a")
    again = fedmuon.stability(trials=2, out=tmp_path / "a", resume=True)
    assert again.bound == first.bound


@pytest.mark.parametrize("changes", [{}, {"recipe": "fedavg"}, {"route": "all-matrices"},
                                     {"muon": "head*"}])  # fmt: skip
def test_routes_before_a_run_are_those_of_the_run(changes: dict[str, str]) -> None:
    tables = {
        "data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        "federation": {"clients": 3, "per-round": 2, "rounds": 1},
        "task": {"name": "network", "model": "mlp"}, "local": {"steps": 1, **changes},
    }  # fmt: skip
    table = fedmuon.routes(tables)
    assert f"{table}\n" == fedmuon.run(tables).routes
    named = {one.name for one in table if one.optimizer == "muon"}
    expected = {
        "": {"hidden.weight"}, "fedavg": set(), "head*": {"head.weight"},
        "all-matrices": {"first.weight", "hidden.weight", "head.weight"},
    }  # fmt: skip
    assert named == expected["".join(changes.values())]


def test_routes_of_a_module_need_no_samples() -> None:
    sizes = ((784, 32), (32, 16), (16, 10))
    module = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    assert str(fedmuon.routes(module)) == str(fedmuon.optim.routing_table(module))
    assert {one.optimizer for one in fedmuon.routes(module, recipe="fedavg")} == {"fedavg"}
    with pytest.raises(fedmuon.InputError, match="data and task have no effect"):
        fedmuon.routes(module, task="network")
    with pytest.raises(fedmuon.InputError, match="one matrix"):
        fedmuon.routes()
