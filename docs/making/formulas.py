"""LaTeX as SVG: the page needs no script, no fonts and no network to show a formula."""

from html import escape

from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextToPath

SIZE = 100  # units an em; coordinates are rounded to a hundredth of an em
LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
POINTS = {"M": 1, "L": 1, "Q": 2, "C": 3}


def svg(latex: str) -> str:
    """The formula in the ink and size of the text around it, named by its source.

    matplotlib's mathtext sets it; what that does not know raises ValueError.
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
    """A path of matplotlib's as the `d` of SVG's; y grows downwards there."""
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
