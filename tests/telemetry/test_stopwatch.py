"""Stages of a step add up to its wall time."""

from __future__ import annotations

import contextlib

from fakes import VirtualClock

from oppo_kit.telemetry.stopwatch import Stopwatch


def test_nested_stages_are_not_counted_twice_and_the_rest_is_the_engines() -> None:
    clock = VirtualClock()
    watch = Stopwatch(clock, stages=("generate", "score"))
    watch.start_step()
    clock.time_s += 1
    with watch.measure("generate"):
        clock.time_s += 2
        with watch.measure("score"):
            clock.time_s += 4
        clock.time_s += 8
    assert watch.stop_step() == {"step_s": 15.0, "generate_s": 10.0, "score_s": 4.0, "engine_s": 1.0}


def test_a_second_start_inside_a_step_changes_nothing_and_a_stop_starts_afresh() -> None:
    clock = VirtualClock()
    watch = Stopwatch(clock, stages=("generate",))
    watch.start_step()
    clock.time_s += 3
    watch.start_step()
    assert watch.stop_step()["step_s"] == 3.0
    assert watch.stop_step() == {"step_s": 0.0, "generate_s": 0.0, "engine_s": 0.0}


def test_a_stage_that_raises_is_still_measured() -> None:
    clock = VirtualClock()
    watch = Stopwatch(clock, stages=("score",))
    watch.start_step()
    with contextlib.suppress(KeyError), watch.measure("score"):
        clock.time_s += 5
        raise KeyError
    assert watch.stop_step()["score_s"] == 5.0


def test_what_is_measured_between_two_steps_belongs_to_none() -> None:
    clock = VirtualClock()
    watch = Stopwatch(clock, stages=("train",))
    with watch.measure("train"):
        clock.time_s += 7
    watch.start_step()
    with watch.measure("train"):
        clock.time_s += 2
    assert [(span.start_s, span.stop_s) for span in watch.take_spans()] == [(7.0, 9.0)]
    assert watch.stop_step() == {"step_s": 2.0, "train_s": 2.0, "engine_s": 0.0}
