"""No key of a config is set in vain: the table of readers is whole, true, and held to everywhere.

True means both ways. A key that the table calls unread changes nothing that a run leaves behind,
whatever its value; one that it calls read changes something, or is read where only other engines
look.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import quick, small

from fedmuon.analysis import Realized
from fedmuon.config.load import Config, dump, load, parse
from fedmuon.config.schema import NEEDS, is_default, reads, unread
from fedmuon.core.errors import InputError
from fedmuon.core.tables import attribute, validate
from fedmuon.experiments.cli import main
from fedmuon.experiments.engines import deployment, ray_engine
from fedmuon.experiments.stability.certificates import CertifiedSetting, certify, start_of
from fedmuon.experiments.stability.certificates import report as verdict_of
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies import stability
from fedmuon.experiments.suites import contents
from fedmuon.federated.build import resolve
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import Run, prepare
from fedmuon.tasks.matrix import MatrixTask

NAMES = [f"{table}.{key}" for table, keys in NEEDS.items() for key in keys]
STAGE = f"{Path(__file__).parents[3] / 'examples' / 'stage.py'}:LargerHalf"
# Another value of every key, one that a tiny run can have.
OTHER: dict[str, Any] = {
    "data.name": "digits", "data.train": 60, "data.test": 30, "data.alpha": 5.0,
    "data.validation": 10.0, "data.client-test": 0.3,
    "data.unseen-clients": 1, "data.validation-clients": 1,
    "data.target": "y", "data.client": "y", "data.center": "public", "data.center-samples": 7,
    "data.features": "hog", "data.features-seed": 3, "data.public": "mnist5k",
    "data.components": 6,
    "data.minimum": 12, "data.normalize": "ball", "data.folder": "nowhere", "data.context": 8,
    "data.tokenizer": "nowhere", "data.pad-token": True, "data.dimension": 9, "data.classes": 4,
    "data.options": (("odd", 1),), "federation.options": (("odd", 1),),
    "task.options": (("odd", 1),), "local.options": (("odd", 1),),
    "orthogonalizer.options": (("odd", 1),),
    "federation.aggregate": "median", "federation.partition": "iid",
    "federation.stage": STAGE, "federation.adapters": "exact", "federation.subspace-rounds": 2,
    "federation.subspace-bases": "gradient", "federation.adapter-ranks": "1, 2",
    "federation.graph": "complete", "federation.edge-share": 0.9,
    "federation.graph-file": "nowhere", "federation.varying-graph": True,
    "federation.clients": 4, "federation.per-round": 2, "federation.rounds": 3,
    "federation.risk-weights": "uniform", "federation.seed": 9,
    "task.name": "network", "task.model": "tanh-cnn", "task.width": 12, "task.depth": 1,
    "task.heads": 4, "task.initial": "zero", "task.weights": "nowhere",
    "task.lora-rank": 2, "task.lora-alpha": 4.0, "task.lora-layers": "q_proj",
    "task.base-dtype": "bfloat16", "task.checkpointing": True,
    "task.head": "untied", "task.positions": 20,
    "task.label-smoothing": 0.3, "local.renormalize": True,
    "local.recipe": "sgd", "local.steps": 3, "local.batch": 4, "local.lr": 0.02,
    "local.momentum": 0.5, "local.momentum-form": "polyak", "local.weight-decay": 0.3,
    "local.schedule": "heavy-tailed", "local.tail-index": 1.5, "local.alignment": 0.9,
    "local.server-momentum": 0.4, "local.server-lr": 0.3, "local.server-memory": 0.7,
    "local.tau": 0.5, "local.proximal": 5.0, "local.epochs": 1.5,
    "local.rank": 2, "local.personal": "hidden.*", "local.personal-weight": 2.5,
    "local.route": "all-matrices", "local.qkv": "whole", "local.muon": "*qkv*",
    "local.aux": "adamw",
    "local.aux-lr": 0.4, "local.adjust": "match-rms",
    "orthogonalizer.name": "newton-schulz", "orthogonalizer.lambda": 0.7,
    "orthogonalizer.steps": 2, "orthogonalizer.coefficients": "jordan",
    "orthogonalizer.safety": 1.05,
    "orthogonalizer.eps": 0.5, "orthogonalizer.normalization": "unit",
    "orthogonalizer.products": "bfloat16",
    "orthogonalizer.sigma": 0.4, "orthogonalizer.clip-level": 0.02, "orthogonalizer.rank": 1,
    "orthogonalizer.oversample": 1, "orthogonalizer.power": 0,
    "orthogonalizer.sketch": "kaczmarz", "orthogonalizer.row-memory": 0.5,
    "orthogonalizer.noise-floor": 0.3,
    "orthogonalizer.shards": 3, "orthogonalizer.full-every": 2,
    "privacy.clipping": "automatic", "privacy.blocks": "hidden",
    "privacy.bound": 0.003, "privacy.noise": 2.0,
    "privacy.lot": 3.0, "privacy.epsilon": 0.01, "privacy.delta": 0.01,
    "privacy.trust": "local", "privacy.cohorts": "fixed", "privacy.honest": 1.0,
    "privacy.state-weight": 3.0,
    "privacy.level": "client", "privacy.kappa": 0.4, "privacy.lookahead": 2.0, "privacy.probes": 2,
    "privacy.inner-weights": "0.7, 0.3",
    "privacy.adjacency": "replace-one", "privacy.population": 40, "privacy.rate": 0.3,
    "privacy.insecure-reproducible-noise": False, "privacy.noise-source": "pcg64",
    "privacy.arithmetic": "grid",
    "privacy.quantile": 0.5, "privacy.quantile-rate": 0.4, "privacy.count-noise": 9.0,
    "privacy.sampling": "shuffle", "privacy.noise-correlation": "sqrt-toeplitz", "privacy.band": 2,
    "privacy.buffers": 1, "privacy.max-lot": 9,
    "engine.name": "ray", "engine.dtype": "float32", "engine.device": "cuda:99",
    "engine.kernel": "numpy", "engine.cpus-per-client": 2.0, "engine.gpus-per-client": 0.5,
    "engine.ray-address": "1.2.3.4:5",
    "compression.uplink": "qsgd", "compression.downlink": "qsgd", "compression.share": 0.6,
    "compression.levels": 2, "compression.rank": 2, "compression.iterations": 2,
    "compression.feedback": "ef21",
    "faults.policy": "drop", "faults.retries": 0, "faults.deadline": 7.0,
    "faults.patience": 8.0,
    "devices.mode": "deadline", "devices.select": 5, "devices.deadline": 0.2, "devices.buffer": 1,
    "devices.threshold": 3.0, "devices.threshold-growth": 0.5, "devices.mixing": 0.3,
    "devices.staleness-power": 3.0,
    "devices.latency": 0.2, "devices.cost": 2.0, "devices.speeds": "log-normal",
    "devices.speed": 150.0, "devices.speed-spread": 0.7, "devices.bandwidths": "pareto",
    "devices.bandwidth-down": 2e5, "devices.bandwidth-up": 2e5, "devices.bandwidth-spread": 0.7,
    "devices.trace": "nowhere", "devices.availability": "bernoulli", "devices.available": 0.4,
    "devices.day": 3.0, "devices.availability-trace": "nowhere", "devices.dropout": 0.3,
    "stability.trials": 3, "stability.neighbours": "all", "stability.unit": "clients",
    "stability.delta": 0.2,
    "attacks.kind": "sign-flip", "attacks.share": 0.5, "attacks.clients": "1",
    "attacks.from-round": 1, "attacks.strength": 3.0,
    "robust.ball": "matrix", "robust.radius": 1e-4, "robust.aux-radius": 0.01,
    "robust.state-radius": 0.01, "robust.mixing": 1,
    "stability.lipschitz": "paper", "stability.constants": "global",
    "stability.realized": True,
    "stability.c-hp": "sharp", "stability.alpha-smoothing": 0.2,
    "stability.probes": 3, "stability.replacements": 2, "stability.output-noise": 0.3,
    "output.callback": "early-stopping", "output.options": (("odd", 1),),
    "output.evaluate-every": 1, "output.fine-tune": 6, "output.checkpoint-every": 1,
    "output.clients": True, "output.profile": True, "output.average": 0.6,
}  # fmt: skip
CLIENTS = {"level": "client", "insecure-reproducible-noise": True, "noise": 0.5, "bound": 0.3}
PRIVATE = {"insecure-reproducible-noise": True, "lot": 8.0, "noise": 0.5, "bound": 0.3}
ALONE = {"federation": {"clients": 1, "per-round": 1}, "local": {"recipe": "dp-sgd", "steps": 3}}
NETWORK = {
    "data": {"name": "digits", "train": 60, "test": 20},
    "federation": {"rounds": 1, "per-round": 1},
    "task": {"name": "network", "model": "mlp"},
}
RANKS = {"rank": 2, "oversample": 0}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "fedmuon": {},
    "fedavg": {"local": {"recipe": "fedavg"}},
    "fedavgm": {"local": {"recipe": "fedavgm"}},
    "aligned": {"local": {"recipe": "fedmuon-aligned", "steps": 2}},
    "fedadam": {"local": {"recipe": "fedadam"}},
    "fedprox": {"local": {"recipe": "fedprox", "steps": 2, "batch": 4}},
    "svd": {"local": {"recipe": "fedmuon-svd", "rank": 1, "steps": 2}},
    "sparse": {"compression": {"uplink": "top-k", "share": 0.2, "feedback": "error"}},
    "levels": {"compression": {"uplink": "qsgd", "downlink": "qsgd"}},
    "factors": {"compression": {"uplink": "low-rank", "rank": 1}, "data": {"classes": 4}},
    "warm": {"compression": {"uplink": "power", "rank": 1}, "data": {"classes": 4}},
    "scaffold": {"local": {"recipe": "scaffold", "steps": 2}},
    "adamw": {"local": {"recipe": "adamw"}},
    "tailed": {"local": {"schedule": "heavy-tailed", "tail-index": 1.8, "steps": 2}},
    "schulz": {"orthogonalizer": {"name": "newton-schulz", "eps": 0.01}},
    "express": {
        "orthogonalizer": {"name": "newton-schulz", "coefficients": "polar-express-e3", "steps": 3}
    },
    "shards": {"orthogonalizer": {"shards": 2}, "local": {"steps": 4}},
    "unit": {"orthogonalizer": {"name": "newton-schulz", "normalization": "unit"}},
    "clipped": {"orthogonalizer": {"name": "clipped-sign"}},
    "exact": {"orthogonalizer": {"name": "exact-sign"}},
    "smoothed": {"orthogonalizer": {"name": "gaussian-smoothed-sign", "sigma": 0.1}},
    "sketched": {"orthogonalizer": {"name": "randomized-polar", **RANKS}},
    "dp-sgd": {"local": {"recipe": "dp-sgd"}, "privacy": PRIVATE},
    "quantile": {"local": {"recipe": "dp-sgd"}, "privacy": {**PRIVATE, "quantile": 0.3}},
    "cyclic": {**ALONE, "privacy": {**PRIVATE, "sampling": "cyclic"}},
    "correlated": {
        **ALONE,
        "privacy": {**PRIVATE, "sampling": "cyclic", "noise-correlation": "sqrt-toeplitz"},
    },
    "buffered": {
        **ALONE,
        "privacy": {**PRIVATE, "sampling": "cyclic", "noise-correlation": "blt"},
    },
    "disk-adam": {"local": {"recipe": "disk-adam", "steps": 2}, "privacy": PRIVATE},
    "no-filter": {"local": {"recipe": "disk-sgd"}, "privacy": {**PRIVATE, "kappa": 1.0}},
    "dp-muon-im": {"local": {"recipe": "dp-muon-im", "steps": 2}, "privacy": PRIVATE},
    "dp-muonbc": {"local": {"recipe": "dp-muonbc"}, "privacy": PRIVATE},
    "clients": {"local": {"recipe": "fedavg"}, "privacy": CLIENTS},
    "client-momenta": {"local": {"recipe": "fedmuon"}, "privacy": CLIENTS},
    "shares": {
        "local": {"recipe": "fedavg"},
        "privacy": {**CLIENTS, "cohorts": "fixed", "trust": "distributed"},
    },
    "network": NETWORK,
    "tuned": {
        "data": {"client-test": 0.3},
        "local": {"recipe": "fedavg", "lr": 30.0},
        "output": {"fine-tune": 1},
    },
    "ditto": {"data": {"client-test": 0.3}, "local": {"recipe": "ditto", "lr": 30.0}},
    "fedper": {
        **NETWORK,
        "local": {"recipe": "fedper", "personal": "head.*"},
    },
    "network-sgd": {**NETWORK, "local": {"recipe": "sgd"}},
    "text": {
        "data": {"name": "pydoc", "context": 12},
        "federation": {"rounds": 1},
        "task": {"name": "network", "model": "gpt", "width": 8, "depth": 2, "heads": 2},
        "local": {"recipe": "sgd"},
    },
    "text-muon": {
        "data": {"name": "pydoc", "context": 12},
        "federation": {"rounds": 1},
        "task": {"name": "network", "model": "gpt", "width": 8, "depth": 1, "heads": 2},
        "local": {"recipe": "muon"},
    },
    "clock": {"devices": {"mode": "synchronous"}},
    "hostile": {"attacks": {"kind": "scaled", "clients": "0, 1, 2, 3"}},
    "ball": {"robust": {"ball": "matrix"}},
    "network-ball": {**NETWORK, "robust": {"ball": "model"}},
    "copies": {"attacks": {"kind": "mimic", "share": 0.4}},
    "fedbuff": {"devices": {"mode": "fedbuff", "buffer": 2, "speeds": "log-normal"}},
    "threshold": {"devices": {"mode": "threshold", "threshold": 1, "speeds": "log-normal"}},
    "fedasync": {"devices": {"mode": "fedasync", "speeds": "log-normal"}},
    "fleet": {
        "devices": {
            "mode": "deadline",
            "select": 4,
            "speeds": "log-normal",
            "bandwidths": "log-normal",
            "availability": "day-night",
            "available": 0.9,
            "day": 2.0,
        }
    },
    "private-muon": {
        **NETWORK,
        "local": {"recipe": "dp-muon", "route": "all-matrices"},
        "privacy": PRIVATE,
    },
}
# Read where these runs do not look: by sources that need files, by other engines, by the neighbours
# that `fedmuon stability` runs, by what keeps a run's progress, and by what refuses combinations.
ELSEWHERE = {
    "data.center-samples",  # tests/fedmuon/data/test_given_data.py
    # tests/fedmuon/data/test_features.py: they need images that are not those of MNIST
    "data.features-seed", "data.public", "data.components",
    "data.unseen-clients", "data.validation-clients",  # tests/fedmuon/data/test_unseen.py
    "data.folder", "data.target", "data.client", "data.tokenizer", "data.pad-token", "task.weights",
    "federation.subspace-rounds",  # tests/fedmuon/federated/test_adapters_of_runs.py
    "federation.subspace-bases",  # tests/fedmuon/federated/test_stage_conformance.py
    "federation.adapter-ranks",  # tests/fedmuon/federated/test_stage_conformance.py
    # tests/fedmuon/federated/test_gossip.py
    "federation.graph", "federation.edge-share", "federation.graph-file",
    "federation.varying-graph",
    "task.lora-rank", "task.lora-alpha", "task.lora-layers",  # test_causal_lm.py
    "task.base-dtype", "task.checkpointing",  # tests/fedmuon/tasks/test_checkpointing.py
    "engine.name",
    "engine.cpus-per-client",
    "engine.gpus-per-client", "engine.ray-address", "faults.policy", "faults.retries",
    "faults.deadline", "faults.patience", "stability.trials", "stability.realized",
    "stability.neighbours", "stability.unit", "stability.probes", "stability.replacements",
    "output.checkpoint-every", "output.callback", "privacy.level",
    "devices.trace", "devices.availability-trace",  # tests/fedmuon/federated/test_clock.py
    "privacy.noise-source",
}  # fmt: skip


def tiny(setting: Mapping[str, dict[str, Any]]) -> Config:
    return small({"federation": {"rounds": 2}}, **setting)


def with_others(config: Config, names: list[str]) -> Config:
    """The config with other values of some keys, without asking whether anything reads them."""
    for name in names:
        table, _, key = name.partition(".")
        held = getattr(config, table)
        changed = held.model_copy(update={attribute(type(held), key): OTHER[name]})
        config = config.model_copy(update={table: changed})
    return config


def left_behind(config: Config, out: Path) -> dict[str, Any]:
    """All that a run is: its files but for the config and the seconds, and its bound; or the
    sentence that refuses it."""
    try:
        run = prepare(resolve(config), out)
        train(run, run_rounds)
    except InputError as error:
        return {"refused": str(error)}
    files = {
        file.name: file.read_bytes()
        for file in sorted(out.iterdir())
        if file.suffix in (".safetensors", ".npz", ".npy")
    }
    told = [untimed(json.loads(line)) for line in (out / "rounds.jsonl").read_text().splitlines()]
    summary = untimed(json.loads((out / "summary.json").read_text()))
    if (clients := out / "clients.jsonl").exists():
        files["clients"] = clients.read_bytes()
    plan = run.experiment.plan
    known = not (plan.poisson or plan.biased)  # else there is no schedule that a bound could read
    bound = bound_of(run) if known else {}
    return {**files, "rounds": told, "summary": summary, "bound": bound}


@pytest.fixture(scope="module")
def as_set(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    return cache(lambda name: left_behind(tiny(SETTINGS[name]), tmp_path_factory.mktemp("set")))


def bound_of(run: Run) -> dict[str, Any]:
    """What `fedmuon bound` says of it, by the config as it is in memory."""
    plan, task = run.experiment.plan, run.experiment.task
    shape = (task.dimension, task.classes) if isinstance(task, MatrixTask) else None
    part = Realized(plan.schedule(), plan.rows if plan.batch else None)
    start = None
    if shape:
        weight = begin(run.experiment.recipe, task, run.config.federation.seed).params["weight"][0]
        start = start_of(weight.numpy(), None)
    case = CertifiedSetting(run.config, run.data.sizes, part, shape, start=start)
    return verdict_of(case, certify(case))


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what no config decides: times, checksums of those, and the ledger's head,
    which names the config's bytes."""
    apart = ("seconds", "train_seconds", "check", "ledger", "versions", "git_commit")
    private = {"privacy": untimed(record["privacy"])} if "privacy" in record else {}
    return {key: value for key, value in record.items() if key not in apart} | private


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
        assert {one.alias for one in model.model_fields.values()} == set(NEEDS[table])
    assert set(OTHER) == set(NAMES) and set(NAMES) > ELSEWHERE


def test_needs_begin_with_those_of_the_keys_they_name() -> None:
    """So that a key which nothing reads decides about no other: leaving it out changes nothing."""
    for keys in NEEDS.values():
        for needs in keys.values():
            for place, need in enumerate(needs):
                table, _, key = need.key.partition(".")
                assert set(NEEDS[table][key]) <= set(needs[:place]), need.key


QUICK = ("fedmuon", "aligned", "svd", "levels", "tailed", "shards", "correlated", "shares", "ditto",
         "network", "text-muon", "fleet")  # fmt: skip


@pytest.mark.parametrize("setting", quick(SETTINGS, QUICK))
def test_keys_that_nothing_reads_change_nothing(
    setting: str, as_set: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    config = tiny(SETTINGS[setting])
    # A folder in vain is also refused by the source itself.
    ignored = [n for n in NAMES if not reads(config, n) and n != "data.folder"]
    first, other = as_set(setting), left_behind(with_others(config, ignored), tmp_path / "other")
    assert len(ignored) > 20 and "refused" not in first
    assert without_metadata(first) == without_metadata(other)


READ = [name for name in NAMES if name not in ELSEWHERE]


@pytest.mark.parametrize("name", quick(READ, READ[::3]))
def test_keys_that_are_read_change_something(
    name: str, as_set: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """The control of the above, in a setting where the table says that it is read."""
    for setting in CHOSEN.get(name, SETTINGS):
        config = tiny(SETTINGS[setting])
        if reads(config, name):
            other = left_behind(with_others(config, [name]), tmp_path / "other")
            assert without_metadata(as_set(setting)) != without_metadata(other)
            return
    raise AssertionError(f"{name} is read in no setting")


# Where a key shows, if not in the first setting that reads it.
CHOSEN = {"data.normalize": ["network-sgd"], "attacks.share": ["copies"],
          "robust.ball": ["hostile"], "local.qkv": ["text-muon"],
          "local.muon": ["text-muon"]}  # fmt: skip


class Seen:
    """A table that notes which of its keys are asked for."""

    def __init__(self, table: object) -> None:
        self.table, self.names = table, set()

    def __getattr__(self, name: str) -> object:
        self.names.add(name)
        return getattr(self.table, name)


def test_what_other_engines_read_is_asked_for() -> None:
    config = parse({"engine": {"name": "ray"}})
    engine, faults = Seen(config.engine), Seen(config.faults)
    spied: Any = type("Spied", (), {"engine": engine, "faults": faults})
    ray_engine.resources_of(spied)
    ray_engine.explained(cast(Any, ValueError("no")), spied)
    deployment._longest_silence(spied)
    assert engine.names == {"cpus_per_client", "gpus_per_client"}  # with_ray_grid reads the address
    assert faults.names == {"patience", "retries", "deadline"}


REFUSED = {
    "privacy.epsilon=8": "[privacy] epsilon = 8.0 has no effect, because [local] recipe = "
    "'fedmuon'. This key is used only by private optimizers and client-level privacy. Choose an "
    "optimizer whose name begins with dp- or disk-, or set [privacy] level = 'client', or leave "
    "epsilon out.",
    "task.model=wrn-16-2": "Set [task] name = 'network', or leave model out.",
    "local.recipe=fedavg orthogonalizer.name=newton-schulz": "Choose a Muon optimizer such as",
    "orthogonalizer.coefficients=quintic": "because [orthogonalizer] name = 'smoothed-polar'",
    "orthogonalizer.name=newton-schulz orthogonalizer.lambda=0.1": "only by the "
    "orthogonalizer `smoothed-polar`",
    "engine.ray-address=1.2.3.4:5": "Set [engine] name = 'ray', or leave ray-address out.",
    "faults.policy=drop": "This key is used only by engines with client processes.",
    "local.tail-index=1.5": "Set [local] schedule = 'heavy-tailed'",
    "local.schedule=heavy-tailed local.momentum=0.5": "only by schedules other than `heavy-tailed`",
    "data.dimension=3": "This key is used only by the source `synthetic`.",
    "stability.neighbours=all stability.trials=3": "leave trials out",
    "stability.alpha-smoothing=0.1": "Set [orthogonalizer] name = 'gaussian-smoothed-sign'",
}


@pytest.mark.parametrize("changes", REFUSED)
@pytest.mark.parametrize("command", ["run", "stability", "bound"])
def test_refusals_are_one_sentence_and_exit_code_2(
    changes: str, command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [part for change in changes.split() for part in ("--set", change)]
    out = [] if command == "bound" else ["--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        main([command, *given, *out])
    said = capfd.readouterr().err.strip()
    assert end.value.code == 2 and REFUSED[changes] in said and said.count("\n") == 0
    assert not (tmp_path / "run").exists()


def test_defaults_are_always_accepted() -> None:
    assert load(None, ["privacy.epsilon=0", "task.model=cnn", "faults.retries=2"]) == Config()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_resolved_config_loads_again(setting: str) -> None:
    config = resolve(tiny(SETTINGS[setting]))
    assert parse(tomllib.loads(dump(config))) == config
    assert unread(config) == []


@pytest.mark.parametrize("recipe", ["fedavg", "sgd"])
def test_a_schedule_is_resolved_where_momentum_is_and_is_not_read(recipe: str) -> None:
    local = {"recipe": recipe, "schedule": "heavy-tailed", "tail-index": 1.5}
    config = resolve(small(local=local))
    assert unread(config) == [] and config.local.tail_index == 0
    assert (config.local.momentum != Config().local.momentum) == (recipe == "sgd")


def test_a_kernel_of_the_matrix_task_is_not_looked_for_by_networks() -> None:
    config = resolve(tiny({**NETWORK, "engine": {"dtype": "float32"}}))
    assert is_default("engine.kernel", config.engine.kernel)


SHARED = """
kind = "training"
title = "Shared keys"
data = "digits"
seeds = [0]
[base.federation]
clients = 3
per-round = 2
rounds = 2
[base.orthogonalizer]
name = "newton-schulz"
[variants.FedMuon.local]
recipe = "fedmuon"
[variants.FedAvg.local]
recipe = "fedavg"
"""
IN_VAIN = {
    "base": (SHARED + "[base.privacy]\nepsilon = 8.0\n", {}, "[base]: [privacy] epsilon = 8.0"),
    "seed": (SHARED + "[variants.A.federation]\nseed = 7\n", {}, "[variants.'A'] federation.seed"),
    "both": (
        SHARED + 'lr = 0.3\n[sweep]\nkey = "local.lr"\nvalues = [0.1, 0.2]\nlabel = "s"\n',
        {},
        "[variants.'FedAvg'] local.lr has no effect, because lr is set by [sweep]",
    ),
    "own": (SHARED + "momentum = 0.3\n", {}, "[variants.'FedAvg']: [local] momentum = 0.3"),
    "swept": (
        SHARED + '[sweep]\nkey = "privacy.noise"\nvalues = [1.0, 2.0]\nlabel = "s"\n',
        {},
        "[sweep]: [privacy] noise",
    ),
    "set": (SHARED, {"privacy": {"epsilon": 8.0}}, "--set: [privacy] epsilon = 8.0"),
    "settled": (SHARED, {"federation": {"seed": 3}}, "--set federation.seed has no effect"),
}


def test_the_base_of_a_suite_means_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(SHARED)
    changes = {"orthogonalizer": {"steps": 3}}
    work: Any = kinds.find(str(tmp_path / "own.toml"), None, "full", changes)
    muon, average = (one.config for one in work.cells)
    assert (muon.orthogonalizer.name, muon.orthogonalizer.steps) == ("newton-schulz", 3)
    assert average.orthogonalizer == Config().orthogonalizer


@pytest.mark.parametrize("case", IN_VAIN)
def test_what_a_suite_asks_for_in_vain_is_refused(case: str, tmp_path: Path) -> None:
    text, changes, words = IN_VAIN[case]
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(InputError) as refusal:
        kinds.find(str(tmp_path / "own.toml"), None, "full", changes)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(("change", "words"), [
    ({"privacy": {"epsilon": 8.0}}, "only by private optimizers"),
    ({"local": {"recipe": "fedavg"}}, "[grid] [orthogonalizer] lambda = "),
    ({"local": {"lr": 0.5}}, "set by [grid]"),
    ({"engine": {"name": "ray"}}, "--ray-address"),
    ({"stability": {"trials": 3}}, "set by trials"),
    ({"data": {"client-test": 0.2}}, "[data] client-test is 0.2, but it must be 0"),
    ({"data": {"validation": 9}}, "[data] validation is 9, but it must be 0"),
    ({"output": {"clients": True}}, "[output] clients = true has no effect in"),
])  # fmt: skip
def test_a_stability_suite_refuses_what_it_does_not_read(change: dict, words: str) -> None:
    content = contents.at(contents.read("A1"), "synthetic", "small")
    with pytest.raises(InputError) as refusal:
        stability.stacks(validate(stability.Suite, content), None, change)
    assert words in str(refusal.value)
