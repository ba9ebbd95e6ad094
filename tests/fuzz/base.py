"""The small experiment that cases disturb."""

from pathlib import Path

from tests.fuzz.values import written
from tests.helpers.small_suites import STABILITY

Tables = dict[str, dict[str, str]]  # table -> key -> the value's TOML text

TINY = {
    "data": {"name": "synthetic", "train": 60, "test": 30, "dimension": 5, "classes": 3,
             "minimum": 5},
    "federation": {"clients": 4, "per-round": 2, "rounds": 3},
    "local": {"lr": 0.05, "steps": 1},
    "orthogonalizer": {"lambda": 0.1},
    "engine": {"device": "cpu"},
    "output": {"evaluate-every": 2, "checkpoint-every": 1},
}  # fmt: skip
PRIVATE = {
    "local": {"recipe": "dp-muon", "lr": 0.05, "steps": 1},
    "privacy": {"noise": 1.0, "lot": 4.0, "insecure-reproducible-noise": True},
    "output": {"checkpoint-every": None},
}
NETWORK = {"task": {"name": "network", "model": "mlp"}, "local": {"lr": 0.05, "batch": 4}}
SUITE = STABILITY
NO_MAP = {"orthogonalizer": {"lambda": None}}
READ = {"data": {"dimension": None, "classes": None}}  # what only generated samples have


def tables(*layers: dict[str, dict]) -> Tables:
    """Layers of tables, the later on top, as TOML texts; None takes a key away."""
    found: Tables = {}
    for layer in (TINY, *layers):
        for table, keys in layer.items():
            held = {**found.get(table, {}), **{key: written(one) for key, one in keys.items()}}
            found[table] = {key: held[key] for key in held if keys.get(key, "") is not None}
    return found


def toml(content: Tables) -> str:
    """The tables as a TOML file."""
    return "\n".join(
        f"[{table}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
        for table, keys in content.items()
    )


def write(file: Path, text: str) -> Path:
    """The text in a file, byte for byte; what is no UTF-8 in it came from bytes."""
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    return file
