"""Scores by transformers models: in one shot when a response has ended, or chunk by chunk while it is decoded.

What was fed of a response stays in a ragged cache until it is scored or forgotten; the caches of frozen models survive
weight updates. A score is the same either way, to rounding: whatever was fed, the final tokens decide. Scores do not
depend on the other rows of a batch, and are read at the explicit last token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oppo_kit.backends.forward import (
    causal_model,
    check_one_score,
    classifier_backbone,
    context_tokens,
    logits_head,
    probe_causal_model,
    response_logprobs,
    score_head,
    sequence_scores,
    token_values,
)
from oppo_kit.backends.rendering import IdsRendering, Rendering, num_settled
from oppo_kit.backends.streaming import Prefix, StreamingPrefill, check_streaming
from oppo_kit.errors import DataError, ModelError
from oppo_kit.ops.batching import PaddedRows, length_sorted_batches, pad_prompts_and_responses
from oppo_kit.ops.logprobs import token_logprobs
from oppo_kit.types import Prompt, Rollout, RolloutKey, Score

# Padded tokens per forward pass.
BATCH_TOKENS = 16384
# Between one pass and chunks over a ragged cache, numbers of ordinary size differ by rounding.
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
# In half precision a score depends on the shape of the pass too (9.8e-4 on scores of 0.2, and more on larger ones).
_PROBE_TOLERANCE_HALF = 0.5
# The debugging check looks at every score of a run.
_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
# What reading a model can raise when it does not take the cache, the mask or the positions.
_PROBE_ERRORS = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)


_Inputs = tuple[Sequence[int], Sequence[int]]
"""What one shot reads, in two parts, of which the second has the tokens that are scored one by one."""


class _HFScorer(ABC):
    """What the scorers share: the cache, and who is scored from it. They differ in what they read, and where."""

    def __init__(self, model: nn.Module, name: str, *, batch_tokens: int, checks_stream: bool) -> None:
        self.name = name
        self._model = model
        self._batch_tokens = batch_tokens
        self._checks_stream = checks_stream
        self._prefill: StreamingPrefill | None = None
        self._num_tokens_in_one_shot = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without the cache, which belongs to the process that fills it."""
        return {**self.__dict__, "_prefill": None}

    @property
    def module(self) -> nn.Module:
        """The model that is read."""
        return self._model

    @property
    def num_tokens_read(self) -> int:
        """Tokens that went through the model so far."""
        return self._num_tokens_in_one_shot + (self._prefill.num_tokens_read if self._prefill else 0)

    @property
    def num_cache_bytes(self) -> int:
        """Memory of what was prefilled."""
        return self._prefill.num_bytes if self._prefill else 0

    def feed(self, rollouts: Sequence[Rollout]) -> None:
        """Prefill what is new of rollouts that have not ended; one that is too long now may yet become shorter."""
        prefixes = [self._prefix(rollout) for rollout in rollouts]
        limit = self._context
        self._streaming.extend([p for p in prefixes if limit is None or len(p.token_ids) <= limit])

    def forget(self, keys: Sequence[RolloutKey] | None) -> None:
        """Drop what was prefilled of these rollouts, or of all."""
        if self._prefill is None:
            return
        if keys is None:
            self._prefill.clear()
        else:
            self._prefill.drop(keys)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        """One score per ended rollout: from the cache where there is something of it, else in one shot.

        Raises:
            DataError: a rollout is longer than the model's context.
        """
        fed = [rollout for rollout in rollouts if self._prefill is not None and rollout.key in self._prefill]
        scores = self._finish(fed)
        rest = [rollout for rollout in rollouts if rollout.key not in scores]
        scores.update(zip((rollout.key for rollout in rest), self._score_in_batches(rest), strict=True))
        if self._checks_stream and fed:
            self._compare(fed, scores)
        return [scores[rollout.key] for rollout in rollouts]

    def probe_streaming(self) -> None:
        """Feed two made-up responses of unequal length in chunks and compare with one shot.

        Raises:
            ModelError: the model cannot be fed chunk by chunk.
        """
        prefill = self._streaming  # which refuses what cannot be streamed at all
        try:
            self._probe(prefill)
        except _PROBE_ERRORS as error:
            raise ModelError(
                f"{self.name} ({type(self._model).__name__}) cannot be fed chunk by chunk: {type(error).__name__}: "
                f"{error}; set overlap.score_at to 'sample'"
            ) from error
        finally:
            self._prefill = None  # whoever feeds it may do so on another stream

    def _probe(self, prefill: StreamingPrefill) -> None:
        vocab_size = _text_config(self._model).vocab_size
        rollouts = [
            Rollout(
                RolloutKey(-1 - row, 0),
                Prompt(-1 - row, tuple((5 * i + row) % vocab_size for i in range(1, 4)), 8),
                token_ids=[(7 * i + 3 * row) % vocab_size for i in range(1, length)],
                finish_reason="stop",
            )
            for row, length in ((0, 8), (1, 5))
        ]
        expected = _flat(self._score_in_batches(rollouts, _policy_ids))
        for num_tokens in (2, 5):
            parts = [rollout.snapshot() for rollout in rollouts]
            for part in parts:
                part.finish_reason = None
                del part.token_ids[num_tokens:]
            prefill.extend([self._ids_prefix(part) for part in parts])
        streamed = self._finish(rollouts, self._ids_prefix)
        tolerance = _PROBE_TOLERANCE.get(next(self._model.parameters()).dtype, _PROBE_TOLERANCE_HALF)
        actual = _flat([streamed.get(rollout.key, math.nan) for rollout in rollouts])
        expected = expected if streamed else actual
        check_streaming(f"{self.name} ({type(self._model).__name__})", actual, expected, tolerance)

    @property
    def _context(self) -> int | None:
        """Tokens that the model can read; None: no limit is known."""
        return context_tokens(self._model.config)

    @property
    def _streaming(self) -> StreamingPrefill:
        if self._prefill is None:
            self._prefill = self._make_prefill()
        return self._prefill

    def _finish(
        self, rollouts: Sequence[Rollout], prefix_of: Callable[[Rollout], Prefix] | None = None
    ) -> dict[RolloutKey, Score | None]:
        """Scores of rollouts in the cache, which then leave it; none of them when a number is not finite."""
        if not rollouts:
            return {}
        prefixes = [(prefix_of or self._prefix)(rollout) for rollout in rollouts]
        for rollout, prefix in zip(rollouts, prefixes, strict=True):
            self._check_context(rollout, len(prefix.token_ids))
        if not self._streaming.extend(prefixes):
            return {}
        scores: dict[RolloutKey, Score | None] = {
            rollout.key: self._score_of(self._streaming.outputs(rollout.key), rollout) for rollout in rollouts
        }
        self._streaming.drop(scores)
        return scores

    def _compare(self, rollouts: Sequence[Rollout], scores: dict[RolloutKey, Score | None]) -> None:
        tolerance = _CHECK_TOLERANCE.get(next(self._model.parameters()).dtype, _PROBE_TOLERANCE_HALF)
        name = f"{self.name} of draws {[rollout.key.draw_id for rollout in rollouts]}"
        streamed = _flat([scores[rollout.key] for rollout in rollouts])
        check_streaming(name, streamed, _flat(self._score_in_batches(rollouts)), tolerance)

    # Not in inference mode: a model under training may keep what it computes here, such as rotary frequencies.
    @torch.no_grad()
    def _score_in_batches(
        self, rollouts: Sequence[Rollout], inputs_of: Callable[[Rollout], _Inputs] | None = None
    ) -> list[Score | None]:
        device = next(self._model.parameters()).device
        inputs = [(inputs_of or self._inputs)(rollout) for rollout in rollouts]
        lengths = [len(prompt) + len(response) for prompt, response in inputs]
        for rollout, length in zip(rollouts, lengths, strict=True):
            self._check_context(rollout, length)
        scores: list[Score | None] = [None] * len(rollouts)
        for indices in length_sorted_batches(lengths, self._batch_tokens):
            rows = pad_prompts_and_responses(*zip(*(inputs[index] for index in indices), strict=True))
            for index, score in zip(indices, self._forward(rows.to(device)), strict=True):
                scores[index] = score
        self._num_tokens_in_one_shot += sum(lengths)
        return scores

    def _check_context(self, rollout: Rollout, num_tokens: int) -> None:
        limit = self._context
        if limit is not None and num_tokens > limit:
            raise DataError(
                f"draw {rollout.key.draw_id}: its {num_tokens} tokens exceed the context of {limit} of the model "
                f"behind {self.name!r}; lower sampling.response_length, or set max_prompt_tokens and long_prompts"
            )

    def _inputs(self, rollout: Rollout) -> _Inputs:
        """What one shot reads."""
        return _policy_ids(rollout)

    def _prefix(self, rollout: Rollout) -> Prefix:
        """What chunks read."""
        return self._ids_prefix(rollout)

    def _ids_prefix(self, rollout: Rollout) -> Prefix:
        """All but the last token: each is read for what it says about the next."""
        token_ids = [*rollout.prompt.token_ids, *rollout.token_ids]
        return Prefix(rollout.key, token_ids, len(token_ids) - 1, len(rollout.prompt.token_ids) - 1)

    def _score_of(self, outputs: list[float], rollout: Rollout) -> Score:
        """The score that the numbers of all fed tokens make."""
        return outputs[: len(rollout.token_ids)]

    @abstractmethod
    def _make_prefill(self) -> StreamingPrefill:
        """The cache and how it is read."""

    @abstractmethod
    def _forward(self, rows: PaddedRows) -> list[Score]:
        """Scores of whole rows in one shot."""


class HFRewardScorer(_HFScorer):
    """A sequence classifier with one label; the score of a response is its logit at the last token.

    Args:
        classifier: frozen; with a backbone and a ``score`` head.
        rendering: how a rollout becomes the classifier's tokens; None: the policy's own token ids, as in TRL's PPO.
        batch_tokens: padded tokens per forward pass.
        name: of the score.
        checks_stream: score every streamed response in one shot too, and compare: for debugging.

    Raises:
        ModelError: it has no such head, or one that gives several numbers.
    """

    def __init__(
        self,
        classifier: nn.Module,
        *,
        rendering: Rendering | None = None,
        batch_tokens: int = BATCH_TOKENS,
        name: str = "reward",
        checks_stream: bool = False,
    ) -> None:
        check_one_score(classifier, "reward model")
        classifier.eval().requires_grad_(False)
        super().__init__(classifier, name, batch_tokens=batch_tokens, checks_stream=checks_stream)
        self._rendering = rendering or IdsRendering()
        # What the template alone makes of each unfinished rollout: its end is held back.
        self._empty_renderings: dict[RolloutKey, list[int]] = {}

    def forget(self, keys: Sequence[RolloutKey] | None) -> None:
        """Drop what was prefilled of these rollouts, or of all."""
        super().forget(keys)
        for key in list(self._empty_renderings) if keys is None else keys:
            self._empty_renderings.pop(key, None)

    def _inputs(self, rollout: Rollout) -> _Inputs:
        self._empty_renderings.pop(rollout.key, None)
        return self._rendering.encode(rollout), ()

    def _prefix(self, rollout: Rollout) -> Prefix:
        """The settled part of the rendering; all of it when the response has ended."""
        token_ids = self._rendering.encode(rollout)
        if rollout.is_ended or isinstance(self._rendering, IdsRendering):
            self._empty_renderings.pop(rollout.key, None)
            return Prefix(rollout.key, token_ids, len(token_ids))
        if rollout.key not in self._empty_renderings:
            self._empty_renderings[rollout.key] = self._rendering.encode(Rollout(rollout.key, rollout.prompt))
        return Prefix(rollout.key, token_ids, num_settled(self._empty_renderings[rollout.key], token_ids))

    def _ids_prefix(self, rollout: Rollout) -> Prefix:
        token_ids = [*rollout.prompt.token_ids, *rollout.token_ids]
        return Prefix(rollout.key, token_ids, len(token_ids))

    def _score_of(self, outputs: list[float], rollout: Rollout) -> Score:  # noqa: ARG002
        return outputs[-1]

    def _make_prefill(self) -> StreamingPrefill:
        return _classifier_prefill(self._model, self._batch_tokens)

    def _forward(self, rows: PaddedRows) -> list[Score]:
        return sequence_scores(self._model, rows).tolist()


class HFReferenceScorer(_HFScorer):
    """Per-token log-probs under the reference policy, at the sampling temperature.

    Args:
        reference: a frozen copy of the policy before training; it may share its tensors with a LoRA policy's base.
        temperature: the sampling temperature, so that policy and reference are compared alike.
        batch_tokens: padded tokens per forward pass.
        name: of the score.
        checks_stream: see ``HFRewardScorer``.
    """

    def __init__(
        self,
        reference: nn.Module,
        *,
        temperature: float,
        batch_tokens: int = BATCH_TOKENS,
        name: str = "reference",
        checks_stream: bool = False,
    ) -> None:
        probe_causal_model(reference)
        model = causal_model(reference.eval().requires_grad_(False))
        super().__init__(model, name, batch_tokens=batch_tokens, checks_stream=checks_stream)
        self._temperature = temperature

    def _make_prefill(self) -> StreamingPrefill:
        model = causal_model(self._model)

        def read(hidden: Tensor, next_ids: list[int]) -> Tensor:
            logprobs, _ = token_logprobs(
                hidden,
                torch.tensor(next_ids, device=hidden.device),
                logits_head(model),
                vocab_size=_text_config(model).vocab_size,
                temperature=self._temperature,
            )
            return logprobs

        return StreamingPrefill(model.base_model, model, read, reads_next=True, max_tokens=self._batch_tokens)

    def _forward(self, rows: PaddedRows) -> list[Score]:
        logprobs, _ = response_logprobs(self._model, rows, temperature=self._temperature)
        return _by_row(logprobs, rows)


class HFCriticScorer(_HFScorer):
    """The critic's values at the positions where the response's tokens are chosen, under the weights of now.

    An update makes its cache void: ``forget(None)`` before it. It reads the module under training, so its placement is
    inline or a thread.

    Args:
        critic: a sequence classifier with one label, under training.
        batch_tokens: padded tokens per forward pass.
    """

    follows_weights = True

    def __init__(self, critic: nn.Module, *, batch_tokens: int = BATCH_TOKENS) -> None:
        super().__init__(critic, "critic", batch_tokens=batch_tokens, checks_stream=False)

    def _make_prefill(self) -> StreamingPrefill:
        return _classifier_prefill(self._model, self._batch_tokens)

    def _forward(self, rows: PaddedRows) -> list[Score]:
        return _by_row(token_values(self._model, rows), rows)


def _classifier_prefill(classifier: nn.Module, max_tokens: int) -> StreamingPrefill:
    """Reads the score head at every fed token."""

    def read(hidden: Tensor, next_ids: list[int]) -> Tensor:  # noqa: ARG001
        return score_head(classifier)(hidden).squeeze(-1).float()

    backbone = classifier_backbone(classifier)
    return StreamingPrefill(backbone, classifier, read, reads_next=False, max_tokens=max_tokens)


def _policy_ids(rollout: Rollout) -> _Inputs:
    return rollout.prompt.token_ids, rollout.token_ids


def _by_row(numbers: Tensor, rows: PaddedRows) -> list[Score]:
    """[r, t] to one list a row, without what is past its end."""
    return [
        row[:length] for row, length in zip(numbers.tolist(), rows.response_lengths.tolist(), strict=True)
    ]


def _flat(scores: Sequence[Score | None]) -> list[float]:
    flat: list[float] = []
    for score in scores:
        flat += score if isinstance(score, list) else [] if score is None else [score]
    return flat


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()
