"""Counter-based noise: independent of company, Gumbel distributed, never infinite."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from oppo_kit.ops.noise import gumbel_noise, stream_key, token_keys


def noise_of(stream_keys: list[int], positions: list[int], vocab_size: int) -> torch.Tensor:
    return gumbel_noise(token_keys(stream_keys, positions, 1)[0], vocab_size)


def test_the_keys_of_several_tokens_are_those_of_one_after_another() -> None:
    streams = [stream_key(0, draw, 0) for draw in range(3)]
    keys = token_keys(streams, [0, 7, 2], 4)
    assert keys.shape == (4, 3, 2)
    for token in range(4):
        assert torch.equal(keys[token], token_keys(streams, [token, 7 + token, 2 + token], 1)[0])


def test_a_rows_noise_is_the_same_alone_and_in_any_company() -> None:
    keys = [stream_key(1, draw, sample) for draw in range(5) for sample in range(2)]
    together = noise_of(keys, list(range(10)), 300)
    for index, key in enumerate(keys):
        assert torch.equal(noise_of([key], [index], 300)[0], together[index])


def test_seed_draw_sample_position_and_entry_all_change_the_noise() -> None:
    base = noise_of([stream_key(0, 0, 0)], [0], 64)[0]
    others = [
        noise_of([stream_key(1, 0, 0)], [0], 64)[0],
        noise_of([stream_key(0, 1, 0)], [0], 64)[0],
        noise_of([stream_key(0, 0, 1)], [0], 64)[0],
        noise_of([stream_key(0, 0, 0)], [1], 64)[0],
    ]
    assert base.unique().numel() == 64
    for other in others:
        assert not torch.isin(other, base).any()


def test_the_noise_is_standard_gumbel_and_uncorrelated() -> None:
    keys = [stream_key(7, draw, 0) for draw in range(200)]
    noise = noise_of(keys, [3] * 200, 500).numpy().astype(np.float64)
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > 0.001
    rows = np.corrcoef(noise[:50])
    assert np.abs(rows - np.eye(50)).max() < 0.25  # 5.6 standard errors of a correlation over 500 entries
    successive = [noise_of([keys[0]], [position], 5000)[0].numpy() for position in range(3)]
    assert abs(np.corrcoef(successive)[0, 1]) < 0.06


def test_argmax_with_the_noise_samples_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02])
    num_samples = 20_000
    noise = noise_of([stream_key(0, 0, 0)] * num_samples, list(range(num_samples)), 5)
    counts = torch.bincount((probabilities.log() + noise).argmax(-1), minlength=5)
    assert stats.chisquare(counts.numpy(), (probabilities * num_samples).double().numpy()).pvalue > 0.001


def test_the_noise_is_finite_at_both_ends_of_the_hash() -> None:
    """24 hash bits would round to u = 1 in float32 once in 2^24 entries, and make the variate infinite."""
    noise = torch.cat([noise_of([stream_key(s, 0, 0)], [0], 4_000_000)[0] for s in range(3)])
    assert torch.isfinite(noise).all()
    assert float(noise.max()) < 17.5
    assert float(noise.min()) > -3.0
