"""Group statistics by hand, with scores that are not there; tolerance 1e-6."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oppo_kit.ops.groups import batch_std, group_mean, group_std, leave_one_out_mean

NAN = math.nan
SCORES = torch.tensor([1.0, 2.0, 6.0, NAN, 4.0, 8.0, 5.0, NAN, NAN, NAN, NAN, NAN])


def assert_near(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(
        actual, torch.tensor(expected, dtype=actual.dtype), atol=1e-6, rtol=0, equal_nan=True
    )


def test_the_mean_of_a_group_leaves_out_what_is_not_there() -> None:
    assert_near(group_mean(SCORES, 3), [3.0] * 3 + [6.0] * 3 + [5.0] * 3 + [NAN] * 3)


def test_the_deviation_of_a_group_is_unbiased_over_what_is_there() -> None:
    # (4 + 1 + 9) / 2 = 7; (4 + 4) / 1 = 8; one score has none.
    expected = [math.sqrt(7)] * 3 + [math.sqrt(8)] * 3 + [NAN] * 6
    assert_near(group_std(SCORES, 3), expected)


def test_the_deviation_of_a_batch_is_over_all_scores_that_are_there() -> None:
    present = [1.0, 2.0, 6.0, 4.0, 8.0, 5.0]
    mean = sum(present) / 6
    variance = sum((score - mean) ** 2 for score in present) / 5
    assert float(batch_std(SCORES)) == pytest.approx(math.sqrt(variance), abs=1e-6)
    assert math.isnan(batch_std(torch.tensor([1.0, NAN])))


def test_the_others_mean_is_over_the_others_that_are_there() -> None:
    expected = [4.0, 3.5, 1.5, NAN, 8.0, 4.0] + [NAN] * 6
    assert_near(leave_one_out_mean(SCORES, 3), expected)


def test_each_group_has_its_own_statistics() -> None:
    scores = torch.tensor([0.0, 2.0, 10.0, 30.0])
    assert_near(group_mean(scores, 2), [1.0, 1.0, 20.0, 20.0])
    assert_near(leave_one_out_mean(scores, 2), [2.0, 0.0, 30.0, 10.0])


@pytest.mark.parametrize("score", [0.1, -7.3, 1e6 + 0.3, 3e7])
def test_equal_scores_of_any_size_have_no_deviation_in_float64(score: float) -> None:
    scores = torch.full((7,), score).double()
    assert float((scores - group_mean(scores, 7)).abs().max()) == 0.0
    assert float(group_std(scores, 7).max()) == 0.0
    assert float((scores - leave_one_out_mean(scores, 7)).abs().max()) == 0.0
