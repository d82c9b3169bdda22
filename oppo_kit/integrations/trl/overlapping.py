"""What TRL's group trainers (GRPO, RLOO) need to train batches of the overlap engine; the trainers add what differs.

    data loader ─► inputs ─ checked against ─► draws k·B … (k+1)·B - 1
                                                  │
    engine: B + Δ groups in the air ─ the first B that end ─► rows, token ids, scores ─► the stock trainer's own
        ▲                                                                               rewards, advantages, loss
        └──── commit: new weights, at the end of the update that used up the batch ◄────────────┘

The stock trainer keeps its loop. It is given other rows than its loader's, and their responses; where some of these
were begun by older weights, also the log-probs under which they were sampled, so that ratios are taken against those.
"""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from oppo_kit.backends.forward import context_tokens
from oppo_kit.backends.sampler import Truncation
from oppo_kit.checkpoint import read_state, write_state
from oppo_kit.config import OverlapConfig
from oppo_kit.integrations.trl.compatibility import require_attributes
from oppo_kit.integrations.trl.passes import LOGPROB_METHODS, ShortPasses
from oppo_kit.integrations.trl.prompts import ReplayedPrompts, Rounds, Row, replay_loader
from oppo_kit.integrations.trl.refusals import (
    checked_overlap,
    refuse_arguments,
    refuse_data,
    refuse_model,
    refuse_processor,
    refuse_prompt,
    refuse_settings,
)
from oppo_kit.integrations.trl.rewards import RewardModels, refuse_idle_scorers
from oppo_kit.integrations.trl.rollouts import (
    SamplingSettings,
    TrainerRollouts,
    batch_metrics,
    report_metrics,
)
from oppo_kit.integrations.trl.weights import generator_dtype
from oppo_kit.placement.placing import settle_placement
from oppo_kit.types import RolloutBatch

STATE_NAME = "oppo_kit.pt"
"""File in a checkpoint folder: what is in the air, and where the data stands."""

METHODS = LOGPROB_METHODS | {
    "train": ("resume_from_checkpoint",),
    "get_train_dataloader": (),
    "_prepare_inputs": ("generation_batch",),
    "_generate_and_score_completions": ("inputs",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_tokenize_prompts": ("prompts",),
    "_save_checkpoint": ("model", "trial"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_get_output_dir": ("trial",),
}
"""Of a stock trainer, for ``require_methods``."""

_ATTRIBUTES = (
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_tokenizer",
    "num_generations",
    "num_iterations",
    "reward_funcs",
    "reward_processing_classes",
    "reward_weights",
    "chat_template_kwargs",
)
_logger = logging.getLogger(__name__)


class OverlappingTrainer(ShortPasses):
    """To inherit from, before a trainer of TRL; see the module.

    A trainer says ``_anchor_name``, the key under which its loss finds the log-probs that ratios are taken against, and
    ``_as_anchor(behaviour_logprobs, mask)``: from [R, T], zero past a row's end, to its own form of them.

    Args:
        args, kwargs: as the stock trainer's.
        overlap: what overlaps; None: nothing, but the responses are the engine's.
        trims_padding: rows go through the policy and the reference by length, without most of the padding, which
            changes rounding only. False: as stock has them, to the bit.

    Raises:
        ConfigError: a setting that cannot work, named.
    """

    _anchor_name: ClassVar[str]

    def __init__(
        self, *args: Any, overlap: OverlapConfig | None = None, trims_padding: bool = True, **kwargs: Any
    ) -> None:
        self.overlap = checked_overlap(overlap)
        self._trims_padding = trims_padding
        arguments = _bound(super().__init__, args, kwargs)
        refuse_arguments(arguments)
        if arguments.get("args") is not None:
            refuse_settings(arguments["args"], self.overlap)
        super().__init__(*args, **kwargs)
        require_attributes(self, _ATTRIBUTES)
        refuse_settings(self.args, self.overlap)
        refuse_processor(self.processing_class)
        refuse_model(self.model)
        refuse_data(self.args, self.train_dataset)
        refuse_idle_scorers(self.overlap, self.reward_funcs)
        self._reward_tokenizers = [
            tokenizer
            for function, tokenizer in zip(self.reward_funcs, self.reward_processing_classes, strict=True)
            if isinstance(function, torch.nn.Module)
        ]
        if hasattr(self.train_dataset, "__len__"):
            self._refuse_prompt(self.train_dataset[0]["prompt"])
        self.overlap = settle_placement(self.overlap, self.accelerator.device)
        self.reward_funcs = list(self.reward_funcs)  # the caller's list stays as it is
        self._reward_models = RewardModels(
            self.reward_funcs,
            self.reward_processing_classes,
            policy_tokenizer=self._tokenizer,
            template_arguments=self.chat_template_kwargs,
            overlap=self.overlap,
        )
        self._rollouts: TrainerRollouts | None = None
        self._trained_loader: Any = None
        self._rewards_per_function: Tensor | None = None
        self._is_answering = False
        self.add_callback(_CommitCallback(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock trainer's; scorers in threads and processes end with it, however it ends."""
        self._step, self._buffered_inputs, self._trained_loader = 0, None, None
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_rollouts()

    def get_train_dataloader(self) -> Any:
        """As the stock trainer's; the one that is trained from is remembered."""
        loader = super().get_train_dataloader()
        if self._trained_loader is None:
            self._trained_loader = loader
        return loader

    @property
    def _rounds(self) -> Rounds:
        loader = self.get_train_dataloader() if self._trained_loader is None else self._trained_loader
        return Rounds(
            per_round=self.args.steps_per_generation * self.num_iterations,
            accumulation=self.args.gradient_accumulation_steps,
            per_epoch=len(loader) if hasattr(self.train_dataset, "__len__") else None,
        )

    @property
    def _prompts_per_round(self) -> int:
        return self.args.generation_batch_size // self.num_generations

    # Generation and scores

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        rollouts = self._start_rollouts()
        first = self._step // self._rounds.per_round * self._prompts_per_round
        rollouts.prompts.forget_before(first)
        on_cpu: Any = send_to_device(inputs, torch.device("cpu"))
        rollouts.prompts.check_order(first, on_cpu, self.num_generations)
        self._commit()
        batch = rollouts.collect(self.state.global_step)
        rows = [copy.deepcopy(dict(r.prompt.columns)) for group in batch.groups for r in group.rollouts]
        on_device: Any = send_to_device(rows, self.accelerator.device)
        output = self._scored_by_stock(batch, on_device)
        self._log_oppo(batch_metrics(batch, rollouts.engine))
        self._anchor(output, batch)
        return output

    def _scored_by_stock(self, batch: RolloutBatch, rows: list[dict[str, Any]]) -> dict[str, Any]:
        self._is_answering = True
        try:
            with self._reward_models.knowing(batch.scores):
                output = super()._generate_and_score_completions(rows)
        finally:
            self._is_answering = False
        if self._rollouts is not None and self._rewards_per_function is not None:
            self._rollouts.tell_rewards(_totals(self._rewards_per_function, self.reward_weights))
        return output

    def _answers(self, prompt_ids: list[list[int]]) -> list[list[int]] | None:
        """The chosen responses to these prompts; None: they are not ours to answer."""
        if not self._is_answering or self._rollouts is None:
            return None
        return self._rollouts.answers(prompt_ids)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._rewards_per_function = rewards if self._is_answering else None
        return rewards

    def _anchor(self, output: dict[str, Any], batch: RolloutBatch) -> None:
        """Let ratios of rows with tokens of older weights be taken against the log-probs of their sampling."""
        stale = (batch.response_mask & ~batch.is_current).any(1)
        if not stale.any():
            return
        mask = output["completion_mask"]
        behaviour = batch.behaviour_logprobs.new_zeros(mask.shape)
        behaviour[:, : batch.behaviour_logprobs.shape[1]] = batch.behaviour_logprobs
        behaviour = self._as_anchor(behaviour.to(mask.device), mask)
        stock = output.get(self._anchor_name)
        if stock is not None:
            rows = stale.to(mask.device).reshape(-1, *[1] * (behaviour.dim() - 1))
            behaviour = torch.where(rows, behaviour, stock)
        output[self._anchor_name] = behaviour

    # The engine's life

    def _start_rollouts(self) -> TrainerRollouts:
        if self._rollouts is None:
            scorers = self._reward_models.place(self.accelerator.device)
            try:
                self._rollouts = self._make_rollouts(scorers)
            except BaseException:
                for handle in scorers.values():
                    handle.close()
                self._reward_models.take_back(self.accelerator.device)
                raise
        return self._rollouts

    def _make_rollouts(self, scorers: dict[str, Any]) -> TrainerRollouts:
        args = self.args
        truncation = Truncation(max(args.top_k or 0, 0), args.top_p, args.min_p or 0.0)
        prompts = ReplayedPrompts(
            self._replay,
            self._prompt_ids,
            max_new_tokens=args.max_completion_length,
            limit_name="max_completion_length",
            context=context_tokens(self.model.config),
        )
        return TrainerRollouts(
            self.model,
            prompts,
            sampling=SamplingSettings(
                temperature=args.temperature,
                stop_token_ids=tuple(getattr(self, "eos_token_ids", None) or [self._tokenizer.eos_token_id]),
                seed=args.seed,
                truncation=truncation,
                dtype=generator_dtype(bf16=args.bf16, fp16=args.fp16),
            ),
            scorers=scorers,
            batch_size=self._prompts_per_round,
            group_size=self.num_generations,
            num_rounds=self._rounds.num_rounds(self.state.max_steps),
            overlap=self.overlap,
        )

    def _replay(self) -> Any:
        return replay_loader(
            super().get_train_dataloader,
            batch_size=self._prompts_per_round,
            group_size=self.num_generations,
            repeats=self._rounds.per_round,
        )

    def _prompt_ids(self, row: Row) -> list[int]:
        self._refuse_prompt(row["prompt"])
        return self._tokenize_prompts([row["prompt"]])[0][0]

    def _refuse_prompt(self, prompt: Any) -> None:
        refuse_prompt(prompt, self._tokenizer, self._reward_tokenizers)

    def _commit(self) -> None:
        """Tell the engine that the last batch is used up, if there is one."""
        if self._rollouts is None:
            return
        report = self._rollouts.commit(self.state.global_step)
        if report is not None:
            self._log_oppo(report_metrics(report))

    def _commit_if_used_up(self) -> None:
        if self._step % self._rounds.per_round == 0:
            self._commit()

    def _log_oppo(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _close_rollouts(self) -> None:
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is not None:
            rollouts.close()
            self._reward_models.take_back(self.accelerator.device)

    # Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Before the rest: a checkpoint that looks whole must have it.
        if self._rollouts is not None and self.args.should_save and not self.args.save_only_model:
            self._commit_if_used_up()
            folder = (
                Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            )
            buffered = None if self._rollouts.batch is None else self._buffered_inputs
            state = {
                "micro_step": self._step,
                "buffered": send_to_device(buffered, torch.device("cpu")),
                "rollouts": self._rollouts.state_dict(),
            }
            write_state(folder / STATE_NAME, state)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._advance_sampler()
        rollouts = self._start_rollouts()
        file = Path(checkpoint) / STATE_NAME
        if file.exists():
            state = read_state(file, ("micro_step", "buffered", "rollouts"))
            self._step = state["micro_step"]
            self._buffered_inputs = send_to_device(state["buffered"], self.accelerator.device)
            rollouts.load_state_dict(state["rollouts"])
            return
        self._step = self._rounds.num_micro_steps(self.state.global_step)
        num_rounds = self._step // self._rounds.per_round
        rollouts.skip_to(num_rounds)
        _logger.warning(
            "%s has no %s, so it is taken as a checkpoint of TRL's own trainer: what was in the air is not known, and "
            "training goes on with prompt %d",
            checkpoint,
            STATE_NAME,
            num_rounds * self._prompts_per_round,
        )

    def _advance_sampler(self) -> None:
        """Bring the sampler to the epoch that is gone on with: it has a new order each time, and knows no epoch."""
        updates = self._rounds.updates_per_epoch
        sampler = getattr(getattr(self._trained_loader, "batch_sampler", None), "sampler", None)
        for _ in range(self.state.global_step // updates if updates else 0):
            next(iter(sampler or ()), None)


class _CommitCallback(TrainerCallback):
    """At the end of an update, when the weights are new and nothing is logged or saved yet."""

    def __init__(self, trainer: OverlappingTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._trainer._commit_if_used_up()


def _bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; those that do not fit are the function's own error."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return dict(kwargs)


def _totals(rewards: Tensor, weights: Tensor) -> Tensor:
    """[R] weighted sum of [R, F] rewards; NaN where none is a number."""
    totals = (rewards * weights.to(rewards.device)).nansum(1)
    return totals.masked_fill(rewards.isnan().all(1), torch.nan)
