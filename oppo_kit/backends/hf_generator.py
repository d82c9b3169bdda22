"""Continuous batched decoding on any transformers decoder: ended rows leave at once, carried ones go on.

The generator owns its module, a copy of the policy; ``load_weights`` copies the learner's parameters into it. Rows
are left-padded around one KV cache. The cache is built from prompt + tokens at the first decode after rows were
admitted or weights were loaded, so that no key or value of old weights survives an update.

It knows no reward, no batch and no schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oppo_kit.backends.forward import cache_keyword, causal_model, response_logprobs
from oppo_kit.backends.preallocated_cache import PreallocatedCache, compaction
from oppo_kit.errors import DataError, ModelError, NonFiniteError
from oppo_kit.ops.batching import pad_prompts_and_responses
from oppo_kit.ops.noise import gumbel_noise, stream_key
from oppo_kit.types import FinishReason, Rollout, RolloutKey, TokenChunk, pad_rows

# Log-probs of one model by cache and by plain forward differ by rounding; at a low temperature it is magnified.
_PROBE_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-4}
_PROBE_TOLERANCE_HALF = 0.5


@dataclass(slots=True)
class _Row:
    """One live response: its context and what this decode call added."""

    key: RolloutKey
    noise_key: int
    token_ids: list[int]
    num_prompt_tokens: int
    limit: int
    new_ids: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)

    @property
    def num_response_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def take_chunk(self, version: int, last_tick: int, finish_reason: FinishReason | None) -> TokenChunk:
        chunk = TokenChunk(self.key, self.new_ids, self.new_logprobs, version, last_tick, finish_reason)
        self.new_ids, self.new_logprobs = [], []
        return chunk


class HFGenerator:
    """Samples with counter-based noise from ``softmax(logits / temperature)`` over the full vocabulary.

    Args:
        policy: the model under training; it is copied, and its parameters are read again by ``load_weights``.
        temperature: > 0.
        stop_token_ids: a sampled one ends its response and belongs to it.
        seed: of the sampling noise.
        device: where to decode; None: where the policy is.

    Raises:
        ModelError: the model cannot decode rows of unequal length that leave one by one.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        temperature: float,
        stop_token_ids: Sequence[int],
        seed: int,
        device: torch.device | str | None = None,
    ) -> None:
        self._source = policy
        self._module = copy.deepcopy(policy).eval().requires_grad_(False)
        if device is not None:
            self._module.to(device)
        model = causal_model(self._module)
        self._model = model
        self._cache_keyword = cache_keyword(model)
        self._max_positions: int | None = getattr(
            model.config.get_text_config(), "max_position_embeddings", None
        )
        self._device = next(model.parameters()).device
        self._temperature = temperature
        self._stop_ids = frozenset(stop_token_ids)
        self._seed = seed
        self._version = 0
        self._rows: list[_Row] = []
        self._cache: PreallocatedCache | None = None
        self._width = 0
        self._num_padding: Tensor | None = None
        self._probe()

    @property
    def num_live(self) -> int:
        """Responses that are being decoded."""
        return len(self._rows)

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts; tokens that they have are context.

        Raises:
            DataError: prompt and limit do not fit into the model's context.
        """
        for rollout in rollouts:
            prompt = rollout.prompt
            longest = len(prompt.token_ids) + prompt.max_new_tokens
            if self._max_positions is not None and longest > self._max_positions:
                raise DataError(
                    f"draw {prompt.draw_id}: {len(prompt.token_ids)} prompt tokens and a limit of "
                    f"{prompt.max_new_tokens} exceed the model's context of {self._max_positions}; "
                    "lower response_length, or set max_prompt_tokens and long_prompts"
                )
            self._rows.append(
                _Row(
                    key=rollout.key,
                    noise_key=stream_key(self._seed, *rollout.key),
                    token_ids=[*prompt.token_ids, *rollout.token_ids],
                    num_prompt_tokens=len(prompt.token_ids),
                    limit=prompt.max_new_tokens,
                )
            )
        if rollouts:
            self._cache = None

    @torch.inference_mode()
    def evict(self, keys: Sequence[RolloutKey]) -> None:
        """Forget live rollouts; the unknown are ignored."""
        gone = set(keys)
        self._keep([row.key not in gone for row in self._rows])

    @torch.no_grad()
    def load_weights(self, version: int) -> None:
        """Copy the policy's parameters and buffers; the KV cache is recomputed at the next decode."""
        for own, source in zip(self._module.parameters(), self._source.parameters(), strict=True):
            own.copy_(source)
        for own, source in zip(self._module.buffers(), self._source.buffers(), strict=True):
            own.copy_(source)
        self._version = version
        self._cache = None

    @torch.inference_mode()
    def decode(self, max_tokens: int) -> list[TokenChunk]:
        """Advance every live response by up to ``max_tokens`` tokens.

        Raises:
            NonFiniteError: a row's logits are NaN or infinite; names the draws.
        """
        chunks = self._take_exhausted(tick=0)
        for tick in range(1, max_tokens + 1):
            if not self._rows:
                break
            self._sample(self._next_logits())
            chunks += self._take_stopped(tick)
            chunks += self._take_exhausted(tick)
        return chunks + [row.take_chunk(self._version, max_tokens, None) for row in self._rows]

    def _probe(self) -> None:
        """Sample two rows of unequal length, of which one leaves early, and compare with a plain forward pass.

        It decides whether the model can be served, instead of a list of architectures: recurrent models, for one,
        do not carry left padding, or cannot drop a row.
        """
        vocab_size = self._model.config.get_text_config().vocab_size
        prompts = [
            [(7 * i + 3 * row) % vocab_size for i in range(length)] for row, length in ((0, 6), (1, 2))
        ]
        stop_ids, self._stop_ids = self._stop_ids, frozenset()
        self._rows = [
            _Row(RolloutKey(row, 0), row, list(prompt), len(prompt), limit)
            for row, (prompt, limit) in enumerate(zip(prompts, (1, 3), strict=True))
        ]
        try:
            chunks = sorted(self.decode(3), key=lambda chunk: chunk.key)
        except (
            AttributeError,
            TypeError,
            ValueError,
            RuntimeError,
            IndexError,
            NotImplementedError,
        ) as error:
            raise self._cannot_serve(f"{type(error).__name__}: {error}") from error
        finally:
            self._stop_ids, self._rows, self._cache = stop_ids, [], None
        rows = pad_prompts_and_responses(prompts, [chunk.token_ids for chunk in chunks]).to(self._device)
        with torch.no_grad():
            plain, _ = response_logprobs(self._module, rows, temperature=self._temperature)
        decoded = pad_rows([chunk.behaviour_logprobs for chunk in chunks], 3, torch.float32).to(self._device)
        gap = float((plain - decoded).abs().max())
        if not gap <= _PROBE_TOLERANCE.get(self._model.dtype, _PROBE_TOLERANCE_HALF):
            raise self._cannot_serve(f"its decoded log-probs differ from a plain forward pass by {gap:.2g}")

    def _cannot_serve(self, reason: str) -> ModelError:
        return ModelError(
            f"{type(self._model).__name__} cannot be decoded in a batch of unequal rows: {reason}; "
            "use a decoder with an ordinary key-value cache"
        )

    def _sample(self, logits: Tensor) -> None:
        logprobs = (logits.float() / self._temperature).log_softmax(-1)
        noise = gumbel_noise(
            [row.noise_key for row in self._rows],
            [row.num_response_tokens for row in self._rows],
            logprobs.shape[1],
            device=logprobs.device,
        )
        chosen = (logprobs + noise).argmax(-1, keepdim=True)
        chosen_logprobs = logprobs.gather(-1, chosen).squeeze(-1)
        token_ids, values = chosen.squeeze(-1).tolist(), chosen_logprobs.tolist()
        self._check_finite(chosen_logprobs)
        for row, token_id, logprob in zip(self._rows, token_ids, values, strict=True):
            row.token_ids.append(token_id)
            row.new_ids.append(token_id)
            row.new_logprobs.append(logprob)

    def _check_finite(self, logprobs: Tensor) -> None:
        bad = torch.nonzero(~torch.isfinite(logprobs)).flatten().tolist()
        if bad:
            draws = sorted({self._rows[index].key.draw_id for index in bad})
            raise NonFiniteError(
                f"the policy's logits are NaN or infinite for draws {draws} at version {self._version}; "
                "lower the learning rate, or check the model's weights"
            )

    def _next_logits(self) -> Tensor:
        """[n, V] logits of the next token of every live row."""
        if self._cache is None:
            return self._prefill()
        last_ids = torch.tensor([[row.token_ids[-1]] for row in self._rows], device=self._device)
        self._width += 1
        return self._forward(last_ids, self._lengths()[:, None] - 1)

    def _prefill(self) -> Tensor:
        self._cache = PreallocatedCache()
        lengths = [len(row.token_ids) for row in self._rows]
        self._width = max(lengths)
        input_ids = torch.zeros(len(lengths), self._width, dtype=torch.int64)
        for index, row in enumerate(self._rows):
            input_ids[index, self._width - len(row.token_ids) :] = torch.tensor(row.token_ids)
        self._num_padding = self._width - torch.tensor(lengths, device=self._device)
        positions = torch.arange(self._width, device=self._device)[None, :] - self._num_padding[:, None]
        return self._forward(input_ids.to(self._device), positions.clamp(min=0))

    def _forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        assert self._num_padding is not None
        columns = torch.arange(self._width, device=self._device)[None, :]
        outputs = self._model(
            input_ids=input_ids,
            attention_mask=(columns >= self._num_padding[:, None]).long(),
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_keyword: self._cache},
        )
        return outputs.logits[:, -1]

    def _lengths(self) -> Tensor:
        return torch.tensor([len(row.token_ids) for row in self._rows], device=self._device)

    def _take_stopped(self, tick: int) -> list[TokenChunk]:
        return self._take(lambda row: bool(row.new_ids) and row.new_ids[-1] in self._stop_ids, tick, "stop")

    def _take_exhausted(self, tick: int) -> list[TokenChunk]:
        return self._take(lambda row: row.num_response_tokens >= row.limit, tick, "length")

    def _take(self, is_leaving: Any, tick: int, finish_reason: FinishReason) -> list[TokenChunk]:
        leaving = [row for row in self._rows if is_leaving(row)]
        if leaving:
            self._keep([not is_leaving(row) for row in self._rows])
        return [row.take_chunk(self._version, tick, finish_reason) for row in leaving]

    def _keep(self, is_kept: list[bool]) -> None:
        if all(is_kept):
            return
        indices = compaction(is_kept)
        self._rows = [self._rows[index] for index in indices]
        if self._cache is None or not indices:
            self._cache = None
            return
        assert self._num_padding is not None
        self._cache.keep_rows(indices)
        self._num_padding = self._num_padding[indices]
