"""The site: `make docs` builds it in build/docs, where it reads without a network."""

import inspect
import os
import re
import sys
from pathlib import Path

from sphinx.errors import ExtensionError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs.making import formulas, made, notebooks  # noqa: E402

project = "fedmuon"
author = "The fedmuon authors"
copyright = "the fedmuon authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["making"]
myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # made parts begin at the level that they need
html_theme = "furo"
html_title = "fedmuon"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("filter.js", {"defer": "defer"})]
html_show_sphinx = html_show_sourcelink = False
html_copy_source = False
smartquotes = False  # --out is an option, no dash
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}
napoleon_use_rtype = False  # the type stands in the text of Returns
autodoc_member_order = "bysource"
# A mark, and what the page says in its place where it is read without being built.
MARK = re.compile(r"^<!-- made: (.+) -->$(?:\n\*On the site, .*\*$)?", re.MULTILINE)


def fill(app, name, source):
    """`<!-- made: KIND WORDS -->` is replaced by what `made.KIND(*WORDS)` says, as Markdown."""

    def said(mark: re.Match[str]) -> str:
        kind, *words = mark[1].split()
        return getattr(made, kind)(*words)

    if name in OUTPUTS:
        source[0] = notebooks.woven(name, source[0], OUTPUTS[name])
    # What the README has for those who read the files stands on a page of its own here.
    source[0] = MARK.sub(said, source[0]).replace("(../README.md)", "(/papers/index.md)")


OUTPUTS: dict[str, list[list[notebooks.Output]]] = {}


def run_cells(app):
    """Run the cells of all pages. A cell that fails ends the build. CELLS=0 runs none."""
    if os.environ.get("CELLS") == "0":
        found = {name: file.read_text(encoding="utf-8") for name, file in notebooks.pages().items()}
        OUTPUTS.update({name: [[] for _ in notebooks.cells(one)] for name, one in found.items()})
        return
    try:
        OUTPUTS.update(notebooks.all_outputs())
    except notebooks.CellError as error:
        raise ExtensionError(str(error)) from None


def write_notebooks(app, error):
    """Write the pages with cells as notebooks beside their HTML."""
    if error is None:
        list(notebooks.write(Path(app.outdir), OUTPUTS))


def plain(app, what, name, one, options, lines):
    """Docstrings are plain text: what RST would take for its own stays as it is, code is code; of
    a module its first paragraph is shown."""
    if what == "module" and "" in lines:
        del lines[lines.index("") :]
    end = lines.index("Example:") if "Example:" in lines else len(lines)  # its lines are code
    parts = "\n".join(lines[:end]).split("\n\n")  # code in a paragraph may go on in the next line
    marked = [re.sub(r"`+([^`]+)`+|([*|]|_(?=\W|$))", as_rst, part) for part in parts]
    lines[:end] = "\n\n".join(marked).split("\n")


def named_types(app, one, bound):
    """Show `ArrayLike` by its name, and not as the long union that it stands for."""
    from numpy.typing import ArrayLike

    known = getattr(inspect.unwrap(one), "__annotations__", {})
    for name, held in known.items():
        if held == ArrayLike:
            known[name] = "ArrayLike"


def as_rst(one: re.Match[str]) -> str:
    """Code, or a sign that means nothing."""
    return f"``{one[1]}``" if one[1] else f"\\{one[2]}"


def inline(self, node):
    """A formula in a line."""
    from docutils.nodes import SkipNode

    self.body.append(formulas.svg(node.astext()))
    raise SkipNode


def display(self, node):
    """A formula of its own, which scrolls where it is wider than the page."""
    from docutils.nodes import SkipNode

    self.body.append(f'<div class="display">{formulas.svg(node.astext())}</div>')
    raise SkipNode


def break_names(app, page, template, context, tree):
    """Long names in code may break after their underscores, so that tables fit."""
    names = re.compile(r'(?<=<span class="pre">)[^<]*_[^<]*')
    context["body"] = names.sub(lambda one: one[0].replace("_", "_<wbr>"), context.get("body", ""))


def setup(app):
    """What Sphinx calls first."""
    app.connect("builder-inited", run_cells)
    app.connect("build-finished", write_notebooks)
    app.connect("html-page-context", break_names)
    app.connect("source-read", fill)
    app.connect("autodoc-before-process-signature", named_types)
    app.connect("autodoc-process-docstring", plain, priority=400)  # before napoleon adds its marks
    app.add_html_math_renderer(
        "paths", inline_renderers=(inline, None), block_renderers=(display, None)
    )


html_math_renderer = "paths"
