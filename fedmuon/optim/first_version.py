"""Arguments and attributes of `Recipe` in version 1.0 that stages have replaced since.

They are accepted until version 2.0. An argument gives a `DeprecationWarning`.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fedmuon.core.errors import InputError, shown
from fedmuon.optim.client_privacy import ClientPrivacy
from fedmuon.optim.compression import Compression
from fedmuon.optim.low_rank import EncodedStates
from fedmuon.optim.personal_parameters import PersonalParameters
from fedmuon.optim.stage import Stage

# Argument -> the class of the stage that has replaced it, and the value without such a stage.
STAGES: Mapping[str, tuple[type[Stage], Any]] = {
    "personal": (PersonalParameters, ()),
    "client_level": (ClientPrivacy, None),
    "codecs": (EncodedStates, {}),
    "compression": (Compression, None),
}
INSTEAD = {  # argument -> what to use instead
    name: f"stages=(...) with fedmuon.stages.{kind.__name__}" for name, (kind, _) in STAGES.items()
} | {"client_level": "[privacy] level = 'client' in the config"}
FIELDS = (
    *("chain", "server", "sent", "returned", "kept", "mechanism", "aggregate", "scaled", "steps"),
    *("thread_safe", "client_level", "persistent", "client", "counted", "initial", "personal"),
    *("codecs", "clients", "compression", "direction"),
)


def attribute(recipe: Any, name: str) -> Any:
    """Return the value that an attribute of version 1.0 has for this recipe."""
    if name == "masked":
        level = attribute(recipe, "client_level")
        return level is not None and level.shared
    kind, nothing = STAGES[name]
    stage: Any = next((stage for stage in recipe.stages if isinstance(stage, kind)), None)
    if stage is None:
        return nothing
    of_stage = {"personal": "patterns", "client_level": "level", "codecs": "codecs"}
    return getattr(stage, of_stage[name]) if name in of_stage else stage


def with_arguments(
    stages: Sequence[Stage], returned: tuple[str, ...], arguments: Mapping[str, Any]
) -> Sequence[Stage]:
    """Return the stages of a recipe that was created with arguments of version 1.0.

    Args:
        stages: The stages that were passed.
        returned: The names of the states that clients return.
        arguments: The arguments of version 1.0. A value replaces the stage of the same kind.
    """
    if not isinstance(stages, tuple | list):
        return stages  # `Recipe` then raises the error about this value
    for name, value in arguments.items():
        kind, nothing = STAGES[name]
        warnings.warn(
            f"the argument `{name}` of fedmuon.Recipe is deprecated. Use {INSTEAD[name]}.",
            DeprecationWarning,
            stacklevel=4,
        )
        stages = [stage for stage in stages if not isinstance(stage, kind)]
        if value is None or value == nothing:
            continue
        if name == "client_level":
            stages = [ClientPrivacy(value, returned), *stages]
        else:
            stages = [*stages, value if name == "compression" else kind(value)]  # type: ignore[call-arg]
    return tuple(stages)


def require_flags(recipe: Any, flags: Mapping[str, Any]) -> None:
    """Warn about the arguments `scaled` and `counted`, which have no effect.

    Raises:
        InputError: If a value is not a boolean, or is True although no rule has the parameter.
    """
    for name, value in flags.items():
        if value is True and not getattr(recipe, name):
            parameter = {"scaled": "factor", "counted": "answered"}[name]
            raise InputError(
                f"{name} of a Recipe is True, but no rule of the recipe has a parameter "
                f"`{parameter}`. Add this parameter to the rule, and leave {name} out."
            )
        if not isinstance(value, bool):
            raise InputError(
                f"{name} of a Recipe is {shown(value)}, but it must be True or False. Leave it out."
            )
        warnings.warn(
            f"the argument `{name}` of fedmuon.Recipe is deprecated and has no effect. Rules "
            "receive `factor` and `answered` if they have parameters with these names.",
            DeprecationWarning,
            stacklevel=4,
        )


def fields(recipe: Any) -> dict[str, Any]:
    """Return the fields of a recipe with the names and in the order of version 1.0.

    Fields that are newer come last. `stages` contains only stages that version 1.0 did not have.
    """
    newer = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    older = {name: getattr(recipe, name) for name in FIELDS}
    newer = {name: value for name, value in newer.items() if name not in older}
    kinds = tuple(kind for kind, _ in STAGES.values())
    newer["stages"] = tuple(stage for stage in recipe.stages if not isinstance(stage, kinds))
    return older | newer
