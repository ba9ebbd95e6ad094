"""Build the objects of a run from its config, for every engine.

`resolve` sets all settings that the user's config leaves open. `build_experiment` builds the
server's objects. `build_worker` builds the objects of one client in another process.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NewType

import numpy as np
import torch
from torch import Tensor, nn

from fedmuon.config.load import Config, absolute_paths
from fedmuon.config.methods import average_of
from fedmuon.config.schema import biased_participation, reads
from fedmuon.config.user_objects import guard, make_named, user_objects, with_defaults
from fedmuon.core.choices import GLUE, TABLES, is_own
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.client_neighbours import COLUMNS, ClientNeighbours, require_known
from fedmuon.data.federated import FederatedData
from fedmuon.data.glue import FORMS
from fedmuon.data.neighbours import Neighbours
from fedmuon.data.source import Source
from fedmuon.federated.build_recipe import build_recipe
from fedmuon.federated.client_data import build_data, deal, read_source, with_user_sizes
from fedmuon.federated.clock import Timetable
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.hostile_clients import require_tolerated
from fedmuon.federated.language_model import base_dtype_of
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import begin
from fedmuon.federated.schedule import schedule_of
from fedmuon.federated.shards import Shard, Shards, partition_digest, targets_on
from fedmuon.federated.size_limits import (
    require_room_for_model,
    require_room_for_parameters,
)
from fedmuon.federated.timetables import timetable
from fedmuon.federated.traffic import payload_bytes, returned_like, sent_like
from fedmuon.federated.trial_recipe import require_memoryless
from fedmuon.optim.chain import Number, States
from fedmuon.optim.recipe import Recipe, initial_states
from fedmuon.optim.recipes import aux_rate
from fedmuon.optim.schedules import heavy_tailed
from fedmuon.tasks import decoder as decoders
from fedmuon.tasks.base import Batch, Loss, Params, Task, cross_entropy, labels_as_targets
from fedmuon.tasks.causal_lm import causal_lm, is_language_model, require_known_tokens
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
from fedmuon.tasks.frozen_base import stored_version
from fedmuon.tasks.matrix import MatrixTask, compiles, fastest, supported
from fedmuon.tasks.models import network, with_channels
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.peft_model import (
    BroughtAdapters,
    brought_adapters,
    is_language_peft,
    peft_task,
    require_adapters,
)
from fedmuon.tasks.user_task import Task as OwnTask
from fedmuon.tasks.user_task import as_task, user_network

COMPILED = 2e7  # compilation pays off for runs with more sample gradients than this
ROUNDING = 1e-9  # tolerance for the squared norm of a row in the unit ball, before rounding
DTYPES = {"float32": torch.float32, "float64": torch.float64}

ResolvedConfig = NewType("ResolvedConfig", Config)
"""The complete config of a run. It is stored as config.toml and never changes."""


# Settings that a config leaves open


def resolve(config: Config, resumed: Config | None = None) -> ResolvedConfig:
    """Set all settings that the user's config leaves open, so that the run can be repeated.

    Some of these settings depend on the machine: the device and the kernel. Some settings follow
    from a rule: the step sizes of the Nesterov Muon paper, and the auxiliary step size. Other
    settings come from the user's data and partition: the numbers of samples and clients. The noise
    for a target epsilon also depends on the partitioned samples. `fedmuon.runs.prepare.prepare`
    computes this noise later, before the run writes any file.

    Args:
        config: The config as the user set it.
        resumed: The config of the run to resume, if any, whose noise is used again.

    Raises:
        InputError: If the device, the kernel or a custom object cannot be used.
    """
    config = absolute_paths(with_user_sizes(with_defaults(config)), files=False)
    device = _device(config.engine.device)
    changed = {"device": str(device), "kernel": _kernel(config, device)}
    config = config.model_copy(update={"engine": config.engine.model_copy(update=changed)})
    local = config.local
    if local.schedule == "heavy-tailed":
        steps = config.federation.rounds * local.steps
        factor, memory = heavy_tailed(steps, local.tail_index or None)
        constant = {"lr": local.lr * factor, "schedule": "constant", "tail_index": 0.0}
        local = local.model_copy(update=constant)
        if reads(config.model_copy(update={"local": local}), "local.momentum"):
            local = local.model_copy(update={"momentum": memory})
        config = config.model_copy(update={"local": local})
    if not is_own(local.recipe) and reads(config, "local.aux-lr"):
        local = local.model_copy(update={"aux_lr": aux_rate(local)})
    privacy = config.privacy
    if resumed is not None:
        if not resumed.local.aux_lr and local.aux_lr == aux_rate(resumed.local):
            local = local.model_copy(update={"aux_lr": 0.0})
        if privacy.epsilon and not privacy.noise:
            privacy = privacy.model_copy(update={"noise": resumed.privacy.noise})
        averages = config.federation.aggregate, resumed.federation.aggregate
        if averages == (average_of(local.recipe), "mean"):  # "mean" was the default in version 1.0
            federation = config.federation.model_copy(update={"aggregate": "mean"})
            config = config.model_copy(update={"federation": federation})
    return ResolvedConfig(config.model_copy(update={"local": local, "privacy": privacy}))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise InputError(
            f"[engine] device = '{name}' is unknown. Use 'auto', 'cpu' or 'cuda'."
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(
            f"[engine] device = '{name}' is not supported. Use 'auto', 'cpu' or 'cuda'."
        )
    count = 1 if device.type == "cpu" else torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise InputError(
            f"[engine] device = '{name}' is not available on this machine. Use 'auto' or 'cpu'."
        )
    return device


def _kernel(config: Config, device: torch.device) -> str:
    """Return the name of the kernel for runs of the task 'matrix'.

    With the setting `auto`, a compiled kernel is used if the run computes mean gradients and is
    expected to take longer than the compilation.
    """
    dtype, kernel = DTYPES[config.engine.dtype], config.engine.kernel
    usable = [
        name for name in supported(dtype, device) if name != kernel or name != "fused" or compiles()
    ]
    if kernel == "auto" and reads(config, "engine.kernel"):
        local, federation = config.local, config.federation
        client_samples = config.data.train / federation.clients
        batch = min(local.batch, client_samples) if local.batch else client_samples
        gradients = batch * local.steps * federation.per_round * federation.rounds
        long = gradients > COMPILED and not reads(config, "privacy.lot")
        compiled = "fused" in usable and long and compiles()
        kernel = "fused" if compiled else fastest(512, 784, 1024, dtype, device)
    if kernel not in usable:
        raise InputError(
            f"[engine] kernel = '{kernel}' does not support dtype {config.engine.dtype} on "
            f"device {device.type}. Choose one of {', '.join(usable)}, or auto."
        )
    return kernel


# The objects of the server


def build_experiment(
    config: Config,
    data: FederatedData | None = None,
    neighbours: Neighbours | None = None,
    lr: Number | None = None,
    regularization: Number | None = None,
) -> Experiment:
    """Build the optimizer, task, plan and client data of a resolved config.

    Args:
        config: The resolved config.
        data: The partitioned samples. By default, the samples are read and partitioned.
        neighbours: The samples that each replica replaces, if the replicas are neighbouring data
            sets.
        lr: A step size per replica [S], which overrides the step size in the config.
        regularization: A lambda of the orthogonalizer per replica [S], which overrides the lambda
            in the config.

    Raises:
        InputError: If an object cannot be built, or the run does not fit the machine.
    """
    data = build_data(config) if data is None else data
    shape = data.shape or data.inputs.shape[1:]
    task = build_task(config, shape, data.classes, data.vocabulary, data.stored)
    held_out = data.test_inputs, data.validation_inputs, data.client_test_inputs
    if isinstance(task, MatrixTask):
        for rows in (data.inputs, *held_out):
            squares = np.einsum("nd,nd->n", rows, rows, dtype=np.float64)
            rounding = max(ROUNDING, 4 * float(np.finfo(rows.dtype).eps))
            if not (squares <= 1 + rounding).all():  # also rejects NaN
                raise InputError(
                    f"a sample has norm {math.sqrt(squares.max()):.4g}, but [task] name = "
                    "'matrix' needs samples of norm 1 or less, because the theory's constants "
                    "are proved only for such samples. Set [data] normalize = 'unit'."
                )
    if is_language_model(task) and not data.vocabulary:
        for rows in (data.inputs, *held_out):
            require_known_tokens(task, rows)
    stacks = [len(values) for values in (lr, regularization) if isinstance(values, Tensor)]
    require_room_for_model(config, task, data.classes, len(data.labels), max(stacks, default=1))
    recipe = build_recipe(config, task, lr, regularization)
    require_memoryless(config, recipe, task)
    shards = Shards.of(data, task.dtype, task.device, neighbours)
    plan = build_plan(config)
    if config.devices.mode != "none":
        clock = _timetable(config, plan, recipe, task, data.sizes)
        plan = dataclasses.replace(plan, timetable=clock)
    require_tolerated(config, recipe, plan)
    return Experiment(recipe, task, plan, shards)


def _timetable(
    config: Config, plan: RandomnessPlan, recipe: Recipe, task: Task, sizes: np.ndarray
) -> Timetable:
    """Simulate the rounds with the configured devices, for messages and replies of this size."""
    state = begin(recipe, task, plan.seed)
    down, up = (
        payload_bytes(*like(recipe, state.params, state.states))
        for like in (sent_like, returned_like)
    )
    batch = np.minimum(plan.batch or sizes, sizes).astype(float)
    if recipe.mechanism is not None:
        batch = np.full(len(sizes), recipe.mechanism.lot)  # the expected lot size, which is public
    steps = np.array([plan.steps_of(int(size)) for size in sizes])
    return timetable(config, steps, batch, (down, up))


def build_plan(config: Config) -> RandomnessPlan:
    """Return the plan of the run, which defines all random draws and step-size factors."""
    federation, local, privacy = config.federation, config.local, config.privacy
    return RandomnessPlan(
        federation.seed,
        federation.clients,
        federation.per_round,
        federation.rounds,
        local.steps,
        local.batch,
        epochs=local.epochs if reads(config, "local.epochs") else 0.0,
        factor=schedule_of(config),
        poisson=privacy.level == "client" and privacy.cohorts == "poisson",
        secret="" if privacy.insecure_reproducible_noise else privacy.noise_source,
        biased=biased_participation(config),
    )


def build_task(
    config: Config,
    shape: tuple[int, ...],
    classes: int,
    vocabulary: int = 0,
    stored: np.dtype | None = None,
) -> Task:
    """Build the configured task.

    Args:
        config: The resolved config.
        shape: Shape of a stored sample.
        classes: Number of classes. Use 0 for real-valued targets.
        vocabulary: Vocabulary size if the samples are windows of text. Otherwise, 0.
        stored: The dtype of stored samples.
    """
    engine, table = config.engine, config.task
    dtype, device = DTYPES[engine.dtype], torch.device(engine.device)
    if user_objects(config).task is not None:
        facts = (("classes", classes), ("shape", shape), ("vocabulary", vocabulary))
        return _user_task(config, facts, stored, dtype, device)
    if not classes:
        raise InputError(
            f"the labels of the data are real numbers, but [task] name = '{table.name}' predicts "
            "classes. Use integers from 0 as labels, or pass your own task."
        )
    if table.name == "causal-lm":
        return _language_model(
            stored_version(table.weights), table.weights, shape, vocabulary, table.lora_rank,
            table.lora_alpha, table.lora_layers, dtype, device, base_dtype_of(config),
            table.checkpointing,
        )  # fmt: skip
    if table.name != "network":
        width = math.prod(shape)
        return MatrixTask(width, classes, dtype, device, engine.kernel, table.initial)
    if table.model != "gpt":
        return _network(table.model, shape, classes, dtype, device, table.label_smoothing)
    form, tables = decoder_form(config, shape, vocabulary), config.data.name in TABLES
    classified = ()
    if config.data.name in GLUE:
        classified = (classes, len(FORMS[config.data.name].sentences))
    require_room_for_parameters(config, form.entries, dtype.itemsize, device)
    stored = table.weights, table.lora_rank
    smoothing = table.label_smoothing
    return _decoder(form, shape, *stored, tables, classified, dtype, device, smoothing)


@lru_cache(maxsize=4)
def _user_task(
    config: Config,
    facts: tuple[tuple[str, Any], ...],
    stored: np.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> NetworkTask:
    """Build the user's task. The result is cached for all clients of this process."""
    arguments = dict(facts)
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state unchanged
        torch.manual_seed(config.federation.seed)  # a class draws its initial weights when called
        kinds = (nn.Module, OwnTask, tuple, BroughtAdapters)
        created = make_named(config, "task", values=kinds, facts=arguments)
    if is_language_peft(created):  # from a function that the config names
        created = brought_adapters(created)
    if isinstance(created, BroughtAdapters):
        sizes = arguments["shape"], arguments["vocabulary"]
        return peft_task(created, *sizes, dtype, device, stored)
    integers = stored is not None and stored.kind in "iu" and stored != np.uint8
    within = guard(config, "task")
    with within:
        user_task = as_task(created, within.named)
        if user_task.loss is None:
            require_adapters(user_task.module, windows=bool(arguments["vocabulary"]))
        return user_network(
            user_task, arguments["shape"], arguments["classes"], integers, dtype, device, within
        )


@lru_cache(maxsize=4)
def _network(
    model: str, shape: tuple[int, ...], classes: int, dtype: torch.dtype, device: torch.device,
    smoothing: float,
) -> NetworkTask:  # fmt: skip
    """Build a network task. The result is cached for all clients of this process."""
    loss = _loss(smoothing)
    return NetworkTask(network(model, shape, classes), with_channels(shape), dtype, device, loss)


def _loss(smoothing: float) -> Loss:
    """Return the cross-entropy with smoothed labels."""
    return partial(cross_entropy, smoothing=smoothing) if smoothing else cross_entropy


@lru_cache(maxsize=4)
def _decoder(
    form: Form,
    shape: tuple[int, ...],
    weights: str,
    rank: int,
    tables: bool,
    classified: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    smoothing: float,
) -> NetworkTask:
    """Build a decoder task. The result is cached for all clients of this process.

    If `weights` names stored weights, training starts from these weights. With a `rank`, adapters
    are trained and the stored weights stay fixed. With `tables`, only the tokens of the sentences
    are predicted. A GLUE task predicts a label. For such a task, `classified` contains the number
    of classes and the number of sentences.
    """

    def stored(module: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
        matching = decoders.matching_weights(read_weights(weights), module, form.padded)
        return {**gpt2_law(module, rng), **matching} if classified else matching

    start = stored if weights else gpt2_law
    targets = partial(sentence_tokens, form.end) if tables else next_tokens
    targets = labels_as_targets if classified else targets
    network = decoder(form, *classified)
    if rank:
        like = torch.empty(0, dtype=dtype, device=device)
        pretrained = read_weights(weights)
        network, start = add_adapters(network, rank, pretrained, like, form.padded), lora_law
    loss = _loss(smoothing)
    return NetworkTask(network, shape, dtype, device, loss, targets=targets, start=start)


@lru_cache(maxsize=2)
def _language_model(version: str, *arguments: Any) -> NetworkTask:
    """Build the task causal-lm. The result is cached for all clients of this process.

    The version of the stored model is part of the key, because its files may have been replaced.
    """
    return causal_lm(*arguments)


def decoder_form(config: Config, shape: tuple[int, ...], vocabulary: int) -> Form:
    """Return the shape settings of the decoder, for text windows of this shape."""
    table, length = config.task, shape[0] - 1
    positions = table.positions or length
    if positions < length:
        raise InputError(
            f"[task] positions is {positions}, but a text window has {length} tokens, and each "
            "token needs a position. Raise positions, or lower [data] context."
        )
    sizes = vocabulary, positions, table.width, table.depth, table.heads
    padded = config.data.name in TABLES and config.data.pad_token
    return Form(*sizes, tied=table.head == "tied", padded=padded)


# The objects of one client in another process


@dataclass(frozen=True)
class WorkerSetup:
    """The objects that all clients of a worker process share.

    The samples of client i are the source samples rows[offsets[i]:offsets[i + 1]].
    """

    recipe: Recipe
    task: Task
    plan: RandomnessPlan
    source: Source
    rows: np.ndarray
    offsets: np.ndarray
    normalize: str
    partition_digest: str
    measured: bool = False  # whether each client measures its own losses
    tests: tuple[np.ndarray, np.ndarray] | None = None  # clients' test samples and owners


@dataclass(frozen=True)
class LocalClient:
    """One client: the client's samples, and the objects that all clients of a process share."""

    client: int
    shard: Shard
    setup: WorkerSetup

    def require_same_partition(self, digest: str) -> None:
        """Raise an error if this process and the server have different partitions."""
        if self.setup.partition_digest != digest:
            raise InputError(
                "your partition function returned different results in two processes, but all "
                "processes of a run need the same partition. In your function, draw random "
                "numbers only from the generator that it receives."
            )

    def with_neighbours(self, rows: np.ndarray, count: int) -> Shard:
        """Return this client's shard for `count` neighbouring data sets.

        `rows` has the columns of `Neighbours.rows` or of `ClientNeighbours.rows`.
        """
        if rows.shape[1] == COLUMNS:
            return self._with_client_neighbours(rows, count)
        source, own_rows = self.setup.source, rows[rows[:, 0] == self.client]
        counts = [len(self.shard.data.labels), len(source.labels)]
        if not ((own_rows[:, 1:] >= 0) & (own_rows[:, 1:] < counts)).all():
            raise InputError(
                f"a message from the server replaces a sample of client {self.client}, but this "
                f"node has no sample with that number. The client has {counts[0]} samples and the "
                f"data source has {counts[1]}, both numbered from 0. Use the same data on the "
                "server and on every node."
            )
        neighbours = Neighbours.of(source, rows, self.setup.normalize)
        return Shard.among(self.shard.data, neighbours, self.client)

    def _with_client_neighbours(self, rows: np.ndarray, count: int) -> Shard:
        setup, samples = self.setup, len(self.shard.data.labels)
        require_known(rows, self.client, samples, setup.source, count)
        own_rows = rows[rows[:, 1] == self.client]
        neighbours = ClientNeighbours.of(setup.source, own_rows, count, setup.normalize)
        return Shard.among(self.shard.data, neighbours, self.client)

    def template(self, stack: int) -> tuple[Params, States]:
        """Return tensors with the shapes, precision and device that a message must have."""
        return _template(self.setup.task, self.setup.recipe, stack)


@lru_cache(maxsize=2)  # one replica, and a batch of replicas
def _template(task: Task, recipe: Recipe, stack: int) -> tuple[Params, States]:
    """Build the tensors for `template` once. Do not change the returned tensors."""
    params = task.initial(generator(0, Draw.INITIAL), stack)
    return sent_like(recipe, params, initial_states(recipe, params))


def build_worker(config: Config, client: int) -> LocalClient:
    """Build one client of a config, with a copy of only this client's samples."""
    setup = _worker_setup(config)
    rows = setup.rows[setup.offsets[client] : setup.offsets[client + 1]]
    device, dtype = setup.task.device, setup.task.dtype

    def samples(rows: np.ndarray) -> Batch:
        inputs = setup.source.rows(setup.normalize, rows)
        targets = targets_on(device, dtype, setup.source.labels[rows])
        return Batch(torch.from_numpy(inputs).to(device, dtype), targets)

    test = None
    if setup.tests is not None:
        index, owner = setup.tests
        test = samples(index[owner == client])
    return LocalClient(client, Shard(samples(rows), test=test), setup)


@lru_cache(maxsize=1)
def _worker_setup(config: Config) -> WorkerSetup:
    """Build the objects that all clients of this process share. The result is cached."""
    resolved = resolve(config)
    sent_digest, digest = (dict(table.data.options).get("digest") for table in (config, resolved))
    if sent_digest and sent_digest != digest:
        raise InputError(
            "your data function returned different samples in two processes, but all processes "
            "of a run need the same samples. Use a fixed seed in your function, or load the "
            "samples from a file."
        )
    source = read_source(resolved, mapped=True)
    dealt = deal(resolved, source)
    sizes = np.bincount(dealt.client, minlength=resolved.federation.clients)
    # Only the server starts a run, so the clients' machines do not need the file of stored weights.
    # Adapters are an exception, because they are added to the stored weights.
    adapts = reads(resolved, "task.lora-rank") and resolved.task.lora_rank
    weights = {} if adapts else {"weights": ""}
    bare = resolved.model_copy(update={"task": resolved.task.model_copy(update=weights)})
    stored, tested = source.inputs, resolved.output.clients and resolved.data.client_test
    data_facts = stored.shape[1:], source.classes, source.vocabulary, stored.dtype
    task = build_task(bare, *data_facts)
    recipe = build_recipe(resolved, task)
    if recipe.personalizes and bare != resolved:  # personal parameters start from the first model
        task = build_task(resolved, *data_facts)
    return WorkerSetup(
        recipe,
        task,
        build_plan(resolved),
        source,
        dealt.train[np.argsort(dealt.client, kind="stable")],
        np.concatenate([[0], np.cumsum(sizes)]),
        resolved.data.normalize,
        partition_digest(dealt.train, dealt.client),
        measured=resolved.output.clients,
        tests=(dealt.client_test, dealt.tested) if tested else None,
    )
