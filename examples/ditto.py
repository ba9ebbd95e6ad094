"""Ditto against one global and purely local models (Li et al. 2021): `ditto.py [inline | ray]`."""

import sys

import fedmuon

CONFIG = {
    "data": {"name": "digits", "train": 800, "test": 200, "client-test": 0.3, "alpha": 0.2},
    "federation": {"clients": 20, "per-round": 10, "rounds": 40},
    "local": {"recipe": "ditto", "lr": 2.0, "steps": 5, "batch": 10},
    "engine": {"name": (*sys.argv, "inline")[1], "dtype": "float64"},
}


def tested(weight, what="personal_"):
    config = {**CONFIG, "local": {**CONFIG["local"], "personal-weight": weight}}
    found = fedmuon.run(config).summary
    mean, deviation = (found[f"client_test_{what}accuracy{part}"] for part in ("", "_std"))
    return f"{mean:.2f} (SD over clients {deviation:.2f})"


if __name__ == "__main__":
    print(f"global {tested(0.03, '')}, local {tested(0.0)}, Ditto {tested(0.03)}")
