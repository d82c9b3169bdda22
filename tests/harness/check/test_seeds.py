"""How many seeds a check will need: against numbers worked out by hand, and every refusal."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from check_results import make_checked, save

from harness.check.equivalence import power, seeds_needed
from harness.check.seeds import SeedPlan, main, plan_seeds, render
from oppo_kit.errors import ConfigError, StateError

# Finals 0.58, 0.6, 0.62: gain 0.4, spread 0.02; areas 0.445, 0.45, 0.455: gain 0.25, spread 0.005.
CURVES = [(0.2, 0.5, 0.58), (0.2, 0.5, 0.6), (0.2, 0.5, 0.62)]


def plan(folder: Path, num_seeds: int = 8, margin: float = 0.1) -> SeedPlan:
    return plan_seeds(folder, runner="both", num_seeds=num_seeds, margin=margin, command="a command")


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return save(make_checked(CURVES), tmp_path / "reference")


def test_spreads_are_those_of_the_curves_numbers(reference: Path) -> None:
    found = {(each.by, each.number): each for each in plan(reference).spreads}
    assert set(found) == {(by, number) for by in ("score", "accuracy") for number in ("final", "area")}
    assert found["accuracy", "final"].gain == pytest.approx(0.4)
    assert found["accuracy", "final"].spread == pytest.approx(0.02)
    assert found["accuracy", "area"].gain == pytest.approx(0.25)
    assert found["accuracy", "area"].spread == pytest.approx(0.005)
    assert found["score", "final"].gain == pytest.approx(0.8)  # the factory's score is twice its accuracy
    assert found["accuracy", "final"].paired_frac == pytest.approx(math.sqrt(2) * 0.05)


def test_power_and_seeds_are_those_of_the_check(reference: Path) -> None:
    planned = plan(reference)
    fracs = [math.sqrt(2) * 0.05, math.sqrt(2) * 0.02]
    assert planned.num_needed("score", 0.1) == seeds_needed(fracs, [0.1, 0.1])
    misses = sum(1 - power(8, frac, 0.1) for frac in fracs)
    assert planned.least_power("score", 0.1) == pytest.approx(1 - misses)
    assert 0.8 < planned.least_power("score", 0.1) < 1
    assert plan(reference, num_seeds=2).least_power("score", 0.1) < 0.8


def test_the_files_say_what_is_planned(reference: Path, tmp_path: Path, capsys) -> None:
    arguments = [str(reference), "--runner", "both", "--seeds", "8", "--margin", "10%"]
    assert main([*arguments, "--out", str(tmp_path / "plan")]) == 0
    text = (tmp_path / "plan" / "seeds.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert (
        "From 3 seeds of runner `both` alone. Planned: 8 seeds, a margin of 10 % of the gain in held-out"
        in text
    )
    assert "power at least " in text
    assert "That is enough: " in text
    assert "| accuracy | area | 0.250 | 0.00500 | 2.83 % |" in text
    stored = SeedPlan.model_validate_json((tmp_path / "plan" / "seeds.json").read_text())
    assert (stored.result, stored.num_seeds_seen) == ("synthetic", 3)
    assert json.loads((tmp_path / "plan" / "seeds.json").read_text())["command"].endswith(
        "--seeds 8 --margin 10%"
    )


def test_too_few_seeds_are_advised_what_would_be_enough(reference: Path) -> None:
    needed = plan(reference, 2).num_needed("score", 0.1)
    text = " ".join(render(plan(reference, 3)).split())
    assert f"That is not enough for 80 %: take {needed} seeds, or a margin of " in text
    assert "no number of seeds up to 1,000 is enough" in render(plan(reference, 2, margin=0.001))


def test_a_margin_that_is_no_number_ends_with_one_line(reference: Path, tmp_path: Path, capsys) -> None:
    arguments = [str(reference), "--runner", "both", "--seeds", "8", "--margin", "wide"]
    assert main([*arguments, "--out", str(tmp_path / "plan")]) == 2
    assert "error: --margin 'wide' is no number; pass a share" in capsys.readouterr().err


def test_without_a_checker_only_the_score_is_planned(reference: Path, tmp_path: Path) -> None:
    result = make_checked(CURVES)
    for run in result.runners["both"].runs:
        for evaluation in run.evaluations:
            evaluation.accuracy = None
    planned = plan(save(result, tmp_path / "judged"))
    assert {spread.by for spread in planned.spreads} == {"score"}
    assert "| margin | seeds, by score | power, by score |" in render(planned)


@pytest.mark.parametrize(("num_seeds", "margin"), [(1, 0.1), (8, 0.0), (8, 1.0)])
def test_a_plan_that_says_nothing_is_refused(reference: Path, num_seeds: int, margin: float) -> None:
    with pytest.raises(
        ConfigError, match=f"a check of {num_seeds} seeds within {margin} of the gain says nothing"
    ):
        plan(reference, num_seeds, margin)


def test_one_seed_and_no_gain_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="has one seed of runner 'both', which shows no spread"):
        plan(save(make_checked(CURVES[:1]), tmp_path / "one"))
    with pytest.raises(
        StateError, match=r"gained nothing: held-out score 0\.4 before training, its final 0\.3"
    ):
        plan(save(make_checked([(0.2, 0.3, 0.15)] * 2), tmp_path / "worse"))


def test_an_unknown_runner_ends_with_one_line(reference: Path, tmp_path: Path, capsys) -> None:
    assert main([str(reference), "--runner", "bth", "--seeds", "8", "--out", str(tmp_path / "plan")]) == 2
    assert "unknown runner of the result 'bth'; did you mean 'both'?" in capsys.readouterr().err
