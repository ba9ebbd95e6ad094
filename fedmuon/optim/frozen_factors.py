"""FFA-LoRA (arXiv:2403.12313): the factor A of each low-rank adapter stays at its common start.

Clients train and send only B. All clients have the same A, so that the mean of the products B A is
the product of the mean of B with A.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fedmuon.optim.chain import Chain, Context, States, stateless
from fedmuon.optim.links import only
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Stage, Trees
from fedmuon.optim.trained_space import within
from fedmuon.tasks.base import Params
from fedmuon.tasks.per_example.variables import Variable


@dataclass(frozen=True)
class FrozenFactors(Stage):
    """A stage that leaves some parameters out of all messages, because no client changes them.

    The parameters keep the values of the run's initial model, on the server and on every client.

    Attributes:
        names: Names of the parameters.
    """

    names: frozenset[str]

    def is_personal(self, name: str) -> bool:
        """Return whether messages and states of the server lack the parameter with this name."""
        return name in self.names

    def send(self, message: Trees, server: ServerState) -> Trees:
        """Send only the trained parameters."""
        return self._trained(message)

    def adopt(
        self, models: Params, first: Callable[[], Params], memories: Sequence[States]
    ) -> Params:
        """Return the received models, completed by the fixed parameters."""
        initial = first()
        return {
            name: initial[name] if name in self.names or name not in models else models[name]
            for name in initial
        }

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Return only the trained parameters."""
        return reply.with_trees(self._trained(reply.trees))

    def sent_like(self, message: Trees) -> Trees:
        """Return tensors like those of a message, without the fixed parameters."""
        return self._trained(message)

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of a reply, without the fixed parameters."""
        return self._trained(message)

    def _trained(self, trees: Trees) -> Trees:
        return {
            **trees,
            MODEL: {name: x for name, x in trees[MODEL].items() if name not in self.names},
        }


@dataclass(frozen=True)
class Unfrozen:
    """The parameters that are trained: all parameters except those with the given names.

    Attributes:
        names: Names of the fixed parameters.
    """

    names: frozenset[str]

    def active(self, params: Params, round: int) -> Params:
        """Return the trained parameters."""
        return {name: value for name, value in params.items() if name not in self.names}

    def with_active(self, params: Params, inner: Params, round: int) -> Params:
        """Return the model with other values of the trained parameters."""
        return {name: inner.get(name, value) for name, value in params.items()}

    def slope(self, params: Params, slope: Params, round: int) -> Params:
        """Return the gradient of the trained parameters."""
        return self.active(slope, round)

    def step(self, params: Params, direction: Params, round: int) -> Params:
        """Return a step that does not change the fixed parameters."""
        fixed = {name: torch.zeros_like(params[name]) for name in params if name in self.names}
        return {**direction, **fixed}

    def variables(self, params: Params, round: int) -> dict[str, Variable]:
        """Return the trained parameters as variables."""
        return dict.fromkeys(self.active(params, round), Variable())


def with_frozen(recipe: Recipe, names: frozenset[str]) -> Recipe:
    """Return the recipe, whose clients neither train nor send the parameters with these names.

    All links after the first one, which computes the gradient, change only the other parameters. A
    private recipe clips and adds noise to the gradients of the other parameters.
    """

    space = Unfrozen(names)

    def still(direction: Params, context: Context) -> Params:
        return space.step(context.params, direction, context.round)

    first, *others = recipe.chain.links
    mechanism = recipe.mechanism
    if mechanism is not None:
        first, mechanism = within(first, space), replace(mechanism, space=space)
    others = [only(lambda name: name not in names, link) for link in others]
    chain = Chain((first, *others, stateless("frozen", still)))
    stages = (FrozenFactors(names), *recipe.stages)
    return replace(recipe, chain=chain, mechanism=mechanism, stages=stages)
