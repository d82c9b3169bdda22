"""Runs stock TRL 1.12 ``PPOTrainer`` on the same work as our runners, at its best fair settings.

It knows neither the engine nor its backends: TRL generates, scores and trains by itself, and is measured from
outside (``trl_recorder``). Nothing of its work is changed but one attribute (last point). It imports no TRL: the
module is handed in.

What makes the comparison fair, and TRL as fast as its users can have it:

- Same prompts: draws 0 … steps × B - 1 are the data set, read for exactly one epoch. TRL shuffles them, so
  the multiset is the same, the order is not. Same B, response length, temperature, dtype, optimizer steps.
- It stops at the stop tokens. TRL's default decodes every row to the length limit. The tokenizer's copy calls
  the stop token its EOS, so ``stop_token="eos"`` and the missing-EOS penalty follow the actual stop set; a
  row that has stopped is padded until the slowest row of the batch ends, as TRL always does.
- No other sampling setting leaks in: the model folder's top-p or repetition penalty are dropped.
- KV cache on, no gradient checkpointing, no autocast (the weights have the configured dtype already).
- One generation batch and one scoring batch of all B rows; one micro-batch per mini-batch: the fewest calls.
- Fused AdamW over all weights in one parameter group, as in our learner; HF's trainer would leave norms
  and biases out of weight decay. The learning-rate schedule is the same function on both sides.
- Nothing logged to a tracker, saved, or sampled for display.
- TRL collects garbage twice a step, which took 0.5 s a call with its libraries loaded, whatever the model's
  size. What exists before training is frozen (``gc.freeze``): the collector sees the step's own objects only.
- LoRA trains the adapter and the critic, as our learner does; the reference is the policy without its adapter.
- A prompt with a limit of its own is answered up to it (``trl_row_limits``); TRL has one limit for all rows.
- The pad token is one that neither stops a response nor occurs in a prompt, because TRL takes validity from
  ``ids != pad``.
- TRL's PPO does not clip gradients, so ``learner.max_grad_norm`` must be null, on both sides.
- TRL hands ``num_mini_batches`` micro-batches to accelerate's gradient accumulation, which then makes one
  optimizer step an epoch (but on the data's last batch), whatever ``num_mini_batches`` says. Accumulation is
  set to 1: a step per mini-batch.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from algorithms.ppo import PPOConfig
from harness.runners.base import Outcome
from harness.runners.trl_common import (
    STALENESS_SETTINGS,
    frozen_garbage,
    make_optimizer,
    prepare_tokenizer,
    print_nothing,
)
from harness.runners.trl_recorder import Meter, PPORecorder, timed
from harness.runners.trl_row_limits import RowLimits
from oppo_kit.build import add_adapter
from oppo_kit.config import TrainConfig, parse_config
from oppo_kit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.runners.base import Evaluate, OnStep, RunSpec
    from harness.workloads.loading import Workload

# TRL refuses to whiten rewards of fewer rows.
MIN_ROWS_TO_WHITEN = 8


def train_ppo(
    module: Any,
    spec: RunSpec,
    workload: Workload,
    evaluate: Evaluate,
    on_step: OnStep,
    clock: Callable[[], float],
) -> Outcome:
    """Train; ``module`` is TRL's of its PPOTrainer, the rest as in ``harness.runners.trl``.

    Raises:
        ConfigError: TRL cannot do what the configuration asks for; see ``check_ppo``.
    """
    algorithm = check_ppo(spec.train, workload)
    meter = Meter(clock)
    with tempfile.TemporaryDirectory(prefix="oppo-kit-trl-") as folder:
        recorder = PPORecorder(spec, workload.stop_token_ids, evaluate, on_step, meter)
        trainer = _build_trainer(module, spec, workload, algorithm, folder)
        recorder.pad_token_id = trainer.processing_class.pad_token_id
        suppressed = trainer.policy_model.generation_config.suppress_tokens or []
        recorder.can_sample_pad = recorder.pad_token_id not in suppressed
        trainer.add_callback(recorder)
        with timed(module, trainer, meter), frozen_garbage():
            trainer.train()
    if spec.save_to is not None:
        trainer.policy_model.save_pretrained(spec.save_to)
        trainer.value_model.save_pretrained(spec.save_to / "critic")
        workload.tokenizer.save_pretrained(spec.save_to)
    return Outcome(recorder.steps, recorder.evaluations, [])


def check_ppo(train: TrainConfig, workload: Workload) -> PPOConfig:
    """The algorithm's settings.

    Raises:
        ConfigError: TRL's PPO cannot do the same work.
    """
    if workload.reward_path is None:
        raise ConfigError(
            "TRL's PPOTrainer takes reward models only, and the reward of this run is a function; "
            "set reward to a reward model, or leave the trl runner out"
        )
    if workload.reward_tokenizer is not None:
        raise ConfigError(
            f"TRL's PPOTrainer gives the reward model the policy's token ids, and {workload.reward_path} has another "
            "vocabulary; leave the trl runner out"
        )
    if train.learner.max_grad_norm is not None:
        raise ConfigError(
            f"learner.max_grad_norm is {train.learner.max_grad_norm}, and TRL's PPOTrainer does not clip "
            "gradients; set learner.max_grad_norm=null to compare equal work"
        )
    if train.sampling.is_truncated:
        raise ConfigError(
            f"sampling.top_k={train.sampling.top_k}, top_p={train.sampling.top_p}, min_p={train.sampling.min_p}: TRL's "
            "PPOTrainer draws from the full distribution; set them to 0, 1 and 0, or leave the trl runner out"
        )
    algorithm = parse_config(PPOConfig, train.algo_config, source="algo_config")
    rows, rest = divmod(train.batch_size, algorithm.num_mini_batches)
    if rest:
        raise ConfigError(
            f"batch_size={train.batch_size} is no multiple of num_mini_batches={algorithm.num_mini_batches}, "
            "which TRL needs; change one of them"
        )
    if algorithm.whiten_rewards and rows < MIN_ROWS_TO_WHITEN:
        raise ConfigError(
            f"whiten_rewards with {rows} rows a mini-batch: TRL needs {MIN_ROWS_TO_WHITEN}; raise "
            "batch_size, lower num_mini_batches, or set whiten_rewards=false"
        )
    if algorithm.missing_eos_penalty is not None and len(workload.stop_token_ids) != 1:
        raise ConfigError(
            f"missing_eos_penalty with the stop tokens {list(workload.stop_token_ids)}: TRL looks for one "
            "token only; set sampling.stop_token_ids to one token, or missing_eos_penalty=null"
        )
    return algorithm


def _build_trainer(module: Any, spec: RunSpec, workload: Workload, algorithm: PPOConfig, folder: str) -> Any:
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback

    num_draws = spec.train.num_steps * spec.train.batch_size
    draws = [workload.prompts.draw(draw_id) for draw_id in range(num_draws)]
    prompts = [list(prompt.token_ids) for prompt in draws]
    tokenizer = prepare_tokenizer(workload.tokenizer, workload.stop_token_ids, prompts)
    policy: Any = workload.make_policy()
    policy.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id, use_cache=True)
    lora = spec.train.actor_lora
    if lora is not None:
        policy = add_adapter(policy, lora)
    if any(prompt.max_new_tokens != spec.train.sampling.response_length for prompt in draws):
        # A limited row is padded, and TRL takes a sampled pad token for the end of its row.
        policy.generation_config.suppress_tokens = [tokenizer.pad_token_id]
        RowLimits(draws).apply_to(policy)
    critic = workload.make_critic()
    dataset = Dataset.from_dict({"input_ids": prompts})
    trainer = module.PPOTrainer(
        args=_arguments(module, spec, algorithm, folder, has_stop=bool(workload.stop_token_ids)),
        processing_class=tokenizer,
        model=policy,
        ref_model=workload.make_policy() if lora is None else None,
        reward_model=workload.make_reward(),
        value_model=critic,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(1)),
        optimizers=(make_optimizer(spec.train.learner, [policy, critic]), None),
    )
    # TRL's own setting is one token; HF's generate stops at all of them.
    policy.generation_config.eos_token_id = list(workload.stop_token_ids) or None
    trainer.remove_callback(PrinterCallback)
    trainer.accelerator.gradient_accumulation_steps = 1
    trainer.accelerator.print = print_nothing
    return trainer


def _arguments(module: Any, spec: RunSpec, algorithm: PPOConfig, folder: str, *, has_stop: bool) -> Any:
    train = spec.train
    return module.PPOConfig(
        output_dir=folder,
        seed=spec.seed,
        # The same work
        total_episodes=train.num_steps * train.batch_size,
        num_train_epochs=1,
        response_length=train.sampling.response_length,
        temperature=train.sampling.temperature,
        stop_token="eos" if has_stop else None,
        num_ppo_epochs=algorithm.num_epochs,
        num_mini_batches=algorithm.num_mini_batches,
        **algorithm.model_dump(exclude={"num_epochs", "num_mini_batches", *STALENESS_SETTINGS}),
        lr_scheduler_type=train.learner.scheduler_name,
        warmup_steps=train.learner.warmup_steps,
        # The fastest layout of it
        per_device_train_batch_size=train.batch_size // algorithm.num_mini_batches,
        gradient_accumulation_steps=algorithm.num_mini_batches,
        local_rollout_forward_batch_size=train.batch_size,
        gradient_checkpointing=False,
        bf16=False,
        # As our learner's accelerator chooses.
        use_cpu=not torch.cuda.is_available(),
        # Nothing beside it
        per_device_eval_batch_size=1,
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
