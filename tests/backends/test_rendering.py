"""What a reward model with its own tokenizer reads: against the text that TRL builds, written down anew."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import (
    BOS_TEXT,
    TEMPLATES,
    TOKENIZERS,
    byte_bpe_tokenizer,
    generated_text,
    unigram_tokenizer,
)
from tiny_models import CHAT_TEMPLATE, tiny_tokenizer

from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.backends.rendering import IdsRendering, TextRendering, num_settled
from oppo_kit.errors import ModelError
from oppo_kit.types import Prompt, Rollout, RolloutKey

MESSAGES = [{"role": "user", "content": "What is 12 + 7?"}]
ANSWERS = ("the answer is 19.", "  naïve café 東京\n\n 🙂 don't  ", "<think>12 + 7\n= 19</think>\n19", "")
REFUSES = "{{ raise_exception('roles must alternate') }}"
CONTENTS_ALONE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
BOS_PER_TURN = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}"
CONCATENATES = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"


def rollout_of(token_ids: list[int], prompt: Any = MESSAGES, column: str = "prompt") -> Rollout:
    key = RolloutKey(7, 0)
    return Rollout(key, Prompt(7, (5,), 999, {column: prompt}), token_ids, finish_reason="stop")


def encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_conversation_reads_as_in_stock_trl(kind: str, template: str, answer: str) -> None:
    policy = byte_bpe_tokenizer()
    reward = TOKENIZERS[kind](adds_eos=True, chat_template=TEMPLATES[template])
    response_ids = [*encoded(policy, answer), policy.eos_token_id]
    prompt = copy.deepcopy(MESSAGES)

    completion = policy.batch_decode([response_ids], skip_special_tokens=True)[0]
    conversation = [*MESSAGES, {"role": "assistant", "content": completion}]
    text = reward.apply_chat_template(conversation, tokenize=False)
    expected = reward(text=[text], add_special_tokens=False)["input_ids"][0]

    assert completion == answer
    assert TextRendering(policy, reward).encode(rollout_of(response_ids, prompt)) == expected
    assert prompt == MESSAGES


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_reads_as_in_stock_trl_between_the_special_tokens_of_the_tokenizer(
    kind: str, answer: str
) -> None:
    policy, prompt = byte_bpe_tokenizer(), "Say: add"  # merges with what follows
    response_ids = [*encoded(policy, answer), policy.eos_token_id]
    for adds_eos in (False, True):
        reward = TOKENIZERS[kind](adds_eos=adds_eos)
        ids = TextRendering(policy, reward).encode(rollout_of(response_ids, prompt))
        last = [reward.eos_token_id] if adds_eos else []
        assert ids == [reward.bos_token_id, *encoded(reward, prompt + answer), *last]


def test_a_policy_tokenizer_that_cleans_spaces_gives_the_text_that_a_reward_function_gets() -> None:
    policy = unigram_tokenizer(clean_up_tokenization_spaces=True)
    reward, response_ids, seen = unigram_tokenizer(), encoded(policy, "is . is n't"), []

    def function(completions: list[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0]

    rollout = rollout_of(response_ids, "It ")
    FunctionScorer([function], policy).score([rollout])
    assert seen == ["is. isn't"]
    assert TextRendering(policy, reward).encode(rollout) == reward("It is. isn't")["input_ids"]


@pytest.mark.parametrize("prompt_begins_with_bos", [False, True])
@pytest.mark.parametrize("template", [None, CONTENTS_ALONE, TEMPLATES["adds_suffix"]])
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_rendering_never_has_bos_twice(
    kind: str, adds_bos: bool, template: str | None, prompt_begins_with_bos: bool
) -> None:
    policy, reward = byte_bpe_tokenizer(), TOKENIZERS[kind](adds_bos=adds_bos, chat_template=template)
    content = (BOS_TEXT if prompt_begins_with_bos else "") + "add"
    prompt = content if template is None else [{"role": "user", "content": content}]
    ids = TextRendering(policy, reward).encode(rollout_of(encoded(policy, " 12"), prompt))
    if template is None:
        has_bos = adds_bos or prompt_begins_with_bos
    else:
        has_bos = template == CONTENTS_ALONE or prompt_begins_with_bos
    assert ids.count(reward.bos_token_id) == has_bos
    if template is not TEMPLATES["adds_suffix"]:  # there the content stands behind a header
        assert (ids[0] == reward.bos_token_id) == has_bos
    body = [token_id for token_id in ids if token_id != reward.bos_token_id]
    assert reward.decode(body, skip_special_tokens=True).endswith(
        "add 12" if template != TEMPLATES["adds_suffix"] else "add\nassistant\n 12\n"
    )


def test_a_run_of_bos_is_cut_to_one_and_those_of_later_turns_stay() -> None:
    policy, reward = byte_bpe_tokenizer(), byte_bpe_tokenizer(chat_template=BOS_PER_TURN)
    bos, word, answer = reward.bos_token_id, encoded(reward, "add"), encoded(policy, "is")
    rendering = TextRendering(policy, reward)
    assert rendering.encode(rollout_of(answer, f"{BOS_TEXT}{BOS_TEXT}add"))[:2] == [bos, word[0]]
    ids = rendering.encode(rollout_of(answer, [{"role": "user", "content": f"{BOS_TEXT}add"}]))
    assert ids == [bos, *word, bos, *encoded(reward, "is")]


def test_without_a_bos_token_nothing_is_dropped() -> None:
    policy, reward = byte_bpe_tokenizer(), byte_bpe_tokenizer(has_bos=False)
    ids = TextRendering(policy, reward).encode(rollout_of([], f"{BOS_TEXT}{BOS_TEXT}add"))
    assert ids == encoded(reward, f"{BOS_TEXT}{BOS_TEXT}add")
    assert ids[0] == ids[1]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_segmentation_of_a_text_gives_the_same_rendering(kind: str, seed: int) -> None:
    """rllm#272: what a policy samples is seldom what its tokenizer would make of the same text."""
    policy, chooser = byte_bpe_tokenizer(), random.Random(seed)
    text = generated_text(6, seed)
    canonical, sampled = encoded(policy, text), []
    for token_id in canonical:
        piece = policy.convert_ids_to_tokens(token_id)
        cut = chooser.randint(0, len(piece) - 1)
        parts = [piece[:cut], piece[cut:]] if cut else [piece]
        known = [policy.convert_tokens_to_ids(part) for part in parts]
        sampled.extend([token_id] if policy.unk_token_id in known else known)
    assert policy.decode(sampled) == text
    reward = TOKENIZERS[kind](chat_template=TEMPLATES["adds_suffix"])
    rendering = TextRendering(policy, reward)
    for prompt in ("Say: ", MESSAGES):
        assert rendering.encode(rollout_of(sampled, prompt)) == rendering.encode(
            rollout_of(canonical, prompt)
        )


def test_a_segmentation_that_is_not_canonical_exists() -> None:
    policy = byte_bpe_tokenizer()
    letters: Any = policy.convert_tokens_to_ids(list("add"))
    assert letters != encoded(policy, "add")
    rendering = TextRendering(policy, byte_bpe_tokenizer())
    assert rendering.encode(rollout_of(letters, "")) == byte_bpe_tokenizer()("add")["input_ids"]


def test_half_a_character_reads_as_a_replacement_until_the_other_half_comes() -> None:
    policy, reward = byte_bpe_tokenizer(), tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    half, whole = encoded(policy, "Ωa")[:1], encoded(policy, "Ωa")
    assert policy.decode(half) == "\ufffd"
    rendering = TextRendering(policy, byte_bpe_tokenizer())
    assert rendering.encode(rollout_of(half, "a")) == byte_bpe_tokenizer()("a\ufffd")["input_ids"]
    assert rendering.encode(rollout_of(whole, "a")) == byte_bpe_tokenizer()("aΩa")["input_ids"]
    assert len(TextRendering(policy, reward).encode(rollout_of(half, "a"))) == 3  # BOS, a, one unknown


def test_special_tokens_of_the_policy_are_no_part_of_the_text_but_of_the_ids() -> None:
    policy = byte_bpe_tokenizer()
    word = encoded(policy, "add")
    ids = [policy.bos_token_id, *word, policy.pad_token_id, policy.eos_token_id]
    rollout = rollout_of(ids, "")
    assert TextRendering(policy, policy).encode(rollout) == [policy.bos_token_id, *word]
    assert IdsRendering().encode(rollout) == [5, *ids]


def test_the_prompt_is_the_named_column_or_else_the_decoded_ids() -> None:
    policy = byte_bpe_tokenizer()
    rendering = TextRendering(policy, policy, prompt_column="question")
    assert rendering.encode(rollout_of([], "add", "question")) == policy("add")["input_ids"]
    prompt_ids = tuple(policy("wordless")["input_ids"])
    without_column = Rollout(RolloutKey(0, 0), Prompt(0, prompt_ids, 9, {"prompt": "another"}))
    assert rendering.encode(without_column) == list(prompt_ids)


def test_a_truncation_or_padding_saved_with_the_tokenizer_is_not_applied() -> None:
    policy, reward = byte_bpe_tokenizer(), byte_bpe_tokenizer()
    reward.backend_tokenizer.enable_truncation(4)
    reward.backend_tokenizer.enable_padding(length=64)
    ids = TextRendering(policy, reward).encode(rollout_of(encoded(policy, "x" * 20), "Say "))
    assert ids == byte_bpe_tokenizer()("Say " + "x" * 20)["input_ids"]
    assert len(ids) > 20


def test_bos_or_else_eos_stands_for_no_text_at_all() -> None:
    policy, nothing = byte_bpe_tokenizer(), rollout_of([], "")
    with_bos, with_eos = byte_bpe_tokenizer(adds_bos=False), byte_bpe_tokenizer(has_bos=False)
    assert TextRendering(policy, with_bos).encode(nothing) == [with_bos.bos_token_id]
    assert TextRendering(policy, with_eos).encode(nothing) == [with_eos.eos_token_id]
    with_eos.eos_token = None
    with pytest.raises(
        ModelError, match=r"draw 7 give the reward model no token at all.*set its bos_token, or give"
    ):
        TextRendering(policy, with_eos).encode(nothing)


def test_a_conversation_needs_a_chat_template_that_takes_it() -> None:
    policy = byte_bpe_tokenizer()
    with pytest.raises(
        ModelError,
        match=r"draw 7 is a conversation.*no chat template; set its chat_template.*or give prompts",
    ):
        TextRendering(policy, byte_bpe_tokenizer()).encode(rollout_of([]))
    refusing = TextRendering(policy, byte_bpe_tokenizer(chat_template=REFUSES))
    with pytest.raises(
        ModelError, match=r"does not take.*draw 7 \(roles user, assistant\): .*: roles must alternate; change"
    ):
        refusing.encode(rollout_of([]))
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    concatenating = TextRendering(policy, byte_bpe_tokenizer(chat_template=CONCATENATES))
    with pytest.raises(ModelError, match=r"does not take.*can only concatenate str.*another chat_template"):
        concatenating.encode(rollout_of([], parts))
    unnamed = byte_bpe_tokenizer()
    unnamed.chat_template = {"tool_use": CONCATENATES, "rag": CONCATENATES}
    with pytest.raises(ModelError, match="does not take.*no default"):
        TextRendering(policy, unnamed).encode(rollout_of([]))


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
    ],
)
def test_a_chat_template_that_breaks_is_named_with_the_cause(template, cause) -> None:
    policy = byte_bpe_tokenizer()
    with pytest.raises(
        ModelError, match=rf"chat template does not take the conversation of draw 7.*: {cause}"
    ):
        TextRendering(policy, byte_bpe_tokenizer(chat_template=template)).encode(rollout_of([]))


@pytest.mark.parametrize("prompt", [["a"], None, 5, {"role": "user"}])
def test_a_prompt_that_is_neither_text_nor_messages_is_named(prompt) -> None:
    policy = byte_bpe_tokenizer()
    rendering = TextRendering(policy, byte_bpe_tokenizer(chat_template=CONCATENATES))
    with pytest.raises(
        ModelError, match=r"draw 7 in column 'prompt' is .*, which is neither text nor a list of"
    ):
        rendering.encode(rollout_of([], prompt))


def test_settled_is_what_stands_six_tokens_before_the_common_end() -> None:
    prompt, suffix = [1, 2, 3], [90, 91]
    empty = prompt + suffix
    response = list(range(10, 20))
    assert num_settled(empty, prompt + response + suffix) == 3 + 10 - 6
    assert num_settled(empty, [*prompt, 10, *suffix]) == 0
    assert num_settled(prompt, prompt + response) == 3 + 10 - 6
    assert num_settled(empty, empty) == 0
    assert num_settled([], response) == 10 - 6
    assert num_settled(response, []) == 0


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_settled_lies_within_the_rendering(previous: list[int], current: list[int]) -> None:
    assert 0 <= num_settled(previous, current) <= len(current)


def renderings(kind: str, template: str | None, policy: Any, seed: int) -> list[list[int]]:
    """Of a growing response, cut at random."""
    chooser = random.Random(seed)
    reward = TOKENIZERS[kind](chat_template=None if template is None else TEMPLATES[template])
    rendering = TextRendering(policy, reward)
    prompt = "Say: " if template is None else MESSAGES
    token_ids = encoded(policy, generated_text(120, seed))
    found, end = [], 0
    while True:
        found.append(rendering.encode(rollout_of(token_ids[:end], prompt)))
        if end == len(token_ids):
            return found
        end = min(len(token_ids), end + chooser.randint(1, 16))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_is_settled_seldom_changes_and_little_is_held_back(kind: str) -> None:
    """The measurement behind the number of tokens held back; with none of them about a third changes."""
    policy = byte_bpe_tokenizer()
    num_changed = num_held_back = num_seen = 0
    for template in (None, "plain", "trims", "adds_suffix", "writes_bos"):
        for seed in range(6):
            grown = renderings(kind, template, policy, seed)
            for current, following in itertools.pairwise(grown):
                settled = num_settled(grown[0], current)
                num_changed += following[:settled] != current[:settled]
                num_held_back += len(current) - settled
                num_seen += 1
    assert num_seen > 500
    assert num_changed <= 0.01 * num_seen
    assert num_held_back < 9 * num_seen
