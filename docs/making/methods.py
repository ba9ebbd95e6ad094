"""Generate one page per federated method, with facts from the code.

The texts come from methods.toml, or from the docstring of the method's function.

Run `make reference` to write the pages to docs/reference/methods.
"""

import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.making.papers import table
from fedmuon.config.describe import keys
from fedmuon.config.load import parse
from fedmuon.config.method import Method
from fedmuon.config.methods import (
    BUILT_IN,
    BY_SAMPLES,
    ORTHOGONALIZED,
    PERSONALIZED,
    PRIVATE,
    ROWS,
    function_of,
    has,
    rule_of,
)
from fedmuon.config.schema import Local, OrthogonalizerTable, reads
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.recipes import make_recipe

FOLDER = Path(__file__).resolve().parents[1] / "reference" / "methods"
API = FOLDER.with_name("api.md")
LAST = ".. autofunction:: fedmuon.recipes.as_recipe"  # new functions stand before it
WORDS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("methods.toml").read_text(encoding="utf-8")
)
# Title of a group -> whether a method belongs to it. A method belongs to the first such group.
KINDS: dict[str, Callable[[Method], bool]] = {
    "Private optimizers": lambda row: "private" in row.facts,
    "Centralized optimizers": lambda row: "centralized" in row.facts,
    "Personal models": lambda row: row.name in PERSONALIZED,
    "Muon in a federation": lambda row: "orthogonalizes" in row.facts,
    "FedAvg and its relatives": lambda row: True,
}
# State -> its number of tensors of the model's size, if it is not 1: the moments of AdamW, the
# filtered gradient and the last model of DiSK, and the numbers of the bias correction
TENSORS = {"adamw": 2, "gradient": 2, "orthogonalize": 0}
FIRST = "fedmuon"  # stands first in its group


def _groups() -> dict[str, tuple[str, ...]]:
    """Return the names of the methods in each group, in the order of the page."""
    groups: dict[str, list[str]] = {title: [] for title in reversed(KINDS)}
    for row in ROWS:
        groups[next(title for title, fits in KINDS.items() if fits(row))].append(row.name)
    return {title: (*sorted(names, key=lambda name: name != FIRST),)
            for title, names in groups.items()}  # fmt: skip


GROUPS = _groups()
SHARED = ("recipe", "steps", "batch", "schedule")  # keys of [local] that every method reads
EXAMPLES: dict[str, dict[str, Any]] = {
    "fedper": {"personal": "head.*"},
    "disk-sgd": {}, "disk-adam": {}, "disk-muon": {}, "disk-muonbc": {},
}  # fmt: skip
IN_LOOPS = {  # private method -> its own class for a training loop; the others use `Private`
    "dp-sgd": "DPSGD", "dp-adam": "DPAdam", "dp-muon": "DPMuon", "dp-muonbc": "DPMuonBC",
    "dp-muon-im": "DPMuonIM",
}  # fmt: skip
# A model with one adapter, for the examples of methods that need adapters
ADAPTER = """from torch import nn

factors = {"lora_A": nn.Linear(20, 2, bias=False), "lora_B": nn.Linear(2, 4, bias=False)}
model = nn.Sequential()
for name, factor in factors.items():
    model.add_module(name, factor)
"""
HEAD = ("method", "in short", "average", "certificate", "private use", "bytes per round")


def methods() -> str:
    """Return tables of the methods by group, with links to their pages."""
    parts = []
    for title, names in GROUPS.items():
        rows = [
            [
                f"[{words_of(name)['title']}](methods/{name}.md)<br>`{name}`",
                BUILT_IN[name].summary,
                {"plain mean": "plain", "mean by samples": "by samples"}.get(
                    rule_of(name), rule_of(name)
                ),
                "yes" if BUILT_IN[name].certificate else "no",
                private_use(name, made(name)).partition(":")[0],
                bytes_per_round(name, made(name)),
            ]
            for name in names
        ]
        parts.append(f"### {title}\n\n{table(HEAD, rows)}")
    return "\n\n".join(parts)


def made(name: str) -> Recipe:
    """Return the method with this name."""
    local = Local.model_validate({"recipe": name, **EXAMPLES.get(name, {})})
    return make_recipe(local, OrthogonalizerTable(), clients=20)


def words_of(name: str) -> dict[str, str]:
    """Return the texts of a method's page: those in methods.toml, or parts of the docstring."""
    if name in WORDS:
        return WORDS[name]
    doc = inspect.getdoc(function_of(BUILT_IN[name])) or ""
    head, _, rest = doc.partition("\n\n")
    title, colon, summary = " ".join(head.split()).partition(": ")
    update = re.split(r"^(?:State|Args|Returns|Raises|Example):", rest, flags=re.MULTILINE)[0]
    source = re.search(r"Source:\s+(.+?)(?:\n\n|\Z)", rest, re.DOTALL)
    return {
        "title": title if colon else name,
        "what": f"{summary[0].upper()}{summary[1:]}" if colon else title,
        "update": update.strip("\n"),
        "source": " ".join(source[1].split()).removesuffix(".") if source else "none",
        "example": "lr = 0.1",
    }


def method(name: str) -> str:
    """Return the part of a method's page between its title and its example."""
    words, recipe = words_of(name), made(name)
    update = f"```text\nclient:  {words.get('client')}\nserver:  {words.get('server')}\n```"
    own = recipe.persistent + (("personal",) if recipe.personal else ())
    gossips = has(name, "gossip")
    facts = [
        ("Name in a config", f'`local.recipe = "{name}"`'),
        ("In Python", in_python(name)),
        *exchanged(name, recipe),
        ("Bytes per round", bytes_per_round(name, recipe)),
        ("Average", average(name)),
        ("Stored by the server", past_models(name, listed(recipe.kept))),
        ("Stored by each client", "the model, the tracker and " * gossips + listed(own)),
        ("Certificate", certificate(name)),
        ("Private use", private_use(name, recipe)),
        ("Reference", words["source"]),
    ]
    return "\n\n".join([
        words["what"],
        "## Update",
        words.get("update", update),
        "The [list of methods](../methods.md#symbols) explains the symbols.",
        *(["## When to use it", words["when"]] if "when" in words else []),
        "## Facts",
        table(("", ""), facts),
        "## Keys",
        key_table(name),
    ])  # fmt: skip


def in_python(name: str) -> str:
    """Return a text that shows how to use the method in Python."""
    if name in PRIVATE:
        own = IN_LOOPS.get(name, "Private")
        return f"its name in a config, or `fedmuon.optim.{own}` in your own training loop"
    return f"`fedmuon.recipes.{BUILT_IN[name].make.partition(':')[2]}`"


def key_table(name: str) -> str:
    """Return a table of the keys in [local] that affect the method, with their defaults."""
    muon = name in ORTHOGONALIZED
    tables: dict[str, Any] = {"local": {"recipe": name, **EXAMPLES.get(name, {})}}
    if muon or name == "fedper":
        tables["task"] = {"name": "network", "model": "mlp"}
    if name in PRIVATE:
        tables["privacy"] = {"noise": 1.0}
    config = parse(tables)
    rows = [
        [f"`{one.whole}`", f"`{one.default}`", one.what]
        for one in keys("local")
        if one.name not in SHARED and reads(config, one.whole)
    ]
    rows += [
        [f"`local.options.{option}`", f"`{default}`", what]
        for option, (default, what) in BUILT_IN[name].options.items()
    ]
    also = (
        "Like all methods, this method also uses `local.steps`, `local.batch` and `local.schedule`"
    )
    others = ["`[orthogonalizer]`"] * muon + ["`[privacy]`"] * (name in PRIVATE)
    also += f", and the table{'s' * (len(others) > 1)} {' and '.join(others)}" if others else ""
    said = table(("key", "default", "what it is"), rows)
    return f"{said}\n\n{also}. [The config page](../../config.md) lists all values and conditions."


def certificate(name: str) -> str:
    """Return a text that says whether the theory covers the method."""
    kind = BUILT_IN[name].certificate
    if kind == "gradients":
        return "yes: [stability](../../concepts/stability.md), with L = 1"
    if kind is not None:
        return (
            "yes, with an orthogonalizer that has a Lipschitz constant: "
            "[stability](../../concepts/stability.md)"
        )
    if name in PRIVATE:
        return "no: the theory does not cover clipping and random lots"
    return "no certificate is known, but you can measure neighbours"


def average(name: str) -> str:
    """Return which average of the replies the method takes by default, and the source."""
    if has(name, "gossip"):
        return "over the neighbours of a node, with the weights wᵢⱼ of the graph"
    if has(name, "votes"):
        return "none: each client has one vote, and the majority decides"
    if name in BY_SAMPLES:
        return f"weighted by samples, nᵢ / Σ nⱼ over the clients of a round ({BY_SAMPLES[name]})"
    return "plain mean, weight 1/K per client"


def exchanged(name: str, recipe: Recipe) -> list[tuple[str, str]]:
    """Return the rows that say what messages contain."""
    if has(name, "gossip"):
        whole = "the tracker with the change of the momentum, and the model after the step"
        return [("Sent to each neighbour", whole)]
    back = "the direction" if recipe.direction else messages(recipe, recipe.returned)
    if has(name, "votes"):
        back = "the signs of the direction of each matrix, and the direction of other parameters"
    rows = [("Sent to a client", messages(recipe, recipe.sent)), ("Sent back", back)]
    return [(title, past_models(name, text)) for title, text in rows]


def past_models(name: str, text: str) -> str:
    """Return a text that calls the state of inner momentum, `gradient`, the past models."""
    return text.replace("`gradient`", "the s past models") if has(name, "inner momentum") else text


def messages(recipe: Recipe, states: tuple[str, ...]) -> str:
    """Return the names of everything that a message contains: the model and the given states."""
    model = "the model without its personal part" if recipe.personal else "the model"
    return ", ".join(
        [model, *(f"`{one}`" + " as factors" * (one in recipe.codecs) for one in states)]
    )


def bytes_per_round(name: str, recipe: Recipe) -> str:
    """Return a formula for the bytes of one round.

    It is the sum over all messages in both directions, without single numbers such as step counts.
    """
    if has(name, "gossip"):
        return "2 N b P · neighbours of a node"
    if has(name, "votes"):
        return "K b P + K P / 8 (matrices)"
    if has(name, "inner momentum"):  # the default has one past model
        return "(4 + 2s) K b P with s past models"
    states = [*recipe.sent, *recipe.returned]
    factored = sum(one in recipe.codecs for one in states)
    whole = 2 - factored + sum(TENSORS.get(one, 1) for one in states)
    if factored:
        return f"K b ({whole} P + {factored} F)"
    return f"{whole} K b (P − Z)" if recipe.personal else f"{whole} K b P"


def listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{one}`" for one in names) or "nothing"


def private_use(name: str, recipe: Recipe) -> str:
    """Return the privacy unit that the method can protect, or the reason why there is none."""
    if name in PRIVATE:
        return "examples: each step releases a clipped sum with noise"
    if recipe.keeps_states:
        return (
            "no: clients store states that depend on their data, and no ledger counts these states"
        )
    if recipe.codecs:
        return "no: no accountant covers the effect of compression on a clipped update"
    if recipe.client:
        return "no: clients return results that clipping does not bound"
    return 'clients: with `privacy.level = "client"`'


def page(name: str) -> str:
    """Return the text of a method's page: title, placeholder for the facts, and example."""
    words = words_of(name)
    local = f'"recipe": "{name}"'
    for pair in words["example"].split(", "):
        key, value = pair.split(" = ")
        local += f', "{key}": {value}'
    tables = ['"data": {"name": "synthetic", "train": 400}']
    if name == "fedper":
        tables.append('"task": {"name": "network", "model": "mlp"}')
    if name in PRIVATE:
        tables.append('"privacy": {"noise": 2.0, "lot": 8.0}')
    tables.append('"federation": {"rounds": 3}')
    lines = "".join(f"    {one},\n" for one in tables)
    adapted = "adapters" in BUILT_IN[name].facts
    model = ADAPTER if adapted else ""
    return (
        f"# {words['title']}\n\n<!-- made: method {name} -->\n*On the site, this part has the "
        "update, the facts and the keys of the method. Run `make docs` and open "
        f"`build/docs/reference/methods/{name}.html`.*\n\n## Example\n\n"
        f"```python\nimport fedmuon\n{model}\ntables = {{\n{lines}}}\nlocal = {{{local}}}\n"
        f'fedmuon.run(tables | {{"local": local}}{", task=model" * adapted}).summary["accuracy"]\n'
        "```\n"
    )


def write() -> None:
    """Write the file of every method's page, and list new functions in the API reference."""
    FOLDER.mkdir(exist_ok=True)
    for name in BUILT_IN:
        (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")
    API.write_text(with_functions(API.read_text(encoding="utf-8")), encoding="utf-8")


def with_functions(text: str) -> str:
    """Return the API reference with a line for each method's function.

    The lines that it has stay where they are.
    """
    functions = dict.fromkeys(
        in_python(name).strip("`") for name in BUILT_IN if name not in PRIVATE
    )
    new = [f".. autofunction:: {function}" for function in functions]
    lines = [line for line in new if f"{line}\n" not in text]
    return text.replace(LAST, "".join(f"{line}\n" for line in lines) + LAST, 1)


if __name__ == "__main__":
    write()
