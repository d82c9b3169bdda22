"""PPO under the interface of TRL 1.12's ``PPOTrainer``, on our engine. Needs no TRL, whose 1.13 removed it.

The trainer owns what surrounds the engine's steps: callbacks, logs, checkpoints, samples. What a step is, the engine
and the registered algorithm ``ppo`` know.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler, ExportableState, PrinterCallback
from transformers.trainer_utils import TrainOutput, get_last_checkpoint, rotate_checkpoints

from oppo_kit.build import build_engine
from oppo_kit.checkpoint import load_checkpoint, save_checkpoint
from oppo_kit.config import OverlapConfig
from oppo_kit.errors import ConfigError, StateError
from oppo_kit.integrations.trl.ppo_config import (
    check_arguments,
    resolved_arguments,
    stop_ids_of,
    to_train_config,
)
from oppo_kit.integrations.trl.ppo_log import StepLog
from oppo_kit.integrations.trl.ppo_parts import (
    PROMPT,
    check_models,
    longest_prompt,
    make_accelerator,
    make_prompts,
    optimizer_factory,
    prepared_policy,
    without_dropout,
)
from oppo_kit.integrations.trl.ppo_samples import answer, print_samples
from oppo_kit.integrations.trl.refusals import checked_overlap
from oppo_kit.registry import create_algorithm

_logger = logging.getLogger(__name__)

_STATE_NAME = "trainer_state.json"
_ARGUMENTS_NAME = "training_args.bin"


@dataclass
class OverlapPPOState(TrainerState):
    """What callbacks see: ``transformers.TrainerState`` and the responses trained so far, as in TRL."""

    episode: int = 0


class OverlapPPOTrainer:
    """PPO with the constructor and the log of TRL 1.12's ``PPOTrainer``; ``overlap`` says what runs beside what.

    Without ``overlap`` nothing overlaps. Several processes, DeepSpeed, FSDP and pushing to the hub are refused.

    Args:
        args: ``OverlapPPOConfig``, or TRL 1.12's ``PPOConfig``; a copy is kept as ``trainer.args``.
        processing_class: the policy's tokenizer.
        model: causal language model, trained in place, PEFT-wrapped or not.
        ref_model: the reference; None: the policy as it is, of a PEFT model without its adapter.
        reward_model: sequence classifier with one label.
        train_dataset: rows with ``input_ids`` as for TRL, or else ``prompt``: text or messages.
        value_model: sequence classifier with one label that the critic starts from, trained in place.
        data_collator: run on each row by itself; one that only pads is not needed.
        eval_dataset: prompts whose answers are printed ``num_sample_generations`` times.
        optimizers: optimizer and schedule; None: as ``transformers.Trainer`` makes them.
        callbacks: beside the usual ones and those of ``args.report_to``.
        peft_config: wraps the policy.
        overlap: which stages overlap, and how.
        reward_processing_class: the reward model's tokenizer. With another vocabulary than the policy's, the reward
            model reads text, through its own chat template where prompts are messages.

    Attributes:
        model: the policy under training; callbacks have it too. TRL has a wrapper of policy and critic here.
        value_model: the critic under training.
        engine: see ``OverlapEngine``.
        state: step, episode, log history.

    Raises:
        ConfigError: an argument or a combination that cannot work.
        DataError: prompts that cannot be used.
        ModelError: a model that cannot be served.

    Deviations from TRL's trainer, beside those of the algorithm ``ppo`` (where the score stands, validity by lengths,
    means over an optimizer step's tokens, ``missing_eos_penalty`` by the stop token):

    - Responses end where their stop token is sampled; TRL samples on and cuts afterwards.
    - ``max_grad_norm``, ``bf16``, ``max_steps`` (steps in all) and ``logging_steps`` mean what ``TrainingArguments``
      says; TRL's loop does not read them. A log is the mean since the last one; what is left is logged at the end.
    - Δ > 0 trains the prompts of an epoch in another order. A data set that batches do not divide goes on within a
      batch; TRL leaves its rest out, and never ends where it is smaller than one.
    - A micro-batch is a budget of tokens, that of ``per_device_train_batch_size`` rows of full length.
    - Checkpoints hold the critic and everything else that ``train(resume_from_checkpoint=…)`` needs to go on to the
      bit; TRL cannot resume.
    - ``on_step_begin``, ``on_epoch_begin`` and ``on_epoch_end`` are called too, and ``save_strategy='epoch'`` works.
    - Samples are printed, not sent to trackers.
    """

    def __init__(
        self,
        args: Any,
        processing_class: PreTrainedTokenizerBase,
        model: Any,
        ref_model: Any,
        reward_model: Any,
        train_dataset: Any,
        value_model: Any,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        peft_config: Any = None,
        *,
        overlap: OverlapConfig | None = None,
        reward_processing_class: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if not isinstance(processing_class, PreTrainedTokenizerBase):
            raise ConfigError(
                f"processing_class is a {type(processing_class).__name__}; pass the policy's tokenizer: images and "
                "audio are not read"
            )
        checked_overlap(overlap)
        check_arguments(args)
        check_models(reward_model, value_model, model)
        self.processing_class = processing_class
        prompts = make_prompts(
            train_dataset, processing_class, data_collator, args, name="train_dataset", shuffle=True
        )
        self.args = resolved_arguments(args, num_prompts=len(prompts))
        longest = longest_prompt(prompts, model, self.args)
        self._eval_prompts = None
        if eval_dataset is not None:
            self._eval_prompts = make_prompts(
                eval_dataset, processing_class, data_collator, args, name="eval_dataset", shuffle=False
            )
            longest_prompt(self._eval_prompts, model, self.args)
        config = to_train_config(
            self.args, overlap, stop_ids=stop_ids_of(args, processing_class), longest_prompt=longest
        )
        make_optimizers = optimizer_factory(self.args, optimizers)
        algorithm = create_algorithm(config.algo, config.algo_config)
        accelerator = make_accelerator(self.args)
        policy, reference = prepared_policy(
            model, ref_model, peft_config, self.args, is_shared=config.overlap.scorer_device is None
        )
        self._log = StepLog(algorithm)
        self.engine = build_engine(
            config,
            policy=policy,
            reference=reference,
            tokenizer=processing_class,
            prompts=prompts,
            reward=without_dropout(reward_model),
            critic=without_dropout(value_model),
            reward_tokenizer=reward_processing_class,
            prompt_column=PROMPT,
            algorithm=algorithm,
            accelerator=accelerator,
            make_optimizers=make_optimizers,
        )
        self.accelerator = accelerator
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._num_prompts = len(prompts)
        self._stop_ids = config.sampling.stop_token_ids or ()
        self._is_closed = False
        self.control = TrainerControl()
        self.state = OverlapPPOState()
        self.callback_handler = self._make_callbacks(callbacks or ())
        self.state.stateful_callbacks = self._callback_states()
        if self.args.should_save:
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    @property
    def model(self) -> Any:
        """The policy under training."""
        return self.engine.learner.policy

    @property
    def value_model(self) -> Any:
        """The critic under training."""
        return self._learner.critic

    @property
    def optimizer(self) -> Any:
        """Of policy and critic."""
        return self._learner.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """Moves once per step."""
        return self._learner.scheduler

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """As ``transformers.Trainer``'s."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """As ``transformers.Trainer``'s."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """As ``transformers.Trainer``'s."""
        self.callback_handler.remove_callback(callback)

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Train to the end, or until a callback stops it; then the scorers' placements are closed.

        Args:
            resume_from_checkpoint: a folder ``checkpoint-<step>``, or True for the last one in ``args.output_dir``.

        Returns:
            steps done, the mean loss and the seconds of this call. TRL returns None.

        Raises:
            StateError: it was called before, or there is no checkpoint that fits.
            PartFailedError: generator, scorer or learner failed.
        """
        if self._is_closed:
            raise StateError(
                "this trainer has trained; make a new one, and go on with train(resume_from_checkpoint=…)"
            )
        try:
            self._begin(resume_from_checkpoint)
            start_s = time.monotonic()
            losses = self._train(start_s)
        finally:
            self.close()
        runtime_s = time.monotonic() - start_s
        loss = sum(losses) / len(losses) if losses else 0.0
        return TrainOutput(self.state.global_step, loss, {"train_runtime": runtime_s, "train_loss": loss})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:  # noqa: ARG002
        """Send numbers to ``state.log_history`` and all callbacks, trackers among them."""
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Policy (of a PEFT model the adapter), tokenizer and arguments; the critic in ``critic/`` below."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.learner.save_pretrained(folder, self.processing_class)
        torch.save(self.args, folder / _ARGUMENTS_NAME)

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]]:
        """Answer ``eval_dataset`` greedily and print the first answers with their scores.

        Args:
            sampling: only the first ``per_device_eval_batch_size`` prompts.

        Returns:
            ``query``, ``model response`` and ``score`` of each; nothing without ``eval_dataset``.
        """
        prompts = self._eval_prompts
        if prompts is None:
            return []
        num_prompts = len(prompts)
        if sampling:
            num_prompts = min(num_prompts, self.args.per_device_eval_batch_size)
        samples = answer(
            [prompts.draw(index) for index in range(num_prompts)],
            self.model,
            self.processing_class,
            self.engine.scorers["reward"],
            stop_ids=self._stop_ids,
            batch_size=self.args.per_device_eval_batch_size,
        )
        print_samples(samples)
        return samples

    def close(self) -> None:
        """End the scorers' placements; ``train`` does so itself. Safe to call twice."""
        self._is_closed = True
        self.engine.close()

    @property
    def _learner(self) -> Any:
        return self.engine.learner

    def _make_callbacks(self, callbacks: Sequence[Any]) -> CallbackHandler:
        printer = PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK
        reporting = get_reporting_integration_callbacks(self.args.report_to)
        return CallbackHandler(
            [*DEFAULT_CALLBACKS, *reporting, *callbacks, printer],
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )

    def _begin(self, checkpoint: str | Path | bool | None) -> None:
        """Load a checkpoint, and fill in what callbacks expect of the state."""
        if checkpoint is not None and checkpoint is not False:
            self._resume(self._checkpoint_folder(checkpoint))
        args, state = self.args, self.state
        state.max_steps = args.num_total_batches
        state.num_train_epochs = math.ceil(args.total_episodes / self._num_prompts)
        state.compute_steps(args, state.max_steps)

    def _train(self, start_s: float) -> list[float]:
        """The loop; returns the loss of every step."""
        args, engine, handler = self.args, self.engine, self.callback_handler
        losses: list[float] = []
        num_before = self.state.episode
        self.control = handler.on_train_begin(args, self.state, self.control)
        self.control = handler.on_epoch_begin(args, self.state, self.control)
        while engine.num_steps_done < engine.num_steps and not self.control.should_training_stop:
            self.control = handler.on_step_begin(args, self.state, self.control)
            report = engine.step(engine.collect())
            self._count()
            episodes_per_s = (self.state.episode - num_before) / max(time.monotonic() - start_s, 1e-9)
            metrics = self._log.add(report, episode=self.state.episode, episodes_per_s=episodes_per_s)
            if "loss/policy_avg" in metrics:
                losses.append(metrics["loss/policy_avg"] + args.vf_coef * metrics["loss/value_avg"])
            self.control = handler.on_step_end(args, self.state, self.control)
            self._follow(has_epoch_ended=self._has_epoch_ended())
        if self._log.has_news and args.logging_strategy != "no":
            self.log(self._log.take_means())
        self.control = handler.on_train_end(args, self.state, self.control)
        if self.control.should_save:
            self._save()
        return losses

    def _count(self) -> None:
        self.state.global_step = self.engine.num_steps_done
        self.state.episode = self.state.global_step * self.args.batch_size
        self.state.epoch = self.state.episode / self._num_prompts

    def _has_epoch_ended(self) -> bool:
        previous = self.state.episode - self.args.batch_size
        return self.state.episode // self._num_prompts > previous // self._num_prompts

    def _follow(self, *, has_epoch_ended: bool) -> None:
        """Do what callbacks have asked for at the end of a step."""
        args, handler = self.args, self.callback_handler
        if has_epoch_ended:
            self.control = handler.on_epoch_end(args, self.state, self.control)
        if self.control.should_log:
            self.log(self._log.take_means())
        if self.control.should_save:
            self._save()
        if has_epoch_ended:
            self.control = handler.on_epoch_begin(args, self.state, self.control)
        if args.num_sample_generations > 0:
            frequency = max(1, args.num_total_batches // args.num_sample_generations)
            if (self.state.global_step - 1) % frequency == 0:
                self.generate_completions(sampling=True)

    def _save(self) -> None:
        """A folder ``checkpoint-<step>`` from which ``train`` can go on."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.save_model(folder)
        if not self.args.save_only_model:
            save_checkpoint(folder, self.engine)
        self.state.stateful_callbacks = self._callback_states()
        self.state.save_to_json(str(folder / _STATE_NAME))
        rotate_checkpoints(self.args.output_dir, self.args.save_total_limit)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _checkpoint_folder(self, checkpoint: str | Path | bool) -> Path:
        output_dir = Path(self.args.output_dir)
        folder = checkpoint
        if checkpoint is True:
            folder = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
        if not isinstance(folder, str | Path) or not (Path(folder) / _STATE_NAME).is_file():
            raise StateError(
                f"resume_from_checkpoint={checkpoint!r}: there is no checkpoint of this trainer in "
                f"{folder or output_dir}; pass a folder checkpoint-<step>, or leave it out to start anew"
            )
        return Path(folder)

    def _resume(self, folder: Path) -> None:
        load_checkpoint(folder, self.engine)
        self.state = OverlapPPOState.load_from_json(str(folder / _STATE_NAME))
        _logger.info("going on from %s at step %d", folder, self.state.global_step)
        if not self.args.restore_callback_states_from_checkpoint:
            return
        states: Any = self.state.stateful_callbacks
        for callback in self.callback_handler.callbacks:
            saved = states.get(type(callback).__name__, {})
            for name, value in saved.get("attributes", {}).items():
                setattr(callback, name, value)

    def _callback_states(self) -> Any:
        callbacks = [*self.callback_handler.callbacks, self.control]
        return {type(one).__name__: one.state() for one in callbacks if isinstance(one, ExportableState)}
