"""The cache holds what concatenation would hold, through growth and through rows that leave."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_kit.backends.preallocated_cache import PreallocatedCache, compaction


@given(st.lists(st.booleans(), max_size=12))
def test_compaction_keeps_the_kept_rows_and_moves_only_into_holes(is_kept: list[bool]) -> None:
    order = compaction(is_kept)
    assert sorted(order) == [index for index, kept in enumerate(is_kept) if kept]
    for target, source in enumerate(order):
        assert source == target or not is_kept[target]


@given(st.lists(st.tuples(st.integers(1, 40), st.lists(st.booleans(), min_size=6, max_size=6)), max_size=6))
@settings(deadline=None)
def test_keys_and_values_are_those_of_plain_concatenation(steps) -> None:
    torch.manual_seed(0)
    cache = PreallocatedCache()
    num_rows = 6
    expected = [torch.zeros(num_rows, 2, 0, 3) for _ in range(4)]
    for num_tokens, keep in steps:
        states = [torch.randn(num_rows, 2, num_tokens, 3) for _ in range(4)]
        expected = [torch.cat([one, new], dim=2) for one, new in zip(expected, states, strict=True)]
        for layer in range(2):
            keys, values = cache.update(states[2 * layer], states[2 * layer + 1], layer)
            assert torch.equal(keys, expected[2 * layer])
            assert torch.equal(values, expected[2 * layer + 1])
        assert cache.get_seq_length() == expected[0].shape[2]
        order = compaction(keep[:num_rows])
        if not order:
            return
        cache.keep_rows(order)
        expected = [one[order] for one in expected]
        num_rows = len(order)


def test_a_token_is_written_in_place_while_the_buffer_has_room() -> None:
    cache = PreallocatedCache()
    keys, _ = cache.update(torch.ones(2, 1, 5, 4), torch.ones(2, 1, 5, 4), 0)
    more, _ = cache.update(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), 0)
    assert keys.data_ptr() == more.data_ptr()
    assert more.shape == (2, 1, 6, 4)


def test_an_empty_cache_drops_rows_without_complaint() -> None:
    cache = PreallocatedCache()
    cache.keep_rows([0])
    assert cache.get_seq_length() == 0
