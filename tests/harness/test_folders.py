"""Folders are claimed by one process and files are replaced whole."""

from __future__ import annotations

import pytest

from harness.folders import locked, make_folder, write_atomically
from oppo_kit.errors import ConfigError, StateError


def test_a_second_claim_is_refused_and_a_released_one_is_free(tmp_path) -> None:
    pytest.importorskip("fcntl")
    with (
        locked(tmp_path / "run"),
        pytest.raises(StateError, match="another process is at work in .*run; wait for it, or pass another"),
        locked(tmp_path / "run"),
    ):
        pass
    with locked(tmp_path / "run"):
        pass


def test_what_cannot_be_a_folder_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot make the folder .*; pass another --out"):
            make_folder(place)


def test_a_replaced_file_leaves_nothing_beside_it(tmp_path) -> None:
    file = tmp_path / "a.json"
    for text in ("1", "2"):
        write_atomically(file, text)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "2")]
