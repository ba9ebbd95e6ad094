"""The orthogonalization table of `fedmuon plan`: its matrices, and that methods are those used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_plan import MLP, prepared

from fedmuon.experiments.planning import orthogonalization as planned
from fedmuon.experiments.planning.orthogonalization import orthogonalization
from fedmuon.orthogonalize import polynomial, spectral
from fedmuon.runs.fixed_files import routing


def seen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the methods that are called from now on."""
    called: set[str] = set()
    for module, name in ((spectral, "by_svd"), (polynomial, "_iterate_on_matrix")):
        work = getattr(module, name)

        def noted(*arguments: Any, name: str = name, work: Any = work) -> Any:
            called.add(name)
            return work(*arguments)

        monkeypatch.setattr(module, name, noted)
    return called


@pytest.mark.parametrize(
    ("keys", "method", "calls"),
    [
        ({"name": "smoothed-polar", "lambda": 0.1}, "eigenvectors of Gram matrices, float32",
         set()),
        ({"name": "smoothed-polar", "lambda": 1e-5}, "eigenvectors of Gram matrices, float64",
         set()),
        ({"name": "smoothed-polar", "lambda": 1e-20}, "SVD, float64", {"by_svd"}),
        ({"name": "clipped-sign", "clip-level": 1e-9}, "SVD, float64", {"by_svd"}),
        ({"name": "newton-schulz", "steps": 3}, "products of Gram matrices, float32", set()),
        ({"name": "newton-schulz", "coefficients": "jordan", "steps": 12},
         "products of whole matrices, float32", {"_iterate_on_matrix"}),
        ({"name": "newton-schulz", "products": "bfloat16"}, "products of whole matrices, bfloat16",
         {"_iterate_on_matrix"}),
    ],
)  # fmt: skip
def test_the_method_is_the_one_that_is_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    method: str,
    calls: set[str],
) -> None:
    monkeypatch.setattr(planned, "OTHERS", {})
    run, state = prepared(tmp_path, orthogonalizer=keys, engine={"dtype": "float32"})
    called = seen(monkeypatch)
    record = orthogonalization(run, state)
    (row,) = record["stacks"]
    assert (row["method"], called) == (method, calls)
    assert row["seconds"] == record["seconds"] > 0 and record["faster"] == {}


def test_the_matrices_of_a_network_are_those_of_its_routes(tmp_path: Path) -> None:
    config = {**MLP, "orthogonalizer": {"name": "newton-schulz"}}
    run, state = prepared(tmp_path, config)
    task: Any = run.experiment.task
    routes = [route.matrices for route in routing(run.config, task.module)]
    expected = sorted([*matrices] for matrices in routes if matrices is not None)
    assert expected
    record = orthogonalization(run, state)
    assert sorted(row["matrices"] for row in record["stacks"]) == expected
    table = planned.table_of(record)
    assert table.row_count == len(expected) + 1 + len(record["faster"])


def test_only_faster_maps_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton-Schulz is timed as half, and then as twice, the time of the map of the run."""
    run, state = prepared(tmp_path)
    monkeypatch.setattr(planned, "native_half", lambda *_: False)
    for factor, offered in ((0.5, 1), (2.0, 0)):
        seconds = {"newton-schulz": factor, "smoothed-polar": 1.0}
        monkeypatch.setattr(planned, "_seconds", lambda table, _, by=seconds: by[table.name])
        record = orthogonalization(run, state)
        assert len(record["faster"]) == offered and record["seconds"] == 1.0


@pytest.mark.parametrize(
    "tables",
    [
        {"local": {"recipe": "fedavg"}},
        {"orthogonalizer": {"name": "gaussian-smoothed-sign", "sigma": 0.1}},
    ],
)
def test_other_runs_have_no_table(tmp_path: Path, tables: dict[str, Any]) -> None:
    run, state = prepared(tmp_path, **tables)
    assert orthogonalization(run, state) == {}


def test_a_zero_gradient_is_timed(tmp_path: Path) -> None:
    run, state = prepared(tmp_path)
    run.experiment.shards.inputs.zero_()
    assert torch.isfinite(torch.tensor(orthogonalization(run, state)["seconds"]))
