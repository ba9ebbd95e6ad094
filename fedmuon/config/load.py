"""The config of an experiment as immutable tables, and its conversion to TOML and for Flower."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import PrivateAttr, ValidationInfo, model_validator

from fedmuon.config.demands import problems
from fedmuon.config.incompatible import missing_noise
from fedmuon.config.methods import average_of, has
from fedmuon.config.schema import (
    Attacks,
    Compression,
    Data,
    Devices,
    Engine,
    Faults,
    Federation,
    Local,
    OrthogonalizerTable,
    Output,
    Privacy,
    Robust,
    Stability,
    TaskTable,
    refusal,
    unread,
)
from fedmuon.config.user_objects import NAMED, NOTHING, UserObjects
from fedmuon.core.choices import TEXTS, is_own
from fedmuon.core.files import is_path
from fedmuon.core.registry import absolute_name
from fedmuon.core.tables import Option, Scalar, Table, override, put, read_toml, validate

if TYPE_CHECKING:
    from fedmuon.config.typed import Tables

OWN_RECIPE = {"own_recipe": True}  # a recipe was passed in Python, and may have a mechanism
NAMING = (*NAMED.values(), ("task", "model"))  # (table, key) that may name a custom object
PATHS = (("data", "folder"), ("data", "tokenizer"), ("task", "weights"),
         ("federation", "graph_file"), ("devices", "trace"),
         ("devices", "availability_trace"))  # fmt: skip
LIST = "list:"  # before the JSON of a list among the options in Flower's run config
UNFINISHED = {"unfinished": True}  # do not check combinations, because tables will change


class Config(Table):
    """The checked settings of an experiment. Keys that you do not set have their defaults.

    A config is immutable. A config has the tables of a config file, such as `config.local`. In
    Python, a hyphen in a key becomes an underscore: `config.local.aux_lr`. `fedmuon.run` also takes
    dictionaries, so you need this class only to check or read settings.

    Attributes:
        data: The samples: their source, number and scaling.
        federation: Numbers of clients and rounds, participants, partition, aggregation, seed.
        task: The model: matrix or network.
        local: The optimizer of a client: its name, steps, batch and step sizes.
        orthogonalizer: The orthogonalizer and its parameters.
        privacy: Clipping, noise, lots, and whether examples or clients are protected.
        engine: Where clients run (in this process, on Ray, or deployed), dtype and device.
        compression: Compression of messages.
        faults: What happens when clients fail.
        devices: Simulated speeds, bandwidths and availability.
        attacks: Hostile clients, and what they send.
        robust: Defences of the server against hostile clients.
        stability: Neighbouring data sets, and the constants of the stability bound.
        output: How often a run evaluates and saves, and its callback.

    Raises:
        InputError: `of` and `load` raise it for an unknown key, a value that is out of range, or a
            key that has no effect. The constructor raises pydantic's `ValidationError`.

    Example:
        >>> import fedmuon
        >>> config = fedmuon.Config.of({"local": {"recipe": "fedavg", "lr": 0.1}})
        >>> config.local.lr, config.federation.rounds
        (0.1, 50)
    """

    data: Data = Data()
    federation: Federation = Federation()
    task: TaskTable = TaskTable()
    local: Local = Local()
    orthogonalizer: OrthogonalizerTable = OrthogonalizerTable()
    privacy: Privacy = Privacy()
    engine: Engine = Engine()
    compression: Compression = Compression()
    faults: Faults = Faults()
    devices: Devices = Devices()
    attacks: Attacks = Attacks()
    robust: Robust = Robust()
    stability: Stability = Stability()
    output: Output = Output()
    _given: UserObjects = PrivateAttr(default_factory=lambda: NOTHING)  # a default would be copied

    @classmethod
    def of(cls, tables: "Tables | Mapping[str, Any]") -> "Config":
        """Check settings, and return the config with all keys.

        Args:
            tables: Nested dictionaries, with the tables and keys of a config file.

        Returns:
            The config.

        Raises:
            InputError: If a key is unknown, out of range, or has no effect.
        """
        return parse(tables)

    @classmethod
    def load(cls, path: str | Path) -> "Config":
        """Read and check a config file.

        Args:
            path: A TOML file.

        Returns:
            The config.

        Raises:
            InputError: If the file cannot be read, or a key is unknown, out of range, or has no
                effect.
        """
        return load(Path(path))

    def to_toml(self) -> str:
        """Return the settings as the text of a config file with all keys.

        Returns:
            TOML text.
        """
        return dump(self)

    @property
    def given(self) -> UserObjects:
        """The custom objects that were passed in Python.

        A config file does not contain these objects.
        """
        return self._given

    def with_objects(self, given: UserObjects) -> "Config":
        """Return a copy of the config with other custom objects.

        Args:
            given: Custom objects that replace built-in names.

        Returns:
            The copy.
        """
        config = self.model_copy()
        config._given = given
        return config

    @model_validator(mode="before")
    @classmethod
    def _normalized(cls, tables: Any) -> Any:
        """Set the defaults that depend on other keys.

        `normalize = auto` is replaced by the scaling that the task needs, and `aggregate = auto` by
        the average that the paper of the recipe uses. If there are fewer
        clients than the default of `per-round`, all clients take part in each round.
        """
        if not isinstance(tables, Mapping):
            return tables
        names = ("data", "task", "federation", "local", "privacy", "compression")
        sections = {name: tables.get(name, {}) for name in names}
        if not all(isinstance(section, Mapping) for section in sections.values()):
            return tables
        data, federation = dict(sections["data"]), dict(sections["federation"])
        if data.get("normalize", "auto") == "auto":
            bounded = sections["task"].get("name", "matrix") == "matrix"
            bounded |= data.get("features", "none") != "none"
            scaling = "unit" if bounded else "pixels"
            data["normalize"] = "tokens" if data.get("name") in TEXTS else scaling
        if federation.get("aggregate", "auto") == "auto":
            recipe = sections["local"].get("recipe", Local.model_fields["recipe"].default)
            plain = sections["privacy"].get("level") == "client"
            plain |= sections["compression"].get("feedback") == "ef21"
            federation["aggregate"] = average_of(recipe, plain)
        clients = federation.get("clients")
        if has(sections["local"].get("recipe", ""), "gossip"):  # all nodes exchange messages
            every = Federation.model_fields["clients"].default if clients is None else clients
            federation.setdefault("per-round", every)
        if isinstance(clients, int) and "per-round" not in federation:
            default = Federation.model_fields["per_round"].default
            federation.setdefault("per_round", max(1, min(default, clients)))
        return {**tables, "data": data, "federation": federation}

    @model_validator(mode="after")
    def _possible(self, info: ValidationInfo) -> "Config":
        if info.context == UNFINISHED:
            return self
        for problem in problems(self):
            raise ValueError(problem)
        for name in unread(self):
            raise ValueError(refusal(self, name))
        if info.context != OWN_RECIPE and not is_own(self.local.recipe):
            for problem in missing_noise(self):
                raise ValueError(problem)
        return self


def parse(tables: Mapping[str, Any], own_recipe: bool = False) -> Config:
    """Check nested tables with the keys of a config file, and create a config from them.

    Args:
        tables: Nested tables.
        own_recipe: Whether a custom recipe was passed in Python. The noise is then checked later,
            when the recipe is built.

    Raises:
        InputError: If a key or a combination of keys is not valid.
    """
    return validate(Config, tables, OWN_RECIPE if own_recipe else None)


def only_read(tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return nested tables without the keys that have no effect.

    Several configs can therefore share settings that affect only some of these configs.
    """
    left_out = unread(validate(Config, tables, UNFINISHED))
    return {
        table: {key: value for key, value in keys.items() if f"{table}.{key}" not in left_out}
        for table, keys in tables.items()
    }


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Load the TOML file at `path` and apply the overrides. If `path` is None, use the defaults.

    An override has the form `table.key=value`.
    """
    return parse(override(read(path) if path else {}, overrides))


def read(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested tables.

    A custom object can have the name `./file.py:object`. Its file is then searched in the folder of
    the TOML file, and after this in the current folder.
    """
    tables = read_toml(path)
    for table, key in NAMING:
        if not isinstance(keys := tables.get(table), dict):
            continue
        place, _, name = str(keys.get(key, "")).rpartition(":")
        if place.endswith(".py") and (file := path.parent / place).is_file():
            keys[key] = f"{file.resolve()}:{name}"
    return tables


def nested(config: Config) -> dict[str, dict[str, Any]]:
    """Convert a config to nested tables with all keys. Empty tables of options are left out."""
    tables = config.model_dump(by_alias=True)
    for keys in tables.values():
        if not keys.get("options", True):
            del keys["options"]
    return tables


def dump(config: Config) -> str:
    """Convert a config to TOML text with all keys."""
    return tomli_w.dumps(nested(config))


def flatten(config: Config) -> dict[str, Scalar]:
    """Convert a config to the flat run config of Flower.

    The keys of the run config have the form `table.key` or `table.options.key`.
    """
    flat: dict[str, Scalar] = {}
    for table, keys in nested(config).items():
        for key, value in keys.items():
            if key == "options":
                flat |= {
                    f"{table}.options.{name}": _scalar(option) for name, option in value.items()
                }
            else:
                flat[f"{table}.{key}"] = value
    return flat


def unflatten(flat: Mapping[str, Scalar]) -> Config:
    """Convert a flat run config of Flower to a config."""
    tables: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        option = value if ".options." in name and isinstance(value, str) else ""
        is_list = option.startswith(LIST)
        put(tables, name, json.loads(option.removeprefix(LIST)) if is_list else value)
    return parse(tables)


def _scalar(value: Option) -> Scalar:
    """Return an option as a single value, because Flower's run config contains no lists."""
    return LIST + json.dumps(value) if isinstance(value, tuple) else value


def _is_model_name(config: Config) -> bool:
    """Return whether [task] weights is the name of a pretrained model, and not a path."""
    weights = config.task.weights
    return config.task.name == "causal-lm" and weights != "" and not is_path(weights)


def absolute_paths(config: Config, files: bool = True) -> Config:
    """Return the config with absolute paths, for workers in other folders.

    Args:
        config: The config.
        files: Whether the paths of data, tokenizer, weights and similar files become absolute. The
            paths of custom objects, `./file.py:object`, always become absolute.
    """
    for table, key in (*NAMING, *(PATHS if files else ())):
        section = getattr(config, table)
        name = absolute = getattr(section, key)
        if (table, key) == ("task", "weights") and _is_model_name(config):
            continue
        if (table, key) in PATHS:
            absolute = str(Path(name).expanduser().resolve()) if name else name
        elif is_own(name):
            absolute = absolute_name(name)
        if absolute != name:
            config = config.model_copy(update={table: section.model_copy(update={key: absolute})})
    return config
