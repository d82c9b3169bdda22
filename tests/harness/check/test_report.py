"""The words of a check: sentence, table, Markdown, assertion, picture."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from check_results import REFERENCE, make_checked, make_pair
from results_factory import without_accuracy

from harness.check import assert_equivalent
from harness.check import compare as compare_scores
from harness.check.figure import curves_figure, write_figure
from harness.check.report import markdown_of, sentence_of, table_of
from harness.figures import QUICK_NOTE

compare = partial(compare_scores, by="accuracy")
ALIKE, WORSE, NOISY = (0.0, 0.01, 0.02, -0.01), (-0.1, -0.09, -0.08, -0.11), (0.1, -0.1, 0.05, -0.05)


def test_the_sentence_of_equivalence_holds_both_intervals_and_margins() -> None:
    # Intervals as worked out in the tests of the verdict: 0.5 ± 1.519 points, and a quarter of both.
    assert sentence_of(compare(*make_pair(ALIKE))) == (
        "Equivalent: both learned as trl did, to within 10 % of its gain: its final held-out accuracy lay 0.50 points "
        "above (90 % interval -1.02 to +2.02, margin ±4.00) and its held-out accuracy over the whole curve lay 0.12 "
        "points above (90 % interval -0.25 to +0.50, margin ±2.50), over 4 seeds."
    )


def test_the_sentence_of_a_difference_names_only_what_lies_outside() -> None:
    # -9.5 ± 3.182446 × 0.645497 points.
    assert sentence_of(compare(*make_pair(WORSE))) == (
        "Different: both did not learn as trl did: its final held-out accuracy lay 9.50 points below (95 % interval "
        "-11.55 to -7.45, wholly outside the margin of ±4.00), over 4 seeds."
    )


def test_an_undecided_sentence_says_how_many_seeds_would_tell() -> None:
    found = compare(*make_pair(NOISY))
    text = sentence_of(found)
    assert text.startswith(
        "Cannot tell: whether both learned as trl did stays open: its final held-out accuracy lay"
    )
    assert text.endswith(
        f"over 4 seeds; about {found.seeds_needed} seeds would tell, with 80 % power, if there is no difference."
    )
    assert found.seeds_needed is not None
    assert found.seeds_needed > 4


def test_an_undecided_sentence_leaves_out_what_lies_inside() -> None:
    run = make_checked([(0.2, middle, 0.6) for middle in (0.48, 0.44, 0.5, 0.42)])
    text = sentence_of(compare(run, make_checked([REFERENCE] * 4, runner="trl")))
    assert "stays open: its held-out accuracy over the whole curve lay 2.00 points below (90 %" in text
    assert "final" not in text


def test_no_difference_at_all_lies_level() -> None:
    assert "accuracy lay level (90 % interval +0.00 to +0.00, margin" in sentence_of(
        compare(*make_pair([0, 0]))
    )


def test_advice_where_the_seeds_would_have_been_enough_suspects_a_difference() -> None:
    found = compare(*make_pair([-0.035, -0.045, -0.04, -0.03]))
    assert found.verdict == "undecided"
    assert "4 seeds would have been enough" in sentence_of(found) or "3 seeds would have" in sentence_of(
        found
    )
    assert sentence_of(found).endswith("more seeds would tell whether it exceeds the margin.")


def test_advice_where_no_number_of_seeds_is_practical() -> None:
    text = sentence_of(compare(*make_pair([4.0, -4.0, 3.0, -3.0])))
    assert "at this spread more than 1000 seeds would be needed; evaluate on more problems" in text


def test_advice_with_one_seed() -> None:
    assert sentence_of(compare(*make_pair([0.0]))).endswith(
        "(90 % interval n/a (one seed), margin ±2.50), over 1 seed; one seed shows no spread, so run at least 2 seeds "
        "on both sides."
    )
    reference = make_checked([(0.2, 0.5, final) for final in (0.6, 0.63, 0.57)], runner="trl")
    found = compare(make_checked([REFERENCE]), reference)
    assert sentence_of(found).endswith(
        f"by that of the other side's 3 seeds, about {found.seeds_needed} seeds on both sides would tell, with 80 % "
        "power, if there is no difference."
    )


def test_a_smoke_run_is_named_in_every_form() -> None:
    run, reference = make_pair(ALIKE)
    found = compare(run.model_copy(update={"is_quick": True}), reference)
    assert sentence_of(found).startswith("Equivalent (smoke run, do not quote): both learned")
    assert "smoke run, do not quote" in markdown_of(found)
    figure = curves_figure(found)
    assert figure.get_supxlabel() == QUICK_NOTE


def test_the_table_holds_levels_intervals_margins_and_every_seed() -> None:
    header, rows = table_of(compare(*make_pair(ALIKE)))
    assert header == ["held-out accuracy, points", "final", "area"]
    assert rows == [
        ["both", "60.50", "45.12"],
        ["trl", "60.00", "45.00"],
        ["difference", "+0.50", "+0.12"],
        ["90 % interval", "-1.02 to +2.02", "-0.25 to +0.50"],
        ["95 % interval", "-1.55 to +2.55", "-0.39 to +0.64"],
        ["margin, 10 % of the gain", "±4.00", "±2.50"],
        ["finding", "inside", "inside"],
        ["seed 0", "+0.00", "+0.00"],
        ["seed 1", "+1.00", "+0.25"],
        ["seed 2", "+2.00", "+0.50"],
        ["seed 3", "-1.00", "-0.25"],
    ]


def test_the_table_says_open_and_outside() -> None:
    _, rows = table_of(compare(*make_pair(WORSE)))
    assert ["finding", "outside", "open"] in rows


def test_scores_are_shown_in_their_own_unit() -> None:
    found = compare_scores(*map(without_accuracy, make_pair(ALIKE)))
    header, rows = table_of(found)
    assert header[0] == "held-out score"
    assert rows[0] == ["both", "1.21", "0.9025"]
    assert ["difference", "+0.01", "+0.0025"] in rows
    assert (
        "its final held-out score lay 0.01 above (90 % interval -0.0204 to +0.0404, margin ±0.08)"
        in sentence_of(found)
    )


def test_markdown_holds_heading_sentence_table_and_definitions() -> None:
    found = compare(*make_pair(WORSE))
    text = markdown_of(found)
    assert text.startswith(
        f"### Convergence of both against trl: different\n\n{sentence_of(found)}\n\n| held-out accuracy, points |"
    )
    assert "| seed 3 | -11.00 | -2.75 |\n\nfinal: mean of the evaluations after 80 % of the trained" in text
    assert "Differences are both less trl, paired by seed. Equivalent: both 90 % intervals inside" in text


def test_an_assertion_passes_on_equivalence_and_else_holds_sentence_and_table() -> None:
    assert_equivalent(*make_pair(ALIKE))
    for pair, start in ((make_pair(WORSE), "Different: "), (make_pair(NOISY), "Cannot tell: ")):
        with pytest.raises(AssertionError) as failed:
            assert_equivalent(*pair)
        text = str(failed.value)
        assert text.startswith(start)
        assert "| 90 % interval |" in text
    assert_equivalent(*make_pair(NOISY), margin=0.5, runner="both", reference_runner="trl")


def test_the_picture_shows_both_means_both_bands_and_the_margin(tmp_path: Path) -> None:
    found = compare(*make_pair(ALIKE))
    (axis,) = curves_figure(found).axes
    lines = {line.get_label(): line for line in axis.lines}
    assert [float(y) for y in lines["trl"].get_ydata()] == pytest.approx([20.0, 50.0, 60.0])
    assert [float(y) for y in lines["both"].get_ydata()] == pytest.approx([20.0, 50.0, 60.5])
    assert [float(x) for x in lines["both"].get_xdata()] == [0.0, 24.0, 48.0]
    margin, _, band = (area.get_paths()[0].get_extents() for area in axis.collections)
    assert (margin.ymin, margin.ymax) == pytest.approx((20.0 - 4.0, 60.0 + 4.0))
    assert band.ymax == pytest.approx(60.5 + 1.519, abs=1e-3)
    assert (
        axis.get_title(loc="left")
        == "Equivalent within 10 % of the gain; 4 seeds; band: 90 % interval of the mean"
    )
    write_figure(found, tmp_path / "curves.any")
    assert (tmp_path / "curves.any").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_one_seed_has_no_band() -> None:
    (axis,) = curves_figure(compare(*make_pair([0.0]))).axes
    assert len(axis.collections) == 1
    assert axis.get_title(loc="left") == "Cannot tell at 10 % of the gain; 1 seed; one seed, so no band"
