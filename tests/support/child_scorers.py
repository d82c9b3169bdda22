"""Scorers that a scoring process can import. Those that wait do so at a named pipe, which the test opens or not."""

from __future__ import annotations

import builtins
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from oppo_kit import errors
from oppo_kit.types import Prompt, Rollout, RolloutKey


def ended(draw_id: int, num_tokens: int = 3, sample_index: int = 0) -> Rollout:
    return Rollout(
        RolloutKey(draw_id, sample_index), Prompt(draw_id, (1,), 4), [5] * num_tokens, finish_reason="stop"
    )


class Lengths:
    """The number of tokens; counts them, as a model does."""

    name = "lengths"

    def __init__(self) -> None:
        self.num_tokens_read = 0

    def score(self, rollouts: Any) -> list[Any]:
        self.num_tokens_read += sum(len(rollout.token_ids) for rollout in rollouts)
        return [float(len(rollout.token_ids)) if rollout.token_ids else None for rollout in rollouts]


class HeldBack(Lengths):
    """A child that loads it is not ready before somebody writes to the pipe ``release``."""

    def __init__(self, release: Path) -> None:
        super().__init__()
        self.release = release

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.release.read_bytes()


class Threads:
    name = "threads"

    def score(self, rollouts: Any) -> list[Any]:
        return [float(torch.get_num_threads())] * len(rollouts)


class Niceness:
    name = "niceness"

    def score(self, rollouts: Any) -> list[Any]:
        return [float(os.nice(0))] * len(rollouts)


class Cores:
    name = "cores"

    def score(self, rollouts: Any) -> list[Any]:
        return [[float(core) for core in sorted(os.sched_getaffinity(0))]] * len(rollouts)


class Raising:
    """Raises the exception that is named by its class: one of ours, or a builtin."""

    def __init__(self, error_name: str, *arguments: Any) -> None:
        self.name = f"raising {error_name}"
        self._error_name = error_name
        self._arguments = arguments

    def score(self, rollouts: Any) -> list[Any]:
        error_class = getattr(errors, self._error_name, None) or getattr(builtins, self._error_name)
        raise error_class(*self._arguments)


class OwnError(errors.RewardError):
    """Of a user."""


class RaisingOwn:
    name = "raising own"

    def score(self, rollouts: Any) -> list[Any]:
        raise OwnError("mine")


class Exiting:
    name = "exiting"

    def score(self, rollouts: Any) -> list[Any]:
        sys.exit(3)


class Short:
    name = "short"

    def score(self, rollouts: Any) -> list[Any]:
        return [1.0] * (len(rollouts) - 1)


class Words:
    name = "words"

    def score(self, rollouts: Any) -> list[Any]:
        return ["good"] * len(rollouts)


class Tensors:
    """Numbers of kinds that must not travel as they are."""

    name = "tensors"

    def score(self, rollouts: Any) -> list[Any]:
        return [torch.tensor(2.5), [torch.tensor(1.0), 2], 3][: len(rollouts)]


class Column:
    """Reads a tensor among the prompt's columns."""

    name = "column"

    def score(self, rollouts: Any) -> list[Any]:
        return [float(rollout.prompt.columns["numbers"].sum()) for rollout in rollouts]


class Big:
    """Holds a module of 32 MiB, and says what is in it."""

    name = "big"

    def __init__(self) -> None:
        self.module = torch.nn.Linear(8192, 1024, bias=False).requires_grad_(False)

    def score(self, rollouts: Any) -> list[Any]:
        return [float(self.module.weight.double().sum())] * len(rollouts)


class Streaming:
    """Remembers what it was fed; its score is the length of the last feed of a response, -1 without one."""

    name = "streaming"

    def __init__(self) -> None:
        self.fed: dict[RolloutKey, int] = {}

    def feed(self, rollouts: Any) -> None:
        self.fed.update((rollout.key, len(rollout.token_ids)) for rollout in rollouts)

    def forget(self, keys: Any) -> None:
        for key in list(self.fed) if keys is None else keys:
            self.fed.pop(key, None)

    def score(self, rollouts: Any) -> list[Any]:
        return [float(self.fed.pop(rollout.key, -1)) for rollout in rollouts]


class FailingFeed(Streaming):
    """``how``: ``raise`` or ``exit``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def feed(self, rollouts: Any) -> None:
        if self._how == "exit":
            sys.exit(0)
        raise ValueError("no appetite")


class FailingForget(Streaming):
    def forget(self, keys: Any) -> None:
        raise ValueError("I remember")


class Waiting(Streaming):
    """Says at a named pipe that it has begun, and then waits at another, for ever if nobody writes there."""

    name = "waiting"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.begun, self.release = folder / "begun", folder / "release"

    def score(self, rollouts: Any) -> list[Any]:
        self.begun.write_text("x")
        self.release.read_text()
        return [1.0] * len(rollouts)


class Announced:
    """Another scorer, whose feeds are announced at a named pipe when they are done."""

    def __init__(self, scorer: Any, pipe: Path) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._pipe = pipe

    @property
    def num_tokens_read(self) -> int:
        return self._scorer.num_tokens_read

    def feed(self, rollouts: Any) -> None:
        self._scorer.feed(rollouts)
        self._pipe.write_text("x")

    def forget(self, keys: Any) -> None:
        self._scorer.forget(keys)

    def score(self, rollouts: Any) -> list[Any]:
        return self._scorer.score(rollouts)


class Vandal:
    """Writes what is no message where its process talks to the parent."""

    name = "vandal"

    def score(self, rollouts: Any) -> list[Any]:
        Connection(os.dup(int(sys.argv[1]))).send_bytes(b"junk")
        return [1.0] * len(rollouts)


class Suicidal:
    """Dies while it is loaded."""

    name = "suicidal"

    def __init__(self) -> None:
        self.state = "without one, nothing is restored"

    def score(self, rollouts: Any) -> list[Any]:
        return [1.0] * len(rollouts)

    def __setstate__(self, state: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def waiting_pipes(folder: Path) -> Waiting:
    """A ``Waiting`` with its pipes."""
    scorer = Waiting(folder)
    os.mkfifo(scorer.begun)
    os.mkfifo(scorer.release)
    return scorer


class DyingThread:
    """Ends the thread that serves it, at no call of its own."""

    name = "dying"

    @property
    def num_tokens_read(self) -> int:
        raise SystemExit("out of memory")

    def score(self, rollouts):
        return [1.0 for _ in rollouts]
