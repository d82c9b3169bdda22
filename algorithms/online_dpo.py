"""Online direct preference optimisation: of two responses to a prompt, the better one becomes likelier.

Source: Guo et al., "Direct Language Model Alignment from Online AI Feedback", 2024 (arXiv 2402.04792). Names and
defaults are those of TRL 1.16's ``OnlineDPOConfig``. It never sees how the rollouts were made.

The reward orders a pair; a judge of pairs is a reward too (``oppo_kit.backends.pairwise_judge``). Where the reward
abstains from one response, the engine has rejected and replaced the pair before it comes here.

There is no correction for staleness to choose. The loss holds no ratio to the policy that sampled: it compares the
policy under training with the reference on two given texts, and which of them is better does not depend on who wrote
them. A carried pair is what every pair is to offline DPO, so it shifts which texts are compared and nothing else; to
undo that would take products of ratios over two whole responses, whose variance knows no bound.

Deviations from TRL 1.16's ``OnlineDPOTrainer``:

- All log-probs are taken at the sampling temperature. TRL's ignore it, so that with its default of 0.9 the policy that
  is trained and the KL that is reported are not those of the policy that samples.
- Validity comes from explicit lengths. TRL sums ``objective/kl`` and ``objective/entropy`` over the padding too.
- ``objective/*`` describe the policy that sampled, as in PPO; without staleness it is the one under training.
- The loss is the mean over the pairs of an optimizer step, not a mean of micro-batch means.
- ``missing_eos_penalty`` looks at whether the response ended by its stop set, not for an EOS anywhere in it.
- A tie may be skipped. A response from which every function abstains has no score, where TRL counts it 0.
- ``beta`` is one number, not a list by epoch of the data. No prompt is cut from the left (``max_length``).
- The learning rate stands in the learner's config, ``max_new_tokens`` (``response_length``) in the sampling config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from oppo_kit.algorithm import AlgorithmBase, AlgorithmConfig
from oppo_kit.ops.masking import masked_mean, masked_sum
from oppo_kit.ops.ratios import summed_log_ratios
from oppo_kit.ops.rollout_metrics import objective_metrics
from oppo_kit.types import MicroBatch, PolicyOutputs, RolloutBatch, TrainBatch


class OnlineDPOConfig(AlgorithmConfig):
    """Online DPO's settings, named as in TRL's ``OnlineDPOConfig``."""

    beta: float = Field(
        default=0.1, gt=0, description="pull to the reference, the tau of ipo; 0.01 to 0.5, more holds nearer"
    )
    loss_type: Literal["sigmoid", "ipo"] = Field(
        default="sigmoid", description="sigmoid (DPO) or ipo, which aims at a margin instead of ever more"
    )
    missing_eos_penalty: float | None = Field(
        default=None,
        ge=0,
        description="subtracted from the score of a response that its limit cut; null: none",
    )
    ties: Literal["first", "skip"] = Field(
        default="first",
        description="equal scores: first counts the first response as chosen, skip leaves the pair out",
    )


class OnlineDPO(AlgorithmBase):
    """Two responses a prompt, and a loss of the pair; no critic."""

    name = "online_dpo"
    config_class = OnlineDPOConfig
    group_size = 2
    scorers = frozenset({"reward", "reference"})
    needs_whole_groups = True
    config: OnlineDPOConfig

    def __init__(self, config: OnlineDPOConfig) -> None:
        super().__init__(config)
        self._pair_losses = _PAIR_LOSSES[config.loss_type]

    def prepare(self, batch: RolloutBatch) -> TrainBatch:
        """Which response of each pair is chosen; see ``preferences``."""
        config = self.config
        scores = batch.scores["reward"]
        if config.missing_eos_penalty is not None:
            scores = torch.where(batch.is_stopped, scores, scores - config.missing_eos_penalty)
        preference = preferences(scores, skips_ties=config.ties == "skip")
        return TrainBatch(
            rollouts=batch,
            tensors={"reference_logprobs": batch.scores["reference"], "preference": preference},
            metrics=_batch_metrics(batch, scores, preference, config.beta),
            row_mask=preference != 0,
        )

    def loss(self, micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ over pairs of the pair's loss / pairs of the step; see ``sigmoid_losses`` and ``ipo_losses``."""
        beta, mask = self.config.beta, micro_batch.mask
        preference = micro_batch.tensors["preference"]
        log_ratios = summed_log_ratios(
            outputs.policy_logprobs - micro_batch.tensors["reference_logprobs"], mask
        )
        chosen, rejected = chosen_and_rejected(log_ratios, preference)
        is_pair = preference[::2] != 0

        def mean(values: Tensor) -> Tensor:
            return masked_sum(values, is_pair) / max(micro_batch.num_step_rows // 2, 1)

        loss = mean(self._pair_losses(chosen - rejected, beta))
        with torch.no_grad():
            logprobs = torch.where(mask, outputs.policy_logprobs, 0.0).sum(1)
            chosen_logprobs, rejected_logprobs = chosen_and_rejected(logprobs, preference)
            metrics = {
                "loss": loss.detach(),
                "rewards/chosen": mean(beta * chosen),
                "rewards/rejected": mean(beta * rejected),
                "rewards/margins": mean(beta * (chosen - rejected)),
                "rewards/accuracies": mean((chosen > rejected).float()),
                "logps/chosen": mean(chosen_logprobs),
                "logps/rejected": mean(rejected_logprobs),
            }
        return loss, metrics


def preferences(scores: Tensor, *, skips_ties: bool) -> Tensor:
    """[R] 1 for the chosen response of each pair, -1 for the rejected one, 0 for both of a tie that is skipped.

    Args:
        scores: [R], finite; the rows of a pair lie side by side.
        skips_ties: else the first of equals is chosen.
    """
    first, second = scores.view(-1, 2).unbind(1)
    of_first = torch.where(first >= second, 1.0, -1.0)
    if skips_ties:
        of_first = torch.where(first == second, 0.0, of_first)
    return torch.stack([of_first, -of_first], 1).view(-1)


def chosen_and_rejected(values: Tensor, preference: Tensor) -> tuple[Tensor, Tensor]:
    """[R / 2] the values of chosen and of rejected responses; of a skipped pair in either order.

    Args:
        values: [R].
        preference: [R], see ``preferences``.
    """
    pairs = values.view(-1, 2)
    chosen, rejected = torch.where(preference.view(-1, 2)[:, :1] > 0, pairs, pairs.flip(1)).unbind(1)
    return chosen, rejected


def sigmoid_losses(margins: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta · h). Source: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7.

    Args:
        margins: h, [p] log (π / π_reference) of the chosen response, less that of the rejected one.
        beta: > 0.
    """
    return -F.logsigmoid(beta * margins)


def ipo_losses(margins: Tensor, beta: float) -> Tensor:
    """(h - 1 / (2 · beta))². Source: Azar et al. 2023 (arXiv 2310.12036), eq. 17. Args: ``sigmoid_losses``."""
    return (margins - 1.0 / (2.0 * beta)) ** 2


_PAIR_LOSSES: Mapping[str, Callable[[Tensor, float], Tensor]] = {"sigmoid": sigmoid_losses, "ipo": ipo_losses}


def _batch_metrics(batch: RolloutBatch, scores: Tensor, preference: Tensor, beta: float) -> dict[str, float]:
    """``objective/*`` over all responses, but ``scores_margin`` over the pairs that are trained."""
    log_ratios = batch.behaviour_logprobs - batch.scores["reference"]
    sequence_kl = float(summed_log_ratios(log_ratios, batch.response_mask).mean())
    chosen, rejected = chosen_and_rejected(scores, preference)
    is_pair = preference[::2] != 0
    return {
        **objective_metrics(batch, scores, sequence_kl, beta),
        "objective/scores_margin": float(masked_mean(chosen - rejected, is_pair)),
        "oppo/tie_frac": float((scores[::2] == scores[1::2]).float().mean()),
        "val/contain_eos_token": float(batch.is_stopped.float().mean()),
        "beta": beta,
    }
