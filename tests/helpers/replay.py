"""Examples that exploring has found, kept as text and replayed by the ordinary tests.

tests/found/<file>.<test>.txt holds one call a line, as Hypothesis prints a falsifying example. A
database of Hypothesis' own would bind them to its version, and derandomized tests have none.
"""

import ast
import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example

FOLDER = Path(__file__).resolve().parents[1] / "found"
TOLD = ("Failing test case", "Falsifying example")  # of Hypothesis, new and old
Example = dict[str, Any]


def replayed(item: pytest.Function) -> None:
    """Have a property test begin with what was found for it."""
    file = _file(item)
    if not getattr(item.obj, "is_hypothesis_test", False) or not file.exists():
        return
    test = getattr(item.obj, "__func__", item.obj)
    if getattr(test, "replayed", False):
        return  # the cases of a parametrized test share their function
    test.replayed = True
    for line in file.read_text(encoding="utf-8").splitlines():
        example(**read(line))(test)


def save(item: pytest.Function, error: BaseException) -> Path | None:
    """Keep the falsifying example that an error tells of; None if it cannot be told in text."""
    for note in getattr(error, "__notes__", ()):
        head, _, call = note.partition(": ")
        if head in TOLD:
            with contextlib.suppress(SyntaxError, ValueError):
                return _append(_file(item), read(call))
    return None


def read(call: str) -> Example:
    """The arguments of a printed call: numbers (infinite ones too), texts and collections."""
    tree = ast.parse(call.strip(), mode="eval").body
    if not isinstance(tree, ast.Call) or tree.args:
        raise ValueError(f"no call by keywords: {call}")
    return {one.arg: _value(one.value) for one in tree.keywords if one.arg}


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Name) and node.id in ("nan", "inf"):
        return float(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.List):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(one) for one in node.elts)
    return ast.literal_eval(node)


def _append(file: Path, given: Example) -> Path:
    line = f"found({', '.join(f'{name}={value!r}' for name, value in given.items())})\n"
    file.parent.mkdir(exist_ok=True)
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if line not in before:
        file.write_text(before + line, encoding="utf-8")
    return file


def _file(item: pytest.Function) -> Path:
    name = item.originalname or item.name
    return FOLDER / f"{item.path.stem}.{name}.txt"
