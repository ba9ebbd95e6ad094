"""The parts of pages that are made: `<!-- made: NAME WORDS -->` is what NAME(*WORDS) says."""

from docs.making import drawings
from docs.making.commands import reference as commands
from docs.making.papers import gallery
from docs.making.papers import page as paper

__all__ = ["commands", "drawing", "gallery", "paper"]


def drawing(name: str) -> str:
    """A drawing inside the page, in its ink."""
    return f"```{{raw}} html\n{drawings.inline(name)}\n```"
