"""Names, shapes and dtypes of the tensors in messages and states, which custom stages must keep."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedmuon.core.errors import plain

ANNOUNCED = "Let both methods return tensors with the same names, shapes and dtypes."
RESTORED = "Return a tensor with the same shape and dtype for every parameter and state."
STORED_ALIKE = "Store the same names, shapes and dtypes for every client in every round."
STORABLE = (
    *(torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool),
)  # dtypes that files of client states can contain
Form = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor
Forms = dict[tuple[str, str], Form]  # name of a tree, name of a tensor -> form


@dataclass(frozen=True)
class TrialForms:
    """The forms that the trial of a stage has seen with one replica.

    Attributes:
        opened: The trees that `send` received, which `open` must restore.
        read: The trees that `reply` received, which `read` must restore.
        states: The states that `initial` returned.
        stored: The states that clients stored.
        personal: Names of parameters that stay on the client, so a message may lack them.
    """

    opened: Forms = field(default_factory=dict)
    read: Forms = field(default_factory=dict)
    states: Forms = field(default_factory=dict)
    stored: Forms = field(default_factory=dict)
    personal: frozenset[str] = frozenset()


def forms_of(trees: Mapping[str, Mapping[str, torch.Tensor]]) -> Forms:
    """Return the forms of all tensors."""
    return {
        (tree, name): (value.shape, value.dtype)
        for tree, tensors in trees.items()
        for name, value in tensors.items()
    }


def with_replicas(expected: Forms, actual: Forms, replicas: int) -> Forms:
    """Convert the forms of one replica to those of several replicas.

    A first axis of length 1 gets the length of the replicas, except if the actual tensor has length
    1, too: then its first axis is not the replicas.
    """
    forms = dict(expected)
    for key, (shape, dtype) in expected.items():
        if shape and shape[0] == 1 and actual.get(key) != (shape, dtype):
            forms[key] = torch.Size((replicas, *shape[1:])), dtype
    return forms


def restorable(expected: Forms, actual: Forms, personal: frozenset[str], model: str) -> Forms:
    """Return the forms that a result must have, without missing parameters that are personal."""
    optional = {(model, name) for name in personal} - actual.keys()
    return {key: form for key, form in expected.items() if key not in optional}


def in_trees_of(expected: Forms, actual: Forms) -> Forms:
    """Return the forms in the expected trees.

    Further trees are allowed, because a stage can add states to the messages.
    """
    trees = {tree for tree, _ in expected}
    return {key: form for key, form in actual.items() if key[0] in trees}


def difference(action: str, source: str, expected: Forms, actual: Forms) -> str:
    """Describe the first tensor of a result that has not the expected form.

    Args:
        action: What was done with the tensors, such as "`send` returns".
        source: Where the expected forms come from, such as "`sent_like` announces".
        expected: The expected forms.
        actual: The forms of the result, which differ from the expected ones.
    """
    key = next(key for key in (*expected, *actual) if expected.get(key) != actual.get(key))
    name = repr(plain(f"{key[0]}.{key[1]}", 60))
    if key not in actual:
        return f"{action} no tensor {name}, but {source} one"
    if key not in expected:
        return f"{action} the tensor {name}, but {source} no such tensor"
    was, wanted = (
        f"shape {tuple(s)} and dtype {dtype}" for s, dtype in (actual[key], expected[key])
    )
    return f"{action} the tensor {name} with {was}, but {source} {wanted}"
