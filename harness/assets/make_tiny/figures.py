"""Figures of both nets on held-out problems."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForSequenceClassification

from harness.assets.make_tiny.responses import corrupted, degenerate
from harness.assets.make_tiny.tokens import BOS, PAD, encode, padded
from harness.assets.make_tiny.verifier import LAST_ROUND
from harness.workloads import rewrite_chain as chain


@torch.no_grad()
def score(model: LlamaForSequenceClassification, rows: Sequence[tuple[str, str]]) -> list[float]:
    """Scores of (prompt, response) pairs, read at the last token."""
    scores = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index][1]))
    for first in range(0, len(order), 64):
        chosen = order[first : first + 64]
        tokens = padded([[BOS, *encode(rows[i][0]), *encode(rows[i][1])] for i in chosen], PAD)
        logits = model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits[:, 0]
        for index, logit in zip(chosen, logits.tolist(), strict=True):
            scores[index] = logit
    return scores


def area_under_curve(scores: Sequence[float], is_right: Sequence[bool]) -> float | None:
    """Chance that a right response scores above a wrong one (ties count half); None with one class only."""
    num_right = sum(is_right)
    num_wrong = len(is_right) - num_right
    if num_right == 0 or num_wrong == 0:
        return None
    values = torch.tensor(scores, dtype=torch.float64)
    right = torch.tensor(is_right)
    above = (values[right][:, None] > values[~right][None]).double().sum()
    ties = (values[right][:, None] == values[~right][None]).double().sum()
    return float((above + 0.5 * ties) / (num_right * num_wrong))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, quantiles and maximum."""
    ordered = torch.tensor(values, dtype=torch.float64)
    points = {f"p{int(100 * q)}": float(ordered.quantile(q)) for q in (0.01, 0.1, 0.5, 0.9, 0.99)}
    return {"mean": float(ordered.mean()), "min": float(ordered.min()), **points, "max": float(ordered.max())}


def reward_figures(
    problems: Sequence[str], responses: Sequence[str], scores: Sequence[float]
) -> dict[str, Any]:
    """How well scores tell right from wrong, in all and within numbers of terms."""
    is_right = list(map(chain.is_correct, problems, responses))
    strata: dict[str, Any] = {}
    for low, high in [(1, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 13)]:
        chosen = [i for i, problem in enumerate(problems) if low <= chain.num_terms(problem) <= high]
        right = [is_right[i] for i in chosen]
        area = area_under_curve([scores[i] for i in chosen], right)
        right_frac = sum(right) / len(right)
        strata[f"{low}-{high} terms"] = {"auc": area, "num_responses": len(chosen), "right_frac": right_frac}
    right_scores = [s for s, right in zip(scores, is_right, strict=True) if right]
    wrong_scores = [s for s, right in zip(scores, is_right, strict=True) if not right]
    hits = [(s > 0) == right for s, right in zip(scores, is_right, strict=True)]
    return {
        "right_frac": sum(is_right) / len(is_right),
        "auc": area_under_curve(scores, is_right),
        "auc_of_right_answer": area_under_curve(
            scores, list(map(chain.has_right_answer, problems, responses))
        ),
        "auc_by_num_terms": strata,
        "accuracy_at_0": sum(hits) / len(hits),
        "scores_of_right": percentiles(right_scores) if right_scores else None,
        "scores_of_wrong": percentiles(wrong_scores) if wrong_scores else None,
    }


def degenerate_figures(model: LlamaForSequenceClassification, num_rows: int = 300) -> dict[str, Any]:
    """Scores of responses that no careful solver writes; all of them are wrong."""
    generator = random.Random("evaluate:degenerate")
    stream = chain.iterate_problems(77, "held_out")
    kinds: dict[str, list[tuple[str, str]]] = {"degenerate": [], "corrupted": [], "cut off": [], "empty": []}
    while len(kinds["degenerate"]) < num_rows:
        problem = next(stream)
        kinds["degenerate"].append((problem, degenerate(problem, generator)))
        slip = corrupted(chain.clean_response(problem), generator)
        if not chain.is_correct(problem, slip):
            kinds["corrupted"].append((problem, slip))
        body = chain.clean_response(problem).removesuffix(chain.EOS_TEXT)
        kinds["cut off"].append((problem, body[: generator.randint(1, len(body))]))
        kinds["empty"].append((problem, chain.EOS_TEXT))
    figures = {}
    for name, rows in kinds.items():
        wrong = [row for row in rows if not chain.is_correct(*row)]
        scores = score(model, wrong)
        figures[name] = {"above_0_frac": sum(s > 0 for s in scores) / len(scores), **percentiles(scores)}
    return figures


def evaluate(work_dir: Path) -> None:
    """Stage 11: all figures on held-out problems, written to ``figures.json``."""
    reward = LlamaForSequenceClassification.from_pretrained(work_dir / LAST_ROUND, dtype=torch.float32).eval()
    stored = json.loads((work_dir / "responses.json").read_text())
    problems = stored["problems"]
    figures: dict[str, Any] = {"num_problems": len(problems), "policy": {}, "reward": {}}
    for name, responses in stored["responses"].items():
        figures["policy"][name] = policy_figures(problems, responses)
        scores = score(reward, list(zip(problems, responses, strict=True)))
        figures["reward"][f"on policy at {name}"] = reward_figures(problems, responses, scores)
    figures["reward"]["on wrong responses by design"] = degenerate_figures(reward)
    text = json.dumps(figures, indent=1)
    (work_dir / "figures.json").write_text(text)
    print(text)


def policy_figures(problems: Sequence[str], responses: Sequence[str]) -> dict[str, Any]:
    """Accuracy against the true checker, how often errors cancel, and lengths."""
    num_right = sum(map(chain.is_correct, problems, responses))
    num_right_answers = sum(map(chain.has_right_answer, problems, responses))
    return {
        "accuracy": num_right / len(problems),
        "cancelling_errors_frac": (num_right_answers - num_right) / len(problems),
        "response_tokens": percentiles([len(encode(response)) for response in responses]),
        "truncated_frac": sum(chain.EOS_TEXT not in response for response in responses) / len(problems),
    }
