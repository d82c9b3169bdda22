"""Groups rows of unequal length into forward passes by a token budget, so that padding is hardly computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_kit.ops.padding import length_mask

# A forward pass costs about as much as this many tokens on top of its tokens. Measured on two CPU cores with the
# embedded models; on a large model the figure is smaller than the padding it trades against, so it only errs to few.
OVERHEAD_TOKENS = 128


def length_sorted_batches(
    lengths: Sequence[int], max_tokens: int, *, overhead_tokens: int = OVERHEAD_TOKENS
) -> list[list[int]]:
    """Row indices, longest first, cut where padding and calls together cost least.

    The cost of a batch is rows × longest + ``overhead_tokens``; the sum over batches is minimal among all cuts of the
    sorted rows whose batches hold at most ``max_tokens`` padded tokens (a longer row stands alone).

    Args:
        lengths: tokens of each row.
        max_tokens: padded tokens per batch.
        overhead_tokens: what one more batch costs.

    Returns:
        every index exactly once; equal lengths keep their order.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    # best[n]: least cost of the first n rows; cut[n]: where their last batch begins.
    best = [0.0] + [float("inf")] * len(order)
    cut = [0] * (len(order) + 1)
    for start, first in enumerate(order):
        longest = lengths[first]
        for stop in range(start + 1, len(order) + 1):
            padded = (stop - start) * longest
            if stop > start + 1 and padded > max_tokens:
                break
            cost = best[start] + padded + overhead_tokens
            if cost < best[stop]:
                best[stop], cut[stop] = cost, start
    batches: list[list[int]] = []
    stop = len(order)
    while stop:
        batches.append(order[cut[stop] : stop])
        stop = cut[stop]
    return batches[::-1]


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
