"""What a Ray cluster is told that was there before the run, and what runs that share a Ray keep."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmuon
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
    """A config of a run that takes a moment."""
    where = {"name": name} | ({"ray-address": address} if address else {})
    data = {"name": "synthetic", "train": 60, "test": 30}
    federation = {"clients": 4, "per-round": 4, "rounds": 2}
    return {"data": data, "federation": federation, "engine": where, "local": local}


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


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
    fedmuon.run(settings(name="inline"), out=tmp_path / "alone")
    fedmuon.run(settings(name="inline", lr=0.25), out=tmp_path / "changed")
    found = [model(tmp_path / f"shared{place}") for place in range(3)]
    assert found == [model(tmp_path / name) for name in ("alone", "changed", "changed")]
    assert found[0] != found[1]  # the control

    fedmuon.run(settings(cluster), out=tmp_path / "after")  # which shares nothing
    assert not ray.is_initialized() and model(tmp_path / "after") == found[0]


def test_a_sweep_with_clients_on_ray_is_that_inline(cluster: str, tmp_path: Path) -> None:
    """Its runs follow each other, and share what the first one starts."""
    found = []
    for name, config in {"ray": settings(cluster), "inline": settings(name="inline")}.items():
        fedmuon.sweep(config, grid={"local.lr": [0.25, 1.0]}, seeds=2, out=tmp_path / name)
        files = (tmp_path / name / "runs").glob("*/model.safetensors")
        found.append({file.parent.name: model(file.parent) for file in files})
    assert len(set(found[0].values())) == 4 and found[0] == found[1]


def test_a_run_that_fails_ends_the_shared_ray(cluster: str, tmp_path: Path) -> None:
    """Its workers may be at work still; the next run gets others."""
    import ray

    def stop(record: object, state: object) -> None:
        raise RuntimeError("enough")

    with fedmuon.flower.shared_ray():
        with pytest.raises(InputError, match="enough"):
            fedmuon.run(settings(cluster), out=tmp_path / "a", callbacks=[stop])
        assert not ray.is_initialized()
        fedmuon.run(settings(cluster), out=tmp_path / "b")
        ray.shutdown()  # the caller may end it, too
        fedmuon.run(settings(cluster), out=tmp_path / "c")
    assert model(tmp_path / "b") == model(tmp_path / "c")


def test_workers_with_objects_of_the_caller_serve_one_run() -> None:
    """The object of that name may be another one by the next run."""
    plain = fedmuon.Config.model_validate(settings())
    assert _kind_of_workers(plain) == (("num_cpus", 1.0), ("num_gpus", 0.0))
    handed = plain.with_objects(fedmuon.config.user_objects.UserObjects(data=np.zeros(3)))
    named = fedmuon.Config.model_validate(settings(recipe="mine:recipe"))
    assert _kind_of_workers(handed) is None and _kind_of_workers(named) is None
