"""Prompts from a data set's rows, as an endless sequence: draw n is the same prompt whenever it is asked for.

The position in the data is nothing but the next draw id, so a checkpoint needs no more than that number.
Knows tokenizers, but no model, no task and no file format.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from oppo_kit.errors import DataError, did_you_mean
from oppo_kit.types import Prompt

LongPrompts = Literal["refuse", "truncate", "drop"]

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"

_logger = logging.getLogger(__name__)
_LONG_PROMPTS = ("refuse", "truncate", "drop")


@dataclass(frozen=True, slots=True)
class _Entry:
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]


class PromptDataset:
    """All prompts of a data set, tokenised, drawn without end; a ``PromptSource``.

    Epoch e = draw_id // N is a permutation of all N prompts that depends on (seed, e) only. A data set
    smaller than a batch wraps into further epochs, inside one batch too.

    Prompts may be text (BOS as the tokenizer has it, once; never a final EOS), messages
    (``[{"role": …, "content": …}, …]``, through the chat template, which alone decides about BOS), or, where
    a row has no ``prompt_column``, ready ``input_ids`` (taken as they are, less what ``attention_mask``
    masks).

    Attributes:
        num_dropped: prompts left out for their length.
        num_truncated: prompts cut for their length.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_column: str = "prompt",
        max_new_tokens: int,
        max_prompt_tokens: int | None = None,
        long_prompts: LongPrompts = "refuse",
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Tokenise everything at once.

        Args:
            rows: mappings; the columns beside the prompt are kept for function rewards.
            tokenizer: the policy's.
            prompt_column: column of the prompt.
            max_new_tokens: token limit of every response.
            max_prompt_tokens: longest prompt allowed, at least 1; None: no limit.
            long_prompts: ``refuse`` longer ones, ``truncate`` them (keeps the end and BOS) or ``drop`` them.
            seed: of the permutations.
            shuffle: False keeps the rows' order in every epoch.

        Raises:
            DataError: no rows, a column that is missing or holds something else, an empty prompt without BOS
                to stand for it, or prompts over the limit.
        """
        if long_prompts not in _LONG_PROMPTS:
            raise DataError(f"long_prompts={long_prompts!r}; {did_you_mean(long_prompts, _LONG_PROMPTS)}")
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise DataError(
                f"max_prompt_tokens={max_prompt_tokens} leaves no prompt; use at least 1, or None for no "
                "limit"
            )
        self.num_dropped = 0
        self.num_truncated = 0
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._shuffle = shuffle
        self._has_said_that_it_wraps = False
        self._order: tuple[int, Sequence[int]] = (-1, ())
        entries = _tokenised(list(rows), tokenizer, prompt_column)
        self._entries = self._within_limit(entries, max_prompt_tokens, long_prompts, _bos_of(tokenizer))

    def __len__(self) -> int:
        """N, prompts of one epoch."""
        return len(self._entries)

    def draw(self, draw_id: int) -> Prompt:
        """The prompt of this draw, a function of ``draw_id`` alone.

        Raises:
            DataError: a negative draw id.
        """
        if draw_id < 0:
            raise DataError(f"draw_id={draw_id}; draws are numbered 0, 1, 2, …")
        epoch, position = divmod(draw_id, len(self._entries))
        if epoch > 0 and not self._has_said_that_it_wraps:
            self._has_said_that_it_wraps = True
            _logger.warning(
                "draw %d begins epoch %d of a data set of %d prompts: the same prompts come again",
                draw_id,
                epoch + 1,
                len(self._entries),
            )
        entry = self._entries[self._order_of(epoch)[position]]
        return Prompt(draw_id, entry.token_ids, self._max_new_tokens, entry.columns)

    def _order_of(self, epoch: int) -> Sequence[int]:
        cached_epoch, order = self._order
        if cached_epoch != epoch:
            order = list(range(len(self._entries)))
            if self._shuffle:
                random.Random(f"oppo_kit.data:{self._seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return order

    def _within_limit(
        self, entries: list[_Entry], limit: int | None, long_prompts: LongPrompts, bos: int | None
    ) -> list[_Entry]:
        too_long = [entry for entry in entries if limit is not None and len(entry.token_ids) > limit]
        if limit is None or not too_long:
            return entries
        longest = max(len(entry.token_ids) for entry in too_long)
        what = (
            f"{len(too_long)} of {len(entries)} prompts are longer than max_prompt_tokens={limit} "
            f"(longest: {longest})"
        )
        if long_prompts == "refuse":
            raise DataError(
                f"{what}; set long_prompts to 'truncate' (keeps the end) or 'drop', raise max_prompt_tokens, "
                "or lower response_length to make room"
            )
        if long_prompts == "truncate":
            self.num_truncated = len(too_long)
            _logger.warning("%s: cut to their end", what)
            return [_Entry(_kept_end(entry.token_ids, limit, bos), entry.columns) for entry in entries]
        self.num_dropped = len(too_long)
        kept = [entry for entry in entries if len(entry.token_ids) <= limit]
        if not kept:
            raise DataError(
                f"{what}, so dropping them leaves none; set long_prompts to 'truncate' or raise the limit"
            )
        _logger.warning("%s: left out", what)
        return kept


def _kept_end(token_ids: tuple[int, ...], limit: int, bos: int | None) -> tuple[int, ...]:
    if len(token_ids) <= limit:
        return token_ids
    head = token_ids[:1] if bos is not None and token_ids[0] == bos else ()
    num_end = limit - len(head)
    return (*head, *token_ids[len(token_ids) - num_end :])


def _tokenised(
    rows: list[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, column: str
) -> list[_Entry]:
    if not rows:
        raise DataError("the data set has no rows; training needs at least one prompt")
    rendered = [_rendered(row, index, tokenizer, column) for index, row in enumerate(rows)]
    texts = [text for text, _ in rendered if text is not None]
    encode: Any = tokenizer
    encoded: list[list[int]] = encode(texts, add_special_tokens=False)[INPUT_IDS] if texts else []
    plain_ids = iter(encoded)
    prefix, bos = _prefix(tokenizer), _bos_of(tokenizer)
    entries: list[_Entry] = []
    for index, (row, (text, is_templated)) in enumerate(zip(rows, rendered, strict=True)):
        if text is None:
            token_ids = _ready_ids(row, index, tokenizer)
        else:
            token_ids = _with_one_bos([*(() if is_templated else prefix), *next(plain_ids)], bos)
        entries.append(
            _Entry(tuple(_never_empty(token_ids, index, tokenizer)), _columns(row, index, tokenizer, column))
        )
    return entries


def _rendered(
    row: Mapping[str, Any], index: int, tokenizer: PreTrainedTokenizerBase, column: str
) -> tuple[str | None, bool]:
    """The prompt's text (None: ready ids) and whether the chat template made it."""
    if column not in row:
        if INPUT_IDS in row:
            return None, False
        raise DataError(
            f"row {index} has no column {column!r}; set prompt_column to the column of the prompts, "
            f"or give {INPUT_IDS!r}; {did_you_mean(column, map(str, row))}"
        )
    prompt = row[column]
    if isinstance(prompt, str):
        return prompt, False
    if (
        not isinstance(prompt, list | tuple)
        or not prompt
        or not all(_is_message(message) for message in prompt)
    ):
        raise DataError(
            f"row {index}: column {column!r} holds {_short(prompt)}; a prompt is text, or a list of messages "
            "with 'role' and 'content'"
        )
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"row {index}: the last message is the assistant's; the policy writes the answer, so end with "
            "the user's"
        )
    if not tokenizer.chat_template:
        raise DataError(
            f"row {index} is a conversation, but the tokenizer has no chat template; set "
            "tokenizer.chat_template (chat_template.jinja in the model's folder), use an instruction-tuned "
            "model, or give prompts as text"
        )
    return str(tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)), True


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and message.get("content") is not None
    )


def _bos_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    return tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else None


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text; what it puts behind one (EOS) would end the prompt's answer."""
    special = [int(token_id) for token_id in tokenizer("")[INPUT_IDS]]
    if special and special[-1] == tokenizer.eos_token_id and special != [tokenizer.bos_token_id]:
        special.pop()
    return special


def _with_one_bos(token_ids: list[int], bos: int | None) -> list[int]:
    while bos is not None and token_ids[:2] == [bos, bos]:
        token_ids = token_ids[1:]
    return token_ids


def _ready_ids(row: Mapping[str, Any], index: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids, mask = (value.tolist() if hasattr(value, "tolist") else value for value in _ids_and_mask(row))
    is_list = isinstance(ids, list | tuple) and all(type(i) is int for i in ids)
    if not is_list or len(mask) != len(ids):
        raise DataError(
            f"row {index}: {INPUT_IDS!r} holds {_short(ids)}; it must be a list of token ids without padding"
        )
    outside = [i for i in ids if not 0 <= i < len(tokenizer)]
    if outside:
        raise DataError(
            f"row {index}: token id {outside[0]} is outside the tokenizer's vocabulary of {len(tokenizer)}; "
            "tokenise with the policy's own tokenizer"
        )
    return [i for i, is_kept in zip(ids, mask, strict=True) if is_kept]


def _ids_and_mask(row: Mapping[str, Any]) -> tuple[Any, Any]:
    ids = row[INPUT_IDS]
    mask = row.get(ATTENTION_MASK)
    return ids, [1] * (len(ids) if hasattr(ids, "__len__") else 0) if mask is None else mask


def _never_empty(token_ids: list[int], index: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if token_ids:
        return token_ids
    bos = _bos_of(tokenizer)
    if bos is None:
        raise DataError(
            f"row {index}: the prompt is empty and the tokenizer has no BOS token to stand for it; "
            "remove the row or give it a text"
        )
    return [bos]


def _columns(
    row: Mapping[str, Any], index: int, tokenizer: PreTrainedTokenizerBase, column: str
) -> dict[str, Any]:
    ready = () if column in row else (INPUT_IDS, ATTENTION_MASK)
    columns = {str(name): value for name, value in row.items() if name not in ready}
    for name, value in columns.items():
        if not _is_primitive(value):
            raise DataError(
                f"row {index}: column {name!r} holds a {type(value).__name__} ({_short(value)}); columns are "
                "kept in checkpoints and hold text, numbers, booleans, None, and lists and dicts of them; "
                "convert or remove it"
            )
    if column not in row:
        columns[column] = tokenizer.decode(_ready_ids(row, index, tokenizer), skip_special_tokens=True)
    return columns


def _is_primitive(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_primitive(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_primitive(item) for key, item in value.items())
    return value is None or type(value) in (str, int, float, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
