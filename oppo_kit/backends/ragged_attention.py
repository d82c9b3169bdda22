"""Attention over a ragged cache, block by block of rows of similar length, through transformers' own sdpa function.

Reading keys and values is what a decode step of many rows costs on a CPU, and one rectangle over all rows would read as
many columns for the shortest row as for the longest. It is registered with transformers as an attention implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

NAME = "oppo_ragged"

# One more call costs about as much as reading this many keys and values of one row (measured with the embedded model,
# 4 heads of 32; with larger heads the call weighs less, so that blocks are rather too few).
_OVERHEAD_COLUMNS = 256


class Block(NamedTuple):
    """Rows ``first … last - 1`` of an input attend to ``num_columns`` columns."""

    first: int
    last: int
    num_columns: int


_BLOCKS: ContextVar[Sequence[Block]] = ContextVar("oppo_kit_ragged_blocks", default=())


def use_ragged_attention(model: PreTrainedModel) -> None:
    """Let a model with sdpa attention use blocks; one with eager attention is left as it is."""
    implementation = model.config._attn_implementation
    if implementation == "eager":
        return
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)


@contextmanager
def attention_blocks(blocks: Sequence[Block]) -> Iterator[None]:
    """Inside, and in this thread only, models with ragged attention use these blocks."""
    token = _BLOCKS.set(blocks)
    try:
        yield
    finally:
        _BLOCKS.reset(token)


def cut_into_blocks(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cuts of neighbouring rows, such that calls and columns together cost least.

    >>> cut_into_blocks([500, 480, 20, 25])
    [(0, 2), (2, 4)]
    """
    best = [0] + [-1] * len(lengths)
    cut = [0] * (len(lengths) + 1)
    for start in range(len(lengths)):
        longest = 0
        for stop in range(start + 1, len(lengths) + 1):
            longest = max(longest, lengths[stop - 1])
            cost = best[start] + (stop - start) * longest + _OVERHEAD_COLUMNS
            if best[stop] < 0 or cost < best[stop]:
                best[stop], cut[stop] = cost, start
    blocks: list[tuple[int, int]] = []
    stop = len(lengths)
    while stop:
        blocks.append((cut[stop], stop))
        stop = cut[stop]
    return blocks[::-1]


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    blocks = _BLOCKS.get()
    if len(blocks) < 2 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for first, last, width in blocks:
        output, _ = sdpa_attention_forward(
            module,
            query[first:last],
            key[first:last, :, :width],
            value[first:last, :, :width],
            attention_mask[first:last, :, :, :width],
            **kwargs,
        )
        outputs.append(output)
    return torch.cat(outputs), None
