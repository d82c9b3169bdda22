"""One-shot scoring of ended responses by frozen transformers models, in length-sorted batches.

The reward model reads the policy's own token ids (one vocabulary), as TRL's PPO does. Scores do not depend on the
other rows of a batch: rows are right-padded, and the score is read at the explicit last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from oppo_kit.backends.forward import (
    check_one_score,
    probe_causal_model,
    response_logprobs,
    sequence_scores,
)
from oppo_kit.ops.batching import PaddedRows, length_sorted_batches, pad_prompts_and_responses
from oppo_kit.types import Rollout, Score


class HFRewardScorer:
    """A sequence classifier with one label; the score of a response is its logit at the last token.

    Args:
        classifier: frozen; with a backbone and a ``score`` head.
        batch_tokens: padded tokens per forward pass.
        name: of the score.

    Raises:
        ModelError: it has no such head, or one that gives several numbers.
    """

    def __init__(self, classifier: nn.Module, *, batch_tokens: int = 16384, name: str = "reward") -> None:
        self.name = name
        check_one_score(classifier, "reward model")
        self._classifier = classifier.eval().requires_grad_(False)
        self._batch_tokens = batch_tokens

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        """One scalar per rollout."""

        def forward(rows: PaddedRows) -> list[Score]:
            return sequence_scores(self._classifier, rows).tolist()

        return _score_in_batches(rollouts, forward, self._batch_tokens, _device_of(self._classifier))


class HFReferenceScorer:
    """Per-token log-probs under the reference policy, at the sampling temperature.

    Args:
        reference: a frozen copy of the policy, or, with ``without_adapter``, the LoRA policy under training.
        temperature: the sampling temperature, so that policy and reference are compared alike.
        without_adapter: switch the adapter off while scoring; inline placement only, since no module may be used by
            two parts at once.
        batch_tokens: padded tokens per forward pass.
        name: of the score.
    """

    def __init__(
        self,
        reference: nn.Module,
        *,
        temperature: float,
        without_adapter: bool = False,
        batch_tokens: int = 16384,
        name: str = "reference",
    ) -> None:
        self.name = name
        self._reference = reference if without_adapter else reference.eval().requires_grad_(False)
        self._temperature = temperature
        self._without_adapter = without_adapter
        self._batch_tokens = batch_tokens
        probe_causal_model(reference)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        """One log-prob per response token."""

        def forward(rows: PaddedRows) -> list[Score]:
            logprobs, _ = response_logprobs(self._reference, rows, temperature=self._temperature)
            lengths = rows.response_lengths.tolist()
            return [row[:length] for row, length in zip(logprobs.tolist(), lengths, strict=True)]

        adapter_off: AbstractContextManager[object] = nullcontext()
        if self._without_adapter:
            adapter_off = self._reference.disable_adapter()  # type: ignore[operator]
        with adapter_off:
            return _score_in_batches(rollouts, forward, self._batch_tokens, _device_of(self._reference))


@torch.inference_mode()
def _score_in_batches(
    rollouts: Sequence[Rollout],
    forward: Callable[[PaddedRows], list[Score]],
    batch_tokens: int,
    device: torch.device,
) -> list[Score | None]:
    lengths = [len(rollout.prompt.token_ids) + len(rollout.token_ids) for rollout in rollouts]
    scores: list[Score | None] = [None] * len(rollouts)
    for indices in length_sorted_batches(lengths, batch_tokens):
        rows = pad_prompts_and_responses(
            [rollouts[index].prompt.token_ids for index in indices],
            [rollouts[index].token_ids for index in indices],
        ).to(device)
        for index, score in zip(indices, forward(rows), strict=True):
            scores[index] = score
    return scores


def _device_of(module: nn.Module) -> torch.device:
    tensor: Tensor = next(module.parameters())
    return tensor.device
