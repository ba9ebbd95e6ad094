"""Read the samples, and split them over the clients.

`read_source` reads the source that [data] names. `deal` draws the train and held-out samples, and
the client of each train sample. `Shards` (`shards.py`) stores the samples as tensors.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np

from fedmuon.config.load import Config, nested, parse
from fedmuon.config.schema import Data, reads
from fedmuon.config.user_objects import (
    UserObjects,
    facts_for,
    guard,
    make_named,
    object_options,
    user_objects,
)
from fedmuon.core.choices import DIALOGUES, DOCUMENTS, GIVEN, GLUE, OWN_FILES, TABLES, TEXTS, is_own
from fedmuon.core.errors import Guard, InputError
from fedmuon.core.registry import absolute_name, make, require_callable, takes
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Option
from fedmuon.data.features import Features
from fedmuon.data.federated import Dealt, FederatedData, federate, first_of, split
from fedmuon.data.partition import (
    BY_CLASS,
    COLUMN,
    PARTITIONS,
    by_partitioner,
    clients_of_samples,
    flatten_partition,
    is_partitioner,
    one_line,
    partitioner_clients,
    require_class_labels,
    require_samples,
)
from fedmuon.data.readers import Stamp, read, read_mapped, stamp
from fedmuon.data.source import Source
from fedmuon.data.unseen import TRAINING, UNSEEN, VALIDATION, parted
from fedmuon.data.user_data import as_array, as_source, digest
from fedmuon.data.words import Names, numbered
from fedmuon.federated.language_model import require_room_for_base, tokenizer_of
from fedmuon.federated.size_limits import require_room

Facts = tuple[tuple[str, Any], ...]
TEST = 5  # by default, one fifth of a small source is held out
_shared: ContextVar[bool] = ContextVar("shared", default=False)


# The source


def read_source(config: Config, mapped: bool = False) -> Source:
    """Read the whole configured data source, and cache the last result.

    The result contains neither the samples of a public center nor the samples of clients that never
    train. If `mapped` is true, or within `one_copy`, the arrays are memory maps of files. User data
    are never mapped.
    """
    source, counts = _whole_source(config, mapped), left_out_counts(config)
    return parted(source, *counts.values())[TRAINING] if any(counts.values()) else source


def left_out_counts(config: Config) -> dict[str, int]:
    """Return how many unseen clients and validation clients there are."""
    if not reads(config, "data.unseen-clients"):
        return {UNSEEN: 0, VALIDATION: 0}
    return {UNSEEN: config.data.unseen_clients, VALIDATION: config.data.validation_clients}


def left_out(config: Config, group: str) -> Source | None:
    """Return the samples of the clients that never train, or None if the group has no clients.

    Args:
        config: The config.
        group: `unseen` or `validation`.
    """
    counts = left_out_counts(config)
    return parted(_whole_source(config), *counts.values())[group] if counts[group] else None


def _whole_source(config: Config, mapped: bool = False) -> Source:
    """Return the samples of all clients. The last result is cached."""
    table, shared = config.data, mapped or _shared.get()
    require_room_for_base(config)  # before its tokenizer reads the data
    if user_objects(config).data is not None:
        source = _read_user_data(*_user_data(config))
    elif shared:
        source = read_mapped(table.name, reader_options(config))
    else:
        if table.name == "synthetic":
            require_room(config, (table.dimension,))
        options = reader_options(config)
        source = _read(table.name, options, stamp(table.name, options))
    if table.features != "none":
        features = Features(table.features, table.features_seed, table.public, table.components)
        source = _with_features(features, source, shared)
    return source if table.center == "none" else source.with_public_center(table.center_samples)


@contextmanager
def one_copy() -> Iterator[None]:
    """Read sources as memory maps within this block, so that several processes share one copy."""
    before = _shared.set(True)
    try:
        yield
    finally:
        _shared.reset(before)


@lru_cache(maxsize=1)
def _read(name: str, options: tuple[tuple[str, Option], ...], files: Stamp) -> Source:
    return read(name, **dict(options))


@lru_cache(maxsize=1)
def _with_features(features: Features, source: Source, mapped: bool) -> Source:
    """Return the source with features in place of images. The last result is cached."""
    return features.mapped(source) if mapped else features.of(source)


def forget_source() -> None:
    """Free the memory of the source that was read last, and of its features."""
    _read.cache_clear()
    _with_features.cache_clear()
    parted.cache_clear()


def reader_options(config: Config) -> tuple[tuple[str, Option], ...]:
    """Return the options of [data] that the reader of this source needs, sorted by name."""
    table = config.data
    options: dict[str, Option] = dict(object_options(config, "data"))
    if table.folder:
        options["folder"] = table.folder
    if table.name in TEXTS:
        options["context"] = table.context
    if table.name in DOCUMENTS and (tokenizer := tokenizer_of(config)):
        options["tokenizer"] = tokenizer
    if table.name in (*TABLES, *GLUE) and table.tokenizer:
        options["tokenizer"] = table.tokenizer
    if table.name in TABLES and table.pad_token:
        options["pad_token"] = True
    if table.name == "synthetic":
        options |= {
            "n": table.train + table.test + table.validation_samples,
            "dimension": table.dimension,
            "classes": table.classes,
            "seed": config.federation.seed,
        }
    return tuple(sorted(options.items()))


UserData = tuple[UserObjects, Facts, str, str, str]


def _user_data(config: Config) -> UserData:
    """Return the user's data, their arguments, their name, and the names of target and client."""
    objects = user_objects(config)
    facts = takes(objects.data, facts_for(config, "data")) if callable(objects.data) else {}
    facts.pop("digest", None)  # the run writes this entry; it is not an option
    table = config.data
    name = absolute_name(table.name)
    return objects, tuple(sorted(facts.items())), name, table.target, table.client


@lru_cache(maxsize=2)
def _read_user_data(
    objects: UserObjects, facts: Facts, name: str, target: str, client: str
) -> Source:
    """Read or create the user's data. The result is cached for calls with equal arguments."""
    setting = f"[data] name = '{name}'" if name != GIVEN else ""
    with Guard("data", objects.data, setting):
        value = make(objects.data, dict(facts), (Source, tuple, list))
        return as_source(value, objects.test, name, target, client)


def user_data_digest(config: Config) -> str:
    """Return a hash of the user's samples."""
    return _digest(*_user_data(config))


@lru_cache(maxsize=2)
def _digest(objects: UserObjects, facts: Facts, name: str, target: str, client: str) -> str:
    source = _read_user_data(objects, facts, name, target, client)
    with Guard("data", objects.data):
        return digest(source)


# The partition


def build_data(config: Config, source: Source | None = None) -> FederatedData:
    """Draw train and held-out samples, and split the train samples over clients.

    Samples are stored in the precision of the run, to save memory.
    """
    source = read_source(config) if source is None else source
    stored = source.inputs
    require_room(config, stored.shape[1:], len(stored), stored.itemsize)
    dealt = deal(config, source)
    most = np.float64 if config.engine.dtype == "float64" else np.float32
    return federate(source, dealt, config.data.normalize, config.federation.clients, most)


def deal(config: Config, source: Source) -> Dealt:
    """Choose the train samples, the client of each train sample, and the held-out samples."""
    dealt, share = _dealt(config, source), config.data.client_test
    if not share:
        return dealt
    return dealt.with_client_test(share, generator(config.federation.seed, Draw.SPLIT, block=2))


def _dealt(config: Config, source: Source) -> Dealt:
    """Draw the samples as `deal` does, before each client holds out its own test samples."""
    table, federation, seed = config.data, config.federation, config.federation.seed
    n, official, validation = len(source.labels), source.official_test, table.validation_samples
    if (parts := _index_arrays(config)) is not None:  # samples in no array may be held out
        last = n if official is None else official
        with _partition_guard(config):
            train, client = flatten_partition(parts, last)
        require_samples(client, federation.clients, table.minimum)
        unused = np.setdiff1d(np.arange(last), train)
        drawn = generator(seed, Draw.SPLIT).permutation(unused)
        if official is not None:
            return Dealt(train, client, np.arange(last, n), first_of(drawn, validation))
        validation_rows = first_of(drawn[table.test :], validation)
        return Dealt(train, client, drawn[: table.test], validation_rows)
    train, test, validation_rows = split(
        source.labels, official, table.train, table.test, seed, validation
    )
    rng = generator(seed, Draw.PARTITION)
    owners = _owners(config, source)
    if owners is not None:
        client, names = owners[0][train], owners[1]
        require_samples(client, federation.clients, table.minimum, names)
        return Dealt(train, client, test, validation_rows, names=names)
    with _partition_guard(config):
        if federation.partition in BY_CLASS:
            require_class_labels(source.labels, federation.partition)
        assigned = _partition(config)(source.labels[train], federation.clients, rng)
        client = clients_of_samples(assigned, len(train), federation.clients)
    filled = federation.partition in ("dirichlet", "quantity")  # they ensure the minimum
    require_samples(client, federation.clients, 1 if filled else table.minimum)
    return Dealt(train, client, test, validation_rows)


def _owners(config: Config, source: Source) -> tuple[np.ndarray, Names] | None:
    """Return the client of each sample and the clients' names, if a column names the clients.

    The column belongs to the source, or is an array that the user passed as the partition. For any
    other partition, the result is None.
    """
    federation = config.federation
    if (column := user_objects(config).partition) is not None:
        if isinstance(column, tuple | list | type) or not hasattr(column, "__array__"):
            return None
        with _partition_guard(config):
            values = as_array(column, "the clients in partition")
            codes, names = numbered(values, "the client in partition")
            n = len(source.labels)
            if len(codes) not in (n, source.official_test):
                raise InputError(
                    f"partition names the clients of {len(codes)} samples, but data has "
                    f"{source.official_test or n} samples: pass one client for each sample"
                )
        return codes, names
    if federation.partition != "column":
        return None
    if source.owner is None:
        raise InputError(
            "[federation] partition = 'column' needs data with a column of clients, but [data] "
            "names no such column. Use npz, csv or parquet data, and set [data.options] client = "
            "'NAME OF THE COLUMN'. For a table that you pass in Python, set [data] client. For "
            "arrays, pass partition=, an array with the client of each sample."
        )
    count = int(source.owner.max()) + 1
    return source.owner, source.owner_names or tuple(map(str, range(count)))


def _partition_guard(config: Config) -> AbstractContextManager[None]:
    """Return a context that reports errors of the user's partition function, if there is one."""
    brought = user_objects(config).partition is not None
    return guard(config, "partition") if brought else nullcontext()


def _index_arrays(config: Config) -> tuple | list | None:
    """Return the user's partition if it consists of index arrays, otherwise None."""
    partition = user_objects(config).partition
    with _partition_guard(config):
        return partition if isinstance(partition, tuple | list) else None


def _partition(config: Config) -> Any:
    """Return the partition function. If the user passed a class, create an object of this class."""
    kind = user_objects(config).partition
    if isinstance(kind, type) and is_partitioner(kind):
        clients = {"num_partitions": config.federation.clients}
        try:
            partition = kind(**takes(kind, {**clients, **COLUMN, **facts_for(config, "partition")}))
        except Exception as error:  # the partitioner's own checks
            raise InputError(
                f"your partitioner {kind.__name__} could not be created ({one_line(error)}). Set "
                f"the arguments of {kind.__name__} in [federation.options]."
            ) from error
    else:
        partition = make_named(config, "partition", PARTITIONS)
    if is_partitioner(partition):
        return lambda labels, clients, rng: by_partitioner(partition, labels, clients)
    mend = "index arrays, one per client, or a function (labels, clients, rng)"
    return require_callable(partition, "partition", mend, guard(config, "partition").named)


def with_user_sizes(config: Config) -> Config:
    """Set the numbers of samples and clients that follow from the user's data and partition.

    Texts of several clients are divided by these clients, unless the config has a partition.
    """
    config = _with_column_of_texts(config)
    objects, parts = user_objects(config), _index_arrays(config)
    owners = None
    with _partition_guard(config):
        count = partitioner_clients(objects.partition) if parts is None else len(parts)
    of_user = objects.data is not None or config.data.name in OWN_FILES
    if parts is None and (of_user or objects.partition is not None):
        owners = _owners(config, read_source(config))
        count = len(owners[1]) if owners else count
    if not of_user and count is None:
        return config
    data: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    federation = config.federation
    set_keys = federation.model_fields_set
    if count is not None:
        if "clients" in set_keys and federation.clients != count:
            by = "the column of clients" if owners else "your partition"
            raise InputError(
                f"[federation] clients is {federation.clients}, but {by} has {count} clients. "
                f"Remove the key clients from [federation], or set clients = {count}."
            )
        changed["clients"] = count
        if owners and "per_round" in set_keys and federation.per_round > count:
            raise InputError(
                f"[federation] per-round = {federation.per_round}, but {_training(config, count)} "
                f"Set per-round = {count} or less."
            )
    if parts is not None:
        data = _sizes_of_parts(config, parts)
    if of_user and not {"train", "test", "minimum"} <= config.data.model_fields_set:
        clients = changed.get("clients", federation.clients)
        data = _sizes_of_source(config, read_source(config), clients) | data
    if objects.data is not None:
        data["options"] = {**dict(config.data.options), "digest": user_data_digest(config)}
    if of_user and "partition" not in set_keys and _without_classes(config):
        changed["partition"] = "iid"
    if "per_round" not in set_keys:
        clients = changed.get("clients", federation.clients)
        changed["per-round"] = min(federation.per_round, clients)
    tables = nested(config)
    tables |= {"data": tables["data"] | data, "federation": tables["federation"] | changed}
    return parse(tables).with_objects(config.given)


def _training(config: Config, count: int) -> str:
    """Return a sentence that says why this number of clients train."""
    counts = {name: number for name, number in left_out_counts(config).items() if number}
    if not counts:
        return f"the data has {count} clients."
    use = {UNSEEN: "unseen", VALIDATION: "validation clients"}
    out = " and ".join(f"{number} are {use[name]}" for name, number in counts.items())
    trains = f"{count} train{'s' if count == 1 else ''}"
    return f"the data has {count + sum(counts.values())} clients, of which {out}, so {trains}."


def _with_column_of_texts(config: Config) -> Config:
    """Return the config with the partition `column` if texts name their clients.

    The labels of such texts are their clients. A partition by labels would mix the clients.

    Raises:
        InputError: If the config has a partition by labels.
    """
    federation, objects = config.federation, user_objects(config)
    of_texts = objects.data is not None or config.data.name in DOCUMENTS
    if not of_texts or objects.partition is not None or federation.partition not in BY_CLASS:
        return config
    source = read_source(config)
    if not source.vocabulary or len(source.owner_names) < 2:
        return config
    if "partition" in federation.model_fields_set:
        raise InputError(
            f"the {'rows' if config.data.name in (GIVEN, *DIALOGUES) else 'texts'} name their "
            f"clients, but [federation] partition = '{federation.partition}' would mix them. Set "
            "partition = 'column'."
        )
    changed = federation.model_copy(update={"partition": "column"})
    return config.model_copy(update={"federation": changed})


def _without_classes(config: Config) -> bool:
    """Return whether samples cannot be divided by class, because labels are real numbers.

    Labels of a file are divided by their distinct values, unless they are vectors.
    """
    source = read_source(config)
    in_file = user_objects(config).data is None
    return not source.classes and (source.labels.ndim > 1 or not in_file)


def _sizes_of_parts(config: Config, parts: Any) -> dict[str, int]:
    """Return the sizes that follow from the user's index arrays."""
    with _partition_guard(config):
        sizes = [len(part) for part in parts]
    smallest = max(1, min(sizes, default=1))
    required = {"train": max(1, sum(sizes)), "minimum": min(config.data.minimum, smallest)}
    for name, size in required.items():
        setting = getattr(config.data, name)
        if name in config.data.model_fields_set and setting != size:
            raise InputError(
                f"[data] {name} is {setting}, but the index arrays of your partition require "
                f"{name} = {size}. Remove {name} from the config. The correct value is then set "
                "automatically."
            )
    return required


def _sizes_of_source(config: Config, source: Source, clients: int) -> dict[str, Any]:
    """Return the sizes that follow from the user's data."""
    table, n = config.data, len(source.labels)
    set_keys = table.model_fields_set
    if source.official_test is not None and config.given.test is not None:
        test, room = n - source.official_test, source.official_test
        train = _beside_validation(table, room)
    elif source.official_test is not None and table.name in OWN_FILES:
        room = source.official_test
        test = table.test if "test" in set_keys else min(table.test, n - room)
        train = table.train if "train" in set_keys else _beside_validation(table, room)
    else:
        unused = n - table.train - table.validation_samples if "train" in set_keys else n
        test = table.test if "test" in set_keys else min(table.test, max(1, min(n // TEST, unused)))
        train = table.train if "train" in set_keys else _beside_validation(table, n - test)
    sizes: dict[str, Any] = {"train": train, "test": test}
    if "minimum" not in set_keys and not is_own(config.federation.partition):
        sizes["minimum"] = min(table.minimum, max(1, sizes["train"] // clients))
    return sizes


def _beside_validation(table: Data, room: int) -> int:
    """Return the number of train samples if `room` samples are split into train and validation."""
    share = table.validation < 1
    return max(1, int(room / (1 + table.validation) if share else room - table.validation))
