"""One client apart from all others: what a worker process holds, dealt once for all its clients."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fedmuon.config.load import Config
from fedmuon.config.user_objects import own_objects
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.neighbours import Neighbours
from fedmuon.data.source import Source, flat_rows
from fedmuon.data.sources import read_mapped
from fedmuon.federated.build import options_of, plan, resolve, task
from fedmuon.federated.build_recipe import recipe
from fedmuon.federated.deal import deal, dealing, own_source, require_same_samples
from fedmuon.federated.plan import Plan
from fedmuon.federated.shards import Shard, targets_on
from fedmuon.optim.chain import States
from fedmuon.optim.recipe import Recipe, initial_states
from fedmuon.tasks.base import Batch, Params, Task


@dataclass(frozen=True)
class Worker:
    """What one client needs of an experiment: everybody's rules, its own samples."""

    client: int
    recipe: Recipe
    task: Task
    plan: Plan
    shard: Shard
    samples: Source
    normalize: str
    dealt: str = ""

    def require_dealt(self, dealt: str) -> None:
        """Refuse samples that are dealt otherwise, in this process, than by the server."""
        if self.dealt != dealt:
            raise InputError(
                "your partition deals otherwise in each process, and clients have several: let it "
                "draw from the generator that it is given"
            )

    def with_neighbours(self, rows: np.ndarray) -> Shard:
        """Its shard in a stack of the data sets that rows [S, 3] name (see `Neighbours.of`)."""
        own_rows = rows[rows[:, 0] == self.client]
        most = [len(self.shard.data.labels), len(self.samples.labels)]
        if not ((own_rows[:, 1:] >= 0) & (own_rows[:, 1:] < most)).all():
            raise InputError(f"client {self.client} has no such samples to replace")
        neighbours = Neighbours.of(self.samples, rows, self.normalize)
        return Shard.among(self.shard.data, neighbours, self.client)

    def template(self, stack: int) -> tuple[Params, States]:
        """Parameters and the states that are sent, of the right shape, precision and place, to fit
        received arrays to."""
        return _template(self.task, self.recipe, stack)


def _samples(config: Config) -> Source:
    if own_objects(config).data is not None:
        return own_source(config)
    return read_mapped(config.data.name, tuple(sorted(options_of(config).items())))


@lru_cache(maxsize=2)  # one replica, and a stack of them
def _template(task: Task, recipe: Recipe, stack: int) -> tuple[Params, States]:
    """Made once for all messages; nobody writes to it."""
    params = task.initial(generator(0, Draw.INITIAL), stack)
    states = initial_states(recipe, params)
    return params, {name: states[name] for name in recipe.sent}


@dataclass(frozen=True)
class Everybody:
    """What is the same for all clients: rules, samples, and whose they are; client i's are those at
    rows[offsets[i]:offsets[i + 1]]."""

    recipe: Recipe
    task: Task
    plan: Plan
    samples: Source
    rows: np.ndarray
    offsets: np.ndarray
    normalize: str
    dealt: str


@lru_cache(maxsize=1)
def everybody(config: Config) -> Everybody:
    """Made once for all clients of a worker process."""
    told, config = config, resolve(config)
    require_same_samples(told, config)
    samples = _samples(config)
    train, owner, _ = deal(config, samples)
    sizes = np.bincount(owner, minlength=config.federation.clients)
    # Only the server begins a run: stored weights need not be where its clients are.
    bare = config.model_copy(update={"task": config.task.model_copy(update={"weights": ""})})
    shape = samples.inputs.shape[1:]
    what = task(bare, shape, samples.classes, samples.vocabulary, samples.inputs.dtype)
    return Everybody(
        recipe(config, what),
        what,
        plan(config),
        samples,
        train[np.argsort(owner, kind="stable")],
        np.concatenate([[0], np.cumsum(sizes)]),
        config.data.normalize,
        dealing(train, owner),
    )


def worker(config: Config, client: int) -> Worker:
    """Client i of a config; of the source's samples only its own are mapped."""
    of = everybody(config)
    rows = of.rows[of.offsets[client] : of.offsets[client + 1]]
    inputs, what = flat_rows(of.samples.inputs, of.normalize, rows), of.task
    batch = Batch(
        torch.from_numpy(inputs).to(what.device, what.dtype),
        targets_on(what.device, what.dtype, of.samples.labels[rows]),
    )
    shard, told = Shard(batch), (of.samples, of.normalize, of.dealt)
    return Worker(client, of.recipe, what, of.plan, shard, *told)
