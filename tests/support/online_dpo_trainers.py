"""Online DPO trainers on tiny real models. Whoever imports this is skipped where there is no supported TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CHAT_TEMPLATE, tiny_causal_lm, tiny_classifier, tiny_tokenizer
from trl_trainers import require_supported_trl

from oppo_kit import OverlapConfig

try:
    require_supported_trl()
except pytest.skip.Exception as skipped:
    pytest.skip(str(skipped), allow_module_level=True)

from datasets import Dataset
from peft import LoraConfig
from trl.experimental.online_dpo import OnlineDPOConfig

from oppo_kit.integrations.trl.online_dpo import OverlapOnlineDPOTrainer

WORDS = ("ab", "cat 12", "the 3 dogs", "x", "hello world", "1+2=", "zebra", "say hi")
ROWS = [{"prompt": word, "number": index} for index, word in enumerate(WORDS)]
CHATS = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]
OVERLAP = OverlapConfig(schedule="oppo", delta=2, decode_tokens=2, placement="inline")
LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")


def by_length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def make_policy() -> Any:
    """Pairs of it end at different times."""
    policy: Any = tiny_causal_lm()
    with torch.no_grad():
        policy.lm_head.weight[2] *= 1.8
    return policy


def make_online_dpo(tmp_path: Path, trainer_class: Any = OverlapOnlineDPOTrainer, **changes: Any) -> Any:
    """A trainer of B = 2 pairs, two micro-steps an update, 3 updates."""
    values: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "max_new_tokens": 12,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    names = set(OnlineDPOConfig.__dataclass_fields__)
    values |= {name: changes.pop(name) for name in list(changes) if name in names}
    rows = changes.pop("rows", ROWS)
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    arguments: dict[str, Any] = {
        "model": make_policy(),
        "reward_funcs": tiny_classifier(),
        "processing_class": tokenizer,
        "reward_processing_classes": tiny_tokenizer(chat_template=CHAT_TEMPLATE),
        "train_dataset": Dataset.from_list(rows) if isinstance(rows, list) else rows,
    }
    return trainer_class(**({"args": OnlineDPOConfig(**values)} | arguments | changes))
