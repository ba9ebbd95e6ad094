"""Any app of Flower's on Ray's workers, without the waiting of Flower's own simulation.

    from fedmuon.flower import simulate

    simulate(server_app, client_app, num_supernodes=100)

`RayGrid` is the Grid alone, for a Ray that is connected. Runs within `shared_ray()` use one Ray.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from fedmuon.experiments.engines.ray_cluster import connected, quiet_ray, shared_ray

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    from fedmuon.server.ray.grid import RayGrid

__all__ = ["RayGrid", "shared_ray", "simulate"]


def simulate(
    server_app: "ServerApp",
    client_app: "ClientApp",
    num_supernodes: int,
    *,
    run_config: dict[str, Any] | None = None,
    workers: int | None = None,
    resources: dict[str, float] | None = None,
    address: str = "",
    verbose: bool = False,
    seed: int | None = None,
) -> "Context":
    """Run a Flower ServerApp with simulated nodes, and return the context that it leaves.

    Args:
        server_app: The app of the server, which runs in this process.
        client_app: The app of the clients, which run in Ray's workers.
        num_supernodes: Number of nodes.
        run_config: Settings that both apps find in their context. Nested tables become dotted keys,
            as in Flower.
        workers: Number of worker processes; as many as fit by default.
        resources: Ray resources of a worker; one CPU by default.
        address: A Ray cluster. Without it, a new local Ray is started, and torch in this process
            uses one thread so that the workers have the cores.
        verbose: Whether to show the messages of Flower and Ray and what clients print.
        seed: Makes the random node ids the same each time.

    Returns:
        The server's context, with the state that the ServerApp left.

    Example:
        >>> from flwr.app import Message, RecordDict
        >>> from flwr.clientapp import ClientApp
        >>> from flwr.serverapp import ServerApp
        >>> from fedmuon.flower import simulate
        >>> client_app, server_app = ClientApp(), ServerApp()
        >>> @server_app.main()
        ... def main(grid, context):
        ...     print(len(list(grid.get_node_ids())), "nodes")
        >>> context = simulate(server_app, client_app, num_supernodes=3)  # slow: starts Ray
        3 nodes
    """
    flower_internals, grids = _modules()
    config = flower_internals.flat(run_config)
    context = flower_internals.context(flower_internals.SERVER, (), None, config)
    threads: AbstractContextManager[Any] = nullcontext()
    if not address and "torch" in sys.modules:
        # Several threads would spin for milliseconds after each loop, on cores that workers have
        # work for. This saves importing torch where the ServerApp does not.
        from fedmuon.core.threads import one_thread

        threads = one_thread()
    with connected(address, verbose), threads:
        asked: dict[str, Any] = {"workers": workers, "resources": resources}
        with grids.RayGrid(
            client_app, num_supernodes, run_config=run_config, seed=seed, **asked
        ) as grid:
            server_app(grid, context)
    return context


def _modules() -> tuple[Any, Any]:
    """Import Ray and Flower late, because they read their settings then."""
    quiet_ray()
    from fedmuon.server.ray import flower_internals, grid

    return flower_internals, grid


def __getattr__(name: str) -> Any:
    if name == "RayGrid":
        return _modules()[1].RayGrid
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
