"""Which parameters of a network are orthogonalized, and by which matrix view."""

from torch import nn

from fedmuon.errors import InputError
from fedmuon.optim.routing import RoutingTable, routing_table


def routes(network: nn.Module, rule: str) -> RoutingTable:
    """Every parameter with its shape, its matrix view [out, -1] and its optimizer; print it.

    `hidden` leaves vectors, embeddings, norms, the first and the last layer to the auxiliary
    optimizer (see `fedmuon.optim.routing`); `all-matrices` only what has fewer than two axes.
    Fused projections are cut into their matrices.
    """
    every = [name for name, param in network.named_parameters() if param.ndim >= 2]
    return routing_table(network, to_muon=every if rule == "all-matrices" else ())


def counts(network: nn.Module, rule: str) -> dict[str, int]:
    """Into how many matrices each parameter is cut to be orthogonalized: 0 for the auxiliary
    optimizer's, 1 unless it is fused. A rule that finds none is refused."""
    found = {one.name: one.matrices[0] if one.matrices else 0 for one in routes(network, rule)}
    if not any(found.values()):
        raise InputError(
            f"[local] route = '{rule}' finds no matrix to orthogonalize in this network: set "
            "route = 'all-matrices', take a deeper [task] model, or recipe = 'fedavg'"
        )
    return found
