"""From what was named or given to samples and their clients."""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np

from fedmuon.config.load import Config, nested, parse
from fedmuon.config.user_objects import Own, guard, known, own_objects, value
from fedmuon.core.choices import GIVEN, is_own
from fedmuon.core.errors import InputError
from fedmuon.core.guard import Guard
from fedmuon.core.registry import function, made, settled, takes
from fedmuon.core.rng import Draw, generator
from fedmuon.data.federated import split
from fedmuon.data.partition import (
    COLUMN,
    PARTITIONS,
    by_partitioner,
    clients_of_samples,
    flatten_partition,
    is_partitioner,
    one_line,
    partitioner_clients,
    require_samples,
)
from fedmuon.data.source import Source
from fedmuon.data.user_data import as_source, digest

Asked = tuple[tuple[str, Any], ...]
TEST = 5  # a fifth of a small source is held out, where nobody says how many


def own_source(config: Config) -> Source:
    """The samples that the user brings, read or made once for what the reader asks for."""
    return _read(*_asked(config))


def _asked(config: Config) -> tuple[Own, Asked, str]:
    own = own_objects(config)
    facts = takes(own.data, known(config, "data")) if callable(own.data) else {}
    facts.pop("digest", None)  # which is ours
    return own, tuple(sorted(facts.items())), settled(config.data.name)


@lru_cache(maxsize=2)
def _read(own: Own, asked: Asked, where: str) -> Source:
    named = f"[data] name = '{where}'" if where != GIVEN else ""
    with Guard("data", own.data, named):
        return as_source(made(own.data, dict(asked), (Source, tuple, list)), own.test, where)


def own_digest(config: Config) -> str:
    """What tells the samples that the user brings from others."""
    return _digest(*_asked(config))


@lru_cache(maxsize=2)
def _digest(own: Own, asked: Asked, where: str) -> str:
    """Hashed once: a worker resolves the config for each of its clients."""
    found = _read(own, asked, where)
    with Guard("data", own.data):
        return digest(found)


def deal(config: Config, samples: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train indices [n], the client of each [n], and test indices, all into the source's order."""
    table, federation = config.data, config.federation
    if (parts := _listed(config)) is not None:
        return _parts(config, samples, parts)
    train, test = split(
        samples.labels, samples.official_test, table.train, table.test, federation.seed
    )
    rng = generator(federation.seed, Draw.PARTITION)
    if federation.partition == "column":
        client = _by_column(samples, train, federation.clients)
    else:
        with _guard(config):
            found = _partition(config)(samples.labels[train], federation.clients, rng)
            client = clients_of_samples(found, len(train), federation.clients)
    filled = federation.partition in ("dirichlet", "quantity")  # which give everybody enough
    require_samples(client, federation.clients, 1 if filled else table.minimum)
    return train, client, test


def _guard(config: Config) -> AbstractContextManager[None]:
    """That of the user's partition, if there is one."""
    brought = own_objects(config).partition is not None
    return guard(config, "partition") if brought else nullcontext()


def _partition(config: Config) -> Any:
    """The function that deals."""
    brought = own_objects(config).partition
    if isinstance(brought, type) and is_partitioner(brought):
        found = _made_partitioner(config, brought)
    else:
        found = value(config, "partition", PARTITIONS)
    if is_partitioner(found):
        return lambda labels, clients, rng: by_partitioner(found, labels, clients)
    mend = "index arrays, one a client, or a function (labels, clients, rng)"
    return function(found, "partition", mend)


def _made_partitioner(config: Config, kind: type) -> Any:
    """A partitioner of that class, which is told of the clients, and of the labels' column."""
    facts = {"num_partitions": config.federation.clients, **COLUMN, **known(config, "partition")}
    try:
        return kind(**takes(kind, facts))
    except Exception as error:  # of the partitioner's own checks
        raise InputError(
            f"{kind.__name__} cannot be made ({one_line(error)}): say what it needs in "
            "[federation.options]"
        ) from error


def _by_column(samples: Source, train: np.ndarray, clients: int) -> np.ndarray:
    if samples.owner is None:
        raise InputError(
            "[federation] partition = 'column' needs a source with a column of clients: read npz, "
            "csv or parquet with [data.options] client = 'its name'"
        )
    found = samples.owner[train]
    if found.max() >= clients:
        raise InputError(
            f"the column names {int(samples.owner.max()) + 1} clients: set [federation] clients "
            "to that"
        )
    return found


def _listed(config: Config) -> tuple | list | None:
    """The user's index arrays, one a client, if that is what the partition is."""
    found = own_objects(config).partition
    with _guard(config):
        return found if isinstance(found, tuple | list) else None


def _parts(
    config: Config, samples: Source, parts: tuple | list
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Index arrays into the data: what they leave out may be held out."""
    n = len(samples.labels) if samples.official_test is None else samples.official_test
    with _guard(config):
        train, client = flatten_partition(parts, n)
    require_samples(client, config.federation.clients, config.data.minimum)
    if samples.official_test is not None:
        return train, client, np.arange(n, len(samples.labels))
    rest = np.setdiff1d(np.arange(n), train)
    drawn = generator(config.federation.seed, Draw.SPLIT).permutation(rest)
    return train, client, drawn[: config.data.test]


def dealing(train: np.ndarray, client: np.ndarray) -> str:
    """What tells these train indices [n], and the client of each [n], from others."""
    told = np.stack([train, client]).astype("<i8")
    return sha256(told.tobytes()).hexdigest()[:16]


def fitted(config: Config) -> Config:
    """The config with the numbers that follow from what was brought, where it says nothing."""
    own, parts = own_objects(config), _listed(config)
    with _guard(config):
        count = partitioner_clients(own.partition) if parts is None else len(parts)
    if own.data is None and count is None:
        return config
    changes: dict[str, dict[str, Any]] = {"data": {}, "federation": {}}
    federation = config.federation
    if count is not None:
        changes["federation"]["clients"] = _count(config, count)
    if parts is not None:
        changes["data"] |= _of_parts(config, parts)
    if own.data is not None:
        source = own_source(config)
        changes["data"] = _samples(config, source) | changes["data"]
        told = {**dict(config.data.options), "digest": own_digest(config)}
        changes["data"]["options"] = told
        if not source.classes and "partition" not in federation.model_fields_set:
            changes["federation"].setdefault("partition", "iid")
    clients = changes["federation"].get("clients", federation.clients)
    if "per_round" not in federation.model_fields_set:
        changes["federation"]["per-round"] = min(federation.per_round, clients)
    tables = nested(config)
    whole = {**tables, **{name: tables[name] | held for name, held in changes.items()}}
    return parse(whole).beside(config.given)


def require_same_samples(config: Config, found: Config) -> None:
    """Refuse samples of the user's that are others, in this process, than those of the run."""
    told, here = (dict(one.data.options).get("digest") for one in (config, found))
    if told and told != here:
        raise InputError(
            "your data function draws other samples in each process, and clients have several: "
            "seed it, or let it read a file"
        )


def _count(config: Config, parts: int) -> int:
    asked = config.federation
    if "clients" in asked.model_fields_set and asked.clients != parts:
        raise InputError(
            f"[federation] clients = {asked.clients}, and the partition is of {parts}: leave "
            "clients out"
        )
    return parts


def _of_parts(config: Config, parts: Any) -> dict[str, int]:
    """How many samples the parts deal, and how few one of them has."""
    with _guard(config):
        sizes = [len(part) for part in parts]
    least = max(1, min(sizes, default=1))
    found = {"train": max(1, sum(sizes)), "minimum": min(config.data.minimum, least)}
    for name, one in found.items():
        asked = getattr(config.data, name)
        if name in config.data.model_fields_set and asked != one:
            raise InputError(
                f"[data] {name} = {asked}, and by the partition's index arrays it is {one}: leave "
                f"{name} out"
            )
    return found


def _samples(config: Config, source: Source) -> dict[str, Any]:
    """How many samples train and how many are held out, and how few a client may have."""
    table, n = config.data, len(source.labels)
    given = table.model_fields_set
    if source.official_test is not None and config.given.test is not None:
        found = {"train": source.official_test, "test": n - source.official_test}
    else:
        test = table.test if "test" in given else min(table.test, max(1, n // TEST))
        found = {"train": table.train if "train" in given else max(1, n - test), "test": test}
    if "minimum" not in given and not is_own(config.federation.partition):
        found["minimum"] = min(table.minimum, max(1, found["train"] // config.federation.clients))
    return found
