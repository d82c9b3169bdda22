"""RLOO by TRL's trainer, on batches of the overlap engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oppo_kit.integrations.trl.compatibility import require_methods, require_trl, require_word

require_trl()

from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402

from oppo_kit.integrations.trl.overlapping import METHODS, OverlappingTrainer  # noqa: E402

_ANCHOR = "old_logps"
require_methods(RLOOTrainer, METHODS)
require_word(RLOOTrainer, "_compute_loss", _ANCHOR)


class OverlapRLOOTrainer(OverlappingTrainer, RLOOTrainer):
    """``trl.RLOOTrainer`` that trains the first groups that end, and carries the others on.

    The constructor takes what ``RLOOTrainer`` takes, ``overlap=OverlapConfig(...)``, and ``trims_padding`` (see
    ``OverlappingTrainer``). Losses, advantages, metrics, logs and Python reward functions are TRL's. Reward models
    score where and when ``overlap`` says.
    """

    _anchor_name = _ANCHOR

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        answers = self._answers(prompt_ids)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs) if answers is None else answers

    def _as_anchor(self, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
        return (behaviour_logprobs * mask).sum(1)
