"""Chunk by chunk over a ragged cache is one shot: any chunks, any rows, any of the decoders."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, tiny_causal_lm, tiny_classifier

from oppo_kit.backends.hf_scorer import HFCriticScorer, HFReferenceScorer, HFRewardScorer
from oppo_kit.backends.streaming import check_streaming, cut_into_runs
from oppo_kit.errors import DataError, ModelError
from oppo_kit.types import Prompt, Rollout, RolloutKey

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "gpt2", "gpt_neox", "opt")
MAKERS = {
    "reward": lambda kind, **options: HFRewardScorer(tiny_classifier(kind), **options),
    "reference": lambda kind, **options: HFReferenceScorer(tiny_causal_lm(kind), temperature=0.7, **options),
    "critic": lambda kind: HFCriticScorer(tiny_classifier(kind)),
}


def make_rollouts(lengths: list[tuple[int, int]], seed: int = 0) -> list[Rollout]:
    """Ended rollouts with prompts and responses of these lengths."""
    source = random.Random(seed)
    return [
        Rollout(
            RolloutKey(draw, 0),
            Prompt(draw, tuple(source.randrange(VOCAB_SIZE) for _ in range(num_prompt)), 64),
            token_ids=[source.randrange(VOCAB_SIZE) for _ in range(num_response)],
            finish_reason="stop",
        )
        for draw, (num_prompt, num_response) in enumerate(lengths)
    ]


def part_of(rollout: Rollout, num_tokens: int) -> Rollout:
    return Rollout(rollout.key, rollout.prompt, token_ids=rollout.token_ids[:num_tokens])


def numbers(scores) -> list[float]:
    return [number for score in scores for number in (score if isinstance(score, list) else [score])]


def stream(scorer, rollouts: list[Rollout], chunks: list[int]) -> list:
    """Decode in lock-step by the chunks; ended rollouts are scored at once, in the company they have."""
    scores, position, waiting = {}, 0, list(rollouts)
    for chunk in [*chunks, 10_000]:
        position += chunk
        ended = [rollout for rollout in waiting if len(rollout.token_ids) <= position]
        waiting = [rollout for rollout in waiting if len(rollout.token_ids) > position]
        if ended:
            scores.update(zip((r.key for r in ended), scorer.score(ended), strict=True))
        scorer.feed([part_of(rollout, position) for rollout in waiting])
    return [scores[rollout.key] for rollout in rollouts]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_scores_are_one_shot_scores(kind: str, name: str) -> None:
    rollouts = make_rollouts([(3, 20), (1, 7), (9, 0), (2, 33), (5, 12), (1, 1)])
    expected = MAKERS[name](kind).score(rollouts)
    scorer = MAKERS[name](kind)
    assert numbers(stream(scorer, rollouts, [1, 4, 4, 0, 9, 3])) == pytest.approx(numbers(expected), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 24)), min_size=1, max_size=9),
    chunks=st.lists(st.integers(0, 9), max_size=8),
    name=st.sampled_from(sorted(MAKERS)),
    seed=st.integers(0, 99),
)
def test_any_chunks_of_any_rows_score_as_one_shot(lengths, chunks, name, seed) -> None:
    rollouts = make_rollouts(lengths, seed)
    expected = numbers(MAKERS[name]("llama").score(rollouts))
    assert numbers(stream(MAKERS[name]("llama"), rollouts, chunks)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("name", "unread"), [("reward", 0), ("reference", 1), ("critic", 1)])
def test_no_token_is_read_twice(name: str, unread: int) -> None:
    """The last token says nothing about a next one, so that log-probs and values need it not."""
    rollouts = make_rollouts([(3, 20), (4, 7), (2, 33), (5, 12)])
    scorer = MAKERS[name]("llama")
    stream(scorer, rollouts, [5, 5, 5])
    total = sum(len(rollout.prompt.token_ids) + len(rollout.token_ids) - unread for rollout in rollouts[:1])
    streamed = [rollout for rollout in rollouts if len(rollout.token_ids) > 5]
    total = sum(len(r.prompt.token_ids) + len(r.token_ids) - unread for r in streamed)
    in_one_shot = [rollout for rollout in rollouts if len(rollout.token_ids) <= 5]
    assert scorer.num_tokens_read == total + sum(
        len(r.prompt.token_ids) + len(r.token_ids) for r in in_one_shot
    )


def test_what_was_fed_does_not_matter_for_the_score() -> None:
    """Fed tokens that turn out to be others are cropped, a log-prob of a token that is another is read again."""
    [rollout] = make_rollouts([(3, 20)])
    for name, make in MAKERS.items():
        expected = numbers(make("llama").score([rollout]))
        for num_right in range(21):
            wrong = part_of(rollout, num_right)
            wrong.token_ids += [(token + 1) % VOCAB_SIZE for token in rollout.token_ids[num_right:]] + [5] * 4
            scorer = make("llama")
            scorer.feed([wrong])
            assert numbers(scorer.score([rollout])) == pytest.approx(expected, abs=1e-5), (name, num_right)


def test_a_row_leaves_without_moving_the_scores_of_others() -> None:
    rollouts = make_rollouts([(3, 20), (4, 17), (2, 33), (5, 12)])
    expected = numbers(MAKERS["reward"]("llama").score(rollouts))
    scorer = MAKERS["reward"]("llama")
    scorer.feed([part_of(rollout, 6) for rollout in rollouts])
    scorer.forget([rollouts[1].key, RolloutKey(99, 0)])
    scorer.feed([part_of(rollout, 9) for rollout in rollouts if rollout.key.draw_id in (0, 2)])
    assert numbers(scorer.score(rollouts)) == pytest.approx(expected, abs=1e-5)
    scorer.feed([part_of(rollout, 6) for rollout in rollouts])
    scorer.forget(None)
    before = scorer.num_tokens_read
    assert numbers(scorer.score(rollouts)) == pytest.approx(expected, abs=1e-5)
    assert scorer.num_tokens_read - before == sum(
        len(r.prompt.token_ids) + len(r.token_ids) for r in rollouts
    )


def test_the_critics_values_follow_the_weights_after_it_forgot() -> None:
    critic = tiny_classifier()
    scorer = HFCriticScorer(critic)
    rollouts = make_rollouts([(3, 20), (4, 17)])
    scorer.feed([part_of(rollout, 9) for rollout in rollouts])
    with torch.no_grad():
        critic.score.weight.mul_(-2.0)
        critic.model.layers[0].self_attn.q_proj.weight.mul_(3.0)
    scorer.forget(None)
    scorer.feed([part_of(rollout, 12) for rollout in rollouts])
    expected = numbers(HFCriticScorer(critic).score(rollouts))
    assert numbers(scorer.score(rollouts)) == pytest.approx(expected, abs=1e-5)
    # The model under training is left as it was: it can be trained, and computes its gradient.
    critic.score.weight.requires_grad_(True)
    critic(torch.tensor([[1, 2, 3]])).logits.sum().backward()


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    model = tiny_classifier()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    rollouts = make_rollouts([(3, 20), (4, 17)])
    for rollout in rollouts:
        rollout.token_ids = [token if token != 7 else 8 for token in rollout.token_ids]
    good = [Prompt(r.prompt.draw_id, (1, 2, 3), 64) for r in rollouts]
    rollouts = [
        Rollout(r.key, p, token_ids=r.token_ids, finish_reason="stop")
        for r, p in zip(rollouts, good, strict=True)
    ]
    rollouts[1].token_ids[10] = 7
    expected = HFRewardScorer(model).score(rollouts)
    assert expected[0] == expected[0]
    assert expected[1] != expected[1]
    scorer = HFRewardScorer(model)
    for num_tokens in (4, 8, 12, 16):
        scorer.feed([part_of(rollout, num_tokens) for rollout in rollouts])
    scores = scorer.score(rollouts)
    assert scores[0] == pytest.approx(expected[0], abs=1e-5)
    assert scores[1] != scores[1]


def test_memory_of_rows_that_left_is_used_again() -> None:
    scorer = HFRewardScorer(tiny_classifier())
    sizes = set()
    for draw in range(60):
        rollouts = [
            Rollout(
                RolloutKey(draw, index), Prompt(draw, (1, 2), 64), token_ids=[3] * 20, finish_reason="stop"
            )
            for index in range(3)
        ]
        scorer.feed([part_of(rollout, 10) for rollout in rollouts])
        scorer.score(rollouts)
        sizes.add(scorer.num_cache_bytes)
    assert len(sizes) == 1
    assert sizes.pop() > 0


def test_the_debug_switch_finds_a_stream_that_went_wrong() -> None:
    rollouts = make_rollouts([(3, 20), (4, 17)])
    scorer = HFRewardScorer(tiny_classifier(), checks_stream=True)
    scorer.feed([part_of(rollout, 9) for rollout in rollouts])
    scorer.score(rollouts)
    scorer.feed([part_of(rollout, 9) for rollout in rollouts])
    with torch.no_grad():
        scorer.module.model.layers[0].self_attn.q_proj.weight.mul_(3.0)  # what was fed is of other weights
        scorer.module.model.layers[1].mlp.down_proj.weight.mul_(3.0)
    with pytest.raises(
        ModelError, match=r"reward of draws \[0, 1\] cannot be fed chunk by chunk: .* differ by"
    ):
        scorer.score(rollouts)


def test_models_that_cannot_be_streamed_are_refused_at_the_probe() -> None:
    HFRewardScorer(tiny_classifier()).probe_streaming()
    other = tiny_classifier()
    other.config._attn_implementation = "flex_attention"
    with pytest.raises(
        ModelError, match="uses flex_attention attention, which takes no mask for rows of unequal"
    ):
        HFRewardScorer(other).probe_streaming()
    broken = tiny_classifier()
    forward = broken.model.forward

    def without_positions(*args, **kwargs):
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"] * 0
        return forward(*args, **kwargs)

    broken.model.forward = without_positions
    with pytest.raises(
        ModelError, match=r"reward \(Llama.*\) cannot be fed chunk by chunk: its numbers then differ by"
    ):
        HFRewardScorer(broken).probe_streaming()


def test_a_response_longer_than_the_context_names_its_draw() -> None:
    model = tiny_classifier()
    model.config.max_position_embeddings = 10
    [rollout] = make_rollouts([(3, 20)])
    with pytest.raises(
        DataError, match="draw 0: its 23 tokens exceed the context of 10 of the model behind 'reward'"
    ):
        HFRewardScorer(model).score([rollout])
    scorer = HFRewardScorer(model)
    scorer.feed([part_of(rollout, 4)])
    scorer.feed([part_of(rollout, 12)])  # may yet become shorter, by a template that drops a part
    with pytest.raises(DataError, match="draw 0: its 23 tokens exceed the context of 10"):
        scorer.score([rollout])


def test_runs_leave_out_slots_without_new_tokens_where_that_is_cheaper() -> None:
    assert cut_into_runs([0, 8, 8, 0, 500, 490], 4096) == [(1, 3), (4, 6)]
    assert cut_into_runs([0, 0], 4096) == []
    assert cut_into_runs([8, 0, 8], 4096) == [(0, 3)]
    assert cut_into_runs([3000, 3000], 4096) == [(0, 1), (1, 2)]
    assert cut_into_runs([9000], 4096) == [(0, 1)]


def test_numbers_that_are_not_compared_as_equal_are_refused() -> None:
    check_streaming("x", [1.0, 2.0], [1.0, 2.0005], 1e-3)
    with pytest.raises(ModelError, match="x cannot be fed chunk by chunk: its numbers then differ by 0.5"):
        check_streaming("x", [1.0, 2.0], [1.0, 2.5], 1e-3)
    with pytest.raises(ModelError, match="differ by nan"):
        check_streaming("x", [float("nan")], [1.0], 1e-3)


def test_a_pass_that_failed_leaves_nothing_behind_that_would_be_read_again() -> None:
    rollouts = make_rollouts([(3, 20), (4, 17)])
    expected = numbers(MAKERS["reward"]("llama").score(rollouts))
    scorer = MAKERS["reward"]("llama")
    scorer.feed([part_of(rollout, 6) for rollout in rollouts])
    read, scorer._prefill._read = scorer._prefill._read, None
    with pytest.raises(TypeError):
        scorer.feed([part_of(rollout, 9) for rollout in rollouts])
    scorer._prefill._read = read
    assert numbers(scorer.score(rollouts)) == pytest.approx(expected, abs=1e-5)


def test_a_model_that_cannot_be_read_by_chunks_is_refused_with_its_reason() -> None:
    broken = tiny_classifier()
    with torch.no_grad():
        broken.score.weight.fill_(float("inf"))
    with pytest.raises(ModelError, match="its numbers then differ by nan"):
        HFRewardScorer(broken).probe_streaming()
    other = tiny_classifier()
    scorer = HFRewardScorer(other)
    scorer._streaming._cache_keyword = "no_such_keyword"
    with pytest.raises(
        ModelError, match=r"reward \(LlamaFor.*\) cannot be fed chunk by chunk: .*Error: .*; set overlap"
    ):
        scorer.probe_streaming()


def test_the_probe_leaves_no_cache_behind() -> None:
    scorer = HFRewardScorer(tiny_classifier())
    scorer.probe_streaming()
    assert scorer.num_cache_bytes == 0


@settings(max_examples=200, deadline=None)
@given(num_new=st.lists(st.integers(0, 40), max_size=12), max_tokens=st.integers(1, 200))
def test_runs_hold_every_new_token_once_and_keep_to_the_budget(num_new, max_tokens) -> None:
    runs = cut_into_runs(num_new, max_tokens)
    covered = [slot for first, last in runs for slot in range(first, last)]
    assert len(covered) == len(set(covered))
    assert {slot for slot, new in enumerate(num_new) if new} <= set(covered)
    for first, last in runs:
        longest = max(num_new[first:last])
        assert longest > 0
        assert (last - first) * longest <= max_tokens or sum(new > 0 for new in num_new[first:last]) == 1
