"""Wires models into an engine on one device; for another arrangement, compose the parts yourself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from oppo_kit.algorithm import AlgorithmBase
from oppo_kit.backends.forward import causal_model, check_one_score, context_tokens
from oppo_kit.backends.function_scorer import FunctionScorer
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.backends.hf_scorer import HFCriticScorer, HFReferenceScorer, HFRewardScorer
from oppo_kit.backends.loading import (
    check_same_vocabulary,
    check_vocab_sizes,
    has_same_vocabulary,
    stop_token_ids,
)
from oppo_kit.backends.rendering import IdsRendering, Rendering, TextRendering
from oppo_kit.backends.sampler import Truncation
from oppo_kit.backends.vllm_engine import VLLMEngine
from oppo_kit.backends.vllm_generator import VLLMGenerator
from oppo_kit.config import LoraSettings, OverlapConfig, SamplingConfig, TrainConfig
from oppo_kit.engine.loop import OverlapEngine
from oppo_kit.errors import ConfigError
from oppo_kit.learner.learner import AccelerateLearner, MakeOptimizers
from oppo_kit.placement.functions import FunctionPlacement
from oppo_kit.placement.placing import place, settle_placement
from oppo_kit.placement.thread import ThreadPlacement
from oppo_kit.protocols import EventListener, Generator, PromptSource, Scorer, ScorerHandle
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
    reward_tokenizer: PreTrainedTokenizerBase | None = None,
    prompt_column: str = "prompt",
    algorithm: AlgorithmBase | None = None,
    accelerator: Accelerator | None = None,
    listeners: Sequence[EventListener] = (),
    reference: nn.Module | None = None,
    make_optimizers: MakeOptimizers | None = None,
) -> OverlapEngine:
    """An engine on Hugging Face models.

    Args:
        config: all settings; its model names are not looked at.
        policy: causal language model, trained in place; PEFT-wrapped here when ``config.actor_lora`` is set.
        tokenizer: of the policy; says which tokens stop a response unless the config does.
        prompts: for example ``oppo_kit.data.PromptDataset``.
        reward: a sequence classifier with one label, or any ``Scorer`` called ``reward`` (``FunctionScorer`` for Python
            functions), which then runs in threads of its own.
        critic: sequence classifier that the critic starts from, trained in place; needed by algorithms with a critic.
        reward_tokenizer: the reward model's; needed where its vocabulary is not the policy's. It then reads text.
        prompt_column: the column of a prompt that text is made from: text or messages.
        algorithm: an instance instead of the one that ``config.algo`` names.
        accelerator: precision, device and trackers.
        listeners: called with every engine event.
        reference: the reference policy, frozen here; None: the policy as it is now.
        make_optimizers: see ``AccelerateLearner``.

    Raises:
        ConfigError: a setting or a combination that cannot work.
        ModelError: a model that cannot be served.
    """
    algorithm = algorithm or create_algorithm(config.algo, config.algo_config)
    _check_settings(config, algorithm, reward)
    critic = critic if algorithm.needs_critic else None
    rendering = _rendering(config, tokenizer, reward_tokenizer, prompt_column)
    reader = reward if isinstance(reward, nn.Module) and isinstance(rendering, IdsRendering) else None
    check_vocab_sizes(causal_model(policy), reader, critic, tokenizer)
    if critic is not None:
        check_one_score(critic, "critic")
    if reference is None:
        reference = frozen_reference(config, policy)
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
        make_optimizers=make_optimizers,
    )
    overlap = settle_placement(config.overlap, learner.accelerator.device)
    config = config.model_copy(update={"overlap": overlap})
    generator = _make_generator(config, algorithm, learner.policy, tokenizer)
    scorers = _make_scorers(config, algorithm, learner, reward, reference, rendering)
    try:
        return OverlapEngine(
            algorithm=algorithm,
            generator=generator,
            scorers=scorers,
            learner=learner,
            prompts=prompts,
            batch_size=config.batch_size,
            num_steps=config.num_steps,
            overlap=config.overlap,
            listeners=listeners,
        )
    except BaseException:
        for handle in scorers.values():
            handle.close()
        raise


def _check_settings(config: TrainConfig, algorithm: AlgorithmBase, reward: nn.Module | Scorer) -> None:
    """What the configuration alone cannot refuse."""
    if algorithm.needs_proximal and config.overlap.carried_cache == "keep":
        raise ConfigError(
            f"{algorithm.name!r} corrects for staleness by what the newest policy says about carried tokens, and with "
            "carried_cache 'keep' it never reads them; set overlap.carried_cache to 'recompute'"
        )
    if not isinstance(reward, nn.Module) and config.reward_input != "auto":
        raise ConfigError(
            f"reward_input is {config.reward_input!r}, and the reward is no model: a function is given text and ids "
            "both; leave reward_input out"
        )


def _make_generator(
    config: TrainConfig, algorithm: AlgorithmBase, policy: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> Generator:
    sampling = config.sampling
    stop_ids = sampling.stop_token_ids
    if stop_ids is None:
        stop_ids = stop_token_ids(tokenizer, causal_model(policy))
    if config.backend == "vllm":
        return VLLMGenerator(
            policy,
            _start_vllm(config, algorithm, policy),
            temperature=sampling.temperature,
            stop_token_ids=stop_ids,
            seed=config.seed,
            carried_cache=config.overlap.carried_cache,
        )
    return HFGenerator(
        policy,
        temperature=sampling.temperature,
        stop_token_ids=stop_ids,
        seed=config.seed,
        truncation=_truncation(sampling),
        carried_cache=config.overlap.carried_cache,
        has_prefix_logprobs=algorithm.needs_proximal,
        batch_invariant=sampling.batch_invariant,
        num_threads_shared=config.overlap.decode_threads,
    )


def _start_vllm(config: TrainConfig, algorithm: AlgorithmBase, policy: nn.Module) -> VLLMEngine:
    """Room for B + Δ groups of the longest prompt and response that the settings allow."""
    model = causal_model(policy)
    max_tokens = context_tokens(model.config)
    if config.max_prompt_tokens is not None:
        longest = config.max_prompt_tokens + config.sampling.response_length
        max_tokens = longest if max_tokens is None else min(longest, max_tokens)
    if max_tokens is None:
        raise ConfigError(
            f"the configuration of {type(model).__name__} names no longest context, and vLLM must know it to start; "
            "set max_prompt_tokens"
        )
    return VLLMEngine(
        model,
        max_tokens=max_tokens,
        max_requests=(config.batch_size + config.overlap.delta) * algorithm.group_size,
        kv_cache_gib=config.vllm.kv_cache_gib,
        has_prefix_cache=config.overlap.carried_cache == "recompute",
    )


def _make_scorers(
    config: TrainConfig,
    algorithm: AlgorithmBase,
    learner: AccelerateLearner,
    reward: nn.Module | Scorer,
    reference: nn.Module,
    rendering: Rendering,
) -> dict[str, ScorerHandle]:
    """Those that the algorithm needs, each where the settings place it."""
    overlap, device = config.overlap, learner.accelerator.device
    models: dict[str, HFRewardScorer | HFReferenceScorer] = {}
    if "reward" in algorithm.scorers and isinstance(reward, nn.Module):
        models["reward"] = HFRewardScorer(_moved(reward, overlap, device), rendering=rendering)
    if "reference" in algorithm.scorers:
        models["reference"] = HFReferenceScorer(
            _moved(reference, overlap, device), temperature=config.sampling.temperature
        )
    critic = None
    if overlap.stream_critic:
        if learner.critic is None:
            raise ConfigError(
                f"stream_critic is set, and {algorithm.name!r} has no critic; leave it at its default, false"
            )
        critic = HFCriticScorer(learner.critic)
    if overlap.score_at in ("chunk", "auto"):
        streamed = [*models.values(), *([critic] if critic else [])]
        if not streamed:
            raise ConfigError(
                f"score_at {overlap.score_at!r} has nobody to stream to, since reward functions see whole responses; "
                "set overlap.score_at to 'sample'"
            )
        for scorer in streamed:
            scorer.probe_streaming()
    handles = dict(place(models, overlap, device))
    if "reward" in algorithm.scorers and not isinstance(reward, nn.Module):
        is_functions = isinstance(reward, FunctionScorer)
        handles["reward"] = (
            FunctionPlacement(reward, num_workers=config.reward_threads)
            if is_functions
            else ThreadPlacement(reward)
        )
    if critic is not None:
        handles |= place({"critic": critic}, overlap, device)
    return handles


def _moved(model: nn.Module, overlap: OverlapConfig, device: torch.device) -> nn.Module:
    """On the scorers' device; a process moves its own copy."""
    if overlap.placement == "process":
        return model
    try:
        return model.to(overlap.scorer_device or device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"scorer_device {overlap.scorer_device!r} cannot be used: {str(error).splitlines()[0]}; "
            "name one that this machine has, such as cpu or cuda:1, or null for the policy's"
        ) from error


def _rendering(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_tokenizer: PreTrainedTokenizerBase | None,
    prompt_column: str,
) -> Rendering:
    """What the reward model reads.

    Raises:
        ModelError: ids are asked for, and the vocabularies differ.
        ConfigError: text is asked for, and the reward model's tokenizer is not given.
    """
    if reward_tokenizer is None:
        if config.reward_input == "text":
            raise ConfigError(
                "reward_input 'text' needs the reward model's tokenizer; pass reward_tokenizer="
            )
        return IdsRendering()
    is_text = config.reward_input == "text" or (
        config.reward_input == "auto" and not has_same_vocabulary(tokenizer, reward_tokenizer)
    )
    if is_text:
        return TextRendering(tokenizer, reward_tokenizer, prompt_column=prompt_column)
    check_same_vocabulary(tokenizer, reward_tokenizer)
    return IdsRendering()


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


def frozen_reference(config: TrainConfig, policy: nn.Module) -> nn.Module:
    """A copy of the policy before training; for LoRA a second module over the same tensors, which never change.

    Not where it goes to another device, since the policy's tensors would go with it.
    """
    if config.actor_lora is None or config.overlap.scorer_device is not None:
        return copy.deepcopy(policy)
    shared = {id(tensor): tensor for tensor in (*policy.parameters(), *policy.buffers())}
    return copy.deepcopy(policy, shared)
