"""The "rewrite chain": a generated arithmetic task whose responses have a long length tail.

A problem is a start value and one to thirteen signed terms, ``54+3-2+1``. A response folds the first
term into the value and rewrites the rest, one step after the other, and then ends::

    54+3-2+1  ->  =57-2+1=55+1=56<eos>

Every step copies the remaining expression, so the length is quadratic in the number of terms, and the
log-normal number of terms gives a long tail. An ``x`` directly after a step withdraws that step: the
chain stands where it stood before, and the step is redone.

This file knows the task only: problems, splits, solvers and checkers, as text. It knows no tensor,
tokenizer or model, and it draws random numbers only from a generator that is passed in or seeded here.
"""

import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BOS_TEXT",
    "CHARACTERS",
    "EOS_TEXT",
    "MAX_NUM_TERMS",
    "MAX_VALUE",
    "PAD_TEXT",
    "ChainReport",
    "Split",
    "StepVerdict",
    "answer",
    "check_chain",
    "check_steps",
    "clean_response",
    "generate_problem",
    "has_right_answer",
    "held_out_problems",
    "is_correct",
    "iterate_problems",
    "noisy_response",
    "num_terms",
    "rewrite",
    "split_of",
]


Split = Literal["train", "held_out"]

CHARACTERS = "0123456789+-=x"
PAD_TEXT = "<pad>"
BOS_TEXT = "<bos>"
EOS_TEXT = "<eos>"

MAX_VALUE = 99
MAX_NUM_TERMS = 13
# With terms up to 9 a model of this size still had the ones digit at chance after five minutes.
MAX_TERM = 3
MEDIAN_NUM_TERMS = 4.0
SIGMA_NUM_TERMS = 0.55
# One problem text in five is held out: 1-term problems are only 588 texts, and a stratified set of
# 2,000 problems needs about 75 of them.
HELD_OUT_ONE_IN = 5
# The noise that reinforcement learning can remove.
WRONG_STEP_FRAC = 0.18
NOTICED_FRAC = 0.35
WRONG_OFFSETS = (-10, -2, -1, 1, 2, 10)
# Draws without a new problem after which a stratum of the held-out set counts as exhausted.
_MAX_IDLE_DRAWS = 20_000

_HEAD = re.compile(r"(-?\d+)([+-]\d+)(.*)", re.DOTALL)
_PROBLEM = re.compile(r"\d+([+-]\d+)+")
_STEP = re.compile(r"=([^=x]*)(x?)")
_PADDING = re.compile(rf"({re.escape(PAD_TEXT)})*")


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """One ``=`` of a response and what became of it.

    expression: the text between this ``=`` and the next ``=``, ``x`` or end.
    is_valid: the expression is exactly the rewrite of the one that stood before it, character by
        character. Earlier steps play no part: a valid step may continue a wrong chain.
    is_withdrawn: an ``x`` follows, so the step does not stand.
    """

    expression: str
    is_valid: bool
    is_withdrawn: bool


@dataclass(frozen=True, slots=True)
class ChainReport:
    """What the checkers know of a response.

    steps: one verdict for each ``=``, in order.
    is_well_formed: the text before the end is nothing but steps, each with at most one ``x``.
    is_ended: the response holds ``<eos>``, and after the first one there is nothing but ``<pad>``.
    """

    prompt: str
    steps: tuple[StepVerdict, ...]
    is_well_formed: bool
    is_ended: bool

    @property
    def standing_steps(self) -> tuple[StepVerdict, ...]:
        """Returns the steps that were not withdrawn, in order."""
        return tuple(step for step in self.steps if not step.is_withdrawn)

    @property
    def is_chain_right(self) -> bool:
        """Returns whether every standing step is valid and nothing else was written; it may be unfinished."""
        return self.is_well_formed and all(step.is_valid for step in self.standing_steps)


def num_terms(problem: str) -> int:
    """Number of signed terms of a problem, which is the number of steps of its clean response.

    Raises: ValueError where the text is no problem.
    """
    _require_problem(problem)
    return len(re.findall(r"[+-]", problem))


def answer(problem: str) -> int:
    """Value of a problem.

    Raises: ValueError where the text is no problem.
    """
    _require_problem(problem)
    return sum(int(number) for number in re.findall(r"[+-]?\d+", problem))


def rewrite(expression: str) -> str | None:
    """Expression with its first term folded into the value, the rest copied; None where none is left."""
    match = _HEAD.fullmatch(expression)
    if match is None:
        return None
    value, term, rest = match.groups()
    return f"{int(value) + int(term)}{rest}"


def split_of(problem: str) -> Split:
    """Split that owns a problem text: a fixed hash of the text, the same on every machine and run."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else "train"


def generate_problem(
    generator: random.Random,
    *,
    num_terms: int | None = None,
    median_num_terms: float = MEDIAN_NUM_TERMS,
) -> str:
    """One problem, of either split.

    generator: the source of randomness; it is advanced.
    num_terms: number of terms, 1 to 13; None draws round(lognormal(median, 0.55)), clipped to 1..13.
    median_num_terms: median of that draw.
    Returns: a text like ``54+3-2+1``; the start value is uniform in 0..99, each term uniform among
        those of -3..-1 and 1..3 that keep the running value in 0..99.
    Raises: ValueError where ``num_terms`` is out of range.
    """
    if num_terms is None:
        drawn = round(generator.lognormvariate(math.log(median_num_terms), SIGMA_NUM_TERMS))
        num_terms = min(MAX_NUM_TERMS, max(1, drawn))
    if not 1 <= num_terms <= MAX_NUM_TERMS:
        raise ValueError(f"num_terms is {num_terms}; a problem has 1 to {MAX_NUM_TERMS} terms")
    value = generator.randint(0, MAX_VALUE)
    parts = [str(value)]
    for _ in range(num_terms):
        sizes = [size for size in range(-MAX_TERM, MAX_TERM + 1) if size != 0]
        term = generator.choice([size for size in sizes if 0 <= value + size <= MAX_VALUE])
        value += term
        parts.append(f"{term:+d}")
    return "".join(parts)


def iterate_problems(seed: int, split: Split, *, median_num_terms: float = MEDIAN_NUM_TERMS) -> Iterator[str]:
    """Endless deterministic stream of one split's problems; the splits share no problem text.

    seed: equal seeds give equal streams; a problem may come more than once in a stream.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f"split is {split!r}; use 'train' or 'held_out'")
    generator = random.Random(f"rewrite_chain:{seed}:{split}")
    while True:
        problem = generate_problem(generator, median_num_terms=median_num_terms)
        if split_of(problem) == split:
            yield problem


def held_out_problems(num_problems: int, *, seed: int = 0) -> list[str]:
    """Fixed set of held-out problems, stratified by number of terms.

    Each number of terms gets its share of the task's distribution (largest remainders), so that two
    sets differ in their problems but not in their mix of lengths; the order is shuffled. Problems are distinct up
    to about 3,000; beyond, those of one term are too few, and some come twice (37 of 4,096).

    Raises: ValueError where a stratum would need a text three times (above about 6,000 problems).
    """
    generator = random.Random(f"rewrite_chain:{seed}:evaluation")
    problems: list[str] = []
    for count, stratum_size in zip(range(1, MAX_NUM_TERMS + 1), _stratum_sizes(num_problems), strict=True):
        stratum = _held_out_of(count, stratum_size, generator)
        if stratum_size > 2 * len(stratum):
            raise ValueError(
                f"{num_problems} held-out problems need {stratum_size} of {count} terms, but only "
                f"{len(stratum)} texts are held out; ask for fewer problems"
            )
        problems.extend(stratum + stratum[: stratum_size - len(stratum)])
    generator.shuffle(problems)
    return problems


def _held_out_of(num_terms: int, num_wanted: int, generator: random.Random) -> list[str]:
    """Distinct held-out problems of so many terms; fewer than wanted where there are no more."""
    stratum: dict[str, None] = {}
    idle_draws = 0
    while len(stratum) < num_wanted and idle_draws <= _MAX_IDLE_DRAWS:
        problem = generate_problem(generator, num_terms=num_terms)
        if split_of(problem) == "held_out" and problem not in stratum:
            stratum[problem] = None
            idle_draws = 0
        else:
            idle_draws += 1
    return list(stratum)


def clean_response(problem: str) -> str:
    """The right response without detours, ``<eos>`` included."""
    return _solve(problem, random.Random(0), wrong_step_frac=0.0, noticed_frac=0.0)


def noisy_response(
    problem: str,
    generator: random.Random,
    *,
    wrong_step_frac: float = WRONG_STEP_FRAC,
    noticed_frac: float = NOTICED_FRAC,
) -> str:
    """Response of a careless solver, ``<eos>`` included.

    Each step is wrong with probability ``wrong_step_frac``: its value is off by 1, 2 or 10, such that
    all later values stay in 0..99 (where no offset does, the step is right). A wrong step is noticed
    with probability ``noticed_frac``: an ``x`` follows it and the step is redone, perhaps wrongly again.
    A wrong step that goes unnoticed is carried on.
    """
    return _solve(problem, generator, wrong_step_frac=wrong_step_frac, noticed_frac=noticed_frac)


def check_chain(prompt: str, response: str) -> ChainReport:
    """Judges a response step by step.

    prompt: the problem, without ``<bos>``.
    response: the generated text with its ``<eos>``, and padding after it or none; special tokens must
        not be stripped, for without ``<eos>`` a response counts as unfinished.
    """
    _require_problem(prompt)
    body, end, after = response.partition(EOS_TEXT)
    is_ended = bool(end) and _PADDING.fullmatch(after) is not None
    steps: list[StepVerdict] = []
    standing = prompt
    position = 0
    for match in _STEP.finditer(body):
        if match.start() != position:
            break
        position = match.end()
        expression, withdrawal = match.groups()
        is_valid = expression == rewrite(standing)
        steps.append(StepVerdict(expression, is_valid, bool(withdrawal)))
        if not withdrawal:
            standing = expression
    is_well_formed = position == len(body)
    return ChainReport(prompt, tuple(steps), is_well_formed, is_ended)


def check_steps(prompt: str, response: str) -> list[bool]:
    """For each ``=`` of a response, whether that rewrite is exactly right for the expression before it."""
    return [step.is_valid for step in check_chain(prompt, response).steps]


def is_correct(prompt: str, response: str) -> bool:
    """The true reward: whether a response is a finished chain of right steps.

    All of this must hold:

    - it ends in ``<eos>``, with nothing but ``<pad>`` after the first one;
    - before that there is nothing but steps ``=expression``, each withdrawn by at most one ``x``;
    - as many steps stand as the problem has terms: none is skipped, none is added;
    - every step that stands is valid, and the last of all steps stands: it is the answer.

    Two errors that cancel leave a wrong response. A withdrawn step may hold anything.
    """
    return _is_finished(check_chain(prompt, response), is_every_step_checked=True)


def has_right_answer(prompt: str, response: str) -> bool:
    """Whether a response is a finished chain that ends with the answer, right steps or not.

    It asks for all that ``is_correct`` asks for, but compares the last step only, with the answer in
    plain decimal (``7``, not ``07`` or ``+7``). For figures of how often errors cancel; no reward.
    """
    return _is_finished(check_chain(prompt, response), is_every_step_checked=False)


def _is_finished(report: ChainReport, *, is_every_step_checked: bool) -> bool:
    if not (report.is_ended and report.is_well_formed and report.steps):
        return False
    last_step = report.steps[-1]
    if last_step.is_withdrawn or len(report.standing_steps) != num_terms(report.prompt):
        return False
    # Valid steps of the right number end with the answer; it need not be compared again.
    return (
        report.is_chain_right if is_every_step_checked else last_step.expression == str(answer(report.prompt))
    )


def _solve(problem: str, generator: random.Random, *, wrong_step_frac: float, noticed_frac: float) -> str:
    _require_problem(problem)
    response: list[str] = []
    standing = problem
    while (right := rewrite(standing)) is not None:
        wrong = None
        if wrong_step_frac > 0 and generator.random() < wrong_step_frac:
            wrong = _wrong_expression(right, generator)
        if wrong is None:
            standing = right
            response.append(f"={right}")
        elif generator.random() < noticed_frac:
            response.append(f"={wrong}x")
        else:
            standing = wrong
            response.append(f"={wrong}")
    return "".join(response) + EOS_TEXT


def _wrong_expression(right: str, generator: random.Random) -> str | None:
    value_text = re.match(r"\d+", right)
    if value_text is None:
        return None
    rest = right[value_text.end() :]
    value = int(value_text.group())
    running, values = value, [value]
    for term in re.findall(r"[+-]\d+", rest):
        running += int(term)
        values.append(running)
    offsets = [o for o in WRONG_OFFSETS if min(values) + o >= 0 and max(values) + o <= MAX_VALUE]
    return f"{value + generator.choice(offsets)}{rest}" if offsets else None


def _stratum_sizes(num_problems: int) -> list[int]:
    def below(bound: float) -> float:
        return 0.5 * (1 + math.erf(math.log(bound / MEDIAN_NUM_TERMS) / (SIGMA_NUM_TERMS * math.sqrt(2))))

    edges = [0.0, *(below(count + 0.5) for count in range(1, MAX_NUM_TERMS)), 1.0]
    shares = [num_problems * (high - low) for low, high in itertools.pairwise(edges)]
    sizes = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: sizes[index] - shares[index])
    for index in by_remainder[: num_problems - sum(sizes)]:
        sizes[index] += 1
    return sizes


def _require_problem(problem: str) -> None:
    if _PROBLEM.fullmatch(problem) is None:
        raise ValueError(f"{problem!r} is no problem; write one like '54+3-2+1', without <bos> or spaces")
