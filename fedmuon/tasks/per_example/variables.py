"""Variables that are trained instead of a model's parameters.

With a parameter B [m, R] of which clients train X [r, r] in B[:, columns] = U X, the gradient of an
example with respect to X is U^T G[:, columns], where G is its gradient with respect to B. This
gradient is clipped. So clipping bounds an example's contribution to the gradient of X, and
parameters that are not trained count neither in the norm nor in the noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Model = dict[str, Tensor]  # `fedmuon.tasks.base.Params`, whose module imports this one


@dataclass(frozen=True)
class Variable:
    """A trained variable under the name of a parameter: the parameter itself, or X as above.

    Attributes:
        left: U [m, r], or None if the variable is the parameter itself.
        columns: The columns of the parameter to which U X belongs.
    """

    left: Tensor | None = None
    columns: slice = field(default_factory=lambda: slice(None))

    def slope(self, slope: Tensor) -> Tensor:
        """Return the gradients [S, ...] of the variable, from those of the parameter [S, ...]."""
        return slope if self.left is None else self.left.mT @ slope.flatten(2)[..., self.columns]


class TrainedSpace(Protocol):
    """The variables that clients train, and the model that belongs to their values.

    `params` is always a model of the round.
    """

    def active(self, params: Model, round: int) -> Model:
        """Return the values of the variables."""
        ...

    def with_active(self, params: Model, inner: Model, round: int) -> Model:
        """Return the model in which the variables have other values."""
        ...

    def slope(self, params: Model, slope: Model, round: int) -> Model:
        """Return the gradient with respect to the variables, from that of the model."""
        ...

    def step(self, params: Model, direction: Model, round: int) -> Model:
        """Return the step of the model that belongs to a step of the variables."""
        ...

    def variables(self, params: Model, round: int) -> Mapping[str, Variable]:
        """Return the variables by name."""
        ...
