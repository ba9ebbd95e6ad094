"""Every public name has a docstring with the sections that its kind needs, examples that run, and a
place in the API reference."""

import ast
import dataclasses
import doctest
import inspect
import re
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fedmuon
from docs.making import typed_config

MODULES = ("", ".links", ".recipes", ".orthogonalizers", ".aggregators", ".schedules",
           ".callbacks", ".optim", ".orthogonalize", ".analysis", ".flower")  # fmt: skip
PAGE = Path("docs/reference/api.md")
DATA = ("__version__", "COEFFICIENTS", "NORMALIZATIONS", "Params")  # described on the page alone
SLOW = "# slow"  # marks an example that takes seconds, for example because it starts Ray
OF_FLOWER = ("fedmuon.flower.RayGrid",)  # Flower documents the methods of a Grid
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def public() -> dict[str, Any]:
    """Public functions and classes, each once, by the shortest public name."""
    found: dict[str, Any] = {}
    for module in MODULES:
        held = import_module(f"fedmuon{module}")
        for name in held.__all__:
            one = getattr(held, name)
            known = any(one is other for other in found.values())  # also other names of a class
            if not (inspect.ismodule(one) or name in DATA or known):
                found[f"fedmuon{module}.{name}"] = one
    return found


NAMES = public()


def sections(doc: str) -> dict[str, list[str]]:
    """The names of Google sections, with the entries of each."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for line in doc.splitlines():
        if head := re.fullmatch(r"(Args|Attributes|Returns|Raises|Example):", line):
            current = head[1]
            found[current] = []
        elif line and not line.startswith(" "):
            current = ""
        elif entry := re.match(r"    \*{0,2}(\w+): \S", line):
            found[current].append(entry[1])
    return found


def parameters(one: Any) -> list[str]:
    """The names of what a caller gives."""
    function = inspect.unwrap(one)
    if isinstance(one, type):
        if hasattr(one, "model_fields"):
            return list(one.model_fields)
        if typing.is_typeddict(one):
            return []  # the page of the config describes its keys
        if dataclasses.is_dataclass(one):
            return [field.name for field in dataclasses.fields(one) if field.init]
        if issubclass(one, tuple):
            return list(getattr(one, "_fields", ()))
        if one.__init__ in (object.__init__, Exception.__init__) or issubclass(one, Exception):
            return []
        function = one.__init__
    known = inspect.signature(function).parameters.values()
    return [p.name for p in known if p.name != "self" and not p.name.startswith("_")]


def problems(name: str, one: Any, whole: bool = True) -> Iterator[str]:
    """What is missing from a docstring; `whole` also asks for an example and for Returns."""
    doc = inspect.getdoc(one) or ""
    summary, _, _ = doc.partition("\n\n")
    if not summary:
        yield f"{name} has no docstring"
        return
    if not summary.rstrip().endswith((".", ":")) or len(summary) > 250:
        yield f"{name}: the summary is no sentence"
    found = sections(doc)
    documented = [*found.get("Args", []), *found.get("Attributes", [])]
    wanted = parameters(one)
    for lost in [one for one in wanted if one not in documented]:
        yield f"{name}: the parameter {lost} is not documented"
    if wanted:
        for extra in [one for one in documented if one not in wanted]:
            yield f"{name}: {extra} is documented, but is no parameter"
    if not whole:
        return
    returns = None if isinstance(one, type) else inspect.signature(one).return_annotation
    if returns not in (None, "None") and "Returns" not in found:
        yield f"{name}: what it returns is not documented"
    if "Example" not in found or ">>> " not in doc:
        yield f"{name}: there is no example"


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that the package itself gives a class."""
    fields = getattr(kind, "__dataclass_fields__", {})
    for name in sorted({*dir(kind)} - {*fields}):
        held = inspect.getattr_static(kind, name)
        held = getattr(held, "func", held)  # a cached property
        held = held.fget if isinstance(held, property) else held
        ours = getattr(inspect.unwrap(held), "__module__", "") if callable(held) else ""
        if not name.startswith("_") and str(ours).startswith(("fedmuon.", "analysis")):
            yield name, held


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name: str) -> None:
    one = NAMES[name]
    assert not list(problems(name, one))
    if isinstance(one, type) and name not in OF_FLOWER:
        for method, held in methods(one):
            if not isinstance(held, type):
                assert not list(problems(f"{name}.{method}", held, whole=False))


def examples(slow: bool) -> list[Any]:
    """The names whose examples take seconds or repeat others, or the rest."""

    def long(name: str) -> bool:  # results have the examples of the functions that return them
        return SLOW in (inspect.getdoc(NAMES[name]) or "") or name.endswith("Result")

    return sorted(name for name in NAMES if long(name) == slow)


def run_example(name: str) -> None:
    """Run the example of a docstring, and compare what it prints."""
    doc = inspect.getdoc(NAMES[name]) or ""
    test = doctest.DocTestParser().get_doctest(doc, {}, name, None, None)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    assert test.examples
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("name", examples(slow=False))
def test_an_example_prints_what_it_says(name: str) -> None:
    run_example(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", examples(slow=True))
def test_a_slow_example_prints_what_it_says(name: str) -> None:
    run_example(name)


def listed() -> set[str]:
    """The names that the API reference documents."""
    text = PAGE.read_text(encoding="utf-8")
    return set(re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", text, re.MULTILINE))


def test_the_api_reference_lists_every_public_name() -> None:
    """Each once, by its shortest name; constants and types in words."""
    assert listed() == set(NAMES)
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{one}`" in text or f".{one}`" in text for one in DATA)


def incomplete(first: int, second: int = 0) -> int:
    """Add two numbers.

    Args:
        first: The first.
        third: Does not exist.
    """
    return first + second


def test_the_types_of_a_config_follow_its_declarations() -> None:
    """`make reference` writes the file; ruff then formats it, which changes only spaces and commas.
    Here both are read as Python."""
    made = ast.dump(ast.parse(typed_config.written()))
    held = Path("fedmuon/config/typed.py").read_text(encoding="utf-8")
    assert ast.dump(ast.parse(held)) == made
    assert ast.dump(ast.parse(held.replace('"lr"', '"rate"'))) != made


def test_what_is_missing_is_found() -> None:
    """A negative control."""
    found = "; ".join(problems("incomplete", incomplete))
    for part in ("parameter second is not", "third is documented, but", "what it returns",
                 "no example"):  # fmt: skip
        assert part in found
    assert list(problems("nothing", lambda: None)) == ["nothing has no docstring"]
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=lambda text: None)
    assert runner.failures == 1
    assert fedmuon.run in NAMES.values() and len(NAMES) > 120
