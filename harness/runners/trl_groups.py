"""Runs stock TRL ``GRPOTrainer``, ``RLOOTrainer`` or ``OnlineDPOTrainer`` on our runners' work, at its best settings.

It knows neither the engine nor its backends: TRL generates and trains by itself, and is measured from outside
(``trl_group_recorder``). Nothing of its work is changed. It imports no TRL: the classes are handed in. A drop-in
trainer is handed in and measured in the same way.

What makes the comparison fair, and TRL as fast as its users can have it:

- Same prompts in the same order: draws 0 … steps × B - 1 are the data set, read once and not shuffled; G responses
  each. A prompt is its tokens in words, special tokens included, and TRL's tokenizer adds none: that it finds our
  very ids again is checked for every draw.
- One generation batch of B × G rows a step. It stops at the stop token, which the tokenizer's copy calls its EOS.
  The model folder's own sampling settings are dropped; temperature, top-k, top-p and min-p are those of the run.
- KV cache on, no gradient checkpointing (OnlineDPO's default switches the cache off), no autocast, no dropout.
- Same reward: TRL would decode a response without its special tokens and give a reward model this text, without BOS
  and EOS, which it was not trained on, padded to the longest of all rows. So the reward is handed over as a function
  of the token ids (``trl_reward``), which TRL allows, and scores as ours does, in batches sorted by length.
- Training micro-batches of GRPO and RLOO hold as many rows as ``learner.micro_batch_tokens`` allows at full width,
  for TRL cuts no padding off: the same memory limit on both sides. Larger ones are no faster on a CPU: 64 rows
  of 220 tokens took one core 2.1 to 2.4 s at once, 1.8 to 2.0 s by 32 and 1.9 to 2.2 s by 16. OnlineDPO generates anew
  for each micro-batch, so it has one.
- Fused AdamW over all weights in one parameter group, the learning rate moving once a step, gradients clipped at
  ``learner.max_grad_norm`` or not at all: as in our learner.
- ``num_mini_batches`` optimizer steps a pass, as ``steps_per_generation``. TRL then computes the log-probs before
  the update once more; with one optimizer step a batch it need not.
- LoRA by TRL's own ``peft_config``: the reference is the policy without its adapter.
- Nothing logged to a tracker, saved, or printed. What exists before training is kept from the garbage collector.
- Settings that only say how to treat stale responses have no meaning here, for TRL has none.
- ``trl_continuous`` generates by transformers' continuous batching instead of ``generate``: a row that ends makes room
  at once. It is TRL's own option of GRPO and RLOO. On a CPU it is given a cache of the size of the work; by TRL's
  default it sets up half the memory anew in every step, which took 20 s. With it 64 rows of the embedded task took 2.2
  to 2.8 s, and ``generate`` 2.0 s or more, so it is no default.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, get_scheduler

from harness.runners.base import Outcome, make_reward_scorer
from harness.runners.trl_common import (
    STALENESS_SETTINGS,
    frozen_garbage,
    make_optimizer,
    prepare_tokenizer,
)
from harness.runners.trl_group_recorder import GroupMeter, GroupRecorder, time_groups, time_pairs
from harness.runners.trl_reward import DRAW_COLUMN, RewardOnIds
from oppo_kit.algorithm import AlgorithmBase
from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.config import LearnerConfig, TrainConfig
from oppo_kit.errors import ConfigError
from oppo_kit.registry import create_algorithm

if TYPE_CHECKING:
    from harness.runners.base import Evaluate, OnStep, RunSpec
    from harness.workloads.loading import Workload
    from oppo_kit.types import Prompt

# Of continuous batching on a CPU: of 64 rows of the embedded task, 64 was at least as fast as the default 256.
_PAGE_TOKENS = 64
_PREFILL_TOKENS = 1024
# TRL has another form for the first one.
_OWN_SETTINGS = frozenset({"num_mini_batches"}) | STALENESS_SETTINGS


def train_groups(
    trainer_class: Any,
    config_class: Any,
    spec: RunSpec,
    workload: Workload,
    evaluate: Evaluate,
    on_step: OnStep,
    clock: Callable[[], float],
    *,
    is_continuous: bool = False,
    is_overlapping: bool = False,
) -> Outcome:
    """Train by a TRL trainer and its config class; the rest as in ``harness.runners.trl``.

    Raises:
        ConfigError: TRL cannot do what the configuration asks for.
    """
    train = spec.train
    algorithm = create_algorithm(train.algo, train.algo_config)
    settings = check_groups(config_class, train, workload, algorithm)
    num_updates = algorithm.num_epochs * algorithm.num_mini_batches
    meter = GroupMeter(clock, num_rows=train.batch_size * algorithm.group_size)
    with tempfile.TemporaryDirectory(prefix="oppo-kit-trl-") as folder:
        trainer = build_trainer(
            trainer_class,
            config_class,
            spec,
            workload,
            algorithm,
            settings,
            folder,
            is_continuous=is_continuous,
            is_overlapping=is_overlapping,
        )
        (time_pairs if is_paired(train.algo) else time_groups)(trainer, meter)
        recorder = GroupRecorder(spec, evaluate, on_step, meter, num_updates=num_updates)
        trainer.add_callback(recorder)
        with frozen_garbage():
            trainer.train()
    if spec.save_to is not None:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        policy.config.use_cache = True
        policy.save_pretrained(spec.save_to)
        workload.tokenizer.save_pretrained(spec.save_to)
    return Outcome(recorder.steps, recorder.evaluations, [])


def is_paired(algo: str) -> bool:
    """Whether the trainer is OnlineDPO's, which has methods and settings of its own."""
    return algo == "online_dpo"


def check_groups(
    config_class: Any, train: TrainConfig, workload: Workload, algorithm: AlgorithmBase
) -> dict[str, Any]:
    """The algorithm's settings by TRL's names.

    Raises:
        ConfigError: TRL cannot do the same work.
    """
    name = config_class.__name__
    if len(workload.stop_token_ids) != 1:
        raise ConfigError(
            f"TRL's {name} knows one token that ends a response, and this run has {list(workload.stop_token_ids)}; set "
            "sampling.stop_token_ids to one token, or leave the trl runner out"
        )
    if is_paired(train.algo) and algorithm.num_epochs * algorithm.num_mini_batches > 1:
        raise ConfigError(
            f"num_epochs={algorithm.num_epochs} and num_mini_batches={algorithm.num_mini_batches}: TRL's OnlineDPO "
            "takes one optimizer step a batch; set both to 1, or leave the trl runner out"
        )
    if train.batch_size % algorithm.num_mini_batches:
        raise ConfigError(
            f"batch_size={train.batch_size} is no multiple of num_mini_batches={algorithm.num_mini_batches}, which TRL "
            "needs; change one of them"
        )
    settings = algorithm.config.model_dump(by_alias=True)
    defaults = type(algorithm.config)().model_dump(by_alias=True)
    known = set(config_class.__dataclass_fields__)
    if is_paired(train.algo):
        known |= {"num_epochs", "num_generations"}
    unknown = [key for key in settings if key not in known | _OWN_SETTINGS and settings[key] != defaults[key]]
    if unknown:
        raise ConfigError(
            f"algo_config.{unknown[0]}={settings[unknown[0]]!r}: TRL's {name} has no such setting; leave it at its "
            f"default, {defaults[unknown[0]]!r}, or leave the trl runner out"
        )
    return {key: value for key, value in settings.items() if key in config_class.__dataclass_fields__}


def build_trainer(
    trainer_class: Any,
    config_class: Any,
    spec: RunSpec,
    workload: Workload,
    algorithm: AlgorithmBase,
    settings: Mapping[str, Any],
    folder: str,
    *,
    is_continuous: bool = False,
    is_overlapping: bool = False,
) -> Any:
    """The trainer, not started.

    Raises:
        ConfigError: prompts that TRL cannot be given.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers.trainer_callback import PrinterCallback

    train = spec.train
    draws = [workload.prompts.draw(draw_id) for draw_id in range(train.num_steps * train.batch_size)]
    _check_limits(draws, train.sampling.response_length)
    tokenizer = prepare_tokenizer(
        workload.tokenizer, workload.stop_token_ids, [draw.token_ids for draw in draws]
    )
    rows = {"prompt": prompts_in_words(draws, tokenizer), DRAW_COLUMN: [draw.draw_id for draw in draws]}
    policy = workload.make_policy()
    # TRL's passes without generation need no keys and values; generation has its own setting.
    policy.config.use_cache = False
    policy.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=workload.stop_token_ids[0]
    )
    lora = train.actor_lora
    peft_config: Any = LoraConfig(task_type="CAUSAL_LM", **lora.model_dump()) if lora else None  # type: ignore[arg-type]
    arguments = config_class(
        output_dir=folder,
        **_shared_arguments(spec),
        **settings,
        **(
            _pair_arguments(train, draws)
            if is_paired(train.algo)
            else _group_arguments(
                train, draws, algorithm, is_continuous=is_continuous, is_overlapping=is_overlapping
            )
        ),
    )
    trainer = trainer_class(
        model=policy,
        reward_funcs=RewardOnIds(_reward_scorer(workload), draws, workload.stop_token_ids),
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.optimizer = make_optimizer(train.learner, [trainer.model])
    trainer.lr_scheduler = make_schedule(
        train.learner,
        trainer.optimizer,
        num_steps=train.num_steps,
        num_updates=algorithm.num_epochs * algorithm.num_mini_batches,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def prompts_in_words(draws: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the tokenizer, which adds no special tokens from now on, makes the draws' very tokens of.

    Raises:
        ConfigError: it makes something else of one.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.post_processor = None
    found = [str(tokenizer.decode(list(draw.token_ids), skip_special_tokens=False)) for draw in draws]
    encoded = tokenizer(found)["input_ids"]
    for draw, text, token_ids in zip(draws, found, encoded, strict=True):
        if tuple(token_ids) != draw.token_ids:
            raise ConfigError(
                f"TRL takes prompts as text, and the tokenizer makes {token_ids} of {text!r}, which is "
                f"{list(draw.token_ids)} here; leave the trl runner out"
            )
    return found


def rows_per_micro_batch(num_rows: int, num_tokens: int, limit_tokens: int) -> int:
    """The most rows of so many padded tokens that fit the limit and divide ``num_rows``; at least 1."""
    return max(
        count
        for count in range(1, num_rows + 1)
        if num_rows % count == 0 and (count == 1 or count * num_tokens <= limit_tokens)
    )


def make_schedule(
    learner: LearnerConfig, optimizer: torch.optim.Optimizer, *, num_steps: int, num_updates: int
) -> Any:
    """Our learner's schedule, which moves once in so many optimizer steps."""
    schedule: Any = get_scheduler(
        learner.scheduler_name, optimizer, num_warmup_steps=learner.warmup_steps, num_training_steps=num_steps
    )

    def by_step(factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda update: factor(update // num_updates)

    schedule.lr_lambdas = [by_step(factor) for factor in schedule.lr_lambdas]
    return schedule


def _check_limits(draws: list[Prompt], response_length: int) -> None:
    other = next((draw for draw in draws if draw.max_new_tokens != response_length), None)
    if other is not None:
        raise ConfigError(
            f"draw {other.draw_id} may have {other.max_new_tokens} tokens and others {response_length}: TRL has one "
            "limit for all; leave the trl runner out"
        )


def _reward_scorer(workload: Workload) -> Any:
    """The run's reward, its model where our engine would have it."""
    if workload.reward_path is None:
        return make_reward_scorer(workload)
    model: Any = workload.make_reward()
    return HFRewardScorer(
        model.to("cuda" if torch.cuda.is_available() else "cpu"), rendering=workload.reward_rendering()
    )


def _shared_arguments(spec: RunSpec) -> dict[str, Any]:
    train = spec.train
    sampling = train.sampling
    return {
        "seed": spec.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        "max_grad_norm": train.learner.max_grad_norm or 0.0,
        "disable_dropout": True,
        "gradient_checkpointing": False,
        "bf16": False,
        # As our learner's accelerator chooses.
        "use_cpu": not torch.cuda.is_available(),
        # Nothing beside it
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def _group_arguments(
    train: TrainConfig,
    draws: list[Prompt],
    algorithm: AlgorithmBase,
    *,
    is_continuous: bool,
    is_overlapping: bool,
) -> dict[str, Any]:
    num_rows = train.batch_size * algorithm.group_size // algorithm.num_mini_batches
    width = max(len(draw.token_ids) for draw in draws) + train.sampling.response_length
    num_together = rows_per_micro_batch(num_rows, width, train.learner.micro_batch_tokens)
    return {
        "max_steps": train.num_steps * algorithm.num_epochs * algorithm.num_mini_batches,
        "max_completion_length": train.sampling.response_length,
        "shuffle_dataset": False,
        "per_device_train_batch_size": num_together,
        "gradient_accumulation_steps": num_rows // num_together,
        "steps_per_generation": num_rows // num_together * algorithm.num_mini_batches,
        "generation_kwargs": None if is_overlapping else {"use_cache": True},
        "use_transformers_continuous_batching": is_continuous,
        "transformers_continuous_batching_config": _cache_for(train.batch_size * algorithm.group_size, width)
        if is_continuous and not torch.cuda.is_available()
        else None,
        # For the reference, which TRL loads from the policy's folder, as float32 unless it is told.
        "model_init_kwargs": None if train.dtype == "float32" else {"dtype": train.dtype},
    }


def _cache_for(num_rows: int, num_tokens: int) -> dict[str, int]:
    """Pages that hold so many rows of so many tokens: by default half the memory is set up as cache in every step."""
    return {
        "page_size": _PAGE_TOKENS,
        "num_blocks": num_rows * math.ceil(num_tokens / _PAGE_TOKENS),
        "max_batch_tokens": max(_PREFILL_TOKENS, num_rows),
    }


def _pair_arguments(train: TrainConfig, draws: list[Prompt]) -> dict[str, Any]:
    length = train.sampling.response_length
    return {
        "max_steps": train.num_steps,
        "max_new_tokens": length,
        "max_length": max(len(draw.token_ids) for draw in draws) + length,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": train.batch_size,
        "gradient_accumulation_steps": 1,
    }
