"""Samples against the libnvidia-ml.so.1 that the loader finds; one JSON request a line in, one answer out.

A process of its own, because a loaded library stays loaded. ``pynvml`` is imported anew for every request.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from oppo_kit.telemetry.utilisation import UtilisationSampler


class CountingClock:
    """0, 1, 2, … seconds, one a look."""

    def __init__(self) -> None:
        self.num_looks = 0

    def now_s(self) -> float:
        self.num_looks += 1
        return float(self.num_looks - 1)


def answer(environment: dict[str, str], num_samples: int) -> list[dict[str, object]]:
    for name in [name for name in os.environ if name.startswith("NVML_STUB_")]:
        del os.environ[name]
    os.environ.update(environment)
    sys.modules.pop("pynvml", None)
    sampler = UtilisationSampler(clock=CountingClock())
    for _ in range(num_samples):
        sampler.sample_once()
    sampler.stop()
    return [asdict(series) for series in sampler.series()]


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
