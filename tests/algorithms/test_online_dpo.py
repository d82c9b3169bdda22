"""Online DPO's pairs, losses, gradients and metrics against arithmetic in plain Python; tolerance 1e-6."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import group_batches
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from algorithms.online_dpo import OnlineDPO, OnlineDPOConfig
from oppo_kit.testing import cut_micro_batch
from oppo_kit.types import PolicyOutputs, RolloutBatch

TOLERANCE = 1e-6
BETA = 0.4

# Four pairs. The first response is better; the second is, and the first is empty; a tie; a tie of empty responses.
POLICY = [[-1.0, -2.0, -0.5], [-0.7], [], [-0.3, -1.9], [-1.1, -0.2], [-2.4], [], []]
REFERENCE = [[-1.5, -1.0, -0.9], [-0.9], [], [-1.3, -0.8], [-0.6, -0.1], [-3.0], [], []]
BEHAVIOUR = [[-1.2, -1.8, -0.5], [-0.8], [], [-0.4, -1.7], [-1.1, -0.3], [-2.0], [], []]
SCORES = [1.0, -2.0, 0.5, 0.9, 0.3, 0.3, 7.0, 7.0]
IS_STOPPED = [True, True, True, False, True, False, False, False]
TIED_PAIRS = {2, 3}
# By hand: log (policy / reference) of the responses, and chosen less rejected.
LOG_RATIOS = [-0.1, 0.2, 0.0, -0.1, -0.6, 0.6, 0.0, 0.0]
MARGINS = [-0.3, -0.1, -1.2, 0.0]
CHOSEN, REJECTED = [0, 3, 4, 6], [1, 2, 5, 7]


def algorithm(**changes: Any) -> OnlineDPO:
    return OnlineDPO(OnlineDPOConfig.model_validate({"beta": BETA} | changes))


def make_batch(scores: list[float] | None = None) -> RolloutBatch:
    return group_batches.make_batch(
        BEHAVIOUR, scores or SCORES, group_size=2, reference=REFERENCE, is_stopped=IS_STOPPED
    )


def padded(rows: list[list[float]], garbage: float = 0.0) -> Tensor:
    width = max(map(len, POLICY))
    return torch.tensor([[*row, *[garbage] * (width - len(row))] for row in rows], dtype=torch.float64)


def compute_loss(
    pairs: tuple[int, ...] = (0, 1, 2, 3),
    *,
    step_pairs: tuple[int, ...] = (0, 1, 2, 3),
    garbage: float = 0.0,
    scores: list[float] | None = None,
    **changes: Any,
) -> tuple[float, dict[str, float], Tensor]:
    """Loss, metrics and the gradient of the log-probs, of some pairs of the step, in float64."""
    subject = algorithm(**changes)
    batch = make_batch(scores=scores)
    batch.scores["reference"] = padded(REFERENCE, garbage)
    rows = [2 * pair + member for pair in pairs for member in range(2)]
    step_rows = [2 * pair + member for pair in step_pairs for member in range(2)]
    micro_batch = cut_micro_batch(subject.prepare(batch), rows, step_rows)
    logprobs = padded(POLICY, garbage)[rows, : micro_batch.mask.shape[1]].requires_grad_()
    loss, metrics = subject.loss(micro_batch, PolicyOutputs(logprobs, torch.zeros_like(logprobs), None))
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), {name: float(value) for name, value in metrics.items()}, logprobs.grad


def sigmoid_by_hand(margin: float) -> tuple[float, float]:
    return math.log(1 + math.exp(-BETA * margin)), -BETA / (1 + math.exp(BETA * margin))


def ipo_by_hand(margin: float) -> tuple[float, float]:
    return (margin - 1.25) ** 2, 2 * (margin - 1.25)  # 1 / (2 · 0.4) = 1.25


BY_HAND: dict[str, Callable[[float], tuple[float, float]]] = {"sigmoid": sigmoid_by_hand, "ipo": ipo_by_hand}


# --- loss


@pytest.mark.parametrize("ties", ["first", "skip"])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_the_loss_and_its_gradient_by_hand(loss_type: str, ties: str) -> None:
    pairs = [pair for pair in range(4) if ties == "first" or pair not in TIED_PAIRS]
    expected_loss = sum(BY_HAND[loss_type](MARGINS[pair])[0] for pair in pairs) / len(pairs)
    expected_gradient = [[0.0] * 3 for _ in range(8)]
    for pair in pairs:
        slope = BY_HAND[loss_type](MARGINS[pair])[1] / len(pairs)
        for row, sign in ((CHOSEN[pair], 1.0), (REJECTED[pair], -1.0)):
            for place in range(len(POLICY[row])):
                expected_gradient[row][place] = sign * slope
    loss, metrics, gradient = compute_loss(loss_type=loss_type, ties=ties)
    assert loss == pytest.approx(expected_loss, abs=TOLERANCE)
    assert metrics["loss"] == loss
    torch.testing.assert_close(
        gradient, torch.tensor(expected_gradient, dtype=torch.float64), atol=TOLERANCE, rtol=0
    )


def test_one_pair_in_numbers() -> None:
    """Pair 0: h = -0.1 - 0.2 = -0.3, β h = -0.12."""
    loss, _, gradient = compute_loss((0,), step_pairs=(0,))
    assert loss == pytest.approx(0.7549461016, abs=1e-9)
    assert gradient[0].tolist() == pytest.approx([-0.2119856202] * 3, abs=1e-9)
    assert gradient[1].tolist() == pytest.approx([0.2119856202, 0.0, 0.0], abs=1e-9)
    loss, _, gradient = compute_loss((0,), step_pairs=(0,), loss_type="ipo")
    assert loss == pytest.approx(1.55**2, abs=1e-9)
    assert gradient[0].tolist() == pytest.approx([-3.1] * 3, abs=1e-9)


def test_the_first_of_equals_is_chosen_unless_ties_are_skipped() -> None:
    tensors = algorithm().prepare(make_batch()).tensors
    assert tensors["preference"].tolist() == [1, -1, -1, 1, 1, -1, 1, -1]
    skipping = algorithm(ties="skip").prepare(make_batch())
    assert skipping.tensors["preference"].tolist() == [1, -1, -1, 1, 0, 0, 0, 0]
    assert skipping.row_mask is not None
    assert skipping.row_mask.tolist() == [True] * 4 + [False] * 4
    assert (
        skipping.metrics["oppo/tie_frac"] == algorithm().prepare(make_batch()).metrics["oppo/tie_frac"] == 0.5
    )


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_a_skipped_tie_is_as_if_it_were_not_there(loss_type: str) -> None:
    with_ties = compute_loss(ties="skip", loss_type=loss_type)
    without = compute_loss((0, 1), step_pairs=(0, 1), loss_type=loss_type)
    assert with_ties[:2] == without[:2]
    assert torch.equal(with_ties[2][:4], without[2])
    assert not with_ties[2][4:].any()


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_a_batch_of_nothing_but_ties_has_loss_zero_and_no_gradient(loss_type: str) -> None:
    loss, metrics, gradient = compute_loss(scores=[1.0] * 8, ties="skip", loss_type=loss_type)
    assert loss == 0.0
    assert set(metrics.values()) == {0.0}
    assert not gradient.any()
    batch_metrics = algorithm(ties="skip").prepare(make_batch(scores=[1.0] * 8)).metrics
    assert batch_metrics["oppo/tie_frac"] == 1.0
    assert batch_metrics["objective/scores_margin"] == 0.0
    assert all(math.isfinite(value) for value in batch_metrics.values())


@pytest.mark.parametrize("ties", ["first", "skip"])
def test_loss_gradient_and_metrics_do_not_depend_on_the_split_into_micro_batches(ties: str) -> None:
    loss, metrics, gradient = compute_loss(ties=ties)
    for split in (((0,), (1,), (2,), (3,)), ((2, 0), (3, 1)), ((1, 2, 3), (0,))):
        parts = {pairs: compute_loss(pairs, ties=ties) for pairs in split}
        assert sum(part[0] for part in parts.values()) == pytest.approx(loss, abs=1e-12)
        for name, value in metrics.items():
            assert sum(part[1][name] for part in parts.values()) == pytest.approx(value, abs=1e-12), name
        for pairs, part in parts.items():
            rows = [2 * pair + member for pair in pairs for member in range(2)]
            expected = gradient[rows, : part[2].shape[1]]
            torch.testing.assert_close(part[2], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e9])
@pytest.mark.parametrize("ties", ["first", "skip"])
def test_what_stands_past_a_rows_end_reaches_neither_loss_nor_gradient_nor_metrics(
    garbage: float, ties: str
) -> None:
    clean, spoiled = compute_loss(ties=ties), compute_loss(ties=ties, garbage=garbage)
    assert spoiled[:2] == clean[:2]
    assert torch.equal(spoiled[2], clean[2])
    batch = make_batch()
    batch.scores["reference"] = padded(REFERENCE, garbage)
    assert algorithm(ties=ties).prepare(batch).metrics == pytest.approx(
        algorithm(ties=ties).prepare(make_batch()).metrics
    )


# --- metrics


def test_the_metrics_of_the_loss_by_hand() -> None:
    _, metrics, _ = compute_loss((0, 1), step_pairs=(0, 1))
    # Rewards: β · -0.1 and β · 0.2 of pair 0, β · -0.1 and β · 0 of pair 1; both margins are below 0.
    assert metrics["rewards/chosen"] == pytest.approx(BETA * -0.1)
    assert metrics["rewards/rejected"] == pytest.approx(BETA * 0.1)
    assert metrics["rewards/margins"] == pytest.approx(BETA * -0.2)
    assert metrics["rewards/accuracies"] == 0.0
    assert metrics["logps/chosen"] == pytest.approx((-3.5 - 2.2) / 2)
    assert metrics["logps/rejected"] == pytest.approx((-0.7 + 0.0) / 2)


def test_a_pair_is_accurate_where_the_chosen_response_gained_more_than_the_rejected_one() -> None:
    swapped = [-score for score in SCORES]
    _, metrics, _ = compute_loss(scores=swapped)
    assert metrics["rewards/accuracies"] == 2 / 4  # pairs 0 and 1 turned round; the ties are as before


def test_the_metrics_of_the_batch_by_hand() -> None:
    """Of the policy that sampled: sums over a response's own tokens, means over the responses."""
    metrics = algorithm().prepare(make_batch()).metrics
    sequence_kl = ((-3.5 + 3.4) + 0.1 + 0.0 + (-2.1 + 2.1) + (-1.4 + 0.7) + 1.0) / 8
    assert metrics["objective/kl"] == pytest.approx(sequence_kl, abs=TOLERANCE)
    assert metrics["objective/entropy"] == pytest.approx((3.5 + 0.8 + 2.1 + 1.4 + 2.0) / 8, abs=TOLERANCE)
    assert metrics["objective/scores"] == pytest.approx(15.0 / 8, abs=TOLERANCE)
    assert metrics["objective/non_score_reward"] == pytest.approx(-BETA * sequence_kl, abs=TOLERANCE)
    assert metrics["objective/rlhf_reward"] == pytest.approx(15.0 / 8 - BETA * sequence_kl, abs=TOLERANCE)
    assert metrics["objective/scores_margin"] == pytest.approx((3.0 + 0.4) / 4, abs=TOLERANCE)
    assert metrics["val/contain_eos_token"] == 4 / 8
    assert metrics["beta"] == BETA
    skipping = algorithm(ties="skip").prepare(make_batch()).metrics
    assert skipping["objective/scores_margin"] == pytest.approx((3.0 + 0.4) / 2, abs=TOLERANCE)
    assert skipping["objective/scores"] == metrics["objective/scores"]


def test_the_missing_eos_penalty_follows_how_the_response_ended_and_can_turn_a_pair_round() -> None:
    train_batch = algorithm(missing_eos_penalty=0.5).prepare(make_batch())
    # Row 3 was cut: 0.9 - 0.5 < 0.5. Row 5 was cut: its tie is none any more.
    assert train_batch.tensors["preference"].tolist() == [1, -1, 1, -1, 1, -1, 1, -1]
    assert train_batch.metrics["objective/scores"] == pytest.approx((15.0 - 4 * 0.5) / 8)
    assert train_batch.metrics["oppo/tie_frac"] == 1 / 4


# --- settings


def test_the_names_and_defaults_are_trls() -> None:
    config = OnlineDPOConfig()
    assert (config.beta, config.loss_type, config.missing_eos_penalty, config.ties) == (
        0.1,
        "sigmoid",
        None,
        "first",
    )
    assert (config.num_epochs, config.num_mini_batches) == (1, 1)
    assert (OnlineDPO.group_size, OnlineDPO.scorers) == (2, {"reward", "reference"})
    assert OnlineDPO.needs_whole_groups
    assert not OnlineDPO.needs_critic


@pytest.mark.parametrize(
    ("name", "value"), [("beta", 0.0), ("loss_type", "hinge"), ("missing_eos_penalty", -1), ("ties", "last")]
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        OnlineDPOConfig.model_validate({name: value})
