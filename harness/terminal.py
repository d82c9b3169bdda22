"""The summary of a benchmark in the terminal; the whole of it stands in the report."""

from __future__ import annotations

from rich.table import Table

from harness.formatting import format_ratio_range
from harness.report import runner_rows
from harness.schema import Result
from harness.statistics import summarise_runner


def summary_table(result: Result) -> Table:
    """One column a runner, and below the runners the ratios with their range over pairs."""
    title = f"{result.name}: smoke run, do not quote" if result.is_quick else result.name
    table = Table(title=title, title_justify="left")
    table.add_column("measured steps")
    for name in result.runners:
        table.add_column(name, justify="right")
    for row in runner_rows(result, [summarise_runner(result, name) for name in result.runners]):
        table.add_row(*row)
    table.add_section()
    for key, ratio in result.ratios.items():
        slow, _, fast = key.partition("/")
        cells = {fast: f"{ratio.median:.2f}x", slow: "1"}
        table.add_row(
            f"time, {key} ({format_ratio_range(ratio)})", *(cells.get(name, "") for name in result.runners)
        )
    return table
