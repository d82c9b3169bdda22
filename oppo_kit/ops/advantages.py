"""Advantage estimators on right-padded rows with explicit masks."""

from __future__ import annotations

import torch
from torch import Tensor


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t.
    V and A past a row's end are 0, also for a response that its limit cut (as in TRL).

    Args:
        rewards: [R, T] per-token rewards; anything outside the mask.
        values: [R, T] V(state in which token t is chosen).
        mask: [R, T] bool, a prefix of every row.
        gamma: discount per token, 0..1.
        lam: trace decay, 0..1.

    Returns:
        advantages [R, T] and returns [R, T], both 0 outside the mask.
    """
    rewards = torch.where(mask, rewards, torch.zeros_like(rewards))
    values = torch.where(mask, values, torch.zeros_like(values))
    num_tokens = rewards.shape[1]
    advantages = torch.zeros_like(rewards)
    advantage = rewards.new_zeros(rewards.shape[0])
    next_value = torch.zeros_like(advantage)
    for t in reversed(range(num_tokens)):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, torch.zeros_like(advantage))
        advantages[:, t] = advantage
        next_value = values[:, t]
    returns = torch.where(mask, advantages + values, torch.zeros_like(values))
    return advantages, returns
