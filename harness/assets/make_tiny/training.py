"""What both nets share: their configuration and the optimiser loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from harness.assets.make_tiny.tokens import BOS, EOS, MAX_POSITIONS, PAD, VOCABULARY

HIDDEN_SIZE = 128
NUM_LAYERS = 4


def llama_config(num_layers: int, **extra: Any) -> LlamaConfig:
    """Configuration shared by both nets."""
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=352,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        **extra,
    )


def train(
    parameters: list[nn.Parameter],
    losses_of: Callable[[int], dict[str, Tensor]],
    num_steps: int,
    peak_rate: float,
    name: str,
    schedule_steps: int | None = None,
) -> None:
    """AdamW with 4 % warm-up and a cosine to a twentieth of the peak, gradient norm clipped at 1.

    schedule_steps: length of that schedule, of which ``num_steps`` are made; None is all of it.
    """
    decayed = [p for p in parameters if p.ndim >= 2]
    plain = [p for p in parameters if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.98))
    length = num_steps if schedule_steps is None else schedule_steps
    num_warmup = max(1, length // 25)

    def factor(step: int) -> float:
        progress = (step - num_warmup) / max(1, length - num_warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return (step + 1) / num_warmup if step < num_warmup else 0.05 + 0.95 * cosine

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    start_s, recent = time.monotonic(), dict[str, float]()
    for step in range(num_steps):
        losses = losses_of(step)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        for key, loss in losses.items():
            recent[key] = 0.95 * recent.get(key, loss.item()) + 0.05 * loss.item()
        if (step + 1) % 50 == 0:
            shown = " ".join(f"{key} {value:.4f}" for key, value in recent.items())
            print(f"{name} {step + 1}/{num_steps} {shown} {time.monotonic() - start_s:.0f} s", flush=True)
