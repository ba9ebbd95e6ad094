"""Early stopping and your own callback: `callbacks.py [inline | ray]`."""

import sys

from fedmuon import callbacks, run

CONFIG = {
    "data": {"name": "digits", "train": 800, "test": 400},
    "local": {"lr": 20.0, "steps": 2},
    "engine": {"name": (*sys.argv, "inline")[1], "dtype": "float64"},
    "output": {"evaluate-every": 1},
}


class Losses(callbacks.Callback):
    def __init__(self):
        self.losses = []

    def on_round(self, record, state):
        self.losses.append(round(record["test_loss"], 3))


if __name__ == "__main__":
    used = [Losses(), callbacks.EarlyStopping(patience=2)]
    print("stopped:", run(CONFIG, callbacks=used).summary.get("stopped"), used[0].losses)
