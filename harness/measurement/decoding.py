"""Decoding alone, ours against ``generate``: ``python -m harness.measurement.decoding --model tiny --out FOLDER``.

48 requests with unequal token limits, stop tokens ignored, so that both sides decode the same tokens. Ours takes all
of them at once; ``generate`` takes them in batches of 16, in order of arrival, each batch up to its longest limit,
sampling with a key-value cache, as TRL's trainers call it. Each side has its best thread count; repetitions alternate.
A profile of our side says where its time goes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from transformers import GenerationConfig

from harness.environment import describe_environment, num_usable_cores
from harness.formatting import markdown_table
from harness.measurement.operators import Operator, operator_table, slowest_operators
from harness.measurement.output import carry_out, provenance
from harness.schema import Environment
from harness.settings import load_train_config
from harness.workloads.loading import Workload, load_workload
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.telemetry.clock import MonotonicClock
from oppo_kit.types import Prompt, Rollout, RolloutKey

NUM_REQUESTS = 48
BATCH_SIZE = 16
# Token limits: log-normal, as response lengths usually are; with this seed 1,979 tokens, the longest 256.
MEDIAN_TOKENS, SIGMA, MAX_TOKENS, LIMIT_SEED = 26, 0.95, 256, 3
_CHUNK_TOKENS = 16


class Decoding(BaseModel):
    """A results file. Seconds for all requests, raw, by side and thread count; ``pairs`` stood next to each other."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    model: str
    command: str
    environment: Environment
    num_requests: int
    num_tokens: int
    longest_tokens: int
    calibration_s: dict[str, dict[str, list[float]]]
    num_threads: dict[str, int]
    pairs: list[dict[str, float]]
    ratio_median: float
    operators: list[Operator]


def draw_limits() -> list[int]:
    """The requests' token limits."""
    drawn = np.random.default_rng(LIMIT_SEED).lognormal(np.log(MEDIAN_TOKENS), SIGMA, NUM_REQUESTS)
    return [int(limit) for limit in np.clip(np.rint(drawn), 1, MAX_TOKENS)]


def measure(model: str, limits: list[int], *, num_pairs: int, command: str) -> Decoding:
    """Calibrate both sides, time them in turn, profile ours."""
    train = load_train_config(options={"model": model})
    workload = load_workload(train, num_eval_problems=0)
    sides: dict[str, Callable[[], float]] = {
        "generate": make_generate(workload, limits),
        "ours": make_ours(workload, limits),
    }
    counts = [1] if num_usable_cores() == 1 else [1, 2]
    calibration = {
        name: {str(count): [_timed(run, count)] for count in counts} for name, run in sides.items()
    }
    best = {name: min(counts, key=lambda count: calibration[name][str(count)]) for name in sides}
    pairs = [
        {
            name: _timed(run, best[name])
            for name, run in (sides.items() if pair % 2 else reversed(sides.items()))
        }
        for pair in range(num_pairs)
    ]
    torch.set_num_threads(best["ours"])
    return Decoding(
        model=model,
        command=command,
        environment=describe_environment(),
        num_requests=len(limits),
        num_tokens=sum(limits),
        longest_tokens=max(limits),
        calibration_s=calibration,
        num_threads=best,
        pairs=pairs,
        ratio_median=median(pair["generate"] / pair["ours"] for pair in pairs),
        operators=slowest_operators(sides["ours"]),
    )


def render(decoding: Decoding) -> str:
    """The file as Markdown."""
    pairs = [
        [
            str(index),
            f"{pair['generate']:.2f}",
            f"{pair['ours']:.2f}",
            f"{pair['generate'] / pair['ours']:.2f}",
        ]
        for index, pair in enumerate(decoding.pairs)
    ]
    threads = ", ".join(f"{name} {count}" for name, count in decoding.num_threads.items())
    return (
        "\n\n".join(
            [
                f"# Decoding alone, {decoding.model}",
                f"{decoding.num_requests} requests, {decoding.num_tokens} tokens, the longest "
                f"{decoding.longest_tokens}; ours holds all of them, `generate` takes batches of {BATCH_SIZE}. "
                f"Threads: {threads}. "
                f"generate / ours: {decoding.ratio_median:.2f} (median over {len(decoding.pairs)} pairs). "
                + provenance(decoding.environment, decoding.command),
                markdown_table(["Pair", "generate, s", "ours, s", "Ratio"], pairs),
                "Where our time goes: operators by their own share of the CPU time.",
                operator_table(decoding.operators),
            ]
        )
        + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.measurement.decoding", description="Time decoding."
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    command = f"python -m harness.measurement.decoding --model {options.model} --pairs {options.pairs}"
    return carry_out(
        options.out,
        "decoding",
        lambda: measure(options.model, draw_limits(), num_pairs=options.pairs, command=command),
        render,
    )


def make_ours(workload: Workload, limits: list[int]) -> Callable[[], float]:
    """A function that decodes all requests with our generator, and returns its seconds."""
    clock = MonotonicClock()
    generator = HFGenerator(workload.make_policy(), temperature=1.0, stop_token_ids=(), seed=0)

    def run() -> float:
        start_s = clock.now_s()
        prompts = [
            Prompt(draw_id, workload.prompts.draw(draw_id).token_ids, limit)
            for draw_id, limit in enumerate(limits)
        ]
        generator.admit([Rollout(RolloutKey(prompt.draw_id, 0), prompt) for prompt in prompts])
        num_tokens = 0
        while generator.num_live:
            num_tokens += sum(len(chunk.token_ids) for chunk in generator.decode(_CHUNK_TOKENS))
        assert num_tokens == sum(limits)
        return clock.now_s() - start_s

    return run


def make_generate(workload: Workload, limits: list[int]) -> Callable[[], float]:
    """A function that decodes all requests with ``generate``, and returns its seconds."""
    clock = MonotonicClock()
    policy: Any = workload.make_policy()
    pad = workload.tokenizer.pad_token_id or 0
    prompts = [list(workload.prompts.draw(draw_id).token_ids) for draw_id in range(len(limits))]

    @torch.inference_mode()
    def run() -> float:
        start_s = clock.now_s()
        for first in range(0, len(limits), BATCH_SIZE):
            batch = prompts[first : first + BATCH_SIZE]
            width = max(map(len, batch))
            input_ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            longest = max(limits[first : first + BATCH_SIZE])
            settings = GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, pad_token_id=pad
            )
            made = policy.generate(input_ids, attention_mask=mask, generation_config=settings)
            assert made.shape[1] == width + longest
        return clock.now_s() - start_s

    # The folder's own settings (stop tokens among them) are not part of the comparison.
    policy.generation_config = GenerationConfig(pad_token_id=pad)
    return run


def _timed(run: Callable[[], float], num_threads: int) -> float:
    torch.set_num_threads(num_threads)
    return run()


if __name__ == "__main__":
    sys.exit(main())
