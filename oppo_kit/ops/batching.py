"""Groups rows of unequal length into forward passes by a token budget, so that padding is hardly computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_kit.types import length_mask


def length_sorted_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row indices, longest first, cut so that rows × longest ≤ ``max_tokens``; a longer row stands alone.

    Args:
        lengths: tokens of each row.
        max_tokens: padded tokens per batch.

    Returns:
        every index exactly once; equal lengths keep their order.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Prompt + response rows, right-padded. A causal model needs no mask then: no token sees what follows it.

    Attributes:
        input_ids: [r, K] int64, zero past a row's end.
        prompt_lengths: [r] int64, at least 1.
        response_lengths: [r] int64.
        num_response_tokens: t, the longest response.
    """

    input_ids: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    num_response_tokens: int

    @property
    def response_mask(self) -> Tensor:
        """[r, t] bool."""
        return length_mask(self.response_lengths, self.num_response_tokens)

    @property
    def predictor_index(self) -> Tensor:
        """[r, t] int64: where the model predicts response token i, that is at the token before it."""
        offsets = torch.arange(self.num_response_tokens, device=self.input_ids.device)
        index = self.prompt_lengths[:, None] - 1 + offsets[None, :]
        return index.clamp(max=self.input_ids.shape[1] - 1)

    @property
    def response_ids(self) -> Tensor:
        """[r, t] int64; anything past a row's end."""
        return self.input_ids.gather(1, (self.predictor_index + 1).clamp(max=self.input_ids.shape[1] - 1))

    @property
    def last_index(self) -> Tensor:
        """[r] int64: the last token of each row."""
        return self.prompt_lengths + self.response_lengths - 1

    def to(self, device: torch.device) -> PaddedRows:
        """The same rows on a device."""
        return PaddedRows(
            self.input_ids.to(device, non_blocking=True),
            self.prompt_lengths.to(device, non_blocking=True),
            self.response_lengths.to(device, non_blocking=True),
            self.num_response_tokens,
        )


def pad_prompts_and_responses(
    prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
) -> PaddedRows:
    """Right-pad the concatenations to the longest."""
    rows = [[*prompt, *response] for prompt, response in zip(prompt_ids, response_ids, strict=True)]
    input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    response_lengths = [len(response) for response in response_ids]
    return PaddedRows(
        input_ids=input_ids,
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompt_ids], dtype=torch.int64),
        response_lengths=torch.tensor(response_lengths, dtype=torch.int64),
        num_response_tokens=max(response_lengths),
    )
