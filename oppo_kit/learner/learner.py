"""The update loop: epochs × mini-batches of groups × micro-batches by a token budget.

The gradient of an optimizer step is the same for every split into micro-batches: algorithms divide by the step's
totals, and micro-batches add up. Rows are sorted by length, so padding is hardly computed.

It does not know how advantages were made, nor that anything overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase, get_scheduler

from oppo_kit.backends.forward import probe_causal_model, token_values
from oppo_kit.config import LearnerConfig
from oppo_kit.errors import ConfigError, NonFiniteError, PartFailedError
from oppo_kit.learner.modules import ActorCritic
from oppo_kit.ops.batching import PaddedRows, length_sorted_batches, pad_prompts_and_responses
from oppo_kit.protocols import Algorithm, State
from oppo_kit.types import EFFECTIVE_SAMPLE, MicroBatch, RolloutBatch, TrainBatch

MakeOptimizers = Callable[[nn.Module], tuple[Optimizer, LRScheduler]]
"""From the module under training (``policy`` and ``critic`` inside) to an optimizer and its schedule."""


class AccelerateLearner:
    """Owns policy, critic, optimizer and learning-rate schedule.

    Args:
        policy: causal model, PEFT-wrapped or not; moved to the accelerator's device.
        critic: sequence classifier with one label, or None.
        config: optimizer settings.
        temperature: of the sampling distribution.
        num_steps: engine steps in all; the learning rate moves once per engine step.
        seed: of the mini-batch order.
        accelerator: with its trackers and precision; None: a plain one.
        make_optimizers: instead of the AdamW and the schedule of ``config``.

    Raises:
        ConfigError: more than one process.
        ModelError: the policy's logits are no function of its last hidden states.
    """

    def __init__(
        self,
        policy: nn.Module,
        critic: nn.Module | None,
        *,
        config: LearnerConfig,
        temperature: float,
        num_steps: int,
        seed: int = 0,
        accelerator: Accelerator | None = None,
        make_optimizers: MakeOptimizers | None = None,
    ) -> None:
        self.accelerator = accelerator or Accelerator()
        if self.accelerator.num_processes > 1:
            raise ConfigError(
                f"{self.accelerator.num_processes} processes were started, but training runs in one; "
                "start it with plain python instead of `accelerate launch` or `torchrun`"
            )
        probe_causal_model(policy)
        self.config = config
        module = ActorCritic(policy, critic, temperature=temperature)
        optimizer, scheduler = make_optimizers(module) if make_optimizers else (_adamw(module, config), None)
        self._module, self._optimizer = self.accelerator.prepare(module, optimizer)
        # Never prepared: accelerate would advance it once per optimizer step, and skip when accumulating.
        self._scheduler = scheduler or get_scheduler(
            config.scheduler_name,
            self._optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=num_steps,
        )
        self._order = torch.Generator().manual_seed(seed)
        self._num_episodes = 0

    @property
    def policy(self) -> nn.Module:
        """The policy under training."""
        return self.accelerator.unwrap_model(self._module).policy

    @property
    def critic(self) -> nn.Module | None:
        """The critic under training."""
        return self.accelerator.unwrap_model(self._module).critic

    @property
    def optimizer(self) -> Optimizer:
        """What steps the weights."""
        return self._optimizer

    @property
    def scheduler(self) -> LRScheduler:
        """The learning rate's schedule, which moves once per engine step."""
        return self._scheduler

    @torch.no_grad()
    def compute_values(self, batch: RolloutBatch) -> Tensor:
        """[R, T] critic values under the current weights, zero past a row's end, on the CPU."""
        critic = self.critic
        if critic is None:
            raise ConfigError("the algorithm needs a critic, but the learner has none; pass critic=")
        values = torch.zeros_like(batch.behaviour_logprobs)
        for indices in self._micro_batches(batch, list(range(batch.num_rows)), rows_together=1):
            rows = self._rows(batch, indices)
            mask = rows.response_mask
            values[indices, : rows.num_response_tokens] = torch.where(
                mask, token_values(critic, rows), 0.0
            ).cpu()
        return values

    def update(self, batch: TrainBatch, algorithm: Algorithm) -> dict[str, float]:
        """All epochs and mini-batches; metrics are means over the optimizer steps taken.

        ``oppo/behaviour_gap_mean`` and ``_max`` compare the log-probs of tokens that the current weights sampled, in
        the first mini-batch, with those that the generator recorded: rounding, unless the generator samples from
        something else than the policy under training. ``oppo/effective_sample_frac`` is (Σ r)² / (n Σ r²) over the n
        tokens of that mini-batch, r = π / π_behaviour: 1 without staleness.

        Raises:
            NonFiniteError: the first loss or gradient is not finite; no weight has changed. A later one skips its
                mini-batch and is counted in ``oppo/skipped_mini_batches``.
            PartFailedError: the weights are not finite after the update.
        """
        totals: dict[str, float] = {}
        gaps: list[_Gap] = []
        num_taken = num_skipped = 0
        for _ in range(algorithm.num_epochs):
            parts = self._mini_batches(batch, algorithm)
            for rows in parts:
                counts = _step_counts(batch, rows, num_steps=len(parts))
                metrics = self._optimizer_step(batch, rows, counts, algorithm, None if num_taken else gaps)
                if metrics is None and not num_taken:
                    raise NonFiniteError(
                        "the loss or its gradient is not finite; the batch is left out, no weight has changed"
                    )
                if metrics is None:
                    num_skipped += 1
                    continue
                num_taken += 1
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value
        self._check_weights()
        learning_rate = self._scheduler.get_last_lr()[0]
        self._scheduler.step()
        self._num_episodes += batch.rollouts.num_rows
        means = {name: total / num_taken for name, total in totals.items()}
        extra = {"lr": learning_rate, "episode": float(self._num_episodes)} | _gap_metrics(gaps)
        if num_skipped:
            extra["oppo/skipped_mini_batches"] = float(num_skipped)
        return means | extra

    def save_pretrained(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Policy and tokenizer in Hugging Face format, the critic in ``critic/`` below."""
        policy: Any = self.policy
        policy.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        critic: Any = self.critic
        if critic is not None:
            critic.save_pretrained(folder / "critic")

    def state_dict(self) -> State:
        """Weights under training, optimizer, schedule, mini-batch order."""
        return {
            "module": self.accelerator.unwrap_model(self._module).state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "order": self._order.get_state(),
            "num_episodes": self._num_episodes,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from ``state_dict``."""
        self.accelerator.unwrap_model(self._module).load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self._order.set_state(state["order"])
        self._num_episodes = state["num_episodes"]

    def _optimizer_step(
        self,
        batch: TrainBatch,
        rows: list[int],
        counts: _StepCounts,
        algorithm: Algorithm,
        gaps: list[_Gap] | None,
    ) -> dict[str, float] | None:
        """One step over these rows; None, with nothing changed, if loss or gradient is not finite.

        ``gaps``, if given, takes policy less behaviour log-probs.
        """
        totals: dict[str, float] = {}
        losses: list[float] = []
        # All accelerators of a process share this: where somebody's accumulation was broken off in the middle, it stays
        # false, and neither gradients are cleared nor is a step taken.
        self.accelerator.sync_gradients = True
        self._optimizer.zero_grad()
        rows_together = batch.rollouts.group_size if algorithm.needs_whole_groups else 1
        for indices in self._micro_batches(batch.rollouts, rows, rows_together=rows_together):
            padded = self._rows(batch.rollouts, indices)
            micro_batch = self._micro_batch(batch, indices, padded, counts)
            outputs = self._module(padded)
            if gaps is not None:
                gaps.append(_behaviour_gap(batch.rollouts, indices, outputs.policy_logprobs))
            loss, metrics = algorithm.loss(micro_batch, outputs)
            self.accelerator.backward(loss)
            losses.append(float(loss.detach()))
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        norm = self._clip_gradient()
        if not (torch.isfinite(torch.tensor(losses)).all() and torch.isfinite(norm)):
            self._optimizer.zero_grad()
            return None
        self._optimizer.step()
        self._optimizer.zero_grad()
        return totals | {"grad_norm": float(norm)}

    def _check_weights(self) -> None:
        """Never go on, and never save, with weights that are not finite."""
        weights = [parameter.detach() for parameter in self._module.parameters() if parameter.requires_grad]
        if not torch.isfinite(nn.utils.get_total_norm(weights)):
            raise PartFailedError(
                "the update made weights that are NaN or infinite; lower the learning rate "
                f"({self.config.learning_rate}), and go on from the last checkpoint"
            )

    def _clip_gradient(self) -> Tensor:
        limit = float("inf") if self.config.max_grad_norm is None else self.config.max_grad_norm
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        norm = self.accelerator.clip_grad_norm_(parameters, limit)
        return torch.zeros(()) if norm is None else norm

    def _mini_batches(self, batch: TrainBatch, algorithm: Algorithm) -> list[list[int]]:
        """Row indices per optimizer step, in a fresh random order: of rows, or of groups where the loss needs them.

        Members of a group have much in common, so steps that each see some of every group vary less.
        """
        together = batch.rollouts.group_size if algorithm.needs_whole_groups else 1
        order = torch.randperm(batch.rollouts.num_rows // together, generator=self._order)
        return [
            [unit * together + member for unit in part.tolist() for member in range(together)]
            for part in order.tensor_split(algorithm.num_mini_batches)
            if len(part)
        ]

    def _micro_batches(self, batch: RolloutBatch, rows: list[int], *, rows_together: int) -> list[list[int]]:
        """Row indices per forward pass; so many neighbours stay side by side, and count as long as the longest."""
        lengths = [len(batch.prompt_ids[row]) + int(batch.response_lengths[row]) for row in rows]
        starts = range(0, len(rows), rows_together)
        longest = [max(lengths[start : start + rows_together]) for start in starts]
        return [
            [row for unit in units for row in rows[unit * rows_together : (unit + 1) * rows_together]]
            for units in length_sorted_batches(longest, self.config.micro_batch_tokens // rows_together)
        ]

    def _rows(self, batch: RolloutBatch, indices: list[int]) -> PaddedRows:
        lengths = batch.response_lengths[indices].tolist()
        return pad_prompts_and_responses(
            [batch.prompt_ids[index] for index in indices],
            [
                batch.response_ids[index, :length].tolist()
                for index, length in zip(indices, lengths, strict=True)
            ],
        ).to(self.accelerator.device)

    def _micro_batch(
        self, batch: TrainBatch, indices: list[int], rows: PaddedRows, counts: _StepCounts
    ) -> MicroBatch:
        width = batch.rollouts.response_ids.shape[1]

        def cut(tensor: Tensor) -> Tensor:
            chosen = tensor[indices]
            if tensor.dim() > 1 and tensor.shape[1] == width:
                chosen = chosen[:, : rows.num_response_tokens]
            return chosen.to(self.accelerator.device)

        return MicroBatch(
            mask=rows.response_mask if batch.loss_mask is None else cut(batch.loss_mask),
            tensors={name: cut(tensor) for name, tensor in batch.tensors.items()},
            num_step_tokens=counts.tokens,
            num_step_rows=counts.rows,
            mean_step_tokens=counts.mean_tokens,
        )


def _adamw(module: nn.Module, config: LearnerConfig) -> Optimizer:
    return torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


class _StepCounts(NamedTuple):
    """Of one optimizer step: tokens that the loss reads, rows that count; and such tokens a step on average."""

    tokens: int
    rows: int
    mean_tokens: float


def _step_counts(batch: TrainBatch, rows: list[int], *, num_steps: int) -> _StepCounts:
    lengths = batch.rollouts.response_lengths
    num_read = lengths if batch.loss_mask is None else batch.loss_mask.sum(1)
    is_counted = (num_read > 0) | (lengths == 0) if batch.row_mask is None else batch.row_mask
    return _StepCounts(
        tokens=int(num_read[rows].sum()),
        rows=int(is_counted[rows].sum()),
        mean_tokens=float(num_read.sum()) / num_steps,
    )


class _Gap(NamedTuple):
    """[n] policy less behaviour log-probs of some tokens, and which of them the batch's own version sampled."""

    logratios: Tensor
    is_current: Tensor


def _behaviour_gap(batch: RolloutBatch, indices: list[int], policy_logprobs: Tensor) -> _Gap:
    width = policy_logprobs.shape[1]
    mask = batch.response_mask[indices, :width]
    logratios = policy_logprobs.detach().cpu() - batch.behaviour_logprobs[indices, :width]
    return _Gap(logratios[mask], batch.is_current[indices, :width][mask])


def _gap_metrics(gaps: list[_Gap]) -> dict[str, float]:
    if not gaps:
        return {}
    logratios = torch.cat([gap.logratios for gap in gaps]).double()
    current = logratios[torch.cat([gap.is_current for gap in gaps])].abs()
    metrics: dict[str, float] = {}
    if logratios.numel():
        # Shifted, which the quotient does not see, so that no ratio overflows.
        ratios = (logratios - logratios.max()).exp()
        metrics[EFFECTIVE_SAMPLE] = float(ratios.sum() ** 2 / (ratios.square().sum() * ratios.numel()))
    if current.numel():
        metrics["oppo/behaviour_gap_mean"] = float(current.mean())
        metrics["oppo/behaviour_gap_max"] = float(current.max())
    return metrics
