"""LaTeX formulas as SVG, so that a page needs no script, no fonts and no network."""

from html import escape

from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextToPath

SIZE = 100  # units per em; coordinates are rounded to a hundredth of an em
LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
POINTS = {"M": 1, "L": 1, "Q": 2, "C": 3}


def svg(latex: str) -> str:
    """Return a formula as SVG, in the colour and size of the surrounding text.

    Its accessible name is the LaTeX source. The mathtext of matplotlib draws the formula.

    Raises:
        ValueError: If mathtext does not support the formula.
    """
    source = " ".join(latex.split())
    text, font = f"${source}$", FontProperties(size=SIZE, math_fontfamily="cm")
    width, height, depth = TextToPath().get_text_width_height_descent(text, font, ismath=True)
    vertices, codes = TextToPath().get_text_path(font, text, ismath=True)
    box = f"0 {-(height - depth):.0f} {width:.0f} {height:.0f}"
    place = f"height:{height / SIZE:.3f}em;vertical-align:{-depth / SIZE:.3f}em"
    return (
        f'<svg class="formula" role="img" aria-label="{escape(source)}" viewBox="{box}" '
        f'style="width:{width / SIZE:.3f}em;{place}"><path fill="currentColor" '
        f'd="{outline(vertices, codes)}"/></svg>'
    )


def outline(vertices, codes) -> str:
    """Convert a matplotlib path to the attribute `d` of an SVG path, where y points downwards."""
    parts, left = [], 0
    for (x, y), code in zip(vertices, codes, strict=True):
        if code == Path.CLOSEPOLY:
            parts.append("Z")
            continue
        if not left:
            parts.append(letter := LETTERS[code])
            left = POINTS[letter]
        parts.append(f"{x:.0f} {-y:.0f}")
        left -= 1
    return " ".join(parts)
