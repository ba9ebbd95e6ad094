"""Arithmetic on models, which are dictionaries of arrays."""

from collections.abc import Callable, Sequence

import numpy as np

Tree = dict[str, np.ndarray]  # name of a parameter -> array
Trees = dict[str, Tree]  # "model", or the name of a state -> its arrays


def each(function: Callable[..., np.ndarray], *trees: Tree) -> Tree:
    """Apply a function to the arrays of the trees that have the same name."""
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def zeros(tree: Tree) -> Tree:
    return each(np.zeros_like, tree)


def mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """The weighted mean, entry by entry."""
    names = trees[0]
    return {name: np.asarray(np.average([t[name] for t in trees], 0, weights)) for name in names}


def is_statistic(name: str) -> bool:
    """Whether an array is a running statistic of BatchNorm, which has no gradient."""
    return name.endswith(("running_mean", "running_var"))


def largest_gap(tree: Tree, other: Tree) -> float:
    """The largest absolute difference of two trees with the same names."""
    assert tree.keys() == other.keys(), (tree.keys(), other.keys())
    return max(float(np.abs(tree[name] - other[name]).max()) for name in tree)
