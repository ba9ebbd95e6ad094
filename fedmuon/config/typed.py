"""The tables of a config as types, from which editors complete keys and names.

`make reference` generates this file from the declarations in `schema.py`.
"""

# ruff: noqa: UP013

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

DataKeys = TypedDict(
    "DataKeys",
    {
        "name": Literal[
            "synthetic",
            "digits",
            "mnist5k",
            "fashion-mnist",
            "mnist",
            "cifar10",
            "idx",
            "pydoc",
            "text",
            "bible-kjv",
            "fortunes",
            "jsonl",
            "e2e",
            "dart",
            "sst-2",
            "mnli",
            "qnli",
            "qqp",
            "npz",
            "csv",
            "parquet",
        ]
        | str,
        "train": int,
        "test": int,
        "validation": float,
        "client-test": float,
        "unseen-clients": int,
        "validation-clients": int,
        "alpha": float,
        "minimum": int,
        "center": Literal["none", "public"],
        "center-samples": int,
        "features": Literal["none", "hog", "scattering", "random-conv"],
        "features-seed": int,
        "public": Literal["none", "mnist5k", "mnist", "fashion-mnist", "cifar10", "digits"],
        "components": int,
        "normalize": Literal["auto", "unit", "ball", "pixels", "tokens"],
        "folder": str,
        "target": str,
        "client": str,
        "context": int,
        "tokenizer": str,
        "pad-token": bool,
        "dimension": int,
        "classes": int,
        "options": Mapping[str, Any],
    },
    total=False,
)
FederationKeys = TypedDict(
    "FederationKeys",
    {
        "clients": int,
        "per-round": int,
        "rounds": int,
        "risk-weights": Literal["size", "uniform"],
        "aggregate": Literal[
            "mean",
            "by-samples",
            "median",
            "trimmed-mean",
            "krum",
            "centered-clipping",
            "geometric-median",
        ]
        | str,
        "stage": str,
        "graph": Literal["ring", "torus", "exponential", "complete", "random", "file"],
        "edge-share": float,
        "graph-file": str,
        "varying-graph": bool,
        "adapters": Literal["factors", "freeze-a", "exact", "subspace"],
        "subspace-rounds": int,
        "subspace-bases": Literal["random", "gradient"],
        "adapter-ranks": str,
        "partition": Literal["dirichlet", "iid", "shards", "quantity", "column"] | str,
        "seed": int,
        "options": Mapping[str, Any],
    },
    total=False,
)
TaskKeys = TypedDict(
    "TaskKeys",
    {
        "name": Literal["matrix", "network", "causal-lm"] | str,
        "model": Literal[
            "linear",
            "mlp",
            "cnn",
            "tanh-cnn",
            "cifarnet",
            "wrn-16-2",
            "wrn-16-4",
            "vit-small",
            "gpt",
        ]
        | str,
        "width": int,
        "depth": int,
        "heads": int,
        "initial": Literal["gaussian", "zero"],
        "weights": str,
        "head": Literal["tied", "untied"],
        "positions": int,
        "lora-rank": int,
        "lora-alpha": float,
        "lora-layers": str,
        "base-dtype": Literal["auto", "bfloat16"],
        "checkpointing": bool,
        "label-smoothing": float,
        "options": Mapping[str, Any],
    },
    total=False,
)
LocalKeys = TypedDict(
    "LocalKeys",
    {
        "recipe": Literal[
            "fedavg",
            "fedavgm",
            "local-muon",
            "fedmuon",
            "fedmuon-aligned",
            "fedmuon-corrected",
            "fedmuon-svd",
            "lora-muon",
            "ef21-muon",
            "ringmaster",
            "ringmaster-free",
            "sign-muon",
            "demuon",
            "muloco",
            "fedprox",
            "fedper",
            "ditto",
            "fednova",
            "scaffold",
            "fedadam",
            "fedyogi",
            "fedadagrad",
            "local-adamw",
            "diloco",
            "sgd",
            "normalized-sgd",
            "adamw",
            "muon",
            "dp-sgd",
            "dp-adam",
            "dp-muon",
            "dp-muon-im",
            "dp-muonbc",
            "disk-sgd",
            "disk-adam",
            "disk-muon",
            "disk-muonbc",
        ]
        | str,
        "steps": int,
        "epochs": float,
        "batch": int,
        "lr": float,
        "momentum": float,
        "momentum-form": Literal["ema", "ema-nesterov", "polyak", "nesterov"],
        "weight-decay": float,
        "renormalize": bool,
        "schedule": Literal["constant", "heavy-tailed", "cosine", "power", "step", "warm-up"] | str,
        "tail-index": float,
        "alignment": float,
        "server-momentum": float,
        "server-lr": float,
        "server-memory": float,
        "tau": float,
        "proximal": float,
        "personal": str,
        "rank": int,
        "personal-weight": float,
        "route": Literal["hidden", "all-matrices"],
        "muon": str,
        "qkv": Literal["split", "whole"],
        "aux": Literal["sgd", "adamw"],
        "aux-lr": float,
        "adjust": Literal["none", "original", "match-rms", "scion", "polargrad"],
        "options": Mapping[str, Any],
    },
    total=False,
)
OrthogonalizerKeys = TypedDict(
    "OrthogonalizerKeys",
    {
        "name": Literal[
            "smoothed-polar",
            "newton-schulz",
            "gaussian-smoothed-sign",
            "exact-sign",
            "clipped-sign",
            "randomized-polar",
        ]
        | str,
        "lambda": float,
        "noise-floor": float,
        "steps": int,
        "coefficients": str,
        "safety": float,
        "eps": float,
        "normalization": Literal["plus", "max", "unit", "aol"],
        "products": Literal["full", "bfloat16", "float16"],
        "sigma": float,
        "clip-level": float,
        "rank": int,
        "oversample": int,
        "power": int,
        "sketch": Literal["gaussian", "kaczmarz"],
        "row-memory": float,
        "shards": int,
        "full-every": int,
        "options": Mapping[str, Any],
    },
    total=False,
)
PrivacyKeys = TypedDict(
    "PrivacyKeys",
    {
        "clipping": Literal["block", "flat", "automatic", "automatic-flat"],
        "blocks": Literal["routed", "hidden"],
        "bound": float,
        "quantile": float,
        "quantile-rate": float,
        "count-noise": float,
        "noise": float,
        "lot": float,
        "epsilon": float,
        "delta": float,
        "level": Literal["example", "client"],
        "trust": Literal["central", "local", "distributed"],
        "honest": float,
        "state-weight": float,
        "cohorts": Literal["poisson", "fixed"],
        "adjacency": Literal["zero-out", "add-remove", "replace-one"],
        "sampling": Literal["poisson", "shuffle", "cyclic"],
        "max-lot": int,
        "noise-correlation": Literal["none", "sqrt-toeplitz", "momentum", "blt", "blt-momentum"],
        "band": int,
        "buffers": int,
        "population": int,
        "rate": float,
        "kappa": float,
        "lookahead": float,
        "inner-weights": str,
        "probes": int,
        "noise-source": Literal["secure", "pcg64"],
        "arithmetic": Literal["auto", "continuous", "grid"],
        "insecure-reproducible-noise": bool,
    },
    total=False,
)
EngineKeys = TypedDict(
    "EngineKeys",
    {
        "name": Literal["inline", "ray", "deployment"],
        "dtype": Literal["float32", "float64"],
        "device": str,
        "kernel": Literal["torch", "channels-last", "numpy", "fused", "auto"],
        "cpus-per-client": float,
        "gpus-per-client": float,
        "ray-address": str,
    },
    total=False,
)
CompressionKeys = TypedDict(
    "CompressionKeys",
    {
        "uplink": Literal["none", "top-k", "random-k", "rows", "qsgd", "sign", "low-rank", "power"],
        "downlink": Literal["none", "top-k", "random-k", "rows", "qsgd", "sign", "low-rank"],
        "share": float,
        "levels": int,
        "rank": int,
        "iterations": int,
        "feedback": Literal["none", "error", "ef21"],
    },
    total=False,
)
FaultsKeys = TypedDict(
    "FaultsKeys",
    {
        "policy": Literal["strict", "drop"],
        "retries": int,
        "deadline": float,
        "patience": float,
    },
    total=False,
)
DevicesKeys = TypedDict(
    "DevicesKeys",
    {
        "mode": Literal["none", "synchronous", "deadline", "fedbuff", "threshold", "fedasync"],
        "select": int,
        "deadline": float,
        "buffer": int,
        "threshold": float,
        "threshold-growth": float,
        "mixing": float,
        "staleness-power": float,
        "latency": float,
        "cost": float,
        "speeds": Literal["constant", "log-normal", "pareto", "trace"],
        "speed": float,
        "speed-spread": float,
        "bandwidths": Literal["constant", "log-normal", "pareto", "trace"],
        "bandwidth-down": float,
        "bandwidth-up": float,
        "bandwidth-spread": float,
        "trace": str,
        "availability": Literal["always", "bernoulli", "day-night", "trace"],
        "available": float,
        "day": float,
        "availability-trace": str,
        "dropout": float,
    },
    total=False,
)
AttacksKeys = TypedDict(
    "AttacksKeys",
    {
        "kind": Literal[
            "none",
            "sign-flip",
            "scaled",
            "gaussian",
            "label-flip",
            "alie",
            "inner-product",
            "mimic",
        ],
        "share": float,
        "clients": str,
        "from-round": int,
        "strength": float,
    },
    total=False,
)
RobustKeys = TypedDict(
    "RobustKeys",
    {
        "ball": Literal["none", "matrix", "model"],
        "radius": float,
        "aux-radius": float,
        "state-radius": float,
        "mixing": int,
    },
    total=False,
)
StabilityKeys = TypedDict(
    "StabilityKeys",
    {
        "trials": int,
        "neighbours": Literal["own", "any", "worst", "all"],
        "unit": Literal["samples", "clients", "removed-clients"],
        "delta": float,
        "lipschitz": Literal["paper", "sharp"],
        "constants": Literal["ball", "global"],
        "realized": bool,
        "c-hp": float | str,
        "probes": Literal["auto"] | int,
        "replacements": int,
        "output-noise": float,
        "alpha-smoothing": float,
    },
    total=False,
)
OutputKeys = TypedDict(
    "OutputKeys",
    {
        "evaluate-every": int,
        "fine-tune": int,
        "checkpoint-every": int,
        "callback": Literal["none", "early-stopping", "tensorboard", "mlflow", "wandb"] | str,
        "clients": bool,
        "profile": bool,
        "average": float,
        "options": Mapping[str, Any],
    },
    total=False,
)


class Tables(TypedDict, total=False):
    """The settings of an experiment as nested dictionaries, with the tables of a config file.

    Editors complete the tables, keys and names. Every key has a default, so set only the keys that
    you want to change. The page "Config" describes every key.

    Example:
        >>> import fedmuon
        >>> settings: fedmuon.Tables = {"local": {"recipe": "fedavg", "lr": 0.1}}
        >>> fedmuon.Config.of(settings).local.recipe
        'fedavg'
    """

    data: DataKeys
    federation: FederationKeys
    task: TaskKeys
    local: LocalKeys
    orthogonalizer: OrthogonalizerKeys
    privacy: PrivacyKeys
    engine: EngineKeys
    compression: CompressionKeys
    faults: FaultsKeys
    devices: DevicesKeys
    attacks: AttacksKeys
    robust: RobustKeys
    stability: StabilityKeys
    output: OutputKeys
