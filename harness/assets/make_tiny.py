"""Trains the shipped ``tiny`` assets from scratch: a rewrite-chain policy and its reward model.

Stages, each writing below ``--work-dir``: ``clean`` (a language model of right responses) ->
``oracle`` (the same after wrong steps too) -> ``policy`` (the clean model, made careless) ->
``samples`` (its responses at several temperatures) -> ``reward`` (a verifier on top of the oracle) ->
``reward_again`` (a second round) -> ``responses`` (of the policy, to held-out problems) ->
``evaluate`` (held-out figures) -> ``ship``. ``all`` runs them in this order; every draw is seeded and
every length is a number of steps, so the same versions and one thread remake the same weights up to
floating point.

    python harness/assets/make_tiny.py all --output-dir harness/assets/tiny

It knows nothing of the trainer, and nothing is done at import.
"""

import argparse
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.workloads import rewrite_chain as chain

UNK_TEXT = "<unk>"
VOCABULARY = [chain.PAD_TEXT, chain.BOS_TEXT, chain.EOS_TEXT, UNK_TEXT, *chain.CHARACTERS]
TOKEN_IDS = {text: index for index, text in enumerate(VOCABULARY)}
PAD, BOS, EOS = (TOKEN_IDS[text] for text in (chain.PAD_TEXT, chain.BOS_TEXT, chain.EOS_TEXT))
IGNORED = -100
MAX_RESPONSE_TOKENS = 256
MAX_POSITIONS = 512
HIDDEN_SIZE = 128
NUM_LAYERS = 4
# On top of the language model's four layers, the verifier compares each token with what was expected
# there, gathers that for each step, and then for the chain: three jobs, three layers.
NUM_REWARD_LAYERS = 7
# Bounds the scores near +-log(0.98 / 0.02) = +-3.9, since PPO takes them raw.
LABEL_SMOOTHING = 0.02
STAGE_NAMES = (
    "clean",
    "oracle",
    "policy",
    "samples",
    "reward",
    "reward_again",
    "responses",
    "evaluate",
    "ship",
)
# Padded tokens of one optimiser step, about 0.15 s on one core: at 4,096 the clean model still had a
# weighted loss of 0.6 after 3.5 minutes, for want of steps.
BATCH_TOKENS = 1024


# --- text and tensors ---------------------------------------------------------------------------


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


def llama_config(num_layers: int, **extra: Any) -> LlamaConfig:
    """Configuration shared by both nets."""
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=352,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        **extra,
    )


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


def train(
    parameters: list[nn.Parameter],
    losses_of: Callable[[int], dict[str, Tensor]],
    num_steps: int,
    peak_rate: float,
    name: str,
) -> None:
    """AdamW with 4 % warm-up and a cosine to a twentieth of the peak, gradient norm clipped at 1."""
    decayed = [p for p in parameters if p.ndim >= 2]
    plain = [p for p in parameters if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.98))
    num_warmup = max(1, num_steps // 25)

    def factor(step: int) -> float:
        progress = (step - num_warmup) / max(1, num_steps - num_warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return (step + 1) / num_warmup if step < num_warmup else 0.05 + 0.95 * cosine

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    start_s, recent = time.monotonic(), dict[str, float]()
    for step in range(num_steps):
        losses = losses_of(step)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        for key, loss in losses.items():
            recent[key] = 0.95 * recent.get(key, loss.item()) + 0.05 * loss.item()
        if (step + 1) % 50 == 0:
            shown = " ".join(f"{key} {value:.4f}" for key, value in recent.items())
            print(f"{name} {step + 1}/{num_steps} {shown} {time.monotonic() - start_s:.0f} s", flush=True)


# --- language model -----------------------------------------------------------------------------


def language_rows(
    problems: Iterator[str], respond: Callable[[str], str], digit_weight: float
) -> Iterator[tuple[list[int], list[float]]]:
    """Token ids and the loss weight of each: 0 on the prompt, ``digit_weight`` on a step's value."""
    for problem in problems:
        response = respond(problem)
        body = response.removesuffix(chain.EOS_TEXT)
        weights, is_value = [], False
        for character in body:
            is_value = character == "=" or (is_value and character.isdigit())
            weights.append(digit_weight if is_value and character != "=" else 1.0)
        tokens = [BOS, *encode(problem), *encode(response)]
        yield tokens, [0.0] * (len(problem) + 1) + weights + [1.0]


def train_language_model(
    model: LlamaForCausalLM,
    rows: Iterator[tuple[list[int], list[float]]],
    num_steps: int,
    peak_rate: float,
    name: str,
) -> None:
    """Weighted next-token training on responses."""
    batches = batches_by_length(rows, lambda row: len(row[0]), random.Random(f"{name}:order"))

    def losses_of(_: int) -> dict[str, Tensor]:
        batch = next(batches)
        tokens = padded([row[0] for row in batch], PAD)
        width = tokens.shape[1]
        weights = torch.tensor([[*row[1], *([0.0] * (width - len(row[1])))] for row in batch])[:, 1:]
        # No attention mask: padding stands on the right, where a causal model never looks.
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return {"next token": (losses * weights).sum() / weights.sum()}

    train(list(model.parameters()), losses_of, num_steps, peak_rate, name)


def growing_problems(seed: int, num_problems: int) -> Iterator[str]:
    """Training problems whose median number of terms grows from 2 to 4 within ``num_problems`` draws."""
    medians = [2.0, 2.5, 3.0, 3.5, chain.MEDIAN_NUM_TERMS]
    streams = [chain.iterate_problems(seed, "train", median_num_terms=median) for median in medians]
    drawn = 0
    while True:
        yield next(streams[min(len(streams) - 1, drawn * len(streams) // num_problems)])
        drawn += 1


def make_clean(work_dir: Path, num_steps: int) -> None:
    """Stage 1: the language model of right responses."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(llama_config(NUM_LAYERS))
    # A batch holds about 40 short problems, so the mix is at its final median after two thirds of the steps.
    problems = growing_problems(1, num_problems=25 * num_steps)
    rows = language_rows(problems, chain.clean_response, digit_weight=4.0)
    train_language_model(model, rows, num_steps, 2e-3, "clean")
    model.save_pretrained(work_dir / "clean")


def make_policy(work_dir: Path, num_steps: int, wrong_step_frac: float) -> None:
    """Stage 3: the clean model learns the careless solver's habits."""
    torch.manual_seed(2)
    model = LlamaForCausalLM.from_pretrained(work_dir / "clean", dtype=torch.float32)
    noise = random.Random("policy:noise")

    def respond(problem: str) -> str:
        return chain.noisy_response(problem, noise, wrong_step_frac=wrong_step_frac)

    rows = language_rows(chain.iterate_problems(2, "train"), respond, digit_weight=1.0)
    train_language_model(model, rows, num_steps, 1e-3, "policy")
    model.half().save_pretrained(work_dir / "policy")


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, problems: Sequence[str], temperature: float, generator: torch.Generator
) -> list[str]:
    """Responses with their ``<eos>``, at most 256 tokens; temperature 0 is greedy.

    Rows are worked off by number of terms and leave the batch as they end.
    """
    responses = [""] * len(problems)
    order = sorted(range(len(problems)), key=lambda index: len(problems[index]))
    for first in range(0, len(order), 512):
        rows = order[first : first + 512]
        width = max(len(problems[row]) for row in rows) + 1
        prompts = [[BOS, *encode(problems[row])] for row in rows]
        tokens = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = (tokens != PAD).long()
        cache = DynamicCache()
        for _ in range(MAX_RESPONSE_TOKENS):
            positions = mask.sum(1, keepdim=True) - torch.arange(tokens.shape[1] - 1, -1, -1)
            output = model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions.clamp(min=0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[:, -1].float()
            if temperature == 0:
                tokens = logits.argmax(-1, keepdim=True)
            else:
                probabilities = torch.softmax(logits / temperature, -1)
                tokens = torch.multinomial(probabilities, 1, generator=generator)
            for row, token in zip(rows, tokens[:, 0].tolist(), strict=True):
                # Rows that ended may stay in the batch for a while, unseen.
                if not responses[row].endswith(chain.EOS_TEXT):
                    responses[row] += VOCABULARY[token]
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
            open_rows = [i for i, row in enumerate(rows) if not responses[row].endswith(chain.EOS_TEXT)]
            if not open_rows:
                break
            if len(open_rows) < 0.8 * len(rows):
                is_open = torch.tensor(open_rows)
                cache.batch_select_indices(is_open)
                rows, tokens, mask = [rows[i] for i in open_rows], tokens[is_open], mask[is_open]
    return responses


def make_samples(work_dir: Path, num_samples: int) -> None:
    """Stage 4: the policy's own responses to training problems, from careless to almost greedy."""
    model = LlamaForCausalLM.from_pretrained(work_dir / "policy", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    rows: list[tuple[str, str]] = []
    for index, (temperature, share) in enumerate([(1.0, 0.5), (0.8, 0.2), (0.6, 0.2), (1.3, 0.1)]):
        stream = chain.iterate_problems(30 + index, "train")
        problems = [next(stream) for _ in range(int(share * num_samples))]
        responses = sample(model, problems, temperature, generator)
        num_right = sum(map(chain.is_correct, problems, responses))
        print(f"samples T={temperature}: {len(problems)}, right {num_right / len(problems):.3f}", flush=True)
        rows.extend(zip(problems, responses, strict=True))
    (work_dir / "samples.json").write_text(json.dumps(rows))


# --- reward model -------------------------------------------------------------------------------


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
        if not fits or right_step is None:
            expected.append(IGNORED)
        elif step is None:
            expected.append(TOKEN_IDS["="])
        elif len(step) < len(right_step):
            expected.append(TOKEN_IDS[right_step[len(step)]])
        else:
            expected.append(EOS if chain.rewrite(right_step) is None else TOKEN_IDS["="])
    is_right = chain.is_correct(prompt, response) and chain.check_chain(prompt, response).is_chain_right
    if end:
        is_finished = step is not None and not is_malformed and chain.rewrite(step) is None
        is_step_right.append(int(is_finished and step == chain.rewrite(standing)))
        is_chain_right.append(int(is_right))
        expected.append(IGNORED)
    return JudgedRow(tokens, expected, is_step_right, is_chain_right, is_right)


def corrupted(response: str, generator: random.Random) -> str:
    """A response with one slip: a character changed, dropped, doubled or two neighbours exchanged."""
    body = response.removesuffix(chain.EOS_TEXT)
    place = generator.randrange(len(body))
    before, here, after = body[:place], body[place], body[place + 1 :]
    kind = generator.randrange(4)
    if kind == 0:
        here = generator.choice(chain.CHARACTERS if generator.random() < 0.3 else "0123456789+-")
    elif kind == 1:
        here = ""
    elif kind == 2:
        here += generator.choice([here, generator.choice("0123456789")])
    elif after:
        here, after = after[0], here + after[1:]
    return before + here + after + chain.EOS_TEXT


def degenerate(problem: str, generator: random.Random) -> str:
    """A response that an optimiser might find: empty, cut short, without steps, padded out or broken off."""
    right = chain.clean_response(problem).removesuffix(chain.EOS_TEXT)
    steps = right.split("=")[1:]
    kind = generator.randrange(9)
    place = generator.randrange(len(right))
    if kind == 0:
        body = ""
    elif kind == 1:  # ends at a random place
        body = right[:place]
    elif kind == 2:  # ends after a right prefix of steps, or an x
        body = "".join(f"={step}" for step in steps[: generator.randrange(len(steps))])
        body += generator.choice(["", "", "="]) if body else ""
    elif kind == 3:  # a step left out
        drop = generator.randrange(len(steps))
        body = "".join(f"={step}" for index, step in enumerate(steps) if index != drop or len(steps) == 1)
        body = body if len(steps) > 1 else "=" + problem
    elif kind == 4:  # only an answer, right or not
        offset = 0 if len(steps) > 1 else generator.choice((-1, 1, 2))
        shown = chain.answer(problem) + offset
        body = f"={shown}" if generator.random() < 0.7 else f"{shown}"
    elif kind == 5:  # something after the answer
        digit = generator.choice("0123456789")
        body = right + generator.choice(["=", "x", "0", "+1", f"={steps[-1]}", "x=", digit])
    elif kind == 6:  # random characters
        length = min(200, 1 + int(generator.expovariate(1 / 12)))
        body = "".join(generator.choice(chain.CHARACTERS) for _ in range(length))
    elif kind == 7:  # a step or a character again and again
        digit = generator.choice("0123456789")
        again = generator.choice([f"={steps[0]}", "=", "x", digit, "+1", f"={steps[-1]}"])
        body = right[:place] * generator.randrange(2) + again * generator.randint(2, 10)
    else:  # the problem again
        body = generator.choice(["=", ""]) + problem
    if not chain.is_correct(problem, body + chain.EOS_TEXT) and generator.random() < 0.9:
        return body + chain.EOS_TEXT
    return body


def reward_rows(samples: list[tuple[str, str]], seed: int) -> Iterator[JudgedRow]:
    """Balanced endless mix of solver noise, policy samples, near misses and degenerate responses."""
    generator = random.Random(f"reward:{seed}")
    problems = chain.iterate_problems(seed, "train")
    # Long chains are mostly wrong and short ones right; more long problems and little noise level that.
    long_problems = chain.iterate_problems(seed, "train", median_num_terms=6.0)

    def candidate() -> tuple[str, str]:
        draw = generator.random()
        if samples and draw < 0.35:
            return generator.choice(samples)
        problem = next(long_problems if generator.random() < 0.3 else problems)
        if draw < 0.80:
            frac = generator.choice([0.02, 0.06, 0.12, 0.18, 0.25])
            return problem, chain.noisy_response(problem, generator, wrong_step_frac=frac, noticed_frac=0.4)
        response = chain.noisy_response(problem, generator, wrong_step_frac=0.06, noticed_frac=0.9)
        if draw < 0.91:
            return problem, corrupted(response, generator)
        return problem, degenerate(problem, generator)

    # Right and wrong are balanced within each number of terms, else length alone predicts the label.
    surplus = [0] * (chain.MAX_NUM_TERMS + 1)
    while True:
        problem, response = candidate()
        response = _cut(response)
        row = judge(problem, response)
        count = chain.num_terms(problem)
        sign = 1 if row.is_right else -1
        if surplus[count] * sign > 20:
            problem = chain.generate_problem(generator, num_terms=count)
            if chain.split_of(problem) != "train":
                continue
            clean = sign < 0
            frac, noticed = (0.15, 1.0) if clean else (0.3 if count < 4 else 0.12, 0.3)
            response = _cut(
                chain.noisy_response(problem, generator, wrong_step_frac=frac, noticed_frac=noticed)
            )
            row = judge(problem, response)
            sign = 1 if row.is_right else -1
        surplus[count] += sign
        yield row


def _cut(response: str) -> str:
    return response if len(encode(response)) <= MAX_RESPONSE_TOKENS else response[:MAX_RESPONSE_TOKENS]


def make_oracle(work_dir: Path, num_steps: int) -> None:
    """Stage 2: the clean model learns what a right solver would write next after anything, ``x`` included."""
    torch.manual_seed(4)
    model = LlamaForCausalLM.from_pretrained(work_dir / "clean", dtype=torch.float32)
    shuffler = random.Random("oracle:order")
    batches = batches_by_length(reward_rows([], 4), lambda row: len(row.tokens), shuffler, pool_size=1024)

    def losses_of(_: int) -> dict[str, Tensor]:
        batch = next(batches)
        tokens = padded([row.tokens for row in batch], PAD)
        expected = padded([row.expected for row in batch], IGNORED)
        logits = model(input_ids=tokens, use_cache=False).logits
        return {"expected": functional.cross_entropy(logits.transpose(1, 2), expected, ignore_index=IGNORED)}

    train(list(model.parameters()), losses_of, num_steps, 1e-3, "oracle")
    model.save_pretrained(work_dir / "oracle")


class Verifier(nn.Module):
    """The reward model with the heads that only training needs.

    The oracle's four layers are kept as they are: their output says what a right solver would write
    next. Layer 5 starts with heads that look at the previous token, where the expectation of this one
    stands, and is asked whether the two differ; the last layer is asked per token whether the step, and
    the chain, are right so far.
    """

    def __init__(self, oracle: LlamaForCausalLM) -> None:
        super().__init__()
        config = llama_config(NUM_REWARD_LAYERS, num_labels=1)
        self.reward = LlamaForSequenceClassification(config)
        layers = self.reward.model.layers
        self.reward.model.embed_tokens.load_state_dict(oracle.model.embed_tokens.state_dict())
        for layer, trained in zip(layers, oracle.model.layers, strict=False):
            layer.load_state_dict(trained.state_dict())
        for module in (self.reward.model.embed_tokens, *layers[:NUM_LAYERS]):
            module.requires_grad_(False)
        self.mismatch_head = nn.Linear(HIDDEN_SIZE, 1)
        self.expected_head = nn.Linear(HIDDEN_SIZE, len(VOCABULARY))
        self.verdict_head = nn.Linear(HIDDEN_SIZE, 2)

    @torch.no_grad()
    def look_back(self, tokens: Tensor) -> None:
        """Sets layer 5's queries and keys such that its first two heads attend to the previous token.

        With rotary positions, a query turned back by one step and a key, both constant, have a
        product that is largest one token back. The constant is read off the hidden states by least
        squares over ``tokens``.
        """
        layer = self.reward.model.layers[NUM_LAYERS]
        output = self.reward.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        hidden = layer.input_layernorm(output.hidden_states[NUM_LAYERS])[tokens != PAD]
        constant = torch.linalg.lstsq(hidden, torch.ones(len(hidden), 1)).solution[:, 0]
        half = layer.self_attn.head_dim // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        # Six frequencies at a gain of 30 each: at 10 the neighbours still got 0.2 of the attention each.
        gain = torch.where(torch.arange(half) < 6, (30.0 * math.sqrt(2 * half)) ** 0.5, 0.0)
        query = torch.cat([gain * frequencies.cos(), -gain * frequencies.sin()])
        key = torch.cat([gain, torch.zeros(half)])
        for head in range(2):
            rows = slice(head * 2 * half, (head + 1) * 2 * half)
            layer.self_attn.q_proj.weight[rows] = torch.outer(query, constant)
            layer.self_attn.k_proj.weight[rows] = torch.outer(key, constant)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns [R, L] scores, [R, L, 2] step and chain logits, [R, L] mismatch, [R, L, V] expected."""
        output = self.reward.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        hidden, compared = output.last_hidden_state, output.hidden_states[NUM_LAYERS + 1]
        scores = self.reward.score(hidden)[..., 0]
        return (
            scores,
            self.verdict_head(hidden),
            self.mismatch_head(compared)[..., 0],
            self.expected_head(compared),
        )


def make_reward(work_dir: Path, num_steps: int) -> None:
    """Stage 5: the verifier, from the oracle (never from the careless model), on the mix with samples."""
    torch.manual_seed(5)
    verifier = Verifier(LlamaForCausalLM.from_pretrained(work_dir / "oracle", dtype=torch.float32))
    samples = read_samples(work_dir)
    verifier.look_back(padded([judge(*row).tokens for row in samples[:200]], PAD))
    train_verifier(verifier, reward_rows(samples, 5), num_steps, 2e-3)
    verifier.reward.half().save_pretrained(work_dir / "reward_first")


def make_reward_again(work_dir: Path, num_steps: int) -> None:
    """Stage 6: a second round for the verifier with a warm restart; the training heads start anew."""
    torch.manual_seed(6)
    verifier = Verifier(LlamaForCausalLM.from_pretrained(work_dir / "oracle", dtype=torch.float32))
    first = LlamaForSequenceClassification.from_pretrained(work_dir / "reward_first", dtype=torch.float32)
    verifier.reward.load_state_dict(first.state_dict())
    train_verifier(verifier, reward_rows(read_samples(work_dir), 6), num_steps, 1.5e-3)
    verifier.reward.half().save_pretrained(work_dir / "reward")


def read_samples(work_dir: Path) -> list[tuple[str, str]]:
    """The (prompt, response) pairs of the stage ``samples``."""
    return [(prompt, response) for prompt, response in json.loads((work_dir / "samples.json").read_text())]


def train_verifier(verifier: Verifier, rows: Iterator[JudgedRow], num_steps: int, peak_rate: float) -> None:
    """Trains all of a verifier but the oracle's layers."""
    shuffler = random.Random("reward:order")
    batches = batches_by_length(rows, lambda row: len(row.tokens), shuffler, pool_size=1024)
    trained = [parameter for parameter in verifier.parameters() if parameter.requires_grad]
    train(trained, lambda _: verifier_losses(verifier, next(batches)), num_steps, peak_rate, "reward")


def verifier_losses(verifier: Verifier, batch: Sequence[JudgedRow]) -> dict[str, Tensor]:
    """Loss of the score at the last token, and of all verdicts on the way there."""
    tokens = padded([row.tokens for row in batch], PAD)
    scores, verdicts, mismatch, expected_logits = verifier(tokens)
    step_labels = padded([row.is_step_right for row in batch], IGNORED)
    chain_labels = padded([row.is_chain_right for row in batch], IGNORED)
    labels = torch.stack([step_labels, chain_labels], -1)
    verdict_loss = _masked_loss(verdicts, labels, labels != IGNORED)
    # Position t of these is about token t itself: what the oracle's position t - 1 expected.
    expected = padded([[IGNORED, *row.expected[:-1]] for row in batch], IGNORED)
    differs = (expected != tokens).long()
    mismatch_loss = _masked_loss(mismatch, differs, expected != IGNORED, 1.0 + 4.0 * differs)
    flat = functional.cross_entropy(
        expected_logits.transpose(1, 2), expected, reduction="none", ignore_index=IGNORED
    )
    weight = (1.0 + 4.0 * differs) * (expected != IGNORED)
    last = torch.tensor([len(row.tokens) - 1 for row in batch])
    is_right = torch.tensor([int(row.is_right) for row in batch])
    last_scores = scores.gather(1, last[:, None])[:, 0]
    # A response that was cut off scores low wherever it was cut.
    is_inner = (step_labels != IGNORED) & (tokens != EOS)
    return {
        "score": _masked_loss(last_scores, is_right, is_right >= 0, smoothing=LABEL_SMOOTHING),
        "verdicts": 2.0 * verdict_loss,
        "mismatch": mismatch_loss,
        "expected": 0.3 * (flat * weight).sum() / weight.sum(),
        "inner": 0.1 * _masked_loss(scores, torch.zeros_like(tokens), is_inner, smoothing=LABEL_SMOOTHING),
    }


def _masked_loss(
    logits: Tensor, labels: Tensor, mask: Tensor, weights: Tensor | float = 1.0, smoothing: float = 0.0
) -> Tensor:
    targets = smoothing + (1 - 2 * smoothing) * labels.clamp(min=0).float()
    losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    weights = weights * mask
    return (losses * weights).sum() / weights.sum()


# --- figures ------------------------------------------------------------------------------------


@torch.no_grad()
def score(model: LlamaForSequenceClassification, rows: Sequence[tuple[str, str]]) -> list[float]:
    """Scores of (prompt, response) pairs, read at the last token."""
    scores = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index][1]))
    for first in range(0, len(order), 64):
        chosen = order[first : first + 64]
        tokens = padded([[BOS, *encode(rows[i][0]), *encode(rows[i][1])] for i in chosen], PAD)
        logits = model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits[:, 0]
        for index, logit in zip(chosen, logits.tolist(), strict=True):
            scores[index] = logit
    return scores


def area_under_curve(scores: Sequence[float], is_right: Sequence[bool]) -> float | None:
    """Chance that a right response scores above a wrong one (ties count half); None with one class only."""
    num_right = sum(is_right)
    num_wrong = len(is_right) - num_right
    if num_right == 0 or num_wrong == 0:
        return None
    values = torch.tensor(scores, dtype=torch.float64)
    right = torch.tensor(is_right)
    above = (values[right][:, None] > values[~right][None]).double().sum()
    ties = (values[right][:, None] == values[~right][None]).double().sum()
    return float((above + 0.5 * ties) / (num_right * num_wrong))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, quantiles and maximum."""
    ordered = torch.tensor(values, dtype=torch.float64)
    points = {f"p{int(100 * q)}": float(ordered.quantile(q)) for q in (0.01, 0.1, 0.5, 0.9, 0.99)}
    return {"mean": float(ordered.mean()), "min": float(ordered.min()), **points, "max": float(ordered.max())}


def reward_figures(
    problems: Sequence[str], responses: Sequence[str], scores: Sequence[float]
) -> dict[str, Any]:
    """How well scores tell right from wrong, in all and within numbers of terms."""
    is_right = list(map(chain.is_correct, problems, responses))
    strata: dict[str, Any] = {}
    for low, high in [(1, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 13)]:
        chosen = [i for i, problem in enumerate(problems) if low <= chain.num_terms(problem) <= high]
        right = [is_right[i] for i in chosen]
        area = area_under_curve([scores[i] for i in chosen], right)
        right_frac = sum(right) / len(right)
        strata[f"{low}-{high} terms"] = {"auc": area, "num_responses": len(chosen), "right_frac": right_frac}
    right_scores = [s for s, right in zip(scores, is_right, strict=True) if right]
    wrong_scores = [s for s, right in zip(scores, is_right, strict=True) if not right]
    hits = [(s > 0) == right for s, right in zip(scores, is_right, strict=True)]
    return {
        "right_frac": sum(is_right) / len(is_right),
        "auc": area_under_curve(scores, is_right),
        "auc_by_num_terms": strata,
        "accuracy_at_0": sum(hits) / len(hits),
        "scores_of_right": percentiles(right_scores) if right_scores else None,
        "scores_of_wrong": percentiles(wrong_scores) if wrong_scores else None,
    }


def degenerate_figures(model: LlamaForSequenceClassification, num_rows: int = 300) -> dict[str, Any]:
    """Scores of responses that no careful solver writes; all of them are wrong."""
    generator = random.Random("evaluate:degenerate")
    stream = chain.iterate_problems(77, "held_out")
    kinds: dict[str, list[tuple[str, str]]] = {"degenerate": [], "corrupted": [], "cut off": [], "empty": []}
    while len(kinds["degenerate"]) < num_rows:
        problem = next(stream)
        kinds["degenerate"].append((problem, degenerate(problem, generator)))
        slip = corrupted(chain.clean_response(problem), generator)
        if not chain.is_correct(problem, slip):
            kinds["corrupted"].append((problem, slip))
        body = chain.clean_response(problem).removesuffix(chain.EOS_TEXT)
        kinds["cut off"].append((problem, body[: generator.randint(1, len(body))]))
        kinds["empty"].append((problem, chain.EOS_TEXT))
    figures = {}
    for name, rows in kinds.items():
        wrong = [row for row in rows if not chain.is_correct(*row)]
        scores = score(model, wrong)
        figures[name] = {"above_0_frac": sum(s > 0 for s in scores) / len(scores), **percentiles(scores)}
    return figures


def make_responses(work_dir: Path, num_problems: int) -> None:
    """Stage 7: the policy's responses to held-out problems, for the figures."""
    policy = LlamaForCausalLM.from_pretrained(work_dir / "policy", dtype=torch.float32).eval()
    problems = chain.held_out_problems(num_problems)
    responses = {
        name: sample(policy, problems, temperature, torch.Generator().manual_seed(5))
        for name, temperature in [("T=1", 1.0), ("greedy", 0.0), ("T=0.5", 0.5)]
    }
    (work_dir / "responses.json").write_text(json.dumps({"problems": problems, "responses": responses}))


def evaluate(work_dir: Path) -> None:
    """Stage 8: all figures on held-out problems, written to ``figures.json``."""
    reward = LlamaForSequenceClassification.from_pretrained(work_dir / "reward", dtype=torch.float32).eval()
    stored = json.loads((work_dir / "responses.json").read_text())
    problems = stored["problems"]
    figures: dict[str, Any] = {"num_problems": len(problems), "policy": {}, "reward": {}}
    for name, responses in stored["responses"].items():
        figures["policy"][name] = policy_figures(problems, responses)
        scores = score(reward, list(zip(problems, responses, strict=True)))
        figures["reward"][f"on policy at {name}"] = reward_figures(problems, responses, scores)
    figures["reward"]["on wrong responses by design"] = degenerate_figures(reward)
    text = json.dumps(figures, indent=1)
    (work_dir / "figures.json").write_text(text)
    print(text)


def policy_figures(problems: Sequence[str], responses: Sequence[str]) -> dict[str, Any]:
    """Accuracy against the true checker, and lengths."""
    is_right = list(map(chain.is_correct, problems, responses))
    reports = map(chain.check_chain, problems, responses)
    num_cancelling = sum(r.is_chain_right < right for r, right in zip(reports, is_right, strict=True))
    return {
        "accuracy": sum(is_right) / len(problems),
        "cancelling_errors_frac": num_cancelling / len(problems),
        "response_tokens": percentiles([len(encode(response)) for response in responses]),
        "truncated_frac": sum(chain.EOS_TEXT not in response for response in responses) / len(problems),
    }


def ship(work_dir: Path, output_dir: Path) -> None:
    """Stage 9: tokenizer into both folders, then each file is moved to its place in one step."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for name in ("policy", "reward"):
        build_tokenizer().save_pretrained(work_dir / name)
        (output_dir / name).mkdir(exist_ok=True)
        for file in sorted((work_dir / name).iterdir()):
            _replace(output_dir / name / file.name, file.read_bytes())
    figures = work_dir / "figures.json"
    if figures.exists():
        _replace(output_dir / "figures.json", figures.read_bytes())


def _replace(target: Path, content: bytes) -> None:
    partial = target.with_name(f".{target.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, target)


def main() -> None:
    """Parses the command line and runs one stage or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["all", *STAGE_NAMES])
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/make_tiny"))
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "tiny")
    parser.add_argument("--clean-steps", type=int, default=2400)
    parser.add_argument("--policy-steps", type=int, default=500)
    parser.add_argument("--num-samples", type=int, default=8000)
    parser.add_argument("--oracle-steps", type=int, default=600)
    parser.add_argument("--reward-steps", type=int, default=1500)
    parser.add_argument("--reward-again-steps", type=int, default=1200)
    parser.add_argument("--wrong-step-frac", type=float, default=chain.WRONG_STEP_FRAC)
    parser.add_argument("--num-problems", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    stages: dict[str, Callable[[], None]] = {
        "clean": lambda: make_clean(options.work_dir, options.clean_steps),
        "oracle": lambda: make_oracle(options.work_dir, options.oracle_steps),
        "policy": lambda: make_policy(options.work_dir, options.policy_steps, options.wrong_step_frac),
        "samples": lambda: make_samples(options.work_dir, options.num_samples),
        "reward": lambda: make_reward(options.work_dir, options.reward_steps),
        "reward_again": lambda: make_reward_again(options.work_dir, options.reward_again_steps),
        "responses": lambda: make_responses(options.work_dir, options.num_problems),
        "evaluate": lambda: evaluate(options.work_dir),
        "ship": lambda: ship(options.work_dir, options.output_dir),
    }
    for name, stage in stages.items():
        if options.stage in ("all", name):
            stage()


if __name__ == "__main__":
    main()
