"""Settings of a training run: frozen, unknown keys refused, one line and the usual range a field.

Names follow TRL where TRL has the thing. Knows no task, alias or file layout of the harness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oppo_kit.errors import ConfigError, did_you_mean


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OverlapConfig(_Frozen):
    """How the stages of a step overlap."""

    schedule: Literal["sequential", "oppo"] = Field(
        default="oppo", description="sequential waits for all B; oppo trains the first B of B + delta"
    )
    delta: int = Field(
        default=0, ge=0, description="Δ, groups held beyond B, at most; 0 to B/2, at most B × max_age"
    )
    delta_control: Literal["fixed", "paper", "robust"] = Field(
        default="robust",
        description="Δ below delta: fixed keeps it; robust lowers it when the reward falls or stops rising; paper "
        "follows the sign of the reward's change over a window",
    )
    max_age: int = Field(
        default=2, ge=0, description="versions a group may wait before its step waits for it; 1 to 4"
    )
    decode_tokens: int = Field(
        default=8, ge=1, description="tokens per response between two looks at it; 8 to 64"
    )
    score_at: Literal["batch", "sample", "chunk", "auto"] = Field(
        default="batch",
        description="score when the batch is chosen, each response as it ends, chunk by chunk while it is decoded, or "
        "whichever is measured to be fastest, which takes 12 to some 70 steps",
    )
    chunk_tokens: int = Field(
        default=32,
        ge=1,
        description="tokens of a response between two feeds to the scorers, rounded up to whole decode calls; 8 to 512",
    )
    chunk_candidates: tuple[int, ...] = Field(
        default=(32, 128),
        min_length=1,
        description="chunk sizes that score_at auto tries, beside batch and sample: each for three steps, and again, "
        "up to four times, until one is known to be the fastest",
    )
    chunk_control: Literal["paper", "robust"] = Field(
        default="robust",
        description="how score_at auto chooses: paper tries each once every 50 steps; robust repeats and eliminates",
    )
    placement: Literal["auto", "inline", "thread", "process"] = Field(
        default="auto",
        description="where reward model and reference run: in the engine's thread, where nothing overlaps, in a thread "
        "of their own, or in a process; auto: inline with score_at batch, else a process on a CPU, a thread on a GPU",
    )
    scorer_threads: int = Field(
        default=1,
        ge=1,
        description="CPU threads of scorers beside the actor; while it waits for them they have all",
    )
    decode_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of decoding by backend hf while scorers work beside it; null: what they leave",
    )
    scorer_cores: tuple[int, ...] | None = Field(
        default=None, min_length=1, description="CPU cores that a scoring process is pinned to; null: all"
    )
    scorer_device: str | None = Field(
        default=None, description="device of reward model and reference, as cuda:1; null: the policy's"
    )
    stream_critic: bool = Field(
        default=False,
        description="with score_at chunk, feed the critic too; inline or in a thread, since it is trained here",
    )
    carried_cache: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="keys and values of carried responses at an update; keep saves their prefill, and what follows "
        "is then sampled from no single policy",
    )

    @model_validator(mode="after")
    def _sequential_has_no_delta(self) -> OverlapConfig:
        if self.schedule == "sequential" and self.delta:
            raise ValueError(
                f"schedule 'sequential' holds exactly B groups, but delta is {self.delta}; use schedule 'oppo'"
            )
        return self

    @model_validator(mode="after")
    def _streaming_fits(self) -> OverlapConfig:
        if any(tokens < 1 for tokens in self.chunk_candidates):
            raise ValueError(f"chunk_candidates={list(self.chunk_candidates)} must all be at least 1")
        if self.scorer_cores is not None and self.placement not in ("auto", "process"):
            raise ValueError(
                f"scorer_cores pins a process, but placement is {self.placement!r}; set placement to 'process'"
            )
        if self.stream_critic and self.score_at not in ("chunk", "auto"):
            raise ValueError(
                f"stream_critic feeds chunks, but score_at is {self.score_at!r}; set score_at to 'chunk' or 'auto'"
            )
        if self.stream_critic and (self.placement == "process" or self.scorer_cores is not None):
            raise ValueError(
                "stream_critic reads the critic under training, which a process cannot; set placement to 'thread'"
            )
        return self


class SamplingConfig(_Frozen):
    """How responses are sampled."""

    temperature: float = Field(
        default=0.7, ge=0.01, description="policy, reference and KL all use it; 0.6 to 1.2"
    )
    response_length: int = Field(
        default=53, ge=1, description="token limit of a response, over all steps it takes"
    )
    stop_token_ids: tuple[int, ...] | None = Field(
        default=None, description="tokens that end a response; null: the tokenizer's and the model's EOS"
    )
    top_k: int = Field(default=0, ge=0, description="draw from the k most probable tokens only; 0: all")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="draw from the fewest tokens whose mass reaches p; 1: all"
    )
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="draw from tokens p times as probable as the best; 0: all"
    )
    batch_invariant: bool = Field(
        default=False,
        description="float32 on a CPU with one thread: tokens equal to the bit whatever is decoded beside them; slower",
    )

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be drawn, so that the policy that samples is not the one that is trained."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class LearnerConfig(_Frozen):
    """How weights are updated."""

    learning_rate: float = Field(default=3e-6, gt=0, description="1e-6 to 1e-5 for billions of parameters")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW")
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="clip of the global gradient norm; null: none"
    )
    lr_scheduler_type: Literal["linear", "constant", "cosine"] = Field(
        default="linear", description="decay to 0, or none"
    )
    warmup_steps: int = Field(default=0, ge=0, description="engine steps of linear warm-up")
    micro_batch_tokens: int = Field(
        default=8192, ge=1, description="padded tokens per forward pass; what memory allows"
    )

    @property
    def scheduler_name(self) -> str:
        """The name under which transformers keeps this schedule; its ``constant`` would pass over a warm-up."""
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            return "constant_with_warmup"
        return self.lr_scheduler_type


class LoraSettings(_Frozen):
    """Low-rank adapters on the policy, by PEFT."""

    r: int = Field(default=16, ge=1, description="rank; 8 to 64")
    lora_alpha: int = Field(default=32, ge=1, description="scale; about twice the rank")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="keep 0: dropout makes the ratio noisy")
    target_modules: str | list[str] = Field(default="all-linear", description="as PEFT's")


# vLLM refuses requests above it.
_VLLM_MAX_TEMPERATURE = 2.0


class VLLMConfig(_Frozen):
    """The engine of backend vllm."""

    kv_cache_gib: float = Field(
        default=2.0,
        gt=0,
        description="memory for the keys and values of all responses in flight; what does not fit waits, or is "
        "computed again; 1 to 40",
    )


class TrainConfig(_Frozen):
    """One training run."""

    algo: str = Field(default="ppo", description="name of a registered algorithm")
    algo_config: dict[str, Any] = Field(default_factory=dict, description="the algorithm's own settings")
    model: str = Field(default="tiny", description="alias, hub id or folder of the policy")
    reward: str | None = Field(
        default=None,
        description="alias, hub id or folder of a reward model, or module:function; null: the task's own",
    )
    reward_input: Literal["auto", "ids", "text"] = Field(
        default="auto",
        description="what a reward model reads: the policy's token ids, or the text; auto: ids where both have one "
        "vocabulary",
    )
    reward_call_per: Literal["response", "group", "batch"] = Field(
        default="response",
        description="what one call of a reward function holds: each response when it ends, in several threads; all of "
        "a group; or the batch, for functions that compare responses",
    )
    reward_threads: int = Field(
        default=32,
        ge=1,
        description="calls of reward functions at once; as many as judges or sandboxes serve",
    )
    critic: str | None = Field(
        default=None,
        description="model the critic starts from; null: the reward model where it has the policy's "
        "vocabulary, else the policy",
    )
    task: str = Field(
        default="tiny",
        description="tiny, reviews, free_form, math or code; the harness takes the model's own when none is named",
    )
    dataset: str | None = Field(
        default=None, description="hub id, JSONL or parquet file instead of the task's prompts"
    )
    prompt_column: str = Field(default="prompt", description="column of the prompt: text or messages")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="weights of all models")
    backend: Literal["hf", "vllm"] = Field(
        default="hf",
        description="what samples responses: transformers with our own cache, or vLLM (extra vllm), in this process",
    )
    actor_lora: LoraSettings | None = Field(default=None, description="train adapters instead of all weights")
    batch_size: int = Field(default=64, ge=1, description="B, groups per step")
    num_steps: int = Field(default=100, ge=1, description="engine steps; steps × B prompts are drawn")
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, description="null: context less response_length"
    )
    long_prompts: Literal["refuse", "truncate", "drop"] = Field(
        default="refuse", description="what to do with longer ones; truncate keeps the end"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="prompts, noise, initialisation, mini-batches")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    overlap: OverlapConfig = Field(default_factory=OverlapConfig)
    vllm: VLLMConfig = Field(default_factory=VLLMConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)

    @model_validator(mode="after")
    def _delta_fits(self) -> TrainConfig:
        limit = self.batch_size * self.overlap.max_age
        if self.overlap.delta > limit:
            raise ValueError(
                f"overlap.delta={self.overlap.delta} exceeds batch_size × max_age = {limit}, so more than B groups "
                f"could be due at once; lower delta, or raise overlap.max_age"
            )
        return self

    @model_validator(mode="after")
    def _backend_fits(self) -> TrainConfig:
        if self.backend != "vllm":
            return self
        if self.sampling.is_truncated:
            raise ValueError(
                "backend 'vllm' draws from the full distribution only, since its log-probs must be those of the policy "
                "that is trained; leave sampling.top_k, top_p and min_p at 0, 1 and 0, or use backend 'hf'"
            )
        if self.sampling.temperature > _VLLM_MAX_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature={self.sampling.temperature:g} is above {_VLLM_MAX_TEMPERATURE:g}, the highest "
                "of backend 'vllm'; lower it, or use backend 'hf'"
            )
        if self.sampling.batch_invariant:
            raise ValueError(
                "backend 'vllm' cannot be batch_invariant: its log-probs depend in the last digits on what is decoded "
                "beside a response; switch sampling.batch_invariant off, or use backend 'hf'"
            )
        return self


ConfigT = TypeVar("ConfigT", bound=BaseModel)


def parse_config(
    config_class: type[ConfigT], values: Mapping[str, Any], *, source: str = "config"
) -> ConfigT:
    """Validate a mapping.

    Raises:
        ConfigError: naming the key, the value, what is allowed and, for an unknown key, the nearest names.
    """
    try:
        return config_class.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(
            f"{source}: " + "; ".join(_explain(config_class, item) for item in error.errors())
        ) from error


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``a.b=value`` on top of nested mappings; the value is read as YAML.

    Raises:
        ConfigError: an override without ``=``, or one that enters something that is no mapping.
    """
    merged = _deep_copy(values)
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path.strip():
            raise ConfigError(f"--set {override!r} is not of the form a.b=value, for example overlap.delta=8")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--set {override!r}: the value is not valid YAML; quote it: a.b='text'"
            ) from error
        *parents, leaf = path.strip().split(".")
        node = merged
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"--set {override!r}: {parent!r} is a single value, not a section")
        node[leaf] = value
    return merged


def _deep_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep_copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _explain(config_class: type[BaseModel], item: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _fields_at(config_class, item["loc"][:-1])
        return f"unknown key {path!r}; {did_you_mean(str(item['loc'][-1]), known)}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{path} = {item['input']!r}: {message}" if path else message


def _fields_at(config_class: type[BaseModel], path: Sequence[Any]) -> list[str]:
    current: Any = config_class
    for part in path:
        annotation = current.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        current = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if current is None:
            return []
    return [field.alias or name for name, field in current.model_fields.items()]
