"""Prefill of responses that are still being decoded: the keys and values of one frozen decoder, row by row.

A row is told its tokens so far, always all of them. What agrees with the tokens it was fed before stays; the cache is
cropped where they differ, and the rest is fed. So nothing can get out of step: a call may be left out, repeated, or
made with other tokens, and what is read at the end is what one pass over the last tokens would have given.

It knows no reward and no reference: what is read from the hidden states is a function that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oppo_kit.backends.forward import cache_keyword
from oppo_kit.backends.ragged_cache import RaggedCache, right_aligned
from oppo_kit.errors import ModelError
from oppo_kit.ops.batching import OVERHEAD_TOKENS
from oppo_kit.types import RolloutKey

Read = Callable[[Tensor, list[int]], Tensor]
"""Hidden states [n, H] and the tokens that follow them (-1: not known) to one number each, [n]."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is to be read of one rollout.

    Attributes:
        key: names the rollout.
        token_ids: prompt and response so far, in the decoder's vocabulary.
        num_fed: how many of them to have in the cache.
        first_output: the position from which a number is wanted for every fed token.
    """

    key: RolloutKey
    token_ids: Sequence[int]
    num_fed: int
    first_output: int = 0


@dataclass(slots=True)
class _Row:
    """A slot of the cache: the tokens in it, the one after them, and the numbers read from ``first_output`` on."""

    key: RolloutKey
    first_output: int
    next_id: int = -1
    fed: list[int] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)

    def crop(self, length: int) -> None:
        del self.fed[length:]
        del self.outputs[max(0, length - self.first_output) :]


class StreamingPrefill:
    """One decoder and the rows that it has read so far.

    Args:
        backbone: the decoder below the head; never called by anybody else at the same time.
        owner: the model that the backbone belongs to; its attention must be sdpa or eager.
        read: numbers from hidden states.
        reads_next: whether ``read`` uses the tokens that follow.
        max_tokens: padded tokens per forward pass.

    Raises:
        ModelError: the decoder keeps something else than keys and values by position, or takes no mask.
    """

    def __init__(
        self, backbone: nn.Module, owner: Any, read: Read, *, reads_next: bool, max_tokens: int
    ) -> None:
        self._backbone = backbone
        self._reads_next = reads_next
        self._read = read
        self._max_tokens = max_tokens
        if owner.config._attn_implementation not in ("eager", "sdpa"):
            raise ModelError(
                f"{type(owner).__name__} uses {owner.config._attn_implementation} attention, which takes no mask for "
                "rows of unequal length; load it with attn_implementation='sdpa', or set overlap.score_at to 'sample'"
            )
        parameter = next(backbone.parameters())
        self._device = parameter.device
        self._cache = RaggedCache(owner.config, device=parameter.device, dtype=parameter.dtype)
        self._cache_keyword = cache_keyword(backbone)
        self._rows: list[_Row] = []
        self._slots: dict[RolloutKey, int] = {}
        self.num_tokens_read = 0

    def __contains__(self, key: RolloutKey) -> bool:
        """Whether anything of this rollout is in the cache."""
        return key in self._slots

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return self._cache.num_bytes

    def outputs(self, key: RolloutKey) -> list[float]:
        """The numbers of a row, from ``first_output`` to its last fed token."""
        return self._rows[self._slots[key]].outputs

    @torch.no_grad()
    def extend(self, prefixes: Sequence[Prefix]) -> bool:
        """Feed what is new of these, and read it; rows that are not there yet are admitted.

        Returns:
            False when a number is not finite: every row is dropped then, since masked keys and values must be finite.
        """
        wanted = [prefix for prefix in prefixes if prefix.num_fed > 0]
        fresh = [prefix for prefix in wanted if prefix.key not in self._slots]
        # Longest first, so that neighbours are of similar length.
        for prefix in sorted(fresh, key=lambda prefix: -prefix.num_fed):
            self._slots[prefix.key] = len(self._rows)
            self._rows.append(_Row(prefix.key, prefix.first_output))
        self._cache.admit(len(fresh))
        by_slot = {self._slots[prefix.key]: prefix for prefix in wanted}
        num_new = [0] * len(self._rows)
        for slot, prefix in by_slot.items():
            row = self._rows[slot]
            agreed = self._num_valid(row, prefix.token_ids)
            if agreed < len(row.fed):
                self._cache.crop_row(slot, agreed)
                row.crop(agreed)
            num_new[slot] = max(0, prefix.num_fed - agreed)
        for first, last in cut_into_runs(num_new, self._max_tokens):
            chosen = {slot: by_slot[slot] for slot in range(first, last) if num_new[slot]}
            is_finite = False
            try:
                is_finite = self._feed(chosen, first, last)
            finally:
                if not is_finite:  # also when the pass failed: the cache may be longer than the rows know
                    self.clear()
            if not is_finite:
                return False
        return True

    def drop(self, keys: Iterable[RolloutKey]) -> None:
        """Forget rows; those that are not there are ignored."""
        gone = {self._slots[key] for key in keys if key in self._slots}
        if not gone:
            return
        order = self._cache.keep_rows([slot not in gone for slot in range(len(self._rows))])
        self._rows = [self._rows[slot] for slot in order]
        self._slots = {row.key: slot for slot, row in enumerate(self._rows)}

    def clear(self) -> None:
        """Forget all rows and free their memory."""
        self._rows, self._slots = [], {}
        self._cache.clear()

    def _num_valid(self, row: _Row, token_ids: Sequence[int]) -> int:
        """Leading fed tokens that stand: they agree, and so do those that their numbers were read with."""
        agreed = _num_agreed(row.fed, token_ids)
        if not self._reads_next:
            return agreed
        was_next = row.fed[agreed] if agreed < len(row.fed) else row.next_id
        is_next = token_ids[agreed] if agreed < len(token_ids) else -1
        return agreed if was_next == is_next or not agreed else agreed - 1

    def _feed(self, prefixes: dict[int, Prefix], first: int, last: int) -> bool:
        """One forward pass over slots ``first … last - 1``; whether its numbers are finite."""
        starts = {slot: len(self._rows[slot].fed) for slot in prefixes}
        pieces: list[list[int]] = [[] for _ in range(last - first)]
        for slot, prefix in prefixes.items():
            pieces[slot - first] = list(prefix.token_ids[starts[slot] : prefix.num_fed])
        num_new = [len(piece) for piece in pieces]
        with self._cache.append(num_new, first=first) as append:
            hidden = self._backbone(
                input_ids=right_aligned(pieces).to(self._device),
                attention_mask=append.attention_mask,
                position_ids=append.position_ids,
                use_cache=True,
                **{self._cache_keyword: self._cache},
            ).last_hidden_state
        self.num_tokens_read += sum(num_new)
        states: list[Tensor] = []
        next_ids: list[int] = []
        counts: list[int] = []
        for slot, prefix in prefixes.items():
            begin, end = max(starts[slot], prefix.first_output), prefix.num_fed
            counts.append(max(0, end - begin))
            if begin < end:
                states.append(hidden[slot - first, begin - end :])
                next_ids += [*prefix.token_ids[begin + 1 : end + 1], *([-1] * (end == len(prefix.token_ids)))]
        numbers = self._read(torch.cat(states), next_ids).tolist() if states else []
        if not all(map(math.isfinite, numbers)):
            return False
        position = 0
        for (slot, prefix), count in zip(prefixes.items(), counts, strict=True):
            row = self._rows[slot]
            row.fed += pieces[slot - first]
            row.next_id = (*prefix.token_ids[prefix.num_fed : prefix.num_fed + 1], -1)[0]
            row.outputs += numbers[position : position + count]
            position += count
        return True


def check_streaming(name: str, streamed: Sequence[float], plain: Sequence[float], tolerance: float) -> None:
    """Compare numbers read chunk by chunk with those of one pass.

    Raises:
        ModelError: they differ by more than rounding.
    """
    gap = max((abs(one - other) for one, other in zip(streamed, plain, strict=True)), default=0.0)
    if not gap <= tolerance:
        raise ModelError(
            f"{name} cannot be fed chunk by chunk: its numbers then differ by {gap:.2g} from those of one pass; "
            "use a decoder with an ordinary key-value cache, or set overlap.score_at to 'sample'"
        )


def cut_into_runs(num_new: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Runs of neighbouring slots that are fed together, such that padding and calls together cost least.

    The cost of a run is rows × longest + a constant; slots without new tokens need not be in any run.

    Args:
        num_new: new tokens by slot.
        max_tokens: padded tokens per run (a longer row stands alone).

    >>> cut_into_runs([0, 8, 8, 0, 500, 490], 4096)
    [(1, 3), (4, 6)]
    """
    slots = [slot for slot, new in enumerate(num_new) if new]
    # best[n]: least cost of the first n of these; cut[n]: where their last run begins.
    best = [0.0] + [math.inf] * len(slots)
    cut = [0] * (len(slots) + 1)
    for start, first in enumerate(slots):
        longest = 0
        for stop, slot in enumerate(slots[start:], start + 1):
            longest = max(longest, num_new[slot])
            padded = (slot + 1 - first) * longest
            if stop > start + 1 and padded > max_tokens:
                break
            cost = best[start] + padded + OVERHEAD_TOKENS
            if cost < best[stop]:
                best[stop], cut[stop] = cost, start
    runs: list[tuple[int, int]] = []
    stop = len(slots)
    while stop:
        runs.append((slots[cut[stop]], slots[stop - 1] + 1))
        stop = cut[stop]
    return runs[::-1]


def _num_agreed(fed: Sequence[int], token_ids: Sequence[int]) -> int:
    """Leading tokens that both have."""
    length = min(len(fed), len(token_ids))
    if list(fed[:length]) == list(token_ids[:length]):
        return length
    return next(i for i in range(length) if fed[i] != token_ids[i])
