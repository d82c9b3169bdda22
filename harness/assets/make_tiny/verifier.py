"""The reward model: a verifier on top of the oracle, trained in rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from harness.assets.make_tiny.judging import JudgedRow, judge
from harness.assets.make_tiny.responses import reward_rows
from harness.assets.make_tiny.sampling import read_samples
from harness.assets.make_tiny.tokens import EOS, IGNORED, PAD, VOCABULARY, batches_by_length, padded
from harness.assets.make_tiny.training import HIDDEN_SIZE, NUM_LAYERS, llama_config, train

# On top of the language model's four layers, the verifier compares each token with what was expected
# there, gathers that for each step, and then for the chain: three jobs, three layers.
NUM_REWARD_LAYERS = 7
# Bounds the scores near +-log(0.98 / 0.02) = +-3.9, since PPO takes them raw.
LABEL_SMOOTHING = 0.02
# The verifier with its training heads, beside the saved model and in full precision.
FULL_STATE = "verifier.pt"


@dataclass(frozen=True)
class Round:
    """One of the verifier's rounds; each is a warm restart of the optimiser.

    name: stage, and the folder below the work directory.
    start: the folder of the round before; None begins with the oracle.
    num_steps: optimiser steps.
    seed: of new training heads and of the data.
    peak_rate: learning rate after the warm-up.
    schedule_steps: length of the schedule; None is ``num_steps``, more leaves the decay to a later round.
    keeps_heads: whether the training heads come from the round before; else they start anew.
    sample_files: the policy samples in the mix.
    long_frac: share of the drawn problems that come from the long stream.
    long_median: that stream's median number of terms.
    """

    name: str
    start: str | None
    num_steps: int
    seed: int
    peak_rate: float
    schedule_steps: int | None = None
    keeps_heads: bool = False
    sample_files: tuple[str, ...] = ("samples.json",)
    long_frac: float = 0.3
    long_median: float = 6.0


ROUNDS = (
    Round("reward_1", None, num_steps=1500, seed=5, peak_rate=2e-3),
    Round("reward_2", "reward_1", num_steps=1200, seed=6, peak_rate=1.5e-3),
    Round(
        "reward_3",
        "reward_2",
        num_steps=2000,
        seed=7,
        peak_rate=1.5e-3,
        schedule_steps=6000,
        sample_files=("samples.json", "sharp_samples.json"),
        long_frac=0.5,
        long_median=8.0,
    ),
    Round(
        "reward_4",
        "reward_3",
        num_steps=1600,
        seed=8,
        peak_rate=1e-3,
        keeps_heads=True,
        sample_files=("samples.json", "sharp_samples.json"),
        long_frac=0.5,
        long_median=8.0,
    ),
)
LAST_ROUND = ROUNDS[-1].name


class Verifier(nn.Module):
    """The reward model with the heads that only training needs.

    The oracle's four layers are kept as they are: their output says what a right solver would write
    next. Layer 5 starts with heads that look at the previous token, where the expectation of this one
    stands, and is asked whether the two differ; the last layer is asked per token whether the step, and
    the chain, are right so far.
    """

    def __init__(self, oracle: LlamaForCausalLM) -> None:
        super().__init__()
        config = llama_config(NUM_REWARD_LAYERS, num_labels=1)
        self.reward = LlamaForSequenceClassification(config)
        layers = self.reward.model.layers
        self.reward.model.embed_tokens.load_state_dict(oracle.model.embed_tokens.state_dict())
        for layer, trained in zip(layers, oracle.model.layers, strict=False):
            layer.load_state_dict(trained.state_dict())
        for module in (self.reward.model.embed_tokens, *layers[:NUM_LAYERS]):
            module.requires_grad_(False)
        self.mismatch_head = nn.Linear(HIDDEN_SIZE, 1)
        self.expected_head = nn.Linear(HIDDEN_SIZE, len(VOCABULARY))
        self.verdict_head = nn.Linear(HIDDEN_SIZE, 2)

    @torch.no_grad()
    def look_back(self, tokens: Tensor) -> None:
        """Sets layer 5's queries and keys such that its first two heads attend to the previous token.

        With rotary positions, a query turned back by one step and a key, both constant, have a
        product that is largest one token back. The constant is read off the hidden states by least
        squares over ``tokens``.
        """
        layer = self.reward.model.layers[NUM_LAYERS]
        output = self.reward.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        hidden = layer.input_layernorm(output.hidden_states[NUM_LAYERS])[tokens != PAD]
        constant = torch.linalg.lstsq(hidden, torch.ones(len(hidden), 1)).solution[:, 0]
        half = layer.self_attn.head_dim // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        # Six frequencies at a gain of 30 each: at 10 the neighbours still got 0.2 of the attention each.
        gain = torch.where(torch.arange(half) < 6, (30.0 * math.sqrt(2 * half)) ** 0.5, 0.0)
        query = torch.cat([gain * frequencies.cos(), -gain * frequencies.sin()])
        key = torch.cat([gain, torch.zeros(half)])
        for head in range(2):
            rows = slice(head * 2 * half, (head + 1) * 2 * half)
            layer.self_attn.q_proj.weight[rows] = torch.outer(query, constant)
            layer.self_attn.k_proj.weight[rows] = torch.outer(key, constant)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns [R, L] scores, [R, L, 2] step and chain logits, [R, L] mismatch, [R, L, V] expected."""
        output = self.reward.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        hidden, compared = output.last_hidden_state, output.hidden_states[NUM_LAYERS + 1]
        scores = self.reward.score(hidden)[..., 0]
        return (
            scores,
            self.verdict_head(hidden),
            self.mismatch_head(compared)[..., 0],
            self.expected_head(compared),
        )


def make_reward(work_dir: Path, training_round: Round) -> None:
    """Stages 6 to 9: one round of the verifier, which never saw the careless model but for its samples."""
    torch.manual_seed(training_round.seed)
    verifier = Verifier(LlamaForCausalLM.from_pretrained(work_dir / "oracle", dtype=torch.float32))
    samples = [row for name in training_round.sample_files for row in read_samples(work_dir / name)]
    if training_round.start is None:
        verifier.look_back(padded([judge(*row).tokens for row in samples[:200]], PAD))
    elif training_round.keeps_heads:
        verifier.load_state_dict(torch.load(work_dir / training_round.start / FULL_STATE))
    else:
        folder = work_dir / training_round.start
        before = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        verifier.reward.load_state_dict(before.state_dict())
    rows = reward_rows(samples, training_round.seed, training_round.long_frac, training_round.long_median)
    train_verifier(verifier, rows, training_round)
    folder = work_dir / training_round.name
    folder.mkdir(exist_ok=True)
    torch.save(verifier.state_dict(), folder / FULL_STATE)
    verifier.reward.half().save_pretrained(folder)


def train_verifier(verifier: Verifier, rows: Iterator[JudgedRow], training_round: Round) -> None:
    """Trains all of a verifier but the oracle's layers."""
    shuffler = random.Random("reward:order")
    batches = batches_by_length(rows, lambda row: len(row.tokens), shuffler, pool_size=1024)
    trained = [parameter for parameter in verifier.parameters() if parameter.requires_grad]
    train(
        trained,
        lambda _: verifier_losses(verifier, next(batches)),
        training_round.num_steps,
        training_round.peak_rate,
        training_round.name,
        schedule_steps=training_round.schedule_steps,
    )


def verifier_losses(verifier: Verifier, batch: Sequence[JudgedRow]) -> dict[str, Tensor]:
    """Loss of the score at the last token, and of all verdicts on the way there."""
    tokens = padded([row.tokens for row in batch], PAD)
    scores, verdicts, mismatch, expected_logits = verifier(tokens)
    step_labels = padded([row.is_step_right for row in batch], IGNORED)
    chain_labels = padded([row.is_chain_right for row in batch], IGNORED)
    labels = torch.stack([step_labels, chain_labels], -1)
    verdict_loss = _masked_loss(verdicts, labels, labels != IGNORED)
    # Position t of these is about token t itself: what the oracle's position t - 1 expected.
    expected = padded([[IGNORED, *row.expected[:-1]] for row in batch], IGNORED)
    differs = (expected != tokens).long()
    mismatch_loss = _masked_loss(mismatch, differs, expected != IGNORED, 1.0 + 4.0 * differs)
    flat = functional.cross_entropy(
        expected_logits.transpose(1, 2), expected, reduction="none", ignore_index=IGNORED
    )
    weight = (1.0 + 4.0 * differs) * (expected != IGNORED)
    last = torch.tensor([len(row.tokens) - 1 for row in batch])
    is_right = torch.tensor([int(row.is_right) for row in batch])
    last_scores = scores.gather(1, last[:, None])[:, 0]
    # A response that was cut off scores low wherever it was cut.
    is_inner = (step_labels != IGNORED) & (tokens != EOS)
    return {
        "score": _masked_loss(last_scores, is_right, is_right >= 0, smoothing=LABEL_SMOOTHING),
        "verdicts": 2.0 * verdict_loss,
        "mismatch": mismatch_loss,
        "expected": 0.3 * (flat * weight).sum() / weight.sum(),
        "inner": 0.1 * _masked_loss(scores, torch.zeros_like(tokens), is_inner, smoothing=LABEL_SMOOTHING),
    }


def _masked_loss(
    logits: Tensor, labels: Tensor, mask: Tensor, weights: Tensor | float = 1.0, smoothing: float = 0.0
) -> Tensor:
    targets = smoothing + (1 - 2 * smoothing) * labels.clamp(min=0).float()
    losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    weights = weights * mask
    return (losses * weights).sum() / weights.sum()
