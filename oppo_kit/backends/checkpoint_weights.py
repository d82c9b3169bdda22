"""A policy's weights as its checkpoint would hold them: plain names, adapters merged, nothing left out that is tied.

For engines that load weights by name. Knows none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oppo_kit.backends.forward import causal_model


@torch.no_grad()
def checkpoint_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every weight, one at a time; merged ones are new tensors, the others the policy's own.

    A tied output head comes under its own name too: an engine may keep a copy of it in another layout, which would
    silently stay as it was.

    Args:
        policy: a transformers model, or one that PEFT has put LoRA adapters on.

    Raises:
        ModelError: it is neither.
    """
    model = causal_model(policy)
    adapted: dict[str, Any] = {
        name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")
    }
    for name, weight in model.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        base = layer.removesuffix(".base_layer")
        if base != layer and base in adapted:
            yield f"{base}.{leaf}", _merged(weight, adapted[base]) if leaf == "weight" else weight
        elif not any(name.startswith(f"{adapter}.") for adapter in adapted):
            yield name, weight


def _merged(weight: Tensor, layer: Any) -> Tensor:
    """W + the sum of the active adapters' B A, as PEFT's own forward pass adds them."""
    if layer.disable_adapters or layer.merged:
        return weight
    for adapter in layer.active_adapters:
        if adapter in {*layer.lora_A, *layer.lora_embedding_A}:
            weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    return weight
