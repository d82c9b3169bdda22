"""Memory: by hand on round numbers, against what PyTorch keeps, and against a measured run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.dry_run.cards import GIB, Hardware, parse_gpus
from harness.dry_run.layout import Layout, make_layout
from harness.dry_run.memory import activation_bytes, cache_bytes, plan_memory
from harness.dry_run.models import CountedModel, Models, Shape, embedded_config
from harness.dry_run.plan import make_plan
from harness.dry_run.work import Work
from harness.schema import load_result
from oppo_kit.backends.ragged_cache import RaggedCache
from oppo_kit.build import add_adapter
from oppo_kit.config import LoraSettings, TrainConfig

RESULTS = Path(__file__).parents[3] / "results"
SHAPE = Shape(num_layers=2, hidden=10, inner=30, key_value=4, vocab=100)


def model(num_bytes: int, trained_bytes: int) -> CountedModel:
    return CountedModel("a", "", SHAPE, num_bytes // 4, num_bytes, trained_bytes, num_bytes // 10)


MODELS = Models(model(1000, 1000), model(600, 600), model(500, 0), model(1000, 0), "a")
WORK = Work(
    batch_size=8,
    delta=4,
    max_age=2,
    group_size=1,
    prompt_tokens=40,
    response_tokens=24,
    num_epochs=1,
    num_mini_batches=1,
    micro_batch_tokens=8192,
)


def sizes(train: TrainConfig, gpus: str, models: Models = MODELS) -> list[dict[str, int]]:
    hardware = parse_gpus(gpus)
    layout = make_layout(hardware, train.overlap.scorer_device)
    return [
        {part.name: part.num_bytes for part in device.parts}
        for device in plan_memory(train, models, WORK, layout, hardware)
    ]


def train_config(**overlap: object) -> TrainConfig:
    return TrainConfig.model_validate({"batch_size": 8, "overlap": {"delta": 4, **overlap}})


def test_one_gpu_holds_everything_once() -> None:
    [parts] = sizes(train_config(score_at="sample"), "1xH200")
    activations = 512 * 2 * activation_bytes(SHAPE, 4) + 512 * 100 * 4 * 6
    assert parts == {
        "weights: policy + critic": 1600,
        "gradients": 1600,
        "Adam's moments": 3200,
        "generator's weights": 1000,
        # 12 rows in 16 slots, 64 columns, 2 layers of keys and values of 4 float32 elements.
        "generator's KV cache": 2 * 2 * 4 * 4 * 16 * 64,
        "reward model's weights": 500,
        "reference's weights": 1000,
        "activations of a micro-batch": activations,
    }


def test_fsdp_gives_each_of_seven_a_share_and_the_eighth_gpu_scores() -> None:
    training, scoring = sizes(train_config(scorer_device="cuda:7"), "8xH200")
    assert training["weights: policy + critic"] == 1600 // 7
    assert training["gradients"] == 1600 // 7
    assert training["Adam's moments"] == 3200 // 7
    assert training["gathered by FSDP"] == 2 * 100
    assert training["generator's weights"] == 1000
    # ⌈12 / 7⌉ = 2 rows in the 8 slots that a cache starts with.
    assert training["generator's KV cache"] == 2 * 2 * 4 * 4 * 8 * 64
    assert not any("re" in name[:2] for name in training)
    # 8 rows of 64 tokens are one pass; what was streamed stays beside it.
    assert scoring["reward model's weights"] == 500
    assert scoring["reference's weights"] == 1000
    assert scoring["reward model's KV cache"] == scoring["reference's KV cache"] == 2 * 2 * 4 * 4 * 16 * 64
    assert scoring["a pass of scoring"] == 512 * (4 * 10 + 3 * 30) * 4 + 512 * 100 * 4 * 6


def test_the_reference_of_an_adapter_is_the_policy_itself_where_that_is_whole_and_near() -> None:
    lora = train_config(score_at="sample").model_copy(update={"actor_lora": LoraSettings()})
    assert sizes(lora, "1xH200")[0]["reference's weights"] == 0
    assert sizes(lora, "2xH200")[0]["reference's weights"] == 1000
    elsewhere = lora.model_copy(update={"overlap": train_config(scorer_device="cuda:1").overlap})
    assert sizes(elsewhere, "2xH200")[1]["reference's weights"] == 1000


def test_float32_on_a_cpu_packs_the_generator_s_weights() -> None:
    cpu = Hardware("this machine's CPU", "cpu", 1, GIB, None)
    [device] = plan_memory(train_config(), MODELS, WORK, Layout(1, None, ("CPU",)), cpu)
    assert {part.name: part.num_bytes for part in device.parts}["generator's weights"] == 2000
    assert device.excess_bytes == 0
    assert device.usable_bytes == int(0.9 * GIB)


@pytest.mark.parametrize(
    ("kv_cache_gib", "end"),
    # 12 rows of 64 tokens, 64 bytes a token: 48 KiB in all, 4 KiB a row.
    [(1.0, ""), (8 / 2**20, "; some would wait"), (2 / 2**20, "; too small for one")],
)
def test_vllm_sets_its_cache_aside_and_packs_no_second_copy(kv_cache_gib: float, end: str) -> None:
    train = TrainConfig.model_validate(
        {"batch_size": 8, "overlap": {"delta": 4}, "backend": "vllm", "vllm": {"kv_cache_gib": kv_cache_gib}}
    )
    cpu = Hardware("this machine's CPU", "cpu", 1, GIB, None)
    [device] = plan_memory(train, MODELS, WORK, Layout(1, None, ("CPU",)), cpu)
    parts = {part.name: part for part in device.parts}
    assert parts["generator's weights"].num_bytes == 1000
    assert parts["generator's KV cache"].num_bytes == int(kv_cache_gib * 2**30)
    formula = parts["generator's KV cache"].formula
    assert re.search(r"12 rows × 64 tokens take [\d.]+ [KMG]iB(.*)$", formula)[1] == end


def test_functions_and_no_critic_leave_their_parts_out() -> None:
    [parts] = sizes(train_config(), "1xH200", Models(model(1000, 1000), None, None, None, "module:function"))
    assert list(parts) == [
        "weights: policy",
        "gradients",
        "Adam's moments",
        "generator's weights",
        "generator's KV cache",
        # More than the activations of this model of two narrow layers.
        "a pass of prefill",
    ]


def kept_bytes(module: torch.nn.Module, input_ids: torch.Tensor) -> int:
    """Bytes that a backbone keeps for the backward pass besides its parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = module(input_ids=input_ids, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize(
    ("name", "hidden", "inner", "num_key_values"),
    [("qwen2.5-7b", 128, 704, 1), ("smollm2-135m", 256, 352, 4)],
)
def test_activations_are_what_pytorch_keeps_for_the_backward_pass(
    name: str, dtype: torch.dtype, is_lora: bool, hidden: int, inner: int, num_key_values: int
) -> None:
    """What four layers keep, as the difference between six and two of them."""
    kept, config = [], embedded_config(name)
    for num_layers in (2, 6):
        config = embedded_config(
            name,
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=4,
            num_key_value_heads=num_key_values,
            num_hidden_layers=num_layers,
            vocab_size=64,
        )
        policy: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if is_lora:
            policy = add_adapter(policy, LoraSettings(r=1)).get_base_model()
        kept.append(kept_bytes(policy.base_model, torch.arange(256).reshape(2, 128) % 64))
    planned = 256 * activation_bytes(Shape.of(config), dtype.itemsize, is_lora=is_lora) * 4 / 6
    assert kept[1] - kept[0] == pytest.approx(planned, rel=0.01)


def test_a_cache_is_never_larger_than_planned_nor_half_of_it() -> None:
    config = embedded_config("smollm2-135m", num_hidden_layers=2)
    shape = Shape.of(config)
    cache = RaggedCache(config, device=torch.device("cpu"), dtype=torch.float32)
    cache.admit(20)
    states = torch.zeros(20, 3, 1, 64)
    for layer in cache.layers:
        with cache.append([0] * 20):
            layer.lazy_initialization(states, states)
    with cache.append([90] * 20):
        pass
    with cache.append([60] * 20):
        pass
    planned = cache_bytes(shape, 4, 20, 150)
    assert planned / 2 < cache.num_bytes <= planned


@pytest.mark.parametrize("runner", ["sequential", "overcommit", "both"])
def test_the_plan_of_a_committed_run_is_near_the_memory_that_it_took(runner: str) -> None:
    """Measured is the whole process, Python and PyTorch included, and prompts of that task have some 50 tokens."""
    result = load_result(RESULTS / "ppo-smollm2-ladder")
    train = TrainConfig.model_validate(result.workload.config).model_copy(update={"max_prompt_tokens": 64})
    if runner == "sequential":
        overlap = train.overlap.model_copy(
            update={"schedule": "sequential", "delta": 0, "score_at": "sample"}
        )
        train = train.model_copy(update={"overlap": overlap})
    plan = make_plan(train, Hardware("this machine's CPU", "cpu", 1, 32 * GIB, None))
    [run] = result.runners[runner].runs
    assert plan.devices[0].total_bytes == pytest.approx(run.peak_rss_bytes, rel=0.3)
