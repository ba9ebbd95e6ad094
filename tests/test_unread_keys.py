"""No key of a config is set in vain: the table of readers is whole, true, and held to everywhere.

True means both ways. A key that the table calls unread changes nothing that a run leaves behind,
whatever its value; one that it calls read changes something, or is read where only other engines
look.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import small

from experiments.bound import from_directory, judge
from experiments.bound import report as verdict_of
from fedmuon.config import Config
from fedmuon.errors import InputError
from fedmuon.federated import setup
from fedmuon.reading import NEEDS, reads
from fedmuon.tables import attribute

NAMES = [f"{table}.{key}" for table, keys in NEEDS.items() for key in keys]
# Another value of every key, one that a tiny run can have.
OTHER: dict[str, Any] = {
    "data.name": "digits", "data.train": 60, "data.test": 30, "data.alpha": 5.0,
    "data.minimum": 12, "data.normalize": "ball", "data.folder": "nowhere", "data.context": 8,
    "data.tokenizer": "nowhere", "data.dimension": 9, "data.classes": 4,
    "federation.clients": 4, "federation.per-round": 2, "federation.rounds": 1,
    "federation.weights": "uniform", "federation.seed": 9,
    "task.name": "network", "task.model": "tanh-cnn", "task.width": 12, "task.depth": 1,
    "task.heads": 4, "task.weights": "nowhere",
    "local.recipe": "sgd", "local.steps": 1, "local.batch": 4, "local.lr": 0.02,
    "local.momentum": 0.5, "local.momentum-form": "polyak", "local.weight-decay": 0.3,
    "local.schedule": "heavy-tailed", "local.tail-index": 1.5, "local.alignment": 0.9,
    "local.server-momentum": 0.4, "local.route": "all-matrices", "local.aux": "adamw",
    "local.aux-lr": 0.4, "local.adjust": "match-rms",
    "orthogonalizer.name": "newton-schulz", "orthogonalizer.lambda": 0.7,
    "orthogonalizer.steps": 2, "orthogonalizer.coefficients": "jordan",
    "orthogonalizer.eps": 0.5, "orthogonalizer.normalization": "unit",
    "orthogonalizer.sigma": 0.4, "orthogonalizer.gamma": 0.02, "orthogonalizer.rank": 1,
    "orthogonalizer.oversample": 1, "orthogonalizer.power": 0,
    "orthogonalizer.sketch": "kaczmarz",
    "privacy.clipping": "automatic", "privacy.bound": 0.003, "privacy.noise": 2.0,
    "privacy.lot": 3.0, "privacy.epsilon": 1e5, "privacy.delta": 0.01,
    "privacy.level": "client", "privacy.kappa": 0.4, "privacy.gamma": 2.0, "privacy.probes": 2,
    "privacy.insecure-reproducible-noise": False,
    "engine.name": "ray", "engine.dtype": "float32", "engine.device": "cuda:99",
    "engine.kernel": "numpy", "engine.cpus-per-client": 2.0, "engine.gpus-per-client": 0.5,
    "engine.ray-address": "1.2.3.4:5",
    "faults.policy": "drop", "faults.retries": 0, "faults.deadline": 7.0,
    "faults.patience": 8.0,
    "stability.trials": 3, "stability.neighbours": "all", "stability.delta": 0.2,
    "stability.kind": "paper", "stability.c-hp": "sharp", "stability.alpha-smoothing": 0.2,
    "output.evaluate-every": 1, "output.checkpoint-every": 1,
}  # fmt: skip
PRIVATE = {"insecure-reproducible-noise": True, "lot": 8.0, "noise": 0.5, "bound": 0.05}
NETWORK = {
    "data": {"name": "digits", "train": 60, "test": 20},
    "task": {"name": "network", "model": "mlp"},
}
RANKS = {"rank": 2, "oversample": 0}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "fedmuon": {},
    "fedavg": {"local": {"recipe": "fedavg"}},
    "fedavgm": {"local": {"recipe": "fedavgm"}},
    "aligned": {"local": {"recipe": "fedmuon-aligned", "steps": 2}},
    "adamw": {"local": {"recipe": "adamw"}},
    "tailed": {"local": {"schedule": "heavy-tailed", "tail-index": 1.8, "steps": 2}},
    "schulz": {"orthogonalizer": {"name": "newton-schulz", "eps": 0.01}},
    "unit": {"orthogonalizer": {"name": "newton-schulz", "normalization": "unit"}},
    "clipped": {"orthogonalizer": {"name": "clipped-sign"}},
    "exact": {"orthogonalizer": {"name": "exact-sign"}},
    "smoothed": {"orthogonalizer": {"name": "gaussian-smoothed-sign", "sigma": 0.1}},
    "sketched": {"orthogonalizer": {"name": "randomized-polar", **RANKS}},
    "dp-sgd": {"local": {"recipe": "dp-sgd"}, "privacy": PRIVATE},
    "disk-adam": {"local": {"recipe": "disk-adam", "steps": 2}, "privacy": PRIVATE},
    "no-filter": {"local": {"recipe": "disk-sgd"}, "privacy": {**PRIVATE, "kappa": 1.0}},
    "dp-muonbc": {"local": {"recipe": "dp-muonbc"}, "privacy": PRIVATE},
    "network": NETWORK,
    "network-sgd": {**NETWORK, "local": {"recipe": "sgd"}},
    "text": {
        "data": {"name": "pydoc", "context": 12},
        "task": {"name": "network", "model": "gpt", "width": 8, "depth": 2, "heads": 2},
        "local": {"recipe": "sgd"},
    },
}
# Read where these runs do not look: by sources that need files, by other engines, by the neighbours
# that `fedmuon stability` runs, and by what keeps a run's progress.
ELSEWHERE = {
    "data.folder", "data.tokenizer", "task.weights", "engine.name", "engine.cpus-per-client",
    "engine.gpus-per-client", "engine.ray-address", "faults.policy", "faults.retries",
    "faults.deadline", "faults.patience", "stability.trials", "stability.neighbours",
    "output.checkpoint-every",
}  # fmt: skip


def tiny(setting: Mapping[str, dict[str, Any]]) -> Config:
    return small({"federation": {"rounds": 2}}, **setting)


def with_other(config: Config, name: str) -> Config:
    """The config with another value of one key, without asking whether anything reads it."""
    table, _, key = name.partition(".")
    held = getattr(config, table)
    changed = held.model_copy(update={attribute(type(held), key): OTHER[name]})
    return config.model_copy(update={table: changed})


def left_behind(config: Config, out: Path) -> dict[str, Any]:
    """All that a run is: its files but for the config and the seconds, and its bound; or the
    sentence that refuses it."""
    from fedmuon.federated.simulate import rounds
    from fedmuon.run import drive, prepare

    try:
        run = prepare(setup.resolve(config), out)
        drive(run, rounds)
        case = from_directory(out)
        bound = verdict_of(case, judge(case))
    except InputError as error:
        return {"refused": str(error)}
    files = {
        file.name: file.read_bytes()
        for file in sorted(out.iterdir())
        if file.suffix in (".safetensors", ".npz", ".npy")
    }
    told = [untimed(json.loads(line)) for line in (out / "rounds.jsonl").read_text().splitlines()]
    summary = untimed(json.loads((out / "summary.json").read_text()))
    return {**files, "rounds": told, "summary": summary, "bound": bound}


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what no config decides: times, checksums of those, and the ledger's head,
    which names the config's bytes."""
    apart = ("seconds", "train_seconds", "check", "ledger_head", "head", "versions", "git_commit")
    return {key: value for key, value in record.items() if key not in apart}


def without_metadata(left: dict[str, Any]) -> dict[str, Any]:
    """The same without the headers of tensor files, where digests of the config may stand."""
    return {
        name: value[8 + int.from_bytes(value[:8], "little") :]
        if name.endswith(".safetensors")
        else value
        for name, value in left.items()
        if "checkpoint" not in name
    }


def test_every_key_is_in_the_table_and_has_another_value() -> None:
    for table, field in Config.model_fields.items():
        model: Any = field.annotation
        assert [one.alias for one in model.model_fields.values()] == list(NEEDS[table])
    assert list(OTHER) == NAMES


def test_needs_begin_with_those_of_the_keys_they_name() -> None:
    """So that a key which nothing reads decides about no other: leaving it out changes nothing."""
    for keys in NEEDS.values():
        for needs in keys.values():
            for place, need in enumerate(needs):
                table, _, key = need.key.partition(".")
                assert set(NEEDS[table][key]) <= set(needs[:place]), need.key


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_the_table_says_is_so(setting: str, tmp_path: Path) -> None:
    """A negative control of the first kind is in the second: keys that are read do change runs."""
    config = tiny(SETTINGS[setting])
    first = without_metadata(left_behind(config, tmp_path / "run"))
    assert "refused" not in first
    unchanged = []
    for place, name in enumerate(NAMES):
        if name in ELSEWHERE and reads(config, name):
            continue
        found = left_behind(with_other(config, name), tmp_path / str(place))
        if without_metadata(found) == first:
            unchanged.append(name)
    assert [name for name in NAMES if not reads(config, name) and name not in unchanged] == []
    hidden = {name for name in unchanged if reads(config, name)}
    assert hidden <= UNSEEN.get(setting, set()) | UNSEEN[""]


# Keys that are read here and do not show in so small a run: the same share for all, and so on.
UNSEEN: dict[str, set[str]] = {"": {"engine.kernel"}}
