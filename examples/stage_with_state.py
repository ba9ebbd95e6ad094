"""A stage with a state: clients also send a number, and the server sends back the largest one."""

import sys

import torch

import fedmuon


class LargestLength(fedmuon.Stage):
    """No update is longer than the longest update of the last round, whose length is sent."""

    def initial(self, model, returned):  # a state of the server, of shape [replicas]
        tensor = next(iter(model.values()))
        return {"length": {"largest": tensor.new_full((len(tensor),), float("inf"))}}

    def send(self, message, server):
        return {**message, "length": server.states["length"]}

    def reply(self, reply, received, memory):
        updates = {name: one - received.params[name] for name, one in reply.params.items()}
        squares = [update.square().flatten(1).sum(1) for update in updates.values()]
        length = torch.stack(squares).sum(0).sqrt()
        factor = (received.states["length"]["largest"] / length).clamp(max=1.0)
        model = {
            name: received.params[name] + update * factor.view(-1, *[1] * (update.ndim - 1))
            for name, update in updates.items()
        }
        return reply.with_trees({**reply.trees, "model": model, "length": {"largest": length}})

    def read(self, replies, received, server):
        lengths = torch.stack([reply.states["length"]["largest"] for reply in replies])
        read = []
        for reply in replies:
            trees = {name: tree for name, tree in reply.trees.items() if name != "length"}
            read.append(reply.with_trees(trees))
        return read, {"length": {"largest": lengths.max(dim=0).values}}

    def sent_like(self, message):
        return {**message, **self.initial(message["model"], ())}

    def returned_like(self, message):
        return self.sent_like(message)


if __name__ == "__main__":
    config = {"data": {"name": "synthetic", "train": 200}, "federation": {"rounds": 3}}
    config["engine"] = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
    print(fedmuon.run(config, stage=LargestLength()).summary["test_loss"])
