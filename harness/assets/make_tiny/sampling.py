"""Responses of the policy, drawn with a batch that shrinks as its rows end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from harness.assets.make_tiny.tokens import BOS, MAX_RESPONSE_TOKENS, PAD, VOCABULARY, encode
from harness.workloads import rewrite_chain as chain


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, problems: Sequence[str], temperature: float, generator: torch.Generator
) -> list[str]:
    """Responses with their ``<eos>``, at most 256 tokens; temperature 0 is greedy.

    Rows are worked off by number of terms and leave the batch as they end.
    """
    responses = [""] * len(problems)
    order = sorted(range(len(problems)), key=lambda index: len(problems[index]))
    for first in range(0, len(order), 512):
        rows = order[first : first + 512]
        width = max(len(problems[row]) for row in rows) + 1
        prompts = [[BOS, *encode(problems[row])] for row in rows]
        tokens = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = (tokens != PAD).long()
        cache = DynamicCache()
        for _ in range(MAX_RESPONSE_TOKENS):
            positions = mask.sum(1, keepdim=True) - torch.arange(tokens.shape[1] - 1, -1, -1)
            output = model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions.clamp(min=0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[:, -1].float()
            if temperature == 0:
                tokens = logits.argmax(-1, keepdim=True)
            else:
                probabilities = torch.softmax(logits / temperature, -1)
                tokens = torch.multinomial(probabilities, 1, generator=generator)
            for row, token in zip(rows, tokens[:, 0].tolist(), strict=True):
                # Rows that ended may stay in the batch for a while, unseen.
                if not responses[row].endswith(chain.EOS_TEXT):
                    responses[row] += VOCABULARY[token]
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
            open_rows = [i for i, row in enumerate(rows) if not responses[row].endswith(chain.EOS_TEXT)]
            if not open_rows:
                break
            if len(open_rows) < 0.8 * len(rows):
                is_open = torch.tensor(open_rows)
                cache.batch_select_indices(is_open)
                rows, tokens, mask = [rows[i] for i in open_rows], tokens[is_open], mask[is_open]
    return responses


def make_samples(work_dir: Path, num_samples: int) -> None:
    """Stage 4: the policy's own responses to training problems, from careless to almost greedy."""
    kinds = [(1.0, 0.5), (0.8, 0.2), (0.6, 0.2), (1.3, 0.1)]
    sets = [(t, int(share * num_samples), chain.MEDIAN_NUM_TERMS) for t, share in kinds]
    _write_samples(work_dir, "samples.json", sets, sampling_seed=3, problem_seed=30)


def make_sharp_samples(work_dir: Path, num_samples: int) -> None:
    """Stage 5: more of them as a policy in training gives them: with less noise, and mostly longer chains."""
    sets = [(0.5, num_samples // 3, 4.0), (0.6, num_samples // 3, 8.0), (0.7, num_samples // 3, 6.0)]
    _write_samples(work_dir, "sharp_samples.json", sets, sampling_seed=7, problem_seed=40)


def _write_samples(
    work_dir: Path,
    file_name: str,
    sets: Sequence[tuple[float, int, float]],
    *,
    sampling_seed: int,
    problem_seed: int,
) -> None:
    """Samples sets of (temperature, number of problems, their median number of terms) into one file."""
    model = LlamaForCausalLM.from_pretrained(work_dir / "policy", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(sampling_seed)
    rows: list[tuple[str, str]] = []
    for index, (temperature, num_problems, median) in enumerate(sets):
        stream = chain.iterate_problems(problem_seed + index, "train", median_num_terms=median)
        problems = [next(stream) for _ in range(num_problems)]
        responses = sample(model, problems, temperature, generator)
        num_right = sum(map(chain.is_correct, problems, responses))
        print(f"samples T={temperature}: {len(problems)}, right {num_right / len(problems):.3f}", flush=True)
        rows.extend(zip(problems, responses, strict=True))
    (work_dir / file_name).write_text(json.dumps(rows))


def read_samples(path: Path) -> list[tuple[str, str]]:
    """The (prompt, response) pairs that a sampling stage wrote."""
    return [(prompt, response) for prompt, response in json.loads(path.read_text())]


def make_responses(work_dir: Path, num_problems: int) -> None:
    """Stage 10: the policy's responses to held-out problems, for the figures."""
    policy = LlamaForCausalLM.from_pretrained(work_dir / "policy", dtype=torch.float32).eval()
    problems = chain.held_out_problems(num_problems)
    responses = {
        name: sample(policy, problems, temperature, torch.Generator().manual_seed(5))
        for name, temperature in [("T=1", 1.0), ("greedy", 0.0), ("T=0.5", 0.5)]
    }
    (work_dir / "responses.json").write_text(json.dumps({"problems": problems, "responses": responses}))
