"""The numbers of PPO's steps under TRL's names, gathered until they are logged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oppo_kit.types import StepReport

# Of a log that covers several steps these are the last step's; all others are means.
_LAST = frozenset({"lr", "episode", "eps"})


class StepLog:
    """What was measured since the last log.

    TRL logs the variance of the mean ratios of micro-batches, while an algorithm's metrics are sums only; so the loss
    of ``algorithm`` is watched from here on.

    Args:
        algorithm: ``ppo``, with the metric ``val/ratio``.
    """

    def __init__(self, algorithm: Any) -> None:
        self._steps: list[dict[str, float]] = []
        self._ratios: list[float] = []
        self._loss = algorithm.loss
        algorithm.loss = self._watched_loss

    @property
    def has_news(self) -> bool:
        """Whether there is something to log."""
        return bool(self._steps)

    def add(self, report: StepReport, *, episode: int, episodes_per_s: float) -> dict[str, float]:
        """Keep and return the numbers of a step.

        Args:
            report: of the step.
            episode: responses trained so far.
            episodes_per_s: since training began.
        """
        metrics = report.metrics | {
            "eps": int(episodes_per_s),
            "episode": episode,
            "val/ratio_var": self._take_ratio_variance(),
            "oppo/delta": report.delta,
            "oppo/age_mean": report.age_mean,
            "oppo/num_deferred": report.num_deferred,
            "oppo/tokens_decoded": report.tokens_decoded,
            "oppo/tokens_trained": report.tokens_trained,
            "oppo/step_s": report.step_s,
            "oppo/generate_s": report.generate_s,
            "oppo/score_s": report.score_s,
            "oppo/score_busy_s": report.score_busy_s,
            "oppo/train_s": report.train_s,
        }
        self._steps.append(metrics)
        return metrics

    def take_means(self) -> dict[str, float]:
        """One log of all steps since the last one."""
        steps, self._steps = self._steps, []
        logs: dict[str, float] = {}
        for name in dict.fromkeys(name for step in steps for name in step):
            values = [step[name] for step in steps if name in step]
            logs[name] = values[-1] if name in _LAST else sum(values) / len(values)
        return logs

    def _watched_loss(self, micro_batch: Any, outputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self._loss(micro_batch, outputs)
        num_tokens = int(micro_batch.mask.sum())
        if num_tokens:
            self._ratios.append(float(metrics["val/ratio"]) * micro_batch.num_step_tokens / num_tokens)
        return loss, metrics

    def _take_ratio_variance(self) -> float:
        """0 with fewer than two micro-batches, where TRL logs NaN."""
        ratios, self._ratios = self._ratios, []
        return float(torch.tensor(ratios).var()) if len(ratios) > 1 else 0.0
