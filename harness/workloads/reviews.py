"""Short opinions about films that do not exist, for a small instruction model: answers from a word to a paragraph.

Prompts are generated from a fixed grammar. Nobody can say which answer is right; a reward model that likes favourable
reviews judges them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from harness.workloads.base import Row, is_held_out
from oppo_kit.errors import DataError

# Short: the model's own system message costs as many tokens as a question.
SYSTEM = "You review films. Be brief."

# How often each kind is asked. Chosen once, by the lengths of the untrained model's answers (see the models' card).
KINDS: Mapping[str, tuple[int, tuple[str, ...]]] = MappingProxyType(
    {
        "word": (
            5,
            (
                "Describe the {genre} film '{title}' in one word.",
                "'{title}', a {genre} film: good or bad? One word.",
                "One adjective for the {genre} film '{title}':",
            ),
        ),
        "phrase": (
            4,
            (
                "Give a headline of at most six words for a review of the {genre} film '{title}'.",
                "Finish the sentence: the {part} of '{title}' is",
                "A rating from 1 to 10 for the {part} of '{title}', and why, in five words.",
            ),
        ),
        "sentence": (
            4,
            (
                "Write one sentence about the {part} of the {genre} film '{title}'.",
                "In one sentence, would you watch '{title}' again?",
                "What did you think of the {part} in '{title}'? One sentence.",
            ),
        ),
        "two": (
            2,
            (
                "Write two sentences about the {genre} film '{title}'.",
                "Tell a friend in two sentences whether to see '{title}'.",
            ),
        ),
        "paragraph": (
            3,
            (
                "Write a short paragraph that reviews the {genre} film '{title}'.",
                "Review the {part} of '{title}' in a short paragraph.",
            ),
        ),
    }
)
_GENRES = (
    "western",
    "comedy",
    "war",
    "science fiction",
    "horror",
    "love",
    "detective",
    "animated",
    "silent",
    "road",
)
_PARTS = ("plot", "music", "acting", "ending", "camera work", "dialogue", "humour", "opening scene")
_ADJECTIVES = (
    "Silent", "Crooked", "Last", "Golden", "Burning", "Forgotten", "Second", "Paper", "Hollow", "Distant", "Red",
    "Patient", "Broken", "Midnight", "Honest", "Frozen",
)  # fmt: skip
_NOUNS = (
    "River", "Garden", "Letter", "Train", "Orchard", "Lighthouse", "Promise", "Summer", "Violin", "Border", "Harbour",
    "Clock", "Neighbour", "Mountain", "Window", "Bridge",
)  # fmt: skip

NUM_TRAIN_PROMPTS = 4096
_HELD_OUT_SEED = 20_261
# A grammar of some 20,000 questions: a request beyond this would not end.
_MAX_HELD_OUT = 1024


class ReviewsTask:
    """Generated questions about invented films."""

    name = "reviews"
    default_reward: str | None = "smollm2-135m"
    default_overrides: Mapping[str, Any] = MappingProxyType(
        {
            "model": "smollm2-135m",
            "batch_size": 8,
            "num_steps": 8,
            "sampling": {"temperature": 0.7, "response_length": 256},
            "learner": {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "max_grad_norm": None},
        }
    )
    # Sixteen responses a step where they are compared with each other: a step of minutes on a CPU.
    algorithm_overrides: Mapping[str, Mapping[str, Any]] = MappingProxyType(
        {
            "ppo": {"algo_config": {"num_ppo_epochs": 1, "num_mini_batches": 1, "kl_coef": 0.02}},
            "grpo": {"batch_size": 4, "algo_config": {"num_generations": 4}},
            "rloo": {"batch_size": 4, "algo_config": {"num_generations": 4, "beta": 0.02}},
            "online_dpo": {"batch_size": 8},
        }
    )

    def train_rows(self, seed: int) -> list[Row]:
        """Different questions, none of them held out."""
        return _rows(seed, NUM_TRAIN_PROMPTS, held_out=False)

    def eval_rows(self, num_rows: int) -> list[Row]:
        """Held-out questions, the same for every seed.

        Raises:
            DataError: more than there are.
        """
        if num_rows > _MAX_HELD_OUT:
            raise DataError(
                f"{num_rows} evaluation problems: the task reviews has {_MAX_HELD_OUT}; ask for fewer"
            )
        return _rows(_HELD_OUT_SEED, num_rows, held_out=True)

    def check(self, row: Row, response_text: str, is_stopped: bool) -> bool | None:  # noqa: ARG002
        """None: nobody can tell."""
        return None


def iterate_questions(seed: int) -> Iterator[tuple[str, str]]:
    """An endless stream of (kind, question)."""
    chooser = random.Random(seed)
    kinds = list(KINDS)
    weights = [KINDS[kind][0] for kind in kinds]
    while True:
        kind = chooser.choices(kinds, weights)[0]
        template = chooser.choice(KINDS[kind][1])
        title = f"The {chooser.choice(_ADJECTIVES)} {chooser.choice(_NOUNS)}"
        yield kind, template.format(title=title, genre=chooser.choice(_GENRES), part=chooser.choice(_PARTS))


def conversation(question: str) -> list[dict[str, str]]:
    """What the policy is asked."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def _rows(seed: int, num_rows: int, *, held_out: bool) -> list[Row]:
    rows: dict[str, Row] = {}
    for kind, question in iterate_questions(seed):
        if len(rows) == num_rows:
            break
        if is_held_out(question) == held_out:
            rows.setdefault(question, {"prompt": conversation(question), "kind": kind})
    return list(rows.values())
