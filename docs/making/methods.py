"""A section for every federated method by name, from the recipes themselves."""

import inspect
import re

from fedmuon.config.schema import Local, OrthogonalizerTable
from fedmuon.core.choices import NAMES, PRIVATE
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.recipes import RECIPES, make_recipe

ALONE = ("sgd", "normalized-sgd", "adamw", "muon")  # optimizers of one client


def methods() -> str:
    """The methods in the order of `fedmuon list recipes`."""
    names = [name for name in NAMES["local.recipe"] if name not in (*PRIVATE, *ALONE)]
    return "\n\n".join(section(name) for name in names)


def section(name: str) -> str:
    """What a method computes, what it keeps where, and what a round of it sends."""
    function, keys = RECIPES[name]
    made = make_recipe(Local(recipe=name), OrthogonalizerTable(), clients=20)
    text = inspect.getdoc(inspect.unwrap(function)) or ""
    head, *parts = re.split(r"\n\n", text)
    formula = [one for one in parts if "<-" in one and not one.startswith("Args:")]
    source = next((one for one in parts if "Source:" in one or "Guarantee" in one), "")
    said = re.sub(r"\s+", " ", source)
    guarantee = re.search(r"Guarantee[^:]*: (.*?)(?: Source:|$)", said)
    cited = re.search(r"Source: (.*)$", said)
    rows = [
        ("Keys of `[local]`", ", ".join(f"`{one.replace('_', '-')}`" for one in ("lr", *keys))),
        ("Sent to a client, in models", str(1 + len(made.sent))),
        ("Sent back, in models", str(1 + len(made.returned))),
        ("Kept by the server", listed(made.kept)),
        ("Kept by each client", listed(made.persistent + ("personal",) * bool(made.personal))),
        ("At client-level privacy", "yes" if may_be_private(made) else "no: it keeps or returns "
         "what no clipping bounds"),
        ("Guarantee", guarantee[1].rstrip(".") if guarantee else "see `fedmuon`"),
        ("Source", cited[1].rstrip(".") if cited else "Stability note"),
    ]  # fmt: skip
    body = "\n\n".join(f"```text\n{one}\n```" for one in formula)
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return f"## {name}\n\n{head}\n\n{body}\n\n| | |\n|---|---|\n{table}"


def listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{one}`" for one in names) or "nothing"


def may_be_private(recipe: Recipe) -> bool:
    return not recipe.keeps_states and recipe.client is None
