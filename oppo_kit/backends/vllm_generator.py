"""Decoding by vLLM: rollouts become requests, which stay in its engine over an update and go on under the new weights.

Every chunk is sampled by one version: the engine samples only inside ``decode``, and nothing of it is left over. Which
tokens are sampled is vLLM's own business: the noise is a seed per request, and a log-prob's last digits depend on what
is decoded beside it. After each sync the log-probs of what is sampled first are compared with the policy's.

It knows no reward, no batch and no schedule, and does not import vLLM: ``vllm_engine`` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

from oppo_kit.backends.checkpoint_weights import checkpoint_weights
from oppo_kit.backends.forward import causal_model, response_logprobs
from oppo_kit.backends.live_row import LiveRow
from oppo_kit.backends.vllm_engine import VLLMEngine
from oppo_kit.errors import ConfigError, DataError, ModelError, NonFiniteError, PartFailedError
from oppo_kit.ops.batching import length_sorted_batches, pad_prompts_and_responses
from oppo_kit.ops.noise import stream_key
from oppo_kit.types import FinishReason, Prompt, Rollout, RolloutBatch, RolloutKey, TokenChunk

# Mean difference of a token's log-prob, times the temperature, which divides the logits and so magnifies it. In float32
# other kernels differ by some 1e-6, and forgotten weights by 1e-2 and more; in bfloat16 kernels differ by some 1e-2.
_GAP_ALLOWED = {torch.float32: 1e-3, torch.float64: 1e-3}
_GAP_ALLOWED_HALF = 0.1
_PROBE_TOKENS = 3
# What vLLM raises where it has no kernel for a model.
_PROBE_ERRORS = (
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
    IndexError,
    NotImplementedError,
    AssertionError,
)
# Every engine step samples for somebody, since vLLM starts only if the longest request fits into its cache.
_MAX_EMPTY_STEPS = 100
# Padded tokens per forward pass of the policy: as the learner's micro-batches.
_FORWARD_TOKENS = 8192
# vLLM seeds are signed 64-bit integers.
_SEED_MASK = (1 << 63) - 1


class VLLMGenerator:
    """Samples from ``softmax(logits / temperature)`` over the full vocabulary.

    Args:
        policy: the model under training, whose weights the engine gets here and by ``load_weights``.
        engine: serves this generator alone from now on; whatever it was doing is forgotten.
        temperature: > 0.
        stop_token_ids: a sampled one ends its response and belongs to it.
        seed: of the sampling noise.
        carried_cache: what an update does to the keys and values of live responses; see ``HFGenerator``. ``keep`` needs
            an engine without a prefix cache.

    Raises:
        ModelError: the engine's log-probs are not the policy's.
        ConfigError: ``keep`` with a prefix cache.
    """

    def __init__(
        self,
        policy: nn.Module,
        engine: VLLMEngine,
        *,
        temperature: float,
        stop_token_ids: Sequence[int],
        seed: int,
        carried_cache: Literal["recompute", "keep"] = "recompute",
    ) -> None:
        if carried_cache == "keep" and engine.has_prefix_cache:
            raise ConfigError(
                "carried_cache 'keep' leaves keys and values of earlier weights in vLLM's prefix cache, where new "
                "responses would find them; start the engine with has_prefix_cache=False"
            )
        self.engine = engine
        self._policy = policy
        self._model = causal_model(policy)
        self._temperature = temperature
        self._stop_ids = frozenset(stop_token_ids)
        self._seed = seed
        self._carried_cache = carried_cache
        self._version = 0
        self._request_numbers = count()
        # By request id; rows without any budget never become requests.
        self._rows: dict[str, LiveRow] = {}
        self._spent: list[LiveRow] = []
        # Since the last sync: what was live before it, and whether the policy has agreed with what was sampled.
        self._carried: set[RolloutKey] = set()
        self._is_proven = False
        engine.abort_all()
        engine.load_weights(checkpoint_weights(policy))
        engine.reset_cache()
        self._probe()

    @property
    def num_live(self) -> int:
        """Responses that are being decoded."""
        return len(self._rows) + len(self._spent)

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts; tokens that they have are context.

        Raises:
            DataError: prompt and limit are longer than what the engine was started for.
        """
        for rollout in rollouts:
            prompt = rollout.prompt
            longest = len(prompt.token_ids) + prompt.max_new_tokens
            if longest > self.engine.max_tokens:
                raise DataError(
                    f"draw {prompt.draw_id}: {len(prompt.token_ids)} prompt tokens and a limit of "
                    f"{prompt.max_new_tokens} exceed the {self.engine.max_tokens} tokens that vLLM was started for; "
                    "lower response_length, or set max_prompt_tokens and long_prompts"
                )
            self._admit(rollout)

    def set_shared(self, is_shared: bool) -> None:
        """Nothing changes: vLLM's kernels for so many rows keep the CPU threads that they first ran with."""

    def evict(self, keys: Sequence[RolloutKey]) -> None:
        """Forget live rollouts; the unknown are ignored."""
        gone = set(keys)
        requests = [request for request, row in self._rows.items() if row.key in gone]
        self.engine.abort(requests)
        for request in requests:
            del self._rows[request]
        self._spent = [row for row in self._spent if row.key not in gone]

    def load_weights(self, version: int) -> None:
        """Give the engine the policy's weights; what the cache becomes, ``carried_cache`` says."""
        self.engine.load_weights(checkpoint_weights(self._policy))
        if self._carried_cache == "recompute":
            self.engine.reset_cache()
        self._version = version
        self._carried = {row.key for row in self._rows.values()}
        self._is_proven = False

    def decode(self, max_tokens: int) -> list[TokenChunk]:
        """Advance every live response by up to ``max_tokens`` tokens; one that waits for memory has no chunk.

        Raises:
            NonFiniteError: a row's log-probs are NaN or infinite; names the draws.
            ModelError: what was sampled first after a sync has other log-probs under the policy.
            PartFailedError: vLLM samples nothing.
        """
        return self._decode(max_tokens)

    def policy_logprobs(self, batch: RolloutBatch) -> Tensor:
        """[R, T] float32 log-probs of all responses under the policy's present weights, zero past a row's end.

        What the engine recorded is only near them, so this is what a correction is taken against.
        """
        lengths = batch.response_lengths.tolist()
        responses = [batch.response_ids[row, :length].tolist() for row, length in enumerate(lengths)]
        logprobs = torch.zeros_like(batch.behaviour_logprobs)
        totals = [len(prompt) + length for prompt, length in zip(batch.prompt_ids, lengths, strict=True)]
        for indices in length_sorted_batches(totals, _FORWARD_TOKENS):
            part = self._under_policy([(batch.prompt_ids[row], responses[row]) for row in indices])
            logprobs[indices, : part.shape[1]] = part
        return logprobs

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()

    def _admit(self, rollout: Rollout) -> None:
        prompt, num_tokens = rollout.prompt, len(rollout.token_ids)
        # A response that comes back has noise of its own: the noise of its first tokens has been used.
        noise_key = stream_key(stream_key(self._seed, *rollout.key), num_tokens, 0) & _SEED_MASK
        row = LiveRow(
            key=rollout.key,
            noise_key=noise_key,
            token_ids=[*prompt.token_ids, *rollout.token_ids],
            num_prompt_tokens=len(prompt.token_ids),
            limit=prompt.max_new_tokens,
        )
        if not row.num_remaining:
            self._spent.append(row)
            return
        request = f"{rollout.key.draw_id}-{rollout.key.sample_index}-{next(self._request_numbers)}"
        self.engine.add(
            request,
            row.token_ids,
            max_new_tokens=row.num_remaining,
            temperature=self._temperature,
            stop_token_ids=sorted(self._stop_ids),
            seed=row.noise_key,
        )
        self._rows[request] = row

    def _decode(self, max_tokens: int) -> list[TokenChunk]:
        chunks = [row.take_chunk(self._version, 0, "length") for row in self._spent]
        self._spent = []
        ended: list[tuple[LiveRow, int]] = []
        tick = num_empty = 0
        while self._rows and tick < max_tokens:
            sampled = self.engine.step()
            tick += bool(sampled)
            num_empty = 0 if sampled else num_empty + 1
            if num_empty == _MAX_EMPTY_STEPS:
                raise PartFailedError(
                    f"vLLM sampled nothing in {num_empty} steps while {len(self._rows)} responses are in flight; "
                    "raise vllm.kv_cache_gib, and look at its log"
                )
            for tokens in sampled:
                self._rows[tokens.request_id].append(tokens.token_ids, tokens.logprobs, None)
                if tokens.is_finished:
                    ended.append((self._rows.pop(tokens.request_id), tick))
        live = [row for row in self._rows.values() if row.new_ids]
        rows = [row for row, _ in ended] + live
        self._check_finite(rows)
        self._check_agreement(rows)
        chunks += [row.take_chunk(self._version, end_tick, self._reason(row)) for row, end_tick in ended]
        return chunks + [row.take_chunk(self._version, tick, None) for row in live]

    def _reason(self, row: LiveRow) -> FinishReason:
        return "stop" if row.token_ids[-1] in self._stop_ids else "length"

    def _check_finite(self, rows: Sequence[LiveRow]) -> None:
        draws = sorted({row.key.draw_id for row in rows if not all(map(math.isfinite, row.new_logprobs))})
        if not draws:
            return
        self._forget()
        raise NonFiniteError(
            f"the policy's logits are NaN or infinite for draws {draws} at version {self._version}; "
            "lower the learning rate, or check the model's weights"
        )

    def _check_agreement(self, rows: Sequence[LiveRow]) -> None:
        """Once after a sync: a carried row, whose keys and values could be old, and a fresh one."""
        if self._is_proven:
            return
        carried = [row for row in rows if row.key in self._carried and self._carried_cache == "recompute"]
        fresh = [row for row in rows if row.key not in self._carried]
        chosen = carried[:1] + fresh[:1]
        for row in chosen:
            self._compare(row)
        self._is_proven = bool(chosen)

    def _compare(self, row: LiveRow) -> None:
        """New log-probs against the policy's."""
        length, num_new = row.num_prompt_tokens, len(row.new_ids)
        logprobs = self._under_policy([(row.token_ids[:length], row.token_ids[length:])])[0, -num_new:]
        gap = fmean(abs(one - other) for one, other in zip(row.new_logprobs, logprobs.tolist(), strict=True))
        allowed = _GAP_ALLOWED.get(self._model.dtype, _GAP_ALLOWED_HALF) / self._temperature
        if gap <= allowed:
            return
        self._forget()
        raise ModelError(
            f"vLLM's log-probs of draw {row.key.draw_id} at version {self._version} differ from those of "
            f"{type(self._model).__name__} under training by {gap:.2g} a token, and {allowed:.2g} is allowed in "
            f"{self._model.dtype}: vLLM has other weights, or computes this model otherwise; use backend 'hf', or "
            "another version of vLLM"
        )

    def _under_policy(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
        """[r, t] log-probs of responses after their prompts under the policy, on the CPU."""
        rows = pad_prompts_and_responses([prompt for prompt, _ in pairs], [response for _, response in pairs])
        device = next(self._model.parameters()).device
        with torch.no_grad():
            logprobs, _ = response_logprobs(self._policy, rows.to(device), temperature=self._temperature)
        return logprobs.cpu()

    def _probe(self) -> None:
        """Two rows of unequal length, of which one leaves early, against the policy, before anything depends on it."""
        vocab_size = self._model.config.get_text_config().vocab_size
        stop_ids, self._stop_ids = self._stop_ids, frozenset()
        for draw_id, (length, limit) in enumerate(((6, _PROBE_TOKENS), (2, 1))):
            ids = tuple((7 * i + 3 * draw_id) % vocab_size for i in range(length))
            self._admit(Rollout(RolloutKey(draw_id, 0), Prompt(draw_id, ids, limit)))
        try:
            self._decode(_PROBE_TOKENS)
        except _PROBE_ERRORS as error:
            self.engine.close()
            raise ModelError(
                f"vLLM cannot decode with {type(self._model).__name__}: {type(error).__name__}: "
                f"{str(error).splitlines()[0]}; use backend 'hf'"
            ) from error
        finally:
            self._stop_ids = stop_ids

    def _forget(self) -> None:
        self.engine.wipe()
        self._rows, self._spent = {}, []
