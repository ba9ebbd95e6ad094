"""Any app of Flower's on Ray's workers, without the waiting of Flower's own simulation.

    from fedmuon.flower import simulate

    simulate(server_app, client_app, num_supernodes=100)

`RayGrid` is the Grid alone, for a Ray that is connected.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    from fedmuon.server.grid import RayGrid

__all__ = ["RayGrid", "simulate"]


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
) -> "Context":
    """Run the ServerApp with so many nodes, on a Ray of its own or the cluster at `address`; the
    context that it leaves is returned. `resources` are Ray's for a worker, one CPU by default, and
    `workers` are as many as fit; both apps find `run_config`, of scalars, in their context;
    `verbose` shows what Flower and Ray say and what clients print."""
    from fedmuon.experiments.engines.ray_cluster import connected, quieten

    quieten()
    from fedmuon.server.flower_parts import server_context
    from fedmuon.server.grid import RayGrid

    context = server_context(run_config or {})
    with connected(address, verbose):
        asked: dict[str, Any] = {"workers": workers, "resources": resources}
        with RayGrid(client_app, num_supernodes, run_config=run_config, **asked) as grid:
            server_app(grid, context)
    return context


def __getattr__(name: str) -> Any:
    if name == "RayGrid":
        from fedmuon.server.grid import RayGrid

        return RayGrid
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
