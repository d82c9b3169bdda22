"""The report shows the right numbers, shouts what is wrong, and never prints a raw None or NaN."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from results_factory import make_evaluation, make_ladder, make_result, make_run, without_accuracy

from harness.figures import QUICK_NOTE, display_unit, reward_figure, stages_figure, write_figures
from harness.formatting import format_number, format_percent, format_seconds, markdown_table, one_sentence_of
from harness.report import render_report, report_runs, write_report
from harness.schema import Bound, Result, UtilisationSeries
from harness.statistics import fill_derived
from oppo_kit.errors import StateError

RAW_VALUE = re.compile(r"\b(None|NaN|nan|inf)\b")


def _series(
    name: str, values: list[float | None], unit: str = "frac", reason: str | None = None
) -> UtilisationSeries:
    times_s = [float(index) for index in range(len(values))]
    return UtilisationSeries(name=name, unit=unit, times_s=times_s, values=values, absent_reason=reason)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be written; rendering them takes most of a second each."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **settings: figures.append(self))
    return figures


def _text(result: Result) -> str:
    return render_report(fill_derived(result), {})


def _row(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_report_and_every_figure_it_names_are_written(tmp_path: Path) -> None:
    ladder = make_ladder()
    ladder.runners["trl"].runs[0].utilisation = [_series("cpu/utilisation_frac", [0.5, None, 0.7])]
    file = write_report(ladder, tmp_path / "new" / "folder")
    named = re.findall(r"!\[[^]]+\]\(([^)]+)\)", file.read_text())
    assert sorted(named) == ["lengths.png", "reward.png", "stages.png", "step_time.png", "utilisation.png"]
    for name in named:
        with Image.open(file.parent / name) as image:
            assert image.width >= 1000
            # Not a blank sheet.
            assert len(image.convert("L").getcolors()) > 10


def test_a_figure_that_has_no_samples_any_more_is_removed(tmp_path: Path, saved: list[Figure]) -> None:
    (tmp_path / "utilisation.png").write_bytes(b"stale")
    assert "utilisation" not in write_figures(make_ladder(), tmp_path)
    assert not (tmp_path / "utilisation.png").exists()


def test_reward_is_drawn_for_every_run_with_its_mean() -> None:
    figure = reward_figure(make_ladder())
    for axis in figure.axes:
        # Three runners: three thin lines and a labelled thick one each.
        assert len(axis.lines) == 12
        assert axis.get_xlabel()
    labels = [line.get_label() for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert labels == ["trl", "sequential", "overcommit"]
    overcommit_mean = next(line for line in figure.axes[1].lines if line.get_label() == "overcommit")
    assert overcommit_mean.get_xydata().tolist() == [[0.0, 20.0], [112.0, 45.0], [224.0, pytest.approx(69.0)]]


def test_a_long_run_is_drawn_with_a_moving_average_that_names_its_window() -> None:
    figure = reward_figure(make_result({"trl": [make_run([1.0] * 40)]}))
    training = figure.axes[2]
    assert training.get_title(loc="left") == "thick: moving average of 5 steps"
    thin, thick = training.lines
    # The reward of step i is 0.1 × i: the average leaves the middle alone and bends the ends inwards.
    assert thick.get_ydata()[20] == pytest.approx(thin.get_ydata()[20])
    assert thick.get_ydata()[0] == pytest.approx(0.1)


def test_a_task_without_accuracy_is_drawn_by_its_held_out_score() -> None:
    run = make_run([1.0] * 4, accuracies=())
    run.evaluations = [make_evaluation(4, 4.0, None, score_mean=1.5)]
    figure = reward_figure(make_result({"trl": [run]}))
    assert figure.axes[0].get_ylabel() == "held-out score (mean)"
    assert figure.axes[0].lines[0].get_ydata().tolist() == [1.5]


def test_the_stage_bars_sum_to_the_mean_step_time() -> None:
    figure = stages_figure(make_ladder())
    assert figure is not None
    ends = [
        max(bars[i].get_x() + bars[i].get_width() for bars in figure.axes[0].containers) for i in range(3)
    ]
    assert ends == pytest.approx([10.0, 4.0, 2.4])


def test_the_tables_show_the_derived_numbers() -> None:
    text = _text(make_ladder())
    rows = [line for line in text.splitlines() if line.startswith("| trl/overcommit |")]
    assert rows == [
        "| trl/overcommit | 4.17 | 3.33 to 5.00 | 3 | 3.33, 4.17, 5.00 |",
        "| trl/overcommit | 5.00 | 4.00 to 6.00 | 3 | 4.00, 5.00, 6.00 |",
    ]
    assert _row(text, "Median step time") == ["10.0 s", "4.00 s", "2.00 s"]
    assert _row(text, "Time per trained response") == ["2.50 s", "1.00 s", "600 ms"]
    assert _row(text, "Generate share") == ["50.0 %"] * 3
    assert _row(text, "Deferred groups") == ["0.0 %", "0.0 %", "25.0 %"]
    assert _row(text, "Final held-out accuracy") == ["70.0 %", "70.0 %", "69.0 %"]
    assert _row(text, "overcommit less trl, accuracy (points)") == [
        "-1.00",
        "-4.37 to +2.37",
        "3",
        "+1.00, -1.00, -3.00",
    ]
    assert "| overcommit | 205 s |" in text


def test_the_summary_says_speed_and_learning_in_one_sentence() -> None:
    sentence = one_sentence_of(fill_derived(make_ladder()))
    assert sentence == (
        "Per trained response, trl took 4.17 times as long as overcommit (median of whole runs, drain "
        "included; 3.33 to 5.00 over 3 pairs); overcommit's final held-out accuracy lay 1.00 points "
        "below trl's (90 % interval -4.37 to +2.37 over 3 seeds, which contains zero)."
    )


def test_where_nobody_can_tell_what_is_right_the_score_is_reported() -> None:
    ladder = fill_derived(without_accuracy(make_ladder()))
    text = _text(ladder)
    assert _row(text, "Final held-out accuracy") == ["n/a"] * 3
    assert _row(text, "Final held-out score") == ["1.40", "1.40", "1.38"]
    assert _row(text, "overcommit less trl, score")[0] == "-0.02"
    assert "to a held-out score of 1.30, which is 90% of trl's mean gain" in text
    assert one_sentence_of(ladder).endswith(
        "; overcommit's final held-out score less trl's was -0.02 (90 % interval -0.0874 to +0.0474)."
    )


def test_a_baseline_without_gain_in_score_has_no_time_to_reward() -> None:
    ladder = without_accuracy(make_ladder())
    for run in ladder.runners["trl"].runs:
        run.evaluations[-1].score_mean = run.evaluations[0].score_mean
    assert "trl has no gain in held-out score, so there is no time to reward." in _text(fill_derived(ladder))


def test_the_summary_falls_back_to_the_next_rung_when_a_runner_is_missing() -> None:
    ladder = make_ladder()
    del ladder.runners["trl"]
    sentence = one_sentence_of(fill_derived(ladder))
    assert sentence.startswith("Per trained response, sequential took 1.67 times as long as overcommit")


def test_an_interval_without_zero_is_said_to_exclude_it() -> None:
    ladder = make_ladder()
    for run, final in zip(ladder.runners["overcommit"].runs, (0.60, 0.59, 0.61), strict=True):
        run.evaluations[-1].accuracy = final
    assert "which excludes zero" in one_sentence_of(fill_derived(ladder))


def test_a_smoke_run_is_marked_in_the_report_and_in_its_sentence() -> None:
    quick = make_ladder().model_copy(update={"is_quick": True})
    assert "SMOKE RUN: DO NOT QUOTE" in _text(quick)
    assert one_sentence_of(fill_derived(quick)).startswith("Smoke run, do not quote: per trained response")
    assert "SMOKE RUN" not in _text(make_ladder())


def test_a_smoke_run_is_marked_in_each_of_its_figures(tmp_path: Path, saved: list[Figure]) -> None:
    write_figures(make_ladder(), tmp_path)
    assert {figure.get_supxlabel() for figure in saved} == {""}
    saved.clear()
    write_figures(make_ladder().model_copy(update={"is_quick": True}), tmp_path)
    assert {figure.get_supxlabel() for figure in saved} == {QUICK_NOTE}


def test_a_split_placement_is_never_called_a_speed_up() -> None:
    split = make_ladder()
    split.workload.placement = "split"
    text = _text(split)
    assert "it is not a speed-up over an ordinary loop" in text
    assert (
        "With cores split between actor and scorers, a model of dedicated devices: per trained response"
        in text
    )


def test_conservation_is_stated_with_its_sums() -> None:
    text = _text(make_ladder())
    assert (
        "- overcommit: 144 groups drawn = 144 trained + 0 in flight + 0 queued + 0 rejected at the end of 3 "
        "runs; holds in all 36 steps."
    ) in text
    assert "VIOLATED" not in text


def test_a_conservation_violation_is_shouted() -> None:
    broken = make_ladder()
    broken.runners["overcommit"].runs[2].steps[-1].drawn = 49
    text = _text(broken)
    head = text[: text.index("## Speed")]
    assert (
        "> **CONSERVATION VIOLATED in 1 of 108 steps, first in overcommit, seed 2, pair 2, step 11: drawn 49"
        in head
    )
    assert "rejected = 48" in head
    assert "145 groups drawn ≠ 144 trained" in text
    assert "**VIOLATED in 1 of 36 steps.**" in text


def test_rejections_are_listed_with_their_reasons() -> None:
    result = make_ladder()
    step = result.runners["trl"].runs[0].steps[-1]
    step.rejected, step.drawn = {"non_finite": 1, "abstained": 2}, 51
    assert "+ 3 rejected (abstained 2, non_finite 1) at the end" in _text(result)


def test_runners_that_trained_different_amounts_are_shouted() -> None:
    uneven = make_ladder()
    uneven.runners["trl"].runs[0].steps.pop()
    assert (
        "NOT THE SAME WORK: responses trained per run differ (trl 44, 48; sequential 48; overcommit 48)"
        in _text(uneven)
    )
    assert "NOT THE SAME WORK" not in _text(make_ladder())


def test_stages_that_do_not_add_up_are_shouted() -> None:
    result = make_ladder()
    for run in result.runners["trl"].runs:
        for step in run.steps:
            step.engine_s = 0.0
    assert "STAGES DO NOT ADD UP: trl's stages are 94% of its step time" in _text(result)


def test_a_full_run_with_few_pairs_is_called_out() -> None:
    few = make_ladder()
    few.runners["trl"].runs.pop()
    assert "FEW PAIRS: 2 of at least 3" in _text(few)
    assert "FEW PAIRS" not in _text(few.model_copy(update={"is_quick": True}))
    assert "FEW PAIRS" not in _text(make_ladder())


def test_a_single_run_has_no_intervals_and_nothing_raw_is_printed() -> None:
    single = make_result({"overcommit": [make_run([1.0] * 12, delta=2)]})
    text = _text(single)
    assert not RAW_VALUE.search(text)
    assert "There is no ratio: overcommit ran without a partner to compare with." in text
    assert "there is no baseline gain" in text
    assert _row(text, "Lower bound on the step") == ["n/a"]


def test_one_pair_shows_a_ratio_without_a_range() -> None:
    text = _text(make_result({"trl": [make_run([2.0] * 12)], "sequential": [make_run([1.0] * 12)]}))
    assert "| trl/sequential | 2.00 | one pair | 1 | 2.00 |" in text
    assert "one pair" in text
    assert "one seed, so no interval" in text


def _empty_run() -> Result:
    run = make_run([1.0] * 12, accuracies=())
    run.steps, run.peak_rss_bytes = [], None
    return make_result({"trl": [run], "sequential": []})


def _without_rewards() -> Result:
    run = make_run([1.0] * 12, accuracies=(None, None))
    for step in run.steps:
        step.reward_mean, step.kl, step.trained_lengths = None, None, []
    return make_result({"trl": [run]})


@pytest.mark.parametrize("make", [_empty_run, _without_rewards, lambda: make_result({})])
def test_no_raw_none_nan_or_infinity_reaches_the_reader(make, tmp_path: Path) -> None:
    result = make()
    result.environment.commit, result.environment.is_dirty = None, None
    text = write_report(result, tmp_path).read_text()
    assert not RAW_VALUE.search(text)
    assert "\n\n\n" not in text


def test_the_bound_and_the_share_reached_are_shown() -> None:
    bound = Bound(
        decode_s_per_token=1e-3,
        score_s_per_token=2e-5,
        train_s_per_token=2e-3,
        step_s={"trl": 5.0},
        share_reached={},
    )
    text = _text(make_ladder().model_copy(update={"bound": bound}))
    assert _row(text, "Bound / median step") == ["50.0 %", "n/a", "n/a"]
    assert "decode 1.00 ms, score 20.0 µs, train 2.00 ms" in text


def test_utilisation_is_summarised_and_what_is_absent_says_why() -> None:
    ladder = make_ladder()
    for run in ladder.runners["trl"].runs:
        run.utilisation = [
            _series("cpu/utilisation_frac", [0.5, None, 0.7]),
            _series("process/rss_bytes", [2.0**30, 3 * 2.0**30], unit="bytes"),
            _series("gpu0/utilisation_frac", [], reason="no NVIDIA driver"),
        ]
    text = _text(ladder)
    assert "| cpu/utilisation_frac | trl | 60.0 % | 70.0 % | 6 | 3 |" in text
    assert "| process/rss_bytes | trl | 2.00 GiB | 3.00 GiB | 6 | 0 |" in text
    assert text.count("- gpu0/utilisation_frac is absent (trl): no NVIDIA driver") == 1
    assert "share of time in which any kernel was resident" in text


def test_without_any_sampling_the_report_says_so() -> None:
    text = _text(make_ladder())
    assert "Nothing was sampled." in text
    assert "any kernel was resident" not in text


def test_the_environment_and_the_command_are_shown() -> None:
    result = make_ladder()
    result.environment.is_dirty = True
    result.runners["trl"].calibration_step_s = {"1": [2.0], "2": [1.5]}
    text = _text(result)
    assert "| Commit | 0123456789abcdef with uncommitted changes |" in text
    assert "torch 2.6.0, trl 1.12.0" in text
    assert "```\noppo-kit bench --algo ppo\n```" in text
    assert "Calibration steps: 1 thread 2.00 s, 2 threads 1.50 s." in text


def test_finished_runs_are_rendered_again_next_to_their_results(tmp_path: Path, saved: list[Figure]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "result.json").write_text(make_ladder().model_dump_json())
    written = report_runs([folders[0], folders[1] / "result.json"])
    assert written == [folder / "report.md" for folder in folders]
    assert all("4.17" in file.read_text() for file in written)


def test_a_missing_run_is_named_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(make_ladder().model_dump_json())
    with pytest.raises(StateError, match=r"cannot read results from .*absent"):
        report_runs([tmp_path, tmp_path / "absent.json"])
    assert not (tmp_path / "report.md").exists()


def test_numbers_keep_three_significant_digits_and_a_readable_unit() -> None:
    assert [format_number(v) for v in (0.0, 0.01234, 1.234, 12.34, 1234.4)] == [
        "0",
        "0.0123",
        "1.23",
        "12.3",
        "1234",
    ]
    assert [format_seconds(v) for v in (1.5, 0.0456, 0.0000123, 0.0)] == [
        "1.50 s",
        "45.6 ms",
        "12.3 µs",
        "0 s",
    ]
    assert [f(float("nan")) for f in (format_number, format_seconds, format_percent)] == ["n/a"] * 3
    assert display_unit("W") == ("W", 1.0)


def test_a_bar_or_a_line_end_cannot_break_a_table() -> None:
    assert markdown_table(["a"], [["x|y\nz"]]) == "| a |\n| --- |\n| x\\|y z |"
