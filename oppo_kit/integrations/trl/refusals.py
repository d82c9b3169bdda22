"""What the overlapping group trainers do not do, said before anything is loaded or started, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from oppo_kit.config import OverlapConfig
from oppo_kit.errors import ConfigError, DataError

_NO_OTHER_ROLLOUTS = "responses are made by oppo_kit's own generator; leave it out, or use TRL's own trainer"
# Settings of another generator than ours, with the value that stands for none.
_OTHER_GENERATORS = {
    "use_vllm": False,
    "use_transformers_continuous_batching": False,
    "generation_kwargs": None,
    "cache_implementation": None,
    "repetition_penalty": 1.0,
}
_IMAGE_COLUMNS = ("image", "images")


def checked_overlap(overlap: OverlapConfig | None) -> OverlapConfig:
    """The settings, or the defaults for None.

    Raises:
        ConfigError: it is something else.
    """
    if overlap is not None and not isinstance(overlap, OverlapConfig):
        raise ConfigError(
            f"overlap is a {type(overlap).__name__}; pass oppo_kit.OverlapConfig(...), for example "
            "OverlapConfig(delta=2)"
        )
    return overlap or OverlapConfig()


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Arguments of the constructor.

    Raises:
        ConfigError: naming the first that cannot be used.
    """
    for name in ("rollout_func", "tools", "environment_factory"):
        if arguments.get(name):
            raise ConfigError(f"{name} cannot be used with overlap: {_NO_OTHER_ROLLOUTS}")
    if arguments.get("quantization_config") is not None:
        raise _quantized("quantization_config")
    processing_class = arguments.get("processing_class")
    if processing_class is not None:
        refuse_processor(processing_class)
    images = [
        name
        for name in getattr(arguments.get("train_dataset"), "column_names", None) or ()
        if name in _IMAGE_COLUMNS
    ]
    if images:
        raise ConfigError(f"the training data has a column {images[0]!r}; {_NO_IMAGES}")


_NO_IMAGES = "overlap is for text alone; remove the images, or use TRL's own trainer"


def refuse_processor(processing_class: object) -> None:
    """A processor of images and text.

    Raises:
        ConfigError: it is one.
    """
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise ConfigError(f"processing_class is a {type(processing_class).__name__}; {_NO_IMAGES}")


def refuse_settings(args: Any, overlap: OverlapConfig) -> None:
    """The trainer's and the overlap's settings.

    Raises:
        ConfigError: naming the setting, its value and what is allowed.
    """
    refuse_common_settings(args)
    _refuse_delta(args, overlap)


def refuse_common_settings(args: Any) -> None:
    """Settings that all of TRL's trainers have.

    Raises:
        ConfigError: naming the setting, its value and what is allowed.
    """
    for name, neutral in _OTHER_GENERATORS.items():
        value = getattr(args, name, neutral)
        if value not in (neutral, None) and value != {}:
            raise ConfigError(
                f"{name}={value!r} cannot be used with overlap: {_NO_OTHER_ROLLOUTS} ({name}={neutral!r})"
            )
    if args.world_size > 1:
        raise ConfigError(
            f"{args.world_size} processes train, and overlap works in one; start it without accelerate launch "
            "or torchrun"
        )
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise ConfigError(f"{name} is set; overlap works on one device, so leave it out")
    if args.ignore_data_skip:
        raise ConfigError(
            "ignore_data_skip=True goes on with the first prompts again, while responses to later ones are in the air; "
            "set it to False"
        )


def _refuse_delta(args: Any, overlap: OverlapConfig) -> None:
    batch_size = args.generation_batch_size // args.num_generations
    limit = batch_size * overlap.max_age
    if overlap.delta > limit:
        raise ConfigError(
            f"overlap.delta={overlap.delta} exceeds B × max_age = {batch_size} × {overlap.max_age}, where B = "
            f"generation_batch_size / num_generations = {args.generation_batch_size} / {args.num_generations} prompts: "
            f"more than B groups could be due at once; delta may be 0 to {limit}, usually up to "
            f"{max(1, batch_size // 2)}, or raise overlap.max_age"
        )


def refuse_model(model: Any) -> None:
    """The policy.

    Raises:
        ConfigError: its weights are quantized or on several devices, or its adapter is made of virtual tokens.
    """
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        raise _quantized("the policy")
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise ConfigError(
            f"the policy is spread over the devices {sorted(devices)}, and overlap works on one; set device_map "
            "to that one"
        )
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ConfigError(
                f"the adapter {name!r} ({type(config).__name__}) adds virtual tokens, which the generator does not "
                "read; use one that changes weights, such as LoraConfig"
            )


def refuse_data(args: Any, train_dataset: Any) -> None:
    """Too few prompts for one batch, where they can be counted.

    Raises:
        DataError: saying how many are needed, or how small a batch must be.
    """
    if not hasattr(train_dataset, "__len__"):
        return
    num_prompts, batch_size = len(train_dataset), args.generation_batch_size // args.num_generations
    if num_prompts < batch_size:
        raise DataError(
            f"the training data has {num_prompts} prompts, and one generation batch takes B = generation_batch_size / "
            f"num_generations = {args.generation_batch_size} / {args.num_generations} = {batch_size} different ones; "
            f"give at least {batch_size} prompts, or a generation_batch_size (per_device_train_batch_size × "
            f"steps_per_generation) of at most {num_prompts * args.num_generations}"
        )


def refuse_prompt(prompt: Any, tokenizer: Any, reward_tokenizers: Sequence[Any] = ()) -> None:
    """What is no prompt, and a conversation that no chat template can render, or with images.

    Args:
        prompt: text, or messages.
        tokenizer: the policy's.
        reward_tokenizers: those of reward models.

    Raises:
        DataError: neither text nor messages.
        ConfigError: saying what lacks.
    """
    if isinstance(prompt, str):
        return
    if not (isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)):
        raise DataError(
            f"the prompt {prompt!r:.80} is a {type(prompt).__name__}; a prompt is text, or a list of messages with "
            "'role' and 'content': remove the row, or name the column of the prompts 'prompt'"
        )
    if any(isinstance(message.get("content"), list) for message in prompt):
        raise ConfigError(f"the prompt {prompt!r:.80} has a message with parts instead of text; {_NO_IMAGES}")
    if not tokenizer.chat_template:
        raise ConfigError(
            "the prompts are conversations, and processing_class has no chat template; set its chat_template, use an "
            "instruction-tuned model, or give prompts as text"
        )
    for reward_tokenizer in reward_tokenizers:
        if not reward_tokenizer.chat_template:
            raise ConfigError(
                "the prompts are conversations, and the reward model's tokenizer has no chat template; set the "
                "chat_template of its reward_processing_classes entry to the one that the model was trained with"
            )
    for name in ("response_template", "response_schema"):
        if reward_tokenizers and getattr(tokenizer, name, None) is not None:
            raise ConfigError(
                f"processing_class has a {name}, by which responses are taken apart into messages, and a reward model "
                f"reads them as text here; set {name} to None"
            )


def _quantized(what: str) -> ConfigError:
    return ConfigError(
        f"{what} is quantized, and the generator keeps a copy of the weights that it decodes with; load the policy in "
        "bfloat16, with a LoRA adapter if memory is short"
    )
