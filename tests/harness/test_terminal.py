"""The summary in the terminal shows every runner, whole, however narrow the terminal is."""

from __future__ import annotations

import pytest
from results_factory import make_ladder
from rich.console import Console

from harness.statistics import fill_derived
from harness.terminal import summary_table


@pytest.mark.parametrize("width", [80, 200])
def test_no_name_and_no_number_is_cut(width: int) -> None:
    result = fill_derived(make_ladder())
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(summary_table(result, console.width))
    text = capture.get()
    assert "…" not in text
    for name in result.runners:
        assert name in text
    assert result.ratios
    for key, ratio in result.ratios.items():
        [line] = [line for line in text.splitlines() if f" {key} " in line]
        assert f" {ratio.median:.2f} " in line
    heads = sum("measured steps" in line for line in text.splitlines())
    assert heads == (1 if width == 200 else -(-len(result.runners) // 3))
