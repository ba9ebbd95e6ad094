"""How strongly parts of the code depend on each other: counts for `stats.py`.

`test_coupling.py` limits some of these counts. All counts come from the source text, and nothing of
the counted tree is imported. Older revisions can therefore be counted as well.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOMS = ("fedmuon", "clients", "server", "analysis", "experiments")
ROUNDS = "fedmuon/federated/rounds.py"
LOOP = "fedmuon/runs/loop.py"
CHAIN = "fedmuon/optim/chain.py"
RECIPE = "fedmuon/optim/recipe.py"
# Identifiers that belong to one feature only. Names of modules count where a file imports them.
# Left out are words that libraries share: `codecs`, `compress`, `masked`, `is_masked`.
FEATURES = {
    "compression": "compression Compression CompressionKeys compressed decompressed compressor "
    "Compressor codec Codec low_rank EncodedStates FEEDBACK ESTIMATE",
    "clock": "clock CLOCK Clock timetable Timetable Buffered",
    "personal": "personal PERSONAL personalizes is_personal personal_part personal_parameters "
    "PersonalParameters personal_model personal_means tests_personal_models PERSONAL_MODELS",
    "client states": "client_states ClientStates CLIENT_STATES stored_states keeps_states stores "
    "persistent require_memoryless",
    "client privacy": "client_level ClientLevel CLIENT_LEVEL at_client_level READ_AT_CLIENT_LEVEL "
    "client_privacy ClientPrivacy level_of mask_reply",
}
# Words that fit any value.
HOUSE_WORDS = (
    "one found held own some given told kept whole known said mine made most least every each many "
    "more there asked wanted shown done lost away here what of about both ours theirs their seen "
    "taken named chosen again these those such who how why when everything something anything rest"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def parse(root: Path, file: str) -> ast.Module:
    return ast.parse((root / file).read_text(encoding="utf-8"))


def conditions(parsed: ast.AST) -> int:
    """Count `if` and `elif` statements, conditional expressions, and `if`s in comprehensions."""
    nodes = [*ast.walk(parsed)]
    in_comprehensions = sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return in_comprehensions + sum(isinstance(node, ast.If | ast.IfExp) for node in nodes)


def code_lines(text: str) -> int:
    """Count the lines that contain code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= {*range(docstring.lineno, (docstring.end_lineno or 0) + 1)}
    return len(lines)


def closure(root: Path, file: str) -> list[str]:
    """Return the file, and all product files that an import of it loads.

    Imports inside functions and below `if TYPE_CHECKING` do not count. The `__init__.py` of a
    package counts if an import names the package and the file is not empty.
    """
    reached, waiting = {file}, [file]
    while waiting:
        imports = imported_modules(parse(root, waiting.pop()))
        files = {path for module in imports if (path := _file_of(root, module))}
        waiting += files - reached
        reached |= files
    return sorted(reached)


def imported_modules(parsed: ast.AST) -> Iterator[str]:
    """Yield the modules that an import of this code may load, at once and not in functions."""
    for node in ast.iter_child_nodes(parsed):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported_modules(ast.Module(node.orelse, []))
        elif isinstance(node, ast.stmt | ast.ExceptHandler) and not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef
        ):
            yield from imported_modules(node)


def _file_of(root: Path, module: str) -> str | None:
    """Return the file of a module. All folders but the first are packages inside `fedmuon`."""
    top, *below = module.split(".")
    if top != "fedmuon" or not below:
        return None
    place = root.joinpath(*below) if below[0] in ROOMS else root.joinpath(top, *below)
    for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if file.is_file() and file.stat().st_size:
            return file.relative_to(root).as_posix()
    return None


@cache
def identifiers(parsed: ast.AST) -> set[str]:
    """Return the names of variables, attributes, arguments, functions, classes and imports."""
    names: set[str | None] = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names |= {node.name.rpartition(".")[2], node.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.rpartition(".")[2])
    return {name for name in names if name}


def names_feature(parsed: ast.AST, feature: str) -> bool:
    return not identifiers(parsed).isdisjoint(FEATURES[feature].split())


def fields(parsed: ast.AST, name: str) -> list[str]:
    """Return the fields of a dataclass."""
    return [
        ast.unparse(statement.target)
        for node in ast.walk(parsed)
        if isinstance(node, ast.ClassDef) and node.name == name
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    ]


def bound_names(parsed: ast.AST) -> Iterator[str]:
    """Yield the name of each parameter, and of each variable once per assignment."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def house_words(trees: Iterable[ast.AST]) -> float:
    """Return the percentage of house words among all bound names."""
    names = [name.strip("_") for parsed in trees for name in bound_names(parsed)]
    words = {*HOUSE_WORDS.split()}
    return round(100 * sum(name in words for name in names) / max(1, len(names)), 1)
