"""Draws the next token of every row from its logits: temperature, truncation, counter-based noise.

Knows no model and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from oppo_kit.ops.noise import gumbel_noise


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens may be drawn at all; the filters are transformers' and apply in this order, after temperature.

    Attributes:
        top_k: the k most probable; 0: all.
        top_p: the fewest most probable whose mass reaches p; 1.0: all.
        min_p: those at least this times as probable as the most probable; 0.0: all.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One token of every row.

    Attributes:
        token_ids: [n] int64.
        behaviour_logprobs: [n] float32, over the full vocabulary.
        sampling_logprobs: [n] float32, over the tokens that truncation left; None without truncation.
    """

    token_ids: Tensor
    behaviour_logprobs: Tensor
    sampling_logprobs: Tensor | None


class Sampler:
    """argmax(log p + Gumbel noise) is a draw from p = softmax(logits / temperature).

    Args:
        temperature: > 0.
        truncation: applied to log p before the draw.
    """

    def __init__(self, temperature: float, truncation: Truncation | None = None) -> None:
        self.temperature = temperature
        self._warpers = LogitsProcessorList()
        if truncation is not None and truncation.top_k > 0:
            self._warpers.append(TopKLogitsWarper(truncation.top_k))
        if truncation is not None and truncation.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(truncation.top_p))
        if truncation is not None and truncation.min_p > 0.0:
            self._warpers.append(MinPLogitsWarper(truncation.min_p))

    def draw(self, logits: Tensor, keys: Tensor) -> Sample:
        """One token per row.

        Args:
            logits: [n, V].
            keys: [n, 2] int32, these tokens' noise keys.
        """
        logprobs = logits.float()
        if self.temperature != 1.0:
            logprobs = logprobs / self.temperature
        logprobs = logprobs.log_softmax(-1)
        noise = gumbel_noise(keys, logprobs.shape[1])
        if not self._warpers:
            chosen = noise.add_(logprobs).argmax(-1, keepdim=True)
            return Sample(chosen.squeeze(-1), logprobs.gather(-1, chosen).squeeze(-1), None)
        cut: Tensor = self._warpers(torch.empty(0), logprobs)  # type: ignore[arg-type]
        chosen = (cut + noise).argmax(-1, keepdim=True)
        behaviour = logprobs.gather(-1, chosen).squeeze(-1)
        return Sample(chosen.squeeze(-1), behaviour, behaviour - cut.logsumexp(-1))
