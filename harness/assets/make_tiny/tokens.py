"""Token ids of rewrite chains, and tensors of them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from harness.workloads import rewrite_chain as chain

UNK_TEXT = "<unk>"
VOCABULARY = [chain.PAD_TEXT, chain.BOS_TEXT, chain.EOS_TEXT, UNK_TEXT, *chain.CHARACTERS]
TOKEN_IDS = {text: index for index, text in enumerate(VOCABULARY)}
PAD, BOS, EOS = (TOKEN_IDS[text] for text in (chain.PAD_TEXT, chain.BOS_TEXT, chain.EOS_TEXT))
IGNORED = -100
MAX_RESPONSE_TOKENS = 256
MAX_POSITIONS = 512
# Padded tokens of one optimiser step, about 0.15 s on one core: at 4,096 the clean model still had a
# weighted loss of 0.6 after 3.5 minutes, for want of steps.
BATCH_TOKENS = 1024


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Character tokenizer of 18 tokens; encoding puts ``<bos>`` first, decoding joins without spaces."""
    backend = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token=UNK_TEXT))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{chain.BOS_TEXT} $A",
        pair=f"{chain.BOS_TEXT} $A $B",
        special_tokens=[(chain.BOS_TEXT, BOS)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=chain.PAD_TEXT,
        bos_token=chain.BOS_TEXT,
        eos_token=chain.EOS_TEXT,
        unk_token=UNK_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def encode(text: str) -> list[int]:
    """Token ids of a text of our characters and special tokens; ``<bos>`` is not added."""
    return [TOKEN_IDS[token] for token in token_texts(text)]


def token_texts(text: str) -> list[str]:
    """Splits a text into characters and special tokens; a policy may put the latter anywhere."""
    return re.findall(r"<\w+>|.", text)


def batches_by_length(
    rows: Iterator[Any], length: Callable[[Any], int], shuffler: random.Random, pool_size: int = 2048
) -> Iterator[list[Any]]:
    """Batches of similar length and about ``BATCH_TOKENS`` padded tokens, in random order, without end."""
    while True:
        pool = sorted((next(rows) for _ in range(pool_size)), key=length)
        batches: list[list[Any]] = [[]]
        for row in pool:
            if batches[-1] and length(row) * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(row)
        shuffler.shuffle(batches)
        yield from batches


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Right-padded [R, L] tensor of integer rows."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *([fill] * (width - len(row)))] for row in rows])
