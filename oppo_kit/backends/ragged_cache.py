"""A key-value cache with one write position per row, for unmodified transformers decoders.

Rows are admitted, extended by any number of tokens, cropped and evicted one by one, without touching the others. Live
rows stay dense in slots 0 … n - 1 (an evicted row's slot is taken by the last row), so that attention reads views of
the buffers, and the cost of a forward pass follows the live rows. Position ids and the attention mask follow from the
rows' lengths: a query attends to the columns up to its own position, which also hides what a longer row left behind.
So cropping is setting a length.

A sliding window is a stricter mask over the same full-length buffers: it costs memory, and cropping stays free.

It has no gradient: every call belongs under ``torch.inference_mode()``. A model must never be called on it without the
position ids and mask of ``append``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from oppo_kit.backends.ragged_attention import Block, attention_blocks, cut_into_blocks
from oppo_kit.errors import ModelError, StateError

# Room at the first allocation; doubling afterwards keeps the copies below one per token and row on average.
_MIN_COLUMNS = 64
_MIN_SLOTS = 8

# Windows that a model applies inside its attention instead of taking a mask, and so by column of the longest row.
_OWN_WINDOWS = ("window_size", "attention_window", "attention_chunk_size")

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Append:
    """Where new tokens go: rows ``first … first + n - 1``, each row's tokens right-aligned in T columns of input.

    Attributes:
        first: the first row.
        num_columns: K, key-value columns that attention looks at.
        position_ids: [n, T] int64; 0 on the padding left of a row's tokens.
        attention_mask: additive [n, 1, T, K], or one such by layer type.
        source: (row, input column) of every real token, or None when there is no padding and T is 1.
        target: (slot, cache column) of the same tokens.
    """

    first: int
    num_columns: int
    position_ids: Tensor
    attention_mask: Tensor | dict[str, Tensor]
    source: tuple[Tensor, Tensor] | None
    target: tuple[Tensor, Tensor]

    @property
    def num_rows(self) -> int:
        """n, rows of the input."""
        return self.position_ids.shape[0]


class RaggedLayer(CacheLayerMixin):
    """One layer's buffers, ``[slots, heads, columns, head size]``; written where the current ``Append`` says."""

    is_sliding = False  # the window is in the mask, whatever the layer's type

    def __init__(self, owner: RaggedCache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeros: whatever is masked must be finite."""
        slots, columns = self._owner.capacity
        self.keys = key_states.new_zeros(slots, key_states.shape[1], columns, key_states.shape[3])
        self.values = value_states.new_zeros(slots, value_states.shape[1], columns, value_states.shape[3])
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,  # noqa: ARG002
        **kwargs: object,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Write ``[n, heads, T, head size]``; returns views of the rows' keys and values, K columns wide."""
        append = self._owner.current_append
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        last, width = append.first + append.num_rows, append.num_columns
        views = []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            assert buffer is not None
            slots, columns = append.target
            if append.source is None:
                buffer[slots, :, columns] = states[:, :, 0]
            else:
                rows, places = append.source
                buffer[slots, :, columns] = states[rows, :, places]
            views.append(buffer[append.first : last, :, :width])
        return views[0], views[1]

    def grow(self, slots: int, columns: int) -> None:
        """Larger buffers, contents kept."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (_grown(buffer, slots, columns) for buffer in (self.keys, self.values))

    def move(self, targets: Tensor, sources: Tensor, num_columns: int) -> None:
        """Slot ``targets[i]`` becomes what slot ``sources[i]`` was."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[targets, :, :num_columns] = buffer[sources, :, :num_columns]

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        buffers = (self.keys, self.values)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers if buffer is not None)

    def clear(self) -> None:
        """Drop keys and values."""
        self.keys = self.values = None
        self.is_initialized = False

    def get_seq_length(self) -> int:
        """Of the longest row; only transformers' own mask code, which our mask replaces, would ask."""
        return max(self._owner.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See ``get_seq_length``."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum: buffers grow."""
        return -1

    # The name before transformers 5.24.
    get_max_cache_shape = get_max_length


class RaggedCache(Cache):
    """See the module.

    Args:
        config: of the model; its layer count, layer types and sliding window are read.
        device: of keys and values.
        dtype: of the additive mask, that is of the model's queries.
        column_multiple: K is rounded up to a multiple of it.
        has_blocks: attend in blocks of rows of similar length when every row gets one token; pays on a CPU.

    Raises:
        ModelError: the model has layers that are neither full nor sliding-window attention.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        column_multiple: int = 1,
        has_blocks: bool = False,
    ) -> None:
        text_config: Any = config.get_text_config()
        self._layers = [RaggedLayer(self) for _ in range(text_config.num_hidden_layers)]
        super().__init__(layers=list(self._layers))
        self._windows = _attention_windows(text_config)
        self._device = device
        self._dtype = dtype
        self._column_multiple = column_multiple
        self._lengths: list[int] = []
        # The lengths of all slots on the device, so that a decode step copies nothing from the host.
        self._device_lengths = torch.zeros(_MIN_SLOTS, dtype=torch.int64, device=device)
        self._num_columns = _MIN_COLUMNS
        self._append: Append | None = None
        self._has_blocks = has_blocks
        # Neighbouring rows that attend together; None after a row came, went or changed by itself.
        self._cuts: list[tuple[int, int]] | None = None

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of every live row, by slot."""
        return tuple(self._lengths)

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return len(self._lengths)

    @property
    def capacity(self) -> tuple[int, int]:
        """Allocated slots and columns."""
        return self._device_lengths.shape[0], self._num_columns

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(layer.num_bytes for layer in self._layers)

    @property
    def current_append(self) -> Append:
        """What the layers write now.

        Raises:
            StateError: the model was called outside ``append``.
        """
        if self._append is None:
            raise StateError(
                "a model was called on a ragged cache outside append(); pass the inputs that append() makes"
            )
        return self._append

    def admit(self, num_rows: int) -> None:
        """Empty rows in the next slots."""
        first = len(self._lengths)
        self._lengths += [0] * num_rows
        self._cuts = None
        self._reserve(len(self._lengths), self._num_columns)
        self._device_lengths[first : first + num_rows] = 0

    def keep_rows(self, is_kept: Sequence[bool]) -> list[int]:
        """Evict rows; the others stay dense.

        Args:
            is_kept: one entry per live row.

        Returns:
            by new slot the old slot of the row that is there now; few rows move.
        """
        order = compaction(is_kept)
        targets = [target for target, source in enumerate(order) if target != source]
        if targets:
            sources = [order[target] for target in targets]
            num_columns = max(self._lengths[source] for source in sources)
            to = torch.tensor(targets, device=self._device)
            come_from = torch.tensor(sources, device=self._device)
            for layer in self._layers:
                layer.move(to, come_from, num_columns)
            self._device_lengths[to] = self._device_lengths[come_from]
        self._lengths = [self._lengths[source] for source in order]
        self._cuts = None
        return order

    def crop_row(self, row: int, length: int) -> None:
        """Forget a row's tokens from ``length`` on; the next ones are written there.

        Raises:
            StateError: the row is shorter.
        """
        if not 0 <= length <= self._lengths[row]:
            raise StateError(f"row {row} has {self._lengths[row]} tokens and cannot be cropped to {length}")
        self._lengths[row] = length
        self._device_lengths[row] = length
        self._cuts = None

    def clear(self) -> None:
        """Drop all rows and all buffers; also what a row with values that are not finite left behind."""
        self._lengths, self._cuts = [], None
        self._num_columns = _MIN_COLUMNS
        self._device_lengths = torch.zeros(_MIN_SLOTS, dtype=torch.int64, device=self._device)
        for layer in self._layers:
            layer.clear()

    @contextmanager
    def append(self, num_new: Sequence[int], *, first: int = 0) -> Iterator[Append]:
        """Inside, the model may be called once with ``Append``'s position ids and mask; then the rows are longer.

        The input has ``max(num_new)`` columns, and a row's tokens are its last ``num_new[i]`` ones, so the last
        column predicts every row's next token. Nothing changes when the block raises.

        Args:
            num_new: tokens by row, at least 0; of rows ``first``, ``first + 1``, …
            first: slot of the first row.
        """
        last = first + len(num_new)
        needed = max(old + new for old, new in zip(self._lengths[first:last], num_new, strict=True))
        width = -(-needed // self._column_multiple) * self._column_multiple
        self._reserve(last, width)
        self._append = self._lay_out(num_new, first, width)
        try:
            with attention_blocks(self._blocks(num_new, first)):
                yield self._append
        finally:
            self._append = None
        for row, new in enumerate(num_new, start=first):
            self._lengths[row] += new
        if min(num_new) == max(num_new):
            self._device_lengths[first:last] += num_new[0]
        else:
            self._device_lengths[first:last] += torch.tensor(num_new, device=self._device)
            self._cuts = None

    def _blocks(self, num_new: Sequence[int], first: int) -> list[Block]:
        """Blocks of a decode step over all rows; none for anything else."""
        if not self._has_blocks or first or len(num_new) < self.num_rows or min(num_new) < max(num_new):
            return []
        if self._cuts is None:
            self._cuts = cut_into_blocks(self._lengths)
        return [Block(start, stop, max(self._lengths[start:stop]) + num_new[0]) for start, stop in self._cuts]

    def _lay_out(self, num_new: Sequence[int], first: int, width: int) -> Append:
        last, num_inputs = first + len(num_new), max(num_new)
        starts = self._device_lengths[first:last, None]
        slots = torch.arange(first, last, device=self._device)
        if min(num_new) == num_inputs == 1:
            positions = starts.clone()
            source, target = None, (slots, positions[:, 0])
        else:
            padding = num_inputs - torch.tensor(num_new, device=self._device)[:, None]
            places = torch.arange(num_inputs, device=self._device)[None, :] - padding
            positions = torch.where(places >= 0, starts + places, 0)
            rows, inputs = torch.nonzero(places >= 0, as_tuple=True)
            source, target = (rows, inputs), (slots[rows], positions[rows, inputs])
        return Append(first, width, positions, self._mask(positions, width), source, target)

    def _mask(self, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        columns = torch.arange(width, device=self._device)
        is_visible = columns <= positions[..., None]
        masks = {}
        for kind, window in self._windows.items():
            in_window = (
                is_visible if window is None else is_visible & (columns > positions[..., None] - window)
            )
            # Additive: eager attention needs it, and sdpa would convert a boolean one anew in every layer.
            mask = torch.zeros(in_window.shape, dtype=self._dtype, device=self._device)
            masks[kind] = mask.masked_fill_(~in_window, float("-inf"))[:, None]
        return masks.get("", masks)

    def _reserve(self, num_slots: int, num_columns: int) -> None:
        slots, columns = self.capacity
        if num_slots <= slots and num_columns <= columns:
            return
        slots = slots if num_slots <= slots else max(2 * slots, num_slots)
        columns = columns if num_columns <= columns else max(2 * columns, num_columns)
        for layer in self._layers:
            layer.grow(slots, columns)
        self._num_columns = columns
        if slots > self._device_lengths.shape[0]:
            longer = torch.zeros(slots, dtype=torch.int64, device=self._device)
            longer[: self._device_lengths.shape[0]] = self._device_lengths
            self._device_lengths = longer


def right_aligned(rows: Sequence[Sequence[int]]) -> Tensor:
    """[n, T] int64 input ids as ``append`` expects them, padded with 0 on the left."""
    num_inputs = max(map(len, rows))
    input_ids = torch.zeros(len(rows), num_inputs, dtype=torch.int64)
    for index, row in enumerate(rows):
        if row:
            input_ids[index, num_inputs - len(row) :] = torch.tensor(row, dtype=torch.int64)
    return input_ids


def compaction(is_kept: Sequence[bool]) -> list[int]:
    """An order of the kept rows in which few move: holes are filled with the last kept rows.

    >>> compaction([True, False, True, False, True])
    [0, 4, 2]
    """
    num_kept = sum(is_kept)
    movers = [index for index in range(len(is_kept) - 1, num_kept - 1, -1) if is_kept[index]]
    return [index if is_kept[index] else movers.pop(0) for index in range(num_kept)]


def _attention_windows(text_config: Any) -> Mapping[str, int | None]:
    """Window by layer type; the key "" stands for a model that takes one mask for all layers."""
    window = getattr(text_config, "sliding_window", None)
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None:
        own = [name for name in _OWN_WINDOWS if getattr(text_config, name, None) is not None]
        if own:
            raise ModelError(
                f"{text_config.model_type} cannot be decoded in a batch of unequal rows: it applies its {own[0]} of "
                f"{getattr(text_config, own[0])} by column, not by position; use a decoder with an ordinary key-value "
                "cache"
            )
        return {"": window}
    unknown = sorted(set(layer_types) - {FULL, SLIDING})
    if unknown:
        raise ModelError(
            f"{text_config.model_type} cannot be decoded in a batch of unequal rows: its layers of the types {unknown} "
            "do not keep their state by position; use a decoder with an ordinary key-value cache"
        )
    return {kind: window if kind == SLIDING else None for kind in sorted(set(layer_types))}


def _grown(buffer: Tensor, slots: int, columns: int) -> Tensor:
    old_slots, _, old_columns, _ = buffer.shape
    grown = buffer.new_zeros(
        max(slots, old_slots), buffer.shape[1], max(columns, old_columns), buffer.shape[3]
    )
    grown[:old_slots, :, :old_columns] = buffer
    return grown
