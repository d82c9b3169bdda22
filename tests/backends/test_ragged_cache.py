"""The ragged cache against one-shot forward passes of the same model, under any sequence of operations."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, tiny_causal_lm, tiny_config

from oppo_kit.backends import ragged_attention
from oppo_kit.backends.forward import cache_keyword
from oppo_kit.backends.ragged_attention import attention_blocks, cut_into_blocks, use_ragged_attention
from oppo_kit.backends.ragged_cache import RaggedCache, compaction, right_aligned
from oppo_kit.errors import ModelError, StateError

MAX_ROWS, MAX_LENGTH = 12, 120
LAYOUTS = {
    "blocks": {"has_blocks": True},
    "one rectangle": {},
    "columns in sixteens": {"column_multiple": 16},
}


def make_cache(config, **layout) -> RaggedCache:
    return RaggedCache(config, device=torch.device("cpu"), dtype=torch.float32, **layout)


@cache
def models(kind: str, implementation: str):
    """A model that decodes, and the same one untouched."""
    decoder = tiny_causal_lm(kind, attn_implementation=implementation)
    use_ragged_attention(decoder)
    return decoder, tiny_causal_lm(kind, attn_implementation="eager")


class Driver:
    """A cache, a model, and the tokens that each row should hold."""

    def __init__(self, kind: str = "llama", implementation: str = "sdpa", **layout) -> None:
        self.decoder, self.plain = models(kind, implementation)
        self.cache = make_cache(self.decoder.config, **layout)
        self.rows: list[list[int]] = []
        self._num_tokens = 0

    def admit(self, num_rows: int) -> None:
        self.cache.admit(num_rows)
        self.rows += [[] for _ in range(num_rows)]

    @torch.inference_mode()
    def keep(self, is_kept: list[bool]) -> None:
        self.rows = [self.rows[index] for index in self.cache.keep_rows(is_kept)]

    def crop(self, row: int, length: int) -> None:
        self.cache.crop_row(row, length)
        del self.rows[row][length:]

    def tokens(self, num_tokens: int) -> list[int]:
        self._num_tokens += num_tokens
        return [
            (n * n * 7 + 3 * n) % VOCAB_SIZE for n in range(self._num_tokens - num_tokens, self._num_tokens)
        ]

    def feed(self, num_new: list[int], first: int = 0) -> torch.Tensor:
        """Hidden states of the new tokens, right-aligned."""
        new = [self.tokens(number) for number in num_new]
        with torch.inference_mode(), self.cache.append(num_new, first=first) as append:
            hidden = self.decoder.base_model(
                input_ids=right_aligned(new),
                attention_mask=append.attention_mask,
                position_ids=append.position_ids,
                use_cache=True,
                **{cache_keyword(self.decoder): self.cache},
            ).last_hidden_state
        for row, ids in enumerate(new, start=first):
            self.rows[row] += ids
        return hidden

    def feed_and_check(self, num_new: list[int], first: int = 0) -> None:
        if not any(num_new):
            return
        hidden = self.feed(num_new, first)
        fed = self.rows[first : first + len(num_new)]
        longest = max(map(len, fed))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in fed])
        with torch.inference_mode():
            expected = self.plain.base_model(input_ids=padded, use_cache=False).last_hidden_state
        for index, (row, number) in enumerate(zip(fed, num_new, strict=True)):
            torch.testing.assert_close(
                hidden[index, hidden.shape[1] - number :],
                expected[index, len(row) - number : len(row)],
                rtol=0,
                atol=1e-4,
            )


CHUNKS = st.lists(st.integers(0, 8), min_size=MAX_ROWS, max_size=MAX_ROWS)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 4), CHUNKS),
        st.tuples(st.just("append"), CHUNKS),
        st.tuples(st.just("append from"), st.integers(0, MAX_ROWS - 1), CHUNKS),
        st.tuples(st.just("crop"), st.integers(0, MAX_ROWS - 1), st.floats(0, 1)),
        st.tuples(st.just("keep"), st.lists(st.booleans(), min_size=MAX_ROWS, max_size=MAX_ROWS)),
        st.tuples(st.just("decode"), st.integers(1, 12)),
    ),
    min_size=4,
    max_size=14,
)
# Every operation once, over both kinds of growth, with a short row beside long ones.
TOUR = [
    ("admit", 4, [8, 1, 0, 5] + [0] * 8),
    ("append", [8, 0, 3, 8] + [0] * 8),
    ("decode", 10),
    ("crop", 0, 0.5),
    ("append", [2, 0, 8, 1] + [0] * 8),
    ("admit", 4, [3] * 12),
    ("keep", [False, True, True, True, False, True, True, True, True, True, True, True]),
    ("decode", 12),
    ("append from", 2, [4, 0, 7] + [1] * 9),
    ("decode", 1),
    ("keep", [True, False, True, True, False, True, True]),
    ("decode", 1),
    ("admit", 1, [6] * 12),
    ("decode", 1),
    ("admit", 4, [0, 8, 8, 0] + [0] * 8),
    ("decode", 12),
    ("decode", 12),
    ("decode", 12),
]


def carry_out_and_check(driver: Driver, operation: tuple) -> None:
    kind, *values = operation
    num_rows = len(driver.rows)
    if kind == "admit":
        driver.admit(min(values[0], MAX_ROWS - num_rows))
        driver.feed_and_check(values[1][: len(driver.rows) - num_rows], first=num_rows)
    elif not num_rows:
        return
    elif kind == "append":
        driver.feed_and_check(values[0][:num_rows])
    elif kind == "append from":
        first = values[0] % num_rows
        driver.feed_and_check(values[1][: num_rows - first], first=first)
    elif kind == "crop":
        row = values[0] % num_rows
        driver.crop(row, round(values[1] * len(driver.rows[row])))
    elif kind == "keep":
        driver.keep(values[0][:num_rows])
    elif kind == "decode" and max(map(len, driver.rows)) < MAX_LENGTH:
        for _ in range(values[0]):
            driver.feed_and_check([1] * num_rows)
    assert driver.cache.lengths == tuple(map(len, driver.rows))


@pytest.mark.parametrize(
    ("kind", "implementation", "layout"),
    [
        ("llama", "sdpa", "blocks"),
        ("gemma3", "sdpa", "blocks"),
        ("gemma3", "sdpa", "columns in sixteens"),
        ("gemma3", "eager", "one rectangle"),
    ],
)
@settings(max_examples=8, deadline=None)
@given(operations=OPERATIONS)
@example(operations=TOUR)
def test_any_sequence_of_operations_gives_the_hidden_states_of_one_forward_pass(
    kind: str, implementation: str, layout: str, operations: list[tuple]
) -> None:
    driver = Driver(kind, implementation, **LAYOUTS[layout])
    with pytest.MonkeyPatch.context() as patch:
        # Blocks pay for rows that differ by hundreds of columns; here rows are short.
        patch.setattr(ragged_attention, "_OVERHEAD_COLUMNS", 4)
        for operation in operations:
            carry_out_and_check(driver, operation)


def test_blocks_are_really_used_for_rows_of_unequal_length(monkeypatch) -> None:
    monkeypatch.setattr(ragged_attention, "_OVERHEAD_COLUMNS", 4)
    widths = []
    inner = ragged_attention.sdpa_attention_forward

    def watched(module, query, key, *args, **kwargs):
        widths.append((key.shape[0], key.shape[2]))
        return inner(module, query, key, *args, **kwargs)

    monkeypatch.setattr(ragged_attention, "sdpa_attention_forward", watched)
    driver = Driver(has_blocks=True)
    driver.admit(4)
    driver.feed_and_check([30, 28, 3, 2])
    widths.clear()
    driver.feed_and_check([1, 1, 1, 1])
    assert widths == [(2, 31), (2, 4)] * 2
    driver.crop(0, 1)
    widths.clear()
    driver.feed_and_check([1, 1, 1, 1])
    assert widths == [(1, 2), (1, 30), (2, 5)] * 2, "rows are cut anew when one of them changed by itself"


def test_blocks_hold_inside_their_context_only_also_when_it_raises() -> None:
    with pytest.raises(KeyError), attention_blocks([ragged_attention.Block(0, 1, 2)]):
        raise KeyError
    assert ragged_attention._BLOCKS.get() == ()


@pytest.mark.parametrize("num_rows", range(7))
def test_compaction_keeps_exactly_the_kept_rows_and_moves_only_into_holes(num_rows: int) -> None:
    for is_kept in product((False, True), repeat=num_rows):
        order = compaction(is_kept)
        assert sorted(order) == [index for index in range(num_rows) if is_kept[index]]
        for target, source in enumerate(order):
            assert target == source or (not is_kept[target] and source >= len(order))


@pytest.mark.parametrize(("num_new", "num_columns"), [([3, 16], 16), ([17, 2], 32), ([1, 33], 48)])
def test_the_columns_that_attention_looks_at_are_rounded_up_to_the_multiple(
    num_new: list[int], num_columns: int
) -> None:
    for multiple, expected in ((1, max(num_new)), (16, num_columns)):
        ragged = make_cache(tiny_config(), column_multiple=multiple)
        ragged.admit(2)
        with ragged.append(num_new) as append:
            assert append.num_columns == expected
            assert append.attention_mask.shape == (2, 1, max(num_new), expected)


def test_kept_rows_move_with_their_lengths_and_their_contents() -> None:
    driver = Driver()
    driver.admit(5)
    driver.feed_and_check([4, 9, 1, 7, 2])
    driver.keep([True, False, False, True, True])
    assert driver.cache.lengths == (4, 2, 7)
    driver.feed_and_check([1, 1, 1])
    driver.feed_and_check([2, 0, 3])


def test_a_row_whose_tokens_were_all_forgotten_can_be_fed_again() -> None:
    driver = Driver("gemma3")
    driver.admit(2)
    driver.feed_and_check([20, 6])
    driver.crop(0, 0)
    driver.feed_and_check([3, 0])
    driver.feed_and_check([1, 1])


@pytest.mark.parametrize(("row", "length", "has"), [(1, 4, 3), (0, -1, 5)])
def test_cropping_to_what_a_row_does_not_have_is_refused(row: int, length: int, has: int) -> None:
    driver = Driver()
    driver.admit(2)
    driver.feed([5, 3])
    with pytest.raises(StateError, match=rf"row {row} has {has} tokens and cannot be cropped to {length}"):
        driver.cache.crop_row(row, length)
    assert driver.cache.lengths == (5, 3)


def test_a_model_called_outside_append_is_refused() -> None:
    driver = Driver()
    driver.admit(1)
    with pytest.raises(
        StateError,
        match=r"called on a ragged cache outside append\(\); pass the inputs that append\(\) makes",
    ):
        driver.decoder(
            input_ids=torch.tensor([[3]]), use_cache=True, **{cache_keyword(driver.decoder): driver.cache}
        )


def test_layers_that_keep_no_state_by_position_are_refused() -> None:
    config = tiny_config("llama")
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(
        ModelError,
        match=r"llama cannot be decoded .*: its layers of the types \['linear_attention'\] do not keep .*; use a",
    ):
        make_cache(config)


def test_nothing_changes_when_the_block_inside_append_raises() -> None:
    driver, undisturbed = Driver(has_blocks=True), Driver(has_blocks=True)
    for one in (driver, undisturbed):
        one.admit(3)
        one.feed([6, 2, 4])
    with pytest.raises(RuntimeError, match="out of luck"), driver.cache.append([3, 70, 1]):
        raise RuntimeError("out of luck")
    assert driver.cache.lengths == (6, 2, 4)
    with pytest.raises(StateError, match="outside append"):
        _ = driver.cache.current_append
    for num_new in ([1, 1, 1], [2, 0, 5], [1, 1, 1]):
        assert torch.equal(driver.feed(num_new), undisturbed.feed(num_new))


def test_nothing_remains_of_a_row_with_nan_after_clear() -> None:
    driver = Driver()
    embeddings = driver.decoder.get_input_embeddings()
    healthy = embeddings.weight.detach().clone()
    driver.admit(2)
    with torch.no_grad():
        embeddings.weight.fill_(float("nan"))
    try:
        driver.feed([9, 9])
    finally:
        with torch.no_grad():
            embeddings.weight.copy_(healthy)
    # A mask does not hide NaN: 0 · NaN is NaN. That is why the generator clears.
    driver.keep([False, True])
    driver.admit(1)
    driver.crop(0, 0)
    assert driver.feed([1, 12]).isnan().any()
    driver.cache.clear()
    driver.rows = []
    assert (driver.cache.num_bytes, driver.cache.num_rows, driver.cache.lengths) == (0, 0, ())
    driver.admit(2)
    driver.feed_and_check([1, 12])


def test_memory_does_not_grow_with_the_number_of_admissions() -> None:
    config = tiny_config(num_hidden_layers=1)
    ragged = make_cache(config)
    num_bytes = {}
    ragged.admit(6)
    for admission in range(1, 1001):
        # The oldest row leaves, a new one enters; all others grow. No row grows beyond 6 · 8 tokens.
        ragged.keep_rows([length < 40 for length in ragged.lengths])
        ragged.admit(6 - ragged.num_rows + 1 if ragged.num_rows < 6 else 1)
        num_new = [1 + (admission + row) % 8 for row in range(ragged.num_rows)]
        with ragged.append(num_new):
            states = torch.ones(ragged.num_rows, 2, max(num_new), 8)
            keys, _ = ragged.update(states, states, 0)
        assert keys.shape[2] == max(ragged.lengths)
        num_bytes[admission] = ragged.num_bytes
    assert num_bytes[1000] == num_bytes[50] > 0


def test_growing_keeps_what_was_written() -> None:
    driver = Driver("gemma3")
    driver.admit(3)
    driver.feed_and_check([8, 60, 2])
    num_bytes = driver.cache.num_bytes
    driver.feed_and_check([8, 8, 8])
    assert driver.cache.capacity == (8, 128)
    assert driver.cache.num_bytes == 2 * num_bytes
    driver.admit(9)
    assert driver.cache.capacity == (16, 128)
    driver.feed_and_check([1] * 12)


def test_right_aligned_rows_end_in_the_last_column() -> None:
    assert right_aligned([[5, 6, 7], [], [8]]).tolist() == [[5, 6, 7], [0, 0, 0], [0, 0, 8]]


@given(
    lengths=st.lists(st.integers(0, 900), max_size=7),
    overhead=st.sampled_from([0, 1, 30, 256]),
)
def test_cuts_cover_every_row_once_and_cost_least(lengths: list[int], overhead: int) -> None:
    def cost(blocks) -> int:
        return sum((stop - start) * max(lengths[start:stop]) + overhead for start, stop in blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_attention, "_OVERHEAD_COLUMNS", overhead)
        blocks = cut_into_blocks(lengths)
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(len(lengths)))
    assert all(start < stop for start, stop in blocks)
    all_cuts = (
        list(pairwise([0, *(i + 1 for i, is_cut in enumerate(cuts) if is_cut), len(lengths)]))
        for cuts in product((False, True), repeat=max(0, len(lengths) - 1))
    )
    assert cost(blocks) == (min(map(cost, all_cuts)) if lengths else 0)


def test_decoding_works_alike_in_every_layout() -> None:
    results = []
    for layout in LAYOUTS.values():
        driver = Driver("gemma3", **layout)
        driver.admit(3)
        driver.feed([20, 2, 9])
        results.append(torch.cat([driver.feed([1, 1, 1]) for _ in range(5)], dim=1))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-4)
