"""Counter-based sampling noise: a token's noise depends on what it is, never on when or with whom it is sampled.

The key of a token is (seed, draw id, sample index, position). It is hashed by splitmix64 (Steele, Lea, Flood 2014);
the noise of vocabulary entry v is two rounds of the 32-bit mixer "lowbias32" (C. Wellons, 2018) over (key, v), made
uniform with 23 bits and mapped to a Gumbel variate. argmax(log p + Gumbel) is an exact sample of p and, unlike an
inverse CDF, hardly ever flips when log p moves by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def stream_key(seed: int, draw_id: int, sample_index: int) -> int:
    """64-bit key of one rollout's noise."""
    key = 0
    for part in (seed, draw_id, sample_index):
        key = _splitmix64((key ^ part) & _MASK64)
    return key


def token_keys(stream_keys: Sequence[int], positions: Sequence[int], num_tokens: int) -> Tensor:
    """[num_tokens, n, 2] int32 on the CPU: the hashed keys of the next tokens of n rollouts.

    Args:
        stream_keys: n keys from ``stream_key``.
        positions: n positions inside the response of each rollout's first token here, 0-based.
        num_tokens: tokens of each rollout.
    """
    first = np.array(stream_keys, dtype=np.uint64) + np.array(positions, dtype=np.uint64)
    keys = first[None, :] + np.arange(num_tokens, dtype=np.uint64)[:, None]
    return torch.from_numpy(_splitmix64_array(keys).view(np.int32).reshape(num_tokens, -1, 2).copy())


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """[n, V] float32 standard Gumbel variates, a pure function of (key, v); always finite.

    The same bits on every device up to its ``log``.

    Args:
        keys: [n, 2] int32, one token's slice of ``token_keys``.
        vocab_size: V.
    """
    entries = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * _signed32(0x9E3779B1)
    hashed = _lowbias32_(entries[None, :] + keys[:, :1])
    hashed = _lowbias32_(hashed ^ keys[:, 1:])
    # 23 bits: with 24, the largest u rounds to 1 in float32, and -log(u) = 0 makes the variate infinite.
    uniform = ((hashed >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _lowbias32_(values: Tensor) -> Tensor:
    values ^= (values >> 16) & 0xFFFF
    values *= _signed32(0x7FEB352D)
    values ^= (values >> 15) & 0x1FFFF
    values *= _signed32(0x846CA68B)
    values ^= (values >> 16) & 0xFFFF
    return values


def _signed32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _splitmix64_array(values: np.ndarray) -> np.ndarray:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
