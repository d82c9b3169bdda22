"""Rows as tensors: explicit lengths, sorted by draw id, whatever the token ids are."""

from __future__ import annotations

from oppo_kit.types import Group, Prompt, Rollout, RolloutBatch, RolloutKey


def make_group(draw_id: int, lengths: list[int], *, reason: str = "stop") -> Group:
    prompt = Prompt(draw_id, (1, 2), 10)
    rollouts = [
        Rollout(
            RolloutKey(draw_id, index),
            prompt,
            token_ids=[0] * length,  # pad ids, sampled: they count
            behaviour_logprobs=[-0.5] * length,
            versions=[draw_id] * length,
            finish_reason=reason,
            scores={"reward": float(draw_id), "reference": [-1.0] * length},
        )
        for index, length in enumerate(lengths)
    ]
    return Group(prompt, rollouts, admitted_step=0)


def test_a_batch_is_laid_out_by_draw_id_with_explicit_lengths() -> None:
    batch = RolloutBatch.from_groups(
        [make_group(5, [1, 3], reason="length"), make_group(2, [0, 2])], version=9
    )
    assert [group.draw_id for group in batch.groups] == [2, 5]
    assert batch.response_lengths.tolist() == [0, 2, 1, 3]
    assert batch.response_mask.tolist() == [
        [False, False, False],
        [True, True, False],
        [True, False, False],
        [True, True, True],
    ]
    assert batch.behaviour_logprobs[3].tolist() == [-0.5, -0.5, -0.5]
    assert batch.behaviour_logprobs[1].tolist() == [-0.5, -0.5, 0.0]
    assert batch.scores["reward"].tolist() == [2.0, 2.0, 5.0, 5.0]
    assert batch.scores["reference"][2].tolist() == [-1.0, 0.0, 0.0]
    assert batch.is_stopped.tolist() == [True, True, False, False]
    assert (batch.num_rows, batch.group_size) == (4, 2)


def test_the_age_of_a_group_is_that_of_its_oldest_token() -> None:
    group = make_group(3, [2, 2])
    group.rollouts[1].versions = [1, 3]
    assert group.first_version == 1
    assert group.age(4) == 3
    assert make_group(3, [0]).age(7) == 0


def test_all_empty_responses_make_an_empty_width() -> None:
    batch = RolloutBatch.from_groups([make_group(0, [0])], version=0)
    assert batch.response_ids.shape == batch.response_mask.shape == (1, 0)
