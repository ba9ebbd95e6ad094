"""The reference of federated methods: no section lacks a row, and bytes are those of messages."""

import re
from typing import Any

import pytest
from adapted import adapted
from compared import with_module
from conftest import small

from docs.making.methods import methods
from fedmuon.federated.build import build_experiment
from fedmuon.federated.rounds import begin, broadcast, client_updates, received_message
from fedmuon.federated.wire import named

SECTIONS = dict(re.findall(r"## ([\w-]+)\n(.*?)(?=\n## |\Z)", methods(), re.DOTALL))
ROWS = (
    *("Keys of `[local]`", "Sent to a client", "Sent back", "Bytes per round"),
    *("Kept by the server", "Kept by each client", "Private use", "Guarantee", "Source"),
)
OPTIONS = {"fedmuon-svd": {"rank": 1}, "fedper": {"personal": "head.*"}}


def rows(name: str) -> dict[str, str]:
    return dict(re.findall(r"\| ([^|]+) \| ([^|\n]+) \|", SECTIONS[name]))


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_a_formula_and_all_rows(name: str) -> None:
    found = rows(name)
    assert tuple(found) == ROWS
    assert "```text\n" in SECTIONS[name] and all(len(one) > 2 for one in found.values())
    # Only methods with one recursion may send readers there.
    assert found["Guarantee"] != "see `fedmuon`" or name == "local-muon"
    assert found["Private use"].startswith(("at client level", "rejected: "))


@pytest.mark.parametrize("name", SECTIONS)
def test_bytes_per_round_are_those_of_the_messages(name: str) -> None:
    tables: dict[str, Any] = {"local": {"recipe": name, **OPTIONS.get(name, {})}}
    if name == "fedper":
        tables["data"] = {"name": "digits", "train": 60, "test": 20}
        tables["task"] = {"name": "network", "model": "mlp"}
    config = small({}, **tables)
    if name == "lora-muon":
        tables["task"] = {"name": "given"}
        config = with_module(small({}, **tables), adapted())
    made = build_experiment(config)
    state = begin(made.recipe, made.task, 0)
    sent, received = broadcast(made.recipe, state), received_message(made.recipe, state)
    (reply,) = client_updates(made.recipe, made.task, made.plan, [(1, made.shards[1])], received)
    counts = {one: value.numel() for one, value in state.params.items()}
    values = {
        "P": sum(counts.values()),
        "Z": sum(count for one, count in counts.items() if made.recipe.is_personal(one)),
        "F": 7 + 3,  # of a matrix [7, 3]
    }
    formula = rows(name)["Bytes per round"].replace("K b", "").replace("−", "-")
    for symbol, value in values.items():
        formula = re.sub(rf"(\d*) *\b{symbol}\b", rf"(\g<1> or 1) * {value}", formula)
    formula = re.sub(r"\( or 1\)", "1", formula)
    formula = re.sub(r"(\d) +\(", r"\1 * (", formula)
    tensors = [one for y in (sent, reply) for one in named(y.params, y.states).values()]
    assert eval(formula) == sum(one.numel() for one in tensors), formula
