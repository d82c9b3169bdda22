"""What all figures share: axes, legends, the colours of the stages."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

STAGE_COLOURS = {
    "generate": "#56B4E9",
    "score": "#E69F00",
    "train": "#009E73",
    "sync": "#CC79A7",
    "engine": "#4d4d4d",
}
# Long enough in a legend for a dash and a dot to show.
HANDLE_LENGTH = 3.4


def new_figure(
    *, rows: int, columns: int, width: float, height: float, widths: Sequence[float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure and its grid of axes, by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
    axes = [list(row) for row in grid]
    for axis in (axis for row in axes for axis in row):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(visible=True, color="#dddddd", lw=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def legend(figure: Figure, axis: Axes) -> None:
    """What the axis shows, above all axes."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        columns = min(len(handles), 5)
        figure.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=columns,
            frameon=False,
            handlelength=HANDLE_LENGTH,
        )
