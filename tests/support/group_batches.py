"""Batches of groups made from plain lists, for the tests of algorithms that compare responses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oppo_kit.ops.padding import length_mask, pad_rows
from oppo_kit.types import Group, Prompt, RolloutBatch

Rows = Sequence[Sequence[float]]


def make_batch(
    behaviour: Rows,
    rewards: Sequence[float | None],
    *,
    group_size: int,
    reference: Rows | None = None,
    proximal: Rows | None = None,
    is_stopped: Sequence[bool] | None = None,
    limits: Sequence[int] | None = None,
) -> RolloutBatch:
    """Rows of log-probs are as long as their responses; ``limits`` is one number a group."""
    num_rows, num_tokens = len(behaviour), max(map(len, behaviour))
    lengths = torch.tensor([len(row) for row in behaviour])

    def padded(rows: Rows) -> Tensor:
        return pad_rows(rows, num_tokens, torch.float32)

    prompts = [
        Prompt(draw, (1,), limit) for draw, limit in enumerate(limits or [8] * (num_rows // group_size))
    ]
    scores = {"reward": torch.tensor([math.nan if reward is None else reward for reward in rewards])}
    if reference is not None:
        scores["reference"] = padded(reference)
    return RolloutBatch(
        groups=[Group(prompt, [], admitted_step=0) for prompt in prompts],
        version=0,
        prompt_ids=[[1]] * num_rows,
        response_ids=torch.zeros(num_rows, num_tokens, dtype=torch.int64),
        response_lengths=lengths,
        behaviour_logprobs=padded(behaviour),
        proximal_logprobs=padded(proximal or behaviour),
        sampling_logprobs=padded(behaviour),
        is_current=length_mask(lengths, num_tokens),
        is_stopped=torch.tensor(is_stopped or [True] * num_rows),
        scores=scores,
    )
