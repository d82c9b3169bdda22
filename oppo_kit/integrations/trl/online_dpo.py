"""Online DPO by TRL's trainer, on batches of the overlap engine: pairs, a batch of them per micro-step.

    data loader ─► inputs ─ checked against ─► draws k·B … (k+1)·B - 1
                                                  │
    engine: B + Δ pairs in the air ─ the first B that end ─► the stock training_step: rewards, choice, loss, backward
        ▲                                                                                     │
        └──── commit: at the next micro-step, or at the end of the update, with its weights ◄─┘

B is ``per_device_train_batch_size``. DPO's loss reads no log-probs of sampling, so pairs that older weights began need
no correction; they are pairs of a slightly older policy.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from oppo_kit.backends.forward import context_tokens
from oppo_kit.backends.sampler import Truncation
from oppo_kit.checkpoint import read_state, write_state
from oppo_kit.config import OverlapConfig
from oppo_kit.errors import DataError
from oppo_kit.integrations.trl.compatibility import require_attributes, require_methods, require_trl
from oppo_kit.integrations.trl.pairs import (
    PAIR,
    RowLoader,
    drop_last,
    in_blocks,
    padded,
    refuse_delta,
    rows_of,
)
from oppo_kit.integrations.trl.passes import run_passes
from oppo_kit.integrations.trl.prompts import ReplayedPrompts, Rounds, Row, replay_loader
from oppo_kit.integrations.trl.refusals import (
    checked_overlap,
    refuse_arguments,
    refuse_common_settings,
    refuse_model,
    refuse_processor,
    refuse_prompt,
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

require_trl()

import trl  # noqa: E402
from trl.data_utils import maybe_apply_chat_template  # noqa: E402
from trl.experimental.online_dpo import OnlineDPOTrainer  # noqa: E402

STATE_NAME = "oppo_kit.pt"
"""File in a checkpoint folder: what is in the air, and where the data stands."""

require_methods(
    OnlineDPOTrainer,
    {
        "train": ("resume_from_checkpoint",),
        "training_step": ("model", "inputs", "num_items_in_batch"),
        "get_train_dataloader": (),
        "log": ("logs", "start_time"),
        "_generate": ("model", "prompts", "images"),
        "_forward": (
            "model",
            "prompt_ids",
            "prompt_mask",
            "completion_ids",
            "completion_mask",
            "vision_inputs",
        ),
        "_calculate_rewards_from_functions": ("prompts", "completions", "completion_ids_list"),
        "_save_checkpoint": ("model", "trial"),
        "_load_optimizer_and_scheduler": ("checkpoint",),
        "_get_output_dir": ("trial",),
    },
)
_ATTRIBUTES = ("_tokenizer", "generation_config", "reward_funcs", "reward_processing_classes", "max_length")
# Since 1.16 what is generated has a fifth part, the images'.
_HAS_IMAGE_PART = Version(trl.__version__).release[:2] >= (1, 16)
_logger = logging.getLogger(__name__)


# Its attributes are declared for all of transformers' models and processors at once.
_Stock: Any = OnlineDPOTrainer


class OverlapOnlineDPOTrainer(_Stock):
    """``trl.experimental.online_dpo.OnlineDPOTrainer`` that trains the first pairs that end, and carries the others on.

    The constructor takes what ``OnlineDPOTrainer`` takes, ``overlap=OverlapConfig(...)``, and ``trims_padding`` (see
    ``OverlappingTrainer``). Losses, metrics, logs and Python reward functions are TRL's (None counts as 0 there), but
    that its sums over responses, ``objective/kl`` among them, also count padding, of which there is less here. Reward
    models score where and when ``overlap`` says. The micro-batch that an epoch ends with is left out if not full.

    Raises:
        ConfigError: a setting that cannot work, named.
        DataError: fewer prompts than a micro-batch.
    """

    def __init__(
        self, *args: Any, overlap: OverlapConfig | None = None, trims_padding: bool = True, **kwargs: Any
    ) -> None:
        self.overlap = checked_overlap(overlap)
        self._trims_padding = trims_padding
        arguments = _bound(super().__init__, args, kwargs)
        refuse_arguments(arguments)
        config = arguments.get("args")
        if config is not None:
            refuse_common_settings(config)
            refuse_delta(config.train_batch_size, self.overlap)
        if isinstance(arguments.get("reward_funcs"), list):
            # TRL writes into the caller's list.
            arguments = {**arguments, "reward_funcs": list(arguments["reward_funcs"])}
        super().__init__(**arguments)
        require_attributes(self, _ATTRIBUTES)
        refuse_processor(self.processing_class)
        refuse_model(self.model)
        refuse_idle_scorers(self.overlap, self.reward_funcs)
        drop_last(self.args, self.train_dataset)
        self._reward_tokenizers = [
            tokenizer
            for function, tokenizer in zip(self.reward_funcs, self.reward_processing_classes, strict=True)
            if isinstance(function, torch.nn.Module)
        ]
        if hasattr(self.train_dataset, "__len__"):
            self._refuse_prompt(self.train_dataset[0]["prompt"])
        self.overlap = settle_placement(self.overlap, self.accelerator.device)
        self._reward_models = RewardModels(
            self.reward_funcs,
            self.reward_processing_classes,
            policy_tokenizer=self._tokenizer,
            template_arguments={},
            overlap=self.overlap,
        )
        self._rollouts: TrainerRollouts | None = None
        self._trained_loader: Any = None
        self._micro_step = 0
        self._is_answering = False
        self._oppo_metrics: dict[str, list[float]] = {}
        self.add_callback(_CommitCallback(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock trainer's; scorers in threads and processes end with it, however it ends."""
        self._micro_step, self._trained_loader = 0, None
        try:
            return super().train(*args, **kwargs)
        finally:
            rollouts, self._rollouts = self._rollouts, None
            if rollouts is not None:
                rollouts.close()
                self._reward_models.take_back(self.accelerator.device)

    def get_train_dataloader(self) -> Any:
        """As the stock trainer's; the one that is trained from is remembered."""
        loader = super().get_train_dataloader()
        if self._trained_loader is None:
            self._trained_loader = loader
        return loader

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The stock trainer's on the pairs that ended first, in place of the loader's prompts.

        Raises:
            DataError: the loader brought no full micro-batch, or columns that cannot be taken row by row.
            ConfigError: it brought other prompts than were expected.
        """
        rows = rows_of(inputs)
        if len(rows) != self._num_pairs:
            raise DataError(
                f"the data loader brought {len(rows)} prompts where per_device_train_batch_size={self._num_pairs} were "
                "expected; let a stream's length be a multiple of it"
            )
        rollouts = self._start_rollouts()
        first = self._micro_step * self._num_pairs
        rollouts.prompts.forget_before(first)
        rollouts.prompts.check_order(first, rows, 1)
        self._commit()
        batch = rollouts.collect(self.state.global_step)
        chosen = [copy.deepcopy(dict(group.prompt.columns)) for group in batch.groups]
        swapped = {name: [row[name] for row in chosen] for name in chosen[0]}
        self._note(batch_metrics(batch, rollouts.engine))
        self._is_answering = True
        try:
            with self._reward_models.knowing(
                {name: in_blocks(scores) for name, scores in batch.scores.items()}
            ):
                loss = super().training_step(model, swapped, num_items_in_batch)
        finally:
            self._is_answering = False
        self._micro_step += 1
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the stock trainer's, with what is known of the batches since the last log of a loss."""
        if "loss" in logs:
            metrics, self._oppo_metrics = self._oppo_metrics, {}
            logs = logs | {name: sum(values) / len(values) for name, values in metrics.items()}
        super().log(logs, start_time)

    @property
    def _num_pairs(self) -> int:
        return self.args.train_batch_size

    @property
    def _rounds(self) -> Rounds:
        loader = self.get_train_dataloader() if self._trained_loader is None else self._trained_loader
        return Rounds(
            per_round=1,
            accumulation=self.args.gradient_accumulation_steps,
            per_epoch=len(loader) if hasattr(self.train_dataset, "__len__") else None,
        )

    # Generation and scores

    def _generate(self, model: Any, prompts: Any, images: Any = None) -> Any:
        if not self._is_answering or self._rollouts is None or self._rollouts.batch is None:
            return super()._generate(model, prompts, images)
        encoded = [self._encode(prompt) for prompt in prompts]
        answers = self._rollouts.answers([ids for ids in encoded for _ in range(PAIR)])
        prompt_ids, prompt_mask = padded([ids[::-1] for ids in encoded], self._tokenizer.pad_token_id)
        answer_ids, answer_mask = padded(answers, self._tokenizer.pad_token_id)
        generated = (
            prompt_ids.flip(1).repeat(PAIR, 1),
            prompt_mask.flip(1).repeat(PAIR, 1),
            in_blocks(answer_ids),
            in_blocks(answer_mask),
        )
        on_device = tuple(tensor.to(self.accelerator.device) for tensor in generated)
        return (*on_device, None) if _HAS_IMAGE_PART else on_device

    def _forward(
        self,
        model: Any,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        vision_inputs: Any = None,
    ) -> Tensor:
        stock = super()._forward
        prompt_tokens = prompt_ids.shape[1]
        width = prompt_tokens + completion_ids.shape[1]
        # With prompts that are to be cut, how much is cut depends on the padding.
        if not (self._trims_padding and self._is_answering) or width > self.max_length:
            return stock(model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs)

        def one_pass(rows: Tensor, length: int) -> tuple[Tensor]:
            answers = completion_ids[rows, :length], completion_mask[rows, :length]
            return (stock(model, prompt_ids[rows], prompt_mask[rows], *answers),)

        logprobs: Any = run_passes(
            one_pass, completion_mask, prompt_tokens=prompt_tokens, max_tokens=len(prompt_ids) * width
        )[0]
        return logprobs

    def _calculate_rewards_from_functions(
        self, prompts: Any, completions: Any, completion_ids_list: Any, **reward_kwargs: Any
    ) -> Tensor:
        rewards = super()._calculate_rewards_from_functions(
            prompts, completions, completion_ids_list, **reward_kwargs
        )
        if self._is_answering and self._rollouts is not None:
            self._rollouts.tell_rewards(rewards.view(PAIR, -1).t().reshape(-1))
        return rewards

    def _encode(self, prompt: Any) -> list[int]:
        text = maybe_apply_chat_template({"prompt": prompt}, self.processing_class)["prompt"]
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _prompt_ids(self, row: Row) -> list[int]:
        self._refuse_prompt(row["prompt"])
        return self._encode(row["prompt"])

    def _refuse_prompt(self, prompt: Any) -> None:
        refuse_prompt(prompt, self._tokenizer, self._reward_tokenizers)

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
        prompts = ReplayedPrompts(
            self._replay,
            self._prompt_ids,
            max_new_tokens=args.max_new_tokens,
            limit_name="max_new_tokens",
            context=context_tokens(self.model.config),
        )
        stops = self.generation_config.eos_token_id
        return TrainerRollouts(
            self.model,
            prompts,
            sampling=SamplingSettings(
                temperature=args.temperature,
                stop_token_ids=tuple(
                    stops if isinstance(stops, Sequence) else [] if stops is None else [stops]
                ),
                seed=args.seed,
                truncation=Truncation(max(args.top_k or 0, 0), args.top_p, args.min_p or 0.0),
                dtype=generator_dtype(bf16=args.bf16, fp16=args.fp16),
            ),
            scorers=scorers,
            batch_size=self._num_pairs,
            group_size=PAIR,
            num_rounds=self._rounds.num_rounds(self.state.max_steps),
            overlap=self.overlap,
        )

    def _replay(self) -> Any:
        return replay_loader(
            lambda: RowLoader(OnlineDPOTrainer.get_train_dataloader(self)),
            batch_size=self._num_pairs,
            group_size=1,
            repeats=1,
        )

    def _commit(self) -> None:
        """Tell the engine that the last batch is trained, if there is one."""
        report = None if self._rollouts is None else self._rollouts.commit(self.state.global_step)
        if report is not None:
            self._note(report_metrics(report))

    def _note(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._oppo_metrics.setdefault(name, []).append(value)

    # Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Before the rest: a checkpoint that looks whole must have it.
        if self._rollouts is not None and self.args.should_save and not self.args.save_only_model:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            state = {"micro_step": self._micro_step, "rollouts": self._rollouts.state_dict()}
            write_state(Path(self._get_output_dir(trial=trial)) / name / STATE_NAME, state)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        rollouts = self._start_rollouts()
        file = Path(checkpoint) / STATE_NAME
        if file.exists():
            state = read_state(file, ("micro_step", "rollouts"))
            self._micro_step = state["micro_step"]
            rollouts.load_state_dict(state["rollouts"])
            return
        self._micro_step = self._rounds.num_micro_steps(self.state.global_step)
        rollouts.skip_to(self._micro_step)
        _logger.warning(
            "%s has no %s, so it is taken as a checkpoint of TRL's own trainer: what was in the air is not known, and "
            "training goes on with prompt %d",
            checkpoint,
            STATE_NAME,
            self._micro_step * self._num_pairs,
        )


class _CommitCallback(TrainerCallback):
    """At the end of an update, when the weights are new and nothing is logged or saved yet."""

    def __init__(self, trainer: OverlapOnlineDPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._trainer._commit()


def _bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; those that do not fit are the function's own error."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
