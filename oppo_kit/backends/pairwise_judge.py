"""A judge of pairs as a reward: the response that it prefers scores 1, the other one 0.

A judge has the signature that TRL gives them, as a function or as the method ``judge`` of an object:
``judge(prompts, [[first, second], …], shuffle_order=True)`` returns for each prompt the index of the better completion,
0 or 1, or -1 where it cannot decide. Where it cannot, both responses are without a score, and the engine rejects and
replaces the pair.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from oppo_kit.backends.function_scorer import RewardFunction, name_of
from oppo_kit.errors import ConfigError, RewardError

_SCORES: dict[int, list[float | None]] = {0: [1.0, 0.0], 1: [0.0, 1.0], -1: [None, None]}


def pairwise_reward(judge: Any) -> RewardFunction:
    """The reward function of a judge, for ``FunctionScorer([pairwise_reward(judge)], tokenizer, call_per="group")``.

    It is asked for a pair as soon as both responses have ended, in several threads at once, and sees prompt and
    completions as a reward function does: text, or messages where the data set has messages. ``shuffle_order`` is left
    at the judge's own default; fix it, like any other argument, by ``functools.partial``.

    Args:
        judge: a function, or an object with a method ``judge``.

    Raises:
        ConfigError: it is neither.
    """
    ask = getattr(judge, "judge", judge)
    if not callable(ask):
        raise ConfigError(
            f"the judge is a {type(judge).__name__}; give a function that takes prompts and completions, or an object "
            "with such a method judge"
        )
    name = name_of(judge)

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
        if len(completions) != 2:
            raise RewardError(
                f"judge {name!r} compares the two responses to a prompt, but was given {len(completions)}; set "
                "call_per to 'group', and train with an algorithm of two responses per prompt, such as online_dpo"
            )
        return list(_SCORES[_verdict(ask([prompts[0]], [list(completions)]), name)])

    reward.__name__ = name
    return reward


def _verdict(results: Any, name: str) -> int:
    """The one number that a judge returned for one pair.

    Raises:
        RewardError: another number of results, or something else than 0, 1 and -1.
    """
    if hasattr(results, "tolist"):
        results = results.tolist()
    expected = f"judge {name!r} must return a list of one index per prompt, 0, 1 or -1 (undecided)"
    if not isinstance(results, list | tuple):
        raise RewardError(f"{expected}, not {type(results).__name__} ({results!r})")
    if len(results) != 1:
        raise RewardError(f"{expected}, but returned {len(results)} for one prompt")
    (result,) = results
    try:
        # True would be the index 1, but means "is better"; a probability is refused by operator.index.
        index = None if isinstance(result, bool) else operator.index(result)
    except TypeError:
        index = None
    if index in _SCORES:
        return index
    raise RewardError(f"{expected}, not {result!r} ({type(result).__name__})")
