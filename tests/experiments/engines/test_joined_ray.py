"""What a Ray cluster is told that was there before the run."""

import os

import pytest

from fedmuon.core.errors import Interrupted
from fedmuon.experiments.engines.ray_cluster import THREADS, connected

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
