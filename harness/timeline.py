"""One step of each runner, part by part: what the actor did, and what the scorers did meanwhile."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.figure_parts import STAGE_COLOURS, new_figure
from harness.schema import Result, TimelineSpan
from oppo_kit.telemetry.spans import ACTOR_LANE

_COLOURS = {
    "decoding": STAGE_COLOURS["generate"],
    "waiting for scores": "#bbbbbb",
    "training": STAGE_COLOURS["train"],
    "feeding chunks": "#CC79A7",
    "scoring ended responses": STAGE_COLOURS["score"],
}


def timeline_figure(result: Result) -> Figure | None:
    """The middle step of the first run of each runner; None where nothing was recorded."""
    lines = {
        name: runner.runs[0].timeline
        for name, runner in result.runners.items()
        if runner.runs and runner.runs[0].timeline
    }
    if not lines:
        return None
    figure, axes = new_figure(rows=len(lines), columns=1, width=10, height=1.0 + 1.1 * len(lines))
    starts_s = {name: _start_s(spans) for name, spans in lines.items()}
    end_s = max(span.stop_s - starts_s[name] for name, spans in lines.items() for span in spans)
    for (name, spans), (axis,) in zip(lines.items(), axes, strict=True):
        lanes = [ACTOR_LANE, *sorted({span.lane for span in spans} - {ACTOR_LANE})]
        for span in spans:
            axis.broken_barh(
                [(span.start_s - starts_s[name], span.stop_s - span.start_s)],
                (lanes.index(span.lane) - 0.4, 0.8),
                facecolors=_colour(span),
                edgecolors="white",
                linewidth=0.3,
            )
        axis.set(yticks=range(len(lanes)), yticklabels=lanes, xlim=(0, end_s), ylim=(len(lanes) - 0.4, -0.6))
        axis.set_title(f"{name}, step {spans[0].step + 1}", loc="left", fontsize=10)
        axis.grid(visible=False, axis="y")
    axes[-1][0].set_xlabel("seconds since the step began")
    handles = [Patch(facecolor=colour, label=label) for label, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False)
    return figure


def _start_s(spans: list[TimelineSpan]) -> float:
    """When the actor admitted or decoded for the first time; what stands before it is left over from another step."""
    return min(
        (span.start_s for span in spans if span.lane == ACTOR_LANE and span.name == "generate"), default=0.0
    )


def _colour(span: TimelineSpan) -> str:
    if span.lane != ACTOR_LANE:
        return _COLOURS["feeding chunks" if span.name.startswith("feed ") else "scoring ended responses"]
    return _COLOURS["waiting for scores"] if span.name == "score" else STAGE_COLOURS.get(span.name, "#4d4d4d")
