"""The three language models: clean, careless, and the oracle of what a right solver would write next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from harness.assets.make_tiny.responses import reward_rows
from harness.assets.make_tiny.tokens import BOS, IGNORED, PAD, batches_by_length, encode, padded
from harness.assets.make_tiny.training import NUM_LAYERS, llama_config, train
from harness.workloads import rewrite_chain as chain


def language_rows(
    problems: Iterator[str], respond: Callable[[str], str], digit_weight: float
) -> Iterator[tuple[list[int], list[float]]]:
    """Token ids and the loss weight of each: 0 on the prompt, ``digit_weight`` on a step's value."""
    for problem in problems:
        response = respond(problem)
        body = response.removesuffix(chain.EOS_TEXT)
        weights, is_value = [], False
        for character in body:
            is_value = character == "=" or (is_value and character.isdigit())
            weights.append(digit_weight if is_value and character != "=" else 1.0)
        tokens = [BOS, *encode(problem), *encode(response)]
        yield tokens, [0.0] * (len(problem) + 1) + weights + [1.0]


def train_language_model(
    model: LlamaForCausalLM,
    rows: Iterator[tuple[list[int], list[float]]],
    num_steps: int,
    peak_rate: float,
    name: str,
) -> None:
    """Weighted next-token training on responses."""
    batches = batches_by_length(rows, lambda row: len(row[0]), random.Random(f"{name}:order"))

    def losses_of(_: int) -> dict[str, Tensor]:
        batch = next(batches)
        tokens = padded([row[0] for row in batch], PAD)
        width = tokens.shape[1]
        weights = torch.tensor([[*row[1], *([0.0] * (width - len(row[1])))] for row in batch])[:, 1:]
        # No attention mask: padding stands on the right, where a causal model never looks.
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return {"next token": (losses * weights).sum() / weights.sum()}

    train(list(model.parameters()), losses_of, num_steps, peak_rate, name)


def growing_problems(seed: int, num_problems: int) -> Iterator[str]:
    """Training problems whose median number of terms grows from 2 to 4 within ``num_problems`` draws."""
    medians = [2.0, 2.5, 3.0, 3.5, chain.MEDIAN_NUM_TERMS]
    streams = [chain.iterate_problems(seed, "train", median_num_terms=median) for median in medians]
    drawn = 0
    while True:
        yield next(streams[min(len(streams) - 1, drawn * len(streams) // num_problems)])
        drawn += 1


def make_clean(work_dir: Path, num_steps: int) -> None:
    """Stage 1: the language model of right responses."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(llama_config(NUM_LAYERS))
    # A batch holds about 40 short problems, so the mix is at its final median after two thirds of the steps.
    problems = growing_problems(1, num_problems=25 * num_steps)
    rows = language_rows(problems, chain.clean_response, digit_weight=4.0)
    train_language_model(model, rows, num_steps, 2e-3, "clean")
    model.save_pretrained(work_dir / "clean")


def make_policy(work_dir: Path, num_steps: int, wrong_step_frac: float) -> None:
    """Stage 3: the clean model learns the careless solver's habits."""
    torch.manual_seed(2)
    model = LlamaForCausalLM.from_pretrained(work_dir / "clean", dtype=torch.float32)
    noise = random.Random("policy:noise")

    def respond(problem: str) -> str:
        return chain.noisy_response(problem, noise, wrong_step_frac=wrong_step_frac)

    rows = language_rows(chain.iterate_problems(2, "train"), respond, digit_weight=1.0)
    train_language_model(model, rows, num_steps, 1e-3, "policy")
    model.half().save_pretrained(work_dir / "policy")


def make_oracle(work_dir: Path, num_steps: int) -> None:
    """Stage 2: the clean model learns what a right solver would write next after anything, ``x`` included."""
    torch.manual_seed(4)
    model = LlamaForCausalLM.from_pretrained(work_dir / "clean", dtype=torch.float32)
    shuffler = random.Random("oracle:order")
    batches = batches_by_length(reward_rows([], 4), lambda row: len(row.tokens), shuffler, pool_size=1024)

    def losses_of(_: int) -> dict[str, Tensor]:
        batch = next(batches)
        tokens = padded([row.tokens for row in batch], PAD)
        expected = padded([row.expected for row in batch], IGNORED)
        logits = model(input_ids=tokens, use_cache=False).logits
        return {"expected": functional.cross_entropy(logits.transpose(1, 2), expected, ignore_index=IGNORED)}

    train(list(model.parameters()), losses_of, num_steps, 1e-3, "oracle")
    model.save_pretrained(work_dir / "oracle")
