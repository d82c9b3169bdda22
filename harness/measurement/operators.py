"""Which operators the CPU time of a piece of work goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import BaseModel
from torch.profiler import ProfilerActivity, profile

from harness.formatting import markdown_table

_NUM_OPERATORS = 12


class Operator(BaseModel):
    """One operator's own time, as a share of all operators' time."""

    name: str
    num_calls: int
    share: float


def slowest_operators(work: Callable[[], object]) -> list[Operator]:
    """Carry out the work once under torch's profiler; the slowest first."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    averages = profiled.key_averages()
    total = sum(average.self_cpu_time_total for average in averages)
    slowest = sorted(averages, key=lambda average: -average.self_cpu_time_total)[:_NUM_OPERATORS]
    return [
        Operator(name=average.key, num_calls=average.count, share=average.self_cpu_time_total / total)
        for average in slowest
    ]


def operator_table(operators: Sequence[Operator]) -> str:
    """As Markdown."""
    rows = [[operator.name, str(operator.num_calls), f"{100 * operator.share:.1f}"] for operator in operators]
    return markdown_table(["Operator", "Calls", "Share, %"], rows)
