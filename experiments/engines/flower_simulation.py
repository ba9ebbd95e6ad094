"""Any app of Flower's on Ray's workers, without the waiting of Flower's own simulation.

    from fedmuon.flower import simulate

    simulate(server_app, client_app, num_supernodes=100)

`RayGrid` is the Grid alone, for a Ray that is connected.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    from fedmuon.server.ray.grid import RayGrid

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
    seed: int | None = None,
) -> "Context":
    """Run the ServerApp with so many nodes, on a Ray of its own or the cluster at `address`; the
    context that it leaves is returned. `resources` are Ray's for a worker, one CPU by default, and
    `workers` are as many as fit; both apps find `run_config` in their context, its tables as dotted
    keys, as Flower hands it over; `verbose` shows what Flower and Ray say and what clients print.
    Node ids are random, and with a `seed` the same each time. Beside a Ray of its own, whose
    workers have the cores, the ServerApp computes in one thread of torch's, if torch was imported
    before, unless it sets more."""
    from fedmuon.experiments.engines.ray_cluster import connected, quieten

    quieten()
    from fedmuon.server.ray.flower_internals import flat, server_context
    from fedmuon.server.ray.grid import RayGrid

    context = server_context(flat(run_config))
    with connected(address, verbose), nullcontext() if address else _one_thread():
        asked: dict[str, Any] = {"workers": workers, "resources": resources}
        with RayGrid(client_app, num_supernodes, run_config=run_config, seed=seed, **asked) as grid:
            server_app(grid, context)
    return context


def _one_thread() -> AbstractContextManager[Any]:
    """Torch, if it is loaded, has one within: several would spin for milliseconds after each loop,
    on cores that workers have work for."""
    if "torch" not in sys.modules:
        return nullcontext()
    from fedmuon.core.threads import one_thread

    return one_thread()


def __getattr__(name: str) -> Any:
    if name == "RayGrid":
        from fedmuon.server.ray.grid import RayGrid

        return RayGrid
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
