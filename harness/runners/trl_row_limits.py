"""Lets a transformers ``generate`` end each row at a limit of its own, as our generator does.

Nothing is forced on the distribution: a row's last token is sampled like the others, and the row is padded from there
on, as after a stop token. So generation ends with the slowest row, and no later. It knows no TRL.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList

from oppo_kit.types import Prompt


class RowLimits:
    """Response limits by prompt; those of equal prompts are handed out in turn."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._limits: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
        for prompt in prompts:
            self._limits[prompt.token_ids].append(prompt.max_new_tokens)

    def take(self, token_ids: Iterable[int]) -> int:
        """The next limit of this prompt."""
        return self._limits[tuple(token_ids)].popleft()

    def apply_to(self, model: nn.Module) -> None:
        """Every ``model.generate(input_ids=…, attention_mask=…)`` ends its rows at their limits from now on."""
        generate: Any = model.generate

        def generate_within_limits(*, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
            prompts = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
            limits = [
                self.take(token for token, is_kept in zip(row, mask, strict=True) if is_kept)
                for row, mask in prompts
            ]
            criterion = _EndsAtRowLimit(input_ids.shape[1] + torch.tensor(limits, device=input_ids.device))
            return generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                stopping_criteria=StoppingCriteriaList([criterion]),
                **options,
            )

        model.generate = generate_within_limits  # type: ignore[assignment]


class _EndsAtRowLimit(StoppingCriteria):
    """Ends row i at ``widths[i]`` tokens, prompt and padding included; it stays on the device."""

    # transformers pads ended rows only if some criterion has this attribute; its value is not looked at.
    eos_token_id = None

    def __init__(self, widths: Tensor) -> None:
        self._widths = widths

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Any:
        """[R] whether each row has ended."""
        return self._widths <= input_ids.shape[1]
