"""Responses to learn from: careless, with one slip, degenerate; and their balanced mix."""

from __future__ import annotations

import random
from collections.abc import Iterator

from harness.assets.make_tiny.judging import JudgedRow, judge
from harness.assets.make_tiny.tokens import MAX_RESPONSE_TOKENS, encode
from harness.workloads import rewrite_chain as chain


def corrupted(response: str, generator: random.Random) -> str:
    """A response with one slip: a character changed, dropped, doubled or two neighbours exchanged."""
    body = response.removesuffix(chain.EOS_TEXT)
    place = generator.randrange(len(body))
    before, here, after = body[:place], body[place], body[place + 1 :]
    kind = generator.randrange(4)
    if kind == 0:
        here = generator.choice(chain.CHARACTERS if generator.random() < 0.3 else "0123456789+-")
    elif kind == 1:
        here = ""
    elif kind == 2:
        here += generator.choice([here, generator.choice("0123456789")])
    elif after:
        here, after = after[0], here + after[1:]
    return before + here + after + chain.EOS_TEXT


def degenerate(problem: str, generator: random.Random) -> str:
    """A response that an optimiser might find: empty, cut short, without steps, padded out or broken off."""
    right = chain.clean_response(problem).removesuffix(chain.EOS_TEXT)
    steps = right.split("=")[1:]
    kind = generator.randrange(9)
    place = generator.randrange(len(right))
    if kind == 0:
        body = ""
    elif kind == 1:  # ends at a random place
        body = right[:place]
    elif kind == 2:  # ends after a right prefix of steps, or an x
        body = "".join(f"={step}" for step in steps[: generator.randrange(len(steps))])
        body += generator.choice(["", "", "="]) if body else ""
    elif kind == 3:  # a step left out
        drop = generator.randrange(len(steps))
        body = "".join(f"={step}" for index, step in enumerate(steps) if index != drop or len(steps) == 1)
        body = body if len(steps) > 1 else "=" + problem
    elif kind == 4:  # only an answer, right or not
        offset = 0 if len(steps) > 1 else generator.choice((-1, 1, 2))
        shown = chain.answer(problem) + offset
        body = f"={shown}" if generator.random() < 0.7 else f"{shown}"
    elif kind == 5:  # something after the answer
        digit = generator.choice("0123456789")
        body = right + generator.choice(["=", "x", "0", "+1", f"={steps[-1]}", "x=", digit])
    elif kind == 6:  # random characters
        length = min(200, 1 + int(generator.expovariate(1 / 12)))
        body = "".join(generator.choice(chain.CHARACTERS) for _ in range(length))
    elif kind == 7:  # a step or a character again and again
        digit = generator.choice("0123456789")
        again = generator.choice([f"={steps[0]}", "=", "x", digit, "+1", f"={steps[-1]}"])
        body = right[:place] * generator.randrange(2) + again * generator.randint(2, 10)
    else:  # the problem again
        body = generator.choice(["=", ""]) + problem
    if not chain.has_right_answer(problem, body + chain.EOS_TEXT) and generator.random() < 0.9:
        return body + chain.EOS_TEXT
    return body


def reward_rows(
    samples: list[tuple[str, str]], seed: int, long_frac: float = 0.3, long_median: float = 6.0
) -> Iterator[JudgedRow]:
    """Balanced endless mix of solver noise, policy samples, near misses and degenerate responses."""
    generator = random.Random(f"reward:{seed}")
    problems = chain.iterate_problems(seed, "train")
    # Long chains are mostly wrong and short ones right; more long problems and little noise level that.
    long_problems = chain.iterate_problems(seed, "train", median_num_terms=long_median)

    def candidate() -> tuple[str, str]:
        draw = generator.random()
        if samples and draw < 0.35:
            return generator.choice(samples)
        problem = next(long_problems if generator.random() < long_frac else problems)
        if draw < 0.80:
            frac = generator.choice([0.02, 0.06, 0.12, 0.18, 0.25])
            return problem, chain.noisy_response(problem, generator, wrong_step_frac=frac, noticed_frac=0.4)
        response = chain.noisy_response(problem, generator, wrong_step_frac=0.06, noticed_frac=0.9)
        if draw < 0.91:
            return problem, corrupted(response, generator)
        return problem, degenerate(problem, generator)

    # Right and wrong are balanced within each number of terms, else length alone predicts the label.
    surplus = [0] * (chain.MAX_NUM_TERMS + 1)
    while True:
        problem, response = candidate()
        response = _cut(response)
        row = judge(problem, response)
        count = chain.num_terms(problem)
        sign = 1 if row.is_right else -1
        if surplus[count] * sign > 20:
            problem = chain.generate_problem(generator, num_terms=count)
            if chain.split_of(problem) != "train":
                continue
            clean = sign < 0
            frac, noticed = (0.15, 1.0) if clean else (0.3 if count < 4 else 0.12, 0.3)
            response = _cut(
                chain.noisy_response(problem, generator, wrong_step_frac=frac, noticed_frac=noticed)
            )
            row = judge(problem, response)
            sign = 1 if row.is_right else -1
        surplus[count] += sign
        yield row


def _cut(response: str) -> str:
    return response if len(encode(response)) <= MAX_RESPONSE_TOKENS else response[:MAX_RESPONSE_TOKENS]
