"""Who trains and who scores."""

from __future__ import annotations

import pytest

from harness.dry_run.cards import Hardware, parse_gpus
from harness.dry_run.layout import make_layout
from oppo_kit.errors import ConfigError

EIGHT = parse_gpus("8xH200")
CPU = Hardware("this machine's CPU", "cpu", 1, 2**34, None)


def test_without_a_scorer_device_every_gpu_does_everything() -> None:
    for device in (None, "cuda", "cuda:0"):
        layout = make_layout(EIGHT, device)
        assert (layout.num_training, layout.scoring, layout.num_scoring) == (8, None, 8)
        assert layout.sentence == "GPUs 0 to 7: train, sharded by FSDP, generate and score each"


def test_seven_train_and_the_scorers_have_the_last() -> None:
    layout = make_layout(EIGHT, "cuda:7")
    assert (layout.num_training, layout.scoring, layout.num_scoring) == (7, 7, 1)
    assert layout.sentence == "GPUs 0 to 6: train, sharded by FSDP and generate; GPU 7: scores"
    assert make_layout(parse_gpus("4xL40S"), "cuda:1").training_title == "GPUs 0, 2, 3"
    assert make_layout(parse_gpus("2xL40S"), "cuda:1").sentence == "GPU 0: train and generate; GPU 1: scores"


def test_one_gpu_and_a_cpu_do_everything() -> None:
    assert make_layout(parse_gpus("1xH200"), None).sentence == "GPU 0: train, generate and score"
    assert (
        make_layout(CPU, None).sentence
        == make_layout(CPU, "cpu").sentence
        == "CPU: train, generate and score"
    )


@pytest.mark.parametrize(
    ("hardware", "device", "known"),
    [(EIGHT, "cuda:8", "cuda:0, .*, cuda:7"), (EIGHT, "cpu", "cuda:0"), (CPU, "cuda:1", "cpu")],
)
def test_scorers_on_a_device_that_is_not_there_are_refused(
    hardware: Hardware, device: str, known: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"overlap.scorer_device='{device}' is no device of .*; name one of {known}"
    ):
        make_layout(hardware, device)
