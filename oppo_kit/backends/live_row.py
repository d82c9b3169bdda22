"""One live response of a generator: plain bookkeeping, no tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from oppo_kit.types import FinishReason, RolloutKey, TokenChunk


@dataclass(slots=True)
class LiveRow:
    """Its context, and what this decode call added.

    Attributes:
        key: names the rollout.
        noise_key: of its sampling noise.
        token_ids: prompt and response so far.
        num_prompt_tokens: how many of them are the prompt's.
        limit: response tokens it may have.
        new_ids: tokens of the next chunk; the other ``new_`` lists belong to them.
        prefix_logprobs: see ``TokenChunk``.
    """

    key: RolloutKey
    noise_key: int
    token_ids: list[int]
    num_prompt_tokens: int
    limit: int
    new_ids: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)
    new_sampling_logprobs: list[float] | None = None
    prefix_logprobs: list[float] | None = None

    @property
    def num_response_tokens(self) -> int:
        """Response tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Response tokens it may still have."""
        return self.limit - self.num_response_tokens

    def append(
        self, token_ids: list[int], logprobs: list[float], sampling_logprobs: list[float] | None
    ) -> None:
        """Tokens that were decoded."""
        self.token_ids += token_ids
        self.new_ids += token_ids
        self.new_logprobs += logprobs
        if sampling_logprobs is not None:
            self.new_sampling_logprobs = (self.new_sampling_logprobs or []) + sampling_logprobs

    def take_chunk(self, version: int, last_tick: int, finish_reason: FinishReason | None) -> TokenChunk:
        """What is new since the last chunk."""
        chunk = TokenChunk(
            self.key,
            self.new_ids,
            self.new_logprobs,
            version,
            last_tick,
            finish_reason,
            self.new_sampling_logprobs,
            self.prefix_logprobs,
        )
        self.new_ids, self.new_logprobs = [], []
        self.new_sampling_logprobs = self.prefix_logprobs = None
        return chunk
