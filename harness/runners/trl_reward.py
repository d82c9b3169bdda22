"""The run's reward in TRL's form of a reward function.

It reads what our scorers read: token ids with BOS and the sampled EOS, in batches sorted by length. TRL alone would
give a reward model the decoded text without either. It knows no TRL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from oppo_kit.protocols import Scorer
from oppo_kit.types import Prompt, Rollout, RolloutKey

DRAW_COLUMN = "draw_id"
"""The data set's column that names a row's draw."""


class RewardOnIds:
    """Gives responses the scores that our engine would, whatever the trainer."""

    def __init__(self, scorer: Scorer, draws: Sequence[Prompt], stop_token_ids: Collection[int]) -> None:
        self._scorer = scorer
        self._prompts: Mapping[int, Prompt] = {prompt.draw_id: prompt for prompt in draws}
        self._stop_token_ids = frozenset(stop_token_ids)

    def __call__(
        self, *, completion_ids: Sequence[Sequence[int]], draw_id: Sequence[int], **_: Any
    ) -> list[float | None]:
        """One score a row, None where the scorer abstains.

        Args:
            completion_ids: by row; anything may follow the first stop token.
            draw_id: by row.
        """
        rows = zip(draw_id, completion_ids, strict=True)
        rollouts = [self._rollout(index, draw, token_ids) for index, (draw, token_ids) in enumerate(rows)]
        scores = self._scorer.score(rollouts)
        return [score if isinstance(score, int | float) else None for score in scores]

    def _rollout(self, index: int, draw_id: int, token_ids: Sequence[int]) -> Rollout:
        ends = [place for place, token in enumerate(token_ids) if token in self._stop_token_ids]
        return Rollout(
            RolloutKey(draw_id, index),
            self._prompts[draw_id],
            token_ids=list(token_ids[: ends[0] + 1] if ends else token_ids),
            finish_reason="stop" if ends else "length",
        )
