"""What a training run says about its overlap at the end."""

from __future__ import annotations

from fakes import build_fake_engine

from harness.training_summary import summary_lines
from oppo_kit.config import OverlapConfig
from oppo_kit.types import Span


def reports_of(**overlap):
    engine = build_fake_engine(
        length_of=lambda draw, sample: 40 if draw % 3 == 0 else 3,
        batch_size=2,
        num_steps=6,
        overlap=OverlapConfig(**overlap),
        train_s=4.0,
        score_s=0.5,
    )
    busy = [
        Span("scoring process", "feed reward", 0.0, 0.25, 30),
        Span("scoring process", "score reward", 1, 2, 10),
    ]
    engine.scorers["reward"].take_spans = lambda: list(busy)
    return list(engine.run())


def test_the_lines_say_where_the_time_went_what_was_hidden_and_what_was_carried() -> None:
    reports = reports_of(delta=2, score_at="chunk", chunk_tokens=8, decode_tokens=4)
    times, hidden, carried = summary_lines(reports)
    steps = reports[1:]
    total_s = sum(report.step_s for report in steps)
    assert f"training {20.0 / total_s:.0%}" in times
    assert f"waiting for scores {sum(r.score_s for r in steps) / total_s:.0%}" in times
    assert "scored at (steps): chunk 8 × 5; scorers worked 6.2 s" in hidden
    assert "75% of their tokens before a response had ended" in hidden
    share = sum(r.num_deferred for r in steps) / 10
    assert f"{share:.0%} of the trained groups were carried over" in carried
    assert share > 0


def test_without_overlap_nothing_is_said_of_what_was_hidden_or_carried() -> None:
    reports = reports_of(schedule="sequential")
    for report in reports:
        report.tokens_prefetched = 0
    lines = summary_lines(reports)
    assert len(lines) == 2
    assert "batch × 5" in lines[1]
    assert "before a response" not in lines[1]


def test_a_run_too_short_to_say_anything_says_nothing() -> None:
    assert summary_lines(reports_of(delta=2)[:2]) == []
    assert summary_lines([]) == []
