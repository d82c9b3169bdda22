"""Wires models into an engine on one device; for another arrangement, compose the parts yourself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from oppo_kit.algorithm import AlgorithmBase
from oppo_kit.backends.forward import causal_model, check_one_score
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.backends.hf_scorer import HFReferenceScorer, HFRewardScorer
from oppo_kit.backends.loading import check_vocab_sizes, stop_token_ids
from oppo_kit.backends.sampler import Truncation
from oppo_kit.config import LoraSettings, SamplingConfig, TrainConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.learner.learner import AccelerateLearner
from oppo_kit.placement.inline import InlinePlacement
from oppo_kit.placement.thread import ThreadPlacement
from oppo_kit.protocols import EventListener, PromptSource, Scorer, ScorerHandle
from oppo_kit.registry import create_algorithm

_logger = logging.getLogger(__name__)


def build_engine(
    config: TrainConfig,
    *,
    policy: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptSource,
    reward: nn.Module | Scorer,
    critic: nn.Module | None = None,
    algorithm: AlgorithmBase | None = None,
    accelerator: Accelerator | None = None,
    listeners: Sequence[EventListener] = (),
) -> OverlapEngine:
    """An engine on Hugging Face models.

    Args:
        config: all settings; its model names are not looked at.
        policy: causal language model, trained in place; PEFT-wrapped here when ``config.actor_lora`` is set.
        tokenizer: of the policy; says which tokens stop a response unless the config does.
        prompts: for example ``oppo_kit.data.PromptDataset``.
        reward: a sequence classifier with one label on the policy's vocabulary, or any ``Scorer`` called ``reward``
            (``FunctionScorer`` for Python functions), which then runs in a thread of its own.
        critic: sequence classifier that the critic starts from, trained in place; needed by algorithms with a critic.
        algorithm: an instance instead of the one that ``config.algo`` names.
        accelerator: precision, device and trackers.
        listeners: called with every engine event.

    Raises:
        ConfigError: a setting or a combination that cannot work.
        ModelError: a model that cannot be served.
    """
    algorithm = algorithm or create_algorithm(config.algo, config.algo_config)
    critic = critic if algorithm.needs_critic else None
    check_vocab_sizes(
        causal_model(policy), reward if isinstance(reward, nn.Module) else None, critic, tokenizer
    )
    if critic is not None:
        check_one_score(critic, "critic")
    reference = _frozen_reference(config, policy)
    if config.actor_lora is not None:
        policy = add_adapter(policy, config.actor_lora)
    learner = AccelerateLearner(
        policy,
        critic,
        config=config.learner,
        temperature=config.sampling.temperature,
        num_steps=config.num_steps,
        seed=config.seed,
        accelerator=accelerator,
    )
    return OverlapEngine(
        algorithm=algorithm,
        generator=_make_generator(
            config, learner.policy, tokenizer, has_prefix_logprobs=algorithm.needs_proximal
        ),
        scorers=_make_scorers(config, algorithm, learner, reward, reference),
        learner=learner,
        prompts=prompts,
        batch_size=config.batch_size,
        num_steps=config.num_steps,
        overlap=config.overlap,
        listeners=listeners,
    )


def _make_generator(
    config: TrainConfig, policy: nn.Module, tokenizer: PreTrainedTokenizerBase, *, has_prefix_logprobs: bool
) -> HFGenerator:
    sampling = config.sampling
    stop_ids = sampling.stop_token_ids
    return HFGenerator(
        policy,
        temperature=sampling.temperature,
        stop_token_ids=stop_token_ids(tokenizer, causal_model(policy)) if stop_ids is None else stop_ids,
        seed=config.seed,
        truncation=_truncation(sampling),
        carried_cache=config.overlap.carried_cache,
        has_prefix_logprobs=has_prefix_logprobs,
        batch_invariant=sampling.batch_invariant,
    )


def _make_scorers(
    config: TrainConfig,
    algorithm: AlgorithmBase,
    learner: AccelerateLearner,
    reward: nn.Module | Scorer,
    reference: nn.Module | None,
) -> dict[str, ScorerHandle]:
    """Those that the algorithm needs; without a reference of its own, the policy without its adapter."""
    scorers: dict[str, ScorerHandle] = {}
    if "reward" in algorithm.scorers:
        scorers["reward"] = _place_reward(reward, learner)
    if "reference" in algorithm.scorers:
        scorer = HFReferenceScorer(
            learner.policy if reference is None else reference.to(learner.accelerator.device),
            temperature=config.sampling.temperature,
            without_adapter=reference is None,
        )
        scorers["reference"] = InlinePlacement(scorer)
    return scorers


def add_adapter(policy: nn.Module, settings: LoraSettings) -> nn.Module:
    """The policy with a fresh LoRA adapter, whose B is zero: it samples as before."""
    from peft import LoraConfig, get_peft_model

    lora: Any = LoraConfig(task_type="CAUSAL_LM", **settings.model_dump())
    return get_peft_model(policy, lora)  # type: ignore[arg-type]


def _truncation(sampling: SamplingConfig) -> Truncation | None:
    if not sampling.is_truncated:
        return None
    _logger.warning(
        "top_k=%d, top_p=%g, min_p=%g: responses are drawn from a truncated distribution, while log-probs and KL are "
        "those of the full one; oppo/kept_mass in the metrics is the probability that was kept",
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
    )
    return Truncation(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)


def _frozen_reference(config: TrainConfig, policy: nn.Module) -> nn.Module | None:
    """A copy of the policy before training; None for LoRA, whose base is the reference."""
    return None if config.actor_lora is not None else copy.deepcopy(policy)


def _place_reward(reward: nn.Module | Scorer, learner: AccelerateLearner) -> ScorerHandle:
    if isinstance(reward, nn.Module):
        return InlinePlacement(HFRewardScorer(reward.to(learner.accelerator.device)))
    return ThreadPlacement(reward)
