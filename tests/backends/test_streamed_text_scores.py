"""A reward model that reads text, fed chunk by chunk: the scores of reading the final text in one shot."""

from __future__ import annotations

import random
from typing import Any

import pytest
from text_tokenizers import TEMPLATES, TOKENIZERS, byte_bpe_tokenizer, generated_text, tiny_text_classifier

from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.backends.rendering import TextRendering
from oppo_kit.types import Prompt, Rollout, RolloutKey

RESPONSES = (
    generated_text(25, 1),
    "",
    f"<think>{generated_text(12, 2)}</think>\n\n{generated_text(5, 3)}",
    f"  {generated_text(4, 4)}   \n\n",
    "🙂👩\u200d🔬Ω漢字" * 4,
    "word " * 30,
)


def make_rendering(kind: str, template: str | None, **options: Any) -> TextRendering:
    chat_template = None if template is None else TEMPLATES[template]
    return TextRendering(byte_bpe_tokenizer(), TOKENIZERS[kind](chat_template=chat_template, **options))


def make_scorer(kind: str, rendering: TextRendering, **options: Any) -> HFRewardScorer:
    return HFRewardScorer(tiny_text_classifier(TOKENIZERS[kind]()), rendering=rendering, **options)


def rollout_of(row: int, is_text: bool) -> Rollout:
    policy: Any = byte_bpe_tokenizer()
    question = f"Say {row}: add" + " word" * (3 * row)
    prompt = question if is_text else [{"role": "user", "content": question}]
    token_ids = policy(RESPONSES[row], add_special_tokens=False)["input_ids"]
    key = RolloutKey(row, 0)
    return Rollout(key, Prompt(row, (5,), 999, {"prompt": prompt}), [*token_ids, policy.eos_token_id])


def part_of(whole: Rollout, num_tokens: int) -> Rollout:
    """Its first tokens; all of them end it."""
    is_ended = num_tokens >= len(whole.token_ids)
    return Rollout(
        whole.key,
        whole.prompt,
        whole.token_ids[:num_tokens],
        finish_reason="stop" if is_ended else None,
    )


def one_shot(scorer: HFRewardScorer, wholes: list[Rollout]) -> dict[RolloutKey, Any]:
    ended = [part_of(whole, len(whole.token_ids)) for whole in wholes]
    return dict(zip((rollout.key for rollout in ended), scorer.score(ended), strict=True))


def streamed(
    scorer: HFRewardScorer, wholes: list[Rollout], seed: int, max_chunk: int
) -> dict[RolloutKey, Any]:
    """Random chunks, some calls left out, rows in any order; scored as they end."""
    chooser = random.Random(seed)
    live, lengths = {whole.key: whole for whole in wholes}, {whole.key: 0 for whole in wholes}
    scores: dict[RolloutKey, Any] = {}
    while live:
        for key in live:
            lengths[key] += chooser.randint(0, max_chunk)
        parts = [part_of(whole, lengths[whole.key]) for whole in live.values()]
        chooser.shuffle(parts)
        ended = [part for part in parts if part.is_ended]
        scorer.feed([part for part in parts if not part.is_ended and chooser.random() < 0.8])
        scores.update(zip((part.key for part in ended), scorer.score(ended), strict=True))
        for part in ended:
            del live[part.key]
    return scores


@pytest.mark.parametrize("max_chunk", [3, 30])
@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_streamed_score_is_that_of_the_final_text(kind: str, template: str | None, max_chunk: int) -> None:
    rendering = make_rendering(kind, template, adds_eos=True)
    wholes = [rollout_of(row, template is None) for row in range(len(RESPONSES))]
    expected = one_shot(make_scorer(kind, rendering), wholes)
    scorer = make_scorer(kind, rendering)
    actual = streamed(scorer, wholes, seed=max_chunk, max_chunk=max_chunk)
    assert actual == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected.values()}) == len(RESPONSES)


@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_a_rollout_that_is_forgotten_or_starts_again_is_scored_by_its_final_text(
    template: str | None,
) -> None:
    rendering = make_rendering("byte_bpe", template)
    first, other = (rollout_of(row, template is None) for row in (0, 2))
    expected = one_shot(make_scorer("byte_bpe", rendering), [first, other])
    scorer = make_scorer("byte_bpe", rendering)
    scorer.feed([part_of(first, 20), part_of(other, 30)])
    scorer.forget([first.key])
    restarted = Rollout(other.key, other.prompt, first.token_ids[:25])
    scorer.feed([part_of(first, 10), restarted])
    ended = [part_of(whole, len(whole.token_ids)) for whole in (other, first)]
    assert scorer.score(ended) == pytest.approx([expected[other.key], expected[first.key]], abs=1e-5)
    scorer.feed([part_of(first, 15)])
    scorer.forget(None)
    assert scorer.score(ended[1:]) == pytest.approx([expected[first.key]], abs=1e-5)


@pytest.mark.parametrize("template", [None, "plain", "trims", "adds_suffix", "writes_bos"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_growing_text_is_read_about_once_and_before_it_ends(kind: str, template: str | None) -> None:
    rendering = make_rendering(kind, template)
    wholes = [rollout_of(row, template is None) for row in (0, 2, 5)]
    scorer = make_scorer(kind, rendering)
    num_in_final = sum(len(rendering.encode(whole)) for whole in wholes)
    longest = max(len(whole.token_ids) for whole in wholes)
    for length in range(0, longest, 5):
        scorer.feed([part_of(whole, min(length, len(whole.token_ids) - 1)) for whole in wholes])
    num_before_the_end = scorer.num_tokens_read
    scorer.score([part_of(whole, len(whole.token_ids)) for whole in wholes])
    assert num_before_the_end > num_in_final - 14 * len(wholes)
    assert num_in_final <= scorer.num_tokens_read <= 1.03 * num_in_final


def test_what_is_settled_follows_a_header_that_moves_and_thoughts_that_vanish() -> None:
    """Where earlier text changes, the cache is cropped: more is read than stands there in the end."""
    for template in ("header_counts", "drops_thoughts"):
        rendering = make_rendering("byte_bpe", template)
        whole = rollout_of(2, is_text=False)
        scorer = make_scorer("byte_bpe", rendering, checks_stream=True)
        for length in range(0, len(whole.token_ids), 5):
            scorer.feed([part_of(whole, length)])
        ended = part_of(whole, len(whole.token_ids))
        num_before = scorer.num_tokens_read
        assert num_before > 1.2 * len(rendering.encode(ended))
        scorer.score([ended])


def test_an_unfinished_text_longer_than_the_context_that_ends_within_it_is_scored() -> None:
    """Thoughts that the template drops in the end may exceed the context before."""
    rendering = make_rendering("byte_bpe", "drops_thoughts")
    whole = rollout_of(2, is_text=False)
    ended = part_of(whole, len(whole.token_ids))
    classifier = tiny_text_classifier(byte_bpe_tokenizer())
    expected = HFRewardScorer(classifier, rendering=rendering).score([ended])
    classifier.config.max_position_embeddings = len(rendering.encode(ended)) + 2
    scorer = HFRewardScorer(classifier, rendering=rendering)
    for length in range(0, len(whole.token_ids), 5):
        scorer.feed([part_of(whole, length)])
    assert scorer.score([ended]) == pytest.approx(expected, abs=1e-5)
