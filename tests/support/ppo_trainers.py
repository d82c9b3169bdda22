"""Tiny runs of our PPO under TRL's interface, on the CPU."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tiny_models import CHAT_TEMPLATE, tiny_causal_lm, tiny_classifier, tiny_tokenizer

from oppo_kit import OverlapConfig
from oppo_kit.integrations.trl.ppo import OverlapPPOTrainer
from oppo_kit.integrations.trl.ppo_config import OverlapPPOConfig

TOKENIZER = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
WORDS = ("ab", "cat 12", "the 3 dogs", "x", "hello world", "1+2=", "zebra", "say hi", "q", "w?")
ROWS = [{"input_ids": TOKENIZER(word)["input_ids"]} for word in WORDS]
QUIET: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
OVERLAP = OverlapConfig(schedule="oppo", delta=2, decode_tokens=2, placement="inline")
LORA = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.3, target_modules="all-linear")


def make_trainer(folder: Path, config_class: Any = OverlapPPOConfig, **changes: Any) -> OverlapPPOTrainer:
    """A trainer of B = 4 rows and 3 steps; keyword arguments change either the arguments or the trainer."""
    field_names = {field.name for field in dataclasses.fields(OverlapPPOConfig)}
    values: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "total_episodes": 12,
        "num_ppo_epochs": 1,
        "response_length": 8,
        "stop_token_id": 10,
        "temperature": 1.0,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        **QUIET,
    }
    values |= {name: changes.pop(name) for name in list(changes) if name in field_names}
    models: dict[str, Any] = {
        "processing_class": TOKENIZER,
        "model": tiny_causal_lm(),
        "ref_model": None,
        "reward_model": tiny_classifier(),
        "train_dataset": ROWS,
        "value_model": tiny_classifier(seed=5),
    }
    return OverlapPPOTrainer(**({"args": config_class(**values)} | models | changes))


def weights(*models: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def watch(trainer: OverlapPPOTrainer) -> list[Any]:
    """The batches that a trainer trains, one after another."""
    batches: list[Any] = []
    collect = trainer.engine.collect

    def watched() -> Any:
        batches.append(collect())
        return batches[-1]

    trainer.engine.collect = watched  # type: ignore[method-assign]
    return batches


def prompts_of(batches: list[Any]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids) for batch in batches for ids in batch.prompt_ids)
