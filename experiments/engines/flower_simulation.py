"""Run any Flower app on Ray workers, faster than Flower's own simulation engine.

    from fedmuon.flower import simulate

    simulate(server_app, client_app, num_supernodes=100)

Use `RayGrid` alone if Ray is already connected. Runs inside `shared_ray()` share one Ray instance.
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
    """Run a Flower ServerApp with simulated nodes, and return the server's final context.

    Args:
        server_app: The app of the server, which runs in this process.
        client_app: The app of the clients, which run in Ray's workers.
        num_supernodes: Number of nodes.
        run_config: Settings that both apps find in their context. Nested tables become dotted keys,
            as in Flower.
        workers: Number of worker processes. The default is the maximum that fits.
        resources: Ray resources of a worker; the default is one CPU.
        address: Address of a Ray cluster. Without it, a new local Ray is started, and torch uses
            one thread in this process so that the workers can use the other cores.
        verbose: Whether to show the messages of Flower and Ray and the clients' output.
        seed: Seed of the random node ids.

    Returns:
        The server's context, with the state that the ServerApp stored in it.

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
        # Idle torch threads would spin for milliseconds after each loop, on cores that the workers
        # need. The import is here because a ServerApp may not need torch.
        from fedmuon.core.threads import one_thread

        threads = one_thread()
    with connected(address, verbose), threads:
        options: dict[str, Any] = {"workers": workers, "resources": resources}
        with grids.RayGrid(
            client_app, num_supernodes, run_config=run_config, seed=seed, **options
        ) as grid:
            server_app(grid, context)
    return context


def _modules() -> tuple[Any, Any]:
    """Import Ray and Flower late, because they read their settings on import."""
    quiet_ray()
    from fedmuon.server.ray import flower_internals, grid

    return flower_internals, grid


def __getattr__(name: str) -> Any:
    if name == "RayGrid":
        return _modules()[1].RayGrid
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
