"""Suites of one kind each, as small as they can be: tests run, disturb and misspell them."""

from pathlib import Path
from typing import Any

# Of synthetic samples at the small scale it is two runs of 60 samples.
TRAINING = """
kind = "training"
title = "Two recipes"
data = "digits"
seeds = [0, 1]
source = "a table"
note = "A note."

[base.federation]
clients = 5
per-round = 2
rounds = 5

[base.local]
steps = 1

[base.engine]
dtype = "float64"
device = "cpu"

[base.output]
evaluate-every = 2
checkpoint-every = 1

[tuning]
stated = "The step sizes are given."

[variants."FedMuon, E = 1".local]
recipe = "fedmuon"
lr = 0.5

[variants.FedAvg.local]
recipe = "fedavg"
lr = 0.5

[claims.loss]
better = "FedMuon, E = 1"
than = "FedAvg"

[claims.reversed]
measure = "accuracy"
better = "FedAvg"
than = "FedMuon, E = 1"

[published.digits.FedAvg]
train_loss = 0.25

[for.mnist5k.variants.FedAvg.local]
lr = 0.25

[for.synthetic.base.data]
train = 60
test = 40
dimension = 5
classes = 3
minimum = 5

[small]
seeds = [0]
"""
STABILITY = """title = "Two by two"
data = "synthetic"
seeds = [0]
trials = 2

[grid]
train = [60, 90]
per-round = [2]
alpha = [0.5]
lr = [0.01, 0.05]
lambda = [0.1]

[base.data]
dimension = 5
classes = 3
test = 30
minimum = 5

[base.federation]
clients = 4
rounds = 3

[base.engine]
device = "cpu"
"""
STUDY = """
kind = "rank-dependence"
title = "Ranks"
ranks = [2, 4]
steps = [2, 4]
seeds = 2
inputs = 8
batch = 16
label-noise = 0.1
memory = 0.9
lr-sgd = 1.0
lr-muon = 0.02
factors = [0.5, 1.0, 2.0]
"""
# What differs from the files of the studies that come with fedmuon.
STUDIES: dict[str, dict[str, Any]] = {
    "heavy-tail": {"alphas": [1.4, 2.0], "steps": [4, 16], "seeds": 2, "factors": [0.5, 1.0]},
    "rank-dependence": {"ranks": [2, 4], "steps": [2, 4], "seeds": 2, "inputs": 6, "batch": 8,
                        "factors": [0.5, 1.0, 2.0]},
    "dp-bias": {"rhos": [0.015625, 0.03125], "nodes": 4, "samples": 200},
    "bias": {"iterations": [1, 2], "lrs": [0.1, 0.2], "rounds": 12, "steps": 2,
             "seeds": 2, "drawn": 4},
    "disk-regression": {"noises": [0.1, 1.0], "lrs": [0.1, 0.5], "gains": [0.7], "seeds": 2,
                        "steps": 5, "samples": 20, "features": 3},
    "dp-muon-steps": {"shapes": [[16, 16], [16, 32]], "lot": 64},
    "dp-stationarity": {"noises": [0.0, 4.0], "steps": [4, 8], "seeds": 2, "rows": 2, "columns": 3,
                        "people": 20, "lot": 5.0},
    "dp-vanishing": {"noises": [4.0], "steps": [4, 8], "seeds": 2, "rows": 2, "columns": 3,
                     "people": 20, "lot": 5.0},
    "disk-stationarity": {"reaches": [-1.0], "gains": [0.5, 1.0], "lrs": [0.1], "steps": 5,
                          "noises": [1.0], "batches": [0], "horizons": [350, 400], "seeds": 2},
    "wall-clock": {"shapes": [[8, 8], [8, 16]], "iterations": [1, 3], "repeats": 1},
    "attribution": {
        "data": "synthetic", "tests": 3, "left-out": 5, "subsets": 4, "dampings": [1.0, 10.0],
        "projections": 5,
        "base": {"data": {"dimension": 5, "classes": 3, "train": 60, "test": 30, "minimum": 5},
                 "federation": {"clients": 4, "per-round": 2, "rounds": 4}},
        "variants": {"FedMuon, E = 1": {"local": {"steps": 1}},
                     "FedAvg": {"local": {"recipe": "fedavg", "steps": 1, "lr": 1.0}}},
    },
    "disk-map": {
        "data": "synthetic", "seeds": [0, 1], "tuning-seeds": [9], "epsilons": [1.0, 8.0],
        "gains": [0.5, 0.9], "reaches": [0.5], "single": True, "shared-reach": 0.5, "lrs": [1.0],
        "base": {"data": {"dimension": 5, "classes": 3, "train": 60, "test": 30, "validation": 20,
                          "minimum": 5},
                 "federation": {"clients": 1, "per-round": 1, "rounds": 2},
                 "local": {"recipe": "disk-sgd", "steps": 1},
                 "privacy": {"lot": 16.0, "delta": 0.01, "insecure-reproducible-noise": True}},
    },
    "certified-error": {
        "data": "synthetic", "seeds": [0, 1], "samples": [60, 90], "scaled-mus": [1.0, 2.0],
        "guess": 0.5,
        "base": {"data": {"dimension": 5, "classes": 3, "test": 30, "minimum": 5},
                 "federation": {"clients": 3, "per-round": 3, "rounds": 3, "partition": "iid"},
                 "engine": {"dtype": "float64"}},
        "methods": {"FedMuon": {"base": {"local": {"recipe": "fedmuon"}}, "lrs": [0.01, 0.05]},
                    "FedAvg": {"base": {"local": {"recipe": "fedavg"}}, "lrs": [0.1]}},
    },
    "certified-networks": {
        "data": "synthetic", "seeds": [0, 1], "paid": 2,
        "tuning": {"train": 20, "test": 10, "seeds": [0]},
        "base": {"data": {"dimension": 5, "classes": 3, "train": 60, "test": 30, "minimum": 5},
                 "task": {"name": "network", "model": "linear"},
                 "federation": {"clients": 1, "per-round": 1, "rounds": 3, "partition": "iid"},
                 "privacy": {"lot": 30.0, "insecure-reproducible-noise": True},
                 "output": {"average": 0.6}},
        "models": {"linear": {"base": {}, "guess": 0.5, "noises": [20.0, 40.0], "methods": {
            "DP-Muon": {"base": {"local": {"recipe": "dp-muon"}}, "lrs": [0.1, 0.3]},
            "DP-SGD": {"base": {"local": {"recipe": "dp-sgd"}}, "lrs": [1.0]}}}},
    },
    "certified-loss": {
        "data": "synthetic", "seeds": [0, 1], "tuning-seeds": [9], "samples": [60, 90],
        "lrs": [0.01, 0.05], "lambdas": [0.1], "horizons": [2, 3],
        "base": {"data": {"dimension": 5, "classes": 3, "test": 30, "minimum": 5},
                 "engine": {"dtype": "float64"}},
        "federations": {"two clients": {"federation": {"clients": 2, "per-round": 2}}},
    },
    "federated-comparison": {
        "data": "synthetic", "seeds": [0, 1], "tuning-seeds": [9], "extend": 0, "every": 2,
        "alphas": [0.5, 1.0],
        "base": {"data": {"dimension": 5, "classes": 3, "train": 60, "test": 30, "validation": 20,
                          "minimum": 5},
                 "federation": {"clients": 4, "per-round": 2, "rounds": 4}, "local": {"batch": 8}},
        "models": {"matrix": {"target": 0.5, "base": {"task": {"name": "matrix"}}}},
        "methods": {"FedAvg": {"base": {"local": {"recipe": "fedavg"}},
                               "grid": {"local.lr": [1.0, 10.0]}},
                    "FedMuon": {"base": {"local": {"recipe": "fedmuon"}},
                                "grid": {"local.lr": [0.01, 0.1]}}},
        "claims": [{"better": "FedMuon", "than": "FedAvg"}],
    },
    "language-models": {  # in a folder that `save_language_model` has prepared
        "seeds": [0, 1], "tuning-seeds": [9], "extend": 0, "every": 1,
        "base": {"task": {"name": "causal-lm", "weights": "tiny-model", "lora-rank": 2},
                 "data": {"context": 12, "minimum": 1, "test": 10, "unseen-clients": 2,
                          "validation-clients": 1, "folder": "tiny-texts"},
                 "federation": {"partition": "column", "per-round": 2, "rounds": 2},
                 "local": {"steps": 1, "batch": 2},
                 "devices": {"mode": "synchronous"}},
        "texts": {"one": {"base": {"data": {"name": "text"}}}},
        "methods": {"AdamW, factors": {"base": {"local": {"recipe": "local-adamw"}},
                                       "grid": {"local.lr": [0.001, 0.01, 0.1]}},
                    "Muon, factors": {"base": {"local": {"recipe": "local-muon"}},
                                      "grid": {"local.lr": [0.001, 0.03, 0.1]}}},
        "claims": [{"better": "Muon, factors", "than": "AdamW, factors"}],
    },
    "poisoning": {
        "data": "synthetic", "seeds": [0, 1], "attacked": 1,
        "base": {"data": {"dimension": 5, "classes": 3, "train": 60, "test": 30, "minimum": 5},
                 "task": {"initial": "zero"},
                 "federation": {"clients": 4, "per-round": 2, "rounds": 4, "aggregate": "mean"}},
        "variants": {"FedMuon": {"local": {"recipe": "fedmuon", "steps": 1}},
                     "FedAvg": {"local": {"recipe": "fedavg", "steps": 1, "lr": 1.0}}},
    },
    "robust": {
        "data": "synthetic", "seeds": [0, 1], "tuning-seeds": [9], "extend": 0, "hostile": 0.2,
        "base": {"data": {"dimension": 5, "classes": 3, "train": 60, "test": 30, "validation": 20,
                          "minimum": 5}, "task": {"name": "matrix"},
                 "federation": {"clients": 5, "per-round": 5, "rounds": 3}, "local": {"batch": 8}},
        "models": {"matrix": {"base": {}, "methods": {
            "FedAvg": {"base": {"local": {"recipe": "fedavg"}}, "lr": [1.0, 3.0, 10.0]},
            "FedMuon": {"base": {"local": {"recipe": "fedmuon"}}, "lr": [0.03, 0.1, 0.3]}}}},
        "attacks": {"sign-flip": {"kind": "sign-flip"}, "mimic": {"kind": "mimic"}},
        "defences": {"mean": {}, "median": {"federation": {"aggregate": "median"}}},
    },
    "systems": {
        "data": "synthetic", "seeds": [0, 1], "tuning-seeds": [9], "extend": 0, "every": 1,
        "alpha": 0.5,
        "base": {"data": {"dimension": 5, "classes": 3, "train": 60, "test": 30, "validation": 20,
                          "minimum": 5}, "task": {"name": "matrix"},
                 "federation": {"clients": 4, "per-round": 2, "rounds": 4}, "local": {"batch": 8}},
        "parts": {
            "bytes": {"target": 0.5, "baseline": "FedMuon, none", "methods": {
                "FedMuon, none": {"base": {"local": {"recipe": "fedmuon"}},
                                  "grid": {"local.lr": [0.01, 0.1]}},
                "FedMuon, sign": {"base": {"local": {"recipe": "fedmuon"},
                                           "compression": {"uplink": "sign"}},
                                  "grid": {"local.lr": [0.01, 0.1]}}},
                "claims": [{"better": "FedMuon, sign", "than": "FedMuon, none"}]},
            "seconds": {"target": 0.5, "baseline": "FedAvg, synchronous",
                        "base": {"devices": {"speeds": "log-normal"}}, "methods": {
                "FedAvg, synchronous": {"base": {"local": {"recipe": "fedavg"},
                                                 "devices": {"mode": "synchronous"}},
                                        "grid": {"local.lr": [1.0, 10.0]}}},
                "claims": []}},
    },
    "gap-bound": {
        "data": "synthetic", "seeds": [0, 1],
        "vary": {"federation.rounds": [2, 3], "orthogonalizer.lambda": [0.1, 1.0]},
        "base": {"data": {"dimension": 5, "classes": 3, "train": 60, "test": 30, "minimum": 5},
                 "federation": {"clients": 4, "per-round": 2, "rounds": 3},
                 "orthogonalizer": {"lambda": 0.1}, "engine": {"dtype": "float64"}},
    },
    "dp-muon-printed": {"rows": {"E2E, DP-SGD": {
        "population": 42043, "lot": 1024, "steps": 410, "delta": 8e-6, "blocks": 1,
        "noise": 0.7189, "printed": 8.0}}},
    "polar-error": {"degrees": ["cubic"], "iterations": [1], "draws": 20, "samples": 40,
                    "held-out": 30, "steps": 6, "neighbours": 3, "lrs": [0.0001],
                    "lambdas": [1e-6, 1e-4]},
}  # fmt: skip


def save_language_model(folder: Path, texts: int = 6) -> None:
    """Save a tiny language model and texts in a folder, for the suite `language-models`."""
    from language_models import save_model, save_tokenizer  # loads transformers

    save_tokenizer(save_model(folder / "tiny-model"))
    (folder / "tiny-texts").mkdir()
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "rats", "by", "some", "stones"]
    for k in range(texts):
        text = " ".join(words[(place * (k + 3) + place // 5) % len(words)] for place in range(60))
        (folder / "tiny-texts" / f"text{k}").write_text(text)


FILES = {"language-models": save_language_model}  # what a suite needs in the current folder
