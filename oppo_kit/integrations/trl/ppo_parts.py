"""What PPO training is built from: prompts, policy and reference, optimizer. Needs no TRL.

Knows no loop, no callback and no file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, get_scheduler

from oppo_kit.backends.forward import causal_model, context_tokens
from oppo_kit.data import ATTENTION_MASK, INPUT_IDS, PromptDataset
from oppo_kit.errors import ConfigError, DataError, ModelError
from oppo_kit.learner.learner import MakeOptimizers

PROMPT = "prompt"
# Columns of inputs that the policy would have to read beside the prompt's tokens.
_OTHER_INPUTS = frozenset({"image", "images", "pixel_values", "video", "videos", "audio", "tools"})


def make_prompts(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    collator: Any,
    args: Any,
    *,
    name: str,
    shuffle: bool,
) -> PromptDataset:
    """The prompts of a data set: ``input_ids`` where there are some, else ``prompt``, as text or messages.

    Args:
        dataset: rows that can be counted.
        tokenizer: the policy's.
        collator: run on each row by itself, unless it only pads.
        args: for ``response_length`` and ``seed``.
        name: of the data set's argument, for the errors.
        shuffle: whether every epoch has another order.

    Raises:
        DataError: no rows that can be counted, images or tools, a column that is missing, or a conversation for a
            tokenizer without chat template.
    """
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} is a {type(dataset).__name__} without a length, which decides how long PPO trains; pass a "
            "datasets.Dataset or a list of rows"
        )
    if collator is not None and not isinstance(collator, DataCollatorWithPadding):
        dataset = [_collated(collator, row, index) for index, row in enumerate(dataset)]
    rows = [_prompt_columns(row, index, name) for index, row in enumerate(dataset)]
    return PromptDataset(
        rows,
        tokenizer,
        prompt_column=PROMPT,
        max_new_tokens=args.response_length,
        seed=args.seed,
        shuffle=shuffle,
    )


def longest_prompt(prompts: PromptDataset, policy: nn.Module, args: Any) -> int:
    """Tokens of the longest prompt.

    Raises:
        DataError: with a full response it exceeds the policy's context.
    """
    longest = max(len(prompts.draw(index).token_ids) for index in range(len(prompts)))
    context = context_tokens(causal_model(policy).config)
    if context is not None and longest + args.response_length > context:
        raise DataError(
            f"the longest prompt has {longest} tokens; with response_length={args.response_length} it exceeds the "
            f"policy's context of {context}; leave long prompts out of train_dataset, or lower response_length"
        )
    return longest


def prepared_policy(
    policy: Any, reference: nn.Module | None, peft_config: Any, args: Any, *, is_shared: bool
) -> tuple[nn.Module, nn.Module | None]:
    """The policy to train, wrapped as ``peft_config`` says, and its reference; None: the policy as it is.

    The reference of adapters is a module of its own over the tensors that training never changes, with the adapters
    off, or the one on that ``args.ref_adapter_name`` names.

    Args:
        policy: a causal language model, PEFT-wrapped or not.
        reference: one that was given.
        peft_config: None leaves the policy as it is.
        args: for the adapters' names.
        is_shared: whether policy and reference stay on one device.

    Raises:
        ConfigError: a PEFT model with a further configuration, or something that is no configuration.
        ModelError: nothing of the policy can be trained.
    """
    if reference is policy:
        raise ConfigError(
            "model and ref_model are one object, so the reference would be trained too; pass a copy, or None"
        )
    has_adapters = hasattr(policy, "peft_config")
    if peft_config is not None:
        if has_adapters:
            raise ConfigError(
                "model is a PEFT model already, and peft_config is given too; merge its adapter into the base "
                "(merge_and_unload), or leave peft_config out to train the adapter it has"
            )
        reference = reference if reference is not None else _twin(policy, list(_tensors(policy)), is_shared)
        policy = _wrapped(policy, peft_config)
    elif has_adapters:
        if args.model_adapter_name:
            policy.set_adapter(args.model_adapter_name)
        reference = reference if reference is not None else _without_training(policy, args, is_shared)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ModelError(
            "no parameter of model requires a gradient; load an adapter with is_trainable=True, or unfreeze the model"
        )
    return without_dropout(policy), None if reference is None else without_dropout(reference)


def without_dropout(model: Any) -> Any:
    """The same module in evaluation mode with all dropout at 0: a ratio must not be noisy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


def check_models(reward: Any, critic: Any, policy: Any) -> None:
    """Reward model and value model are modules, and no two of the three are one.

    Raises:
        ModelError: they are not.
    """
    for name, model in (("reward_model", reward), ("value_model", critic)):
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"{name} is a {type(model).__name__}; pass a model, loaded by "
                "AutoModelForSequenceClassification.from_pretrained(…, num_labels=1)"
            )
    if reward is critic or critic is policy:
        other = "reward_model" if reward is critic else "model"
        raise ModelError(
            f"value_model and {other} are one object, and the critic is trained by itself; load it twice"
        )


def make_accelerator(args: Any) -> Accelerator:
    """With the precision and the device of the arguments.

    Raises:
        ConfigError: this machine has no such precision, or this process has used another device before.
    """
    precision = "bf16" if args.bf16 else "no"
    try:
        return Accelerator(mixed_precision=precision, cpu=args.use_cpu)
    except ValueError as error:
        raise ConfigError(
            f"bf16={args.bf16}, use_cpu={args.use_cpu} cannot be set up: {error}; where this process has used another "
            "device before, start a new one"
        ) from error


def optimizer_factory(args: Any, given: Sequence[Any]) -> MakeOptimizers:
    """Optimizer and schedule as ``transformers.Trainer`` makes them, or those that were given.

    Args:
        args: ``optim``, ``weight_decay`` (none on norms and biases), ``lr_scheduler_type``, warm-up,
            ``num_total_batches``.
        given: optimizer and schedule; None where it is to be made.

    Raises:
        ConfigError: a schedule without its optimizer.
    """
    optimizer, scheduler = given
    if optimizer is None and scheduler is not None:
        raise ConfigError("optimizers has a schedule, but no optimizer that it moves; pass both, or neither")

    def make(module: nn.Module) -> tuple[Optimizer, LRScheduler]:
        made = _optimizer(module, args) if optimizer is None else _checked(optimizer, module)
        return made, scheduler or _scheduler(made, args)

    return make


def _optimizer(module: nn.Module, args: Any) -> Optimizer:
    from transformers import Trainer
    from transformers.trainer_pt_utils import get_parameter_names

    decaying = set(get_parameter_names(module, [nn.LayerNorm], [r"bias", r"norm"]))
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decaying], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trained if name not in decaying], "weight_decay": 0.0},
    ]
    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    return optimizer_class(groups, **settings)


def _scheduler(optimizer: Optimizer, args: Any) -> LRScheduler:
    num_steps = args.num_total_batches
    return get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


def _checked(optimizer: Optimizer, module: nn.Module) -> Optimizer:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in module.parameters() if parameter.requires_grad):
        raise ConfigError(
            "the optimizer holds no parameter that is trained; make it from those of model and value_model, and with "
            "peft_config wrap the model yourself before"
        )
    return optimizer


def _wrapped(policy: Any, peft_config: Any) -> nn.Module:
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}; pass a peft.PeftConfig, such as "
            "LoraConfig(task_type='CAUSAL_LM')"
        )
    return get_peft_model(policy, peft_config)


def _without_training(policy: Any, args: Any, is_shared: bool) -> nn.Module:
    """The reference of a PEFT model: a twin over its frozen tensors, with adapters of its own."""
    twin: Any = _twin(policy, [tensor for tensor in _tensors(policy) if not tensor.requires_grad], is_shared)
    if args.ref_adapter_name:
        twin.set_adapter(args.ref_adapter_name)
    else:
        twin.base_model.disable_adapter_layers()
    return twin


def _tensors(model: nn.Module) -> Any:
    yield from model.parameters()
    yield from model.buffers()


def _twin(model: nn.Module, shared: Sequence[torch.Tensor], is_shared: bool) -> nn.Module:
    """A copy of a module over some of its tensors; over none where it goes to another device."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared} if is_shared else {})


def _collated(collator: Any, row: Any, index: int) -> Mapping[str, Any]:
    collated = collator([row])
    if INPUT_IDS not in collated:
        raise DataError(f"row {index}: data_collator returned no {INPUT_IDS!r}; PPO reads nothing else")
    return {name: collated[name][0] for name in (INPUT_IDS, ATTENTION_MASK) if name in collated}


def _prompt_columns(row: Mapping[str, Any], index: int, name: str) -> dict[str, Any]:
    """What the prompt is made from; other columns have no reader in PPO."""
    found = sorted(column for column in _OTHER_INPUTS & row.keys() if row[column] is not None)
    prompt = row.get(PROMPT)
    if isinstance(prompt, list) and any(
        isinstance(message, Mapping) and not isinstance(message.get("content"), str | None)
        for message in prompt
    ):
        found.append(f"{PROMPT} with parts that are no text")
    if found:
        raise DataError(
            f"row {index} of {name} has {', '.join(found)}; the policy reads text only: remove them, or train with TRL"
        )
    if INPUT_IDS not in row and PROMPT not in row:
        raise DataError(
            f"row {index} of {name} has neither {INPUT_IDS!r} nor {PROMPT!r}, but {', '.join(map(str, row))}; "
            "rename the column of the prompts"
        )
    names = (INPUT_IDS, ATTENTION_MASK) if INPUT_IDS in row else (PROMPT,)
    return {column: row[column] for column in names if column in row}
