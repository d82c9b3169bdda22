"""What one device holds at its peak, part by part.

Weights, gradients and Adam's moments are those that the learner keeps: all in the configured dtype, with no float32
master copy (an adapter's are float32). FSDP gives each of n training devices 1/n of them, and gathers layer by layer.
The generator and the scorers own whole copies. Training and forward passes take turns, so the larger of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.dry_run.cards import Hardware
from harness.dry_run.layout import Layout
from harness.dry_run.models import CountedModel, Models, Shape
from harness.dry_run.work import Work
from harness.formatting import format_size
from oppo_kit.backends.hf_scorer import BATCH_TOKENS
from oppo_kit.config import TrainConfig
from oppo_kit.ops.logprobs import MAX_LOGIT_ELEMENTS

_WIDTH = {"float32": 4, "bfloat16": 2}
# The cache's buffers start at so many rows and columns and double.
_FIRST_SLOTS, _FIRST_COLUMNS = 8, 64
# The generator's padded tokens per prefill pass.
_PREFILL_TOKENS = 8192
# Float32 logits, log-probs, probabilities and their product, and in the backward pass two gradients.
_NUM_LOGIT_COPIES = 6
# FSDP gathers the next layer while one is computed.
_NUM_GATHERED = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one device, and the formula in numbers."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The peak of one kind of device.

    Attributes:
        title: which devices, and what they do.
        parts: what is held at the same time.
        usable_bytes: what may be held.
    """

    title: str
    parts: tuple[Part, ...]
    usable_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def excess_bytes(self) -> int:
        """What is too much; 0: it fits."""
        return max(0, self.total_bytes - self.usable_bytes)


def plan_memory(
    train: TrainConfig, models: Models, work: Work, layout: Layout, hardware: Hardware
) -> list[DeviceMemory]:
    """The training devices, and the scoring one where it is one of its own."""
    parts = _learner_parts(models, layout.num_training)
    parts += _generator_parts(train, models.policy, work, layout.num_training, hardware)
    if layout.scoring is None:
        parts += _scorer_parts(train, models, work, layout)
    peaks = [
        _training_pass(train, models, work, layout.num_training),
        _prefill_pass(train, models, work, layout),
    ]
    if layout.scoring is None:
        peaks += _scoring_passes(train, models, work, layout)
    parts.append(max(peaks, key=lambda part: part.num_bytes))
    devices = [DeviceMemory(layout.training_title, tuple(parts), hardware.usable_bytes)]
    if layout.scoring is not None:
        own = _scorer_parts(train, models, work, layout)
        passes = _scoring_passes(train, models, work, layout)
        own += sorted(passes, key=lambda part: part.num_bytes)[-1:]
        devices.append(DeviceMemory(layout.names[layout.scoring], tuple(own), hardware.usable_bytes))
    return devices


def streams(train: TrainConfig, models: Models) -> bool:
    """Whether scorers keep what they have read: ``bench``'s runner ``both`` streams unless told when to score."""
    return bool(models.scorers) and train.overlap.score_at != "sample"


def activation_bytes(shape: Shape, width: int, *, is_lora: bool = False) -> int:
    """Of one token in all layers, kept for the backward pass; no layer is computed twice.

    Elements: h of a hidden state, k of a key, i between the halves of the feed-forward part, w bytes each, in a layer
    of the kind of Llama's or Qwen2's, with attention that keeps no scores. Norms keep their input in float32, attention
    query, key, value and result, the feed-forward part three of its products: 8h + w · (2h + 2k + 3i). Weights that are
    trained keep what they multiply, w · (4h + i). An adapter's keep the input of every linear layer instead, each in a
    float32 copy of its own, 4 · (6h + i), or, where all is float32, as it is: 4 · (2h + i).
    """
    hidden, inner, key_value = shape.hidden, shape.inner, shape.key_value
    layer = 8 * hidden + width * (2 * hidden + 2 * key_value + 3 * inner)
    if not is_lora:
        layer += width * (4 * hidden + inner)
    else:
        layer += 4 * ((2 if width == 4 else 6) * hidden + inner)
    return shape.num_layers * layer


def cache_bytes(shape: Shape, width: int, num_rows: int, num_columns: int) -> int:
    """Keys and values of so many rows and columns, in buffers that have doubled until they were large enough."""
    slots, columns = _doubled(_FIRST_SLOTS, num_rows), _doubled(_FIRST_COLUMNS, num_columns)
    return 2 * shape.num_layers * shape.key_value * width * slots * columns


def row_cache_bytes(train: TrainConfig, shape: Shape, work: Work) -> int:
    """Keys and values of one row of full length, in vLLM's pool."""
    return 2 * shape.num_layers * shape.key_value * _WIDTH[train.dtype] * work.row_tokens


def _doubled(start: int, needed: int) -> int:
    while start < needed:
        start *= 2
    return start


def _learner_parts(models: Models, num_devices: int) -> list[Part]:
    whole = sum(model.num_bytes for model in models.trained)
    trained = sum(model.trained_bytes for model in models.trained)
    share = "" if num_devices == 1 else f" / {num_devices}"
    names = " + ".join(["policy"] + (["critic"] if models.critic else []))
    parts = [
        Part(f"weights: {names}", whole // num_devices, f"{format_size(whole)}{share}"),
        Part("gradients", trained // num_devices, f"{format_size(trained)} that are trained{share}"),
        Part("Adam's moments", 2 * trained // num_devices, f"2 × {format_size(trained)}{share}"),
    ]
    if num_devices > 1:
        block = max(model.block_bytes for model in models.trained)
        text = f"{_NUM_GATHERED} × the largest layer, {format_size(block)}"
        parts.append(Part("gathered by FSDP", _NUM_GATHERED * block, text))
    return parts


def _generator_parts(
    train: TrainConfig, policy: CountedModel, work: Work, num_devices: int, hardware: Hardware
) -> list[Part]:
    is_vllm = train.backend == "vllm"
    is_packed = hardware.kind == "cpu" and train.dtype == "float32" and not is_vllm
    copies = 2 if is_packed else 1
    text = f"{format_size(policy.num_bytes)}, not sharded"
    if is_packed:
        text = f"2 × {format_size(policy.num_bytes)}: as they are, and packed for the CPU"
    rows = -(-work.num_held_rows // num_devices)
    cache = (
        _vllm_cache(train, policy.shape, rows, work)
        if is_vllm
        else Part(
            "generator's KV cache",
            cache_bytes(policy.shape, _WIDTH[train.dtype], rows, work.row_tokens),
            _cache_text(rows, work),
        )
    )
    return [Part("generator's weights", copies * policy.num_bytes, text), cache]


def _vllm_cache(train: TrainConfig, shape: Shape, rows: int, work: Work) -> Part:
    """The pool that vLLM sets aside, and what all rows would take of it."""
    row_bytes = row_cache_bytes(train, shape, work)
    num_bytes = int(train.vllm.kv_cache_gib * 2**30)
    text = f"vllm.kv_cache_gib, set aside; {rows} rows × {work.row_tokens} tokens take {format_size(rows * row_bytes)}"
    if row_bytes > num_bytes:
        text += "; too small for one"
    elif rows * row_bytes > num_bytes:
        text += "; some would wait"
    return Part("generator's KV cache", num_bytes, text)


def _scorer_parts(train: TrainConfig, models: Models, work: Work, layout: Layout) -> list[Part]:
    parts = []
    rows = -(-work.num_held_rows // layout.num_scoring)
    # Over the base's own tensors, unless they are sharded or elsewhere.
    is_shared = train.actor_lora is not None and layout.num_training == 1 and layout.scoring is None
    for name, model in (("reward model", models.reward), ("reference", models.reference)):
        if model is None:
            continue
        if name == "reference" and is_shared:
            parts.append(Part("reference's weights", 0, "the policy's own, without the adapter"))
        else:
            parts.append(
                Part(f"{name}'s weights", model.num_bytes, f"{format_size(model.num_bytes)}, not sharded")
            )
        if streams(train, models):
            num_bytes = cache_bytes(model.shape, _WIDTH[train.dtype], rows, work.row_tokens)
            parts.append(Part(f"{name}'s KV cache", num_bytes, _cache_text(rows, work)))
    return parts


def _training_pass(train: TrainConfig, models: Models, work: Work, num_devices: int) -> Part:
    width = _WIDTH[train.dtype]
    tokens = work.pass_tokens(num_devices)
    is_lora = train.actor_lora is not None
    per_token = activation_bytes(models.policy.shape, width, is_lora=is_lora)
    if models.critic is not None:
        per_token += activation_bytes(models.critic.shape, width)
    logits = min(MAX_LOGIT_ELEMENTS, tokens * models.policy.shape.vocab) * 4 * _NUM_LOGIT_COPIES
    text = f"{tokens} tokens × {per_token / 2**20:.2f} MiB, {format_size(logits)} of logits"
    return Part("activations of a micro-batch", tokens * per_token + logits, text)


def _prefill_pass(train: TrainConfig, models: Models, work: Work, layout: Layout) -> Part:
    tokens = work.pass_tokens(layout.num_training, _PREFILL_TOKENS, work.num_held_rows)
    return _forward_pass("prefill", train, models.policy, tokens)


def _scoring_passes(train: TrainConfig, models: Models, work: Work, layout: Layout) -> list[Part]:
    num_rows = work.batch_size * work.group_size
    tokens = work.pass_tokens(layout.num_scoring, BATCH_TOKENS, num_rows)
    return [_forward_pass("scoring", train, model, tokens) for model in models.scorers]


def _forward_pass(name: str, train: TrainConfig, model: CountedModel, tokens: int) -> Part:
    """Without gradient a layer's states go when the next one is reached: 4 of hidden and 3 of inner size at once."""
    shape, width = model.shape, _WIDTH[train.dtype]
    logits = min(MAX_LOGIT_ELEMENTS, tokens * shape.vocab) * 4 * _NUM_LOGIT_COPIES
    num_bytes = tokens * (4 * shape.hidden + 3 * shape.inner) * width + logits
    return Part(
        f"a pass of {name}", num_bytes, f"{tokens} tokens in one layer, {format_size(logits)} of logits"
    )


def _cache_text(rows: int, work: Work) -> str:
    return f"{rows} rows × {work.row_tokens} tokens, each rounded up to the next doubling"
