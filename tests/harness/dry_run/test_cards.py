"""Hardware by name, and by what a driver says."""

from __future__ import annotations

import pytest

from harness.dry_run.cards import CARDS, GIB, found_hardware, hardware_of, parse_gpus
from oppo_kit.errors import ConfigError, UnknownNameError


def test_a_count_and_a_card_are_hardware_in_upper_and_lower_case() -> None:
    for text in ("8xH200", "8Xh200", " 8xH200 ", "8 x H200"):
        hardware = parse_gpus(text)
        assert (hardware.title, hardware.num_devices, hardware.card) == ("8 x H200", 8, CARDS["H200"])
        assert hardware.is_described
    assert parse_gpus("2xL40S").usable_bytes == pytest.approx(0.9 * 48 * GIB)


@pytest.mark.parametrize("text", ["H200", "0xH200", "-1xH200", "8 H200", "x", ""])
def test_hardware_of_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not of the form COUNTxCARD, for example 8xH200 or 1xA100-80GB"
    ):
        parse_gpus(text)


def test_an_unknown_card_names_the_known_ones() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown card 'H20'; did you mean 'H200'.*known: A100-40GB, A100-80GB"
    ):
        parse_gpus("4xH20")


def test_a_float32_product_does_not_use_tensor_cores() -> None:
    for card in CARDS.values():
        assert card.flops("float32") < card.flops("bfloat16") / 3


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA L40S", 44.5, "L40S"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA L40", 44.5, None),
        ("Tesla V100", 32.0, None),
    ],
)
def test_a_driver_s_name_is_the_card_of_its_family_with_the_nearest_memory(
    name: str, gib: float, card: str | None
) -> None:
    hardware = hardware_of([(name, int(gib * GIB))] * 2)
    assert hardware.card == (None if card is None else CARDS[card])
    assert (hardware.num_devices, hardware.memory_bytes) == (2, int(gib * GIB))
    assert not hardware.is_described


def test_of_different_gpus_the_smallest_counts_and_no_speed_is_known() -> None:
    hardware = hardware_of([("NVIDIA H200", 140 * GIB), ("NVIDIA L4", 22 * GIB)])
    assert (hardware.memory_bytes, hardware.card) == (22 * GIB, None)
    assert hardware.title == "2 x NVIDIA H200 and NVIDIA L4"


def test_this_machine_has_something_to_run_on() -> None:
    hardware = found_hardware()
    assert hardware.num_devices >= 1
    assert hardware.memory_bytes > GIB
    assert not hardware.is_described
