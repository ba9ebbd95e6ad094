"""One of five clients pulls the other way: `aggregate.py [inline | ray] [figure.png]`."""

import sys

import torch

import fedmuon.data


def clipped(replies):  # the mean of the models, none of them longer than the median one
    models = torch.stack([one.params["weight"] for one in replies])
    return {"weight": models.renorm(2, 0, float(models.norm(dim=(1, 2)).median())).mean(0)}


if __name__ == "__main__":
    given = {"data": fedmuon.data.load("digits"), "partition": torch.arange(1500).chunk(5)}
    given["data"][0][:300] *= -10  # the first client's: its gradients are long, of the other sign
    given |= {"task": lambda: torch.nn.Linear(64, 10, bias=False), "recipe": "fedavg"}
    engine = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
    config = {"federation": {"rounds": 8}, "output": {"evaluate-every": 1}, "engine": engine}
    hows = (clipped, "mean", "median", "trimmed-mean", "krum")
    found = [fedmuon.run(config, **given, aggregate=how) for how in hows]
    print("accuracies", *(f"{one.summary['accuracy']:.2f}" for one in found))
    if sys.argv[2:]:
        fedmuon.compare(found).plot().savefig(sys.argv[2])
