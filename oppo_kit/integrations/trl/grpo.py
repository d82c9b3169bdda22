"""GRPO by TRL's trainer, on batches of the overlap engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oppo_kit.integrations.trl.compatibility import require_methods, require_trl, require_word

require_trl()

from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

from oppo_kit.integrations.trl.overlapping import METHODS, OverlappingTrainer  # noqa: E402

_ANCHOR = "old_per_token_logps"
require_methods(GRPOTrainer, METHODS)
require_word(GRPOTrainer, "_compute_loss", _ANCHOR)


class OverlapGRPOTrainer(OverlappingTrainer, GRPOTrainer):
    """``trl.GRPOTrainer`` that trains the first groups that end, and carries the others on.

    The constructor takes what ``GRPOTrainer`` takes, ``overlap=OverlapConfig(...)``, and ``trims_padding`` (see
    ``OverlappingTrainer``). Losses, advantages, metrics, logs and Python reward functions are TRL's. Reward models
    score where and when ``overlap`` says.
    """

    _anchor_name = _ANCHOR

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        answers = self._answers(prompt_ids)
        if answers is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return answers, None

    def _as_anchor(self, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        return behaviour_logprobs
