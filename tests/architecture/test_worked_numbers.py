"""The values that pages write beside an expression are those that the expression has."""

import ast
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [
    *sorted((DOCS / "concepts").glob("*.md")), *sorted((DOCS / "choose").glob("*.md")),
    DOCS / "faq.md", DOCS / "troubleshooting.md", DOCS / "how-to" / "client-privacy.md",
]  # fmt: skip
WORD = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?|[A-Za-z-]+")
BLOCKS = [
    pytest.param(text, id=f"{page.stem}-{k}")
    for page in PAGES
    if page.exists()
    for k, text in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    )
]


def leaves(value: Any) -> Iterator[Any]:
    """The numbers and words of a value."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def agrees(written: str, value: Any) -> bool:
    """Whether a number rounds to what is written, or a word is it."""
    if isinstance(value, bool | str):
        return str(value) == written
    digits = written.replace("−", "-").replace(",", "")
    number, _, power = digits.partition("e")
    places = len(number.partition(".")[2])
    scale = float(f"1e{power or 0}")
    return abs(float(value) / scale - float(number)) <= 0.5000001 * 10**-places


def disagreements(block: str) -> list[str]:
    """The lines of a block whose comment begins with other values than the line has."""
    comments = {
        token.start[0]: token.string[1:].split(":")[0].strip()
        for token in tokenize.generate_tokens(StringIO(block).readline)
        if token.type == tokenize.COMMENT
    }
    names: dict[str, Any] = {"__name__": "page"}
    found = []
    for node in ast.parse(block).body:
        if not (isinstance(node, ast.Expr) and node.end_lineno in comments):
            exec(compile(ast.Module([node], []), "page", "exec"), names)
            continue
        value = eval(compile(ast.Expression(node.value), "page", "eval"), names)
        wanted, seen = WORD.findall(comments[node.end_lineno]), [*leaves(value)]
        if len(wanted) != len(seen) or not all(map(agrees, wanted, seen)):
            found.append(f"{ast.unparse(node)}: {wanted} is written, {seen} is found")
    return found


@pytest.mark.parametrize("block", BLOCKS)
def test_a_written_value_is_the_one_that_is_computed(block: str) -> None:
    assert disagreements(block) == []


@pytest.mark.parametrize(("block", "right"), [
    ("1 / 3  # 0.333", True), ("1 / 3  # 0.34", False), ("2.29412e22  # 2.29e22", True),
    ("(1, 2.0)  # 1, 2", True), ("(1, 2.0)  # 1", False), ("'certified'  # certified", True),
    ("'refused'  # certified", False), ("-4e-6  # -4.0e-06", True), ("1 / 3", True),
])  # fmt: skip
def test_a_wrong_value_is_seen(block: str, right: bool) -> None:
    assert (disagreements(block) == []) == right
