"""Prompts from rows."""

from __future__ import annotations

from oppo_kit.types import Prompt


class PromptDataset:
    """Being written."""

    def draw(self, draw_id: int) -> Prompt:
        """The prompt of this draw."""
        raise NotImplementedError
