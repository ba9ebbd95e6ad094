"""The trial rounds of custom stages, on random tensors, before samples are read.

Two clients pass two rounds of messages through the stages, so that the second round uses what the
first one stored. The trial finds tensors that differ from those that a stage announces, arguments
that are changed in place, results that depend on earlier calls, and results of a replica that
depend on other replicas.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedmuon.core.errors import Guard, InputError
from fedmuon.core.trial import trial
from fedmuon.optim.chain import States
from fedmuon.optim.recipe import (
    Recipe,
    first_state,
    initial_states,
    shared_part,
)
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Stage, Trees, split_model
from fedmuon.optim.stage_forms import (
    ANNOUNCED,
    RESTORED,
    STORED_ALIKE,
    Forms,
    TrialForms,
    forms_of,
    in_trees_of,
    restorable,
)
from fedmuon.optim.user_stage import (
    GuardedStage,
    as_stages,
)
from fedmuon.tasks.base import Params, blocks, repeated, split_statistics

ROUNDS, CLIENTS = 2, (0, 1)
SCALES = (1.0, 3.0)  # of the random tensors of two replicas, so that shared norms are noticed
MOST_DRAWS = 1 << 14  # random numbers of a tensor
MOST_COMPARED = 1 << 22  # parameters of two replicas that are compared
APART = 5e-3  # a larger relative difference is not rounding, even of products in TF32
Tree = Mapping[str, Tensor]


@trial()
def tried_stages(recipe: Recipe, start: Params, stack_limit: int) -> tuple[Stage, ...]:
    """Pass trial rounds through the stages of a recipe, and raise an error if a stage is wrong.

    Args:
        recipe: The recipe with all its stages.
        start: Parameters [1, ...] with the names and shapes of the model.
        stack_limit: Maximum number of parameters that are trained as one batch. Replicas of larger
            models are not compared.

    Returns:
        The stages, which check the results in a run against the forms that the trial has seen.
    """
    stages = tuple(
        guarded for stage in recipe.stages for guarded in as_stages(stage, Guard("stage", stage))
    )
    alone, again = (_Trial(recipe, stages, start, (0,), first) for first in (True, False))
    for (stage, one), (_, other) in zip(alone.results(), again.results(), strict=True):
        if not _equal(one, other):
            raise stage.wrong(
                "it returns different messages when it is called again with the same tensors, so a "
                "resumed run would differ. Use no random numbers without a fixed seed, and store "
                "what the stage needs in the states of `initial` or in `stores`."
            )
    entries = sum(tensor.numel() for tensor in start.values())
    if 2 * entries <= min(stack_limit, MOST_COMPARED):
        _require_apart(recipe, stages, start)
    return tuple(
        GuardedStage(stage.stage, stage.guard, alone.forms_of_stage(number))
        if isinstance(stage, GuardedStage)
        else stage
        for number, stage in enumerate(stages)
    )


def _require_apart(recipe: Recipe, stages: tuple[Stage, ...], start: Params) -> None:
    """Raise an error if a result of a replica changes when another replica is in the same batch."""
    trials = [_Trial(recipe, stages, start, replicas) for replicas in ((0, 1), (0,), (1,))]
    results = [each.results() for each in trials]
    for (stage, together), *alone in zip(*results, strict=True):
        for replica, (_, trees) in enumerate(alone):
            if any(
                not _is_replica(together.get(tree, {}).get(name), value, replica)
                for tree, tensors in trees.items()
                for name, value in tensors.items()
            ):
                raise stage.wrong(
                    "its result for a replica changes when another replica is in the same batch, "
                    "so stability runs would be wrong. The first axis of each tensor is the "
                    "replicas. Take norms and means over the other axes, separately for each "
                    "replica."
                )


def _is_replica(together: Tensor | None, alone: Tensor, replica: int) -> bool:
    """Return whether a tensor of two replicas agrees with the tensor of one of them."""
    if together is None:
        return False
    if together.shape != alone.shape:
        if not alone.ndim or together.shape != (2, *alone.shape[1:]) or len(alone) != 1:
            return False
        together = together.narrow(0, replica, 1)
    if torch.equal(together, alone):
        return True
    one, other = together.double(), alone.double()
    gap = torch.where(one == other, 0.0, one - other).nan_to_num()
    size = other.nan_to_num(posinf=0.0, neginf=0.0)
    return bool(gap.norm() <= APART * size.norm())


@dataclass
class _Trial:
    """Trial rounds of two clients, each with some of two replicas.

    Attributes:
        recipe: The recipe.
        stages: Its stages.
        start: Parameters [1, ...] with the names and shapes of the model.
        replicas: The replicas that take part, from (0, 1).
        first: Whether this is the first trial, which alone checks the arguments of stages.
    """

    recipe: Recipe
    stages: tuple[Stage, ...]
    start: Params
    replicas: tuple[int, ...]
    first: bool = False
    _opened: dict[int, Forms] = field(default_factory=dict, init=False)  # number of a stage -> ...
    _read: dict[int, Forms] = field(default_factory=dict, init=False)
    _states: dict[int, Forms] = field(default_factory=dict, init=False)
    _stored: dict[int, Forms] = field(default_factory=dict, init=False)

    def forms_of_stage(self, number: int) -> TrialForms:
        """Return what this stage received, returned and stored."""
        return TrialForms(
            self._opened[number],
            self._read[number],
            self._states[number],
            self._stored.get(number, {}),
            self.personal,
        )

    def results(self) -> Iterator[tuple[GuardedStage, Trees]]:
        """Yield all results of custom stages, in the order of their calls."""
        params = self._noisy(self.start, 0)
        states = initial_states(self.recipe, params)
        states |= {name: self._noisy(states[name], 1) for name in self.recipe.sent}
        memories: list[States] = [{} for _ in CLIENTS]
        for round in range(ROUNDS):
            server = ServerState(round, params, states)
            opened = yield from self._message(server)
            received = Broadcast(round, *split_model(opened))
            models = yield from self._models(opened[MODEL], params, memories)
            replies = []
            for client in CLIENTS:
                reply = self._reply(models[client], server, client)
                replies.append((yield from self._sent(reply, received, memories[client])))
            memories = [reply.own for reply in replies]
            for stage in self.stages:
                for reply in replies:
                    stage.check(reply, server)
            states = {**states, **(yield from self._next_states(replies, received, server))}

    def _message(self, server: ServerState) -> Iterator[tuple[GuardedStage, Trees]]:
        """Pass the server's message through `send` and `open`."""
        trees = {MODEL: server.params, **{name: server.states[name] for name in self.recipe.sent}}
        of_server = {MODEL: server.params, **server.states}
        for number, stage in enumerate(self.stages):
            self._opened[number] = forms_of(trees)
            with self._unchanged(stage, "send", trees, of_server):
                trees = stage.send(trees, server)
            yield from _custom_result(stage, trees)
        for number, stage in reversed([*enumerate(self.stages)]):
            with self._unchanged(stage, "open", trees, of_server):
                trees = stage.open(trees, lambda: server.params)
            if isinstance(stage, GuardedStage):
                actual = forms_of(trees)
                self._require_restored(
                    stage, "open", "`send` received", self._opened[number], actual
                )
                if flat := [key for key, (shape, _) in actual.items() if not shape]:
                    raise stage.wrong(
                        f"the tensor {'.'.join(flat[0])!r} in the message of `send` has no axes, "
                        "but the first axis must be the replicas. Use the shape [replicas]."
                    )
                yield stage, trees
        return trees

    def _models(
        self, received: Params, params: Params, memories: list[States]
    ) -> Iterator[tuple[GuardedStage, Trees]]:
        """Return the model from which each client starts."""
        count = len(CLIENTS)
        models = repeated(received, count)
        for stage in self.stages:

            def adopted(clients: Sequence[int], stage: Stage = stage, models: Params = models):
                parts = blocks(models, count)
                given = {
                    name: torch.cat([parts[client][name] for client in clients]) for name in models
                }
                first = repeated(params, len(clients))
                known = [memories[client] for client in clients]
                trees = [{MODEL: given}, {MODEL: first}, *known]
                with self._unchanged(stage, "adopt", *trees):
                    return stage.adopt(given, lambda: first, known)

            models = adopted(CLIENTS)
            together = blocks(models, count)
            for client in CLIENTS if self.first else ():
                alone = adopted((client,))
                if isinstance(stage, GuardedStage) and not all(
                    _is_replica(together[client].get(name), value, 0)
                    for name, value in alone.items()
                ):
                    raise stage.wrong(
                        "the model that `adopt` returns for a client changes when other clients "
                        "are in the same batch, so the results would depend on the engine. Take "
                        "norms and means separately for each client."
                    )
            for part in together:
                yield from _custom_result(stage, {MODEL: part})
        if missing := set(self.start) - set(models):
            raise InputError(
                f"the client would start without the parameter {min(missing)!r}, because a stage "
                "removed it from the message. Return this parameter in `open` or `adopt`."
            )
        return blocks(models, count)

    def _sent(
        self, reply: Reply, received: Broadcast, memory: States
    ) -> Iterator[tuple[GuardedStage, Trees]]:
        """Pass the reply of a client through `reply`."""
        for number, stage in enumerate(self.stages):
            self._read[number] = forms_of(reply.trees)
            given = reply.trees, reply.own, received.trees, memory, {"": {"loss": reply.loss}}
            with self._unchanged(stage, "reply", *given):
                reply = stage.reply(reply, received, memory)
            if isinstance(stage, GuardedStage):
                own = {name: reply.own[name] for name in stage.stores}
                actual = forms_of(own)
                expected = self._stored.setdefault(number, actual)
                stage.require_like(
                    "`reply` stores", "another call stored", expected, actual, STORED_ALIKE
                )
                yield stage, {**reply.trees, **{f"stored {name}": own[name] for name in own}}
        return reply

    def _next_states(
        self, replies: list[Reply], received: Broadcast, server: ServerState
    ) -> Iterator[tuple[GuardedStage, Trees]]:
        """Pass all replies through `read`, and return the next states of the stages."""
        learned, _ = split_statistics(shared_part(self.recipe, server.params))
        after: States = {}
        for number, stage in reversed([*enumerate(self.stages)]):
            known = stage.initial(learned, self.recipe.returned)
            given = [reply.trees for reply in replies]
            of_server = {MODEL: server.params, **server.states}
            with self._unchanged(stage, "read", *given, received.trees, of_server):
                replies, states = stage.read(replies, lambda: received, server)
            if isinstance(stage, GuardedStage):
                self._states[number] = expected = stage.tensor_forms(known, "`initial` returns")
                actual = forms_of(states)
                stage.require_like(
                    "`read` returns", "`initial` returns", expected, actual, ANNOUNCED
                )
                for reply in replies:
                    actual = forms_of(reply.trees)
                    self._require_restored(
                        stage, "read", "`reply` received", self._read[number], actual
                    )
                    yield stage, reply.trees
                yield stage, states
            after |= states
        return after

    def _unchanged(
        self, stage: Stage, method: str, *given: Mapping[str, Tree]
    ) -> contextlib.AbstractContextManager[None]:
        if self.first and isinstance(stage, GuardedStage):
            return _unchanged(stage, method, given)
        return contextlib.nullcontext()

    def _require_restored(
        self, stage: GuardedStage, method: str, source: str, expected: Forms, actual: Forms
    ) -> None:
        """Raise an error if a result is not like what an earlier method received."""
        actual = in_trees_of(expected, actual)
        expected = restorable(expected, actual, self.personal, MODEL)
        stage.require_like(f"`{method}` returns", source, expected, actual, RESTORED)

    @cached_property
    def personal(self) -> frozenset[str]:
        """The names of the parameters that stay on the client."""
        names = [
            name for name in self.start if any(stage.is_personal(name) for stage in self.stages)
        ]
        return frozenset(names)

    def _reply(self, params: Params, server: ServerState, client: int) -> Reply:
        """Return a reply with random tensors."""
        learned, _ = split_statistics(params)
        links = {link.name: link for link in self.recipe.chain.links}
        returned = {
            name: server.states[name]
            if name in server.states
            else first_state(self.recipe, name, learned)
            for name in self.recipe.returned
        }
        seed = 2 + client + len(CLIENTS) * server.round
        own = {name: links[name].init(learned) for name in self.recipe.persistent}
        tensor = next(iter(params.values()))
        return Reply(
            client,
            self._noisy(params, seed),
            {name: self._noisy(state, seed) for name, state in returned.items()},
            tensor.new_ones(len(tensor)),
            10,
            2,
            own,
        )

    def _noisy(self, tree: Params, seed: int) -> Params:
        """Add random numbers, which are always drawn for two replicas."""
        drawn = torch.Generator().manual_seed(seed)
        count, noisy = len(self.replicas), {}
        for name, value in tree.items():
            noisy[name] = value if len(value) == count else torch.cat([value] * count)
            if value.is_floating_point():
                noise = [scale * _normal(value.shape[1:], drawn) for scale in SCALES]
                chosen = torch.stack([noise[replica] for replica in self.replicas])
                noisy[name] = noisy[name] + chosen.to(value)
        return noisy


def _normal(shape: torch.Size, drawn: torch.Generator) -> Tensor:
    """Draw normal numbers. In large tensors, they repeat, because each draw takes time."""
    count = shape.numel()
    block = torch.randn(min(count, MOST_DRAWS), generator=drawn)
    return block.repeat(-(-count // max(1, len(block))))[:count].reshape(shape)


@contextlib.contextmanager
def _unchanged(
    stage: GuardedStage, method: str, given: Iterable[Mapping[str, Tree]]
) -> Iterator[None]:
    """Raise an error if the block changes tensors of the arguments of a custom stage."""
    tensors = {
        id(tensor): tensor for trees in given for tree in trees.values() for tensor in tree.values()
    }
    pairs = [(tensor, tensor.clone()) for tensor in tensors.values()]
    yield
    if not all(_same(tensor, copy) for tensor, copy in pairs):
        raise stage.wrong(
            f"`{method}` changes a tensor of its arguments in place, but the server or other "
            "clients use this tensor, too. Return new tensors, for example with x.clamp(...) "
            "instead of x.clamp_(...)."
        )


def _custom_result(stage: Stage, trees: Trees) -> Iterator[tuple[GuardedStage, Trees]]:
    if isinstance(stage, GuardedStage):
        yield stage, trees


def _equal(one: Trees, other: Trees) -> bool:
    return forms_of(one) == forms_of(other) and all(
        _same(value, other[tree][name])
        for tree, tensors in one.items()
        for name, value in tensors.items()
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN."""
    return one.shape == other.shape and (
        torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
    )
