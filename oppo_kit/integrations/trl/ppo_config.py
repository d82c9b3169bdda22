"""The arguments of PPO training under TRL's names, and what they are in ours. Needs no TRL.

Knows no model and no data beyond a few counts.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase, TrainingArguments

from oppo_kit.config import OverlapConfig, TrainConfig, parse_config
from oppo_kit.errors import ConfigError

_STAND_IN = "EleutherAI/pythia-160m"


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class OverlapPPOConfig(TrainingArguments):
    """``transformers.TrainingArguments`` with the fields and defaults of TRL 1.12's ``PPOConfig``.

    Scripts that fill a ``PPOConfig``, in Python or by ``HfArgumentParser``, fill this one as they are. Fields that
    have no effect here say so. As in ``TrainingArguments`` stay ``world_size``, which is no field there, and
    ``gradient_checkpointing``, which has no effect in TRL's PPO either.
    """

    learning_rate: float = _field(3e-6, "initial learning rate")
    logging_steps: float = _field(10, "steps between two logs; below 1: that share of all steps")
    bf16: bool | None = _field(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "bfloat16 autocast in the update; null: yes, unless fp16 is set"
    )
    dataset_num_proc: int | None = _field(None, "no effect")
    num_mini_batches: int = _field(1, "optimizer steps per epoch over a batch; divides the batch")
    total_episodes: int | None = _field(
        None, "responses to train in all; null: num_train_epochs × the data set"
    )
    local_rollout_forward_batch_size: int = _field(64, "no effect: rows leave and enter one by one")
    num_sample_generations: int = _field(
        10, "how often in all eval_dataset is answered and printed; 0: never"
    )
    response_length: int = _field(53, "token limit of a response")
    stop_token: Literal["eos"] | None = _field(
        None, "'eos' ends responses at the tokenizer's EOS; null: see stop_token_id"
    )
    stop_token_id: int | None = _field(None, "the token that ends a response; null: none does")
    temperature: float = _field(0.7, "of sampling")
    missing_eos_penalty: float | None = _field(
        None, "subtracted from the score of a response that its limit cut"
    )
    sft_model_path: str = _field(_STAND_IN, "no effect; for scripts")
    num_total_batches: int | None = _field(None, "steps in all; computed")
    micro_batch_size: int | None = _field(None, "computed")
    local_batch_size: int | None = _field(None, "computed")
    batch_size: int | None = _field(
        None, "computed: per_device_train_batch_size × gradient_accumulation_steps"
    )
    local_mini_batch_size: int | None = _field(None, "computed")
    mini_batch_size: int | None = _field(None, "computed")
    push_to_hub: bool = _field(False, "not supported")
    reward_model_path: str = _field(_STAND_IN, "no effect; for scripts")
    model_adapter_name: str | None = _field(None, "adapter to train, of a PEFT model that has several")
    ref_adapter_name: str | None = _field(None, "adapter of the reference, of a PEFT model that has several")
    num_ppo_epochs: int = _field(4, "passes over a batch")
    whiten_rewards: bool = _field(False, "rescale token rewards to unit variance")
    kl_coef: float = _field(0.05, "weight of the KL penalty in the reward")
    kl_estimator: Literal["k1", "k3"] = _field("k1", "k1 (unbiased) or k3 (never negative)")
    cliprange: float = _field(0.2, "clip of the policy ratio")
    vf_coef: float = _field(0.1, "weight of the value loss")
    cliprange_value: float = _field(0.2, "clip of the value change")
    gamma: float = _field(1.0, "discount per token")
    lam: float = _field(0.95, "trace decay of the advantage estimator")
    ds3_gather_for_generation: bool = _field(True, "no effect")

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16  # pyright: ignore[reportIncompatibleVariableOverride]
        super().__post_init__()


_ALGORITHM_FIELDS = (
    "num_ppo_epochs",
    "num_mini_batches",
    "gamma",
    "lam",
    "kl_coef",
    "kl_estimator",
    "cliprange",
    "cliprange_value",
    "vf_coef",
    "whiten_rewards",
    "missing_eos_penalty",
)
_OTHER_FIELDS = ("total_episodes", "response_length", "stop_token", "stop_token_id", "temperature")
_REFUSED = {
    "deepspeed": "training runs in one process; leave it unset",
    "fsdp": "training runs in one process; leave it unset",
    "fp16": "gradients would be scaled, and a step with an overflow skipped; set bf16=True, or neither",
    "push_to_hub": "call trainer.save_model() and push the folder",
    "load_best_model_at_end": "nothing is evaluated; leave it False",
}


def check_arguments(args: Any) -> None:
    """Whether these are arguments of PPO that can be followed here.

    Raises:
        ConfigError: fields are missing, or ask for what is not supported.
    """
    missing = [name for name in (*_ALGORITHM_FIELDS, *_OTHER_FIELDS) if not hasattr(args, name)]
    if missing or not isinstance(args, TrainingArguments):
        raise ConfigError(
            f"args is a {type(args).__name__} without {', '.join(missing) or 'training arguments'}; pass an "
            "OverlapPPOConfig, or TRL 1.12's PPOConfig"
        )
    for name, advice in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ConfigError(f"{name}={value!r} is not supported by OverlapPPOTrainer: {advice}")


def resolved_arguments(args: Any, *, num_prompts: int) -> Any:
    """A copy of the arguments with the counts that TRL writes into them: batch sizes, episodes, steps.

    Args:
        args: ``OverlapPPOConfig``, or TRL 1.12's ``PPOConfig``; a ``TrainingArguments`` with those fields.
        num_prompts: of the data set.

    Raises:
        ConfigError: the batch is not divided by ``num_mini_batches``, or nothing is to be trained.
    """
    args = copy.copy(args)
    rows, num_mini_batches = args.per_device_train_batch_size, args.num_mini_batches
    batch_size = rows * args.gradient_accumulation_steps
    if num_mini_batches < 1 or batch_size % num_mini_batches:
        legal = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        raise ConfigError(
            f"num_mini_batches={num_mini_batches} does not divide the batch of {batch_size} "
            f"(per_device_train_batch_size {rows} × gradient_accumulation_steps {args.gradient_accumulation_steps}); "
            f"it may be one of {legal}"
        )
    if args.max_steps > 0:
        args.total_episodes = args.max_steps * batch_size
    elif args.total_episodes is None:
        args.total_episodes = int(args.num_train_epochs * num_prompts)
    if args.total_episodes < 1:
        raise ConfigError(
            f"total_episodes={args.total_episodes} trains nothing; set it, or num_train_epochs "
            f"({args.num_train_epochs}) × the {num_prompts} prompts of the data set, to at least 1"
        )
    args.num_total_batches = math.ceil(args.total_episodes / batch_size)
    args.batch_size = args.local_batch_size = batch_size
    args.mini_batch_size = args.local_mini_batch_size = batch_size // num_mini_batches
    args.micro_batch_size = rows
    if any(one.name == "world_size" for one in dataclasses.fields(args)):
        args.world_size = 1
    return args


def to_train_config(
    args: Any, overlap: OverlapConfig | None, *, stop_ids: tuple[int, ...], longest_prompt: int
) -> TrainConfig:
    """What the engine is built from.

    Args:
        args: of ``resolved_arguments``.
        overlap: None overlaps nothing.
        stop_ids: of ``stop_ids_of``.
        longest_prompt: in tokens. So many rows of this length and a full response make a micro-batch as
            ``per_device_train_batch_size`` says; of shorter rows it holds more.

    Raises:
        ConfigError: a setting is out of range.
    """
    values = {
        "algo": "ppo",
        "algo_config": {name: getattr(args, name) for name in _ALGORITHM_FIELDS},
        "batch_size": args.batch_size,
        "num_steps": args.num_total_batches,
        "seed": args.seed,
        "sampling": {
            "temperature": args.temperature,
            "response_length": args.response_length,
            "stop_token_ids": stop_ids,
        },
        "overlap": overlap or OverlapConfig(),
        "learner": {
            "learning_rate": args.learning_rate,
            "max_grad_norm": args.max_grad_norm or None,
            "micro_batch_tokens": args.per_device_train_batch_size * (longest_prompt + args.response_length),
        },
    }
    return parse_config(TrainConfig, values, source="args")


def stop_ids_of(args: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a response: one or none.

    Raises:
        ConfigError: two are named, an unknown one, an EOS that the tokenizer lacks, or a penalty without any.
    """
    name, token_id = args.stop_token, args.stop_token_id
    if name is not None and token_id is not None:
        raise ConfigError(f"stop_token={name!r} and stop_token_id={token_id} are both set; set one of them")
    if name not in (None, "eos"):
        raise ConfigError(f"stop_token={name!r} is unknown; it is 'eos' or None, or set stop_token_id")
    eos_token_id: Any = tokenizer.eos_token_id
    if name == "eos" and eos_token_id is None:
        raise ConfigError("stop_token='eos', but the tokenizer has no EOS token; set stop_token_id")
    if name == "eos":
        token_id = eos_token_id
    if token_id is None and args.missing_eos_penalty is not None:
        raise ConfigError(
            f"missing_eos_penalty={args.missing_eos_penalty} is for responses that their limit cut, and without a stop "
            "token these are all; set stop_token='eos' or stop_token_id"
        )
    return () if token_id is None else (int(token_id),)
