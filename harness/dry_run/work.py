"""The work of a step: how many rows, how many tokens, and what overcommit makes of them.

Response lengths are not known before a run. They are taken to be log-normal, clipped by the limit, as those of the GPU
check are: a median of a quarter of the limit, so that the longest of a batch is about four times the median.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.gpu_check.lengths import ResponseLengths
from oppo_kit.algorithm import AlgorithmBase
from oppo_kit.config import TrainConfig

# The spread of the logarithm; see the module.
SIGMA = 0.8
MEDIAN_FRAC = 0.25
# Where nothing bounds the prompts; a question of a paragraph or two.
DEFAULT_PROMPT_TOKENS = 512
# Steps that are played through, and how many are left out at the start, until ages have settled.
_NUM_STEPS = 40
_NUM_WARMUP_STEPS = 8


@dataclass(frozen=True, slots=True)
class Work:
    """What one step holds and trains.

    Attributes:
        batch_size: B, groups.
        delta: Δ, groups.
        max_age: of a group, in steps.
        group_size: G, responses.
        prompt_tokens: of every prompt.
        response_tokens: the limit.
        num_epochs: passes over a batch.
        num_mini_batches: optimizer steps per pass.
        micro_batch_tokens: padded tokens of one forward pass of training, at most.
    """

    batch_size: int
    delta: int
    max_age: int
    group_size: int
    prompt_tokens: int
    response_tokens: int
    num_epochs: int
    num_mini_batches: int
    micro_batch_tokens: int

    @property
    def row_tokens(self) -> int:
        """Of the longest row."""
        return self.prompt_tokens + self.response_tokens

    @property
    def num_held_rows(self) -> int:
        """(B + Δ) × G."""
        return (self.batch_size + self.delta) * self.group_size

    def pass_tokens(self, num_devices: int, budget: int | None = None, num_rows: int | None = None) -> int:
        """Padded tokens of one forward pass on one of so many devices: at least a row, at most all rows of it.

        Args:
            num_devices: that share the rows.
            budget: tokens of a pass; None: ``micro_batch_tokens``.
            num_rows: that there are; None: those of a mini-batch.
        """
        rows = (
            -(-self.batch_size // self.num_mini_batches) * self.group_size if num_rows is None else num_rows
        )
        at_most = self.micro_batch_tokens if budget is None else budget
        return self.row_tokens * max(1, min(-(-rows // num_devices), at_most // self.row_tokens))


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The mean step of a schedule.

    Attributes:
        num_ticks: tokens that the longest row of the step gets.
        num_decoded: tokens of all rows.
        num_context: Σ over decoded tokens of the tokens that each attends to.
        num_prefilled: prompts of new rows, and carried rows with what they have.
        num_trained: prompt and response tokens of the rows that are trained.
    """

    num_ticks: float
    num_decoded: float
    num_context: float
    num_prefilled: float
    num_trained: float


def make_work(train: TrainConfig, algorithm: AlgorithmBase, context_tokens: int | None) -> Work:
    """The work of a configuration; prompts are as long as it allows, or as the module takes them to be.

    Args:
        train: all settings.
        algorithm: that it names.
        context_tokens: positions that the policy has; None: not said.
    """
    limit = train.sampling.response_length
    room = None if context_tokens is None else max(1, context_tokens - limit)
    prompt_tokens = train.max_prompt_tokens or min(DEFAULT_PROMPT_TOKENS, room or DEFAULT_PROMPT_TOKENS)
    return Work(
        batch_size=train.batch_size,
        delta=train.overlap.delta,
        max_age=train.overlap.max_age,
        group_size=algorithm.group_size,
        prompt_tokens=prompt_tokens,
        response_tokens=limit,
        num_epochs=algorithm.num_epochs,
        num_mini_batches=algorithm.num_mini_batches,
        micro_batch_tokens=train.learner.micro_batch_tokens,
    )


class _Group:
    """Lengths of a group's responses, and how far they are."""

    def __init__(self, draw_id: int, work: Work) -> None:
        lengths = ResponseLengths(work.response_tokens * MEDIAN_FRAC, SIGMA, 1, work.response_tokens)
        first = draw_id * work.group_size
        self.draw_id = draw_id
        self.age = 0
        self.num_prompt = work.prompt_tokens
        self.lengths = [lengths.of_draw(first + member) for member in range(work.group_size)]
        self.done = [0] * work.group_size

    @property
    def end(self) -> int:
        """Ticks until its last response ends."""
        return max(length - done for length, done in zip(self.lengths, self.done, strict=True))

    def num_prefilled(self) -> int:
        """Tokens to read before rows go on."""
        live = [done for done, length in zip(self.done, self.lengths, strict=True) if done < length]
        return sum(self.num_prompt + done for done in live)

    def advance(self, num_ticks: int) -> tuple[int, int]:
        """Decode; returns tokens, and tokens attended to."""
        num_decoded = num_context = 0
        for member, (length, done) in enumerate(zip(self.lengths, self.done, strict=True)):
            new = min(num_ticks, length - done)
            num_decoded += new
            num_context += new * (self.num_prompt + done) + new * (new + 1) // 2
            self.done[member] += new
        self.age += 1
        return num_decoded, num_context


def mean_step(work: Work, delta: int) -> StepTokens:
    """Play a schedule through: refill to B + Δ, decode until B have ended, those at their greatest age first."""
    held: list[_Group] = []
    num_drawn = num_ticks = num_decoded = num_context = num_prefilled = num_trained = 0
    for step in range(_NUM_STEPS):
        while len(held) < work.batch_size + delta:
            held.append(_Group(num_drawn, work))
            num_drawn += 1
        in_order = sorted(held, key=lambda group: (group.age < work.max_age, group.end, group.draw_id))
        chosen = in_order[: work.batch_size]
        ticks = max(group.end for group in chosen)
        counts = step >= _NUM_WARMUP_STEPS
        num_prefilled += counts * sum(group.num_prefilled() for group in held)
        for group in held:
            decoded, context = group.advance(ticks)
            num_decoded += counts * decoded
            num_context += counts * context
        num_ticks += counts * ticks
        num_trained += counts * sum(
            sum(group.lengths) + group.num_prompt * work.group_size for group in chosen
        )
        held = in_order[work.batch_size :]
    num_steps = _NUM_STEPS - _NUM_WARMUP_STEPS
    return StepTokens(
        num_ticks / num_steps,
        num_decoded / num_steps,
        num_context / num_steps,
        num_prefilled / num_steps,
        num_trained / num_steps,
    )
