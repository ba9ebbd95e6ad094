"""The base class of stages that write the trees of a message in another form.

A tensor can be compressed or encoded only once, because the second stage would not find the names
and shapes that it expects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedmuon.core.demands import Trait
from fedmuon.core.errors import InputError, object_name
from fedmuon.optim.stage import Stage


@dataclass(frozen=True)
class EncodingStage(Stage):
    """A stage that encodes trees before they are sent, and decodes them afterwards.

    `facts` says what compression and privacy must know: by default, that states are encoded.
    """

    facts = (Trait.ENCODES_STATES,)
    exact = False  # decoded trees are equal only up to rounding

    def require(self, recipe: Any) -> None:
        """Raise an error if another stage compresses or encodes the same messages."""
        require_encoded_once(recipe.stages)


def require_encoded_once(stages: Sequence[Stage]) -> None:
    """Raise an error if two stages compress or encode the same tensors."""
    compressing = (Trait.COMPRESSES_REPLIES, Trait.COMPRESSES_MODEL)
    encoding = {Trait.ENCODES_STATES, Trait.SENDS_VARIABLES, Trait.VARIES_RANKS}
    for fact in compressing:
        each = [stage for stage in stages if {fact, *encoding} & {*stage.facts}]
        if len(each) > 1:
            names = " and ".join(object_name(vars(stage).get("stage", stage)) for stage in each)
            raise InputError(
                f"the stages {names} of the recipe change the same messages, but messages can be "
                "compressed or encoded only once. Leave out one of them."
            )
