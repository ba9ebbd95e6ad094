"""A section for every federated method by name, from the recipes themselves."""

import inspect
import re

from fedmuon.config.schema import Local, OrthogonalizerTable
from fedmuon.core.choices import NAMES, PRIVATE
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.recipes import RECIPES, make_recipe

ALONE = ("sgd", "normalized-sgd", "adamw", "muon")  # optimizers of one client
EXAMPLES = {"fedper": {"personal": "head.*"}}  # keys that a method needs
FORMULA, ARGUMENTS = "<-", "Args:"


def methods() -> str:
    """The methods in the order of `fedmuon list optimizers`."""
    names = [name for name in NAMES["local.recipe"] if name not in (*PRIVATE, *ALONE)]
    return "\n\n".join(section(name) for name in names)


def made(name: str) -> Recipe:
    """The recipe of that name."""
    local = Local.model_validate({"recipe": name, **EXAMPLES.get(name, {})})
    return make_recipe(local, OrthogonalizerTable(), clients=20)


def section(name: str) -> str:
    """What a method computes, what it keeps where, and what a round of it sends."""
    function, keys = RECIPES[name]
    recipe = made(name)
    text = inspect.getdoc(inspect.unwrap(function)) or ""
    head, *parts = re.split(r"\n\n", text)
    formula = [one for one in parts if FORMULA in one and not one.startswith(ARGUMENTS)]
    source = next((one for one in parts if "Source:" in one or "Guarantee" in one), "")
    said = re.sub(r"\s+", " ", source)
    guarantee = re.search(r"Guarantee[^:]*: (.*?)(?: Source:|$)", said)
    cited = re.search(r"Source: (.*)$", said)
    own = recipe.persistent + (("personal",) if recipe.personal else ())
    rows = [
        ("Keys of `[local]`", ", ".join(f"`{one.replace('_', '-')}`" for one in ("lr", *keys))),
        ("Sent to a client", messages(recipe, recipe.sent)),
        ("Sent back", "the direction" if recipe.direction else messages(recipe, recipe.returned)),
        ("Bytes per round", bytes_per_round(recipe)),
        ("Kept by the server", listed(recipe.kept)),
        ("Kept by each client", listed(own)),
        ("Private use", "at client level" if may_be_private(recipe) else why_not_private(recipe)),
        ("Guarantee", guarantee[1].rstrip(".") if guarantee else "see `fedmuon`"),
        ("Source", cited[1].rstrip(".") if cited else "Stability note"),
    ]
    body = "\n\n".join(f"```text\n{one}\n```" for one in formula)
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return f"## {name}\n\n{head}\n\n{body}\n\n| | |\n|---|---|\n{table}"


def messages(recipe: Recipe, states: tuple[str, ...]) -> str:
    """What a message carries beside the model."""
    model = "the model without its personal part" if recipe.personal else "the model"
    return ", ".join(
        [model, *(f"`{one}`" + " as factors" * (one in recipe.codecs) for one in states)]
    )


def bytes_per_round(recipe: Recipe) -> str:
    """The arrays of all messages of a round, to the clients and back, by the page's symbols."""
    states = [*recipe.sent, *recipe.returned]
    factored = sum(one in recipe.codecs for one in states)
    whole = 2 + len(states) - factored
    if factored:
        return f"K b ({whole} P + {factored} F)"
    return f"{whole} K b (P − Z)" if recipe.personal else f"{whole} K b P"


def listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{one}`" for one in names) or "nothing"


def may_be_private(recipe: Recipe) -> bool:
    """Whether client-level privacy covers all that a client releases."""
    return not (recipe.keeps_states or recipe.client or recipe.codecs)


def why_not_private(recipe: Recipe) -> str:
    if recipe.keeps_states:
        return (
            "rejected: no ledger counts the states that stay with a client and depend on its data"
        )
    if recipe.codecs:
        return "rejected: no account covers what compression does to a clipped update"
    return "rejected: clients return what no clipping bounds"
