"""Custom stages: check them in a trial round, and name them in errors.

A custom stage changes the messages of a run (`fedmuon.Stage`). The trial passes random tensors
through the stage as a round does. It finds shapes that differ from those that the stage announces,
states with other names, and results that depend on earlier calls.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmuon.core.demands import Trait
from fedmuon.core.errors import Guard, InputError, mapping, plain
from fedmuon.core.registry import unfit
from fedmuon.core.trial import trial
from fedmuon.optim.chain import States
from fedmuon.optim.recipe import Recipe, initial_states
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Stage, Trees, split_model
from fedmuon.tasks.base import Params

WANTED = "a fedmuon.Stage, or a list of them"


class GuardedStage(Stage):
    """A custom stage, whose errors name the object."""

    def __init__(self, stage: Stage, guard: Guard) -> None:
        self.stage, self.guard = stage, guard
        with guard:
            self.facts, self.stores = _known_facts(stage.facts), tuple(stage.stores)
            self.exact, self.isolates = bool(stage.exact), bool(stage.isolates)
            self.masked_clients = int(stage.masked_clients)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GuardedStage) and other.stage == self.stage

    def __hash__(self) -> int:
        return hash((GuardedStage, id(self.stage)))

    def require(self, recipe: Recipe) -> None:
        """Raise an error if the stage does not fit a recipe."""
        with self.guard:
            self.stage.require(recipe)

    def is_personal(self, name: str) -> bool:
        """Return whether the stage leaves a parameter with each client."""
        with self.guard:
            return bool(self.stage.is_personal(name))

    def send(self, message: Trees, server: ServerState) -> Trees:
        """Change the server's message before it is sent."""
        with self.guard:
            return _trees(self.stage.send(_copied(message), server), "send")

    def open(self, message: Trees, model: Callable[[], Params]) -> Trees:
        """Undo `send` on the clients."""
        with self.guard:
            return _trees(self.stage.open(_copied(message), model), "open")

    def adopt(
        self, models: Params, first: Callable[[], Params], memories: Sequence[States]
    ) -> Params:
        """Change the models from which clients start."""
        with self.guard:
            return mapping(self.stage.adopt(dict(models), first, memories))

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Change the reply of a client before it is sent."""
        with self.guard:
            changed = self.stage.reply(reply, received, memory)
            if not isinstance(changed, Reply) or changed.client != reply.client:
                raise TypeError(
                    f"`reply` returned a {type(changed).__name__}, but it must return a reply of "
                    "the same client, such as reply.with_trees(trees)"
                )
            return changed

    def check(self, reply: Reply, server: ServerState) -> None:
        """Raise an error if a reply that came over a network cannot be read."""
        with self.guard:
            self.stage.check(reply, server)

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Undo `reply` on the server."""
        with self.guard:
            result = self.stage.read(list(replies), received, server)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(
                    f"`read` returned a {type(result).__name__}, but it must return a pair "
                    "(replies, states)"
                )
            return list(result[0]), {name: mapping(tree) for name, tree in result[1].items()}

    def sent_like(self, message: Trees) -> Trees:
        """Return tensors like those that `send` returns."""
        with self.guard:
            return _trees(self.stage.sent_like(_copied(message)), "sent_like")

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of a changed reply."""
        with self.guard:
            return _trees(self.stage.returned_like(_copied(message)), "returned_like")

    def initial(self, model: Params, returned: Sequence[str]) -> States:
        """Return the states that the server stores for the stage, before the first round."""
        with self.guard:
            states = mapping(self.stage.initial(dict(model), tuple(returned)))
            return {name: mapping(tree) for name, tree in states.items()}


def _known_facts(facts: Sequence[str]) -> tuple[str, ...]:
    """Return the facts of a custom stage. Raise an error if no demand can know them."""
    for fact in facts:
        if fact not in {*Trait}:
            raise InputError(
                f"a stage has the fact {plain(fact)}, which is unknown. Use facts of "
                "fedmuon.core.demands.Trait, such as Trait.STORES_CLIENT_STATES."
            )
    return tuple(facts)


def _copied(trees: Trees) -> Trees:
    return {name: dict(tree) for name, tree in trees.items()}


def _trees(result: Any, method: str) -> Trees:
    """Check that a method returned a mapping of names to mappings, with a model."""
    trees = {name: mapping(tree) for name, tree in mapping(result).items()}
    if MODEL not in trees:
        raise TypeError(f"`{method}` returned no tree {MODEL!r}. Return all trees of the message")
    return trees


def as_stages(found: Any, guard: Guard) -> tuple[Stage, ...]:
    """Convert a custom stage or a sequence of stages to guarded stages.

    Args:
        found: A `fedmuon.Stage`, or a tuple or list of them.
        guard: A guard, whose object is named in errors of the stages.

    Raises:
        InputError: If an object is not a stage.
    """
    stages = tuple(found) if isinstance(found, tuple | list) else (found,)
    for stage in stages:
        if not isinstance(stage, Stage):
            raise unfit(stage, "stage", WANTED, guard.named)
    return tuple(
        stage
        if is_built_in(stage) or isinstance(stage, GuardedStage)
        else GuardedStage(stage, guard)
        for stage in stages
    )


def unguarded(stage: Stage) -> Stage:
    """Return the stage that a guard encloses, or the stage itself."""
    return stage.stage if isinstance(stage, GuardedStage) else stage


def has_custom_stage(recipe: Recipe) -> bool:
    """Return whether a recipe has a stage that is not one of fedmuon's own."""
    return not all(map(is_built_in, recipe.stages))


def is_built_in(stage: Stage) -> bool:
    """Return whether a stage is one of fedmuon's own."""
    kind = type(stage)
    return kind not in (Stage, GuardedStage) and kind.__module__.startswith("fedmuon.optim.")


# The trial


@trial()
def require_stages(recipe: Recipe, start: Params) -> None:
    """Pass a trial round through the stages of a recipe, and raise an error if a stage is wrong.

    Args:
        recipe: The recipe with all its stages.
        start: Parameters [1, ...] with the names and shapes of the model.
    """
    first, second = _trial(recipe, start), _trial(recipe, start)
    if not all(_equal(one, other) for one, other in zip(first, second, strict=True)):
        raise InputError(
            "your stage returns different messages when it is called again with the same tensors, "
            "so a resumed run would differ. Use no random numbers without a fixed seed, and store "
            "what the stage needs in the states of `initial` or in `stores`."
        )


def _trial(recipe: Recipe, start: Params) -> list[Trees]:
    """Pass a trial round of two clients through the stages, and return all messages."""
    server = ServerState(0, start, initial_states(recipe, start))
    trees = {MODEL: start, **{name: server.states[name] for name in recipe.sent}}
    seen = [trees]
    for stage in recipe.stages:
        seen.append(stage.send(seen[-1], server))
        _require_like("send", "sent_like", stage.sent_like(seen[-2]), seen[-1])
    opened = seen[-1]
    for stage in reversed(recipe.stages):
        opened = stage.open(opened, lambda: start)
    states = {name: tree for name, tree in opened.items() if name in trees and name != MODEL}
    _require_like("open", "send", {name: trees[name] for name in recipe.sent}, states)
    received = Broadcast(0, *split_model(opened))
    adopted = opened[MODEL]
    for stage in recipe.stages:
        adopted = stage.adopt(adopted, lambda: start, [{}])
    if missing := set(start) - set(adopted):
        raise InputError(
            f"the client would start without the parameter {min(missing)!r}, because a stage "
            "removed it from the message. Return this parameter in `open` or `adopt`."
        )
    replies = [_reply(recipe, adopted, server, client) for client in (0, 1)]
    for stage in recipe.stages:
        for number, reply in enumerate(replies):
            replies[number] = changed = stage.reply(reply, received, {})
            _require_like("reply", "returned_like", stage.returned_like(reply.trees), changed.trees)
            if odd := set(changed.own) - set(reply.own) - set(stage.stores):
                raise InputError(
                    f"a stage stores the state {min(odd)!r}, but its attribute `stores` does not "
                    "contain this name. Add the name to `stores`."
                )
            seen.append(changed.trees)
    for stage in reversed(recipe.stages):
        replies, states = stage.read(replies, lambda: received, server)
        known = stage.initial(start, recipe.returned)
        _require_like("read", "initial", known, states)
        seen.append(states)
    if not replies:
        raise InputError("`read` of a stage returned no replies. Return at least one reply.")
    return [*seen, *(reply.trees for reply in replies)]


def _reply(recipe: Recipe, params: Params, server: ServerState, client: int) -> Reply:
    """Return a reply with random tensors."""
    drawn = torch.Generator().manual_seed(client)

    def noisy(tree: Params) -> Params:
        return {
            name: value + torch.randn(value.shape, generator=drawn).to(value)
            if value.is_floating_point()
            else value
            for name, value in tree.items()
        }

    states = {link.name: link.init(params) for link in recipe.chain.links}
    states |= {name: tree for name, tree in server.states.items() if name in recipe.returned}
    returned = {name: noisy(states[name]) for name in recipe.returned if name in states}
    tensor = next(iter(params.values()))
    own = {name: states[name] for name in recipe.persistent}
    return Reply(client, noisy(params), returned, tensor.new_ones(len(tensor)), 10, 2, own)


def _require_like(
    method: str, other: str, announced: Mapping[str, Params], made: Mapping[str, Params]
) -> None:
    """Raise an error if two methods of a stage return other names, shapes or dtypes."""
    shapes = [
        {
            f"{tree}.{name}": (tuple(value.shape), value.dtype)
            for tree, tensors in trees.items()
            for name, value in tensors.items()
            if isinstance(value, Tensor)
        }
        for trees in (announced, made)
    ]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        told, returned = (shape.get(name, "no such tensor") for shape in shapes)
        if told != returned:
            raise InputError(
                f"for the tensor {plain(name, 60)!r}, `{method}` of your stages returns "
                f"{returned}, but `{other}` announces {told}. Let both methods return tensors "
                "with the same names, shapes and dtypes."
            )


def _equal(one: Trees, other: Trees) -> bool:
    return all(
        torch.equal(value, other[tree][name])
        or bool((value.isnan() == other[tree][name].isnan()).all() and value.isnan().any())
        for tree, tensors in one.items()
        for name, value in tensors.items()
    )
