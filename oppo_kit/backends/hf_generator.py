"""Continuous batched decoding on any transformers decoder: ended rows leave at once, carried ones go on.

The generator owns its module, a copy of the policy; ``load_weights`` copies the learner's parameters into it. Live rows
share one ragged cache: new rows are prefilled in slots of their own, next to those that are being decoded. After an
update every key and value is recomputed from prompt + tokens at the next decode (``keep`` leaves them as they are).

It knows no reward, no batch and no schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from oppo_kit.backends.forward import (
    cache_keyword,
    causal_model,
    context_tokens,
    logits_head,
    response_logprobs,
)
from oppo_kit.backends.inference_patches import PackedLinears, fuse_norms
from oppo_kit.backends.live_row import LiveRow
from oppo_kit.backends.ragged_attention import use_ragged_attention
from oppo_kit.backends.ragged_cache import RaggedCache, right_aligned
from oppo_kit.backends.sampler import Sampler, Truncation
from oppo_kit.errors import ConfigError, DataError, ModelError, NonFiniteError
from oppo_kit.ops.batching import length_sorted_batches, pad_prompts_and_responses
from oppo_kit.ops.logprobs import token_logprobs
from oppo_kit.ops.noise import stream_key, token_keys
from oppo_kit.ops.padding import pad_rows
from oppo_kit.types import FinishReason, Rollout, RolloutKey, TokenChunk

# Log-probs of one model by cache and by plain forward differ by rounding; at a low temperature it is magnified.
_PROBE_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-4}
_PROBE_TOLERANCE_HALF = 0.5
_PROBE_TOKENS = 3
# What reading a model can raise when it does not take the cache, the mask or the positions.
_PROBE_ERRORS = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)

# Padded tokens per prefill pass: as the learner's micro-batches.
_PREFILL_TOKENS = 8192
# On an accelerator the host looks at the tokens this often, since each look waits for the device.
_TICKS_PER_READ = 8
# With one thread and K a multiple of 16, attention gives a row the same bits in any company (measured with 1 to 48
# rows, K to 640; not so with K as it comes).
_INVARIANT_COLUMNS = 16


class HFGenerator:
    """Samples with counter-based noise from ``softmax(logits / temperature)`` over the full vocabulary.

    Args:
        policy: the model under training; it is copied, and its parameters are read again by ``load_weights``.
        temperature: > 0.
        stop_token_ids: a sampled one ends its response and belongs to it.
        seed: of the sampling noise.
        device: where to decode; None: where the policy is.
        dtype: of the copy's weights; None: the policy's.
        truncation: which tokens may be drawn; behaviour log-probs stay those of the full vocabulary.
        carried_cache: what an update does to the keys and values of live responses. ``keep`` saves their prefill, and
            the log-probs of what follows are those of no single policy.
        has_prefix_logprobs: report the log-probs of a carried response's tokens under the new weights, which its
            prefill computes but for the output head.
        batch_invariant: a response's tokens and log-probs are equal to the bit whatever is decoded beside it, in
            chunks of whatever size; float32 on a CPU with one thread, slower.
        num_threads_shared: CPU threads of ``decode`` while scorers work beside it; None: those that torch has.
        ticks_per_read: decoded tokens per row between two looks at the device; None: 1 on a CPU, 8 elsewhere.

    Raises:
        ModelError: the model cannot decode rows of unequal length that leave one by one, or not invariantly.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        temperature: float,
        stop_token_ids: Sequence[int],
        seed: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        truncation: Truncation | None = None,
        carried_cache: Literal["recompute", "keep"] = "recompute",
        has_prefix_logprobs: bool = False,
        batch_invariant: bool = False,
        num_threads_shared: int | None = None,
        ticks_per_read: int | None = None,
    ) -> None:
        self._source = policy
        self._module = copy.deepcopy(policy).eval().requires_grad_(False)
        if device is not None:
            self._module.to(device)
        if dtype is not None:
            for parameter in self._module.parameters():  # buffers, such as rotary frequencies, stay exact
                parameter.data = parameter.data.to(dtype)
        model = causal_model(self._module)
        use_ragged_attention(model)
        self._model = model
        self._cache_keyword = cache_keyword(model)
        self._max_positions = context_tokens(model.config)
        self._device = next(model.parameters()).device
        self._sampler = Sampler(temperature, truncation)
        self._stop_ids = frozenset(stop_token_ids)
        self._seed = seed
        self._version = 0
        self._carried_cache = carried_cache
        self._has_prefix_logprobs = has_prefix_logprobs
        self._is_invariant = batch_invariant
        self._num_threads_shared = num_threads_shared
        self._is_shared = False
        on_cpu = self._device.type == "cpu"
        self._ticks_per_read = ticks_per_read or (1 if on_cpu else _TICKS_PER_READ)
        fuse_norms(model)
        self._packed = PackedLinears(model, for_all_rows=batch_invariant)
        if batch_invariant and self._packed.unpacked:
            raise ModelError(
                f"{type(model).__name__} cannot be decoded batch-invariantly: {self._packed.unpacked[0]} is no linear "
                "layer whose float32 weight can be packed on this CPU; switch batch_invariant off"
            )
        # Rows in slot order; those that wait are prefilled, into the next slots, at the next decode.
        self._rows: list[LiveRow] = []
        self._waiting: list[LiveRow] = []
        self._is_stale = False
        self._cache = self._make_cache()
        self._probe()

    @property
    def num_live(self) -> int:
        """Responses that are being decoded."""
        return len(self._rows) + len(self._waiting)

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
            self._waiting.append(
                LiveRow(
                    key=rollout.key,
                    noise_key=stream_key(self._seed, *rollout.key),
                    token_ids=[*prompt.token_ids, *rollout.token_ids],
                    num_prompt_tokens=len(prompt.token_ids),
                    limit=prompt.max_new_tokens,
                )
            )

    def set_shared(self, is_shared: bool) -> None:
        """Whether scorers work beside the next ``decode``."""
        self._is_shared = is_shared

    @torch.inference_mode()
    def evict(self, keys: Sequence[RolloutKey]) -> None:
        """Forget live rollouts; the unknown are ignored."""
        gone = set(keys)
        self._keep([row.key not in gone for row in self._rows])
        self._waiting = [row for row in self._waiting if row.key not in gone]

    @torch.no_grad()
    def load_weights(self, version: int) -> None:
        """Copy the policy's parameters and buffers; what the cache becomes, ``carried_cache`` says."""
        for own, source in zip(self._module.parameters(), self._source.parameters(), strict=True):
            own.copy_(source)
        for own, source in zip(self._module.buffers(), self._source.buffers(), strict=True):
            own.copy_(source)
        self._packed.refresh()
        self._version = version
        self._is_stale = self._carried_cache == "recompute"

    def decode(self, max_tokens: int) -> list[TokenChunk]:
        """Advance every live response by up to ``max_tokens`` tokens.

        Raises:
            NonFiniteError: a row's logits are NaN or infinite; names the draws.
            ConfigError: ``batch_invariant`` with more than one thread.
        """
        before = torch.get_num_threads()
        wanted = self._num_threads_shared if self._is_shared else None
        if wanted in (None, before):
            return self._decode(max_tokens)
        torch.set_num_threads(wanted)
        try:
            return self._decode(max_tokens)
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def _decode(self, max_tokens: int) -> list[TokenChunk]:
        if self._is_invariant and torch.get_num_threads() > 1:
            raise ConfigError(
                f"batch_invariant holds with one thread, and torch uses {torch.get_num_threads()}: with more, "
                "attention gives a row other bits beside other rows; call torch.set_num_threads(1), or switch it off"
            )
        if self._is_stale:
            self._waiting = self._rows + self._waiting
            self._keep([False] * len(self._rows))
            self._is_stale = False
        chunks = [
            row.take_chunk(self._version, 0, "length") for row in self._waiting if not row.num_remaining
        ]
        self._prefill_waiting()
        tick = 0
        while self._rows and tick < max_tokens:
            shortest = min(row.num_remaining for row in self._rows)
            num_ticks = min(self._ticks_per_read, max_tokens - tick, shortest)
            ended = self._advance(num_ticks, tick)
            chunks += ended
            tick += num_ticks
        return chunks + [row.take_chunk(self._version, max_tokens, None) for row in self._rows]

    def _advance(self, num_ticks: int, tick: int) -> list[TokenChunk]:
        """Decode so many tokens of every row, then look at them once; rows that ended leave."""
        token_ids, logprobs, sampling_logprobs = self._sample_ticks(num_ticks)
        chunks: list[TokenChunk] = []
        is_live: list[bool] = []
        for index, row in enumerate(self._rows):
            stop = next((i for i, token in enumerate(token_ids[index]) if token in self._stop_ids), None)
            length = num_ticks if stop is None else stop + 1
            row.append(
                token_ids[index][:length],
                logprobs[index][:length],
                None if sampling_logprobs is None else sampling_logprobs[index][:length],
            )
            is_live.append(stop is None and row.num_remaining > 0)
            if not is_live[-1]:
                reason: FinishReason = "length" if stop is None else "stop"
                chunks.append(row.take_chunk(self._version, tick + length, reason))
        self._keep(is_live)
        return chunks

    def _sample_ticks(
        self, num_ticks: int
    ) -> tuple[list[list[int]], list[list[float]], list[list[float]] | None]:
        """Tokens, behaviour and sampling log-probs by row; nothing is read from the device before the end."""
        positions = [row.num_response_tokens for row in self._rows]
        keys = token_keys([row.noise_key for row in self._rows], positions, num_ticks).to(self._device)
        last_ids = torch.tensor([row.token_ids[-1] for row in self._rows], device=self._device)
        samples = []
        for tick in range(num_ticks):
            samples.append(self._sampler.draw(self._next_logits(last_ids[:, None]), keys[tick]))
            last_ids = samples[-1].token_ids
        logprobs = torch.stack([sample.behaviour_logprobs for sample in samples], dim=1)
        token_ids = torch.stack([sample.token_ids for sample in samples], dim=1).tolist()
        self._check_finite(logprobs)
        truncated = [sample.sampling_logprobs for sample in samples if sample.sampling_logprobs is not None]
        return token_ids, logprobs.tolist(), torch.stack(truncated, dim=1).tolist() if truncated else None

    def _next_logits(self, last_ids: Tensor) -> Tensor:
        """[n, V] logits of the token after ``last_ids`` [n, 1], of every row in the cache."""
        with self._cache.append([1] * len(self._rows)) as append:
            logits = self._model(
                input_ids=last_ids,
                attention_mask=append.attention_mask,
                position_ids=append.position_ids,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_keyword: self._cache},
            ).logits
        return logits[:, -1]

    def _prefill_waiting(self) -> None:
        """Fill the cache with all but the last token of the rows that wait, longest first."""
        waiting = [row for row in self._waiting if row.num_remaining]
        self._waiting = []
        lengths = [len(row.token_ids) - 1 for row in waiting]
        batches = (
            [[index] for index in range(len(waiting))]
            if self._is_invariant
            else length_sorted_batches(lengths, _PREFILL_TOKENS)
        )
        for indices in batches:
            self._prefill([waiting[index] for index in indices])

    def _prefill(self, rows: list[LiveRow]) -> None:
        first = self._cache.num_rows
        self._cache.admit(len(rows))
        self._rows += rows
        contexts = [row.token_ids[:-1] for row in rows]
        if not any(contexts):
            return
        with self._cache.append([len(context) for context in contexts], first=first) as append:
            hidden = self._model.base_model(
                input_ids=right_aligned(contexts).to(self._device),
                attention_mask=append.attention_mask,
                position_ids=append.position_ids,
                use_cache=True,
                **{self._cache_keyword: self._cache},
            ).last_hidden_state
        if self._has_prefix_logprobs:
            self._record_prefixes(rows, hidden)

    def _record_prefixes(self, rows: list[LiveRow], hidden: Tensor) -> None:
        """The token in column t of the right-aligned input is followed by the row's token t + 1 - T."""
        carried = [(index, row) for index, row in enumerate(rows) if row.num_response_tokens]
        if not carried:
            return
        chosen = torch.cat([hidden[index, -row.num_response_tokens :] for index, row in carried])
        responses = [row.token_ids[row.num_prompt_tokens :] for _, row in carried]
        targets = torch.tensor([token for response in responses for token in response], device=self._device)
        logprobs, _ = token_logprobs(
            chosen,
            targets,
            logits_head(self._model),
            vocab_size=self._model.config.get_text_config().vocab_size,
            temperature=self._sampler.temperature,
        )
        for (_, row), part in zip(carried, logprobs.split([len(r) for r in responses]), strict=True):
            row.prefix_logprobs = part.tolist()

    def _check_finite(self, logprobs: Tensor) -> None:
        if torch.isfinite(logprobs).all():
            return
        bad = torch.nonzero(~torch.isfinite(logprobs).all(dim=1)).flatten().tolist()
        draws = sorted({self._rows[index].key.draw_id for index in bad})
        self._rows = []
        self._cache.clear()
        raise NonFiniteError(
            f"the policy's logits are NaN or infinite for draws {draws} at version {self._version}; "
            "lower the learning rate, or check the model's weights"
        )

    def _keep(self, is_kept: list[bool]) -> None:
        if not all(is_kept):
            self._rows = [self._rows[index] for index in self._cache.keep_rows(is_kept)]

    def _make_cache(self) -> RaggedCache:
        return RaggedCache(
            self._model.config,
            device=self._device,
            dtype=self._model.dtype,
            column_multiple=_INVARIANT_COLUMNS if self._is_invariant else 1,
            has_blocks=self._device.type == "cpu" and not self._is_invariant,
        )

    def _probe(self) -> None:
        """Sample two rows of unequal length, of which one leaves early, and compare with a plain forward pass.

        It decides whether the model can be served, instead of a list of architectures: recurrent models, for one,
        have no key and value to keep by position.
        """
        vocab_size = self._model.config.get_text_config().vocab_size
        prompts = [
            [(7 * i + 3 * row) % vocab_size for i in range(length)] for row, length in ((0, 6), (1, 2))
        ]
        try:
            together = self._probe_decode(prompts)
            alone = self._probe_decode(prompts[:1]) if self._is_invariant else []
        except _PROBE_ERRORS as error:
            raise self._cannot_serve(f"{type(error).__name__}: {error}") from error
        rows = pad_prompts_and_responses(prompts, [chunk.token_ids for chunk in together]).to(self._device)
        with torch.no_grad():
            plain, _ = response_logprobs(self._module, rows, temperature=self._sampler.temperature)
        decoded = pad_rows([chunk.behaviour_logprobs for chunk in together], _PROBE_TOKENS, torch.float32)
        gap = float((plain - decoded.to(self._device)).abs().max())
        if not gap <= _PROBE_TOLERANCE.get(self._model.dtype, _PROBE_TOLERANCE_HALF):
            raise self._cannot_serve(f"its decoded log-probs differ from a plain forward pass by {gap:.2g}")
        if alone and alone[0].behaviour_logprobs != together[0].behaviour_logprobs:
            raise ModelError(
                f"{type(self._model).__name__} gives a response other bits when it is decoded alone; "
                "batch_invariant needs float32 on a CPU whose packed products do not depend on the batch; switch it off"
            )

    def _probe_decode(self, prompts: list[list[int]]) -> list[TokenChunk]:
        stop_ids, self._stop_ids = self._stop_ids, frozenset()
        self._waiting = [
            LiveRow(RolloutKey(row, 0), row, list(prompt), len(prompt), limit)
            for row, (prompt, limit) in enumerate(zip(prompts, (_PROBE_TOKENS, 1), strict=False))
        ]
        try:
            return sorted(self.decode(_PROBE_TOKENS), key=lambda chunk: chunk.key)
        finally:
            self._stop_ids, self._rows, self._waiting = stop_ids, [], []
            self._cache.clear()

    def _cannot_serve(self, reason: str) -> ModelError:
        return ModelError(
            f"{type(self._model).__name__} cannot be decoded in a batch of unequal rows: {reason}; "
            "use a decoder with an ordinary key-value cache"
        )
