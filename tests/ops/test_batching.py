"""Every row exactly once, within the budget; indices of padded rows by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from oppo_kit.ops.batching import length_sorted_batches, pad_prompts_and_responses


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_every_row_is_in_one_batch_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    batches = length_sorted_batches(lengths, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * longest <= max_tokens
    order = [lengths[index] for batch in batches for index in batch]
    assert order == sorted(order, reverse=True)


def test_padded_rows_say_where_each_token_is_predicted() -> None:
    rows = pad_prompts_and_responses([[7], [8, 9, 10]], [[1, 2, 3], [4]])
    assert rows.input_ids.tolist() == [[7, 1, 2, 3], [8, 9, 10, 4]]
    assert rows.response_mask.tolist() == [[True, True, True], [True, False, False]]
    assert rows.predictor_index[0].tolist() == [0, 1, 2]
    assert int(rows.predictor_index[1, 0]) == 2
    assert rows.response_ids[0].tolist() == [1, 2, 3]
    assert int(rows.response_ids[1, 0]) == 4
    assert rows.last_index.tolist() == [3, 3]


def test_an_empty_response_is_ordinary() -> None:
    rows = pad_prompts_and_responses([[7, 8], [9]], [[], [1]])
    assert rows.last_index.tolist() == [1, 1]
    assert rows.response_mask.tolist() == [[False], [True]]
    alone = pad_prompts_and_responses([[7, 8]], [[]])
    assert alone.response_mask.shape == (1, 0)
    assert alone.predictor_index.shape == (1, 0)
    assert torch.equal(alone.input_ids, torch.tensor([[7, 8]]))
