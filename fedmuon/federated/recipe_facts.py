"""Facts that a built recipe shows, with its config and task (`core.demands`).

A stage declares its own facts in `Stage.facts`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fedmuon.config.facts import FACTS as CONFIG_FACTS
from fedmuon.config.load import Config
from fedmuon.config.methods import average_of
from fedmuon.config.user_objects import user_objects
from fedmuon.core.choices import named as names_with
from fedmuon.core.demands import Fact, Trait, setting
from fedmuon.optim.aggregator import equal_shares
from fedmuon.optim.chain import PERSONAL
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import Stage
from fedmuon.optim.user_stage import has_custom_stage
from fedmuon.tasks.base import Task

# Aggregates that ignore the numbers of samples
UNWEIGHTED = names_with("federation.aggregate", lambda choice: "weighted mean" not in choice.facts)


@dataclass(frozen=True)
class BuiltRecipe:
    """A recipe, with the config and the task for which it was built, if the task is known.

    `added` are the stages of the recipe that [federation] stage has added.
    """

    config: Config
    recipe: Recipe
    task: Task | None = None
    added: tuple[Stage, ...] = ()

    @property
    def named(self) -> str:
        """The recipe as errors name it."""
        custom = user_objects(self.config).recipe is not None
        return "your recipe" if custom else setting(self.config, "local.recipe")

    @property
    def aggregate(self) -> str:
        """The aggregate as errors name it."""
        brings = takes_own_aggregate(self.config)
        return (
            "the aggregate of your recipe"
            if brings
            else setting(self.config, "federation.aggregate")
        )


def takes_own_aggregate(config: Config) -> bool:
    """Return whether the aggregate of a custom recipe is used.

    The default of the config does not replace it. A config of version 1.0 contains "mean" as its
    default.
    """
    custom = user_objects(config).recipe is not None
    return custom and config.federation.aggregate in ("mean", average_of(config.local.recipe))


Named = Callable[[BuiltRecipe], str]


def of_config(named: Callable[[Config], str]) -> Named:
    """Return a function `named` of a built recipe that looks only at its config."""
    return lambda built: named(built.config)


def if_recipe(holds: Callable[[Recipe], bool]) -> Named:
    """Return the function `named` of a fact or demand about recipes."""
    return lambda built: built.named if holds(built.recipe) else ""


def _if_aggregate(holds: Callable[[BuiltRecipe], bool]) -> Named:
    return lambda built: built.aggregate if holds(built) else ""


def _with_stage(trait: Trait, built: BuiltRecipe) -> str:
    of_recipe = (stage for stage in built.recipe.stages if id(stage) not in map(id, built.added))
    return built.named if any(trait in stage.facts for stage in of_recipe) else ""


def _if_added(holds: Callable[[Stage], bool]) -> Named:
    """Return the function `named` of a fact about the stages of [federation] stage."""
    return lambda built: (
        setting(built.config, "federation.stage") if any(map(holds, built.added)) else ""
    )


def _custom_stage(built: BuiltRecipe) -> str:
    """Return the key or recipe with a custom stage, or ""."""
    if not has_custom_stage(built.recipe):
        return ""
    given = built.config.federation.stage != "none"
    return setting(built.config, "federation.stage") if given else "a stage of your recipe"


def _may_weight_by_size(built: BuiltRecipe) -> bool:
    aggregate = built.recipe.aggregate
    if aggregate.averages or aggregate.shares is equal_shares:  # also of products of adapters
        return False
    return built.config.federation.aggregate not in UNWEIGHTED


FACTS: tuple[Fact[BuiltRecipe], ...] = (
    # The keys that let a client store states give a better advice than the recipe.
    *(
        Fact(fact.trait, of_config(fact.named), fact.fix)
        for fact in CONFIG_FACTS
        if fact.trait is Trait.STORES_CLIENT_STATES
    ),
    Fact(
        Trait.STORES_CLIENT_STATES,
        _if_added(lambda stage: bool(stage.stores)),
        "Leave the stage out",
    ),
    Fact(
        Trait.STORES_CLIENT_STATES,
        if_recipe(lambda recipe: recipe.keeps_states),
        "Choose a recipe without client states, or remove `persistent` and `personal` from yours",
    ),
    Fact(
        Trait.PERSONAL_MODEL,
        if_recipe(lambda recipe: PERSONAL in recipe.persistent),
        "Choose another recipe, such as fedper",
    ),
    Fact(
        Trait.RETURNS_DIRECTIONS,
        if_recipe(lambda recipe: recipe.direction),
        "Choose another recipe, such as fedmuon",
    ),
    Fact(
        Trait.FIXED_STEPS,
        if_recipe(lambda recipe: recipe.steps > 0),
        "Choose a recipe for any number of steps",
    ),
    Fact(
        Trait.CLIENT_RULE,
        if_recipe(lambda recipe: recipe.client is not None),
        "Choose another recipe, such as fedavg, fedadam, local-muon or fedmuon",
    ),
    Fact(
        Trait.COUNTS_STEPS,
        if_recipe(lambda recipe: recipe.counted),
        "Choose another recipe, such as fedavg, fedadam, local-muon or fedmuon",
    ),
    Fact(
        Trait.PRIVATE,
        if_recipe(lambda recipe: recipe.private),
        "Choose a recipe that is not private",
    ),
    Fact(Trait.CUSTOM_STAGE, _custom_stage, "Leave the stage out"),
    *(
        Fact(
            trait, _if_added(lambda stage, trait=trait: trait in stage.facts), "Leave the stage out"
        )
        for trait in Trait
    ),
    *(
        Fact(trait, partial(_with_stage, trait), "Choose a recipe without such a stage")
        for trait in Trait
    ),
    Fact(
        Trait.NOT_PLAIN_MEAN,
        _if_aggregate(lambda built: not built.recipe.aggregate.averages),
        "Set [federation] aggregate = 'mean', and remove the aggregate of your own recipe",
    ),
    Fact(
        Trait.NO_WEIGHTS,
        _if_aggregate(lambda built: built.recipe.aggregate.shares is None),
        "Set [federation] aggregate = 'mean' or 'by-samples'",
    ),
    Fact(Trait.WEIGHTS_BY_SIZE, _if_aggregate(_may_weight_by_size), "Use the plain mean"),
    Fact(
        Trait.DROPOUT,
        lambda built: "the model" if getattr(built.task, "keyed", False) else "",
        "Remove the dropout",
    ),
)
