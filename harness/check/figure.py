"""The picture of a check: both sides' held-out curves with bands over seeds, and the margin about the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness.check.equivalence import Comparison
from harness.check.pairing import FloatArray
from harness.figure_parts import legend, new_figure
from harness.figures import DOTS_PER_INCH, QUICK_NOTE
from harness.statistics import mean_difference

# As the reports draw a baseline and what is under test; not by runner, since one may be on both sides.
REFERENCE_COLOUR, RUN_COLOUR, MARGIN_COLOUR = "#4d4d4d", "#D55E00", "#F0E442"
_TITLES = {
    "equivalent": "Equivalent within {share} of the gain",
    "different": "Different by more than {share} of the gain",
    "undecided": "Cannot tell at {share} of the gain",
}


def write_figure(comparison: Comparison, file: Path) -> None:
    """Write the picture as PNG, whatever the file's name ends in."""
    figure = curves_figure(comparison)
    FigureCanvasAgg(figure)
    figure.savefig(file, dpi=DOTS_PER_INCH, format="png")


def curves_figure(comparison: Comparison) -> Figure:
    """Mean and 90 % band of the mean over seeds, by side; the final margin shaded about the reference."""
    curves = comparison.curves
    factor = 100.0 if curves.field == "accuracy" else 1.0
    figure, ((axis,),) = new_figure(rows=1, columns=1, width=8, height=4.6)
    xs = [float(count) for count in curves.responses]
    middle = curves.reference.mean(axis=0) * factor
    allowed = comparison.final.margin * factor
    axis.fill_between(
        xs, middle - allowed, middle + allowed, color=MARGIN_COLOUR, alpha=0.35, lw=0, label="margin (final)"
    )
    _draw_band(axis, xs, curves.reference * factor, REFERENCE_COLOUR, "--", curves.reference_label)
    _draw_band(axis, xs, curves.run * factor, RUN_COLOUR, "-", curves.run_label)
    axis.set(
        xlabel="trained responses",
        ylabel="held-out accuracy (%)" if curves.field == "accuracy" else "held-out score (mean)",
    )
    num_seeds = len(comparison.seeds)
    title = _TITLES[comparison.verdict].format(share=f"{100 * comparison.margin:g} %")
    band = "band: 90 % interval of the mean" if num_seeds > 1 else "one seed, so no band"
    axis.set_title(
        f"{title}; {num_seeds} seed{'' if num_seeds == 1 else 's'}; {band}", loc="left", fontsize=10
    )
    if curves.is_smoke:
        figure.supxlabel(QUICK_NOTE, color=RUN_COLOUR, fontsize=11, weight="bold")
    legend(figure, axis)
    return figure


def _draw_band(
    axis: Axes, xs: Sequence[float], values: FloatArray, colour: str, style: str, label: str
) -> None:
    points = [mean_difference(list(map(float, column))) for column in values.T]
    means = numpy.array([point.mean for point in points])
    bounds = [
        (point.mean if point.low is None else point.low, point.mean if point.high is None else point.high)
        for point in points
    ]
    if len(values) > 1:
        lows, highs = zip(*bounds, strict=True)
        axis.fill_between(xs, lows, highs, color=colour, alpha=0.2, lw=0)
    axis.plot(xs, means, color=colour, ls=style, lw=2.2, marker="o", ms=4, label=label)
