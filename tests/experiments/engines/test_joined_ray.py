"""What a Ray cluster is told that was there before the run, and what runs that share a Ray keep."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmuon
from fedmuon.core.arrays import read_arrays
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.experiments.engines import ray_cluster
from fedmuon.experiments.engines.ray_cluster import THREADS, connected
from fedmuon.experiments.engines.ray_engine import _kind_of_workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_workers_of_a_cluster_take_our_threads(cluster: str) -> None:
    """`cpus-per-client` is theirs, too: the cluster's own environment does not have them."""
    with connected(cluster, threads=3):
        import ray

        assert ray.get(ray.remote(os.getenv).remote(THREADS)) == "3"
    assert THREADS not in os.environ  # of whoever comes next


@pytest.mark.parametrize("stop", [Interrupted(), KeyboardInterrupt()])
def test_an_interrupt_within_compiled_code_is_one(cluster: str, stop: BaseException) -> None:
    """`ray.wait` ends with a SystemError if a signal's handler raised meanwhile."""
    with pytest.raises(type(stop)), connected(cluster):
        raise SystemError("returned a result with an exception set") from stop
    with pytest.raises(SystemError), connected(cluster):
        raise SystemError("another")


def settings(address: str = "", name: str = "ray", **local: Any) -> dict[str, dict[str, Any]]:
    """A config of a run that takes a moment, and that starts one worker, which takes seconds."""
    where = {"name": name, "dtype": "float64"} | ({"ray-address": address} if address else {})
    data = {"name": "synthetic", "train": 60, "test": 30}
    federation = {"clients": 4, "per-round": 1, "rounds": 2}
    return {"data": data, "federation": federation, "engine": where, "local": local}


def model(out: Path) -> np.ndarray:
    return read_arrays(out / "model.safetensors")[0]["weight"]


def apart(first: Path, second: Path) -> float:
    """The largest difference of two models."""
    return float(np.abs(model(first) - model(second)).max())


def test_runs_that_share_a_ray_share_its_workers(cluster: str, tmp_path: Path) -> None:
    """Each gives the numbers that it gives alone, whatever ran in its workers before."""
    import ray

    changed = settings(cluster, lr=0.25)
    jobs, workers = set(), []
    with fedmuon.flower.shared_ray():
        for place, config in enumerate([settings(cluster), changed, changed]):
            fedmuon.run(config, out=tmp_path / f"shared{place}")
            jobs.add(ray.get_runtime_context().get_job_id())
            assert ray_cluster._shared is not None
            workers.append({*next(iter(ray_cluster._shared.spare.values()))})
    assert len(jobs) == 1 and workers[0] and workers[0] == workers[1] == workers[2]
    assert not ray.is_initialized()
    fedmuon.run(settings(name="inline", lr=0.25), out=tmp_path / "inline")
    fedmuon.run(changed, out=tmp_path / "alone")  # which shares nothing
    assert not ray.is_initialized()
    for place in (1, 2):
        assert apart(tmp_path / f"shared{place}", tmp_path / "alone") == 0
        assert apart(tmp_path / f"shared{place}", tmp_path / "inline") < 1e-12
    assert apart(tmp_path / "shared0", tmp_path / "alone") > 1e-3  # the control


def test_a_sweep_with_clients_on_ray_is_that_inline(cluster: str, tmp_path: Path) -> None:
    """Its runs follow each other, and share what the first one starts."""
    for name, config in {"ray": settings(cluster), "inline": settings(name="inline")}.items():
        grid, out = {"local.lr": [0.25, 1.0]}, tmp_path / name
        fedmuon.sweep(config, grid=grid, seeds=2, select="train-loss", out=out)
    cells = [one.name for one in (tmp_path / "ray" / "runs").iterdir()]
    assert len(cells) == 4
    for name in cells:
        assert apart(*(tmp_path / engine / "runs" / name for engine in ("ray", "inline"))) < 1e-12


def test_a_run_that_fails_ends_the_shared_ray(cluster: str, tmp_path: Path) -> None:
    """Its workers may be at work still; the next run gets others."""
    import ray

    def stop(record: object, state: object) -> None:
        raise RuntimeError("enough")

    config = settings(cluster)
    with fedmuon.flower.shared_ray():
        with pytest.raises(InputError, match="enough"):
            fedmuon.run(config, out=tmp_path / "a", callbacks=[stop])
        assert not ray.is_initialized()
        fedmuon.run(config, out=tmp_path / "b")
        ray.shutdown()  # the caller may end it, too
        fedmuon.run(config, out=tmp_path / "c")
    assert apart(tmp_path / "b", tmp_path / "c") == 0


def test_workers_with_objects_of_the_caller_serve_one_run() -> None:
    """The object of that name may be another one by the next run."""
    plain = fedmuon.Config.model_validate(settings())
    assert _kind_of_workers(plain) == (("num_cpus", 1.0), ("num_gpus", 0.0))
    handed = plain.with_objects(fedmuon.config.user_objects.UserObjects(data=np.zeros(3)))
    named = fedmuon.Config.model_validate(settings(recipe="mine:recipe"))
    assert _kind_of_workers(handed) is None and _kind_of_workers(named) is None
