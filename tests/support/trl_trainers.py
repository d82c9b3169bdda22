"""Tiny runs of TRL's group trainers, stock or overlapping, on the CPU and offline."""

from __future__ import annotations

import hashlib
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CHAT_TEMPLATE, tiny_causal_lm, tiny_classifier, tiny_tokenizer

from oppo_kit import OverlapConfig
from oppo_kit.integrations.trl.compatibility import is_supported

NAMES = ("grpo", "rloo")
EOS = 2
WORDS = [
    "ab",
    "cat 12",
    "the 3 dogs",
    "x",
    "hello world",
    "1+2=",
    "zebra",
    "q r",
    "7 7 7",
    "end.",
    "ok",
    "no!",
]


def require_supported_trl() -> None:
    """Skip without a TRL that the trainers work with, but fail in continuous integration, which must have it."""
    try:
        installed = metadata.version("trl")
    except metadata.PackageNotFoundError:
        installed = "none"
    if is_supported(installed):
        return
    message = f"trl {installed} is installed; this test needs pip install 'oppo-kit[trl]'"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def stock_class(name: str) -> Any:
    import trl

    return {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[name]


def overlap_class(name: str) -> Any:
    from oppo_kit.integrations import trl

    return {"grpo": trl.OverlapGRPOTrainer, "rloo": trl.OverlapRLOOTrainer}[name]


def make_arguments(name: str, folder: Path, **changes: Any) -> Any:
    import trl

    config_class = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[name]
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 2,
        "max_completion_length": 12,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 10.0,
        "beta": 0.0,
    }
    return config_class(**(values | changes))


def text_data(words: list[str] | None = None, **columns: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": words or WORDS, **columns})


def chat_data(words: list[str] | None = None) -> Any:
    return text_data([[{"role": "user", "content": word}] for word in words or WORDS])  # type: ignore[misc]


def make_policy(**changes: Any) -> Any:
    policy = tiny_causal_lm("qwen2", **{"tie_word_embeddings": False, **changes})
    with torch.no_grad():
        policy.get_output_embeddings().weight[EOS] *= 3  # some responses end soon, and some do not
    return policy


def make_reward_model(seed: int = 1, **changes: Any) -> Any:
    model = tiny_classifier("qwen2", seed=seed, **changes)
    model.config._name_or_path = f"reward-{seed}"
    return model


def reward_of_length(completions: list[Any], **columns: Any) -> list[float]:
    return [
        float(len(text if isinstance(text, str) else text[0]["content"])) % 5 + 0.25 * str(text).count("e")
        for text in completions
    ]


def make_trainer(
    name: str,
    folder: Path,
    *,
    overlap: OverlapConfig | dict[str, Any] | None = None,
    trainer_class: Any = None,
    reward: Any = reward_of_length,
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    reward_tokenizer: Any = None,
    arguments: Any = None,
    trainer_arguments: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """An overlapping trainer, or one of ``trainer_class``, which is given ``overlap`` where there is one."""
    tokenizer = tokenizer or tiny_tokenizer(chat_template=CHAT_TEMPLATE, adds_bos=False)
    rewards = reward if isinstance(reward, list) else [reward]
    tokenizers = [
        (reward_tokenizer or tokenizer) if isinstance(one, torch.nn.Module) else None for one in rewards
    ]
    values = {
        "model": model if model is not None else make_policy(),
        "reward_funcs": list(rewards),
        "args": arguments or make_arguments(name, folder, **changes),
        "train_dataset": text_data() if data is None else data,
        "processing_class": tokenizer,
        "reward_processing_classes": tokenizers,
        **(trainer_arguments or {}),
    }
    if overlap is None and trainer_class is not None:
        return trainer_class(**values)
    overlap = OverlapConfig(**overlap) if isinstance(overlap, dict) else overlap
    return (trainer_class or overlap_class(name))(**values, overlap=overlap)


def parameter_hash(model: Any) -> str:
    digest = hashlib.sha256()
    for key, parameter in sorted(model.named_parameters()):
        digest.update(key.encode())
        digest.update(parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()


def logged(trainer: Any, key: str) -> list[float]:
    """What was logged under a key, step by step."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def watched(trainer_class: Any) -> Any:
    """A subclass that keeps, by round of generation, what was chosen, and what the loss is given."""

    class Watched(trainer_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seen: list[tuple[Any, dict[str, Any]]] = []
            super().__init__(*args, **kwargs)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            if self.model.training:
                self.seen.append((self._rollouts.batch, dict(output)))
            return output

    return Watched


def playback(trainer_class: Any, answers: list[list[list[int]]]) -> Any:
    """A subclass of a stock trainer whose generation brings these token ids, round by round."""

    class Playback(trainer_class):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            token_ids = answers.pop(0)
            return (token_ids, None) if trainer_class.__name__ == "GRPOTrainer" else token_ids

    return Playback


def answers_of(trainer: Any) -> list[list[list[int]]]:
    """Token ids of the responses of a watched trainer, by round."""
    return [
        [list(r.token_ids) for group in batch.groups for r in group.rollouts] for batch, _ in trainer.seen
    ]
