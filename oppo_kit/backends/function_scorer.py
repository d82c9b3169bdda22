"""Rewards that are Python functions, with the signature that TRL gives them.

``function(prompts=[…], completions=[…], completion_ids=[…], **columns)`` returns one number per row, or None
to abstain. For text prompts a completion is text, for conversations it is a list of one assistant message.
Special tokens are no part of it, so ``is_stopped``, one list more than TRL's, says how a response ended.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from oppo_kit.errors import ConfigError, PartFailedError, RewardError, did_you_mean
from oppo_kit.protocols import CallPer
from oppo_kit.types import Rollout, Score

RewardFunction = Callable[..., Any]

# Names that the call itself gives; a column of the same name is not handed over.
_GIVEN = frozenset({"prompts", "prompt", "completions", "completion", "completion_ids", "is_stopped"})


class FunctionScorer:
    """Weighted sum of reward functions; a row on which all abstain has no score. A ``Scorer``."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        tokenizer: PreTrainedTokenizerBase,
        weights: Sequence[float] | None = None,
        name: str = "reward",
        *,
        prompt_column: str = "prompt",
        call_per: CallPer = "response",
    ) -> None:
        """See the module for the signature.

        Args:
            functions: at least one; ``async`` ones run on an event loop of their own.
            tokenizer: the policy's, to decode responses.
            weights: one per function; None: all 1.
            name: of the score.
            prompt_column: the column of ``Prompt.columns`` that holds the prompt as the data set gave it.
            call_per: what one call of a function holds. ``response``: one response, as soon as it has ended; several
                calls run at once, in threads of their own. ``group``: all responses to one draw of a prompt, for
                rewards that compare them. ``batch``: the responses of a step's B groups, for rewards that are
                normalised over them; they are asked anew when one of the groups is rejected and replaced.

        Raises:
            ConfigError: no function, another number of weights, or another word for ``call_per``.
        """
        if not functions:
            raise ConfigError("a function reward needs at least one function; pass one as module:function")
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(
                f"{len(weights)} reward weights for {len(functions)} functions "
                f"({', '.join(map(name_of, functions))}); give one weight each, or none"
            )
        if call_per not in get_args(CallPer):
            raise ConfigError(f"call_per is {call_per!r}; {did_you_mean(str(call_per), get_args(CallPer))}")
        self.name = name
        self.call_per: CallPer = call_per
        self._functions = list(functions)
        self._weights = [1.0] * len(functions) if weights is None else list(weights)
        self._tokenizer = tokenizer
        self._prompt_column = prompt_column

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        """One number per rollout, NaN and infinities included; None where every function abstains.

        Raises:
            PartFailedError: a function raised or called ``sys.exit``.
            RewardError: a function returned another number of results, or something that is no number, or raised it.
        """
        if not rollouts:
            return []
        arguments = self._arguments(rollouts)
        totals: list[float | None] = [None] * len(rollouts)
        for function, weight in zip(self._functions, self._weights, strict=True):
            for row, value in enumerate(_call(function, arguments, rollouts)):
                if value is not None:
                    totals[row] = (totals[row] or 0.0) + weight * value
        return list(totals)

    def _arguments(self, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
        prompts = [self._prompt_of(rollout) for rollout in rollouts]
        texts = [self._tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in rollouts]
        names = dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.columns)
        columns = {
            name: [r.prompt.columns.get(name) for r in rollouts] for name in names if name not in _GIVEN
        }
        return {
            **columns,
            "prompts": prompts,
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(prompts, texts, strict=True)
            ],
            "completion_ids": [list(rollout.token_ids) for rollout in rollouts],
            "is_stopped": [rollout.finish_reason == "stop" for rollout in rollouts],
        }

    def _prompt_of(self, rollout: Rollout) -> Any:
        if self._prompt_column in rollout.prompt.columns:
            return rollout.prompt.columns[self._prompt_column]
        return self._tokenizer.decode(list(rollout.prompt.token_ids), skip_special_tokens=True)


def name_of(function: RewardFunction) -> str:
    """Name of a function, of the function inside a ``functools.partial``, or of a callable object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", None) or type(function).__name__)


def load_reward_function(reference: str) -> RewardFunction:
    """The function named ``module:function``; modules of the current directory can be named.

    Raises:
        ConfigError: another form, a module that is not there or fails, or an attribute that is no function.
    """
    module_name, separator, attribute = reference.partition(":")
    if not (separator and module_name and attribute):
        raise ConfigError(
            f"reward function {reference!r} is not of the form module:function, for example rewards:brevity"
        )
    module = _import(module_name, reference)
    function = getattr(module, attribute, None)
    if function is None:
        functions = [
            name for name, value in vars(module).items() if callable(value) and not name.startswith("_")
        ]
        raise ConfigError(
            f"module {module_name!r} has no {attribute!r}; {did_you_mean(attribute, functions)}"
        )
    if not callable(function):
        raise ConfigError(
            f"reward {reference!r} is a {type(function).__name__}, not a function; name one that takes "
            "prompts, completions and **columns"
        )
    return function


def _import(module_name: str, reference: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:  # a console script, unlike `python -m`, does not have it
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            nearby = [path.stem for path in Path(here).glob("*.py")]
            raise ConfigError(
                f"reward {reference!r}: no module {error.name!r}; in {here}: "
                f"{did_you_mean(error.name, nearby)}"
            ) from error
        raise ConfigError(
            f"reward {reference!r}: importing {module_name!r} needs {error.name!r}, which is missing"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward {reference!r}: importing {module_name!r} failed: {error!r}") from error


def _call(
    function: RewardFunction, arguments: dict[str, list[Any]], rollouts: Sequence[Rollout]
) -> list[float | None]:
    name = name_of(function)
    draw_ids = ", ".join(str(rollout.key.draw_id) for rollout in rollouts)
    own = {key: [_own(value) for value in values] for key, values in arguments.items()}
    try:
        results = function(**own)
        if inspect.isawaitable(results):
            results = _run(results)
    except RewardError:  # of a function that checks whom it asks, such as that of a judge
        raise
    except BaseException as error:
        # An exit would end the training as if it were complete; an interrupt is the user's in the main thread only.
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        words, place = _told(error)
        raise PartFailedError(
            f"reward function {name!r} raised {words} on draws {draw_ids}{place}"
        ) from error
    if hasattr(results, "tolist"):
        results = results.tolist()
    expected = (
        f"reward function {name!r} must return a list of {len(rollouts)} numbers or None, one per completion"
    )
    if not isinstance(results, list | tuple):
        raise RewardError(f"{expected}, not {type(results).__name__} ({results!r}); nothing is broadcast")
    if len(results) != len(rollouts):
        raise RewardError(f"{expected}, but returned {len(results)}; nothing is broadcast")
    return [_number(value, name, rollout) for value, rollout in zip(results, rollouts, strict=True)]


def _told(error: BaseException) -> tuple[str, str]:
    """What was raised, and the line that raised it."""
    try:
        words = repr(error)
    except Exception:
        words = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return words, f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _own(value: Any) -> Any:
    """What a function may change without changing the data set or what the next function sees."""
    return value if value is None or isinstance(value, str | int | float) else copy.deepcopy(value)


def _number(value: Any, name: str, rollout: Rollout) -> float | None:
    if value is None:
        return None
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except OverflowError as error:
            raise RewardError(
                f"reward function {name!r} returned a number too large for a float ({type(value).__name__}) for "
                f"draw {rollout.key.draw_id}; return one of ordinary size, or None to abstain"
            ) from error
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a complex tensor
            pass
    raise RewardError(
        f"reward function {name!r} returned {value!r} ({type(value).__name__}) for draw "
        f"{rollout.key.draw_id}; return a number, or None to abstain"
    )


async def _guarded(awaitable: Any) -> tuple[Any, BaseException | None]:
    """What it gives, or what it raised: an exit would end the event loop, and a cancellation is no Exception."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _run(awaitable: Any) -> Any:
    result, error = asyncio.run_coroutine_threadsafe(_guarded(awaitable), _event_loop()).result()
    if error is not None:
        raise error
    return result


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all calls, so that what a function keeps between them, such as a client's session, stays usable."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="oppo-async-rewards", daemon=True).start()
    return loop
