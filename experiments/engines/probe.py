"""Run a client process of a deployment without its SuperNode, and answer one message.

    python -m fedmuon.experiments.engines.probe FILE

The process prints its peak memory in bytes. FILE is a pickle that `probed` in `planning/pace.py`
writes.
"""

import pickle
import sys
from pathlib import Path

import flwr.supernode.cli.flwr_clientapp  # noqa: F401  the module that Flower starts

from fedmuon.clients.client_app import app
from fedmuon.runs.provenance import peak
from fedmuon.server.ray.flower_internals import context, identify


def main() -> None:
    """Do the same steps as a client process of a deployment, in the same order."""
    identify()
    message, nodes = pickle.loads(Path(sys.argv[1]).read_bytes())
    node = message.metadata.dst_node_id  # in this probe, the id equals the partition number
    app(message, context(node, (node, nodes), None, {}))
    print(peak())


if __name__ == "__main__":
    main()
