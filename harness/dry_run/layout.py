"""Which devices train and generate, and which one scores."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.dry_run.cards import Hardware
from oppo_kit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices by what they do.

    Attributes:
        num_training: devices that train by FSDP, and generate their share of the responses each.
        scoring: index of the device that only scores; None: scorers are beside the policy, on every training device.
        names: of all devices.
    """

    num_training: int
    scoring: int | None
    names: tuple[str, ...]

    @property
    def num_scoring(self) -> int:
        """Devices that share the scoring."""
        return self.num_training if self.scoring is None else 1

    @property
    def training_title(self) -> str:
        """``GPUs 0 to 6``, or those that are not next to each other one by one."""
        indices = [index for index in range(len(self.names)) if index != self.scoring]
        if len(indices) == 1:
            return self.names[indices[0]]
        if len(indices) == indices[-1] - indices[0] + 1:
            return f"GPUs {indices[0]} to {indices[-1]}"
        return f"GPUs {', '.join(map(str, indices))}"

    @property
    def sentence(self) -> str:
        """The whole layout in words."""
        shards = ", sharded by FSDP" if self.num_training > 1 else ""
        if self.scoring is None:
            every = " each" if self.num_training > 1 else ""
            return f"{self.training_title}: train{shards}, generate and score{every}"
        return f"{self.training_title}: train{shards} and generate; {self.names[self.scoring]}: scores"


def make_layout(hardware: Hardware, scorer_device: str | None) -> Layout:
    """``overlap.scorer_device`` on this hardware; the policy is on the first device, and all but the scorers' train.

    Raises:
        ConfigError: the scorers' device is none of the hardware's.
    """
    names = ("CPU",) if hardware.kind == "cpu" else tuple(f"GPU {i}" for i in range(hardware.num_devices))
    if scorer_device is None or scorer_device == hardware.kind:
        return Layout(hardware.num_devices, None, names)
    match = re.fullmatch(r"cuda:(\d+)", scorer_device)
    index = None if match is None else int(match[1])
    if index is None or hardware.kind == "cpu" or index >= hardware.num_devices:
        known = (
            "cpu" if hardware.kind == "cpu" else ", ".join(f"cuda:{i}" for i in range(hardware.num_devices))
        )
        raise ConfigError(
            f"overlap.scorer_device={scorer_device!r} is no device of {hardware.title}; name one of {known}, "
            "or leave it out for the policy's"
        )
    if index == 0:
        return Layout(hardware.num_devices, None, names)
    return Layout(hardware.num_devices - 1, index, names)
