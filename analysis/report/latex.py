"""Tables in LaTeX, for the package booktabs."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedmuon.core.choices import SPREAD
from fedmuon.core.errors import InputError, instead

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "≤": r"$\le$", "≥": r"$\ge$", "×": r"$\times$", "−": "$-$", "–": "--",
    "—": "---", "∞": r"$\infty$", "·": r"$\cdot$", "√": r"$\surd$", "→": r"$\to$", "∇": r"$\nabla$",
    "≈": r"$\approx$", "‖": r"$\Vert$", "²": "$^2$", "³": "$^3$", "½": r"$\frac12$",
    "⁰": "$^0$", "₀": "$_0$",
    "…": r"\dots{}", "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$",
    "ε": r"$\varepsilon$", "ζ": r"$\zeta$", "η": r"$\eta$", "θ": r"$\theta$", "κ": r"$\kappa$",
    "λ": r"$\lambda$", "μ": r"$\mu$", "ν": r"$\nu$", "ρ": r"$\rho$", "σ": r"$\sigma$",
    "τ": r"$\tau$", "φ": r"$\varphi$", "ω": r"$\omega$", "Δ": r"$\Delta$", "Ψ": r"$\Psi$",
    "Φ": r"$\Phi$", "Σ": r"$\Sigma$",
}  # fmt: skip
LOW, HIGH = "_low", "_high"  # suffixes of the interval's ends; the name alone is the mean
DIGITS = 4
LONG = 40  # a column with longer cells is set as paragraphs
COMMAND = re.compile(r"\\(\w+|.)(\{\})?")


def latex(
    rows: Sequence[Mapping[str, Any]],
    caption: str = "",
    label: str = "",
    columns: Sequence[str] | None = None,
) -> str:
    r"""Return rows as a LaTeX table. The table requires \usepackage{booktabs}.

    One column shows a mean together with its interval: its ends, or ± half of its length. Half of
    the length gets two significant digits. The mean is rounded to the same decimal place.

    Args:
        rows: One mapping per row of the table. The names become the column headings.
        caption: Caption in LaTeX, inserted unchanged.
        label: Label for \ref.
        columns: Names of the columns, in the order in which they are shown. By default, the table
            shows all columns whose values are not lists.

    Returns:
        A `table` environment, or only a `tabular` if there is neither caption nor label.

    Raises:
        InputError: If `columns` contains a name that is not a column of the table.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    parts = {f"{name}{ending}" for name in names for ending in (SPREAD, LOW, HIGH)}
    visible = [name for name in names if name not in parts]
    if columns is None:
        lists = {name for row in rows for name, cell in row.items() if isinstance(cell, list)}
        visible = [name for name in visible if name not in lists]
    else:
        for name in columns:
            if name not in names:
                raise InputError(f"The table has no column {name!r}: {instead(name, visible)}")
        visible = list(columns)
    texts = [[_cell(row, name) for name in visible] for row in rows]
    numeric = [all(_is_number(row.get(name)) for row in rows) for name in visible]
    heads = [escaped(name.replace("_", " ")) for name in visible]
    lines = tabular(heads, texts, numeric)
    if not (caption or label):
        return "\n".join(lines) + "\n"
    around = [r"\begin{table}[t]", r"\centering"]
    around += [rf"\caption{{{caption}}}"] if caption else []
    around += [rf"\label{{{label}}}"] if label else []
    return "\n".join([*around, *lines, r"\end{table}"]) + "\n"


def tabular(
    head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> list[str]:
    """Return the lines of a LaTeX `tabular`. The cells must be valid LaTeX.

    Numeric columns are aligned to the right. Columns with long cells break them into lines.
    """
    long = [
        not number and any(len(COMMAND.sub("x", row[place])) > LONG for row in rows)
        for place, number in enumerate(numeric)
    ]
    width = rf"p{{{0.5 / max(sum(long), 1):.2f}\linewidth}}"
    kinds = ("r" if n else width if wide else "l" for n, wide in zip(numeric, long, strict=True))
    return [
        rf"\begin{{tabular}}{{{''.join(kinds)}}}",
        r"\toprule",
        _line(head),
        r"\midrule",
        *map(_line, rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]


def escaped(text: str) -> str:
    """Return the text with all special characters of LaTeX escaped."""
    return "".join(SPECIAL.get(char, char) for char in text)


def table_file(head: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> bytes:
    """Return the text of a LaTeX file with a table of a report.

    The file contains a comment with the title, followed by a `tabular`. The first column contains
    the names of the rows. If a name is indented, it stays indented.
    """
    cells = [
        [
            rf"\quad {escaped(cell.strip())}" if cell.startswith("  ") else escaped(cell)
            for cell in row
        ]
        for row in rows
    ]
    numeric = [False, *(True for _ in head[1:])]
    comment = re.sub(r"\s+", " ", title)
    lines = [f"% {comment}", *tabular([escaped(name) for name in head], cells, numeric)]
    return ("\n".join(lines) + "\n").encode()


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _is_number(value: Any) -> bool:
    return value is None or value == "" or (
        isinstance(value, int | float) and not isinstance(value, bool)
    )  # fmt: skip


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None or value == "":
        return "--"
    if not isinstance(value, float):
        return escaped(str(value))
    spread, low, high = (row.get(f"{name}{ending}") for ending in (SPREAD, LOW, HIGH))
    if isinstance(spread, float):
        return rf"${_digits(value, spread)} \pm {_digits(spread, spread)}$"
    if isinstance(low, float) and isinstance(high, float):
        half = (high - low) / 2
        return " ".join((f"${_digits(value, half)}$",
                         f"[${_digits(low, half)}$, ${_digits(high, half)}$]"))  # fmt: skip
    return f"${_digits(value)}$"


def _digits(value: float, spread: float = math.nan) -> str:
    """Return a number with four significant digits, or rounded to the second digit of `spread`."""
    if math.isnan(value):
        return r"\mathrm{nan}"
    if math.isinf(value):
        return r"\infty" if value > 0 else r"-\infty"
    if spread >= 1e-3 and max(spread, abs(value)) < 1e5:  # also false if the spread is NaN
        return f"{value:.{max(0, 1 - math.floor(math.log10(spread)))}f}"
    text = f"{value:.{DIGITS}g}"
    mantissa, e, power = text.partition("e")
    return rf"{mantissa} \cdot 10^{{{int(power)}}}" if e else text
