"""Draws against the distributions that they come from."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from oppo_kit.backends.sampler import Sample, Sampler, Truncation
from oppo_kit.ops.noise import stream_key, token_keys

NUM_DRAWS = 4000
# Probabilities 0.4, 0.25, 0.15, 0.1, 0.06, 0.04, in an order of their own.
PROBABILITIES = torch.tensor([0.06, 0.4, 0.15, 0.04, 0.25, 0.1])
TRUNCATIONS = [
    (Truncation(top_k=3), [1, 4, 2]),
    (Truncation(top_k=1), [1]),
    (Truncation(top_p=0.7), [1, 4, 2]),  # 0.4 + 0.25 falls short of 0.7
    (Truncation(top_p=0.3), [1]),
    (Truncation(min_p=0.2), [1, 4, 2, 5]),  # at least 0.08
    (Truncation(top_k=4, top_p=0.8, min_p=0.3), [1, 4, 2]),  # each filter sees what the one before has left
]


def draw(truncation: Truncation | None, temperature: float = 1.0) -> Sample:
    """Logits whose distribution at this temperature is PROBABILITIES, drawn from with many keys."""
    logits = (PROBABILITIES.log() * temperature + 5.0).expand(NUM_DRAWS, -1)
    keys = token_keys([stream_key(0, index, 0) for index in range(NUM_DRAWS)], [3] * NUM_DRAWS, 1)[0]
    return Sampler(temperature, truncation).draw(logits, keys)


def counts(sample: Sample) -> Tensor:
    return torch.bincount(sample.token_ids, minlength=len(PROBABILITIES))


@pytest.mark.parametrize(("truncation", "kept"), TRUNCATIONS)
def test_only_kept_tokens_are_drawn_and_all_of_them(truncation: Truncation, kept: list[int]) -> None:
    assert counts(draw(truncation)).nonzero().flatten().tolist() == sorted(kept)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize(("truncation", "kept"), TRUNCATIONS)
def test_behaviour_logprobs_are_of_the_full_vocabulary_and_sampling_logprobs_of_the_kept_tokens(
    truncation: Truncation, kept: list[int], temperature: float
) -> None:
    sample = draw(truncation, temperature)
    full = PROBABILITIES.log()
    torch.testing.assert_close(sample.behaviour_logprobs, full[sample.token_ids], rtol=0, atol=1e-5)
    assert sample.sampling_logprobs is not None
    of_token = {
        token: sample.sampling_logprobs[sample.token_ids == token].exp().unique().mean() for token in kept
    }
    assert float(sum(of_token.values())) == pytest.approx(1.0, abs=1e-5)
    kept_mass = float(PROBABILITIES[kept].sum())
    ratio = (sample.behaviour_logprobs - sample.sampling_logprobs).exp()
    torch.testing.assert_close(ratio, torch.full((NUM_DRAWS,), kept_mass), rtol=0, atol=1e-5)


@pytest.mark.parametrize("truncation", [None, Truncation(), Truncation(top_k=0, top_p=1.0, min_p=0.0)])
def test_truncation_is_off_by_default_and_then_there_are_no_sampling_logprobs(
    truncation: Truncation | None,
) -> None:
    sample = draw(truncation)
    assert sample.sampling_logprobs is None
    assert counts(sample).min() > 0


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(("truncation", "kept"), [(None, list(range(6))), TRUNCATIONS[0], TRUNCATIONS[4]])
def test_tokens_are_drawn_as_often_as_the_kept_distribution_says(
    truncation: Truncation | None, kept: list[int], temperature: float
) -> None:
    observed = counts(draw(truncation, temperature))[kept]
    expected = PROBABILITIES[kept].double()
    expected = expected / expected.sum() * NUM_DRAWS
    # The noise is a fixed function, so this is no flaky test; a wrong distribution gives far below 1e-6.
    assert chisquare(observed.double(), expected).pvalue > 0.01


def test_truncation_never_makes_an_allowed_token_less_likely_than_it_was() -> None:
    """With one key, the token drawn from all is drawn from the kept ones too, if it is one of them."""
    everything, kept = draw(None), draw(Truncation(top_k=3))
    is_kept = torch.isin(everything.token_ids, torch.tensor([1, 4, 2]))
    assert torch.equal(kept.token_ids[is_kept], everything.token_ids[is_kept])


def test_half_precision_logits_are_drawn_from_in_float32() -> None:
    logits = torch.linspace(-3, 3, 50).bfloat16().expand(8, -1)
    keys = token_keys(range(8), [0] * 8, 1)[0]
    sample = Sampler(0.7).draw(logits, keys)
    expected = (logits[0].float() / 0.7).log_softmax(-1)
    assert sample.behaviour_logprobs.dtype == torch.float32
    torch.testing.assert_close(sample.behaviour_logprobs, expected[sample.token_ids], rtol=0, atol=1e-6)


def test_rows_draw_as_they_would_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 40)
    keys = token_keys([stream_key(0, index, 0) for index in range(9)], range(9), 1)[0]
    sampler = Sampler(0.9, Truncation(top_p=0.8))
    together = sampler.draw(logits, keys)
    for row in range(9):
        alone = sampler.draw(logits[row : row + 1], keys[row : row + 1])
        assert alone.token_ids.item() == together.token_ids[row]
        assert alone.behaviour_logprobs.item() == pytest.approx(
            float(together.behaviour_logprobs[row]), abs=1e-6
        )
