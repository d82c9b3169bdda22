"""``PromptDataset``: which prompt a draw is, and what becomes of rows of every kind."""

from __future__ import annotations

import datetime
import logging
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st

from oppo_kit.data import PromptDataset
from oppo_kit.errors import DataError

BOS, EOS = 1, 2


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tiny_models.VOCABULARY.index(character) for character in text)


def dataset(rows: list[Any], tokenizer: Any = None, **options: Any) -> PromptDataset:
    settings: dict[str, Any] = {
        "max_new_tokens": 7,
        "max_prompt_tokens": None,
        "seed": 0,
        "shuffle": False,
        **options,
    }
    return PromptDataset(rows, tokenizer or tiny_models.tiny_tokenizer(), **settings)


def only(prompt: Any, tokenizer: Any = None, **options: Any) -> tuple[int, ...]:
    return dataset([{"prompt": prompt}], tokenizer, **options).draw(0).token_ids


# --- draws


@given(num_rows=st.integers(1, 9), seed=st.integers(0, 2**31), epoch=st.integers(0, 40))
def test_each_epoch_is_a_permutation_of_all_rows(num_rows: int, seed: int, epoch: int) -> None:
    prompts = dataset([{"input_ids": [4 + row]} for row in range(num_rows)], seed=seed, shuffle=True)
    drawn = [prompts.draw(epoch * num_rows + position) for position in range(num_rows)]
    assert sorted(prompt.token_ids[0] - 4 for prompt in drawn) == list(range(num_rows))
    assert [prompt.draw_id for prompt in drawn] == [
        epoch * num_rows + position for position in range(num_rows)
    ]


def test_a_draw_does_not_depend_on_what_was_drawn_before() -> None:
    rows = [{"prompt": letter} for letter in "abc"]
    forwards = dataset(rows, shuffle=True)
    backwards = dataset(rows, shuffle=True)
    expected = [forwards.draw(draw_id) for draw_id in range(50)]
    assert [backwards.draw(draw_id) for draw_id in reversed(range(50))] == expected[::-1]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    rows = [{"prompt": letter} for letter in "abcdefghij"]

    def order(seed: int, epoch: int) -> list[tuple[int, ...]]:
        prompts = dataset(rows, seed=seed, shuffle=True)
        return [prompts.draw(epoch * 10 + position).token_ids for position in range(10)]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_without_shuffling_every_epoch_has_the_order_of_the_rows() -> None:
    prompts = dataset([{"prompt": letter} for letter in "abc"])
    assert [prompts.draw(draw_id).token_ids[1:] for draw_id in range(6)] == [ids_of(x) for x in "abcabc"]


def test_wrapping_into_a_second_epoch_is_said_once_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    prompts = dataset([{"prompt": letter} for letter in "abc"])
    with caplog.at_level(logging.WARNING):
        prompts.draw(2)
        assert caplog.messages == []
        for draw_id in range(3, 12):
            prompts.draw(draw_id)
    assert caplog.messages == [
        "draw 3 begins epoch 2 of a data set of 3 prompts: the same prompts come again"
    ]


def test_a_negative_draw_id_is_refused() -> None:
    with pytest.raises(DataError, match="draw_id=-1; draws are numbered 0, 1, 2"):
        dataset([{"prompt": "a"}]).draw(-1)


def test_the_limit_of_the_response_travels_with_the_prompt() -> None:
    assert dataset([{"prompt": "a"}], max_new_tokens=11).draw(0).max_new_tokens == 11


# --- BOS, EOS, empty


def test_text_gets_the_bos_that_the_tokenizer_would_add() -> None:
    assert only("hi") == (BOS, *ids_of("hi"))


def test_a_text_that_begins_with_bos_has_it_once() -> None:
    assert only("<bos>hi") == (BOS, *ids_of("hi"))
    assert only("<bos><bos>hi") == (BOS, *ids_of("hi"))


def test_a_tokenizer_that_adds_no_bos_gets_none() -> None:
    assert only("hi", tiny_models.tiny_tokenizer(adds_bos=False)) == ids_of("hi")


def test_an_eos_that_the_tokenizer_appends_is_left_out() -> None:
    assert only("hi", tiny_models.tiny_tokenizer(adds_eos=True)) == (BOS, *ids_of("hi"))
    assert only("hi", tiny_models.tiny_tokenizer(adds_bos=False, adds_eos=True)) == ids_of("hi")


def test_a_tokenizer_whose_bos_is_its_eos_keeps_it_in_front() -> None:
    tokenizer = tiny_models.tiny_tokenizer()
    tokenizer.eos_token = tokenizer.bos_token
    assert only("hi", tokenizer) == (BOS, *ids_of("hi"))


@pytest.mark.parametrize("is_pad_eos", [False, True])
def test_an_eos_inside_the_prompt_stays_where_it_is(is_pad_eos: bool) -> None:
    tokenizer = tiny_models.tiny_tokenizer(is_pad_eos=is_pad_eos)
    assert only("a<eos>b<eos>", tokenizer) == (BOS, *ids_of("a"), EOS, *ids_of("b"), EOS)


def test_an_empty_text_becomes_bos() -> None:
    assert only("") == (BOS,)
    assert only("", tiny_models.tiny_tokenizer(adds_bos=False)) == (BOS,)
    assert dataset([{"input_ids": []}]).draw(0).token_ids == (BOS,)


def test_an_empty_text_without_a_bos_token_names_the_row() -> None:
    with pytest.raises(DataError, match="row 1: the prompt is empty and the tokenizer has no BOS"):
        dataset([{"prompt": "a"}, {"prompt": ""}], tiny_models.tiny_tokenizer(has_bos=False))


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="the data set has no rows"):
        dataset([])


# --- conversations and ready ids


def test_messages_go_through_the_chat_template_which_alone_puts_bos() -> None:
    tokenizer = tiny_models.tiny_tokenizer(chat_template=tiny_models.CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    assert only(messages, tokenizer) == (BOS, *ids_of("user: hi\nassistant: "))
    tokenizer.chat_template = tiny_models.CHAT_TEMPLATE.replace("{{ bos_token }}", "")
    assert only(messages, tokenizer) == ids_of("user: hi\nassistant: ")


def test_messages_without_a_chat_template_say_how_to_set_one() -> None:
    with pytest.raises(
        DataError, match="row 0 is a conversation, but the tokenizer has no chat template; set"
    ):
        only([{"role": "user", "content": "hi"}])


def test_a_conversation_that_ends_with_the_assistant_is_refused() -> None:
    with pytest.raises(DataError, match="the last message is the assistant's"):
        only([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "oh"}])


@pytest.mark.parametrize("prompt", [None, 3, [], ["hi"], [{"role": "user"}]])
def test_a_prompt_of_another_kind_names_row_and_column(prompt: Any) -> None:
    with pytest.raises(
        DataError, match=r"row 0: column 'prompt' holds .*; a prompt is text, or a list of messages"
    ):
        only(prompt)


def test_ready_ids_are_taken_as_they_are_and_the_mask_is_obeyed() -> None:
    assert dataset([{"input_ids": [BOS, BOS, 7]}]).draw(0).token_ids == (BOS, BOS, 7)
    padded = {"input_ids": torch.tensor([2, 2, 1, 7]), "attention_mask": torch.tensor([0, 0, 1, 1])}
    prompt = dataset([padded], tiny_models.tiny_tokenizer(is_pad_eos=True)).draw(0)
    assert prompt.token_ids == (1, 7)
    assert prompt.columns == {"prompt": "d"}


def test_ready_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(DataError, match="token id 62 is outside the tokenizer's vocabulary of 62"):
        dataset([{"input_ids": [4, 62]}])


@pytest.mark.parametrize("ids", ["abc", [1.0], None, 5])
def test_ready_ids_of_another_kind_are_refused(ids: Any) -> None:
    with pytest.raises(DataError, match="it must be a list of token ids without padding"):
        dataset([{"input_ids": ids}])


# --- columns


def test_the_other_columns_and_the_text_are_kept() -> None:
    row = {"question": "hi", "answer": 3, "tags": ["a", None], "meta": {"x": 1.5, "ok": True}}
    assert dataset([row], prompt_column="question").draw(0).columns == row


def test_a_missing_column_lists_the_columns_and_the_nearest() -> None:
    with pytest.raises(
        DataError, match=r"row 0 has no column 'promt'.*did you mean 'prompt'\? known: answer, prompt"
    ):
        dataset([{"prompt": "a", "answer": "b"}], prompt_column="promt")


def test_a_column_that_no_checkpoint_can_hold_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"row 0: column 'date' holds a date .*; columns are kept in checkpoints"
    ):
        dataset([{"prompt": "a", "date": datetime.date(2020, 1, 1)}])


# --- long prompts

LONG = [{"prompt": "a"}, {"prompt": "abcdef"}, {"prompt": "abcdefgh"}]


def test_long_prompts_are_refused_with_numbers_and_options() -> None:
    expected = (
        r"2 of 3 prompts are longer than max_prompt_tokens=4 \(longest: 9\); set long_prompts to 'truncate'"
    )
    with pytest.raises(DataError, match=expected):
        dataset(LONG, max_prompt_tokens=4)


def test_truncation_keeps_the_end_and_bos() -> None:
    prompts = dataset(LONG, max_prompt_tokens=4, long_prompts="truncate")
    assert [prompts.draw(i).token_ids for i in range(3)] == [
        (BOS, *ids_of("a")),
        (BOS, *ids_of("def")),
        (BOS, *ids_of("fgh")),
    ]
    assert (prompts.num_truncated, prompts.num_dropped) == (2, 0)


def test_truncation_without_bos_keeps_the_end() -> None:
    tokenizer = tiny_models.tiny_tokenizer(adds_bos=False)
    assert only("abcdef", tokenizer, max_prompt_tokens=4, long_prompts="truncate") == ids_of("cdef")


def test_truncation_to_one_token_keeps_bos_alone() -> None:
    assert only("abcdef", max_prompt_tokens=1, long_prompts="truncate") == (BOS,)


def test_dropping_counts_what_it_leaves_out() -> None:
    prompts = dataset(LONG, max_prompt_tokens=7, long_prompts="drop")
    assert len(prompts) == 2
    assert (prompts.num_truncated, prompts.num_dropped) == (0, 1)


def test_dropping_everything_is_refused() -> None:
    with pytest.raises(DataError, match="so dropping them leaves none"):
        dataset(LONG, max_prompt_tokens=1, long_prompts="drop")


def test_a_limit_that_leaves_no_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="max_prompt_tokens=0 leaves no prompt; use at least 1"):
        dataset(LONG, max_prompt_tokens=0)


def test_an_unknown_way_with_long_prompts_is_refused() -> None:
    with pytest.raises(DataError, match=r"long_prompts='trunc'; did you mean 'truncate'\?"):
        dataset(LONG, long_prompts="trunc")
