"""The figures of suites, and of the census of one run.

Each function takes columns and returns a `matplotlib.figure.Figure`: about 17 cm wide, or 9 cm
with `narrow`, for one column of print or a telephone. Nothing is global: no pyplot, no window.
"""

from analysis.figures.census import census
from analysis.figures.gap import gap_and_bound
from analysis.figures.spending import by_client
from analysis.figures.style import png, save
from analysis.figures.suites import exposure, phase, scaling
from analysis.figures.training import curves, terminal

__all__ = ["by_client", "census", "curves", "exposure", "gap_and_bound", "phase", "png", "save",
           "scaling", "terminal"]  # fmt: skip
