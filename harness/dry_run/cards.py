"""The hardware of a dry run: cards by their datasheets, ``--gpus 8xH200``, or what this machine has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from oppo_kit.errors import ConfigError, UnknownNameError

GIB = 2**30
# Of a device's memory: the rest goes to the CUDA context, libraries' workspaces and fragmentation.
USABLE_FRAC = 0.9


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU.

    Attributes:
        name: as ``--gpus`` has it.
        memory_bytes: the datasheet's GB taken as GiB, as drivers show them to about 1 % (an L40S with ECC: 45 of 48).
        bfloat16_flops: dense, per second, on tensor cores.
        float32_flops: per second, without tensor cores: PyTorch computes float32 in full unless told otherwise.
        bandwidth_bytes_per_s: of its memory.
    """

    name: str
    memory_bytes: int
    bfloat16_flops: float
    float32_flops: float
    bandwidth_bytes_per_s: float

    def flops(self, dtype: str) -> float:
        """Peak per second in ``float32`` or ``bfloat16``."""
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops


CARDS = {
    card.name: card
    for card in (
        # NVIDIA H200 Tensor Core GPU datasheet, SXM column: 1,979 TFLOPS bfloat16 with sparsity, half of it without.
        Card("H200", 141 * GIB, 989e12, 67e12, 4.8e12),
        # NVIDIA H100 Tensor Core GPU datasheet, SXM column; likewise.
        Card("H100-80GB", 80 * GIB, 989e12, 67e12, 3.35e12),
        # NVIDIA A100 Tensor Core GPU datasheet, SXM columns of 80 GB and of 40 GB.
        Card("A100-80GB", 80 * GIB, 312e12, 19.5e12, 2.039e12),
        Card("A100-40GB", 40 * GIB, 312e12, 19.5e12, 1.555e12),
        # NVIDIA L40S GPU datasheet: 362.05 TFLOPS bfloat16, 733 with sparsity.
        Card("L40S", 48 * GIB, 362e12, 91.6e12, 0.864e12),
        # NVIDIA L4 Tensor Core GPU datasheet: 242 TFLOPS bfloat16 with sparsity, half of it without.
        Card("L4", 24 * GIB, 121e12, 30.3e12, 0.3e12),
    )
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices of one kind.

    Attributes:
        title: for people.
        kind: what PyTorch calls it.
        num_devices: GPUs; 1 for a CPU.
        memory_bytes: of one device.
        card: its speeds; None: not known, so no time is estimated.
        is_described: by ``--gpus``, rather than found here.
    """

    title: str
    kind: Literal["cuda", "cpu"]
    num_devices: int
    memory_bytes: int
    card: Card | None
    is_described: bool = False

    @property
    def usable_bytes(self) -> int:
        """What a run may hold on one device."""
        return int(self.memory_bytes * USABLE_FRAC)


def parse_gpus(text: str) -> Hardware:
    """``8xH200`` as hardware; upper and lower case are one.

    Raises:
        ConfigError: it is not of this form.
        UnknownNameError: no such card.
    """
    match = re.fullmatch(r"([1-9]\d*)\s*x\s*(.+)", text.strip(), flags=re.IGNORECASE)
    if match is None:
        raise ConfigError(f"--gpus {text!r} is not of the form COUNTxCARD, for example 8xH200 or 1xA100-80GB")
    count, name = int(match[1]), match[2]
    card = next((card for card in CARDS.values() if card.name.lower() == name.lower()), None)
    if card is None:
        raise UnknownNameError("card", name, CARDS)
    return Hardware(f"{count} x {card.name}", "cuda", count, card.memory_bytes, card, is_described=True)


def found_hardware() -> Hardware:
    """The GPUs that PyTorch finds here, else the CPU and the machine's memory."""
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return hardware_of([(device.name, device.total_memory) for device in devices])
    return Hardware("this machine's CPU", "cpu", 1, psutil.virtual_memory().total, None)


def hardware_of(devices: Sequence[tuple[str, int]]) -> Hardware:
    """GPUs by the driver's names and bytes of memory; where they differ, the smallest counts and no speed is known."""
    names = sorted({name for name, _ in devices})
    smallest = min(num_bytes for _, num_bytes in devices)
    card = _card_of(names[0], smallest) if len(names) == 1 else None
    return Hardware(f"{len(devices)} x {' and '.join(names)}", "cuda", len(devices), smallest, card)


def _card_of(name: str, memory_bytes: int) -> Card | None:
    """``NVIDIA A100-SXM4-80GB`` is the A100 whose memory is nearest; a name of another family is no card of ours."""
    words = re.split(r"[\s-]", name.upper())
    family = [card for card in CARDS.values() if card.name.partition("-")[0] in words]
    return min(family, key=lambda card: abs(card.memory_bytes - memory_bytes), default=None)
