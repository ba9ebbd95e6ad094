"""A client's process of a deployment without its SuperNode: it starts, answers one message, ends.

    python -m fedmuon.experiments.engines.probe FILE

It prints the most bytes that it held. FILE is pickled by `probed`, in a folder of this user's.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedmuon.core.errors import InputError
from fedmuon.experiments.engines.processes import importable


def probed(messages: Sequence[object], nodes: int, folder: Path) -> tuple[float, int]:
    """Seconds until processes that answer a message each, all at once, have ended; and the most
    bytes that one of them held."""
    environment = {**os.environ, "PYTHONPATH": importable()}
    command = [sys.executable, "-m", "fedmuon.experiments.engines.probe"]
    for number, message in enumerate(messages):
        (folder / f"{number}.pickle").write_bytes(pickle.dumps((message, nodes)))
    start = time.perf_counter()
    running = [
        subprocess.Popen(
            [*command, folder / f"{number}.pickle"], stdout=subprocess.PIPE, env=environment
        )
        for number in range(len(messages))
    ]
    try:
        said = [one.communicate()[0] for one in running]
    finally:
        for one in running:
            one.kill()
    seconds = time.perf_counter() - start
    if any(one.returncode for one in running):
        raise InputError("a client's process cannot answer here: see what it says above")
    return seconds, max(map(int, said))


def main() -> None:
    """What such a process does, in its order."""
    import flwr.supernode.cli.flwr_clientapp  # noqa: F401  what Flower starts

    from fedmuon.clients.client_app import app
    from fedmuon.runs.provenance import peak
    from fedmuon.server.ray.flower_internals import context, identify

    identify()
    message, nodes = pickle.loads(Path(sys.argv[1]).read_bytes())
    node = message.metadata.dst_node_id  # which is the number of its partition there
    app(message, context(node, (node, nodes), None, {}))
    print(peak())


if __name__ == "__main__":
    main()
