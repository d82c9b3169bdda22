"""Policy and critic as one module, so that one optimizer and one accelerate wrapper serve both."""

from __future__ import annotations

from torch import nn

from oppo_kit.backends.forward import response_logprobs, token_values
from oppo_kit.ops.batching import PaddedRows
from oppo_kit.types import PolicyOutputs


class ActorCritic(nn.Module):
    """What both models say about padded rows; the critic is optional."""

    def __init__(self, policy: nn.Module, critic: nn.Module | None, *, temperature: float) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self._temperature = temperature

    def forward(self, rows: PaddedRows) -> PolicyOutputs:
        """Log-probs, entropy and values at the response tokens."""
        logprobs, entropy = response_logprobs(self.policy, rows, temperature=self._temperature)
        values = None if self.critic is None else token_values(self.critic, rows)
        return PolicyOutputs(policy_logprobs=logprobs, entropy=entropy, values=values)
