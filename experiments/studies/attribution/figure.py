"""Mean rank correlations of every score with exact runs."""

from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.findings import Picture
from fedmuon.experiments.studies.attribution.findings import (
    OURS,
    TRUTHS,
    mean,
    name_of,
    rhos,
    settings,
)


@style.styled
def correlations(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each truth: a line for each method, a mark for each variant."""
    truths = list(dict.fromkeys(truth for _, truth in settings(rows)))
    methods = list(dict.fromkeys(rows["method"].tolist()))
    variants = list(dict.fromkeys(rows["variant"].tolist()))
    figure, panels = style.canvas(len(truths), narrow, 2.6)
    for axes, truth in zip(panels, truths, strict=True):
        for place, (variant, look) in enumerate(zip(variants, style.SERIES, strict=False)):
            found = [mean(rhos(rows, variant, truth, method)) for method in methods]
            value, reach = zip(*found, strict=True)
            at = [line + 0.2 * (place - (len(variants) - 1) / 2) for line in range(len(methods))]
            axes.errorbar(value, at, xerr=reach, fmt=look[1], color=look[0], ms=4, lw=0,
                          elinewidth=1, label=variant)  # fmt: skip
        axes.set_yticks(range(len(methods)), [name_of(one) for one in methods])
        axes.get_yticklabels()[methods.index(OURS)].set_fontweight("bold")
        axes.invert_yaxis()
        axes.set_title(truth if narrow else TRUTHS[truth], loc="left")
        axes.set_xlabel("mean Spearman's ρ")
        if axes is not panels[0] and not narrow:
            axes.set_yticklabels([])
    for axes in panels:
        axes.set_xlim(min(one.get_xlim()[0] for one in panels), 1.05)
    style.legend_below(figure, panels[0], 3)
    return figure


PICTURES = (
    Picture(
        "attribution",
        correlations,
        "How well scores of train samples foretell exact runs without them",
        "Runs of leave-one-out lack one sample; those on halves of all are foretold by the sum of "
        "the scores of those who stayed. Bars are 95% intervals over test samples.",
    ),
)
