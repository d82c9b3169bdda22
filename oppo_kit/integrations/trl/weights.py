"""A trainer's model as a generator or scorer can use it.

Trainers replace ``forward`` on instances (autocast, fused output heads, kernels), and a copy of such an instance still
calls into the original. What is made here is free of that.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_Module = TypeVar("_Module", bound=nn.Module)

# What accelerate, TRL and kernels set on instances.
_INSTANCE_ATTRIBUTES = ("forward", "_original_forward", "_old_forward")
# The hook that checkpointing with adapters needs; without gradients it only costs.
_INPUT_GRADIENT_HOOK = "make_inputs_require_grad"


def bare_twin(model: _Module) -> _Module:
    """A second module over the same parameters and buffers, with its classes' own ``forward`` and no checkpointing.

    It follows the model's weights, since they are the same tensors, and nothing done to it changes the model.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    module: Any
    for module in twin.modules():
        for name in _INSTANCE_ATTRIBUTES:
            module.__dict__.pop(name, None)
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
        hooks: dict[int, Any] = module._forward_hooks
        for key, hook in list(hooks.items()):
            if _INPUT_GRADIENT_HOOK in getattr(hook, "__qualname__", ""):
                del hooks[key]
    _read_in_own_precision(twin)
    return twin.eval()


def generator_dtype(*, bf16: bool, fp16: bool) -> torch.dtype | None:
    """In which precision to decode: that of the trainer's autocast; None: the weights' own."""
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else None


def _read_in_own_precision(model: nn.Module) -> None:
    """An output head kept in float32 over a smaller backbone casts what it reads."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if isinstance(head, nn.Module) and isinstance(getattr(head, "weight", None), Tensor):
        head.register_forward_pre_hook(_cast_to_weight)


def _cast_to_weight(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weight: Any = module.weight
    return (inputs[0].to(weight.dtype), *inputs[1:])
