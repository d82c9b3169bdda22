"""What the runners on stock TRL share: the tokenizer that TRL is given, the optimizer, the garbage collector's part."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from oppo_kit.config import LearnerConfig
from oppo_kit.errors import ConfigError

STALENESS_SETTINGS = frozenset({"correction", "weight_cap"})
"""Of our algorithms: how to treat tokens of older policies, of which TRL has none."""


@contextlib.contextmanager
def frozen_garbage() -> Iterator[None]:
    """Collections look at nothing older than this."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def print_nothing(*_: Any, **__: Any) -> None:
    """Stands in for ``print``: TRL announces itself on standard output, which belongs to the progress of the run."""


def make_optimizer(learner: LearnerConfig, models: Iterable[nn.Module]) -> torch.optim.Optimizer:
    """Fused AdamW over all trained weights in one parameter group, as our learner's."""
    return torch.optim.AdamW(
        [parameter for model in models for parameter in model.parameters() if parameter.requires_grad],
        lr=learner.learning_rate,
        betas=(learner.adam_beta1, learner.adam_beta2),
        eps=learner.adam_epsilon,
        weight_decay=learner.weight_decay,
        fused=True,
    )


def prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: tuple[int, ...], prompts: Sequence[Sequence[int]]
) -> PreTrainedTokenizerBase:
    """A copy that pads on the left with a harmless token and calls the stop token EOS.

    Raises:
        ConfigError: no special token is left for padding.
    """
    prepared = copy.deepcopy(tokenizer)
    prepared.padding_side = "left"
    if stop_token_ids:
        prepared.eos_token = prepared.convert_ids_to_tokens(stop_token_ids[0])
    used = set(stop_token_ids).union(*prompts)
    special: list[Any] = [tokenizer.pad_token_id, *tokenizer.all_special_ids]
    candidates: list[int] = [token for token in special if token is not None]
    pad_token_id = next((token for token in candidates if token not in used), None)
    if pad_token_id is None:
        raise ConfigError(
            f"the special tokens {sorted(set(candidates))} all stop a response or occur in a prompt, and TRL "
            "needs one of them for padding; add a pad token to the tokenizer"
        )
    prepared.pad_token = prepared.convert_ids_to_tokens(pad_token_id)
    return prepared
