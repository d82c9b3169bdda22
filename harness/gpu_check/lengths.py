"""The prompts of the check, and how long each response is: the same for every runner, by arithmetic alone.

Random weights never stop by themselves, so lengths are imposed. They are log-normal, as those of reasoning models
roughly are: most responses are short, a few are several times as long, and a batch waits for those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from oppo_kit.ops.noise import stream_key
from oppo_kit.types import Prompt

# Any fixed numbers: they separate the three streams, whatever the run's seed.
_LENGTH_STREAM = 20_251
_TOKEN_STREAM = 20_252
# Token 0 is the padding and token 1 is called EOS, although nothing stops at it; prompts hold neither.
_FIRST_TOKEN = 2


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """A clipped log-normal distribution, drawn by counter.

    Attributes:
        median: tokens.
        sigma: standard deviation of the logarithm.
        shortest: tokens; what is below becomes this.
        longest: tokens, likewise.
    """

    median: float
    sigma: float
    shortest: int
    longest: int

    def of_draw(self, draw_id: int) -> int:
        """Tokens of this draw's response, a function of ``draw_id`` alone."""
        uniform = ((stream_key(_LENGTH_STREAM, draw_id, 0) >> 11) + 0.5) / 2**53
        length = self.median * math.exp(self.sigma * NormalDist().inv_cdf(uniform))
        return min(max(round(length), self.shortest), self.longest)


# The longest is about four times the median, and the mean of a batch's longest is near the limit. 256 ticks keep a
# step of the larger model near 20 s, so that three of them fit beside the others into six minutes.
FULL_LENGTHS = ResponseLengths(median=64, sigma=0.8, shortest=8, longest=256)
SMALL_LENGTHS = ResponseLengths(median=9, sigma=0.6, shortest=4, longest=24)


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Prompts of random tokens, each with the limit that its response reaches; a ``PromptSource``.

    Attributes:
        num_tokens: of every prompt.
        vocab_size: of the policy.
        lengths: of the responses.
    """

    num_tokens: int
    vocab_size: int
    lengths: ResponseLengths

    def draw(self, draw_id: int) -> Prompt:
        """The prompt of this draw, a function of ``draw_id`` alone."""
        num_values = self.vocab_size - _FIRST_TOKEN
        token_ids = tuple(
            _FIRST_TOKEN + stream_key(_TOKEN_STREAM, draw_id, place) % num_values
            for place in range(self.num_tokens)
        )
        return Prompt(draw_id, token_ids, self.lengths.of_draw(draw_id), {"prompt": ""})
