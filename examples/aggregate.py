"""Robust aggregation with one faulty client: `aggregate.py [inline | ray] [figure.png]`."""

import sys

import torch

import fedmuon.data


def clipped(replies):  # the mean of the models, after scaling long ones to the median norm
    models = torch.stack([one.params["weight"] for one in replies])
    return {"weight": models.renorm(2, 0, float(models.norm(dim=(1, 2)).median())).mean(0)}


if __name__ == "__main__":
    shared = {"data": fedmuon.data.load("digits"), "partition": torch.arange(1500).chunk(5)}
    shared["data"][0][:300] *= -10  # the faulty client: large gradients, wrong sign
    shared |= {"task": lambda: torch.nn.Linear(64, 10, bias=False), "recipe": "fedavg"}
    engine = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
    config = {"federation": {"rounds": 8}, "output": {"evaluate-every": 1}, "engine": engine}
    rules = (clipped, "mean", "median", "trimmed-mean", "krum")
    runs = [fedmuon.run(config, **shared, aggregate=rule) for rule in rules]
    print("accuracies", *(f"{one.summary['accuracy']:.2f}" for one in runs))
    if sys.argv[2:]:
        fedmuon.compare(runs).plot().savefig(sys.argv[2])
