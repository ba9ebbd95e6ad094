"""docs/reference/errors.md has every error class and exit code, and quotes messages that exist;
docs/reference/files.md has every file of a run folder."""

import ast
import re
import signal
from functools import cache
from pathlib import Path

import pytest

from fedmuon.runs import directory

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fedmuon", "clients", "server", "analysis", "experiments")
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
CLASSES, MESSAGES = PAGE.split("## Error classes")[1].split("## Messages")
SHORT = 12  # characters: shorter pieces of a message would be found anywhere


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Every node of the syntax trees of the product, with its file."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    trees = [(file, ast.parse(file.read_text(encoding="utf-8"))) for file in files]
    return [(file, node) for file, tree in trees for node in ast.walk(tree)]


def module_of(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return name if name.startswith("fedmuon") else f"fedmuon.{name}"


def error_classes() -> dict[str, str]:
    """Class -> module, for every class that derives from an exception."""
    bases = {"Exception", "BaseException", "ValueError", "RuntimeError", "TypeError", "OSError"}
    every = [(file, node) for file, node in nodes() if isinstance(node, ast.ClassDef)]
    errors: dict[str, str] = {}
    while True:
        before = len(errors)
        for file, node in every:
            above = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if above & (bases | {*errors}):
                errors[node.name] = module_of(file)
        if len(errors) == before:
            return errors


def exit_codes() -> set[int]:
    """0, 1 for what nobody caught, the numbers that the command line raises, and signals."""
    codes = {0, 1, 128 + signal.SIGINT, 128 + signal.SIGTERM}
    calls = [node for file, node in nodes() if "cli" in file.parts and isinstance(node, ast.Call)]
    for call in calls:
        if ast.unparse(call.func).endswith("Exit"):
            values = [node.value for node in call.args if isinstance(node, ast.Constant)]
            codes |= {value for value in values if isinstance(value, int)}
    return codes


@cache
def strings() -> list[str]:
    """Every string of the product, with ... for its values."""
    texts = []
    for _, node in nodes():
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


def is_said(message: str) -> bool:
    """Whether each piece of a message between two values is a part of some string."""
    pieces = [one.strip(" :") for one in message.split("…")]
    return all(any(one in text for text in strings()) for one in pieces if len(one) >= SHORT)


def test_every_error_class_is_on_the_page_with_its_module() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)`", CLASSES, re.MULTILINE))
    found = error_classes()
    assert "InputError" in found and len(found) >= 6
    assert listed.keys() == found.keys()
    for name, module in found.items():
        public = module.startswith(listed[name])
        assert public, f"{name} is in {module}, not in {listed[name]}"


def test_every_exit_code_is_on_the_page() -> None:
    table = PAGE.split("## Exit codes")[1].split("## Error classes")[0]
    listed = {int(one) for one in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert listed == exit_codes()


def quoted() -> list[str]:
    cells = re.findall(r"^\| (`.+?) \| ", MESSAGES, re.MULTILINE)
    return [one for cell in cells for one in re.findall(r"`(.+?)`", cell)]


@pytest.mark.parametrize("message", quoted(), ids=lambda one: one[:60])
def test_a_quoted_message_exists(message: str) -> None:
    assert is_said(message)


def test_a_message_that_nothing_says_is_seen() -> None:
    assert len(quoted()) > 30
    assert not is_said("the … of no program says this sentence") and not is_said("never raised …")


def test_every_file_of_a_run_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    listed = {one for cell in re.findall(r"^\| (`.+?) \| ", page, re.MULTILINE)
              for one in re.findall(r"`(.+?)`", cell)}  # fmt: skip
    names = {*directory.FIXED, *directory.ENDS, *directory.MAYBE, *directory.CHECKPOINTS}
    assert names | {directory.AUDIT, directory.FAILED, "SHA256SUMS"} <= listed
    assert f"{directory.CLIENT_STATES}/" in listed and len(names) > 15
