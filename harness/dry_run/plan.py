"""A run on hardware: models, work, layout and memory together, and what to change where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.dry_run.cards import Hardware
from harness.dry_run.layout import Layout, make_layout
from harness.dry_run.memory import DeviceMemory, plan_memory
from harness.dry_run.models import Models, count_models, known_config
from harness.dry_run.work import Work, make_work
from oppo_kit.algorithm import AlgorithmBase
from oppo_kit.backends.forward import context_tokens
from oppo_kit.config import TrainConfig, apply_overrides, parse_config
from oppo_kit.registry import create_algorithm

# From what costs least to what changes the run most.
_CHANGES = (
    "dtype=bfloat16",
    "learner.micro_batch_tokens=2048",
    "overlap.scorer_device=cuda:{last}",
    "actor_lora={{}}",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would be.

    Attributes:
        train: its settings.
        hardware: that it is planned for.
        algorithm: that it trains by.
        models: counted.
        work: of a step.
        layout: of the devices.
        devices: memory of each kind of them.
    """

    train: TrainConfig
    hardware: Hardware
    algorithm: AlgorithmBase
    models: Models
    work: Work
    layout: Layout
    devices: list[DeviceMemory]

    @property
    def fits(self) -> bool:
        """Whether every device holds what it has to."""
        return not any(device.excess_bytes for device in self.devices)


def make_plan(train: TrainConfig, hardware: Hardware) -> Plan:
    """Count models and memory.

    Raises:
        OppoError: a name that is none, or a device that the hardware has not.
    """
    layout = make_layout(hardware, train.overlap.scorer_device)
    algorithm = create_algorithm(train.algo, train.algo_config)
    models = count_models(train, algorithm)
    work = make_work(train, algorithm, context_tokens(known_config(train.model, "policy")[0]))
    devices = plan_memory(train, models, work, layout, hardware)
    return Plan(train, hardware, algorithm, models, work, layout, devices)


def in_one_process(plan: Plan) -> DeviceMemory:
    """The memory of the first device when it trains and generates alone, and the others but the scorers' are idle."""
    alone = replace(plan.layout, num_training=1)
    return plan_memory(plan.train, plan.models, plan.work, alone, plan.hardware)[0]


def changes_that_fit(plan: Plan) -> list[str] | None:
    """Settings, one on top of the other, with which the plan fits; None: none that is known here suffices."""
    train, chosen = plan.train, []
    for change in _CHANGES:
        setting = change.format(last=plan.hardware.num_devices - 1)
        if not _is_open(train, plan.hardware, setting):
            continue
        values = apply_overrides(train.model_dump(), [setting])
        train = parse_config(TrainConfig, values, source="dry run")
        chosen.append(setting)
        if make_plan(train, plan.hardware).fits:
            return chosen
    return None


def _is_open(train: TrainConfig, hardware: Hardware, setting: str) -> bool:
    """Whether a change would be one, and may help on this hardware."""
    key = setting.partition("=")[0]
    return {
        "dtype": train.dtype != "bfloat16" and hardware.kind == "cuda",
        "learner.micro_batch_tokens": train.learner.micro_batch_tokens > 2048,
        "overlap.scorer_device": train.overlap.scorer_device is None and hardware.num_devices > 1,
        "actor_lora": train.actor_lora is None,
    }[key]
