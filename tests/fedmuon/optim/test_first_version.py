"""Recipes that are written for version 1.0: arguments and attributes that stages have replaced."""

import dataclasses
from typing import Any

import pytest

from fedmuon.core.errors import InputError
from fedmuon.optim import recipes
from fedmuon.optim.client_privacy import ClientPrivacy
from fedmuon.optim.compression import Compression, top_k
from fedmuon.optim.low_rank import EncodedStates, low_rank
from fedmuon.optim.personal_parameters import PersonalParameters
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import Stage
from fedmuon.privacy.mechanisms.client_level import ClientLevel

LEVEL = ClientLevel(1.0, 2.0, 5, 10)
CODEC = low_rank(1)
COMPRESSION = Compression(top_k(0.5))
ARGUMENTS = {
    "personal": (("head.*",), recipes.fedavg(0.1), PersonalParameters(("head.*",))),
    "client_level": (LEVEL, recipes.fedmuon(0.1), ClientPrivacy(LEVEL, ("momentum",))),
    "codecs": ({"momentum": CODEC}, recipes.fedmuon(0.1), EncodedStates({"momentum": CODEC})),
    "compression": (COMPRESSION, recipes.fedavg(0.1), COMPRESSION),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_becomes_a_stage_and_an_attribute_reads_it(name: str) -> None:
    value, plain, stage = ARGUMENTS[name]
    fields = {
        field.name: getattr(plain, field.name)
        for field in dataclasses.fields(plain)
        if field.name != "stages"
    }
    with pytest.deprecated_call(match=f"the argument `{name}`"):
        created = Recipe(**fields, **{name: value})
    with pytest.deprecated_call(match=f"the argument `{name}`"):
        replaced = dataclasses.replace(plain, **{name: value})
    assert created.stages == replaced.stages == (stage,)
    assert getattr(created, name) == value
    assert not getattr(plain, name)  # the control
    with pytest.deprecated_call():
        removed = dataclasses.replace(created, **{name: type(value)() if name != "client_level" and
                                                  name != "compression" else None})  # fmt: skip
    assert removed.stages == ()


def test_a_reply_passes_privacy_before_compression() -> None:
    with pytest.deprecated_call():
        both = dataclasses.replace(recipes.fedavg(0.1), compression=COMPRESSION, client_level=LEVEL)
    assert [type(stage) for stage in both.stages] == [ClientPrivacy, Compression]
    assert both.private and not both.masked


def test_unknown_arguments_and_attributes_are_still_errors() -> None:
    plain: Any = recipes.fedavg(0.1)
    with pytest.raises(TypeError, match="codec"):
        dataclasses.replace(plain, codec={})
    with pytest.raises(AttributeError, match="has no attribute 'codec'"):
        plain.codec  # noqa: B018
    with pytest.raises(InputError, match="use this name for the model"):
        dataclasses.replace(plain, sent=("model",), kept=("model",))


def test_a_rule_receives_the_facts_that_it_names() -> None:
    asked: dict[str, Any] = {}

    def rule(old: Any, mean: Any, states: Any, factor: float, answered: Any) -> Any:
        asked.update(factor=factor, answered=answered)
        return mean, states

    plain = recipes.fedavg(0.1)
    asking = dataclasses.replace(plain, server=rule)
    assert asking.scaled and asking.counted and not asking.knows_samples
    assert not (plain.scaled or plain.counted)  # the control
    asking.apply_server({}, {}, {}, 0.5, lambda: [(1.0, 2)])
    assert asked == {"factor": 0.5, "answered": [(1.0, 2)]}
    for name in ("scaled", "counted"):
        with pytest.deprecated_call(match="has no effect"):
            assert dataclasses.replace(asking, **{name: True}).scaled
        with pytest.raises(InputError, match=f"{name} of a Recipe is 3"):
            dataclasses.replace(asking, **{name: 3})
        with pytest.raises(InputError, match=f"{name} of a Recipe is True, but no rule"):
            dataclasses.replace(plain, **{name: True})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stages": None, "personal": ("head.*",)}, "stages of a Recipe is None"),
    ({"stages": Stage(), "personal": ("head.*",)}, "stages of a Recipe is .*Stage"),
    ({"client_level": 3}, "client_level of a Recipe is 3, .* Leave it out"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
@pytest.mark.filterwarnings("ignore:the argument")
def test_values_of_the_wrong_type_are_named(arguments: dict[str, Any], message: str) -> None:
    plain = recipes.fedavg(0.1)
    with pytest.raises(InputError, match=message):
        Recipe(plain.chain, plain.server, **arguments)
    sound = {"stages": (Stage(),), "personal": ("head.*",)}  # the control
    assert len(Recipe(plain.chain, plain.server, **sound).stages) == 2


def test_masked_can_be_read_but_is_no_argument() -> None:
    plain: Any = recipes.fedavg(0.1)
    arguments: dict[str, Any] = {"masked": True}
    with pytest.raises(TypeError, match="unexpected keyword argument 'masked'"):
        Recipe(plain.chain, plain.server, **arguments)
    assert plain.masked is False
