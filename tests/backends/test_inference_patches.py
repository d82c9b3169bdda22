"""Fused norms and packed weights against the modules that they change."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_causal_lm
from torch import Tensor, nn

from oppo_kit.backends import inference_patches
from oppo_kit.backends.inference_patches import MIN_PACKED_ELEMENTS, PackedLinears, fuse_norms

INPUT_IDS = torch.arange(24).reshape(2, 12) * 7 % VOCAB_SIZE


def is_patched(module: nn.Module) -> bool:
    return "forward" in vars(module)


def large_linear(out_features: int = 512, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(512, out_features, bias=bias)
    assert layer.weight.numel() >= MIN_PACKED_ELEMENTS
    return layer


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=INPUT_IDS).logits


@pytest.mark.parametrize(
    ("kind", "num_norms"), [("llama", 5), ("qwen3", 9), ("gemma3", 37), ("mistral", 5), ("gemma", 5)]
)
def test_fused_norms_compute_what_the_norms_computed(kind: str, num_norms: int) -> None:
    """Weights are no longer those of the initialisation, where w and 1 + w may be told apart by nothing."""
    model = tiny_causal_lm(kind)
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    with torch.no_grad():
        for index, norm in enumerate(norms):
            norm.weight.add_(torch.sin(torch.arange(norm.weight.numel()) + index) * 0.3)
    expected = logits(model)
    assert fuse_norms(model) == num_norms == len(norms)
    assert all(is_patched(norm) for norm in norms)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_fused_norm_follows_its_weight(kind: str) -> None:
    plain, fused = tiny_causal_lm(kind), tiny_causal_lm(kind)
    fuse_norms(fused)
    with torch.no_grad():
        for model in (plain, fused):
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.mul_(1.7).add_(0.2)
    torch.testing.assert_close(logits(fused), logits(plain), rtol=1e-4, atol=1e-4)


class FooRMSNorm(nn.Module):
    """Divides by the mean magnitude: no RMS norm, whatever its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-6

    def forward(self, states: Tensor) -> Tensor:
        return self.weight * states / (states.abs().mean(-1, keepdim=True) + self.variance_epsilon)


class NamelessEpsilonRMSNorm(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(16, eps=None)


class WeightlessRMSNorm(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(16, eps=1e-6, elementwise_affine=False)


@pytest.mark.parametrize("norm_class", [FooRMSNorm, NamelessEpsilonRMSNorm, WeightlessRMSNorm])
def test_a_norm_that_computes_something_else_is_left_alone(norm_class: type[nn.Module]) -> None:
    norm = norm_class()
    module = nn.Sequential(norm, nn.LayerNorm(16))
    assert fuse_norms(module) == 0
    assert not any(is_patched(child) for child in module)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 32, 33])
@pytest.mark.parametrize("for_all_rows", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_is_the_product(num_rows: int, for_all_rows: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer = large_linear(bias=bias)
    states = torch.randn(num_rows, 1, 512)
    with torch.no_grad():
        expected = layer(states)
        assert len(PackedLinears(nn.Sequential(layer), for_all_rows=for_all_rows)) == 1
        torch.testing.assert_close(layer(states), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "is_packed"), [(1, False), (2, True), (32, True), (33, False)], ids=str)
def test_the_packed_weight_is_used_for_two_to_thirty_two_rows_unless_for_all(
    num_rows: int, is_packed: bool, monkeypatch
) -> None:
    calls = []
    inner = inference_patches._packed_product

    def watched(*args):
        calls.append(args)
        return inner(*args)

    few, every = large_linear(), large_linear()
    PackedLinears(few)
    PackedLinears(every, for_all_rows=True)
    monkeypatch.setattr(inference_patches, "_packed_product", watched)
    with torch.no_grad():
        few(torch.ones(num_rows, 512))
        assert bool(calls) == is_packed
        calls.clear()
        every(torch.ones(num_rows, 512))
        assert calls


def test_a_packed_weight_is_stale_until_it_is_refreshed() -> None:
    layer = large_linear()
    packed = PackedLinears(layer)
    states = torch.linspace(-1, 1, 4 * 512).reshape(4, 512)
    with torch.no_grad():
        before = layer(states)
        layer.weight.mul_(2.0)
        layer.bias.zero_()
        expected = nn.functional.linear(states, layer.weight, layer.bias)
        stale = layer(states)
        assert (stale - expected).abs().max() > 0.1, (
            "the weight would have been read anew: refresh is for nothing"
        )
        assert not torch.equal(stale, before), "the bias is read anew"
        packed.refresh()
        torch.testing.assert_close(layer(states), expected, rtol=1e-5, atol=1e-5)


def count_reorders(monkeypatch) -> list[Tensor]:
    reordered: list[Tensor] = []
    inner = torch.ops.mkldnn._reorder_linear_weight

    def watched(weight, *args):
        reordered.append(weight)
        return inner(weight, *args)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", watched)
    return reordered


def test_tied_weights_are_packed_once(monkeypatch) -> None:
    one, other, third = large_linear(), large_linear(), large_linear()
    other.weight = one.weight
    packed = PackedLinears(nn.Sequential(one, other, third))
    assert len(packed) == 3
    reordered = count_reorders(monkeypatch)
    packed.refresh()
    assert [weight.data_ptr() for weight in reordered] == [one.weight.data_ptr(), third.weight.data_ptr()]


def test_only_large_layers_are_packed_unless_for_all_rows() -> None:
    module = nn.Sequential(nn.Linear(64, 64), large_linear(), nn.Linear(64, 3), nn.Conv1d(2, 2, 1))
    every = copy.deepcopy(module)
    assert len(PackedLinears(module)) == 1
    assert [is_patched(child) for child in module] == [False, True, False, False]
    assert len(PackedLinears(every, for_all_rows=True)) == 3
    assert [is_patched(child) for child in every] == [True, True, True, False]


class OwnLinear(nn.Linear):
    def forward(self, states: Tensor) -> Tensor:
        return 3 * super().forward(states)


def test_a_subclass_that_may_compute_something_else_is_not_packed() -> None:
    assert len(PackedLinears(nn.Sequential(OwnLinear(512, 512)), for_all_rows=True)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("for_all_rows", [False, True])
def test_nothing_but_float32_is_packed(dtype: torch.dtype, for_all_rows: bool) -> None:
    layer = large_linear().to(dtype)
    packed = PackedLinears(layer, for_all_rows=for_all_rows)
    assert (len(packed), is_patched(layer)) == (0, False)
    packed.refresh()
    assert layer(torch.ones(4, 512, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("failure", ["raises", "is wrong"])
def test_nothing_is_packed_where_this_build_of_torch_cannot(failure: str, monkeypatch) -> None:
    def product(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        if failure == "raises":
            raise RuntimeError("no such operator")
        return torch.zeros(3, 16)

    monkeypatch.setattr(inference_patches, "_packed_product", product)
    layer = large_linear()
    assert (len(PackedLinears(layer)), is_patched(layer)) == (0, False)


def test_a_packed_product_gives_a_row_the_same_bits_in_any_company() -> None:
    torch.manual_seed(0)
    layer = large_linear()
    PackedLinears(layer, for_all_rows=True)
    states = torch.randn(48, 512)
    with torch.no_grad():
        together = layer(states)
        for num_rows in (1, 2, 5, 16, 31):
            assert torch.equal(layer(states[:num_rows]), together[:num_rows])
