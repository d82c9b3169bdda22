"""Reward models of a trainer, taken out of its reward functions and scored by ours, beside decoding if wished.

What the trainer is left with is a function that knows the scores of the chosen rows, and scores others (evaluation)
when it is called, so that weights, metrics, logs and the calls of Python functions stay the trainer's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from oppo_kit.backends.hf_scorer import HFRewardScorer
from oppo_kit.config import OverlapConfig
from oppo_kit.errors import ConfigError
from oppo_kit.integrations.trl.weights import bare_twin
from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.placement.placing import place
from oppo_kit.protocols import ScorerHandle
from oppo_kit.types import Prompt, Rollout, RolloutKey

_STREAMED = ("chunk", "auto")


class TrainerRendering:
    """The text that TRL's group trainers give a reward model, encoded as they encode it.

    Prompt and decoded response, one after the other; or the conversation by the reward tokenizer's chat template. No
    special token is added, and none taken away, unlike ``oppo_kit.backends.rendering.TextRendering``, which knows what
    the tokenizer itself adds.

    Args:
        policy_tokenizer: decodes responses, without special tokens.
        reward_tokenizer: encodes; has a pad token.
        template_arguments: for the chat template.
    """

    def __init__(
        self,
        policy_tokenizer: PreTrainedTokenizerBase,
        reward_tokenizer: PreTrainedTokenizerBase,
        template_arguments: Mapping[str, Any],
    ) -> None:
        self._policy_tokenizer: Any = policy_tokenizer
        self._reward_tokenizer: Any = reward_tokenizer
        self._template_arguments = dict(template_arguments)

    def encode(self, rollout: Rollout) -> list[int]:
        """Ids of the text; pad stands for no text at all."""
        prompt = rollout.prompt.columns["prompt"]
        response = self._policy_tokenizer.decode(list(rollout.token_ids), skip_special_tokens=True)
        if isinstance(prompt, str):
            text = prompt + response
        else:
            messages = [*prompt, {"role": "assistant", "content": response}]
            text = self._reward_tokenizer.apply_chat_template(
                messages, tokenize=False, **self._template_arguments
            )
        token_ids = self._reward_tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids or [self._reward_tokenizer.pad_token_id]


class RewardModelFunction:
    """A reward model as a reward function.

    Attributes:
        known: the scores of the rows that are trained now; None: of rows that are not ours, which are scored at once.
    """

    def __init__(self, scorer: HFRewardScorer) -> None:
        self.scorer = scorer
        self.handle: ScorerHandle = InlinePlacement(scorer)
        self.known: list[float] | None = None

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],  # noqa: ARG002
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,  # noqa: ARG002
    ) -> list[Any]:
        """One score per row."""
        if self.known is not None:
            return self.known
        rollouts = [
            Rollout(
                RolloutKey(-1 - row, 0),
                Prompt(-1 - row, (), len(token_ids), {"prompt": prompt}),
                token_ids=list(token_ids),
                finish_reason="stop",
            )
            for row, (prompt, token_ids) in enumerate(zip(prompts, completion_ids, strict=True))
        ]
        return [future.result() for future in self.handle.submit(rollouts)]


class RewardModels:
    """The reward models of a trainer, by the names under which the engine keeps their scores.

    Args:
        reward_functions: the trainer's list; its modules are replaced in place.
        reward_tokenizers: one per entry; the others' are not looked at.
        policy_tokenizer: decodes responses.
        template_arguments: for chat templates.
        overlap: where they run, and when they score; its placement is settled.

    Raises:
        ModelError: one cannot be scored.
    """

    def __init__(
        self,
        reward_functions: list[Any],
        reward_tokenizers: Sequence[Any],
        *,
        policy_tokenizer: PreTrainedTokenizerBase,
        template_arguments: Mapping[str, Any],
        overlap: OverlapConfig,
    ) -> None:
        self._overlap = overlap
        self._functions: dict[str, RewardModelFunction] = {}
        for index, (function, tokenizer) in enumerate(zip(reward_functions, reward_tokenizers, strict=True)):
            if isinstance(function, nn.Module):
                name = f"reward_model_{index}"
                rendering = TrainerRendering(policy_tokenizer, tokenizer, template_arguments)
                scorer = HFRewardScorer(bare_twin(function), rendering=rendering, name=name)
                self._functions[name] = reward_functions[index] = RewardModelFunction(scorer)

    def place(self, device: torch.device) -> dict[str, ScorerHandle]:
        """Start them where the settings say, on the trainer's device unless they name another.

        Raises:
            ModelError: one cannot be fed chunk by chunk, and that is asked for.
        """
        if not self._functions:
            return {}
        scorers = {name: function.scorer for name, function in self._functions.items()}
        for scorer in scorers.values():
            # A process has a copy of its own, on the scorers' device.
            scorer.module.to(
                "cpu" if self._overlap.placement == "process" else self._overlap.scorer_device or device
            )
            if self._overlap.score_at in _STREAMED:
                scorer.probe_streaming()
        handles = dict(place(scorers, self._overlap, device))
        for name, function in self._functions.items():
            function.handle = handles[name]
        return handles

    def take_back(self, device: torch.device) -> None:
        """The placements are closed: what is scored from now on is scored here."""
        for function in self._functions.values():
            function.scorer.module.to(device)
            function.handle = InlinePlacement(function.scorer)

    @contextmanager
    def knowing(self, scores: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the trainer asks for the scores of these rows."""
        try:
            for name, function in self._functions.items():
                function.known = scores[name].tolist()
            yield
        finally:
            for function in self._functions.values():
                function.known = None


def refuse_idle_scorers(overlap: OverlapConfig, reward_functions: Sequence[Any]) -> None:
    """Nothing is asked for that nobody would do.

    Args:
        overlap: before its placement is settled.
        reward_functions: of which some may be models.

    Raises:
        ConfigError: naming the setting.
    """
    if overlap.stream_critic:
        raise ConfigError(
            "overlap.stream_critic is set, and this trainer has no critic; leave it at its default, false"
        )
    if any(isinstance(function, nn.Module) for function in reward_functions):
        return
    if overlap.score_at != "batch" or overlap.placement not in ("auto", "inline"):
        raise ConfigError(
            f"overlap.score_at={overlap.score_at!r} with placement={overlap.placement!r} has no reward model to work "
            "on: the trainer itself calls Python reward functions, once per batch; leave both at their defaults, "
            "'batch' and 'auto'"
        )
