"""A verdict for every token of a response: what the verifier is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from harness.assets.make_tiny.tokens import BOS, EOS, IGNORED, TOKEN_IDS, encode, token_texts
from harness.workloads import rewrite_chain as chain


@dataclass(frozen=True)
class JudgedRow:
    """One response with a verdict per token; the prompt's tokens come first and carry none.

    tokens: ids of bos, prompt and response.
    expected: per token the id a right solver would put next, -100 where that is undefined.
    is_step_right: per response token, whether the step so far begins the right rewrite of what stands.
    is_chain_right: per response token, whether all that stands is right so far.
    is_right: whether the whole response is; only then may the last token score high.
    """

    tokens: list[int]
    expected: list[int]
    is_step_right: list[int]
    is_chain_right: list[int]
    is_right: bool


def judge(prompt: str, response: str) -> JudgedRow:
    """Labels of every token of a response (see ``JudgedRow``)."""
    tokens = [BOS, *encode(prompt), *encode(response)]
    num_prompt = len(prompt) + 1
    expected = [IGNORED] * (num_prompt - 1) + [TOKEN_IDS["="]]
    is_step_right, is_chain_right = [IGNORED] * num_prompt, [IGNORED] * num_prompt
    standing, standing_is_right, is_malformed = prompt, True, False
    step: str | None = None
    body, end, _ = response.partition(chain.EOS_TEXT)
    for character in token_texts(body):
        is_malformed = is_malformed or (step is None) != (character == "=" and step is None)
        if character == "=":
            if step is not None:
                standing_is_right = standing_is_right and step == chain.rewrite(standing)
                standing = step
            step = ""
        elif character == "x":
            step = None
        elif step is not None:
            step += character
        right_step = chain.rewrite(standing)
        fits = not is_malformed and right_step is not None and right_step.startswith(step or "")
        is_step_right.append(int(fits))
        is_chain_right.append(int(fits and standing_is_right))
        expected.append(_next_token(step, right_step) if fits and right_step is not None else IGNORED)
    is_right = chain.is_correct(prompt, response)
    if end:
        is_finished = step is not None and not is_malformed and chain.rewrite(step) is None
        is_step_right.append(int(is_finished and step == chain.rewrite(standing)))
        is_chain_right.append(int(is_right))
        expected.append(IGNORED)
    return JudgedRow(tokens, expected, is_step_right, is_chain_right, is_right)


def _next_token(step: str | None, right_step: str) -> int:
    """What a right solver writes after the beginning of a right step; None stands for no step begun."""
    if step is None:
        return TOKEN_IDS["="]
    if len(step) < len(right_step):
        return TOKEN_IDS[right_step[len(step)]]
    return EOS if chain.rewrite(right_step) is None else TOKEN_IDS["="]
