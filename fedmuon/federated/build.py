"""From a config to an experiment: the one place where tables become objects, for every engine."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmuon.config.load import Config
from fedmuon.config.paths import with_objects
from fedmuon.config.read_if import reads
from fedmuon.config.schema import Local
from fedmuon.config.user_objects import guard, own_objects, schedule_of, value, with_defaults
from fedmuon.config.user_objects import options as own_options
from fedmuon.core.choices import TABLES, TEXTS, is_own
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar
from fedmuon.data.federated import FederatedData, federate
from fedmuon.data.neighbours import Neighbours
from fedmuon.data.source import Source
from fedmuon.data.sources import Stamp, read, read_mapped, stamp
from fedmuon.federated import build_recipe
from fedmuon.federated.deal import deal, fitted, own_source
from fedmuon.federated.memory import (
    require_room,
    require_room_for_model,
    require_room_for_parameters,
)
from fedmuon.federated.plan import Plan
from fedmuon.federated.rounds import Experiment
from fedmuon.federated.shards import Shards
from fedmuon.optim.chain import Number
from fedmuon.optim.recipe_tables import aux_rate
from fedmuon.optim.schedules import heavy_tailed
from fedmuon.tasks import decoder as decoders
from fedmuon.tasks.base import Task
from fedmuon.tasks.decoder import (
    Form,
    add_adapters,
    decoder,
    gpt2_law,
    lora_law,
    next_tokens,
    read_weights,
    sentence_tokens,
)
from fedmuon.tasks.matrix import MatrixTask, compiles, fastest, supported
from fedmuon.tasks.models import network, with_channels
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.user_task import Task as OwnTask
from fedmuon.tasks.user_task import as_task, user_network

COMPILED = 2e7  # gradients of samples in a run, from which seconds of compilation are nothing
ROUNDING = 1e-9  # of the squared norms of rows that are in the ball
DTYPES = {"float32": torch.float32, "float64": torch.float64}
_shared: ContextVar[bool] = ContextVar("shared", default=False)


def source(config: Config) -> Source:
    """The configured source, read whole; the last one is kept, as nobody writes to it."""
    if own_objects(config).data is not None:
        return own_source(config)
    if config.data.name == "synthetic":
        require_room(config, (config.data.dimension,))
    options = tuple(sorted(options_of(config).items()))
    if _shared.get():
        return read_mapped(config.data.name, options)
    return _read(config.data.name, options, stamp(config.data.name, options))


@contextmanager
def one_copy() -> Iterator[None]:
    """Meanwhile sources are memory maps: the processes of a machine share one copy of each."""
    before = _shared.set(True)
    try:
        yield
    finally:
        _shared.reset(before)


@lru_cache(maxsize=1)
def _read(name: str, options: tuple[tuple[str, Scalar], ...], held: Stamp) -> Source:
    return read(name, **dict(options))


def forget() -> None:
    """Let go of the last source."""
    _read.cache_clear()


def options_of(config: Config) -> dict[str, Scalar]:
    """What the configured source's reader wants to know."""
    table = config.data
    options: dict[str, Scalar] = dict(own_options(config, "data"))
    if table.folder:
        options["folder"] = table.folder
    if table.name in TEXTS:
        options["context"] = table.context
    if table.name in TABLES and table.tokenizer:
        options["tokenizer"] = table.tokenizer
    if table.name == "synthetic":
        options |= {
            "n": table.train + table.test,
            "dimension": table.dimension,
            "classes": table.classes,
            "seed": config.federation.seed,
        }
    return options


def federated_data(config: Config, samples: Source) -> FederatedData:
    """Train and test samples drawn from the source, the train samples dealt to the clients."""
    held = samples.inputs
    require_room(config, held.shape[1:], len(held), held.itemsize)
    train, client, test = deal(config, samples)
    clients = config.federation.clients
    return federate(samples, train, client, test, config.data.normalize, clients)


def plan(config: Config) -> Plan:
    """The run's randomness, and what its step sizes are times."""
    federation, local, privacy = config.federation, config.local, config.privacy
    return Plan(
        federation.seed,
        federation.clients,
        federation.per_round,
        federation.rounds,
        local.steps,
        local.batch,
        factor=schedule_of(config),
        poisson=privacy.level == "client" and privacy.cohorts == "poisson",
        secret="" if privacy.insecure_reproducible_noise else privacy.noise_source,
    )


def task(
    config: Config,
    shape: tuple[int, ...],
    classes: int,
    vocabulary: int = 0,
    stored: np.dtype | None = None,
) -> Task:
    """The configured task for samples of that shape and stored type, in the run's precision, on its
    device, with its kernel; `vocabulary` is that of windows of text."""
    engine = config.engine
    dtype, device = DTYPES[engine.dtype], torch.device(engine.device)
    if own_objects(config).task is not None:
        facts = (("classes", classes), ("shape", shape), ("vocabulary", vocabulary))
        whole = stored is not None and stored.kind in "iu" and stored != np.uint8
        return _own(config, facts, whole, dtype, device)
    if not classes:
        raise InputError(
            "the targets are real numbers, which the tasks of this package do not predict: bring a "
            "task of your own"
        )
    if config.task.name == "network":
        if config.task.model == "gpt":
            form, tables = form_of(config, shape, vocabulary), config.data.name in TABLES
            require_room_for_parameters(config, form.entries, dtype.itemsize, device)
            of = config.task
            return _decoder(form, of.weights, of.lora_rank, tables, dtype, device)
        return _network(config.task.model, shape, classes, dtype, device)
    return MatrixTask(math.prod(shape), classes, dtype, device, engine.kernel, config.task.initial)


@lru_cache(maxsize=4)
def _own(
    config: Config,
    facts: tuple[tuple[str, Any], ...],
    whole: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> NetworkTask:
    """The user's, made once for all clients of a worker process."""
    known = dict(facts)
    with torch.random.fork_rng(devices=[]):  # the caller's draws go on as they would have
        torch.manual_seed(config.federation.seed)  # a class draws its first weights when called
        made = value(config, "task", values=(nn.Module, OwnTask, tuple), facts=known)
    within = guard(config, "task")
    with within:
        found = as_task(made)
        return user_network(found, known["shape"], known["classes"], whole, dtype, device, within)


@lru_cache(maxsize=4)
def _network(
    model: str, shape: tuple[int, ...], classes: int, dtype: torch.dtype, device: torch.device
) -> NetworkTask:
    """Made once for all clients of a worker process."""
    return NetworkTask(network(model, shape, classes), with_channels(shape), dtype, device)


@lru_cache(maxsize=4)
def _decoder(
    form: Form, weights: str, rank: int, tables: bool, dtype: torch.dtype, device: torch.device
) -> NetworkTask:
    """The same for windows of text, begun from stored weights if there are any, or with adapters of
    that `rank` beside them; of `tables` with sentences only the sentences are predicted."""

    def stored(module: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return decoders.matching_weights(read_weights(weights), module)

    start, shape = stored if weights else gpt2_law, (form.context + 1,)
    targets = partial(sentence_tokens, form.vocabulary - 1) if tables else next_tokens
    network = decoder(form)
    if rank:
        like = torch.empty(0, dtype=dtype, device=device)
        network, start = add_adapters(network, rank, read_weights(weights), like), lora_law
    return NetworkTask(network, shape, dtype, device, targets=targets, start=start)


def form_of(config: Config, shape: tuple[int, ...], vocabulary: int) -> Form:
    """The decoder that reads windows of that shape."""
    of = config.task
    return Form(vocabulary, shape[0] - 1, of.width, of.depth, of.heads)


def experiment(
    config: Config,
    data: FederatedData,
    classes: int,
    neighbours: Neighbours | None = None,
    lr: Number | None = None,
    regularization: Number | None = None,
) -> Experiment:
    """Recipe, task, plan and shards of a resolved config; per-replica lr and lambda if given."""
    shape = data.shape or data.inputs.shape[1:]
    what = task(config, shape, classes, data.vocabulary, data.stored)
    if isinstance(what, MatrixTask):
        _require_ball(data)
    stacks = [len(value) for value in (lr, regularization) if isinstance(value, Tensor)]
    require_room_for_model(config, what, classes, len(data.labels), max(stacks, default=1))
    recipe = build_recipe.recipe(config, what, lr, regularization)
    build_recipe.require_own_aggregate(config, recipe, what)
    return Experiment(
        recipe,
        what,
        plan(config),
        Shards.of(data, what.dtype, what.device, neighbours),
    )


def _require_ball(data: FederatedData) -> None:
    """Refuse rows outside the unit ball, of which the constants of the matrix task do not hold."""
    for rows in (data.inputs, data.test_inputs):
        squares = np.einsum("nd,nd->n", rows, rows)
        if not (squares <= 1 + ROUNDING).all():  # NaN neither
            raise InputError(
                "the constants of the matrix task are proved of samples in the unit ball, and one "
                f"has norm {math.sqrt(squares.max()):.4g}: set [data] normalize = 'unit'"
            )


def resolve(config: Config) -> Config:
    """Fix what depends on the machine (device, kernel), follows from a rule (002's step sizes, the
    auxiliary one) or from what the user brings (how many samples, where), so that the run can be
    repeated."""
    config = with_objects(fitted(with_defaults(config)))
    device = _device(config.engine.device)
    dtype, kernel = DTYPES[config.engine.dtype], config.engine.kernel
    usable = [
        one for one in supported(dtype, device) if one != kernel or one != "fused" or compiles()
    ]
    if kernel == "auto" and reads(config, "engine.kernel"):
        compiled = "fused" in usable and _is_long(config) and compiles()
        kernel = "fused" if compiled else fastest(512, 784, 1024, dtype, device)
    if kernel not in usable:
        raise InputError(
            f"[engine] kernel = '{kernel}' cannot run {config.engine.dtype} on {device.type}: "
            f"choose one of {', '.join(usable)}, or auto"
        )
    engine = config.engine.model_copy(update={"device": str(device), "kernel": kernel})
    config = config.model_copy(update={"engine": engine, "local": _scheduled(config)})
    return config.model_copy(update={"local": _with_aux_rate(config)})


def _is_long(config: Config) -> bool:
    """Whether a run that computes mean gradients takes longer than the compilation of a kernel."""
    local, federation = config.local, config.federation
    own = config.data.train / federation.clients
    each = min(local.batch, own) if local.batch else own
    many = each * local.steps * federation.per_round * federation.rounds
    return many > COMPILED and not reads(config, "privacy.lot")


def _with_aux_rate(config: Config) -> Local:
    """[local] with the auxiliary step size in numbers, where a recipe of ours reads it."""
    local = config.local
    if is_own(local.recipe) or not reads(config, "local.aux-lr"):
        return local
    return local.model_copy(update={"aux_lr": aux_rate(local)})


def _scheduled(config: Config) -> Local:
    """[local] with the numbers that its schedule names."""
    local = config.local
    if local.schedule != "heavy-tailed":
        return local
    factor, memory = heavy_tailed(config.federation.rounds * local.steps, local.tail_index or None)
    found = {"lr": local.lr * factor, "schedule": "constant", "tail_index": 0.0}
    local = local.model_copy(update=found)
    heavy = reads(config.model_copy(update={"local": local}), "local.momentum")
    return local.model_copy(update={"momentum": memory}) if heavy else local


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise InputError(f"[engine] device = '{name}' is unknown: use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(
            f"[engine] device = '{name}' is none that runs are checked on: use auto, cpu or cuda"
        )
    count = 1 if device.type == "cpu" else torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise InputError(f"[engine] device = '{name}' is not on this machine: use auto or cpu")
    return device
