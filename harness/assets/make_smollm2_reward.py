"""Fits the head of the SmolLM2 reward model: ``python -m harness.assets.make_smollm2_reward``.

The reward model is SmolLM2's first 16 layers, frozen, and one linear head on the last token. The head is a logistic
regression on film review snippets with mean human ratings (from the source distribution of vaderSentiment, MIT), each
rendered as the assistant's answer to a question of the task, up to and including the stop token: what the reward model
reads in training. The data is not kept; the head (576 numbers) and the figures are.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from scipy import stats
from scipy.optimize import minimize
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaModel, PreTrainedTokenizerBase

from harness.environment import quieten_transformers
from harness.folders import write_atomically
from harness.packaged_models import HEAD_FILE, NUM_REWARD_LAYERS, download, smollm2_policy
from harness.workloads.reviews import ReviewsTask, conversation, iterate_questions
from oppo_kit.backends.hf_generator import HFGenerator
from oppo_kit.ops.batching import length_sorted_batches
from oppo_kit.types import Prompt, Rollout, RolloutKey

REQUIREMENT = "vaderSentiment==3.3.2"
SDIST_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER_ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
SNIPPETS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"

# Ratings go from -4 to 4; those near 0 are of no clear sign.
MIN_ABSOLUTE_RATING = 0.5
# Chosen by the accuracy on a fifth of the training snippets.
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
STOP_TOKEN = "<|im_end|>"
_BATCH_TOKENS = 4096
_ROWS_AT_ONCE = 48


def read_snippets(folder: Path) -> list[tuple[str, float]]:
    """Film review snippets and their mean ratings, in the data set's order."""
    sdist = download(REQUIREMENT, SDIST_SHA256, folder, source=True)
    with tarfile.open(sdist) as outer:
        inner = outer.extractfile(INNER_ARCHIVE)
        assert inner is not None
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as archive:
            file = archive.extractfile(SNIPPETS)
            assert file is not None
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    rows = [line.split("\t", 2) for line in lines if line.count("\t") >= 2]
    return [(text.strip(), float(rating)) for _, rating, text in rows if text.strip()]


def load_rows(
    tokenizer: PreTrainedTokenizerBase, num_rows: int
) -> tuple[list[str], list[float], list[list[int]]]:
    """The first snippets of a fixed order: texts, ratings, and what the reward model reads of each."""
    with tempfile.TemporaryDirectory() as folder:
        snippets = [each for each in read_snippets(Path(folder)) if abs(each[1]) >= MIN_ABSOLUTE_RATING]
    random.Random(0).shuffle(snippets)
    texts = [text for text, _ in snippets[:num_rows]]
    ratings = [rating for _, rating in snippets[:num_rows]]
    return texts, ratings, _rendered(tokenizer, texts)


def last_token_features(backbone: LlamaModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """[n, H] normed hidden states at the last token of each row."""
    features = torch.empty(len(rows), backbone.config.hidden_size)
    for indices in length_sorted_batches([len(row) for row in rows], _BATCH_TOKENS):
        width = max(len(rows[index]) for index in indices)
        input_ids = torch.tensor([[*rows[index], *[0] * (width - len(rows[index]))] for index in indices])
        ends = torch.tensor([len(rows[index]) - 1 for index in indices])
        with torch.inference_mode():
            hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        features[indices] = hidden[torch.arange(len(indices)), ends]
    return features


def fit(features: np.ndarray, labels: np.ndarray, penalty: float) -> np.ndarray:
    """Logistic regression without an offset, which the model's head does not have.

    Args:
        features: [n, H].
        labels: [n], -1 or 1.
        penalty: of the squared weights, with features at unit scale.

    Returns:
        weights [H].
    """
    scale = features.std(axis=0) + 1e-6
    scaled = features / scale

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margins = labels * (scaled @ weights)
        gradient = -(labels / (1 + np.exp(margins))) @ scaled / len(labels) + 2 * penalty * weights
        return float(np.logaddexp(0, -margins).mean() + penalty * weights @ weights), gradient

    found = minimize(loss, np.zeros(features.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 500})
    return found.x / scale


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Probability that a favourable snippet scores above an unfavourable one."""
    above = stats.mannwhitneyu(scores[labels > 0], scores[labels < 0]).statistic
    return float(above / ((labels > 0).sum() * (labels < 0).sum()))


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's."""
    found: Any = stats.spearmanr(first, second)
    return float(found.statistic)


def response_lengths(
    policy_folder: Path, tokenizer: PreTrainedTokenizerBase, num_prompts: int
) -> dict[str, Any]:
    """How long the untrained policy's answers are, by the task's own sampling settings."""
    sampling = ReviewsTask.default_overrides["sampling"]
    limit = sampling["response_length"]
    policy = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()
    stop = [_stop_id(tokenizer)]
    generator = HFGenerator(policy, temperature=sampling["temperature"], stop_token_ids=stop, seed=0)
    rows = ReviewsTask().train_rows(0)[:num_prompts]
    prompts = [_encode(tokenizer, row["prompt"]) for row in rows]
    lengths = [0] * len(rows)
    waiting = [Rollout(RolloutKey(i, 0), Prompt(i, tuple(ids), limit)) for i, ids in enumerate(prompts)]
    while waiting or generator.num_live:
        free = _ROWS_AT_ONCE - generator.num_live
        generator.admit(waiting[:free])
        waiting = waiting[free:]
        for chunk in generator.decode(16):
            lengths[chunk.key.draw_id] += len(chunk.token_ids)
    by_kind = {kind: [n for n, row in zip(lengths, rows, strict=True) if row["kind"] == kind] for kind in
               sorted({row["kind"] for row in rows})}  # fmt: skip
    return {
        "num_prompts": num_prompts,
        "prompt_tokens_mean": float(np.mean([len(ids) for ids in prompts])),
        "temperature": sampling["temperature"],
        "limit": limit,
        "all": _summary(lengths, limit),
        **{kind: _summary(values, limit) for kind, values in by_kind.items()},
    }


def _summary(lengths: list[int], limit: int) -> dict[str, float]:
    return {
        "count": len(lengths),
        "mean": float(np.mean(lengths)),
        "p50": float(np.percentile(lengths, 50)),
        "p90": float(np.percentile(lengths, 90)),
        "max": float(max(lengths)),
        "truncated_frac": float(np.mean([length >= limit for length in lengths])),
    }


def _stop_id(tokenizer: PreTrainedTokenizerBase) -> int:
    token_id: Any = tokenizer.convert_tokens_to_ids(STOP_TOKEN)
    return token_id


def _encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(ids)  # type: ignore[arg-type]


def _rendered(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    questions = iterate_questions(17)
    return [
        [
            *_encode(tokenizer, conversation(next(questions)[1])),
            *tokenizer.encode(text, add_special_tokens=False),
            _stop_id(tokenizer),
        ]
        for text in texts
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; writes the head, the figures and prints them."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.assets.make_smollm2_reward", description="Fit the head."
    )
    parser.add_argument("--num-train", type=int, default=3000)
    parser.add_argument("--num-held-out", type=int, default=800)
    parser.add_argument("--num-prompts", type=int, default=256, help="sampled for the length figures")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    quieten_transformers()
    policy_folder = smollm2_policy()
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    texts, ratings, rows = load_rows(tokenizer, options.num_train + options.num_held_out)
    backbone = LlamaModel.from_pretrained(
        policy_folder, num_hidden_layers=NUM_REWARD_LAYERS, dtype=torch.float32
    ).eval()
    features = last_token_features(backbone, rows).numpy().astype(np.float64)
    labels = np.sign(np.array(ratings))
    train, held_out = slice(0, options.num_train), slice(options.num_train, None)
    chosen = slice(0, options.num_train * 4 // 5), slice(options.num_train * 4 // 5, options.num_train)
    accuracy = {
        penalty: float((np.sign(features[chosen[1]] @ fit(features[chosen[0]], labels[chosen[0]], penalty))
                        == labels[chosen[1]]).mean())
        for penalty in PENALTIES
    }  # fmt: skip
    penalty = max(accuracy, key=lambda each: accuracy[each])
    weights = fit(features[train], labels[train], penalty)
    scores = features[held_out] @ weights
    weights, scores = weights / scores.std(), scores / scores.std()
    lengths = np.array([len(tokenizer.encode(text)) for text in texts[held_out]])
    figures = {
        "data": REQUIREMENT,
        "num_train": options.num_train,
        "num_held_out": len(scores),
        "favourable_frac": float((labels[held_out] > 0).mean()),
        "accuracy": float((np.sign(scores) == labels[held_out]).mean()),
        "auc": area_under_curve(scores, labels[held_out]),
        "rank_correlation_with_rating": rank_correlation(scores, np.array(ratings)[held_out]),
        "rank_correlation_with_length": rank_correlation(scores, lengths),
        "score_mean": float(scores.mean()),
        "penalty": penalty,
        "validation_accuracy": {str(key): value for key, value in accuracy.items()},
        "response_tokens": response_lengths(policy_folder, tokenizer, options.num_prompts),
    }
    HEAD_FILE.parent.mkdir(parents=True, exist_ok=True)
    save_file({"score.weight": torch.tensor(weights, dtype=torch.float32)[None]}, HEAD_FILE)
    write_atomically(HEAD_FILE.with_name("figures.json"), json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
