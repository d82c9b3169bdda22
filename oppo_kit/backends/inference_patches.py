"""Faster float32 inference on a module of one's own: fused norms, and weights packed for a few rows at a time.

They change no parameter, only how a module computes its output, so weights may be copied into the module at any time;
``PackedLinears.refresh`` must follow. Never for a module that is trained: packed weights have no gradient and go stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Below this size a packed product loses more by its call than it wins (measured from 128 x 128 to 49152 x 576).
MIN_PACKED_ELEMENTS = 1 << 18
# One row is a matrix-vector product, and many rows fill the ordinary kernel: no gain on either side.
MIN_PACKED_ROWS, MAX_PACKED_ROWS = 2, 32


def fuse_norms(module: nn.Module) -> int:
    """Let every RMS norm that agrees with ``torch.nn.functional.rms_norm`` use it: one kernel instead of six.

    Whether it agrees is measured on the norm itself, with weight w (Llama and most others) or 1 + w (Gemma).

    Returns:
        norms changed.
    """
    return sum(_fuse_norm(norm) for norm in module.modules() if "RMSNorm" in type(norm).__name__)


class PackedLinears:
    """The linear layers of a CPU float32 module, with weights in oneDNN's blocked layout.

    A product of 2 to 32 rows with a large weight is up to 2.3 times as fast. A packed product also gives a row the same
    bits whatever the other rows are, which the ordinary kernel does not: hence ``for_all_rows``.

    Args:
        module: patched in place.
        for_all_rows: pack every layer, and use it for every number of rows.
    """

    def __init__(self, module: nn.Module, *, for_all_rows: bool = False) -> None:
        self._module = module
        self._layers: list[nn.Linear] = []
        self._packed: dict[nn.Linear, Tensor] = {}
        least = 0 if for_all_rows else MIN_PACKED_ELEMENTS
        for layer in module.modules():
            if type(layer) is nn.Linear and layer.weight.numel() >= least and _can_pack(layer.weight):
                self._layers.append(layer)
                forward = self._make_forward(layer, for_all_rows=for_all_rows)
                layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        self.refresh()

    def __len__(self) -> int:
        """Layers packed."""
        return len(self._layers)

    @property
    def unpacked(self) -> list[str]:
        """Names of matrices that are multiplied and not packed: all but those of embeddings."""
        packed = set(self._layers)
        return [
            f"{name}.{own}".lstrip(".")
            for name, layer in self._module.named_modules()
            if layer not in packed and not isinstance(layer, nn.Embedding)
            for own, parameter in layer.named_parameters(recurse=False)
            if parameter.dim() > 1
        ]

    def refresh(self) -> None:
        """Pack the current weights; a weight shared by two layers is packed once."""
        by_storage: dict[int, Tensor] = {}
        for layer in self._layers:
            pointer = layer.weight.data_ptr()
            if pointer not in by_storage:
                by_storage[pointer] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
            self._packed[layer] = by_storage[pointer]

    def _make_forward(self, layer: nn.Linear, *, for_all_rows: bool) -> Callable[[Tensor], Tensor]:
        def forward(states: Tensor) -> Tensor:
            num_rows = states.numel() // states.shape[-1]
            if not for_all_rows and not MIN_PACKED_ROWS <= num_rows <= MAX_PACKED_ROWS:
                return functional.linear(states, layer.weight, layer.bias)
            return _packed_product(states, self._packed[layer], layer.bias)

        return forward


def _packed_product(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")


def _can_pack(weight: Tensor) -> bool:
    """Whether this build of torch multiplies by a packed weight of this kind, and rightly."""
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    probe = torch.linspace(-1, 1, 3 * weight.shape[1]).reshape(3, -1)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight[:16].detach().contiguous())
        product = _packed_product(probe, packed, None)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(product, functional.linear(probe, weight[:16].detach()), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def _fuse_norm(norm: nn.Module) -> bool:
    weight = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return False
    size = (weight.shape[0],)
    states = torch.linspace(-2, 3, 2 * size[0], dtype=weight.dtype, device=weight.device).reshape(2, -1)
    expected: Any = norm(states)
    tolerance = 4 * torch.finfo(weight.dtype).eps
    for offset in (0.0, 1.0):

        def forward(states: Tensor, offset: float = offset) -> Tensor:
            scale = weight + offset if offset else weight
            return functional.rms_norm(states, size, scale, epsilon)

        if torch.allclose(forward(states), expected, rtol=tolerance, atol=tolerance):
            norm.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
            return True
    return False
