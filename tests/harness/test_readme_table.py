"""The README's table follows the committed results files."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_factory import make_ladder, without_accuracy

from harness.readme_table import BEGIN, END, NO_RESULTS, main, render_table
from harness.schema import Result
from oppo_kit.errors import StateError

README = f"# Title\n\nbefore\n\n{BEGIN}\nstale\n{END}\n\nafter\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    file = tmp_path / "README.md"
    file.write_text(README)
    return file


def _commit(results: Path, name: str, result: Result) -> None:
    (results / name).mkdir()
    (results / name / "result.json").write_text(result.model_dump_json())


def test_every_full_result_has_a_row_with_its_figures(results: Path) -> None:
    _commit(results, "b", make_ladder())
    _commit(results, "a", make_ladder().model_copy(update={"name": "first"}))
    rows = render_table(results).splitlines()[2:4]
    assert rows[0].startswith(
        "| [first](results/a/report.md) | ppo, tiny, B = 4, 12 steps | Test CPU, 2 cores |"
    )
    assert rows[1] == (
        "| [synthetic](results/b/report.md) | ppo, tiny, B = 4, 12 steps | Test CPU, 2 cores | "
        "2.50 (2.00 to 3.00) | 1.67 (1.67 to 1.67) | n/a | n/a | n/a | -1.00 (-4.37 to +2.37), overcommit less trl | "
        "trl 263 s, sequential 210 s, overcommit 205 s |"
    )


def test_without_accuracy_the_row_has_the_difference_in_score(results: Path) -> None:
    _commit(results, "a", without_accuracy(make_ladder()))
    [row] = render_table(results).splitlines()[2:3]
    assert "| -0.02 (-0.0874 to +0.0474), score, overcommit less trl |" in row


def test_figures_are_derived_from_the_raw_samples_not_read(results: Path) -> None:
    ladder = make_ladder()
    for run in ladder.runners["trl"].runs:
        for step in run.steps:
            step.step_s *= 2
    _commit(results, "a", ladder)
    assert "5.00 (4.00 to 6.00)" in render_table(results)


def test_smoke_runs_are_never_quoted(results: Path) -> None:
    _commit(results, "quick", make_ladder().model_copy(update={"is_quick": True}))
    assert render_table(results) == NO_RESULTS


def test_the_responses_of_a_group_are_said(results: Path) -> None:
    ladder = make_ladder()
    ladder.workload.algorithm, ladder.workload.group_size = "grpo", 8
    _commit(results, "a", ladder)
    assert "| grpo, tiny, B = 4 × 8, 12 steps |" in render_table(results)


def test_another_backend_is_said(results: Path) -> None:
    ladder = make_ladder()
    ladder.workload.backend = "vllm"
    _commit(results, "a", ladder)
    assert "| ppo, tiny, B = 4, 12 steps, backend vllm |" in render_table(results)


def test_a_result_without_any_of_the_ratios_has_no_row(results: Path) -> None:
    ladder = make_ladder()
    ladder.runners = {"trl": ladder.runners["trl"]}
    _commit(results, "a", ladder)
    assert render_table(results) == NO_RESULTS


def test_split_placement_and_uncommitted_changes_are_said(results: Path) -> None:
    ladder = make_ladder()
    ladder.workload.placement = "split"
    ladder.environment.is_dirty = True
    _commit(results, "a", ladder)
    table = render_table(results)
    assert "placement split (no speed-up over a normal loop)" in table
    assert "Test CPU, 2 cores (uncommitted changes)" in table


def test_a_missing_runner_leaves_its_cells_absent(results: Path) -> None:
    ladder = make_ladder()
    del ladder.runners["trl"]
    _commit(results, "a", ladder)
    row = render_table(results).splitlines()[2]
    assert (
        "| n/a | 1.67 (1.67 to 1.67) | n/a | n/a | n/a | -1.00 (-4.37 to +2.37), overcommit less sequential |"
        in row
    )


def test_one_pair_and_a_gain_that_was_not_reached_are_said(results: Path) -> None:
    ladder = make_ladder()
    for runner in ladder.runners.values():
        del runner.runs[1:]
    for evaluation in ladder.runners["overcommit"].runs[0].evaluations[1:]:
        evaluation.accuracy = 0.0
    _commit(results, "a", ladder)
    row = render_table(results).splitlines()[2]
    assert " (one pair) |" in row
    assert "overcommit not reached |" in row
    assert "trl not reached" not in row


def test_a_results_file_that_does_not_fit_is_named(results: Path) -> None:
    (results / "a").mkdir()
    (results / "a" / "result.json").write_text("{}")
    with pytest.raises(StateError, match="has schema_version None, this release reads 1"):
        render_table(results)


def test_only_the_block_between_the_markers_is_rewritten(readme: Path, results: Path) -> None:
    _commit(results, "a", make_ladder())
    assert main([str(readme), str(results)]) == 0
    assert readme.read_text() == README.replace("stale", render_table(results))


def test_check_fails_until_the_readme_is_rewritten(
    readme: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(readme), str(results)]
    assert main([*arguments, "--check"]) == 1
    assert "is out of date; run: python -m harness.readme_table" in capsys.readouterr().err
    assert readme.read_text() == README
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0


@pytest.mark.parametrize("text", ["no markers", f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}"])
def test_a_readme_without_the_two_markers_in_order_is_refused(
    text: str, readme: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme.write_text(text)
    assert main([str(readme), str(results)]) == 2
    assert "the table needs each exactly once, in this order" in capsys.readouterr().err
    assert readme.read_text() == text


def test_a_missing_readme_is_an_error_without_a_traceback(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(results / "README.md"), str(results)]) == 2
    assert "README.md" in capsys.readouterr().err
