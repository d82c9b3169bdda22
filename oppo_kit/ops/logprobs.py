"""Log-probs and entropy of chosen tokens without ever holding [B, T, V] in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# 64 MiB of float32 logits a slice: large enough to keep the matrix product efficient, small beside a model.
MAX_LOGIT_ELEMENTS = 1 << 24


def token_logprobs(
    hidden: Tensor,
    token_ids: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    temperature: float,
    max_logit_elements: int = MAX_LOGIT_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(h) / temperature)[token] and the entropy of that distribution, slice by slice.

    With gradient enabled each slice's logits are recomputed in the backward pass instead of kept, unless all fit
    into one slice.

    Args:
        hidden: [N, H] last hidden states at the predicting positions.
        token_ids: [N] int64, the tokens that were chosen.
        head: [n, H] to [n, V] logits.
        vocab_size: V.
        temperature: > 0.
        max_logit_elements: logits held at once.

    Returns:
        log-probs [N] float32 with gradient, entropy [N] float32 in nats without.
    """
    slice_rows = max(1, max_logit_elements // vocab_size)
    num_rows = hidden.shape[0]
    if num_rows <= slice_rows:
        return _slice_logprobs(hidden, token_ids, head, temperature)
    parts = [
        checkpoint(
            _slice_logprobs,
            hidden[start : start + slice_rows],
            token_ids[start : start + slice_rows],
            head,
            temperature,
            use_reentrant=False,
        )
        if torch.is_grad_enabled()
        else _slice_logprobs(
            hidden[start : start + slice_rows], token_ids[start : start + slice_rows], head, temperature
        )
        for start in range(0, num_rows, slice_rows)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _slice_logprobs(
    hidden: Tensor, token_ids: Tensor, head: Callable[[Tensor], Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    all_logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        # 0 · -inf (an entry that the model forbids) counts 0.
        entropy = -torch.nan_to_num(all_logprobs.exp() * all_logprobs, nan=0.0).sum(-1)
    return all_logprobs.gather(-1, token_ids[:, None]).squeeze(-1), entropy
