"""A row says of a method what its function does, and the lists that follow are those of before."""

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from fedmuon.config.method import FACTS, by_parameter, mismatches
from fedmuon.config.methods import (
    BUILT_IN,
    BY_SAMPLES,
    METHODS,
    ORTHOGONALIZED,
    PERSONALIZED,
    PRIVATE,
    ROWS,
    UNCERTIFIED,
    average_of,
    certified,
    function_of,
    has,
    using,
)
from fedmuon.config.names import COMPRESSORS, DOWNLINK, NAMES, OPTIONS
from fedmuon.config.schema import FIELDS, NEEDS, Compressor, Downlink, Local, OrthogonalizerTable
from fedmuon.core.choices import (
    CHOICES,
    DIALOGUES,
    DOCUMENTS,
    GLUE,
    OWN_FILES,
    TABLES,
    TEXTS,
    with_fact,
)
from fedmuon.core.choices import using as choices_using
from fedmuon.data.partition import PARTITIONS
from fedmuon.data.readers import READERS
from fedmuon.experiments import citing
from fedmuon.experiments.stability.certificates import MAPLESS, MUON
from fedmuon.optim.aggregators import AGGREGATORS
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.recipes import make_recipe
from fedmuon.optim.schedules import SCHEDULES
from fedmuon.runs.callbacks import CALLBACKS

# The methods of before, in the order of their list. Later methods are only in the table.
THEN = (
    *("fedavg", "fedavgm", "local-muon", "fedmuon", "fedmuon-aligned", "fedmuon-corrected"),
    *(
        "fedmuon-svd",
        "ef21-muon",
        "ringmaster",
        "ringmaster-free",
        "muloco",
        "fedprox",
        "fedper",
        "ditto",
        "fednova",
        "scaffold",
    ),
    *("fedadam", "fedyogi", "fedadagrad", "local-adamw", "diloco", "sgd", "normalized-sgd"),
    *("adamw", "muon", "dp-sgd", "dp-adam", "dp-muon", "dp-muonbc", "disk-sgd", "disk-adam"),
    *("disk-muon", "disk-muonbc"),
)
FREE = ("ringmaster", "ringmaster-free")
SERVER = ("fedadam", "fedyogi", "fedadagrad")
PLAIN = ("fedavg", "fedavgm", "fedprox", "fedper", "ditto", "fednova", *SERVER)
NO_MOMENTUM = (
    *PLAIN,
    "ringmaster-free",
    "scaffold",
    "adamw",
    "local-adamw",
    "diloco",
    "dp-adam",
    "disk-adam",
)
MODEL_ONLY = (*PLAIN, "local-muon", "ef21-muon", *FREE, "muloco", "local-adamw", "diloco")
OF_MUON = ("local-muon", "fedmuon", "fedmuon-aligned", "fedmuon-corrected", "fedmuon-svd",
           "ef21-muon", *FREE, "muloco", "muon", "dp-muon", "dp-muonbc", "disk-muon",
           "disk-muonbc")  # fmt: skip
OF_PRIVACY = ("dp-sgd", "dp-adam", "dp-muon", "dp-muonbc", "disk-sgd", "disk-adam", "disk-muon",
              "disk-muonbc")  # fmt: skip


def without(*names: str) -> tuple[str, ...]:
    return tuple(name for name in THEN if name not in names)


def of_then(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in THEN)


# Condition in [local], and the names that met it before the rows, in the order of messages.
FORMER: dict[str, tuple[str, ...]] = {
    "local.momentum": without(*NO_MOMENTUM),
    "local.momentum-form": without(*NO_MOMENTUM, "ringmaster"),
    "local.epochs": without(*OF_PRIVACY, "fedmuon-aligned"),
    "local.renormalize": tuple(name for name in OF_MUON if name not in ("ef21-muon", *FREE)),
    "local.alignment": ("fedmuon-aligned",),
    "local.server-momentum": ("fedavgm", "fedadam", "fedyogi", "diloco", "muloco"),
    "local.server-lr": (*SERVER, "scaffold", "diloco", "muloco"),
    "local.server-memory": ("fedadam", "fedyogi"),
    "local.tau": SERVER,
    "local.proximal": ("fedprox",),
    "local.personal": ("fedper",),
    "local.personal-weight": ("ditto",),
    "local.rank": ("fedmuon-svd",),
    "local.route": OF_MUON,
    "local.muon": OF_MUON,
    "local.qkv": OF_MUON,
    "local.aux": OF_MUON,
    "local.aux-lr": OF_MUON,
    "local.adjust": OF_MUON,
    "orthogonalizer.name": OF_MUON,
    "privacy.clipping": OF_PRIVACY,
    "privacy.kappa": OF_PRIVACY[4:],
    "privacy.probes": ("dp-muonbc", "disk-muonbc"),
    "privacy.state-weight": without(*MODEL_ONLY),
    "output.checkpoint-every": without(*OF_PRIVACY),
    "output.fine-tune": without("ditto", "ef21-muon", *FREE),
}


def test_the_conditions_are_those_of_the_former_lists() -> None:
    for key, names in FORMER.items():
        table, _, name = key.partition(".")
        need = [need for need in NEEDS[table][name] if need.key == "local.recipe"][-1]
        assert not callable(need.holds) and of_then(need.holds) == names, key
    asked = {
        f"local.{key}"
        for key, needs in NEEDS["local"].items()
        if any(need.key == "local.recipe" for need in needs)
    }
    assert asked == {key for key in FORMER if key.startswith("local.")}


def test_the_tuples_are_those_of_before() -> None:
    assert of_then(NAMES["local.recipe"]) == THEN
    assert of_then(PRIVATE) == OF_PRIVACY and of_then(ORTHOGONALIZED) == OF_MUON
    assert of_then(BY_SAMPLES) == ("fedavg", "fedavgm", "fedprox", "fedper", "fednova")
    assert MUON == ("fedmuon", "muon", "local-muon", "fedmuon-aligned")
    assert MAPLESS == ("fedavg", "fedavgm", "sgd")
    assert of_then(UNCERTIFIED) == ("normalized-sgd", "adamw")
    assert of_then(PERSONALIZED) == ("fedper", "ditto")
    states = [name for name in THEN if has(name, "client states")]
    assert states == ["fedmuon-corrected", "ef21-muon", "fedper", "ditto", "scaffold"]
    jumps = [name for name in THEN if has(name, "no derivative")]
    assert jumps == ["fedyogi", "local-adamw", "diloco", "adamw"]
    assert (TABLES, GLUE) == (("e2e", "dart"), ("sst-2", "mnli", "qnli", "qqp"))
    assert DOCUMENTS == ("text", "bible-kjv", "fortunes", "jsonl") and DIALOGUES == ("jsonl",)
    assert ("pydoc", *DOCUMENTS, *TABLES, *GLUE) == TEXTS
    assert ("idx", *DOCUMENTS, "npz", "csv", "parquet") == OWN_FILES
    assert with_fact("federation.aggregate", "weighted mean") == ("mean", "by-samples")
    random = with_fact("orthogonalizer.name", "draws random numbers")
    assert random == ("gaussian-smoothed-sign", "randomized-polar")


def test_names_agree_with_the_functions_that_they_name() -> None:
    registries = {"federation.aggregate": AGGREGATORS, "federation.partition": PARTITIONS,
                  "local.schedule": SCHEDULES, "output.callback": CALLBACKS}  # fmt: skip
    for key, registry in registries.items():
        plain = {"local.schedule": {"constant", "heavy-tailed"}, "output.callback": {"none"},
                 "federation.partition": {"column"}}.get(key, set())  # fmt: skip
        assert {*NAMES[key]} == {*registry} | plain, key
        for name, options in OPTIONS[key].items():
            taken = inspect.signature(registry[name]).parameters
            assert {*by_parameter(options)} <= {*taken} or "uri" in taken or "project" in taken
    assert {*READERS} <= {*NAMES["data.name"]}
    assert (*COMPRESSORS,) == (*get_args(Downlink), "power") and {*COMPRESSORS} == {
        *get_args(Compressor)
    }
    assert (*DOWNLINK,) == get_args(Downlink)


@pytest.mark.parametrize("key", [key for key in CHOICES if not key.startswith("compression")])
def test_the_keys_of_a_choice_are_keys_that_it_meets(key: str) -> None:
    """A key is in a row if and only if the schema lets it have an effect with this name."""
    table = {"federation.partition": "data", "data.name": "data", "local.schedule": "local",
             "orthogonalizer.name": "orthogonalizer",
             "federation.adapters": "federation", "attacks.kind": "attacks"}.get(key)  # fmt: skip
    keys = {one for row in CHOICES[key] for one in row.keys}
    assert keys <= {*FIELDS[table or "data"]}
    for one in keys:
        needs = [need for need in NEEDS[table or ""][one] if need.key == key]
        assert {*choices_using(key, one)} == {*needs[-1].holds}, one  # type: ignore[misc]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_keys_of_a_row_are_the_parameters_of_its_function(row: Any) -> None:
    function = function_of(row)
    assert {*row.facts} <= {*FACTS}
    if row.name in PRIVATE:
        assert function.__name__ == "private"
        return
    assert function.__name__ == row.name.replace("-", "_")
    assert [*mismatches(row, function)] == []
    defaults = inspect.signature(function).parameters
    for key in {*row.keys} - {"lr"}:  # AdamW has its own step size
        name = key.replace("-", "_")
        assert defaults[name].default == FIELDS["local"][key].default, key


def test_a_wrong_row_is_seen() -> None:
    row = BUILT_IN["fedprox"]
    function = function_of(row)
    more, less = (replace(row, keys=keys) for keys in ((*row.keys, "tau"), row.keys[:-1]))
    assert [*mismatches(more, function)] == ["has no parameter `tau`"]
    assert [*mismatches(less, function)] == [
        "has the parameter `proximal`, which is neither a key nor an option of its row"
    ]
    turned = replace(row, facts=("orthogonalizes",))
    assert "has no parameter `orthogonalizer`" in [*mismatches(turned, function)]


def made(name: str) -> Recipe:
    local = {"recipe": name, "personal": "head.*", "aux": "adamw"}
    routes = {"weight": 1, "bias": 0} if name in ORTHOGONALIZED else None
    table = Local.model_validate(local)
    return make_recipe(table, OrthogonalizerTable(), clients=20, routed=routes)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_facts_of_a_row_are_true(name: str) -> None:
    recipe, plain = made(name), make_recipe(
        Local.model_validate({"recipe": name, "personal": "head.*"}), OrthogonalizerTable(),
        clients=20,
    )  # fmt: skip
    weight = {"weight": torch.zeros(1, 2, 2)}
    first_state = recipe.chain.links[0].init(weight)
    facts = {
        "private": recipe.mechanism is not None,
        "filtered": recipe.mechanism is not None and "gradient weight" in first_state,
        "inner momentum": recipe.mechanism is not None and "before-1 weight" in first_state,
        "sends states": bool(plain.sent or plain.returned),
        "client states": recipe.keeps_states,
        "server orthogonalizes": recipe.direction,
        "personal parameters": any(map(recipe.is_personal, ["head.weight"])),
        "personal model": "personal" in recipe.persistent,
        "averages second moments": "adamw" in plain.returned,
    }
    for fact, holds in facts.items():
        assert has(name, fact) == holds, fact
    lasting = {link.name for link in recipe.chain.links if link.lasting}
    averaged = bool(lasting) and {*recipe.returned} == lasting and name not in PRIVATE
    assert not has(name, "centralized") or averaged


def test_what_is_no_method_has_no_facts() -> None:
    assert not has("./mine.py:recipe", "private") and "given" not in METHODS
    assert average_of("package.module:recipe") == "mean" and "" not in using("lr")
    assert "fedprox" in using("proximal") and "fedavg" not in using("proximal")
    assert certified("aligned") == ("fedmuon-aligned",) and len(METHODS) >= len(ROWS)


def test_every_reference_of_a_row_is_in_the_bibliography() -> None:
    cites = {cite for row in ROWS for cite in row.cites}
    cites |= {cite for rows in CHOICES.values() for row in rows for cite in row.cites}
    assert cites <= {*citing.entries()}
