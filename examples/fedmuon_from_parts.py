"""FedMuon built from its parts, and compared with the built-in one.

Run `fedmuon_from_parts.py [inline | ray]`. A recipe is a chain of links for the clients and a rule
for the server. A link is a gradient transformation: `init(params) -> state` and
`update(direction, state, context) -> (direction, state)`. Parameters, directions and states are
mappings of names to tensors with a leading replica axis [S, rows, columns].
"""

import sys

import torch

import fedmuon
from fedmuon import Chain, Link, Recipe, links

ENGINE = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
CONFIG = {
    "data": {"name": "digits", "train": 1000, "test": 500},
    "federation": {"clients": 10, "per-round": 5, "rounds": 20},
    "local": {"steps": 5},
    "engine": ENGINE,
}
LR, BETA, LAMBDA = 1.0, 0.9, 1e-3


def momentum(gradient, state, context):
    """M <- beta M + (1 - beta) G. The state and the new direction are both M."""
    after = {name: BETA * state[name] + (1 - BETA) * value for name, value in gradient.items()}
    return after, after


def smoothed_polar(m: torch.Tensor) -> torch.Tensor:
    """M (M^T M + lambda I)^(-1/2): every singular value s becomes s / sqrt(s^2 + lambda)."""
    values, vectors = torch.linalg.eigh(m.mT @ m)
    scaled = vectors / (values + LAMBDA).sqrt()[..., None, :]
    return m @ (scaled @ vectors.mT)


def descend(direction, context):
    """X <- X - lr O. The direction of the last link is added to the model."""
    return {name: -LR * context.factor * value for name, value in direction.items()}


def average(old, mean, states):
    """Take the mean of the clients' models, and keep the mean of their momenta."""
    return mean, states


if __name__ == "__main__":
    chain = Chain((
        links.gradient(),  # the gradient of the client's mini-batch
        Link("momentum", links.zeros, momentum, lasting=True),
        links.orthogonalize(smoothed_polar),
        links.stateless("descend", descend),
    ))  # fmt: skip
    shared = ("momentum",)  # sent to the clients, returned by them, stored by the server
    parts = fedmuon.run(CONFIG, recipe=Recipe(chain, average, shared, shared, shared))
    built_in = fedmuon.recipes.fedmuon(LR, BETA, fedmuon.orthogonalizers.smoothed_polar(LAMBDA))
    whole = fedmuon.run(CONFIG, recipe=built_in)
    apart = (parts.model["weight"] - whole.model["weight"]).abs().max()
    print(f"accuracy {parts.summary['accuracy']:.3f}, largest difference {apart:.0e}")
