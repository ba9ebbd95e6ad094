"""Replace comments in pages by generated text.

The comment `<!-- made: NAME WORDS -->` is replaced by the result of NAME(*WORDS).
"""

from pathlib import Path

from docs.making import drawings
from docs.making.choices import compared, private
from docs.making.commands import exit_codes
from docs.making.commands import reference as commands
from docs.making.kept import claims, headlines, pictures
from docs.making.methods import method, methods
from docs.making.papers import gallery, legend
from docs.making.papers import index as papers
from docs.making.papers import page as paper

__all__ = [
    "claims", "commands", "compared", "drawing", "exit_codes", "gallery", "headlines", "legend",
    "method", "methods", "paper", "papers", "pictures", "private", "readme",
]  # fmt: skip
README = Path(__file__).resolve().parents[2] / "README.md"


def drawing(name: str) -> str:
    """Return a drawing to embed in a page, in the text colour of the page."""
    return f"```{{raw}} html\n{drawings.inline(name)}\n```"


def readme(*words: str) -> str:
    """Return the text of a section of the README. Its links are adapted to the site."""
    text = README.read_text(encoding="utf-8").split(f"\n## {' '.join(words)}\n")[1]
    return text.split("\n## ")[0].strip().replace("](docs/", "](/")
