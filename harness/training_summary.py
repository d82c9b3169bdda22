"""What overlap did for a training run, in a few lines: where the time went, what was hidden, what was chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from oppo_kit.types import StepReport

# The first step loads and warms up, and near the end nothing new is admitted.
_MIN_STEPS = 3


def summary_lines(reports: Sequence[StepReport]) -> list[str]:
    """Lines about the steps of one process; none for a run too short to say anything.

    ``waited for scores`` is what the step waited for scorers, ``scorers worked`` what they worked, beside decoding or
    not: what is hidden is the difference.
    """
    if len(reports) < _MIN_STEPS:
        return []
    steps = reports[1:]
    total_s = sum(report.step_s for report in steps)
    shares = ", ".join(
        f"{words} {sum(getattr(report, f'{stage}_s') for report in steps) / total_s:.0%}"
        for words, stage in (
            ("decoding", "generate"),
            ("waiting for scores", "score"),
            ("training", "train"),
            ("handing over weights", "sync"),
        )
    )
    lines = [
        f"a step took {median(report.step_s for report in steps):.2f} s (median): {shares}",
        _hidden(steps),
    ]
    if any(report.num_deferred for report in steps):
        carried = sum(report.num_deferred for report in steps) / sum(
            report.groups_trained for report in steps
        )
        age = sum(report.age_mean for report in steps) / len(steps)
        lines.append(
            f"{carried:.0%} of the trained groups were carried over from an earlier step; mean age {age:.2f}"
        )
    return lines


def _hidden(steps: Sequence[StepReport]) -> str:
    busy_s = sum(report.score_busy_s for report in steps)
    waited_s = sum(report.score_s for report in steps)
    num_before = sum(report.tokens_prefetched for report in steps)
    num_read = num_before + sum(report.tokens_scored for report in steps)
    plans = Counter(
        f"{report.score_at} {report.chunk_tokens}" if report.chunk_tokens else report.score_at
        for report in steps
    )
    scored_at = ", ".join(f"{plan} × {count}" for plan, count in plans.most_common())
    hidden = (
        f"; {num_before / num_read:.0%} of their tokens before a response had ended" if num_before else ""
    )
    return (
        f"scored at (steps): {scored_at}; scorers worked {busy_s:.1f} s, waited for {waited_s:.1f} s{hidden}"
    )
