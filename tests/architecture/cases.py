"""The 30 cases of `tests.architecture.evidence`: small runs and suites that use every name.

A case is one or more steps. Each step is a `fedmuon` command on a TOML file, made of `tables`, and
writes into a folder with the name of the step. `test_evidence.py` checks that every optimizer, map,
task, model, engine, partition, privacy level and study occurs here.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.small_suites import STUDIES

Tables = Mapping[str, Any]
# The commit to compare with does not have them.
NEW_STUDIES = ("bias", "certified-error", "certified-loss", "certified-networks", "disk-map",
               "dp-muon-steps", "federated-comparison", "gap-bound", "language-models",
               "layer-rank", "poisoning", "robust", "systems", "table-2")  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One command: `fedmuon COMMAND FILE.toml OPTIONS --out NAME`; without tables, no file."""

    name: str
    command: str = "run"
    tables: Tables = field(default_factory=dict)
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """Steps in order, input files by name, and columns and files that depend on clock or chance."""

    steps: tuple[Step, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    varying: tuple[str, ...] = ()


def merged(below: Tables, above: Tables) -> dict[str, Any]:
    found = dict(below)
    for key, value in above.items():
        old = found.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        found[key] = merged(old, value) if both else value  # type: ignore
    return found


SAMPLES = {"name": "synthetic", "train": 90, "test": 60, "dimension": 7, "classes": 3, "minimum": 5}
IMAGES = {"name": "mnist5k", "train": 60, "test": 30, "minimum": 2}
COHORT = {"clients": 6, "per-round": 3, "rounds": 4, "seed": 3}
BASE: Tables = {"federation": COHORT, "local": {"lr": 0.05, "steps": 2},
                "engine": {"dtype": "float64", "device": "cpu"},
                "output": {"evaluate-every": 2}}  # fmt: skip
KNOWN = {"insecure-reproducible-noise": True, "noise": 0.5}
CLIENT = {**KNOWN, "level": "client", "bound": 0.3, "cohorts": "poisson", "trust": "central"}
FIXED = {**CLIENT, "cohorts": "fixed"}
OF_SUITES = (("data", "name"), ("federation", "seed"))  # a suite sets them itself
TEXT = {"name": "pydoc", "context": 12, "train": 60, "test": 30, "minimum": 5}
GPT = {"name": "network", "model": "gpt", "width": 16, "depth": 1, "heads": 2}


def people() -> str:
    """A table whose column `who` names the client of every row."""
    rng = random.Random(0)
    rows = [
        [f"{rng.gauss(row % 3, 1):.6f}" for _ in range(4)] + [str(row % 3), f"person-{row % 5}"]
        for row in range(100)
    ]
    return "\n".join(",".join(row) for row in [["a", "b", "c", "d", "label", "who"], *rows]) + "\n"


def on_base(tables: Tables) -> dict[str, Any]:
    """These tables on `BASE`, with `SAMPLES` if they name no source."""
    source = tables.get("data", {})
    data = source if "name" in source else {**SAMPLES, **source}
    return merged(BASE, tables) | {"data": data}


def run(name: str, *options: str, command: str = "run", **tables: Tables) -> Step:
    return Step(name, command, on_base(tables), options)


def single(*options: str, **tables: Tables) -> Case:
    return Case((run("out", *options, **tables),))  # type: ignore


def suite(*varying: str, **tables: Any) -> Case:
    return Case((Step("out", "suite", tables),), varying=varying)


def training(base: Tables, variants: Tables) -> Case:
    """A training suite of one seed; `variants` by name."""
    whole = on_base(base)
    tables = {
        table: {key: value for key, value in keys.items() if (table, key) not in OF_SUITES}
        for table, keys in whole.items()
    }
    source = whole["data"]["name"]
    return suite(
        kind="training", title="Evidence", data=source, seeds=[0], base=tables, variants=variants
    )


def named(table: str, key: str, *names: str, **more: Any) -> dict[str, dict]:
    """A variant for each name of a key."""
    return {name: {table: {key: name, **more}} for name in names}


def like(name: str, *varying: str, **tables: Any) -> Case:
    """The suite of that name that comes with fedmuon, with smaller settings on top."""
    return suite(*varying, like=name, **tables)


RUNS = {
    "fedmuon": single(
        federation={"partition": "dirichlet", "aggregate": "mean"},
        local={"recipe": "fedmuon", "schedule": "constant"},
        orthogonalizer={"name": "smoothed-polar", "lambda": 0.1},
        engine={"name": "inline"},
    ),
    "fedavg": single(
        data={"name": "digits", "train": 120, "test": 60},
        federation={"partition": "iid", "aggregate": "by-samples", "risk-weights": "uniform"},
        local={"recipe": "fedavg", "schedule": "cosine", "batch": 8, "lr": 1.0},
        engine={"dtype": "float32", "kernel": "numpy"},
    ),
    "fedavgm": single(
        federation={"partition": "shards", "aggregate": "median"},
        local={"recipe": "fedavgm", "schedule": "step", "options": {"every": 2}},
        engine={"kernel": "channels-last", "dtype": "float32"},
    ),
    "local-muon": single(
        federation={"partition": "quantity", "aggregate": "trimmed-mean"},
        local={"recipe": "local-muon", "schedule": "warm-up", "momentum-form": "ema-nesterov"},
        orthogonalizer={"name": "exact-sign"},
        engine={"kernel": "fused"},
    ),
    "fedmuon-aligned": Case(
        (
            run(
                "out",
                data={"name": "csv", "folder": "people.csv", "train": 80, "test": 20, "minimum": 2}
                | {"options": {"client": "who"}},
                federation={"partition": "column", "clients": 5},
                local={"recipe": "fedmuon-aligned", "schedule": "heavy-tailed", "batch": 4},
                orthogonalizer={"name": "newton-schulz", "coefficients": "quintic"},
            ),
        ),
        {"people.csv": people()},
    ),
    "muon": single(
        federation={"aggregate": "krum", "options": {"faulty": 0}},
        local={"recipe": "muon", "momentum-form": "nesterov", "weight-decay": 0.01},
        orthogonalizer={"name": "clipped-sign"},
        task={"initial": "zero"},
        output={"callback": "early-stopping"},
    ),
    "recipes": training(
        {"task": {"name": "matrix"}},
        named("local", "recipe", "sgd", "normalized-sgd", "adamw")
        | named("orthogonalizer", "name", "gaussian-smoothed-sign")
        | named("orthogonalizer", "name", "randomized-polar", rank=2, oversample=1),
    ),
    "networks": training(
        {
            "data": IMAGES,
            "task": {"name": "network"},
            "federation": {"clients": 2, "per-round": 1, "rounds": 1},
            "local": {"lr": 0.01, "steps": 1, "batch": 4},
            "engine": {"dtype": "float32"},
        },
        named("task", "model", "linear", "mlp", "cnn", "tanh-cnn", "cifarnet")
        | named("task", "model", "wrn-16-2", "wrn-16-4", "vit-small"),
    ),
    "decoder-lora": Case(
        (
            run(
                "whole",
                data=TEXT,
                federation={"rounds": 2},
                task=GPT,
                local={"batch": 4, "lr": 0.01, "aux": "adamw", "adjust": "match-rms"},
            ),
            run(
                "adapters",
                data=TEXT,
                federation={"rounds": 2},
                task={**GPT, "lora-rank": 2, "weights": "whole/model.safetensors"},
                local={"batch": 4, "lr": 0.01, "route": "all-matrices"},
            ),
        )
    ),
    "private-recipes": training(
        {"federation": {"rounds": 3}, "privacy": {**KNOWN, "lot": 8.0}},
        named("local", "recipe", "dp-sgd", "dp-adam", "dp-muon", "dp-muonbc")
        | named("local", "recipe", "disk-sgd", "disk-adam", "disk-muon", "disk-muonbc"),
    ),
    "private-lots": Case(
        (
            run(
                "correlated",
                federation={"clients": 1, "per-round": 1},
                local={"recipe": "dp-sgd", "lr": 0.5},
                privacy={**KNOWN, "lot": 16.0, "sampling": "cyclic", "band": 4}
                | {"noise-correlation": "sqrt-toeplitz", "clipping": "flat"},
            ),
            run(
                "quantile",
                local={"recipe": "dp-muon"},
                privacy={**KNOWN, "lot": 8.0, "sampling": "shuffle", "quantile": 0.5},
            ),
            run(
                "grid",
                local={"recipe": "disk-muon"},
                privacy={**KNOWN, "lot": 8.0, "adjacency": "replace-one", "arithmetic": "grid"}
                | {"sampling": "poisson", "noise-correlation": "none"},
            ),
        )
    ),
    "client-level": Case(
        (
            run("central", local={"recipe": "fedmuon"}, privacy=CLIENT),
            run("local", local={"recipe": "local-muon"}, privacy={**FIXED, "trust": "local"}),
        )
    ),
    "ray": single(
        "--engine",
        "ray",
        federation={"rounds": 3},
        local={"recipe": "disk-muonbc"},
        privacy={**KNOWN, "level": "example", "lot": 8.0},
        faults={"retries": 0},
        engine={"name": "ray"},
    ),
    "deployment": Case(
        (
            run(
                "out",
                "--insecure",
                command="deploy-demo",
                federation={"clients": 2, "per-round": 2, "rounds": 2},
                local={"recipe": "fedmuon"},
                privacy={**FIXED, "trust": "distributed"},
                faults={"retries": 0},
                engine={"name": "deployment"},
            ),
        )
    ),
    "stability": Case(
        (
            run(
                "drawn",
                "--trials",
                "3",
                command="stability",
                local={"steps": 1, "batch": 8},
                stability={"neighbours": "own"},
            ),
            run("worst", "--worst", command="stability", local={"steps": 1}),
            run("every", "--all", command="stability", data={"train": 40}, local={"steps": 1}),
        )
    ),
    "unlearning": Case(
        (
            run("whole", local={"steps": 1, "lr": 0.01}),
            Step("without", "unlearn", options=("whole", "--sample", "138", "--epsilon", "8")),
        ),
        varying=("unlearned.safetensors",),  # its noise is secret
    ),
}
SUITES = {
    "suite-stability": like(
        "A2",
        data="synthetic",
        kind="stability",
        seeds=[0],
        trials=2,
        grid={"train": [60, 90]},
        base={
            "data": {"dimension": 5, "classes": 3, "test": 30, "minimum": 2},
            "federation": {"rounds": 3},
        },
    ),
    "frontier": like(
        "A4",
        kind="frontier",
        data="synthetic",
        seeds=[0],
        starts=["zero"],
        lrs=[0.01, 0.05],
        lambdas=[0.1],
        horizons=[1, 3],
        base={"data": {"train": 90, "test": 60, "minimum": 2, "dimension": 7}},
    ),
    "dp-text": like(
        "dp-text",
        kind="dp-text",
        seeds=[0],
        prompts=2,
        beams=1,
        base={
            "data": {"test": 20},
            "task": {"width": 16, "depth": 1, "heads": 2},
            "federation": {"rounds": 2},
            "local": {"steps": 1},
            "privacy": {"lot": 8.0, "insecure-reproducible-noise": True},
        },
        public={"federation": {"rounds": 1}, "local": {"steps": 2, "batch": 4}},
        **{"made-tables": 60, "public-tables": 40},
    ),
    **{
        name: like(name, kind=name, **held)
        for name, held in STUDIES.items()
        if name not in NEW_STUDIES
    },
    "wall-clock": like(
        "wall-clock",
        *("efficiency", "lemma", "made", "to_svd", "to_product", "claims.json"),
        kind="wall-clock",
        **STUDIES["wall-clock"],
    ),
}
CASES: dict[str, Case] = RUNS | SUITES
