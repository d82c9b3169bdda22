"""Generators under one contract, their oracle, and what holds for every call of every one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from fakes import FakeGenerator, VirtualClock, stable_hash
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB_SIZE, tiny_causal_lm
from torch import nn

from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.backends.vllm_engine import VLLMEngine
from oppo_kit.backends.vllm_generator import VLLMGenerator
from oppo_kit.ops.noise import gumbel_noise, stream_key, token_keys
from oppo_kit.protocols import Generator
from oppo_kit.types import Prompt, Rollout, RolloutKey, TokenChunk

SEED, TEMPERATURE = 3, 0.8
STOP_IDS = tuple(range(2, VOCAB_SIZE, 9))
# Log-probs of one token by cache and by plain forward, float32.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Subject:
    """A generator under test: the model it samples from, and its settings."""

    kind: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    has_lora: bool = False
    high_temperature: float = 3.0

    def make_policy(self) -> nn.Module:
        """A fresh one, that a test may change."""
        model = tiny_causal_lm(self.kind, **self.model)
        if not self.has_lora:
            return model
        torch.manual_seed(0)
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"])
        return get_peft_model(model, config).eval()

    def make(self, policy: nn.Module, *, stop_ids: Sequence[int] = STOP_IDS, **changes: Any) -> Any:
        """A generator of this policy."""
        settings = {"temperature": TEMPERATURE, "seed": SEED, **self.settings, **changes}
        return HFGenerator(policy, stop_token_ids=stop_ids, **settings)


@dataclass(frozen=True)
class VLLMSubject(Subject):
    """vLLM takes seconds to start, so that all generators of one model have one engine, one after the other."""

    high_temperature: float = 2.0  # it refuses higher ones

    def make(self, policy: nn.Module, *, stop_ids: Sequence[int] = STOP_IDS, **changes: Any) -> Any:
        settings = {"temperature": TEMPERATURE, "seed": SEED, **self.settings, **changes}
        has_prefix_cache = settings.get("carried_cache") != "keep"
        engine = vllm_engine(self.kind, self.model, has_prefix_cache=has_prefix_cache)
        return VLLMGenerator(policy, engine, stop_token_ids=stop_ids, **settings)


_last_engine: list[tuple[Any, VLLMEngine]] = []  # a process has one at a time


def vllm_engine(kind: str, model: dict[str, Any], *, has_prefix_cache: bool) -> VLLMEngine:
    key = (kind, model, has_prefix_cache)
    if not _last_engine or _last_engine[0][0] != key or _last_engine[0][1].is_closed:
        engine = VLLMEngine(
            tiny_causal_lm(kind, **model),
            max_tokens=256,
            max_requests=16,
            kv_cache_gib=0.1,
            has_prefix_cache=has_prefix_cache,
        )
        _last_engine[:] = [(key, engine)]
    return _last_engine[0][1]


HF_SUBJECTS: dict[str, Subject] = {
    "llama": Subject(),
    "llama with tied embeddings": Subject(model={"tie_word_embeddings": True}),
    "llama with eager attention": Subject(model={"attn_implementation": "eager"}),
    "llama with LoRA": Subject(has_lora=True),
    "qwen2": Subject("qwen2"),
    "qwen2, sliding in one layer": Subject(
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3": Subject("qwen3"),
    "mistral": Subject("mistral", {"sliding_window": 5}),
    "gemma": Subject("gemma"),
    "gemma3": Subject("gemma3"),
    "gpt2": Subject("gpt2"),
    "gpt_neox": Subject("gpt_neox"),
    "opt": Subject("opt"),
    "four ticks a read": Subject(settings={"ticks_per_read": 4}),
    "batch-invariant": Subject(settings={"batch_invariant": True}),
    "carried cache kept": Subject(settings={"carried_cache": "keep"}),
    "prefix log-probs": Subject(settings={"has_prefix_logprobs": True}),
}
# The smallest heads that vLLM decodes with on a CPU.
VLLM_HEADS = {"head_dim": 32}
VLLM_SUBJECTS: dict[str, Subject] = {
    "vllm": VLLMSubject(model=VLLM_HEADS),
    "vllm with tied embeddings": VLLMSubject(model={**VLLM_HEADS, "tie_word_embeddings": True}),
    "vllm with LoRA": VLLMSubject(model=VLLM_HEADS, has_lora=True),
    "vllm, carried cache kept": VLLMSubject(model=VLLM_HEADS, settings={"carried_cache": "keep"}),
}
SUBJECTS = HF_SUBJECTS | VLLM_SUBJECTS


def _marked(names: Iterable[str]) -> list[Any]:
    """For parametrize; what needs vLLM is left to `make test-vllm`."""
    return [pytest.param(name, marks=pytest.mark.vllm) if name in VLLM_SUBJECTS else name for name in names]


RECOMPUTING = _marked(sorted(name for name in SUBJECTS if "kept" not in name))


@cache
def policy_of(name: str) -> nn.Module:
    """Shared by the tests that leave it as it is."""
    return SUBJECTS[name].make_policy()


def make_generator(name: str, *, has_stops: bool = True) -> Generator:
    if name == "fake":
        return FakeGenerator(
            (lambda draw, sample: 1 + stable_hash(draw, sample) % 15) if has_stops else lambda *_: 10_000,
            VirtualClock(),
        )
    return SUBJECTS[name].make(policy_of(name), stop_ids=STOP_IDS if has_stops else ())


# Bookkeeping does not depend on the family of the model: these are the ways through the generator.
WAYS = [
    "llama",
    "llama with LoRA",
    "gemma3",
    "gpt2",
    "four ticks a read",
    "batch-invariant",
    "carried cache kept",
    "prefix log-probs",
]
VLLM_WAYS = ["vllm", "vllm with LoRA", "vllm, carried cache kept"]
every_hf_generator = pytest.mark.parametrize("name", HF_SUBJECTS)
every_hf_generator_and_the_fake = pytest.mark.parametrize("name", ["fake", *HF_SUBJECTS])
every_hf_way_and_the_fake = pytest.mark.parametrize("name", ["fake", *WAYS])
every_way = pytest.mark.parametrize("name", _marked([*WAYS, *VLLM_WAYS]))
every_way_and_the_fake = pytest.mark.parametrize("name", _marked(["fake", *WAYS, *VLLM_WAYS]))


def make_rollout(draw_id: int, num_prompt_tokens: int, limit: int = 12, sample_index: int = 0) -> Rollout:
    ids = tuple((draw_id * 17 + 5 * index) % VOCAB_SIZE for index in range(num_prompt_tokens))
    return Rollout(RolloutKey(draw_id, sample_index), Prompt(draw_id, ids, limit))


def make_rollouts() -> list[Rollout]:
    """Unequal prompts and limits; two samples of one draw."""
    rollouts = [make_rollout(draw, 1 + draw * 5 % 13, limit=3 + draw * 5 % 17) for draw in range(7)]
    return [*rollouts, make_rollout(6, 5, limit=16, sample_index=1)]


def decode(generator: Generator, live: dict[RolloutKey, Rollout], max_tokens: int) -> list[TokenChunk]:
    """One call; whatever holds for every call of every generator is checked here."""
    chunks = generator.decode(max_tokens)
    assert sorted(chunk.key for chunk in chunks) == sorted(live), "one chunk per live rollout"
    for chunk in chunks:
        rollout = live[chunk.key]
        remaining = rollout.remaining_tokens
        num_tokens = len(chunk.token_ids)
        assert num_tokens == len(chunk.behaviour_logprobs) <= min(remaining, max_tokens)
        assert all(logprob <= 0 for logprob in chunk.behaviour_logprobs)
        # Every live row advances at every tick, so that a chunk's tokens are those of ticks 1, 2, …
        assert chunk.last_tick == num_tokens
        if chunk.finish_reason is None:
            assert num_tokens == max_tokens < remaining
        elif chunk.finish_reason == "length":
            assert num_tokens == remaining
        rollout.append(chunk, base_tick=0)
        if chunk.finish_reason is not None:
            del live[chunk.key]
    return chunks


def by_key(rollouts: Sequence[Rollout]) -> dict[RolloutKey, Rollout]:
    return {rollout.key: rollout for rollout in rollouts if not rollout.is_ended}


def decode_all(generator: Generator, rollouts: Sequence[Rollout], max_tokens: int) -> None:
    live = by_key(rollouts)
    while live:
        decode(generator, live, max_tokens)
    assert generator.decode(max_tokens) == []


def assert_same(rollouts: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    for one, other in zip(rollouts, expected, strict=True):
        assert one.key == other.key
        assert one.token_ids == other.token_ids
        assert one.behaviour_logprobs == pytest.approx(other.behaviour_logprobs, abs=TOLERANCE)
        assert one.finish_reason == other.finish_reason


def uninterrupted(name: str) -> list[Rollout]:
    rollouts = make_rollouts()
    generator = make_generator(name)
    generator.admit(rollouts)
    decode_all(generator, rollouts, 64)
    return rollouts


@torch.no_grad()
def next_logprobs(policy: nn.Module, token_ids: list[int], temperature: float = TEMPERATURE) -> torch.Tensor:
    return (policy(input_ids=torch.tensor([token_ids])).logits[0, -1] / temperature).log_softmax(-1)


def sample_alone(policy: nn.Module, rollout: Rollout, stop_ids: Sequence[int] = STOP_IDS) -> Rollout:
    """The oracle."""
    alone = Rollout(rollout.key, rollout.prompt)
    key = stream_key(SEED, *rollout.key)
    while not alone.is_ended:
        logprobs = next_logprobs(policy, [*rollout.prompt.token_ids, *alone.token_ids])
        noise = gumbel_noise(token_keys([key], [len(alone.token_ids)], 1)[0], VOCAB_SIZE)[0]
        alone.token_ids.append(int((logprobs + noise).argmax()))
        alone.behaviour_logprobs.append(float(logprobs[alone.token_ids[-1]]))
        if alone.token_ids[-1] in stop_ids:
            alone.finish_reason = "stop"
        elif not alone.remaining_tokens:
            alone.finish_reason = "length"
    return alone


@torch.no_grad()
def forward_logprobs(policy: nn.Module, rollout: Rollout) -> list[float]:
    """Of all response tokens, by one plain forward pass over this row alone."""
    num_prompt_tokens = len(rollout.prompt.token_ids)
    token_ids = [*rollout.prompt.token_ids, *rollout.token_ids]
    logits = policy(input_ids=torch.tensor([token_ids])).logits[0, num_prompt_tokens - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0].tolist()


@torch.no_grad()
def change(policy: nn.Module) -> None:
    for parameter in policy.parameters():
        parameter.add_(torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape) * 0.05)
