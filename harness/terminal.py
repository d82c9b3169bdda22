"""The summary of a benchmark in the terminal; the whole of it stands in the report."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from harness.formatting import format_ratio_range
from harness.report import runner_rows
from harness.schema import Result
from harness.statistics import summarise_runner

# Of the first column and of a runner's, borders included: the longest label, and numbers of a usual size.
_LABEL_WIDTH = 37
_RUNNER_WIDTH = 14


def summary_table(result: Result, width: int) -> Group:
    """One column a runner, in as many tables as fit so many characters, and a table of the ratios."""
    names = list(result.runners)
    rows = runner_rows(result, [summarise_runner(result, name) for name in names])
    together = max(1, (width - _LABEL_WIDTH) // _RUNNER_WIDTH)
    tables = []
    for start in range(0, len(names), together):
        table = Table(title=_title(result) if start == 0 else None, title_justify="left")
        table.add_column("measured steps")
        for name in names[start : start + together]:
            table.add_column(name, justify="right")
        for label, *cells in rows:
            table.add_row(label, *cells[start : start + together])
        tables.append(table)
    return Group(*tables, *([_ratios(result)] if result.ratios else []))


def _title(result: Result) -> str:
    return f"{result.name}: smoke run, do not quote" if result.is_quick else result.name


def _ratios(result: Result) -> Table:
    table = Table("time per response", "times as long", "over pairs")
    for key, ratio in result.ratios.items():
        table.add_row(key, f"{ratio.median:.2f}", format_ratio_range(ratio))
    return table
