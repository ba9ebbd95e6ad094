"""A client's process of a deployment without its SuperNode: it starts, answers one message, ends.

    python -m fedmuon.experiments.engines.probe FILE

It prints the most bytes that it held. FILE is pickled by `probed` of `planning/pace.py`.
"""

import pickle
import sys
from pathlib import Path

import flwr.supernode.cli.flwr_clientapp  # noqa: F401  what Flower starts

from fedmuon.clients.client_app import app
from fedmuon.runs.provenance import peak
from fedmuon.server.ray.flower_internals import context, identify


def main() -> None:
    """Do what such a process does, in its order."""
    identify()
    message, nodes = pickle.loads(Path(sys.argv[1]).read_bytes())
    node = message.metadata.dst_node_id  # equals its partition number here
    app(message, context(node, (node, nodes), None, {}))
    print(peak())


if __name__ == "__main__":
    main()
