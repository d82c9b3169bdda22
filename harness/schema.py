"""The results file: everything a run measured, typed, with raw samples; all statistics are derived from it.

Knows nothing of how anything was measured. ``None`` means absent, with its reason beside it; never 0.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.cores import Placement
from oppo_kit.errors import StateError

SCHEMA_VERSION = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Environment(_Strict):
    """Where a result was measured."""

    commit: str | None = Field(description="git commit of the checkout; None outside one")
    is_dirty: bool | None = Field(description="uncommitted changes; None outside a checkout")
    python: str
    platform: str
    cpu: str
    num_cpu_cores: int
    memory_bytes: int
    gpus: list[str] = Field(default_factory=list, description="names; empty without NVML")
    packages: dict[str, str] = Field(description="versions of torch, transformers, trl, accelerate, …")


class Workload(_Strict):
    """What every runner of this result did: the same work."""

    task: str
    algorithm: str
    model: str
    reward: str
    critic: str | None = None
    backend: str = "hf"
    placement: Placement = "shared"
    batch_size: int = Field(description="B, groups per step")
    group_size: int = 1
    num_steps: int
    num_warmup_steps: int = Field(description="first steps left out of every ratio")
    response_length: int
    temperature: float
    dtype: str
    num_eval_problems: int
    eval_sha256: str = Field(description="hash of the held-out prompts")
    config: dict[str, object] = Field(description="the whole training configuration")
    fault: str | None = Field(
        default=None, description="put into our runners on purpose; None: as they should be"
    )


class Step(_Strict):
    """One optimisation step of one run. Seconds are wall time; tokens are response tokens."""

    step: int
    step_s: float
    generate_s: float
    score_s: float
    train_s: float
    sync_s: float = 0.0
    engine_s: float = Field(default=0.0, description="what no part accounts for: the loop's own time")
    tokens_decoded: int
    tokens_trained: int
    responses_trained: int
    reward_mean: float | None = Field(description="mean raw score of the trained batch")
    kl: float | None = Field(
        description="mean sequence sum of log(policy / reference), behaviour against reference"
    )
    score_busy_s: float = Field(
        default=0.0, description="seconds that scorers worked, beside the actor or while it waited (score_s)"
    )
    tokens_prefetched: int = Field(
        default=0, description="tokens that scorers read before their response had ended; none is read twice"
    )
    tokens_scored: int = Field(
        default=0, description="tokens that scorers read after their response had ended"
    )
    delta: int
    score_at: str = Field(default="batch", description="batch, sample or chunk, as this step used it")
    chunk_tokens: int = Field(description="tokens between two feeds to the scorers; 0: none")
    age_mean: float = 0.0
    age_max: int = 0
    num_deferred: int = Field(
        default=0, description="trained groups that were carried over at least one update"
    )
    drawn: int
    trained: int
    in_flight: int
    queued: int
    rejected: dict[str, int] = Field(default_factory=dict)
    trained_lengths: list[int] = Field(description="response lengths, one per trained response")
    metrics: dict[str, float | None] = Field(
        default_factory=dict, description="the algorithm's numbers; None where one was not finite"
    )


class Evaluation(_Strict):
    """The fixed held-out set, without overcommit, after ``step`` steps (0: before training)."""

    step: int
    elapsed_train_s: float = Field(description="training wall time so far, evaluation excluded")
    responses_trained: int
    accuracy: float | None = Field(description="share right by the true checker; None if the task has none")
    score_mean: float | None = Field(description="mean score by the training reward")
    length_mean: float
    eval_s: float
    policy_sha256: str | None = Field(
        default=None,
        description="of the parameters, before training only: a run that starts from the same ones repeats this "
        "evaluation instead of making it again",
    )


class TimelineSpan(_Strict):
    """What one part did between two moments of one step."""

    step: int
    lane: str = Field(description="actor, or where the scorers are")
    name: str = Field(description="a stage of the step, or feed or score and the scorer's name")
    start_s: float = Field(description="seconds since the step's first span")
    stop_s: float
    num_tokens: int = 0


class UtilisationSeries(_Strict):
    """One sampled quantity. ``values`` may hold None where single samples were missing."""

    name: str = Field(
        description="for example gpu0/utilisation_frac, cpu/utilisation_frac, process/rss_bytes"
    )
    unit: str
    times_s: list[float] = Field(description="seconds since the run began")
    values: list[float | None]
    absent_reason: str | None = None


class Run(_Strict):
    """One runner, one seed, one process."""

    seed: int
    pair: int = Field(
        description="runs of different runners with the same pair stood next to each other in time"
    )
    num_threads: int
    started_at: str
    total_train_s: float = Field(
        description="whole run, warm-up included, evaluation excluded, drain included"
    )
    setup_s: float = Field(description="loading of models and data")
    peak_rss_bytes: int | None
    steps: list[Step]
    evaluations: list[Evaluation]
    utilisation: list[UtilisationSeries] = Field(default_factory=list)
    timeline: list[TimelineSpan] = Field(
        default_factory=list, description="one step in the middle of the run"
    )


class Runner(_Strict):
    """All runs of one runner."""

    name: str
    description: str
    calibration_step_s: dict[str, list[float]] = Field(
        default_factory=dict, description="measured step seconds by thread count; the fastest was taken"
    )
    runs: list[Run]


class Ratio(_Strict):
    """How many times more time the first takes than the second; median and range over pairs."""

    median: float
    low: float
    high: float
    pairs: list[float]


class Difference(_Strict):
    """Mean paired difference (first less second) with a two-sided 90 % interval (Student's t)."""

    mean: float
    low: float | None = Field(description="None with fewer than two pairs")
    high: float | None
    pairs: list[float]


class Bound(_Strict):
    """A lower bound on the step time of a runner, and the share of it that was reached."""

    decode_s_per_token: float
    score_s_per_token: float
    train_s_per_token: float
    step_s: dict[str, float] = Field(description="by runner: tokens × best cost, summed over the stages")
    share_reached: dict[str, float] = Field(description="by runner: bound / median measured step time")


class Result(_Strict):
    """One benchmark: what ran, on what, with every raw sample, and the figures derived from them."""

    schema_version: int = SCHEMA_VERSION
    name: str
    command: str
    is_quick: bool = Field(description="a smoke run; its figures are never quoted")
    environment: Environment
    workload: Workload
    runners: dict[str, Runner]
    ratios: dict[str, Ratio] = Field(default_factory=dict)
    ratios_steady: dict[str, Ratio] = Field(default_factory=dict)
    time_to_reward_s: dict[str, float | None] = Field(
        default_factory=dict, description="by runner: training seconds to 90 % of the baseline's final gain"
    )
    learning_differences: dict[str, Difference] = Field(
        default_factory=dict, description="final held-out accuracy, for example overcommit-trl"
    )
    bound: Bound | None = None


def load_result(path: Path) -> Result:
    """Read a results file.

    Raises:
        StateError: it is missing, truncated, of another schema version, or a field does not fit.
    """
    file = path / "result.json" if path.is_dir() else path
    if path.is_dir() and not file.exists() and (path / "steps.jsonl").exists():
        raise StateError(
            f"{path} is the folder of a training run, whose steps are in {path / 'steps.jsonl'}; reports are made of "
            "what `oppo-kit bench` writes"
        )
    if path.is_dir() and not file.exists():
        raise StateError(
            f"{path} has no result.json: a benchmark that did not end, or no benchmark; pass the folder that "
            "`oppo-kit bench --out` names"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise StateError(
            f"cannot read results from {file}: {reason}; pass a run folder or result.json"
        ) from error
    _check_version(text, file)
    try:
        return Result.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StateError(
            f"{file} does not fit schema version {SCHEMA_VERSION}: {where}: {first['msg']}; "
            "re-run the benchmark, or read it with the release that wrote it"
        ) from error


def _check_version(text: str, file: Path) -> None:
    """Refuse another schema before its fields are looked at; text that is no JSON is the validation's to report."""
    try:
        values = json.loads(text)
    except ValueError:
        return
    found = values.get("schema_version") if isinstance(values, dict) else None
    if found != SCHEMA_VERSION:
        raise StateError(
            f"{file} has schema_version {found!r}, this release reads {SCHEMA_VERSION}; "
            "read it with the release that wrote it, or run the benchmark again"
        )
