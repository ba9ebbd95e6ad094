"""The trial round of a custom recipe or aggregate, on random tensors, before samples are read.

The trial reports many errors early, with messages that name the required arguments and results. It
cannot find every error. The loss of the trial is half the squared distance between the parameters
and random centres.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmuon.config.load import Config
from fedmuon.config.user_objects import user_objects
from fedmuon.core.errors import InputError, plain
from fedmuon.core.rng import Draw, generator
from fedmuon.core.trial import trial
from fedmuon.optim.chain import Chain, Context, Link, State, States, forbidden_gradient, visible
from fedmuon.optim.orthogonalizers import differ, same
from fedmuon.optim.recipe import Recipe, aggregate_state, first_state, initial_states, shared_part
from fedmuon.optim.stage import Reply
from fedmuon.tasks.base import Params, Points, Released, Task, split_statistics

STORED = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16)
Initial = dict[str, Callable[[Params], State]]  # state -> a function that returns its first value
LINK = (
    "The update function of a link must take (direction, state, context) and return (direction, "
    "state). With links.stateless, it must take (direction, context) and return a direction. "
    "Directions and states are mappings of names to tensors."
)
CLIENT_RULE = (
    "The clients' rule must take (received model, model, states, steps) and return (model, "
    "states). Both must be mappings of names to tensors, as in the arguments."
)
RULE = (
    "The server's rule must take (old, mean, states) and return (model, states). The returned "
    "model must be a mapping like old, and the returned states a mapping like states."
)


@trial()
def require_round(recipe: Recipe, start: Params) -> States:
    """Run a trial round from the parameters `start` [1, ...]. Raise an error if the recipe fails.

    Also raise an error if the recipe names states that do not exist.

    Returns:
        The client's states after the trial round.
    """
    _require_held(recipe)
    states = {
        link.name: _tried(f"init of the link {link.name}", LINK, link.init, start)
        for link in recipe.chain.links
    }
    params = start
    for step in range(2):  # two local steps of one client
        context, direction = _context(params, (0,), step, private=recipe.mechanism is not None), {}
        for link in recipe.chain.links:
            direction, states[link.name] = _updated(link, direction, states[link.name], context)
        if missing := [name for name in params if name not in direction]:
            raise InputError(
                f"your chain of links returns no direction for the parameter {missing[0]}. Make "
                "links.gradient() the first link of the chain."
            )
        params = {name: value + direction[name] for name, value in params.items()}
    if recipe.client is not None:
        rule = partial(recipe.apply_client, factor=1.0, samples=_trial_samples(params))
        client_result = _tried("the clients' rule", CLIENT_RULE, rule, start, params, states, 2)
        if not _are_mappings(client_result):
            raise InputError(
                f"the clients' rule returns an object of type {type(client_result).__name__}, not "
                f"a pair of mappings. {CLIENT_RULE}"
            )
        params, states = client_result
        _require_alike("the clients' rule", CLIENT_RULE, start, params)
        if missing := [
            name for name in (*recipe.returned, *recipe.persistent) if name not in states
        ]:
            raise InputError(
                f"the clients' rule does not return the state {missing[0]}. {CLIENT_RULE}"
            )
    _require_stacked(recipe, states, 1)
    _require_resumable(recipe, start, states)
    server_states = initial_states(recipe, start) | {name: states[name] for name in recipe.returned}
    rule = partial(recipe.apply_server, factor=1.0, answered=lambda: [(1.0, 2)])
    start, params = shared_part(recipe, start), shared_part(recipe, params)
    server_result = _tried("the server's rule", RULE, rule, start, params, server_states)
    if not _are_mappings(server_result):
        raise InputError(
            f"the server's rule returns an object of type {type(server_result).__name__}, not a "
            f"pair of mappings. {RULE}"
        )
    model, after = server_result
    _require_alike("the server's rule", RULE, start, model)
    if missing := [name for name in recipe.kept if name not in after]:
        raise InputError(
            f"the server's rule does not return the state {missing[0]}, which the server must "
            f"store. {RULE}"
        )
    return states


def tried_recipe(recipe: Recipe, start: Params, stack_limit: int) -> Initial:
    """Run trial rounds of a recipe that is not built in, and raise an error if they fail.

    Returns:
        Functions that return the first values of states whose shapes only the trial shows.
    """
    entries = sum(tensor.numel() for tensor in start.values())
    states = require_round(recipe, start)
    if recipe.mechanism is None and 2 * entries <= stack_limit:  # larger models are not batched
        _require_apart(recipe, start)
    return {
        name: partial(_zeros_like, {key: tensor[0] for key, tensor in states[name].items()})
        for name in recipe.returned
        if name not in recipe.kept
    }


def _zeros_like(shapes: State, params: Params) -> State:
    """Return zeros with these shapes behind the replica axis of the parameters."""
    param = next(iter(params.values()))
    return {name: shape.new_zeros((len(param), *shape.shape), device=param.device)
            for name, shape in shapes.items()}  # fmt: skip


@trial()
def _require_apart(recipe: Recipe, start: Params) -> None:
    """Raise an error if a client's result changes when another client is in the same batch.

    Some engines train several clients in one batch, and other engines train clients one by one.
    `start` contains parameters with the shapes [1, ...].
    """
    chain = recipe.chain
    together = trial_steps(chain, start, (0, 1))
    _require_stacked(recipe, _trial_states(recipe, start, (0, 1)), 2)
    for client in (0, 1):
        alone = trial_steps(chain, start, (client,))
        if any(differ(alone[name], together[name][client : client + 1]) for name in start):
            raise InputError(
                "the result of your recipe for a client changes when other clients are in the "
                "same batch, so the results would depend on the engine. Take norms and means "
                "over the last axes, separately for each replica, and draw random numbers only "
                "from context.draws."
            )


def _trial_states(recipe: Recipe, start: Params, clients: Sequence[int]) -> States:
    """Return the states of these clients after two trial steps and the clients' rule."""
    first = params = {name: torch.cat([value] * len(clients)) for name, value in start.items()}
    states = recipe.chain.init(params, {})
    for step in range(2):
        params, states = recipe.chain.step(params, states, _context(params, clients, step))
    return recipe.apply_client(first, params, states, 2, 1.0, _trial_samples(params))[1]


def _trial_samples(params: Params) -> Tensor:
    param = next(iter(params.values()))
    return torch.full_like(param.flatten(1)[:, 0], 10.0) if param.ndim > 1 else param.new_full(
        (len(param),), 10.0
    )  # fmt: skip


def _require_stacked(recipe: Recipe, states: States, replicas: int) -> None:
    """Raise an error if a state that leaves the link has tensors that no engine could send.

    Each tensor needs the replica axis first. Messages and files store only numpy's dtypes.
    """
    for name in (*recipe.returned, *recipe.persistent):
        for key, tensor in states[name].items():
            if not isinstance(key, str) or not isinstance(tensor, Tensor):
                raise InputError(
                    f"the state {name!r} contains a {type(tensor).__name__} under "
                    f"{plain(key, 60)}, but it must map strings to tensors. Store a number as a "
                    "tensor [replicas, 1]."
                )
            if tensor.dtype not in STORED or not tensor.ndim or len(tensor) != replicas:
                raise InputError(
                    f"the tensor {key!r} of the state {name!r} has shape {tuple(tensor.shape)} and "
                    f"dtype {tensor.dtype} for {replicas} replica{'s' * (replicas > 1)}. The first "
                    "axis must be the replicas, as in the model, and the dtype a real number of "
                    "16, 32 or 64 bits. Use a shape such as [replicas, 1], and the dtype of the "
                    "model."
                )


def trial_steps(chain: Chain, start: Params, clients: Sequence[int], factor: float = 1.0) -> Params:
    """Take two trial steps, and return the change of these clients' models."""
    first = params = {name: torch.cat([value] * len(clients)) for name, value in start.items()}
    states = chain.init(params, {})
    for step in range(2):
        params, states = chain.step(params, states, _context(params, clients, step, factor))
    return {name: value - first[name] for name, value in params.items()}


def _context(
    params: Params, clients: Sequence[int], step: int, factor: float = 1.0, private: bool = False
) -> Context:
    """Return the context of a trial step.

    The loss of the trial is half the squared distance between the parameters and random centres.
    """
    drawn = torch.Generator().manual_seed(0)
    centres = {}
    for name, value in params.items():  # always drawn for two clients, also if one takes part
        pair = torch.randn((2, *value.shape[1:]), generator=drawn)
        centres[name] = pair.to(value)[list(clients)]

    def gradient(at: Params) -> tuple[Tensor, Params]:
        slope = {name: value - centres[name] for name, value in at.items()}
        return sum(value.flatten(1).square().sum(1) / 2 for value in slope.values()), slope  # type: ignore

    def released(points: Points, bounds: Tensor | None = None) -> Released:
        shares = None if bounds is None else torch.full_like(bounds, 0.5)
        return Released(gradient(points[-1][1])[1], shares)

    draws = [partial(generator, 0, client=client, step=step) for client in clients]
    if private:
        return Context(
            params, forbidden_gradient, draws, released, factor, tuple(clients), received=params
        )
    return Context(
        *(params, gradient, draws), factor=factor, clients=tuple(clients), received=params,
        samples=_trial_samples(params),
    )  # fmt: skip


def _require_held(recipe: Recipe) -> None:
    """Raise an error if the recipe names a state that does not exist."""
    links = [link.name for link in recipe.chain.links]
    for name in recipe.returned:
        if name not in links and recipe.client is None:
            raise InputError(
                f"the recipe returns the state {name!r}, but no gradient transformation (link) of "
                f"its chain has this name. Remove {name!r} from `returned`, or use names from "
                f"{', '.join(links)}."
            )
    for name in recipe.persistent:
        if name not in links or name in recipe.sent:
            raise InputError(
                f"{name!r} cannot be a persistent state of the recipe, because "
                + (
                    "the server sends this state in every round. Remove it from `persistent`."
                    if name in recipe.sent
                    else "no gradient transformation (link) of its chain has this name. Use names "
                    f"from {', '.join(links)}."
                )
            )
    for name in recipe.sent:
        if name not in recipe.kept:
            raise InputError(
                f"the recipe sends the state {name!r}, but its server does not store this state. "
                f"Add {name!r} to `kept`."
            )


def _require_resumable(recipe: Recipe, start: Params, states: States) -> None:
    """Raise an error if a stored state has other tensors after a round than at its start."""
    for name in recipe.returned:
        if name not in recipe.kept:
            continue
        fresh, after = (
            {key: (tensor.shape, tensor.dtype) for key, tensor in state.items()}
            for state in (first_state(recipe, name, start), states[name])
        )
        if fresh != after:
            raise InputError(
                f"the tensors of the state {name!r} change their names, shapes or dtypes during a "
                "round, so the server could not store the state. Create all tensors with their "
                "final names, shapes and dtypes in `init` of the link, or in `initial` of the "
                "recipe."
            )
    for link in recipe.chain.links:
        if link.name in recipe.persistent:
            fresh, after = (
                {name: tensor.shape for name, tensor in state.items()}
                for state in (link.init(start), states[link.name])
            )
            if fresh != after:
                raise InputError(
                    f"the tensors of the persistent state {link.name!r} change their names or "
                    "shapes during a round, so a run could not be resumed. In the function "
                    "`init` of this link, create all tensors with their final names and shapes."
                )


def _require_alike(subject: str, rule: str, start: Params, model: Mapping[str, Any]) -> None:
    """Raise an error if a tensor of the model is missing, or has another shape or precision."""
    for name, like in start.items():
        value = model.get(name)
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (like.shape, like.dtype):
            raise InputError(
                f"{subject} returns no tensor with the shape and dtype of the parameter {name}. "
                f"{rule}"
            )


def _updated(link: Link, direction: Params, state: State, context: Context) -> tuple[Params, State]:
    """Return the result of a custom gradient transformation (link).

    Raise an error if the link changes its input in place.
    """
    inputs = (direction, state, context.params)
    context = visible(link, context)
    before = [_copied(tensors) for tensors in inputs]
    subject = f"update of the link {link.name}"
    result = _tried(subject, LINK, link.update, direction, state, context)
    if not _are_mappings(result):
        raise InputError(
            f"the link {link.name} returns an object of type {type(result).__name__}, not a pair "
            f"of mappings. {LINK}"
        )
    if missing := [name for name in before[0] if name not in result[0]]:
        raise InputError(
            f"the link {link.name} returns no direction for the parameter {missing[0]}. Return one "
            "direction for each parameter."
        )
    for copies, tensors in zip(before, inputs, strict=True):
        if any(not same(tensor, tensors.get(name)) for name, tensor in copies.items()):
            raise InputError(
                f"the link {link.name} changes its input tensors in place, but other links use "
                "these tensors too. Return new tensors."
            )
    return result


def _tried(subject: str, mend: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except InputError:
        raise
    except Exception as error:  # the user's function may raise any error
        reason = plain(f"{type(error).__name__}: {error}")
        raise InputError(f"{subject} failed with {reason}. {mend}") from error


@trial()
def require_memoryless(config: Config, recipe: Recipe, task: Task) -> None:
    """Raise an error if a custom aggregate's result depends on earlier calls."""
    brought, count = user_objects(config), config.federation.per_round
    if brought.aggregate is None and brought.recipe is None:
        return
    start = task.initial(generator(0, Draw.INITIAL))
    state = initial_states(recipe, start).get(aggregate_state())

    def combined(seed: int) -> Params:
        replies = []
        for k in range(count):
            drawn = torch.Generator().manual_seed(count * seed + k)
            params = {
                name: torch.randn(value.shape, generator=drawn).to(value)
                for name, value in start.items()
            }
            states = {
                link.name: link.init(split_statistics(params)[0])
                for link in recipe.chain.links
                if link.name in recipe.returned
            }
            first = next(iter(params.values()))
            loss = first.new_ones(len(first))
            replies.append(Reply(k, params, states, loss, samples=k + 1))
        if state is None:
            return recipe.aggregate.combine(replies)[0]
        aggregated, after = recipe.aggregate.combine(replies, _copied(state))
        return aggregated | {f"its state {name}": value for name, value in after.items()}

    first, _, repeated = combined(0), combined(1), combined(0)
    if any(not same(value, repeated[name]) for name, value in first.items()):
        raise InputError(
            "your aggregate returns a different model when it is called again with the same "
            "replies, so a resumed run would differ. Draw no random numbers in the aggregate. If "
            "the aggregate needs a state, use fedmuon.Aggregator(apply, init=init) with "
            "init(params) -> state and apply(replies, state) -> (params, state). Or let the "
            "server's rule of the recipe update the state."
        )


def _copied(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _are_mappings(result: Any) -> bool:
    pair = isinstance(result, tuple | list) and len(result) == 2
    return pair and all(isinstance(part, Mapping) for part in result)
