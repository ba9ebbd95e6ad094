"""Which matrices of a model Muon updates, and which parameters the auxiliary optimizer updates."""

from fnmatch import fnmatchcase
from glob import escape

from torch import nn

from fedmuon.config.load import Config
from fedmuon.config.schema import reads
from fedmuon.core.errors import InputError
from fedmuon.optim.adapters import find_pairs
from fedmuon.optim.routing import FUSED, RoutingTable, routing_table
from fedmuon.tasks.base import Task
from fedmuon.tasks.networks import NetworkTask


def routes(network: nn.Module, rule: str, qkv: str = "split", muon: str = "") -> RoutingTable:
    """List every parameter with its shape, its shape as a matrix [out, -1] and its optimizer.

    You can print the result. The rule `hidden` assigns vectors, embeddings, norms, and the first
    and last layer to the auxiliary optimizer. If no matrix is left for Muon, Muon updates the
    largest matrix (see `fedmuon.optim.routing`). The rule `all-matrices` assigns only parameters
    with fewer than two axes to the auxiliary optimizer. Fused projections are split into their
    matrices, unless `qkv` is `whole`. If `muon` contains name patterns, separated by commas, these
    patterns replace the rule.
    """
    learned = [parameter for parameter in network.named_parameters() if parameter[1].requires_grad]
    matrices = [name for name, param in learned if param.ndim >= 2]
    fused = FUSED if qkv == "split" else {}
    if muon:
        patterns = [pattern.strip() for pattern in muon.split(",")]
        if "" in patterns:
            raise InputError(
                f"[local] muon = '{muon}' contains an empty pattern: write name patterns, "
                "such as '*.weight', and separate them by commas"
            )
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in matrices):
                examples = ", ".join(matrices[:6]) + (", ..." if len(matrices) > 6 else "")
                raise InputError(
                    f"the pattern {pattern!r} in [local] muon matches no matrix of the model. The "
                    f"matrices are {examples or 'none'}. Use patterns that match some of these "
                    "names."
                )
        to_muon = [
            name for name in matrices if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        to_aux = [escape(name) for name, _ in learned if name not in to_muon]
        return routing_table(network, to_muon=[*map(escape, to_muon)], to_aux=to_aux, fused=fused)
    return routing_table(network, to_muon=matrices if rule == "all-matrices" else (), fused=fused)


def routing_of(config: Config) -> tuple[str, str, str]:
    """Return the keys of [local] that select the parameters of Muon."""
    muon = config.local.muon if reads(config, "local.muon") else ""
    return config.local.route, config.local.qkv, muon


def routed(config: Config, task: Task) -> dict[str, int] | None:
    """Return the number of matrices of each parameter, or None if each one is a matrix."""
    if not isinstance(task, NetworkTask) or not reads(config, "orthogonalizer.name"):
        return None
    return matrix_counts(task.module, *routing_of(config))


def matrix_counts(
    network: nn.Module, rule: str, qkv: str = "split", muon: str = ""
) -> dict[str, int]:
    """Return the number of matrices into which each parameter is split for orthogonalization.

    The number is 0 if the auxiliary optimizer updates the parameter. The number is 1 for an
    ordinary matrix, and larger for a fused projection. Raise an error if the rule finds no matrix.
    """
    table = routes(network, rule, qkv, muon)
    counts = {row.name: row.matrices[0] if row.matrices else 0 for row in table}
    if not any(counts.values()):
        if find_pairs(row.name for row in table):
            raise InputError(
                "the adapters have rank 1, so their factors are vectors, which leave no room for "
                "Muon's matrices. Set the rank of the adapters to 2 or more, for example with "
                "[task] lora-rank = 2, or set [local] recipe = 'fedavg'."
            )
        of_norms = any(param.ndim >= 2 and param.requires_grad for param in network.parameters())
        fix = "route = 'all-matrices', or " if of_norms and rule != "all-matrices" else ""
        raise InputError(
            f"[local] route = '{rule}' finds no matrix to orthogonalize, because this network "
            f"has only vectors, norms and scalars. Set {fix}recipe = 'fedavg'."
        )
    if qkv == "whole" and counts == matrix_counts(network, rule, "split", muon):
        raise InputError(
            "[local] qkv = 'whole' has no effect, because Muon updates no parameter that contains "
            "query, key and value projections. Leave qkv out."
        )
    return counts
