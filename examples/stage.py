"""A stage: each client sends only the larger half of the entries of its update."""

import sys

import fedmuon


class LargerHalf(fedmuon.Stage):
    def reply(self, reply, received, memory):
        model = {}
        for name, value in reply.params.items():
            update = value - received.params[name]
            sizes = update.abs().flatten(1)
            middle = sizes.median(dim=1).values.view(-1, *[1] * (value.ndim - 1))
            model[name] = received.params[name] + update * (update.abs() > middle)
        return reply.with_trees({**reply.trees, "model": model})


if __name__ == "__main__":
    config = {"data": {"name": "synthetic", "train": 200}, "federation": {"rounds": 3}}
    config["engine"] = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
    print(fedmuon.run(config, stage=LargerHalf()).summary["test_loss"])
