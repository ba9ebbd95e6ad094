"""The pages of the methods: bytes are those of a run, and words fit methods with other messages."""

import re
from typing import Any

import pytest
from adapted import adapted

import fedmuon
import fedmuon.optim
from docs.making import methods
from fedmuon.config.methods import BUILT_IN, PRIVATE, has

OPTIONS = {"fedmuon-svd": {"rank": 1}, "fedper": {"personal": "head.*"}}


def rows(name: str) -> dict[str, str]:
    return dict(re.findall(r"\| ([^|]+) \| ([^|\n]+) \|", methods.method(name)))


@pytest.mark.parametrize("name", BUILT_IN)
def test_bytes_per_round_are_those_of_a_run(name: str) -> None:
    tables: dict[str, Any] = {
        "data": {"name": "synthetic", "train": 80, "test": 20, "minimum": 1, "dimension": 40},
        "federation": {"clients": 6, "per-round": 2, "rounds": 1},
        "local": {"recipe": name, "steps": 1, **OPTIONS.get(name, {})},
    }
    task = adapted() if name == "lora-muon" else None
    if name == "lora-muon":
        tables["data"] |= {"dimension": 7, "classes": 3}
    if name == "fedper":
        tables["task"] = {"name": "network", "model": "mlp"}
    if name in PRIVATE:
        tables["privacy"] = {"noise": 2.0, "lot": 4.0}
    if has(name, "inner momentum"):
        tables["privacy"] = tables["privacy"] | {"inner-weights": "0.4, 0.3, 0.3"}
    if has(name, "gossip"):
        del tables["federation"]["per-round"]
    run = fedmuon.run(tables, task=task)
    sent = sum(run.rounds[0][key] for key in ("bytes_down", "bytes_up"))
    personal = sum(value.numel() for one, value in run.model.items() if one.startswith("head."))
    values = {
        "P": sum(value.numel() for value in run.model.values()),
        "Z": personal if name == "fedper" else 0,
        "F": 40 + 4,  # of the matrix [40, 4]
        **{"K": 2, "N": 6, "b": 4, "s": 2, "neighbours": 2},
    }
    formula = rows(name)["Bytes per round"].replace("−", "-").replace("·", "*")
    formula = re.sub(r" of a node| with s past models| \(matrices\)", "", formula)
    formula = re.sub(r"(\d)(s)", r"\1 * \2", formula)
    formula = re.sub(r"(?<=[\w)]) +(?=[\w(])", " * ", formula)
    assert 0 <= sent - eval(formula, {}, values) <= 128, formula  # step counts and other numbers


def test_methods_without_a_mean_on_a_server_say_so() -> None:
    assert rows("sign-muon")["Average"].startswith("none: each client has one vote")
    assert rows("demuon")["Average"].endswith("weights wᵢⱼ of the graph")
    assert "Sent to each neighbour" in rows("demuon") and "Sent back" not in rows("demuon")
    assert "`gradient`" not in methods.method("dp-muon-im")
    table = methods.methods()
    assert "| majority of the votes |" in table and "| weights of the graph |" in table


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_method_names_its_class_for_a_training_loop(name: str) -> None:
    (found,) = re.findall(r"`fedmuon\.optim\.(\w+)`", rows(name)["In Python"])
    assert hasattr(fedmuon.optim, found)
    assert (found == "Private") == name.startswith("disk-")
