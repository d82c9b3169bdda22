"""The results file of the check: raw steps and samples, and the few figures derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.schema import Environment, Step, UtilisationSeries

SCHEMA_VERSION = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class UtilisationSummary(_Strict):
    """One sampled quantity over the measured steps."""

    name: str
    unit: str
    mean: float | None
    maximum: float | None
    energy_joules: float | None
    num_samples: int
    absent_reason: str | None = None


class Figures(_Strict):
    """Derived from the steps after the warm-up."""

    num_steps: int
    step_s: float = Field(description="mean wall seconds of a step")
    step_s_range: tuple[float, float] = Field(description="fastest and slowest step")
    generate_s: float = Field(description="mean; of a step")
    score_s: float
    train_s: float
    decoded_tokens_per_s: float = Field(description="all response tokens sampled in the measured steps")
    trained_tokens_per_s: float = Field(description="response tokens of the trained responses")
    responses_per_s: float = Field(description="trained responses")


class CheckRun(_Strict):
    """One runner on one model, in a process of its own."""

    model: str
    runner: str
    status: Literal["measured", "failed", "missing"] = Field(
        description="failed: it broke; missing: too little time for two measured steps"
    )
    reason: str = Field(description="why it ended, or why there is nothing; with the end of a failed log")
    share_s: float | None = Field(
        default=None, description="time it was given, from the start of its process"
    )
    wall_s: float | None = Field(default=None, description="time that its process took")
    setup_s: float | None = Field(default=None, description="imports, and one making of the policy")
    policy_sum: float | None = Field(
        default=None, description="sum of the policy's weights before training, equal for all runners"
    )
    peak_allocated_bytes: int | None = Field(default=None, description="PyTorch's tensors; None on a CPU")
    peak_reserved_bytes: int | None = Field(default=None, description="held by PyTorch's allocator")
    steps: list[Step] = Field(default_factory=list, description="all of them, the warm-up first")
    figures: Figures | None = Field(default=None, description="None without two measured steps")
    utilisation: list[UtilisationSummary] = Field(default_factory=list)
    samples: list[UtilisationSeries] = Field(
        default_factory=list, description="GPU samples, seconds since the start of the process"
    )


class CheckedModel(_Strict):
    """One policy, and what it was run with."""

    name: str
    title: str
    is_lora: bool
    policy: dict[str, object] = Field(description="the embedded configuration")
    critic: dict[str, object] = Field(description="of critic and reward model")
    num_parameters: int
    estimated_peak_bytes: dict[str, int] = Field(description="by runner")
    config: dict[str, object] = Field(description="the training configuration of all runners")


class CheckResult(_Strict):
    """What one ``make gpu-check`` found."""

    schema_version: int = SCHEMA_VERSION
    size: Literal["small", "full"]
    command: str
    started_at: str
    budget_s: float
    wall_s: float
    num_warmup_steps: int = Field(description="first steps of every run that no figure holds")
    response_lengths: dict[str, float] = Field(description="the log-normal that all runners are held to")
    environment: Environment
    bundle_commit: str | None = Field(
        default=None, description="commit at which the wheels were collected, for a copy without git"
    )
    models: list[CheckedModel]
    runs: list[CheckRun]


def figures_of(steps: Sequence[Step], num_warmup_steps: int) -> Figures | None:
    """Means over the measured steps; None without any."""
    measured = steps[num_warmup_steps:]
    total_s = sum(step.step_s for step in measured)
    if not measured or total_s <= 0:
        return None
    num_steps = len(measured)
    seconds = [step.step_s for step in measured]
    return Figures(
        num_steps=num_steps,
        step_s=total_s / num_steps,
        step_s_range=(min(seconds), max(seconds)),
        generate_s=sum(step.generate_s for step in measured) / num_steps,
        score_s=sum(step.score_s for step in measured) / num_steps,
        train_s=sum(step.train_s for step in measured) / num_steps,
        decoded_tokens_per_s=sum(step.tokens_decoded for step in measured) / total_s,
        trained_tokens_per_s=sum(step.tokens_trained for step in measured) / total_s,
        responses_per_s=sum(step.responses_trained for step in measured) / total_s,
    )
