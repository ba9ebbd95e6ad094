"""The settings of a suite's runs on one card: every value that a key takes, where it is read."""

from collections.abc import Sequence

from fedmuon.config.describe import SYMBOLS
from fedmuon.config.load import Config
from fedmuon.config.read_if import reads
from fedmuon.core.tables import Scalar

LISTED = 4  # values; of more the ends
KEYS = {
    "data.name": "",
    "task.model": "",
    "data.train": "training samples",
    "data.alpha": "label skew",
    "federation.clients": "clients",
    "federation.per-round": "participants a round",
    "federation.rounds": "rounds",
    "local.steps": "local steps",
    "local.batch": "0 is all of a client's samples",
    "local.recipe": "",
    "local.lr": "step size",
    "orthogonalizer.name": "",
    "orthogonalizer.lambda": "regularization of the map",
}
NAMES = SYMBOLS | {"data.name": "data", "task.model": "model", "local.batch": "batch",
                   "local.recipe": "recipe", "orthogonalizer.name": "map"}  # fmt: skip


def settings_card(configs: Sequence[Config]) -> list[tuple[str, str, str]]:
    """Symbol, meaning and values of every key that some of these configs read."""
    found = []
    for key, words in KEYS.items():
        of_all = key == "task.model"  # a task without models is its own
        values = dict.fromkeys(_value(one, key) for one in configs if of_all or reads(one, key))
        if values:
            found.append((NAMES[key], words, shown(list(values))))
    return found


def _value(config: Config, key: str) -> Scalar:
    """What the config has there; the task's name for the model of one that has none."""
    table, _, name = key.partition(".")
    held = config.model_dump(by_alias=True)[table]
    return held["name"] if key == "task.model" and held["name"] != "network" else held[name]


def shown(values: Sequence[Scalar]) -> str:
    """All of a few values, the ends of more numbers."""
    said = [f"{one:g}" if isinstance(one, float) else str(one) for one in values]
    if len(values) <= LISTED or isinstance(values[0], str):
        return ", ".join(said)
    order = sorted(range(len(values)), key=lambda place: float(values[place]))
    return f"{said[order[0]]} to {said[order[-1]]} ({len(values)} values)"
