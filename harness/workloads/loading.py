"""From a training configuration to all that a runner needs: task, prompts, tokenizer, models.

Everything is checked here, before a model is loaded: names, vocabularies, contexts, columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from harness.models import offline_names, resolve_model
from harness.workloads.base import Row, Task, get_task, is_held_out
from harness.workloads.datasets import load_rows
from oppo_kit.backends.function_scorer import load_reward_function, name_of
from oppo_kit.backends.loading import (
    ModelSettings,
    check_same_vocabulary,
    check_vocab_sizes,
    has_same_vocabulary,
    load_causal_lm,
    load_sequence_classifier,
    load_settings,
    load_tokenizer,
    stop_token_ids,
)
from oppo_kit.backends.rendering import IdsRendering, Rendering, TextRendering
from oppo_kit.config import TrainConfig
from oppo_kit.data import INPUT_IDS, PromptDataset
from oppo_kit.errors import ConfigError
from oppo_kit.types import Prompt

RewardFunction = Callable[..., Any]

_logger = logging.getLogger(__name__)

# One prompt text in ten is held out; of 50 different ones, none at all with a chance of 1 in 200.
_MIN_ROWS_TO_SPLIT = 50


@dataclass
class Workload:
    """What every runner of one configuration works on; each ``make_…`` call gives a fresh model in eval mode.

    Attributes:
        task: judges answers, also of a data set that replaces its prompts (then it cannot tell: None).
        tokenizer: the policy's.
        prompts: what is trained on.
        eval_prompts: fixed and held out, draw ids 0, 1, 2, …
        stop_token_ids: end a response.
        policy_path: folder or hub id.
        reward_path: of a sequence classifier; None with reward functions.
        critic_path: the configured one, else the reward model's if it has the policy's vocabulary, else the policy's,
            and then the critic's score head starts at 0.
        reward_functions: in TRL's signature; empty with a reward model.
        dtype: of all models.
        prompt_column: column of the prompt in ``Prompt.columns``.
        reward_tokenizer: of a reward model that reads text; None where it reads the policy's token ids.
    """

    task: Task
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset
    eval_prompts: list[Prompt]
    stop_token_ids: tuple[int, ...]
    policy_path: str
    reward_path: str | None
    critic_path: str
    reward_functions: list[RewardFunction] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    prompt_column: str = "prompt"
    reward_tokenizer: PreTrainedTokenizerBase | None = None

    def reward_rendering(self) -> Rendering:
        """What the reward model reads."""
        if self.reward_tokenizer is None:
            return IdsRendering()
        return TextRendering(self.tokenizer, self.reward_tokenizer, prompt_column=self.prompt_column)

    def make_policy(self) -> PreTrainedModel:
        """A fresh causal language model."""
        return self._ready(load_causal_lm(self.policy_path, self.dtype, offline_names=offline_names()))

    def make_reward(self) -> PreTrainedModel:
        """A fresh sequence classifier with one label.

        Raises:
            ConfigError: the reward is a function.
        """
        if self.reward_path is None:
            names = ", ".join(map(name_of, self.reward_functions))
            raise ConfigError(
                f"the reward is a function ({names}), not a model; set reward to a sequence classifier"
            )
        return self._ready(
            load_sequence_classifier(self.reward_path, self.dtype, offline_names=offline_names())
        )

    def make_critic(self) -> PreTrainedModel:
        """A fresh sequence classifier with one label, from ``critic_path``."""
        return self._ready(
            load_sequence_classifier(
                self.critic_path, self.dtype, offline_names=offline_names(), fresh_head="zero"
            )
        )

    def _ready(self, model: PreTrainedModel) -> PreTrainedModel:
        if model.config.pad_token_id is None:  # transformers' classifiers refuse batches without one
            model.config.pad_token_id = self.tokenizer.pad_token_id
        return model


def load_workload(train: TrainConfig, *, num_eval_problems: int) -> Workload:
    """Resolve names, read data and check that everything fits together; no weights are loaded.

    Raises:
        OppoError: anything that does not; see the functions called.
    """
    task = get_task(train.task)
    policy_path = resolve_model(train.model)
    tokenizer = load_tokenizer(policy_path, offline_names=offline_names())
    settings = load_settings(policy_path, offline_names=offline_names())
    prompt_limit = _prompt_limit(train, settings)
    train_rows, eval_rows, prompt_column = _rows(train, task, num_eval_problems)

    def prompts_of(rows: Sequence[Row], *, shuffle: bool) -> PromptDataset:
        return PromptDataset(
            rows,
            tokenizer,
            prompt_column=prompt_column,
            max_new_tokens=train.sampling.response_length,
            max_prompt_tokens=prompt_limit,
            long_prompts=train.long_prompts,
            seed=train.seed,
            shuffle=shuffle,
        )

    reward_path, functions = _reward(train, task)
    reward_tokenizer = _reward_tokenizer(train, tokenizer, reward_path, policy_path)
    ids_path = reward_path if reward_tokenizer is None else None
    critic_path = _critic_path(train, ids_path, policy_path)
    _check_vocabularies(tokenizer, settings, policy_path, ids_path, critic_path)
    evaluation = prompts_of(eval_rows, shuffle=False) if eval_rows else None
    return Workload(
        task=task if train.dataset is None else _Unchecked(task),
        tokenizer=tokenizer,
        prompts=prompts_of(train_rows, shuffle=True),
        eval_prompts=[evaluation.draw(draw_id) for draw_id in range(len(evaluation))] if evaluation else [],
        stop_token_ids=_stop_tokens(train, tokenizer, settings),
        policy_path=policy_path,
        reward_path=reward_path,
        critic_path=critic_path,
        reward_functions=functions,
        dtype=getattr(torch, train.dtype),
        prompt_column=prompt_column,
        reward_tokenizer=reward_tokenizer,
    )


class _Unchecked:
    """A task whose prompts were replaced: its judgement of other rows would be a guess."""

    def __init__(self, task: Task) -> None:
        self.name = task.name
        self.default_overrides = task.default_overrides
        self.algorithm_overrides = task.algorithm_overrides
        self.default_reward = task.default_reward
        self.train_rows = task.train_rows
        self.eval_rows = task.eval_rows

    def check(self, row: Row, response_text: str, is_stopped: bool) -> bool | None:  # noqa: ARG002
        return None


def _rows(train: TrainConfig, task: Task, num_eval: int) -> tuple[Sequence[Row], Sequence[Row], str]:
    if train.dataset is None:
        eval_rows = task.eval_rows(num_eval) if num_eval else []
        return task.train_rows(train.seed), eval_rows, "prompt"
    column = train.prompt_column
    rows = load_rows(train.dataset, prompt_column=column)
    if not num_eval:
        return rows, [], column
    texts = [repr(row.get(column, row.get(INPUT_IDS))) for row in rows]
    is_out = [is_held_out(text) for text in texts]
    if len(rows) < _MIN_ROWS_TO_SPLIT or len(set(is_out)) == 1:
        _logger.warning(
            "dataset %s has %d rows (%d different prompts), too few to hold any out: evaluation uses training "
            "prompts",
            train.dataset,
            len(rows),
            len(set(texts)),
        )
        return rows, rows[:num_eval], column
    kept = [row for row, is_row_out in zip(rows, is_out, strict=True) if not is_row_out]
    return kept, [row for row, is_row_out in zip(rows, is_out, strict=True) if is_row_out][:num_eval], column


def _reward_tokenizer(
    train: TrainConfig, tokenizer: PreTrainedTokenizerBase, reward_path: str | None, policy_path: str
) -> PreTrainedTokenizerBase | None:
    """The reward model's, where it is to read text; None where ids will do, which ``_check_vocabularies`` checks."""
    if reward_path is None or train.reward_input == "ids":
        return None
    if train.reward_input == "auto" and reward_path == policy_path:
        return None
    other = load_tokenizer(reward_path, offline_names=offline_names())
    if train.reward_input == "auto":
        if has_same_vocabulary(tokenizer, other):
            return None
        _logger.info("the reward model %s has a vocabulary of its own, so it reads text", reward_path)
    return other


def _check_vocabularies(
    tokenizer: PreTrainedTokenizerBase,
    policy: ModelSettings,
    policy_path: str,
    reward_path: str | None,
    critic_path: str,
) -> None:
    for path in {reward_path, critic_path} - {None, policy_path}:
        check_same_vocabulary(tokenizer, load_tokenizer(str(path), offline_names=offline_names()))
    critic = load_settings(critic_path, offline_names=offline_names())
    reward = None if reward_path is None else load_settings(reward_path, offline_names=offline_names())
    check_vocab_sizes(policy, reward, critic, tokenizer)


def _prompt_limit(train: TrainConfig, settings: ModelSettings) -> int | None:
    context, response = settings.context_tokens, train.sampling.response_length
    if context is None:
        return train.max_prompt_tokens
    if response >= context:
        raise ConfigError(
            f"sampling.response_length={response} leaves no room for a prompt in the context of {context} "
            f"tokens of {train.model!r}; set it below {context}"
        )
    limit = context - response
    if train.max_prompt_tokens is None:
        return limit
    if train.max_prompt_tokens > limit:
        raise ConfigError(
            f"max_prompt_tokens={train.max_prompt_tokens} and sampling.response_length={response} exceed the "
            f"context of {context} tokens of {train.model!r}; with this response length at most {limit}"
        )
    return train.max_prompt_tokens


def _reward(train: TrainConfig, task: Task) -> tuple[str | None, list[RewardFunction]]:
    reward = train.reward or task.default_reward
    if reward is None:
        raise ConfigError(
            f"task {task.name!r} has no reward of its own; set reward to a hub id or folder of a sequence "
            "classifier with the policy's vocabulary, or to module:function"
        )
    if ":" in reward and not Path(reward).is_dir():
        return None, [load_reward_function(reward)]
    return resolve_model(reward, "reward"), []


def _critic_path(train: TrainConfig, reward_path: str | None, policy_path: str) -> str:
    if train.critic is not None:
        return resolve_model(train.critic, "critic")
    return policy_path if reward_path is None else reward_path


def _stop_tokens(
    train: TrainConfig, tokenizer: PreTrainedTokenizerBase, settings: ModelSettings
) -> tuple[int, ...]:
    configured = train.sampling.stop_token_ids
    if configured is None:
        return stop_token_ids(tokenizer, settings)
    outside = [index for index in configured if not 0 <= index < len(tokenizer)]
    if outside:
        raise ConfigError(
            f"sampling.stop_token_ids has {outside[0]}, outside the vocabulary of {len(tokenizer)}; "
            "use token ids of the policy's tokenizer"
        )
    return tuple(sorted(set(configured)))
