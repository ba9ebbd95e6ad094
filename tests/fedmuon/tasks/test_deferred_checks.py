"""No step waits for a device to answer: rounds on torch's `meta`, where each question is an error,
and on CPU tensors treated like a GPU's, where questions are counted.

`FACTORIZED` lists what a GPU would do otherwise. Questions are allowed once before a run (modules
that are clipped, objects of the user's), and for a round's mean loss, an evaluation's means, and
whether all held that a round took for granted.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from conftest import Entropy, draw_neighbours, small
from test_decoder import tiny
from test_network_runs import digits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedmuon import Orthogonalizer
from fedmuon.config.load import Config
from fedmuon.config.methods import ORTHOGONALIZED, PRIVATE
from fedmuon.config.names import NAMES
from fedmuon.core import device
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.federated.build import build_experiment
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.evaluation import sums
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, broadcast, client_updates, first_model, server_update
from fedmuon.optim.chain import Chain, Context, stateless
from fedmuon.optim.links import map_matrices
from fedmuon.optim.orthogonalizers import map_of_value
from fedmuon.optim.stage import ServerState
from fedmuon.privacy.mechanisms import gaussian
from fedmuon.tasks.base import Batch, Params, Replaced
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipped_sums import samples_of
from fedmuon.tasks.per_example.clipping import scaled_norms

CPU, META = torch.device("cpu"), torch.device("meta")
MAPS = tuple(NAMES["orthogonalizer.name"])
OF_NETWORKS = ("fedper", "lora-muon")  # they need names of parameters
# The nodes of demuon have no server, and the votes of sign-muon become bits on the host.
ELSEWHERE = ("demuon", "sign-muon")
RECIPES = tuple(name for name in NAMES["local.recipe"] if name not in (*OF_NETWORKS, *ELSEWHERE))
DRAWN = ("gaussian-smoothed-sign", "randomized-polar")  # not by a server
OF_SERVERS = ("ef21-muon", "ringmaster", "ringmaster-free")  # whose server orthogonalizes
CASES = [
    (r, m)
    for r in RECIPES
    for m in (MAPS if r in ORTHOGONALIZED else MAPS[:1])
    if r not in OF_SERVERS or m not in DRAWN
]
QUESTIONS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "_unique2")
# Torch's own: on CUDA they look at their error codes, and so stop the queue themselves, once a
# call. It would take other algorithms to have the maps without them.
STOPPING = ("_linalg_eigh", "linalg_eigvalsh", "_linalg_svd", "linalg_eigh")
FACTORIZED = {
    "smoothed-polar": "_linalg_eigh",
    "clipped-sign": "_linalg_eigh",
    "exact-sign": "_linalg_svd",  # in float32 eigh
    "gaussian-smoothed-sign": "_linalg_svd",  # the same map
    "newton-schulz": "",
    "randomized-polar": "",  # eigvalsh with kaczmarz, whose delta is an operator norm
}


class Counted(TorchDispatchMode):
    """Counts what stops a queue, a mask as an index too, and tensors that cross from the CPU to
    `meta` otherwise than by `sent`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.factorized: Counter[str] = Counter()
        self.crossed: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in QUESTIONS or (name.startswith(("index", "_index")) and _is_masked(*args)):
            self.asked[name] += 1
        if name in STOPPING:
            self.factorized[name] += 1
        found = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_") and isinstance(found, Tensor) and found.is_meta:
            outer = any(isinstance(one, Tensor) and not one.is_meta for one in args)
            self.crossed += [name] * (outer and not _is_sent())
        return found


def _is_masked(values: Tensor, by: Any = (), *others: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return isinstance(by, list | tuple) and any(
        isinstance(one, Tensor) and one.dtype in masks for one in by
    )


def _is_sent() -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code is not device.to_device.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the CPU a device whose numbers are not at hand."""
    monkeypatch.setattr(device, "_DOUBTED", set())
    return lambda: monkeypatch.setattr(device, "AT_HAND", frozenset())


def made(config: Config, stack: int = 1, **given: Any) -> tuple[Experiment, ServerState]:
    """The experiment, in a stack with neighbours, and where it begins."""
    source = read_source(config)
    data = build_data(config, source)
    neighbours = draw_neighbours(data, source, stack - 1, seed=1) if stack > 1 else None
    experiment = build_experiment(config, data, neighbours, **given)
    return experiment, begin(experiment.recipe, experiment.task, config.federation.seed, stack)


def on_meta(experiment: Experiment, state: ServerState) -> tuple[Experiment, ServerState]:
    """The same on `meta`, with one step: torch's `meta` is slow."""
    of, held = experiment.shards, experiment.shards.held_out
    assert isinstance(experiment.task, MatrixTask | NetworkTask)
    task = dataclasses.replace(experiment.task, device=META)
    plan = dataclasses.replace(experiment.plan, steps=1)
    aside = Batch(held.inputs.to(META), held.labels.to(META))
    shards = dataclasses.replace(
        of, inputs=of.inputs.to(META), labels=of.labels.to(META), held_out=aside
    )
    params, *states = (
        {name: value.to(META) for name, value in tree.items()}
        for tree in (state.params, *state.states.values())
    )
    moved = ServerState(state.round, params, dict(zip(state.states, states, strict=True)))
    first_model(task, plan.seed, len(next(iter(params.values()))))  # which a run draws once
    return dataclasses.replace(experiment, task=task, plan=plan, shards=shards), moved


def trained(experiment: Experiment, state: ServerState, rounds: int = 1) -> ServerState:
    """That many rounds."""
    recipe, plan = experiment.recipe, experiment.plan
    for _ in range(rounds):
        clients = [(int(i), experiment.shards[int(i)]) for i in plan.participants(state.round)]
        sent = broadcast(recipe, state)
        state = server_update(
            recipe, state, client_updates(recipe, experiment.task, plan, clients, sent)
        )
    return state


def counted(work: Callable[[], Any]) -> tuple[Any, Counted]:
    """What it finds, and what was asked meanwhile."""
    with Counted() as seen:
        return work(), seen


def require_silence(experiment: Experiment, state: ServerState) -> ServerState:
    """A round on `meta` asks nothing, and nothing crosses to it but by `sent`."""
    found, seen = counted(lambda: trained(experiment, state))
    assert not seen.asked and not seen.crossed
    return found


ONCE = {"_local_scalar_dense": 1}  # whether all that a round took for granted held


def require_equal(one: ServerState, other: ServerState) -> None:
    torch.testing.assert_close(one.params, other.params, rtol=1e-12, atol=1e-14, equal_nan=True)


def one(
    recipe: str = "fedmuon",
    orthogonalizer: str = "smoothed-polar",
    options: dict | None = None,
    **tables: dict,
) -> Config:
    """A recipe and a map on mini-batches of the matrix task; or on lots, with noise from the
    seed."""
    sketch = {"rank": 2, "oversample": 0, "sigma": 0.1, "lambda": 0.1} | (options or {})
    below = {
        "local": {"steps": 2, "momentum": 0.5} | ({} if recipe in PRIVATE else {"batch": 8}),
        "privacy": {"insecure-reproducible-noise": True, "lot": 6.0, "noise": 0.5},
        "orthogonalizer": sketch,
    }
    given = {"local": {"recipe": recipe}, "federation": {"per-round": 2}} | tables
    if recipe in ORTHOGONALIZED:
        given |= {"orthogonalizer": {"name": orthogonalizer}}
    return small(below, **given)


@pytest.mark.parametrize(
    ("recipe", "orthogonalizer"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] * (one[0] != "fedmuon" and one[1] != MAPS[0]))
        for one in CASES
    ],
)
def test_a_round_asks_once(recipe: str, orthogonalizer: str, silent: Callable[[], None]) -> None:
    """At its end, whether all that it took for granted held, and its numbers are the same; on
    `meta` nothing is asked, and what the host draws comes by one way and no other."""
    experiment, state = made(one(recipe, orthogonalizer), stack=2)
    state = trained(experiment, state)
    plain = trained(experiment, state)
    silent()
    found, seen = counted(lambda: trained(experiment, state))
    require_equal(found, plain)
    # A server that orthogonalizes asks for itself.
    assert seen.asked == dict.fromkeys(ONCE, 1 + (recipe in OF_SERVERS))
    if recipe in ORTHOGONALIZED:
        assert set(seen.factorized) == {FACTORIZED[orthogonalizer]} - {""}
    found = require_silence(*on_meta(experiment, state))
    assert all(value.is_meta for value in found.params.values())


@pytest.mark.parametrize("orthogonalizer", MAPS)
def test_float32_asks_no_more(orthogonalizer: str, silent: Callable[[], None]) -> None:
    below = {"sketch": "kaczmarz"} if orthogonalizer == "randomized-polar" else {}
    given = made(one("fedmuon", orthogonalizer, below, engine={"dtype": "float32"}))
    silent()
    _, seen = counted(lambda: trained(*given, rounds=2))
    assert seen.asked == {"_local_scalar_dense": 2}
    slow = {"linalg_eigvalsh", "_linalg_eigh"} if orthogonalizer != "newton-schulz" else set()
    assert set(seen.factorized) <= slow


def test_a_round_of_many_cohorts_asks_once(
    silent: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MatrixTask, "stack_limit", 1)  # each client is a cohort
    experiment, state = made(one(federation={"per-round": 5}))
    plain = trained(experiment, state)
    silent()
    found, seen = counted(lambda: trained(experiment, state))
    require_equal(found, plain)
    assert seen.asked == ONCE


def test_step_sizes_and_lambdas_of_each_replica_on_meta() -> None:
    each = torch.tensor([0.1, 0.2])
    given = {"lr": each, "regularization": each}
    require_silence(*on_meta(*made(one("fedmuon-aligned"), stack=2, **given)))


@pytest.mark.parametrize("aggregator", NAMES["federation.aggregate"])
def test_aggregates_on_meta(aggregator: str) -> None:
    federation = {"aggregate": aggregator, "per-round": 5}
    require_silence(*on_meta(*made(one("fedmuon", federation=federation))))


# --- Networks -------------------------------------------------------------------------------------

NETWORKS: dict[str, Callable[..., Config]] = {
    "mlp": digits,
    "cnn": lambda **tables: digits("cnn", **tables),
    "gpt": tiny,
}


@lru_cache
def network(name: str, private: bool) -> tuple[Experiment, ServerState]:
    """Of two data sets, with one step; the small one has its matrices orthogonalized."""
    plain, noisy = ("fedmuon", "dp-muon") if name == "gpt" else ("fedavg", "dp-sgd")
    recipe = {"recipe": noisy, "batch": 0} if private else {"recipe": plain}
    noise = {"insecure-reproducible-noise": True, "lot": 4.0, "noise": 0.01}
    tables = {"privacy": noise} if private else {}
    return made(NETWORKS[name](local=recipe | {"steps": 1}, **tables), stack=2)


@pytest.mark.parametrize(
    ("name", "private"),
    [
        pytest.param(name, private, marks=[pytest.mark.slow] * (private and name != "mlp"))
        for name in NETWORKS
        for private in (False, True)
    ],
)
def test_networks_ask_once(name: str, private: bool, silent: Callable[[], None]) -> None:
    """A round, and an evaluation of it; a private one clips by layers' records."""

    def whole(experiment: Experiment, state: ServerState) -> tuple[ServerState, Tensor]:
        state, held = trained(experiment, state), experiment.shards.held_out
        return state, sums(experiment.task, state.params, held.inputs, held.labels)[0]

    given = network(name, private)
    plain, loss = whole(*given)
    silent()
    (found, silently), seen = counted(lambda: whole(*given))
    require_equal(found, plain)
    assert torch.equal(loss, silently) and seen.asked == ONCE
    there = on_meta(*given)
    if private:  # a module is tried once before it is clipped
        trained(*there)
    (_, loss), seen = counted(lambda: whole(*there))
    assert loss.is_meta and loss.shape == (2,) and not seen.asked and not seen.crossed


def test_a_replica_sees_its_own_sample(silent: Callable[[], None]) -> None:
    """Without a look at whose it is, and where."""
    inputs, labels = torch.randn(5, 3), torch.arange(5)
    there = Replaced(torch.tensor([2, 0]), torch.tensor([4, 1]), torch.randn(2, 3), -labels[1:3])
    batch = Batch(inputs, labels, there)

    def samples() -> list[tuple[Tensor, Tensor]]:
        return [samples_of(batch, replica) for replica in range(4)]

    plain = samples()
    silent()
    found, seen = counted(lambda: device.with_deferred_checks(CPU, samples))
    for mine, theirs in zip(found, plain, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    assert not seen.asked and not torch.equal(plain[0][0], plain[2][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_of_any_scale(dtype: torch.dtype, silent: Callable[[], None]) -> None:
    most = torch.finfo(dtype).max
    scales = torch.tensor([0.0, most**-0.9, most**-0.5, 1.0, most**0.6, torch.inf, torch.nan])
    values = torch.randn(7, 5, dtype=dtype) * scales.to(dtype)[:, None]
    plain = scaled_norms(values)
    silent()
    found, seen = counted(lambda: device.with_deferred_checks(CPU, lambda: scaled_norms(values)))
    torch.testing.assert_close(found, plain, rtol=1e-15, atol=0.0, equal_nan=True)
    assert not seen.asked


# --- What is found, and what is done over ---------------------------------------------------------

Update = Callable[[Params, Context], Params]
CURIOUS: dict[str, Callable[[Tensor], object]] = {
    "_local_scalar_dense": lambda value: float(value.sum()),
    "nonzero": lambda value: value.nonzero(),
    "index": lambda value: value[value > 0],
    "equal": lambda value: torch.equal(value, value),
}


def with_link(experiment: Experiment, update: Update, place: int = 1) -> Experiment:
    """The same with one more link, by default behind the gradient."""
    links = experiment.recipe.chain.links
    chain = Chain((*links[:place], stateless("more", update), *links[place:]))
    recipe = dataclasses.replace(experiment.recipe, chain=chain)
    return dataclasses.replace(experiment, recipe=recipe)


@pytest.mark.parametrize("name", CURIOUS)
def test_a_link_that_asks_is_found(name: str, silent: Callable[[], None]) -> None:
    def update(direction: Params, context: Context) -> Params:
        CURIOUS[name](direction["weight"])
        return direction

    experiment, state = made(one())
    silent()
    _, seen = counted(lambda: trained(with_link(experiment, update), state))
    assert seen.asked == Counter({name: 2}) + Counter({"_local_scalar_dense": 1})
    experiment, state = on_meta(*made(one()))
    if name != "equal":
        with pytest.raises((RuntimeError, NotImplementedError)):
            trained(with_link(experiment, update), state)


def test_a_link_that_waits_for_the_host_is_found() -> None:
    def update(direction: Params, context: Context) -> Params:
        return {name: value + torch.ones(3).to(value.device) for name, value in direction.items()}

    experiment, state = on_meta(*made(one()))
    _, seen = counted(lambda: trained(with_link(experiment, update), state))
    assert seen.crossed == ["_to_copy"]


def test_what_did_not_hold_is_done_over(silent: Callable[[], None]) -> None:
    """A Gram matrix that is not accurate: the numbers are those of the CPU, and questions are asked
    until none is needed."""
    hard, start = made(one(options={"lambda": 1e-12}, federation={"rounds": 4}))
    easy, _ = made(one())
    wanted = trained(hard, start, rounds=2)
    silent()
    counts, state = [], start
    for experiment in (hard, hard, easy, easy):
        with Counted() as seen:
            state = trained(experiment, state)
        if experiment is hard and state.round == 2:
            require_equal(state, wanted)
        counts.append(seen.asked.total())
    assert counts[0] == counts[1] + 1 > 3 and counts[2] > 1 and counts[3] == 1


def secretly(experiment: Experiment, repeatable: bool = False) -> Experiment:
    """The same with noise that does not follow from the seed, or that does."""
    assert experiment.recipe.mechanism is not None
    drawn = dataclasses.replace(experiment.recipe.mechanism, repeatable=repeatable)
    recipe = dataclasses.replace(experiment.recipe, mechanism=drawn)
    return dataclasses.replace(experiment, recipe=recipe)


@pytest.mark.parametrize(
    ("recipe", "secret"),
    [("fedavg", False), ("fedmuon", False)]
    + [(recipe, secret) for recipe in ("dp-sgd", "dp-muon") for secret in (False, True)],
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_refusals_are_the_same(
    recipe: str, secret: bool, place: int, silent: Callable[[], None]
) -> None:
    """From the step on where a model or a matrix is not finite."""
    experiment, start = made(one(recipe))
    experiment = secretly(experiment) if secret else experiment
    first = start.params["weight"]

    def spoil(direction: Params, context: Context) -> Params:
        untouched = context.params["weight"] == first  # at the first step
        return {name: value / untouched for name, value in direction.items()}

    if place:  # after the gradient, or at the end
        experiment = with_link(experiment, spoil, place)
    else:
        start = dataclasses.replace(start, params={"weight": first * torch.inf})
    private = recipe in PRIVATE
    said = (
        "the model is not finite in a step of a private run"
        if private
        else "the loss is not finite"
    )
    if place == 1 and "muon" in recipe:
        said = "A matrix to orthogonalize contains NaN"
    sentences = []
    for _ in range(2):
        with pytest.raises(NonFinite, match=said) as refused:
            trained(experiment, start, rounds=2)
        sentences.append(str(refused.value))
        silent()
    assert sentences[0] == sentences[1]


def test_secret_noise_is_drawn_once(
    silent: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping is done over where an example's gradient is not finite; what was released is not."""
    privacy = {"lot": 4.0, "noise": 0.01}
    config = digits(local={"recipe": "dp-muon", "batch": 0}, privacy=privacy)
    experiment, state = made(config)
    experiment.shards.inputs[::2] = torch.nan
    released: list[Any] = []

    def counted(release: Callable[..., gaussian.Released]) -> Callable[..., gaussian.Released]:
        return lambda *given: (released.append(given), release(*given))[1]

    for name in ("release", "release_on_grid"):
        monkeypatch.setattr(gaussian, name, counted(getattr(gaussian, name)))
    found = []
    for _ in range(2):
        monkeypatch.setattr("fedmuon.privacy.noise.os", Entropy())
        found.append(trained(experiment, state))
        silent()
    require_equal(found[1], found[0])
    assert len(released) == 2 * 2 and CPU in device._DOUBTED
    device._DOUBTED.clear()
    trained(secretly(experiment, repeatable=True), state)
    assert len(released) == 2 * 2 + 4  # both times that the round was made


def test_other_errors_stay(silent: Callable[[], None]) -> None:
    """A round that is refused for something else is not made again."""
    calls = []

    def update(direction: Params, context: Context) -> Params:
        calls.append(direction)
        raise InputError("no")

    experiment, state = made(one())
    silent()
    with pytest.raises(InputError, match="no"):
        trained(with_link(experiment, update), state)
    assert len(calls) == 1


def test_a_map_of_the_users_is_tried_once(silent: Callable[[], None]) -> None:
    experiment, state = made(one("fedavg"))
    own = map_matrices(map_of_value(Orthogonalizer(lambda m: m / 2, lipschitz=0.5)))
    *links, last = experiment.recipe.chain.links
    recipe = dataclasses.replace(experiment.recipe, chain=Chain((*links, own, last)))
    experiment = dataclasses.replace(experiment, recipe=recipe)
    silent()
    state = trained(experiment, state)
    _, seen = counted(lambda: trained(experiment, state))
    assert seen.asked == ONCE
