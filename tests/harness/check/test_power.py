"""The study of error rates: what it simulates, and the files it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from harness.check import power as study_module
from harness.check.equivalence import curve_numbers
from harness.check.power import (
    GAIN,
    MARGIN,
    RESPONSES,
    START,
    Cell,
    PowerStudy,
    Scenario,
    count,
    main,
    measure,
    render,
    simulate,
)


@pytest.mark.parametrize("difference", [0.5, 2.0])
def test_both_numbers_differ_by_as_many_margins_as_are_true(difference: float) -> None:
    run, reference = simulate(Scenario(4, 1e-12, difference), 2000, numpy.random.default_rng(0))
    ours, theirs = (curve_numbers(RESPONSES, curves) for curves in (run, reference))
    share_lost = ((theirs - ours) / (theirs - START)).mean(axis=(0, 1))
    assert share_lost == pytest.approx([MARGIN * difference] * 2)
    assert (theirs[..., 0] - START).mean() == pytest.approx(GAIN * 0.983, rel=0.01)  # the last two points


def test_runs_of_a_seed_share_its_luck_but_not_their_own() -> None:
    run, reference = simulate(Scenario(1, 0.05, 0.0), 4000, numpy.random.default_rng(0))
    ends = run[:, 0, -1], reference[:, 0, -1]
    # Seeds: 0.2 of the gain; a run's own luck 0.05, and half of that from evaluating.
    assert numpy.std(ends[0]) == pytest.approx(GAIN * (0.2**2 + 0.05**2 + 0.025**2) ** 0.5, rel=0.05)
    assert numpy.std(ends[0] - ends[1]) == pytest.approx(GAIN * (2 * (0.05**2 + 0.025**2)) ** 0.5, rel=0.05)
    assert (run[..., 0] == START).all()


def test_every_simulated_check_is_counted_once() -> None:
    cell = count(Scenario(3, 0.05, 1.0), 300, numpy.random.default_rng(0))
    ends = cell.num_equivalent, cell.num_different, cell.num_undecided, cell.num_refused
    assert sum(ends) == 300
    assert cell.num_refused == 0
    assert cell.num_undecided > 0


def test_a_large_true_difference_is_found_and_none_is_passed() -> None:
    assert count(Scenario(10, 0.02, 2.0), 200, numpy.random.default_rng(0)).num_different > 190
    assert count(Scenario(10, 0.02, 0.0), 200, numpy.random.default_rng(0)).num_equivalent > 190


def test_the_study_is_repeatable_and_covers_every_cell() -> None:
    first, again = (measure(20, 5, command="test") for _ in range(2))
    assert first.cells == again.cells
    assert len(first.cells) == 60
    assert first.cells != measure(20, 6, command="test").cells


def test_the_report_holds_the_rates_and_the_largest_errors() -> None:
    study = measure(10, 0, command="a command")
    cells = [
        Cell(
            num_seeds=3,
            spread_frac=0.05,
            difference=difference,
            num_equivalent=equivalent,
            num_different=different,
            num_undecided=10 - equivalent - different,
            num_refused=0,
        )
        for difference, equivalent, different in ((0.0, 8, 0), (1.0, 1, 2), (2.0, 0, 9))
    ]
    text = render(PowerStudy(**(study.model_dump() | {"cells": cells})))
    assert "| spread | seeds | 0 margins | 1 margins | 2 margins | stated power |" in text
    assert "| 5 % | 3 | 80.0 / 0.0 / 20.0 | 10.0 / 20.0 / 70.0 | 0.0 / 90.0 / 10.0 |" in text
    assert "exit 0 at a true difference of a margin or more: 10.0 %." in text
    assert "exit 1 at a true difference of a margin or less: 20.0 %." in text
    assert "`a command`" in text


def test_the_command_writes_counts_and_report(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(study_module, "NUM_SEEDS", (3,))
    assert main(["--out", str(tmp_path / "new"), "--simulations", "20", "--seed", "7"]) == 0
    values = json.loads((tmp_path / "new" / "power.json").read_text())
    assert (values["random_seed"], values["num_simulations"], len(values["cells"])) == (7, 20, 15)
    assert values["scipy"]
    assert (tmp_path / "new" / "power.md").read_text() in capsys.readouterr().out
