"""vLLM's engine in this process: requests of token ids go in, sampled tokens with log-probs come out, step by step.

The only file that imports vLLM. It knows no rollout, no version and no learner; ``vllm_generator`` translates.
"""

from __future__ import annotations

import copy
import os
import random
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo_kit.errors import MissingExtraError, ModelError, PartFailedError

# What an engine step may prefill, at least; a longer context raises it, since no prompt is prefilled in parts.
_PREFILL_TOKENS = 8192
# A generator tries a fresh engine out on so few tokens.
_MIN_TOKENS = 16
# vLLM asks for this share of the memory to be free when it starts, beside models under training; what it takes is its
# weights and ``kv_cache_gib``.
_MEMORY_FRAC = 0.01
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Or all threads of this process are bound to cores, those of training and scoring too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Its warnings are about choices that are made here on purpose.
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# What vLLM raises about models and memory; some of it is pydantic's, which is a ValueError.
_REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError, KeyError, OSError)


class SampledTokens(NamedTuple):
    """What one engine step added to one request.

    Attributes:
        request_id: which.
        token_ids: one token, on today's engines.
        logprobs: natural log-probs over the full vocabulary at the request's temperature.
        is_finished: by a stop token or its limit; the engine has forgotten the request.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    is_finished: bool


def require_vllm() -> None:
    """Say early what is missing.

    Raises:
        MissingExtraError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise MissingExtraError("vllm", "vllm")


class VLLMEngine:
    """vLLM on this process's device, with random weights until ``load_weights``.

    Much of vLLM's state belongs to the process, so that a process has one engine: starting another one closes it.

    Args:
        model: a transformers decoder whose configuration and dtype it takes; the weights are not read.
        max_tokens: of a prompt and its response together.
        max_requests: decoded at once; more wait.
        kv_cache_gib: memory for keys and values; what does not fit waits, or is computed again.
        has_prefix_cache: requests with a common beginning share its keys and values.

    Raises:
        MissingExtraError: vLLM is not installed.
        ModelError: it cannot serve this model, or not in this memory.
    """

    _current: VLLMEngine | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_tokens: int,
        max_requests: int,
        kv_cache_gib: float,
        has_prefix_cache: bool = True,
    ) -> None:
        require_vllm()
        if VLLMEngine._current is not None:
            VLLMEngine._current.close()
        self.max_tokens = max(max_tokens, _MIN_TOKENS)
        self.max_requests = max_requests
        self.has_prefix_cache = has_prefix_cache
        arguments = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": self.max_tokens,
            "max_num_seqs": max_requests,
            "kv_cache_memory_bytes": int(kv_cache_gib * 2**30),
            "gpu_memory_utilization": _MEMORY_FRAC,
            "enable_prefix_caching": has_prefix_cache,
            # Each part of a prompt would draw from the request's noise; on a CPU vLLM fails at it.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_PREFILL_TOKENS, self.max_tokens),
            # Tokens come back by the step that sampled them, so that none is of earlier weights than is said.
            "async_scheduling": False,
            "logprobs_mode": "processed_logprobs",
            "enforce_eager": not torch.cuda.is_available(),
            "disable_log_stats": True,
        }
        self._engine: Any = None
        self._requests: set[str] = set()
        try:
            with _process_as_it_was(), _saved_config(model) as folder:
                self._engine = _start(folder, arguments)
        except _REFUSALS as error:
            raise ModelError(
                f"vLLM cannot serve {type(model).__name__} for {max_requests} responses of up to {self.max_tokens} "
                f"tokens: {_cause(error)}; set vllm.kv_cache_gib ({kv_cache_gib:g}) or max_prompt_tokens if it is "
                "about memory, else use backend 'hf'"
            ) from error
        VLLMEngine._current = self

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        """Take a request; nothing is computed before ``step``.

        Args:
            request_id: of no other request.
            token_ids: its context, at least one token.
            max_new_tokens: its limit, at least one.
            temperature: > 0; nothing else shapes the distribution.
            stop_token_ids: a sampled one ends it; EOS only if it is among them.
            seed: of its noise, in 0 .. 2⁶³-1.
        """
        import vllm  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        self._requests.add(request_id)
        self._running().add_request(
            request_id,
            {"prompt_token_ids": list(token_ids)},
            vllm.SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=max_new_tokens,
                stop_token_ids=list(stop_token_ids),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; the unknown are ignored."""
        known = self._requests.intersection(request_ids)
        if known:
            self._running().abort_request(sorted(known))
        self._requests -= known

    def abort_all(self) -> None:
        """Forget all requests."""
        self.abort(self._requests)

    def step(self) -> list[SampledTokens]:
        """One token of every request that has room, prefilled before where it is new; empty if none has."""
        sampled = []
        for output in self._running().step():
            [completion] = output.outputs
            if not completion.token_ids:
                continue
            tokens = list(completion.token_ids)
            logprobs = [
                entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)
            ]
            sampled.append(SampledTokens(output.request_id, tokens, logprobs, output.finished))
            if output.finished:
                self._requests.discard(output.request_id)
        return sampled

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, by the names of a checkpoint; the cache is left as it is.

        A tied output head must be among them under its own name: on a CPU vLLM keeps a copy of it.
        """
        with torch.no_grad():
            self._running().collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(weights), "is_checkpoint_format": True}
            )

    def reset_cache(self) -> None:
        """Forget all keys and values; what is in flight is prefilled again, with its tokens, at the next step."""
        self._running().reset_prefix_cache(reset_running_requests=True)

    def wipe(self) -> None:
        """Forget all requests, and overwrite all keys and values: a NaN would reach whoever gets its block next."""
        self.abort_all()
        self._running().collective_rpc(_zero_cache)
        self.reset_cache()

    @property
    def is_closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._engine is None

    def close(self) -> None:
        """Free what it holds; safe to call twice."""
        engine, self._engine = self._engine, None
        if VLLMEngine._current is self:
            VLLMEngine._current = None
        if engine is not None:
            engine.engine_core.shutdown()

    def _running(self) -> Any:
        if self._engine is None:
            raise PartFailedError(
                "this vLLM engine was closed, by close() or by starting another one in the same process, which has "
                "room for one; build its generator anew"
            )
        return self._engine


def _start(folder: str, arguments: dict[str, Any]) -> Any:
    from vllm import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    return LLMEngine.from_engine_args(EngineArgs(model=folder, **arguments))


def _zero_cache(worker: Any) -> None:
    for layer in worker.model_runner.kv_caches:
        for tensor in layer if isinstance(layer, list | tuple) else [layer]:
            tensor.zero_()


@contextmanager
def _saved_config(model: PreTrainedModel) -> Iterator[str]:
    """A folder with the model's configuration, which must name its class."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory(prefix="oppo-kit-vllm-") as folder:
        config.save_pretrained(folder)
        yield folder


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Start vLLM in here: it seeds all random generators, replaces ``torch.set_num_threads`` and writes variables that
    child processes would inherit."""
    environment = dict(os.environ)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    random_state, numpy_state = random.getstate(), np.random.get_state()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(random_state)
        np.random.set_state(numpy_state)


def _cause(error: BaseException) -> str:
    """The first line that says something, shortened: vLLM lists all models that it knows."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and " validation error" not in line] or [type(error).__name__]
    return textwrap.shorten(lines[0].removeprefix("Value error, "), 240, placeholder=" …").rstrip(".")
