"""A Ray cluster of two nodes on this machine: `python -m tests.chaos.cluster FOLDER`.

It writes FOLDER/address, kills its second node when FOLDER/kill appears, and ends with FOLDER/stop.
"""

import sys
import time
from pathlib import Path

LONGEST = 300.0  # seconds; then it ends by itself


def main(folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    second = nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    (folder / "address").write_text(str(nodes.address))
    end = time.monotonic() + LONGEST
    while time.monotonic() < end and not (folder / "stop").exists():
        if second is not None and (folder / "kill").exists():
            nodes.remove_node(second, allow_graceful=False)
            second = None
        time.sleep(0.02)
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
