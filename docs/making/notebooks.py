"""Run the code cells of pages, and insert their outputs into the pages.

    python -m docs.making.notebooks docs/tutorials/one-sample.md one-sample.ipynb

A page with code cells is MyST Markdown with `{code-cell}` blocks, which Jupytext and MyST-NB also
read. A cell contains Python code, shell commands that begin with `!`, or a file that begins with
`%%writefile NAME`. `make docs` runs every page in its own folder and process, and fails if a cell
fails.
"""

import ast
import base64
import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "notebooks"
CELL = re.compile(
    r"^```\{code-cell\} python\n((?:^:[\w-]+:[^\n]*\n)*)(.*?)^```$", re.DOTALL | re.MULTILINE
)
WRITE = re.compile(r"%%writefile (\S+)\n")
AT_ONCE = 2  # number of pages that run at the same time
LIMIT = 600  # seconds for one page
PACKAGES = ("fedmuon", "clients", "server", "analysis", "experiments", "docs/making")
Output = dict[str, str]  # one of {"text": ...}, {"html": ...} and {"svg": ...}


class Cell(NamedTuple):
    """One part of a page: text, or code with its options."""

    kind: str  # "markdown" or "code"
    source: str
    options: dict[str, str]


class CellError(Exception):
    """A cell failed. The message contains its code and its traceback."""


def cells(text: str) -> list[Cell]:
    """Split a page into text and code cells."""
    found, end = [], 0
    for one in CELL.finditer(text):
        found.append(Cell("markdown", text[end : one.start()].strip("\n"), {}))
        options = re.findall(r"^:([\w-]+): *(.*)$", one[1], re.MULTILINE)
        found.append(Cell("code", one[2].rstrip("\n"), dict(options)))
        end = one.end()
    found.append(Cell("markdown", text[end:].strip("\n"), {}))
    return [cell for cell in found if cell.source]


def run(text: str, names: dict[str, Any] | None = None) -> list[list[Output]]:
    """Run the code cells of a page in the working directory.

    Args:
        text: The page.
        names: The namespace that the cells share. Afterwards, it contains their variables.

    Returns:
        The outputs of each code cell, in order.

    Raises:
        CellError: If a cell fails.
    """
    names = {} if names is None else names
    names.setdefault("__name__", "__main__")
    return [_run_cell(cell.source, names) for cell in cells(text) if cell.kind == "code"]


def _run_cell(source: str, names: dict[str, Any]) -> list[Output]:
    if written := WRITE.match(source):
        Path(written[1]).write_text(source[written.end() :] + "\n", encoding="utf-8")
        return []
    if source.startswith("!"):
        return _run_commands(source)
    printed = io.StringIO()
    try:
        body = ast.parse(source).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        value = None
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
            shown = [] if value is None else [_shown(value)]
    except Exception:
        raise CellError(f"{source}\n\n{printed.getvalue()}{traceback.format_exc()}") from None
    said = printed.getvalue()
    return [*([{"text": said}] if said.strip() else []), *shown]


def _run_commands(source: str) -> list[Output]:
    """Run each command in a shell.

    The shell first looks for programs in the folder of this Python environment.
    """
    found = os.environ["PATH"]
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{found}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "96",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    environment.pop("FORCE_COLOR", None)
    said = ""
    for line in commands_of(source):
        ended = subprocess.run(
            line, shell=True, env=environment, stdin=subprocess.DEVNULL, timeout=LIMIT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if ended.returncode:
            raise CellError(f"{line}\n\n{ended.stdout}\nexit code {ended.returncode}")
        said += ended.stdout
    return [{"text": said}] if said.strip() else []


def commands_of(source: str) -> list[str]:
    """Return the commands of a cell, one per line, without the `!`."""
    lines = re.sub(r"\s*\\\n\s*", " ", source).splitlines()
    return [line[1:].strip() for line in lines if line.startswith("!")]


def _shown(value: Any) -> Output:
    """Return the output that a notebook shows for the last value of a cell."""
    figure = value
    while not hasattr(figure, "savefig") and isinstance(figure, Sequence | dict) and figure:
        figure = next(iter(figure.values() if isinstance(figure, dict) else figure))
        if isinstance(figure, str):
            break
    figure = figure if hasattr(figure, "savefig") else getattr(figure, "figure", None)
    if hasattr(figure, "savefig"):
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", bbox_inches="tight")  # type: ignore[union-attr]
        return {"svg": drawn.getvalue()}
    if hasattr(value, "_repr_html_"):
        return {"html": value._repr_html_()}
    return {"text": repr(value)}


def executed(page: Path) -> list[list[Output]]:
    """Return the outputs of a page, from an earlier build or from a new run.

    A new run uses its own process and folder.

    Raises:
        CellError: If a cell fails.
    """
    saved = CACHE / f"{_digest(page)}.json"
    if saved.exists():
        return json.loads(saved.read_text(encoding="utf-8"))
    threads = max(1, (os.cpu_count() or 1) // AT_ONCE)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "OMP_NUM_THREADS": str(threads)
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (place := Path(folder, "work")).mkdir()
        # A process that is killed after LIMIT cannot remove its temporary runs. Ray needs short
        # paths, so its folders stay where they are.
        environment["RAY_TMPDIR"] = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
        environment["TMPDIR"] = folder
        found = Path(folder, "outputs.json")  # a file, because Ray workers may print to stdout
        command = [sys.executable, "-m", "docs.making.notebooks", str(page), str(found)]
        ended = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        if ended.returncode:
            raise CellError(f"{os.path.relpath(page, ROOT)}: a cell fails\n{ended.stderr}")
        outputs = found.read_text(encoding="utf-8")
    saved.parent.mkdir(parents=True, exist_ok=True)
    saved.write_text(outputs, encoding="utf-8")
    return json.loads(outputs)


def _digest(page: Path) -> str:
    """Return a hash of a page and of all code that the page's cells can import."""
    found = hashlib.sha256(sys.version.encode())
    files = sorted(file for one in PACKAGES for file in (ROOT / one).rglob("*.py"))
    for file in [page, ROOT / "constraints.txt", *files]:
        found.update(file.read_bytes())
    return found.hexdigest()[:32]


def pages() -> dict[str, Path]:
    """Return the pages with code cells. The dictionary maps the name of a page to its file."""
    docs = ROOT / "docs"
    return {
        str(file.relative_to(docs).with_suffix("")): file
        for file in sorted(docs.rglob("*.md"))
        if CELL.search(file.read_text(encoding="utf-8"))
    }


def all_outputs() -> dict[str, list[list[Output]]]:
    """Return the outputs of all pages with code cells.

    The dictionary maps the name of a page to the outputs of its cells.
    """
    found = pages()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(found, pool.map(executed, found.values()), strict=True))


def woven(name: str, text: str, outputs: Sequence[Sequence[Output]]) -> str:
    """Return the page as Markdown with code, outputs and a link to the page as a notebook."""
    left = iter(outputs)
    parts = []
    for cell in cells(text):
        if cell.kind == "markdown":
            parts.append(cell.source)
        else:
            parts += [_as_code(cell.source), *(_as_html(one, cell) for one in next(left))]
    stem = name.rpartition("/")[2]
    link = (
        f'<p class="download"><a href="{stem}.ipynb" download>Download this page as a notebook</a>'
        " with its outputs. The outputs were made when this site was built.</p>"
    )
    return "\n\n".join([*parts, _raw(link)]) + "\n"


def _as_code(source: str) -> str:
    if written := WRITE.match(source):
        kind = {"py": "python", "toml": "toml"}.get(written[1].rpartition(".")[2], "text")
        return f"Save this as `{written[1]}`:\n\n```{kind}\n{source[written.end() :]}\n```"
    if source.startswith("!"):
        return "```sh\n" + re.sub("^!", "", source, flags=re.MULTILINE) + "\n```"
    return f"```python\n{source}\n```"


def _as_html(output: Output, cell: Cell) -> str:
    if "svg" in output:
        held = base64.b64encode(output["svg"].encode()).decode()
        told = escape(cell.options.get("alt", "What the cell draws."), quote=True)
        image = f'<img alt="{told}" src="data:image/svg+xml;base64,{held}">'
        return _raw(f'<div class="cell-output">{image}</div>')
    inside = output.get("html") or f"<pre>{escape(output['text'].rstrip())}</pre>"
    return _raw(f'<div class="cell-output">{inside}</div>')


def _raw(html: str) -> str:
    return f"``````{{raw}} html\n{html}\n``````"


def notebook(text: str, outputs: Sequence[Sequence[Output]]) -> str:
    """Return the page as a Jupyter notebook with its outputs."""
    left, number = iter(outputs), 0
    made: list[dict[str, Any]] = []
    for place, cell in enumerate(cells(text)):
        one: dict[str, Any] = {"cell_type": cell.kind, "id": f"cell-{place}", "metadata": {}}
        one["source"] = cell.source.splitlines(keepends=True)
        if cell.kind == "code":
            number += 1
            shown = [_as_output(output, number) for output in next(left)]
            one |= {"execution_count": number, "outputs": shown}
        made.append(one)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _as_output(output: Output, number: int) -> dict[str, Any]:
    if "text" in output:
        return {"output_type": "stream", "name": "stdout", "text": output["text"]}
    kind, inside = ("image/svg+xml", "svg") if "svg" in output else ("text/html", "html")
    return {
        "output_type": "execute_result", "execution_count": number, "metadata": {},
        "data": {kind: output[inside], "text/plain": ""},
    }  # fmt: skip


def write(site: Path, outputs: dict[str, list[list[Output]]]) -> Iterator[Path]:
    """Write every page with cells as a notebook into a built site."""
    for name, file in pages().items():
        place = site / f"{name}.ipynb"
        place.write_text(notebook(file.read_text(encoding="utf-8"), outputs[name]), "utf-8")
        yield place


def main(arguments: Sequence[str]) -> int:
    """Run one page in the working directory, and write its outputs to a file."""
    text = Path(arguments[0]).read_text(encoding="utf-8")
    try:
        outputs = run(text)
    except CellError as error:
        print(error, file=sys.stderr)
        return 1
    place = Path(arguments[1])
    whole = notebook(text, outputs) if place.suffix == ".ipynb" else json.dumps(outputs)
    place.write_text(whole, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
