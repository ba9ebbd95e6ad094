"""What a Ray cluster is told that was there before the run."""

import os

import pytest

from fedmuon.experiments.engines.ray_cluster import THREADS, connected

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_workers_of_a_cluster_take_our_threads(cluster: str) -> None:
    """`cpus-per-client` is theirs, too: the cluster's own environment does not have them."""
    with connected(cluster, threads=3):
        import ray

        assert ray.get(ray.remote(os.getenv).remote(THREADS)) == "3"
    assert THREADS not in os.environ  # of whoever comes next
