"""Answers to some prompts and their scores, to look at while PPO trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from oppo_kit.backends.forward import causal_model
from oppo_kit.protocols import ScorerHandle
from oppo_kit.types import Prompt, Rollout, RolloutKey

_NUM_PRINTED = 5


def answer(
    prompts: Sequence[Prompt],
    policy: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    scorer: ScorerHandle,
    *,
    stop_ids: Sequence[int],
    batch_size: int,
) -> list[dict[str, Any]]:
    """Greedy answers of the policy as it is now, with the text of the prompt and the score.

    Args:
        prompts: what to answer.
        policy: in evaluation mode.
        tokenizer: the policy's.
        scorer: of rewards.
        stop_ids: tokens that end an answer and belong to it; none: the limit alone does.
        batch_size: prompts answered at once.
    """
    samples: list[dict[str, Any]] = []
    for start in range(0, len(prompts), batch_size):
        some = prompts[start : start + batch_size]
        rollouts = [
            # Draws of training are never negative.
            Rollout(RolloutKey(-1 - prompt.draw_id, 0), prompt, token_ids=token_ids, finish_reason="stop")
            for prompt, token_ids in zip(some, _generated(policy, some, stop_ids), strict=True)
        ]
        futures = scorer.submit(rollouts)
        for rollout, future in zip(rollouts, futures, strict=True):
            samples.append(
                {
                    "query": tokenizer.decode(list(rollout.prompt.token_ids), skip_special_tokens=True),
                    "model response": tokenizer.decode(rollout.token_ids),
                    "score": future.result(),
                }
            )
    return samples


def print_samples(samples: Sequence[dict[str, Any]]) -> None:
    """The first ones as a table on the terminal."""
    table = Table(show_lines=True)
    for name in samples[0] if samples else ():
        table.add_column(name)
    for sample in samples[:_NUM_PRINTED]:
        table.add_row(*(str(value) for value in sample.values()))
    Console().print(table)


@torch.no_grad()
def _generated(policy: Any, prompts: Sequence[Prompt], stop_ids: Sequence[int]) -> list[list[int]]:
    model: Any = causal_model(policy)
    width = max(len(prompt.token_ids) for prompt in prompts)
    rows = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(rows)
    for index, prompt in enumerate(prompts):
        rows[index, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask[index, width - len(prompt.token_ids) :] = 1
    config = GenerationConfig(
        max_new_tokens=prompts[0].max_new_tokens,
        do_sample=False,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
    )
    with _generation_config(model, config):
        output = model.generate(rows.to(model.device), attention_mask=mask.to(model.device))
    return [_until_stop(row, stop_ids) for row in output[:, width:].tolist()]


@contextmanager
def _generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Instead of the model's own, of which generation takes whatever another one leaves open."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _until_stop(token_ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    end = next((index for index, token_id in enumerate(token_ids) if token_id in stop_ids), None)
    return token_ids if end is None else token_ids[: end + 1]
