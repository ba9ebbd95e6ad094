"""Custom stages: check each result against what the stage announces, and name them in errors.

A custom stage changes the messages of a run (`fedmuon.Stage`). Its guard compares the names, shapes
and dtypes of each result with those that the stage announces or received, and never reads values.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fedmuon.core.demands import Trait
from fedmuon.core.errors import (
    Guard,
    InputError,
    OwnError,
    in_round,
    mapping,
    plain,
    round_and_clients,
    shown,
)
from fedmuon.core.registry import unfit
from fedmuon.core.trial import in_trial
from fedmuon.optim.chain import States
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Stage, Trees
from fedmuon.optim.stage_forms import (
    ANNOUNCED,
    RESTORED,
    STORABLE,
    STORED_ALIKE,
    Forms,
    TrialForms,
    difference,
    forms_of,
    in_trees_of,
    restorable,
    with_replicas,
)
from fedmuon.tasks.base import Batch, Params

WANTED = "a fedmuon.Stage, or a list of them"


class GuardedStage(Stage):
    """A custom stage, whose results are checked, and whose errors name the object.

    Args:
        stage: The custom stage.
        guard: A guard for this stage.
        forms: The forms that the trial has seen, or None before the trial.
    """

    def __init__(self, stage: Stage, guard: Guard, forms: TrialForms | None = None) -> None:
        self.stage, self.guard, self.forms = stage, guard, forms
        self._announced: dict[Any, Forms] = {}
        with guard:
            facts, stores = stage.facts, stage.stores
            for name, value in (("facts", facts), ("stores", stores)):
                if isinstance(value, str):
                    raise self.wrong(
                        f"its attribute `{name}` is the text {shown(value)}, but it must be a "
                        f"tuple of names. Set {name} = ({shown(value)},)."
                    )
            self.facts, self.stores = _known_facts(facts), tuple(stores)
            for name in self.stores:
                self.require_name(name, "stores")
            self.exact, self.isolates = bool(stage.exact), bool(stage.isolates)
            self.masked_clients = int(stage.masked_clients)
            self.changes_samples = bool(stage.changes_samples)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GuardedStage) and other.stage == self.stage

    def __hash__(self) -> int:
        return hash((GuardedStage, id(self.stage)))

    def wrong(self, problem: str) -> OwnError:
        """Return an error that names the stage, and the current round and client."""
        return OwnError(f"{self.guard.label} cannot be used{round_and_clients()}: {problem}")

    def require_name(self, name: Any, place: str) -> None:
        """Raise an error if a file could not contain a state with this name."""
        if not isinstance(name, str) or not name or "." in name:
            raise self.wrong(
                f"`{place}` contains the name {shown(name)}, which is not valid. Use a non-empty "
                "name without a dot."
            )

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
        with _at(server.round), self.guard:
            sent = _trees(self.stage.send(_copied(message), _own_mappings(server)), "send")
            self._require_announced("send", "sent_like", message, sent)
            return sent

    def open(self, message: Trees, model: Callable[[], Params]) -> Trees:
        """Undo `send` on the clients."""
        with self.guard:
            opened = _trees(self.stage.open(_copied(message), model), "open")
            actual = self.tensor_forms(opened, "`open` returns")
            if self.forms is not None:
                expected, replicas = self.forms.opened, lambda: _replicas(model())
                self._require_restored("open", "`send` received", expected, actual, replicas)
            return opened

    def adopt(
        self, models: Params, first: Callable[[], Params], memories: Sequence[States]
    ) -> Params:
        """Change the models from which clients start."""
        with self.guard:
            device = next(iter(models.values())).device
            own = [_moved(memory, device) for memory in memories]
            adopted = mapping(self.stage.adopt(dict(models), first, own))
            actual = self.tensor_forms({MODEL: adopted}, "`adopt` returns")
            expected = forms_of({MODEL: models})
            if actual.keys() > expected.keys():  # parameters that clients store
                initial = forms_of({MODEL: first()})
                expected = {key: form for key, form in initial.items() if key in actual} | expected
            self.require_like("`adopt` returns", "it received", expected, actual, RESTORED)
            return adopted

    def samples(self, batch: Batch, client: int, round: int) -> Batch:
        """Change the samples of a local step."""
        with self.guard:
            changed = self.stage.samples(batch, client, round)
            if not isinstance(changed, Batch):
                raise self.wrong(
                    f"`samples` returns a {type(changed).__name__}, but it must return the batch. "
                    "Return `dataclasses.replace(batch, labels=labels)`."
                )
            return changed

    def assign(self, trees: Trees, clients: Sequence[int]) -> Trees:
        """Change the models and states from which clients start."""
        with self.guard:
            assigned = _trees(self.stage.assign(_copied(trees), tuple(clients)), "assign")
            actual = self.tensor_forms(assigned, "`assign` returns")
            self.require_like("`assign` returns", "it received", forms_of(trees), actual, RESTORED)
            return assigned

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Change the reply of a client before it is sent."""
        with _at(received.round, (reply.client,)), self.guard:
            changed = self.stage.reply(
                reply.with_trees(_copied(reply.trees)),
                received.with_trees(_copied(received.trees)),
                _moved(memory, reply.loss.device),
            )
            if not isinstance(changed, Reply) or changed.client != reply.client:
                raise self.wrong(
                    f"`reply` returns a {type(changed).__name__}, but it must return a reply of "
                    "the same client. Return reply.with_trees(trees), for example."
                )
            self._require_announced(
                "reply", "returned_by", reply.trees, changed.trees, reply.client
            )
            self._require_measured("reply", changed, len(reply.loss))
            self._require_stored(reply, changed)
            return changed

    def check(self, reply: Reply, server: ServerState) -> None:
        """Raise an error if a reply that came over a network cannot be read."""
        with _at(server.round, (reply.client,)), self.guard:
            self.stage.check(reply, server)

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Undo `reply` on the server."""
        with _at(server.round), self.guard:
            given = [reply.with_trees(_copied(reply.trees)) for reply in replies]
            result = self.stage.read(given, received, _own_mappings(server))
            if not isinstance(result, tuple) or len(result) != 2:
                raise self.wrong(
                    f"`read` returns a {type(result).__name__}, but it must return a pair. "
                    "Return (replies, states)."
                )
            read = list(result[0])
            states = {name: mapping(tree) for name, tree in mapping(result[1]).items()}
            if replies and not read:
                raise self.wrong("`read` returns no replies. Return at least one reply.")
            for reply in read:
                self._require_read(reply, server)
            actual = self.tensor_forms(states, "`read` returns")
            if self.forms is not None:
                expected = with_replicas(self.forms.states, actual, _replicas(server.params))
                self.require_like(
                    "`read` returns", "`initial` returns", expected, actual, ANNOUNCED
                )
            return read, states

    def sent_like(self, message: Trees) -> Trees:
        """Return tensors like those that `send` returns."""
        with self.guard:
            return _trees(self.stage.sent_like(_copied(message)), "sent_like")

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of a changed reply."""
        with self.guard:
            return _trees(self.stage.returned_like(_copied(message)), "returned_like")

    def returned_by(self, message: Trees, client: int) -> Trees:
        """Return tensors like those of a client's changed reply."""
        with self.guard:
            return _trees(self.stage.returned_by(_copied(message), client), "returned_by")

    def initial(self, model: Params, returned: Sequence[str]) -> States:
        """Return the states that the server stores for the stage, before the first round."""
        with self.guard:
            states = mapping(self.stage.initial(dict(model), tuple(returned)))
            return {name: mapping(tree) for name, tree in states.items()}

    # Checks of names, shapes and dtypes

    def tensor_forms(self, trees: Mapping[str, Mapping[str, Any]], action: str) -> Forms:
        """Return the forms of all tensors. Raise an error for a value that is not a tensor."""
        for tree, tensors in trees.items():
            for name, value in tensors.items():
                if not isinstance(value, Tensor) or not isinstance(name, str):
                    raise self.wrong(
                        f"{action} an object of type {type(value).__name__} under the name "
                        f"{shown(name)} of {plain(tree, 60)!r}, but names must be strings and "
                        "values must be tensors. Use a tensor, also for a single number."
                    )
        return forms_of(trees)

    def require_like(
        self, action: str, source: str, expected: Forms, actual: Forms, remedy: str
    ) -> None:
        """Raise an error if names, shapes or dtypes of a result are not the expected ones."""
        if actual != expected:
            raise self.wrong(f"{difference(action, source, expected, actual)}. {remedy}")

    def _require_announced(
        self, method: str, like: str, message: Trees, changed: Trees, client: int = 0
    ) -> None:
        if type(self.stage).returned_by is Stage.returned_by and like == "returned_by":
            like = "returned_like"  # which is the same for all clients
        clients = (client,) if like == "returned_by" else ()
        key = like, clients, tuple(forms_of(message).items())
        if key not in self._announced:  # depends only on names, shapes, dtypes and the client
            announced = getattr(self, like)(message, *clients)
            self._announced[key] = self.tensor_forms(announced, f"`{like}` returns")
        expected, actual = self._announced[key], self.tensor_forms(changed, f"`{method}` returns")
        self.require_like(f"`{method}` returns", f"`{like}` announces", expected, actual, ANNOUNCED)

    def _require_restored(
        self, method: str, source: str, expected: Forms, actual: Forms, replicas: Callable[[], int]
    ) -> None:
        """Raise an error if a result lacks an expected tensor, or has a further parameter."""
        assert self.forms is not None
        actual = in_trees_of(expected, actual)
        expected = restorable(expected, actual, self.forms.personal, MODEL)
        if actual != expected:
            expected = with_replicas(expected, actual, replicas())
        self.require_like(f"`{method}` returns", source, expected, actual, RESTORED)

    def _require_read(self, reply: Any, server: ServerState) -> None:
        if not isinstance(reply, Reply):
            raise self.wrong(
                f"`read` returns a {type(reply).__name__} among the replies. Return replies, such "
                "as reply.with_trees(trees)."
            )
        actual = self.tensor_forms(reply.trees, "`read` returns")
        if self.forms is not None:
            expected, replicas = self.forms.read, lambda: _replicas(server.params)
            self._require_restored("read", "`reply` received", expected, actual, replicas)
        self._require_measured("read", reply, _replicas(server.params))

    def _require_measured(self, method: str, reply: Reply, replicas: int) -> None:
        loss, numbers = reply.loss, {"samples": reply.samples, "steps": reply.steps}
        if not isinstance(loss, Tensor) or loss.shape != (replicas,):
            raise self.wrong(
                f"`{method}` returns a reply whose loss is {shown(loss)}, but it must be a tensor "
                f"of shape ({replicas},). Return reply.with_trees(trees), which keeps the loss."
            )
        for name, number in numbers.items():
            if not isinstance(number, Real) or not number >= 0:
                raise self.wrong(
                    f"`{method}` returns a reply with {name} = {shown(number)}, but it must be a "
                    f"number of 0 or more. Return reply.with_trees(trees), which keeps {name}."
                )

    def _require_stored(self, reply: Reply, changed: Reply) -> None:
        """Raise an error if a file could not contain what a client stores."""
        own = changed.own
        if not isinstance(own, Mapping) or not own.keys() >= reply.own.keys():
            raise self.wrong(
                "`reply` drops states that the client stores for other parts of the recipe "
                f"({', '.join(reply.own)}). Return reply.with_trees(trees), which keeps them."
            )
        if odd := set(own) - set(reply.own) - set(self.stores):
            raise self.wrong(
                f"`reply` stores the state {min(map(str, odd))!r}, but the attribute `stores` does "
                "not contain this name. Add the name to `stores`."
            )
        for name in self.stores:
            if not isinstance(own.get(name), Mapping):
                given = f"a {type(own[name]).__name__} as the" if name in own else "no"
                raise self.wrong(
                    f"`reply` stores {given} state {name!r}, but `stores` contains this name. "
                    f"Return reply.storing({name!r}, state) for every client, with a mapping of "
                    "names to tensors as the state."
                )
        actual = self.tensor_forms({name: own[name] for name in self.stores}, "`reply` stores")
        for (tree, name), (_, dtype) in actual.items():
            if dtype not in STORABLE:
                raise self.wrong(
                    f"`reply` stores the tensor {f'{tree}.{name}'!r} with dtype {dtype}, which "
                    "files of client states cannot contain. Convert it to torch.float32."
                )
        if self.forms is not None and actual != (expected := self.forms.stored):
            expected = with_replicas(expected, actual, len(reply.loss))
            self.require_like("`reply` stores", "the trial stored", expected, actual, STORED_ALIKE)


def _at(round: int, clients: Sequence[int] = ()) -> contextlib.AbstractContextManager[None]:
    """Within this context, errors name the round and the clients, except in a trial."""
    return contextlib.nullcontext() if in_trial() else in_round(round, clients)


def _replicas(params: Params) -> int:
    return len(next(iter(params.values())))


def _known_facts(facts: Sequence[str]) -> tuple[str, ...]:
    """Return the facts of a custom stage. Raise an error if no demand can know them."""
    for fact in facts:
        if fact not in {*Trait}:
            raise InputError(
                f"a stage has the fact {plain(fact)}, which is unknown. Use facts of "
                "fedmuon.core.demands.Trait, such as Trait.STORES_CLIENT_STATES."
            )
    return tuple(facts)


def _copied(trees: Mapping[str, Params]) -> Trees:
    """Return new mappings with the same tensors."""
    return {name: dict(tree) for name, tree in trees.items()}


def _moved(memory: States, device: torch.device) -> States:
    """Return a client's stored states, which are on the CPU, on the device of the model."""
    return {
        name: {key: value.to(device) for key, value in tree.items()}
        for name, tree in memory.items()
    }


def _own_mappings(server: ServerState) -> ServerState:
    return replace(server, params=dict(server.params), states=_copied(server.states))


def _trees(result: Any, method: str) -> Trees:
    """Check that a method returned a mapping of names to mappings, with a model."""
    trees = {name: mapping(tree) for name, tree in mapping(result).items()}
    if MODEL not in trees:
        raise TypeError(f"`{method}` returned no tree {MODEL!r}. Return all trees of the message")
    return trees


def as_stages(passed: Any, guard: Guard) -> tuple[Stage, ...]:
    """Convert a custom stage or a sequence of stages to guarded stages.

    Args:
        passed: A `fedmuon.Stage`, or a tuple or list of them.
        guard: A guard, whose object is named in errors of the stages.

    Raises:
        InputError: If an object is not a stage.
    """
    stages = tuple(passed) if isinstance(passed, tuple | list) else (passed,)
    for stage in stages:
        if not isinstance(stage, Stage):
            raise unfit(stage, "stage", WANTED, guard.named)
    return tuple(
        stage
        if is_built_in(stage) or isinstance(stage, GuardedStage)
        else GuardedStage(stage, guard.part(guard.kind, stage) if len(stages) > 1 else guard)
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
