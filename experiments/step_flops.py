"""The cost of an optimizer step on a model, compared with Table 2 of Nesterov Muon.

The Nesterov Muon paper does not state the shapes of its two models. The shapes in this module are
those of the paper's public code (github.com/Xiaoran-Cheng/muon-randomized-svd). With these shapes
and the conventions below, this module reproduces all fourteen published numbers to the last digit.
We found the conventions of each model by trial:

    both        Embeddings and heads are not orthogonalized. The factorization is counted, although
                the formula of section 2.2 omits it. Per entry, AdamW costs 12 flop, SGD 6 flop and
                Nesterov momentum 2 flop.
    nanoGPT     Q, K, V and O are four square matrices in each of 10 layers (one of 11 layers has no
                attention). The feed-forward layers count as 12 pairs, one of which is padding.
                AdamW with decay costs 14 flop, and acts in every other step of Muon's runs. The
                input embedding is at first tied to the head, and is updated in 522 of 1490 steps.
                Each entry of a matrix costs 14 additional flop, which the paper does not explain
                (the code rescales rows and uses cautious decay).
    CIFAR-10    Filters have the shape [out, 9 in]. The sketch counts l = 138 columns, although the
                matrix has 64 rows and Q is cut to 64. Normalizing a whole weight or momentum costs
                3 flop per entry. Normalizing the sketched matrix costs nothing.

One number remains unexplained: the text of the paper says that the model has 135M parameters. The
518.7M parameters in its table are the parameters that change in an average step, including the
value embeddings and the bigram table (386M).
"""

from dataclasses import replace
from typing import Any

from rich.table import Table

from fedmuon.core.errors import InputError, instead
from fedmuon.experiments.tables import columns
from fedmuon.federated.model_routes import routes
from fedmuon.optim.flops import Part, Rule, Sketch, costs, parts, total
from fedmuon.tasks.models import MODELS, network

OPTIMIZERS = (
    "AdamW",
    "SGD (Nesterov)",
    "Muon (Polyak)",
    "Rand Muon (Polyak)",
    "Muon (Nesterov)",
    "Rand Muon (Nesterov Gaussian)",
    "Rand Muon (Nesterov Kaczmarz)",
)
TABLE_2 = {  # Nesterov Muon: GFLOP per step of these optimizers
    "nanogpt": (7.2621, 3.1123, 2135.5947, 250.8060, 2135.7551, 250.9665, 217.4581),
    "airbench": (0.0237, 0.0118, 14.7920, 8.0723, 14.7960, 8.0763, 7.5373),
}
NOTE = (
    "Nesterov Muon (002) does not state the shapes of its models, so we took them from its "
    "public code. We found its counting conventions by trial. They are listed at the top of "
    "experiments/step_flops.py. The paper calls nanoGPT a model of 135M parameters, but its "
    "table counts 518.7M parameters that change in a step."
)
_COLOUR = ("cifarnet", "wrn-16-2", "wrn-16-4", "vit-small")  # inputs 3 x 32 x 32; others 28 x 28
_COLUMNS = ("products", "QR", "entries", "total", "performed")
_WIDTH, _TOKENS = 768, 50304
_FILTERS = ((64, 24), (64, 64), (256, 64), (256, 256), (256, 256), (256, 256))
_PARTS = {
    # 12 layers; Q, K, V are fused in one parameter; 124M parameters
    "gpt2-small": [
        Part("wte (tied)", (50257, _WIDTH)),
        Part("wpe", (1024, _WIDTH)),
        Part("attn.c_attn", (_WIDTH, 3 * _WIDTH), (3, _WIDTH, _WIDTH), 12),
        Part("attn.c_proj", (_WIDTH, _WIDTH), (1, _WIDTH, _WIDTH), 12),
        Part("mlp.c_fc", (_WIDTH, 4 * _WIDTH), (1, _WIDTH, 4 * _WIDTH), 12),
        Part("mlp.c_proj", (4 * _WIDTH, _WIDTH), (1, 4 * _WIDTH, _WIDTH), 12),
        Part("biases", (9 * _WIDTH,), copies=12),
        Part("norms", (2 * _WIDTH,), copies=25),
    ],
    # The language model of Nesterov Muon: 11 layers, one without attention
    "nanogpt": [
        Part("attn", (_WIDTH, _WIDTH), (1, _WIDTH, _WIDTH), 40),
        Part("mlp", (4 * _WIDTH, _WIDTH), (1, 4 * _WIDTH, _WIDTH), 24),
        Part("lm_head", (_WIDTH, _TOKENS)),
        Part("value_embeds", (5 * _TOKENS, _WIDTH)),
        Part("bigram_embed", (5 * _TOKENS, _WIDTH)),
        Part("embed", (_TOKENS, _WIDTH), copies=522 / 1490),
        Part("gates and scalars", (1198,)),
    ],
    # The CIFAR-10 network of Nesterov Muon; its first convolution (whitening) is not trained
    "airbench": [
        *(
            Part(f"conv{number}", (out, into, 3, 3), (1, out, 9 * into))
            for number, (out, into) in enumerate(_FILTERS, start=1)
        ),
        Part("head", (10, 256)),
        Part("biases", (24 + 2 * 64 + 4 * 256,)),
    ],
}
_NAMES = (*MODELS, *_PARTS)


def model(name: str) -> list[Part]:
    """Return the parameters of a model.

    The model is a network of fedmuon, GPT-2, or one of the two models of Nesterov Muon (`nanogpt`
    and `airbench`).
    """
    if name in MODELS:
        shape = (3, 32, 32) if name in _COLOUR else (28, 28)
        return parts(routes(network(name, shape, 10), "hidden"))
    if name not in _NAMES:
        raise InputError(f"--model '{name}' is unknown: {instead(name, _NAMES)}")
    return _PARTS[name]


def published_rules(name: str) -> dict[str, Rule]:
    """Return the seven optimizers of Nesterov Muon, with the paper's counting rules for a model."""
    gpt = name == "nanogpt"
    sketch = Sketch(200, 10, 1) if gpt else Sketch(128, 10, 2)
    sgd = Rule("sgd")
    adam = Rule("adamw", decay=gpt)
    muon = Rule(steps=7, aux=adam if gpt else sgd)
    muon = replace(muon, extra=14) if gpt else replace(muon, normalized=0, extra=3)
    drawn, sparse = replace(muon, sketch=sketch), replace(sketch, kind="kaczmarz")
    polyak = replace(muon, nesterov=False), replace(drawn, nesterov=False)
    rules = (adam, sgd, *polyak, muon, drawn, replace(muon, sketch=sparse))
    return dict(zip(OPTIMIZERS, rules, strict=True))


def beside_table_2(name: str) -> list[dict[str, Any]]:
    """Return the counted GFLOP, the published GFLOP, and their difference.

    In Muon's runs of nanoGPT, parameters that are not matrices are updated in every other step.
    """
    rows, model_parts = [], model(name)
    halved = [
        part if part.matrices else part._replace(copies=part.copies / 2) for part in model_parts
    ]
    for (label, rule), printed in zip(published_rules(name).items(), TABLE_2[name], strict=True):
        moving = halved if name == "nanogpt" and rule.name == "muon" else model_parts
        counted = total(costs(moving, rule)) / 1e9
        row = {"optimizer": label, "counted": counted, "printed": printed}
        rows.append({**row, "difference": counted - printed})
    return rows


def record(name: str, rule: Rule) -> dict[str, Any]:
    """Return the operations of a step by parameter and in total.

    If Table 2 contains the model, the record also contains the published numbers.
    """
    step_costs, rows = costs(model(name), rule), []
    for part_cost in step_costs:
        part, sides = part_cost.part, "x".join(map(str, part_cost.part.shape))
        rows.append(
            {
                "name": part.name,
                "shape": sides if part.copies == 1 else f"{part.copies:.2g} of {sides}",
                "optimizer": part_cost.optimizer,
                "products": part_cost.products,
                "QR": part_cost.factorization,
                "entries": part_cost.entries,
                "total": part_cost.total,
                "performed": part_cost.performed,
            }
        )
    return {
        "model": name,
        "optimizer": rule.name,
        "parameters": rows,
        "total": total(step_costs),
        "products_performed": sum(cost.performed for cost in step_costs),
        "table_2": beside_table_2(name) if name in TABLE_2 else [],
    }


def tables(found: dict[str, Any]) -> list[Table | str]:
    """Return the operations in GFLOP as printable tables.

    Parameters that are not matrices share one line.
    """
    rows = found["parameters"]
    matrices = [row for row in rows if row["products"]]
    others = [row for row in rows if not row["products"]]
    summed = [_sum(others, f"{len(others)} others")] if others else []
    table = columns(
        f"one step of {found['optimizer']} on {found['model']}, GFLOP",
        ("parameter", "shape", *_COLUMNS),
        map(_cells, [*matrices, *summed] if matrices else rows),
        left=2,
    )
    for column in table.columns:
        column.no_wrap = True
    table.add_section()
    table.add_row(*_cells(_sum(rows, "all") | {"shape": ""}))
    if not found["table_2"]:
        return [table]
    names = ("optimizer", "counted", "printed", "difference")
    forms = ("{}", "{:.4f}", "{:.4f}", "{:+.5f}")
    lines = [
        [form.format(row[name]) for name, form in zip(names, forms, strict=True)]
        for row in found["table_2"]
    ]
    head = ("optimizer", "counted", "published", "difference")
    return [
        table,
        columns(
            "compared with Nesterov Muon (002), Table 2, with the paper's counting conventions",
            head,
            lines,
        ),
        NOTE,
    ]


def _sum(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    used = sorted({row["optimizer"] for row in rows})
    sums = {column: sum(row[column] for row in rows) for column in _COLUMNS}
    return {"name": name, "shape": f"by {', '.join(used)}", **sums}


def _cells(row: dict[str, Any]) -> list[str]:
    sizes = [row[name] / 1e9 for name in _COLUMNS]
    numbers = [f"{size:.{2 if size >= 10 else 4}f}" if size else "-" for size in sizes]
    return [row["name"], row["shape"], *numbers]
