"""Gradients of small models by hand."""

from collections.abc import Sequence

import numpy as np

from reference.trees import Tree

BATCH_NORM_EPS = 1e-5


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def of_matrix(model: Tree, inputs: np.ndarray, labels: np.ndarray) -> Tree:
    """The gradient of the mean of 1 - p_y, where p = softmax(inputs X)."""
    p = softmax(inputs @ model["weight"])
    p_y = p[np.arange(len(labels)), labels][:, None]
    slope = inputs.T @ (p_y * (p - np.eye(p.shape[1])[labels]))
    return {"weight": slope / len(labels)}


def hidden(model: Tree, inputs: np.ndarray) -> np.ndarray:
    return np.tanh(inputs @ model["0.weight"].T + model["0.bias"])


def scores(model: Tree, inputs: np.ndarray) -> np.ndarray:
    """The outputs of the perceptron Linear, Tanh, Linear, whose layers have numbers."""
    return hidden(model, inputs) @ model["2.weight"].T + model["2.bias"]


def of_perceptron(model: Tree, inputs: np.ndarray, labels: np.ndarray) -> Tree:
    """The gradient of the perceptron's mean cross-entropy."""
    h = hidden(model, inputs)
    out = (softmax(scores(model, inputs)) - np.eye(len(model["2.bias"]))[labels]) / len(labels)
    back = (out @ model["2.weight"]) * (1 - h**2)
    return {"0.weight": back.T @ inputs, "0.bias": back.sum(0),
            "2.weight": out.T @ h, "2.bias": out.sum(0)}  # fmt: skip


def of_normalized_perceptron(model: Tree, inputs: np.ndarray, labels: np.ndarray) -> Tree:
    """The same for Linear, BatchNorm, Tanh, Linear, normalized by the batch."""
    z = inputs @ model["0.weight"].T + model["0.bias"]
    deviation = np.sqrt(z.var(0) + BATCH_NORM_EPS)
    unit = (z - z.mean(0)) / deviation
    h = np.tanh(unit * model["1.weight"] + model["1.bias"])
    p = softmax(h @ model["3.weight"].T + model["3.bias"])
    out = (p - np.eye(p.shape[1])[labels]) / len(labels)
    back = (out @ model["3.weight"]) * (1 - h**2)
    of_unit = back * model["1.weight"]
    of_z = (of_unit - of_unit.mean(0) - unit * (of_unit * unit).mean(0)) / deviation
    return {"0.weight": of_z.T @ inputs, "0.bias": of_z.sum(0),
            "1.weight": (back * unit).sum(0), "1.bias": back.sum(0),
            "3.weight": out.T @ h, "3.bias": out.sum(0)}  # fmt: skip


def batch_statistics(model: Tree, inputs: np.ndarray, share: float) -> Tree:
    """The running statistics after a batch, which counts with this share."""
    z = inputs @ model["0.weight"].T + model["0.bias"]
    before = model["1.running_mean"], model["1.running_var"]
    of_batch = z.mean(0), z.var(0, ddof=1)
    moved = [(1 - share) * old + share * new for old, new in zip(before, of_batch, strict=True)]
    return {"1.running_mean": moved[0], "1.running_var": moved[1]}


def of_adapters(
    model: Tree, inputs: np.ndarray, labels: np.ndarray, bases: Sequence[np.ndarray]
) -> Tree:
    """The same for two fixed matrices without bias, of which each has low-rank adapters."""
    A, B = ([model[f"{layer}.lora_{factor}.weight"] for layer in (0, 2)] for factor in "AB")
    first, second = (W + b @ a for W, a, b in zip(bases, A, B, strict=True))
    h = np.tanh(inputs @ first.T)
    out = (softmax(h @ second.T) - np.eye(len(second))[labels]) / len(labels)
    back = (out @ second) * (1 - h**2)
    slopes = back.T @ inputs, out.T @ h
    return {
        f"{layer}.lora_{factor}.weight": B[k].T @ slopes[k] if factor == "A" else slopes[k] @ A[k].T
        for k, layer in enumerate((0, 2))
        for factor in "AB"
    }
