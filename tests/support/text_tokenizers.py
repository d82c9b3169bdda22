"""Real subword tokenizers, trained in memory on generated text, and chat templates of the kinds that hurt.

Everything is a function of its arguments. Unlike ``tiny_tokenizer`` (one character, one token) these merge:
the same text has several segmentations, and a longer text may begin with other tokens than a shorter one.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from typing import Any

from tiny_models import tiny_classifier
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD_TEXT, BOS_TEXT, EOS_TEXT, UNK_TEXT = "<pad>", "<s>", "</s>", "<unk>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD_TEXT, BOS_TEXT, EOS_TEXT, UNK_TEXT, TURN_START, TURN_END)
_LATIN = "the answer is because 12 1234 7 + = x**2 def return add adds added adding word words wordless"
_OTHERS = "don't isn't naïve café Zürich straße кошка говорит мир 東京 日本語 漢字 🙂 👩\u200d🔬 🎉🎉 . , ! ?"
WORDS = tuple(f"{_LATIN} {_OTHERS}".split())

# Names say what each does; "plain" ends with the content and a line break that belongs to it.
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "trims": "{% for m in messages %}{{ m['role'] }}:{{ m['content'] | trim }}\n\n{% endfor %}",
    "adds_suffix": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "drops_thoughts": (
        "{% for m in messages %}{% set c = m['content'] %}"
        "{% if m['role'] == 'assistant' and '</think>' in c %}"
        "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ c }}<|im_end|>\n{% endfor %}"
    ),
    "writes_bos": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}",
    # The first line depends on what the response says so far: from time to time everything behind it moves.
    "header_counts": (
        "{% set n = messages[-1]['content'].split() | length %}"
        "{% if n > 20 %}long{% elif n > 5 %}medium{% elif n > 0 %}short answer{% else %}none yet{% endif %}\n"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    ),
}


def generated_text(num_words: int, seed: int = 0) -> str:
    """Words of several scripts, some run together, with ordinary and odd white space between them."""
    chooser = random.Random(seed)
    spaces = [" "] * 8 + ["\n", "  ", "", "", "", "\n\n", "    "]
    return "".join(chooser.choice(WORDS) + chooser.choice(spaces) for _ in range(num_words))


def byte_bpe_tokenizer(vocab_size: int = 350, **options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE as of GPT-2: characters outside ASCII may be split over tokens."""
    return _wrapped(Tokenizer.from_str(_byte_bpe(vocab_size)), **options)


def metaspace_bpe_tokenizer(vocab_size: int = 450, **options: Any) -> PreTrainedTokenizerFast:
    """BPE over whole texts with a mark for spaces, as of Llama 2; unknown characters become bytes."""
    return _wrapped(Tokenizer.from_str(_metaspace_bpe(vocab_size)), **options)


def unigram_tokenizer(num_pieces: int = 400, **options: Any) -> PreTrainedTokenizerFast:
    """The likeliest segmentation, as of sentencepiece's default; it may change far back as a word grows."""
    return _wrapped(Tokenizer.from_str(_unigram(num_pieces)), **options)


TOKENIZERS = {
    "byte_bpe": byte_bpe_tokenizer,
    "metaspace_bpe": metaspace_bpe_tokenizer,
    "unigram": unigram_tokenizer,
}


def tiny_text_classifier(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> PreTrainedModel:
    """Llama sequence classifier of two layers, hidden size 32, whose vocabulary fits the tokenizer."""
    return tiny_classifier("llama", len(tokenizer), seed=seed, max_position_embeddings=2048)


@functools.cache
def _byte_bpe(vocab_size: int) -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(backend, vocab_size, initial_alphabet=alphabet)


@functools.cache
def _metaspace_bpe(vocab_size: int) -> str:
    backend = Tokenizer(models.BPE(unk_token=UNK_TEXT, byte_fallback=True, fuse_unk=True))
    backend.decoder = _metaspace_decoder()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained = Tokenizer.from_str(_trained(backend, vocab_size, special_tokens=[*SPECIAL, *_BYTES]))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return trained.to_str()


@functools.cache
def _unigram(num_pieces: int) -> str:
    words = generated_text(3000).split()
    counts = Counter(
        f"▁{word}"[start:end]
        for word in words
        for start in range(len(word) + 1)
        for end in range(start + 1, min(start + 6, len(word) + 1) + 1)
    )
    pieces = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:num_pieces]
    total = sum(counts.values())
    vocabulary = [(text, 0.0) for text in SPECIAL]
    vocabulary += [(text, -20.0) for text in _BYTES]
    vocabulary += [(text, math.log(count / total)) for text, count in pieces]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=SPECIAL.index(UNK_TEXT), byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = _metaspace_decoder()
    return backend.to_str()


_BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _metaspace_decoder() -> Any:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def _trained(backend: Tokenizer, vocab_size: int, **options: Any) -> str:
    options = {"special_tokens": list(SPECIAL), **options}
    size = vocab_size + len(options["special_tokens"])
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)
    backend.train_from_iterator([generated_text(300, seed) for seed in range(10)], trainer)
    return backend.to_str()


def _wrapped(
    backend: Tokenizer,
    *,
    adds_bos: bool = True,
    adds_eos: bool = False,
    has_bos: bool = True,
    chat_template: str | None = None,
    **extra: Any,
) -> PreTrainedTokenizerFast:
    first = f"{BOS_TEXT} " if adds_bos and has_bos else ""
    last = f" {EOS_TEXT}" if adds_eos else ""
    ids = [(text, backend.token_to_id(text)) for text in (BOS_TEXT, EOS_TEXT)]
    backend.post_processor = processors.TemplateProcessing(single=f"{first}$A{last}", special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TEXT,
        eos_token=EOS_TEXT,
        unk_token=UNK_TEXT,
        additional_special_tokens=[TURN_START, TURN_END],
        **{"clean_up_tokenization_spaces": False, **({"bos_token": BOS_TEXT} if has_bos else {}), **extra},
    )
    tokenizer.chat_template = chat_template
    return tokenizer
