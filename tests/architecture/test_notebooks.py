"""Pages with code cells: they run, they show what their text says, and they become notebooks."""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.making import notebooks
from docs.making.notebooks import Cell, CellError

ROOT = Path(__file__).resolve().parents[2]
PAGES = notebooks.pages()
README = ROOT / "README.md"
Names = dict[str, Any]
TEXT = """# A page

```{code-cell} python
:alt: A picture.
a = 2
print("sum", a + 1)
a * 3
```

Words.

```{code-cell} python
%%writefile one.toml
[data]
```

```{code-cell} python
!echo "hello  there" && cat one.toml
```
"""
OUTPUTS = [[{"text": "sum 3\n"}, {"text": "6"}], [], [{"text": "hello  there\n[data]\n"}]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and no window to draw in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")


def test_cells_run_in_one_namespace_and_show_what_a_notebook_shows() -> None:
    names: Names = {}
    assert notebooks.run(TEXT, names) == OUTPUTS
    assert names["a"] == 2
    assert notebooks.cells(TEXT)[1] == Cell("code", 'a = 2\nprint("sum", a + 1)\na * 3',
                                            {"alt": "A picture."})  # fmt: skip


def test_commands_of_a_cell() -> None:
    assert notebooks.commands_of("!a b \\\n  c\n!d") == ["a b c", "d"]


@pytest.mark.parametrize("source", ["1 / 0", "!false", "assert False"])
def test_a_cell_that_fails_is_an_error(source: str) -> None:
    with pytest.raises(CellError, match=source.split()[-1].strip("!")):
        notebooks.run(f"```{{code-cell}} python\n{source}\n```\n")


def test_a_page_of_the_site_has_code_outputs_and_a_link() -> None:
    page = notebooks.woven("start/one", TEXT, OUTPUTS)
    assert "```{code-cell}" not in page and "%%writefile" not in page
    assert '```python\na = 2\nprint("sum", a + 1)\na * 3\n```' in page
    assert "Save this as `one.toml`:\n\n```toml\n[data]\n```" in page
    assert '```sh\necho "hello  there" && cat one.toml\n```' in page
    assert "<pre>sum 3</pre>" in page and 'href="one.ipynb"' in page


def test_a_figure_is_shown_with_its_description() -> None:
    text = TEXT.replace("a * 3", "import matplotlib.pyplot as plt\nplt.figure()")
    outputs = notebooks.run(text)
    assert [*outputs[0][1]] == ["svg"]
    assert '<img alt="A picture." src="data:image/svg+xml;base64,' in notebooks.woven(
        "one", text, outputs
    )


def test_a_notebook_has_cells_and_outputs() -> None:
    held = json.loads(notebooks.notebook(TEXT, OUTPUTS))
    assert held["nbformat"] == 4
    assert [one["cell_type"] for one in held["cells"]] == [
        "markdown", "code", "markdown", "code", "code"
    ]  # fmt: skip
    assert held["cells"][1]["outputs"][0]["text"] == "sum 3\n"
    assert "".join(held["cells"][4]["source"]).startswith("!echo")


def test_every_page_with_cells_is_listed_and_imports_only_what_is_installed() -> None:
    assert len([name for name in PAGES if name.startswith("tutorials/")]) >= 8
    known = {"fedmuon", "torch", "numpy", "matplotlib", "sklearn", *sys.stdlib_module_names}
    for name, file in PAGES.items():
        index = (file.parent / "index.md").read_text(encoding="utf-8")
        assert f"({file.name})" in index and f"\n{file.stem}\n" in index, name
        parts = notebooks.cells(file.read_text(encoding="utf-8"))
        written = {one.source.split()[1].removesuffix(".py") for one in parts
                   if one.source.startswith("%%writefile")}  # fmt: skip
        lines = [line for one in parts if one.kind == "code" for line in one.source.splitlines()]
        used = {line.split()[1].partition(".")[0] for line in lines
                if line.startswith(("import ", "from "))}  # fmt: skip
        assert used <= known | written, name
        drawn = [one for one in parts if one.source.endswith(("plot()", "\nfigure"))]
        assert all("alt" in one.options for one in drawn), name


# What the text of a page relies on.
TRUE: dict[str, Callable[[Names], bool]] = {
    "start/first-run": lambda n: all(  # 0.01: processors round differently
        abs(row["accuracy"] - float(printed)) <= 0.01
        for row, printed in zip(
            n["both"].rows,
            re.findall(r"# accuracy (\S+) and (\S+),", README.read_text(encoding="utf-8"))[0],
            strict=True,
        )
    ),
    "start/stability": lambda n: (
        n["result"].bound["status"] == "certified"
        and 0.8 < n["nearest"] <= 1
        and n["large"].bound["share"] > 1
        and n["result"].bound["share"] < 0.2
    ),
    "start/private": lambda n: (
        n["private"].summary["privacy"]["epsilon"] <= 8
        and n["private"].summary["accuracy"] > n["starved"].summary["accuracy"]
    ),
    "start/cluster": lambda n: bool((n["here"] - n["ray"]).abs().max() < 1e-12),
    "tutorials/own-model-and-data": lambda n: n["spent"]["epsilon"] <= 8,
    "tutorials/fair-comparison": lambda n: set(n["best"]) == {"fedmuon", "fedadam", "scaffold"},
    "tutorials/one-sample": lambda n: (
        n["farthest"](n["census"]) < n["farthest"](n["worst"]) and 0.5 < n["nearest"] <= 1
    ),
    "tutorials/bound-and-gap": lambda n: (
        all(row["gap_low"] < 0 < row["gap_high"] for row in n["sizes"].table)
        and [row["bound"] for row in n["sizes"].table]
        == sorted((row["bound"] for row in n["sizes"].table), reverse=True)
    ),
    "tutorials/private-training": lambda n: 7.9 < n["private"]["epsilon"] <= 8,
    "tutorials/certify-cnn": lambda n: (  # a guess has the error 0.9
        n["limits"]["HOG"]["privacy of samples"] < n["limits"]["CNN"]["privacy of samples"] < 0.9
        and all(row["held-out samples"] < row["privacy of samples"] for row in n["limits"].values())
    ),
    "tutorials/audit-optimizer": lambda n: n["bound"].epsilon > 0.84 and n["bug"].epsilon > 3.2,
    "tutorials/write-optimizer": lambda n: n["runs"]["FedLion"].summary["accuracy"] > 0.5,
    "tutorials/ray-and-deployment": lambda n: bool(n["difference"] < 1e-12),
    "tutorials/compression-and-devices": lambda n: len(n["timed"]) == 3,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_and_its_text_is_true(name: str) -> None:
    names: Names = {}
    notebooks.run(PAGES[name].read_text(encoding="utf-8"), names)
    assert TRUE[name](names)


def test_a_page_that_is_killed_leaves_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process cannot remove its runs without `out`, so they are in the page's folder."""
    monkeypatch.setattr(notebooks, "CACHE", tmp_path / "cache")
    (shared := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", None)
    page = tmp_path / "page.md"
    lines = "import tempfile", "print(tempfile.mkdtemp())", "import os", "os.kill(os.getpid(), 9)"
    page.write_text("```{code-cell} python\n" + "\n".join(lines) + "\n```\n", encoding="utf-8")
    with pytest.raises(CellError):
        notebooks.executed(page)
    assert not [*shared.iterdir()]
