"""Seconds of a step by stage, from datasheets and stated assumptions: an estimate, and no measurement.

Decoding a token of every row reads all weights and the rows' keys and values once; or it waits for the host to start
the kernels; or, with very many rows, for arithmetic: the slowest of the three counts. Where vLLM's cache is smaller
than what all rows hold on average, they take turns. Reading given tokens takes 2 operations per parameter and token,
training 6 (4 where the weights are frozen below an adapter). Left out: attention's own arithmetic, communication
between devices, reward functions, evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.dry_run.cards import Card
from harness.dry_run.layout import Layout
from harness.dry_run.models import Models
from harness.dry_run.work import MEDIAN_FRAC, StepTokens, Work, mean_step
from oppo_kit.config import TrainConfig

# Shares of the datasheet's peak that plain PyTorch reaches on models of billions of parameters; round numbers.
BANDWIDTH_FRAC = 0.6
COMPUTE_FRAC = 0.35
# What the host needs to start the kernels of one decoder layer one by one, with a fast CPU and nothing else to do;
# twice that with an adapter. Backend vllm replays recorded graphs instead.
LAUNCH_S_PER_LAYER = 1e-3

Limit = Literal["launches", "bandwidth", "arithmetic"]
_LIMITS: dict[Limit, str] = {
    "launches": "the host, which starts kernels one by one",
    "bandwidth": "memory bandwidth: weights and KV cache are read for every token",
    "arithmetic": "arithmetic",
}


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Seconds of one step.

    Attributes:
        generate_s: prefill and decoding.
        score_s: that nothing else hides.
        train_s: update, and the critic's values.
    """

    generate_s: float
    score_s: float
    train_s: float

    @property
    def step_s(self) -> float:
        """The sum."""
        return self.generate_s + self.score_s + self.train_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step without overlap and with all of it.

    Attributes:
        sequential: decode all B, score, train.
        both: B + Δ in the air, and scores while others are decoded where scorers have a device of their own.
        decode_limit: what a decoded token waits for.
        bottleneck: the longest stage without overlap, in words.
        assumptions: sentences.
    """

    sequential: StepEstimate
    both: StepEstimate
    decode_limit: Limit
    bottleneck: str
    assumptions: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """How many times as long a step takes without overlap."""
        return self.sequential.step_s / self.both.step_s


def estimate_step(train: TrainConfig, models: Models, work: Work, layout: Layout, card: Card) -> Estimate:
    """One step on these cards; the mean over many, with lengths as ``harness.dry_run.work`` takes them to be."""
    rate = card.flops(train.dtype) * COMPUTE_FRAC
    plain = mean_step(work, 0)
    overcommitted = mean_step(work, work.delta)

    def generate_s(tokens: StepTokens) -> tuple[float, Limit]:
        turns = _num_turns(train, models, tokens, layout)
        tick_s, limit = _tick_s(train, models, tokens, layout, card, turns)
        prefill_s = 2 * models.policy.num_parameters * tokens.num_prefilled / layout.num_training / rate
        return tokens.num_ticks * turns * tick_s + prefill_s, limit

    def score_s(tokens: StepTokens) -> float:
        parameters = sum(model.num_parameters for model in models.scorers)
        return 2 * parameters * tokens.num_trained / layout.num_scoring / rate

    def train_s(tokens: StepTokens) -> float:
        policy_cost = 6 if train.actor_lora is None else 4
        operations = policy_cost * models.policy.num_parameters * work.num_epochs
        if models.critic is not None:
            operations += (6 * work.num_epochs + 2) * models.critic.num_parameters
        return operations * tokens.num_trained / layout.num_training / rate

    plain_s, decode_limit = generate_s(plain)
    sequential = StepEstimate(plain_s, score_s(plain), train_s(plain))
    generated_s, _ = generate_s(overcommitted)
    hidden_s = generated_s if layout.scoring is not None else 0.0
    waited_s = max(0.0, score_s(overcommitted) - hidden_s)
    return Estimate(
        sequential=sequential,
        both=StepEstimate(generated_s, waited_s, train_s(overcommitted)),
        decode_limit=decode_limit,
        bottleneck=_bottleneck(sequential, decode_limit),
        assumptions=_assumptions(
            train, work, layout, plain, _num_turns(train, models, overcommitted, layout)
        ),
    )


def _context_bytes(models: Models, tokens: StepTokens, layout: Layout) -> float:
    """Keys and values of all rows that one device decodes, mean over the ticks."""
    policy = models.policy
    width = policy.num_bytes / policy.num_parameters
    token_bytes = 2 * policy.shape.num_layers * policy.shape.key_value * width
    return token_bytes * tokens.num_context / tokens.num_ticks / layout.num_training


def _num_turns(train: TrainConfig, models: Models, tokens: StepTokens, layout: Layout) -> float:
    """How many times as many ticks it takes when vLLM's cache holds only some of the rows at once; 1: it holds all."""
    if train.backend != "vllm":
        return 1.0
    return max(1.0, _context_bytes(models, tokens, layout) / (train.vllm.kv_cache_gib * 2**30))


def _tick_s(
    train: TrainConfig, models: Models, tokens: StepTokens, layout: Layout, card: Card, turns: float
) -> tuple[float, Limit]:
    """Seconds of one token of every row whose turn it is, and what they go to."""
    policy = models.policy
    read_bytes = policy.num_bytes + _context_bytes(models, tokens, layout) / turns
    rows = tokens.num_decoded / tokens.num_ticks / layout.num_training / turns
    launches = policy.shape.num_layers * _num_launches_per_layer(train)
    seconds: dict[Limit, float] = {
        "launches": launches * LAUNCH_S_PER_LAYER if train.backend == "hf" else 0.0,
        "bandwidth": read_bytes / (card.bandwidth_bytes_per_s * BANDWIDTH_FRAC),
        "arithmetic": 2 * policy.num_parameters * rows / (card.flops(train.dtype) * COMPUTE_FRAC),
    }
    limit = max(seconds, key=lambda name: seconds[name])
    return seconds[limit], limit


def _num_launches_per_layer(train: TrainConfig) -> int:
    """An adapter's small products need as many kernels as all else."""
    return 1 if train.actor_lora is None else 2


def _bottleneck(step: StepEstimate, decode_limit: Limit) -> str:
    stages = {
        f"generation, {100 * step.generate_s / step.step_s:.0f} % of a step without overlap; each token waits for "
        f"{_LIMITS[decode_limit]}": step.generate_s,
        f"scoring, {100 * step.score_s / step.step_s:.0f} % of a step without overlap": step.score_s,
        f"training, {100 * step.train_s / step.step_s:.0f} % of a step without overlap": step.train_s,
    }
    return max(stages, key=lambda name: stages[name])


def _assumptions(
    train: TrainConfig, work: Work, layout: Layout, plain: StepTokens, turns: float
) -> tuple[str, ...]:
    mean_tokens = plain.num_decoded / (work.batch_size * work.group_size)
    sentences = [
        f"responses: log-normal, median {work.response_tokens * MEDIAN_FRAC:.0f} tokens, mean {mean_tokens:.0f}, "
        f"at most {work.response_tokens}; prompts: {work.prompt_tokens} tokens",
        f"{100 * BANDWIDTH_FRAC:.0f} % of the card's bandwidth in decoding, {100 * COMPUTE_FRAC:.0f} % of its dense "
        f"{train.dtype} peak in all else",
    ]
    if train.backend == "hf":
        launches_ms = 1e3 * LAUNCH_S_PER_LAYER * _num_launches_per_layer(train)
        sentences.append(f"backend hf: the host starts the kernels of a layer in {launches_ms:g} ms")
    if turns > 1:
        sentences.append(
            f"vllm.kv_cache_gib holds 1 in {turns:.1f} of the rows' keys and values with overcommit: they take turns"
        )
    if layout.num_training > 1:
        sentences.append("rows are spread evenly; communication between GPUs takes no time")
    sentences.append(
        "both: scoring beside decoding is free, up to the time of decoding"
        if layout.scoring is not None
        else "both: scoring beside decoding on one device saves nothing"
    )
    return tuple(sentences)
