"""A key-value cache that grows in place and drops rows in place, for unmodified transformers decoders.

transformers' own ``DynamicCache`` concatenates: every decoded token copies all keys and values into fresh memory. With
48 rows of 150 tokens that copy and its page faults cost three times the forward pass itself. Here a layer owns a buffer
with spare columns, and a token is written where it belongs.

All rows share one width (the caller left-pads), also in sliding-window layers, whose window the mask enforces.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

# Spare room at the first allocation and at each growth; doubling keeps the copies below one per token on average.
_MIN_COLUMNS = 64


class PreallocatedLayer(DynamicLayer):
    """One layer's buffers ``[rows, heads, columns, head size]``; ``keys`` and ``values`` are views of what is used."""

    def __init__(self) -> None:
        super().__init__()
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,  # noqa: ARG002
        **kwargs: object,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Write new columns behind the used ones; returns all keys and values so far, without copying them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old, new = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        self._key_buffer = _with_columns(self._key_buffer, key_states, used=old, needed=new)
        self._value_buffer = _with_columns(self._value_buffer, value_states, used=old, needed=new)
        num_rows = key_states.shape[0]
        self._key_buffer[:num_rows, :, old:new] = key_states
        self._value_buffer[:num_rows, :, old:new] = value_states
        self.keys = self._key_buffer[:num_rows, :, :new]
        self.values = self._value_buffer[:num_rows, :, :new]
        return self.keys, self.values

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Row i becomes what row ``indices[i]`` was; the others are dropped. Only rows that move are copied."""
        if self.keys is None or self.values is None:
            return
        targets = [target for target, source in enumerate(indices) if target != source]
        sources = [indices[target] for target in targets]
        for used in (self.keys, self.values):
            if targets:
                used[targets] = used[sources]
        self.keys, self.values = self.keys[: len(indices)], self.values[: len(indices)]


class PreallocatedCache(Cache):
    """Layers appear as the model asks for them."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=PreallocatedLayer)

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Row i becomes what row ``indices[i]`` was, in every layer."""
        for layer in self.layers:
            layer.keep_rows(indices)  # type: ignore[union-attr]


def _with_columns(buffer: Tensor | None, states: Tensor, *, used: int, needed: int) -> Tensor:
    """The buffer, or a wider one with the used columns copied."""
    if buffer is not None and buffer.shape[2] >= needed:
        return buffer
    num_rows, num_heads, _, head_size = states.shape
    wider = states.new_empty(num_rows, num_heads, max(2 * needed, _MIN_COLUMNS), head_size)
    if buffer is not None:
        wider[:, :, :used] = buffer[:num_rows, :, :used]
    return wider


def compaction(is_kept: Sequence[bool]) -> list[int]:
    """An order of the kept rows in which few move: holes are filled with the last kept rows.

    >>> compaction([True, False, True, False, True])
    [0, 4, 2]
    """
    num_kept = sum(is_kept)
    movers = [index for index in range(len(is_kept) - 1, num_kept - 1, -1) if is_kept[index]]
    return [index if is_kept[index] else movers.pop(0) for index in range(num_kept)]
