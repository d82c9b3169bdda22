"""The timeline of a step: from engine spans to the figure."""

from __future__ import annotations

from fakes import build_fake_engine
from results_factory import make_ladder

from harness.runners.oppo import to_timeline
from harness.schema import TimelineSpan
from harness.timeline import timeline_figure
from oppo_kit.config import OverlapConfig
from oppo_kit.types import Span


def test_spans_begin_with_the_step() -> None:
    engine = build_fake_engine(
        length_of=lambda draw, sample: 4,
        batch_size=2,
        num_steps=1,
        overlap=OverlapConfig(decode_tokens=2),
        train_s=3.0,
    )
    [report] = engine.run()
    assert [span.name for span in report.spans].count("generate") == 3, "admission and two decode calls"
    report.spans.append(Span("scoring process", "feed reward", report.spans[0].start_s + 1.5, 2.5, 7))
    timeline = to_timeline(report)
    assert timeline[0].start_s == 0.0
    assert timeline[-1] == TimelineSpan(
        step=0, lane="scoring process", name="feed reward", start_s=1.5, stop_s=2.5, num_tokens=7
    )
    assert max(span.stop_s for span in timeline if span.name == "train") == 7.0


def test_the_figure_has_a_row_for_each_runner_with_a_timeline_and_a_lane_for_each_part() -> None:
    ladder = make_ladder()
    assert timeline_figure(ladder) is None
    for name, lanes in (("sequential", ["actor"]), ("overcommit", ["scoring process", "actor"])):
        ladder.runners[name].runs[0].timeline = [
            TimelineSpan(step=3, lane=lane, name="feed reward", start_s=0.0, stop_s=1.0) for lane in lanes
        ]
    figure = timeline_figure(ladder)
    assert figure is not None
    assert [axis.get_title(loc="left") for axis in figure.axes] == [
        "sequential, step 4",
        "overcommit, step 4",
    ]
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["actor", "scoring process"]
