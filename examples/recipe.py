"""Your own link and server rule: `recipe.py [inline | ray]`."""

import sys

from fedmuon import Chain, Recipe, links, orthogonalizers, run

ENGINE = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
CONFIG = {"data": {"name": "digits", "train": 1000, "test": 500}, "engine": ENGINE}


def signed(direction, context):
    return {name: value + 0.1 * value.sign() for name, value in direction.items()}


def damped(old, mean, states):  # move 80% of the way to the mean model
    return {name: value.lerp(mean[name], 0.8) for name, value in old.items()}, states


if __name__ == "__main__":
    muon = links.momentum(0.9), links.orthogonalize(orthogonalizers.smoothed_polar(1e-3))
    chain = Chain((links.gradient(), *muon, links.stateless("signs", signed), links.descend(0.3)))
    kept = ("momentum",)  # sent to clients, returned and averaged, kept between rounds
    found = run(CONFIG, recipe=Recipe(chain, damped, sent=kept, returned=kept, kept=kept))
    print(f"accuracy {found.summary['accuracy']:.2f}")
