"""Tables in LaTeX, for the package booktabs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedmuon.core.choices import SPREAD

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "ε": r"$\varepsilon$", "δ": r"$\delta$", "η": r"$\eta$", "λ": r"$\lambda$",
    "β": r"$\beta$", "≤": r"$\le$", "≥": r"$\ge$", "×": r"$\times$", "−": "$-$", "–": "--",
}  # fmt: skip
LOW, HIGH = "_low", "_high"  # suffixes of the interval's ends; the name alone is the mean
DIGITS = 4


def latex(rows: Sequence[Mapping[str, Any]], caption: str = "", label: str = "") -> str:
    r"""Return rows as a LaTeX table. Add \usepackage{booktabs} to your document.

    A mean and its standard deviation share a column, as do a mean and its interval.

    Args:
        rows: One mapping per row of the table. The names become the column headings.
        caption: Caption in LaTeX, inserted unchanged.
        label: Label for \ref.

    Returns:
        A `table` environment, or only a `tabular` if there is neither caption nor label.
    """
    heads = list(dict.fromkeys(name for row in rows for name in row))
    parts = {f"{name}{more}" for name in heads for more in (SPREAD, LOW, HIGH)}
    shown = [name for name in heads if name not in parts]
    numeric = {name: all(_is_number(row.get(name)) for row in rows) for name in shown}
    lines = [
        rf"\begin{{tabular}}{{{''.join('r' if numeric[name] else 'l' for name in shown)}}}",
        r"\toprule",
        _line([escaped(name.replace("_", " ")) for name in shown]),
        r"\midrule",
        *(_line([_cell(row, name) for name in shown]) for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    if not (caption or label):
        return "\n".join(lines) + "\n"
    around = [r"\begin{table}[t]", r"\centering"]
    around += [rf"\caption{{{caption}}}"] if caption else []
    around += [rf"\label{{{label}}}"] if label else []
    return "\n".join([*around, *lines, r"\end{table}"]) + "\n"


def escaped(text: str) -> str:
    """Return the text with all special characters of LaTeX escaped."""
    return "".join(SPECIAL.get(one, one) for one in text)


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
    spread, low, high = (row.get(f"{name}{more}") for more in (SPREAD, LOW, HIGH))
    if isinstance(spread, float):
        return rf"${_digits(value)} \pm {_digits(spread)}$"
    if isinstance(low, float) and isinstance(high, float):
        return f"${_digits(value)}$ [${_digits(low)}$, ${_digits(high)}$]"
    return f"${_digits(value)}$"


def _digits(value: float) -> str:
    if math.isnan(value):
        return r"\mathrm{nan}"
    if math.isinf(value):
        return r"\infty" if value > 0 else r"-\infty"
    text = f"{value:.{DIGITS}g}"
    mantissa, e, power = text.partition("e")
    return rf"{mantissa} \cdot 10^{{{int(power)}}}" if e else text
