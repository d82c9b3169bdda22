"""An estimate of the GPU memory of a run, from the shapes alone; printed before anything is allocated.

Weights are counted exactly. Activations are those that a decoder layer of Qwen2's kind keeps for the backward pass,
without checkpointing: per token about 24 vectors of the hidden size and 4 of the intermediate size (norms keep
float32 copies); an adapter in float32 adds a copy of every input of a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.formatting import format_size
from harness.gpu_check.random_models import load_shape
from harness.gpu_check.settings import CheckModel, CheckSize, Size

_BYTES = {"bfloat16": 2, "float32": 4}
# Logits, their gradient, and the copies of softmax and entropy that exist at the same time in TRL's update.
_NUM_LOGIT_COPIES = 6
# transformers returns float32 scores of every tick, and TRL stacks them beside the originals.
_NUM_SCORE_COPIES = 2
_LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one run by what holds them."""

    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """The peak: generation and update take turns, so the larger of the two counts."""
        return self.parts["models"] + max(self.parts["generation"], self.parts["update"])

    def as_text(self) -> str:
        """The peak and its parts."""
        parts = ", ".join(f"{name} {format_size(value)}" for name, value in self.parts.items())
        return f"about {format_size(self.total_bytes)} of GPU memory at the most ({parts})"


def num_parameters(shape: dict[str, Any], *, has_head: bool = True) -> int:
    """Weights of a Qwen2 model; ``has_head``: an output layer, which takes no room of its own when tied."""
    hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    key_value = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * key_value + hidden + 2 * key_value
    layer = attention + 3 * hidden * inner + 2 * hidden
    head = vocab * hidden if has_head and not shape["tie_word_embeddings"] else 0
    return vocab * hidden + shape["num_hidden_layers"] * layer + hidden + head


def num_lora_parameters(shape: dict[str, Any], rank: int = _LORA_RANK) -> int:
    """Weights of an adapter on all linear layers of the decoder."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    key_value = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sides = 2 * (hidden + hidden) + 2 * (hidden + key_value) + 3 * (hidden + inner)
    return rank * shape["num_hidden_layers"] * sides


def estimate(model: CheckModel, size_name: Size, size: CheckSize, runner: str) -> MemoryEstimate:
    """Memory of one run; ``runner`` decides on what is held beside the trained models."""
    policy = load_shape(model.policy[size_name])
    critic = load_shape(model.critic[size_name]) | {"vocab_size": policy["vocab_size"]}
    width = _BYTES[size.dtype]
    policy_bytes = num_parameters(policy) * width
    critic_bytes = num_parameters(critic, has_head=False) * width
    # Weights, gradients and two moments; the frozen have weights only. Adapters are float32.
    trained = num_lora_parameters(policy) * 4 * 4 + policy_bytes if model.is_lora else 4 * policy_bytes
    reference = 0 if model.is_lora else policy_bytes
    own_copy = 0 if runner == "trl" else policy_bytes
    rows = size.batch_size // size.num_mini_batches
    tokens = rows * (size.num_prompt_tokens + size.lengths.longest)
    scores = size.batch_size * size.lengths.longest * policy["vocab_size"] * 4 * _NUM_SCORE_COPIES
    update = tokens * (_activation_bytes(policy, width, model.is_lora) + _activation_bytes(critic, width))
    return MemoryEstimate(
        {
            "models": trained + reference + own_copy + 5 * critic_bytes,
            "generation": scores if runner == "trl" else scores // size.lengths.longest,
            "update": update + tokens * policy["vocab_size"] * width * _NUM_LOGIT_COPIES,
        }
    )


def _activation_bytes(shape: dict[str, Any], width: int, is_lora: bool = False) -> int:
    """Of one token in all layers."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kept = (24 * hidden + 4 * inner) * width
    inputs = (6 * hidden + inner) * 4 if is_lora else 0
    return shape["num_hidden_layers"] * (kept + inputs)
