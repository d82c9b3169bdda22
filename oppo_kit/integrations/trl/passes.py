"""Log-probs of a padded batch by passes over rows of similar length, each cut to its longest row.

TRL pads all responses of a round to the longest one, and passes the padding through the model. What stands after a
response changes nothing before it, so the log-probs and their gradient are the same without, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    _Trainer = Any  # one of TRL's, which the trainers name behind their mix-ins
else:
    _Trainer = object

LOGPROB_METHODS = {
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ),
}
"""Of a stock trainer with ``ShortPasses``, for ``require_methods``."""

# What one more pass costs, in tokens: on two CPU cores a pass forward and back of the embedded model costs what 60 of
# its tokens do, one of SmolLM2-135M less.
_PASS_TOKENS = 128

OnePass = Callable[[Tensor, int], Sequence[Tensor | None]]
"""Of rows [r] and how many response tokens are kept, t: tensors [r, t], or None for what was not asked for."""


class Pass(NamedTuple):
    """Rows that go through the model together.

    Attributes:
        rows: their indices.
        length: response tokens that are kept of each, at least 1.
    """

    rows: list[int]
    length: int


def cut_passes(lengths: Sequence[int], *, prompt_tokens: int, max_tokens: int) -> list[Pass]:
    """The cheapest passes over all rows, by dynamic programming over the rows in order of length.

    Args:
        lengths: response tokens by row.
        prompt_tokens: padded width of the prompts, which every row has.
        max_tokens: of one pass, padding included; a single row may have more.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    widths = [prompt_tokens + max(lengths[row], 1) for row in order]
    # costs[stop]: of the first ``stop`` rows; starts[stop]: where the last of their passes starts.
    costs, starts = [0.0], [0]
    for stop in range(1, len(order) + 1):
        width = widths[stop - 1]
        first = max(0, stop - max(1, max_tokens // width))
        best = min(range(first, stop), key=lambda start: costs[start] + (stop - start) * width)
        costs.append(costs[best] + (stop - best) * width + _PASS_TOKENS)
        starts.append(best)
    passes: list[Pass] = []
    stop = len(order)
    while stop:
        start = starts[stop]
        passes.append(Pass(order[start:stop], widths[stop - 1] - prompt_tokens))
        stop = start
    return passes


def response_lengths(mask: Tensor) -> list[int]:
    """By row of a [R, T] mask, the position after its last token; 0 for a row without any."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask.bool() * positions).amax(1).tolist()


def run_passes(
    one_pass: OnePass, mask: Tensor, *, prompt_tokens: int, max_tokens: int
) -> tuple[Tensor | None, ...]:
    """All passes, put together again.

    Args:
        one_pass: passes some rows through the model.
        mask: [R, T], which response tokens there are.
        prompt_tokens, max_tokens: see ``cut_passes``.

    Returns:
        [R, T] each, or None, as ``one_pass``; 0 after the end of a row's pass.
    """
    found: list[list[Tensor | None]] = []
    rows: list[int] = []
    for part in cut_passes(response_lengths(mask), prompt_tokens=prompt_tokens, max_tokens=max_tokens):
        outputs = one_pass(torch.tensor(part.rows, device=mask.device), part.length)
        missing = mask.shape[1] - part.length
        found.append(
            [None if output is None else torch.nn.functional.pad(output, (0, missing)) for output in outputs]
        )
        rows += part.rows
    back = torch.tensor(rows, device=mask.device).argsort()
    return tuple(_joined(outputs, back) for outputs in zip(*found, strict=True))


def _joined(outputs: Sequence[Tensor | None], order: Tensor) -> Tensor | None:
    given = [output for output in outputs if output is not None]
    return torch.cat(given)[order] if given else None


class ShortPasses(_Trainer):
    """To inherit from, before TRL's GRPO or RLOO trainer: its log-probs in training come from such passes."""

    _trims_padding: bool

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> Any:
        stock = super()._get_per_token_logps_and_entropies
        # A mixture of experts has a loss that looks at all rows of a pass.
        is_plain = not compute_aux_loss and all(value is None for value in inputs.values())
        if not (self._trims_padding and self.model.training and is_plain):
            return stock(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                **inputs,
            )
        prompt_tokens = input_ids.shape[1] - logits_to_keep

        def one_pass(rows: Tensor, length: int) -> Any:
            width = prompt_tokens + length
            ids, mask = input_ids[rows, :width], attention_mask[rows, :width]
            return stock(model, ids, mask, length, compute_entropy=compute_entropy)

        return run_passes(
            one_pass,
            attention_mask[:, prompt_tokens:],
            prompt_tokens=prompt_tokens,
            max_tokens=(batch_size or len(input_ids)) * input_ids.shape[1],
        )
