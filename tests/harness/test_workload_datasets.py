"""Data sets of the user's: files and hub ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from harness.workloads.datasets import load_hub_rows, load_rows
from oppo_kit.errors import DataError

pytestmark = pytest.mark.usefixtures("no_hub")


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [{"question": "a\u2028b", "n": 1}, {"question": "c", "n": 2}]
    (tmp_path / "d.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.parquet"):
        assert load_rows(str(tmp_path / name), prompt_column="question") == rows


def test_rows_of_input_ids_need_no_prompt_column(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 2]}')
    assert load_rows(str(tmp_path / "d.jsonl"), prompt_column="prompt") == [{"input_ids": [1, 2]}]


def test_a_missing_prompt_column_lists_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompts": "a", "answer": 1}')
    with pytest.raises(
        DataError, match=r"has no column 'prompt'; set prompt_column; did you mean 'prompts'\? known: answer"
    ):
        load_rows(str(tmp_path / "d.jsonl"), prompt_column="prompt")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "line 2 is not JSON"),
        ("d.jsonl", b"[1]\n", "line 1: list instead of an object"),
        ("d.jsonl", b"\xff\xfe", "cannot be read"),
        ("d.jsonl", b"\n", "has no rows"),
        ("d.parquet", b"no parquet", "cannot be read"),
        (
            "d.json",
            b"[]",
            r"nor a hub id \(owner/name\); write it as JSONL, one object per line, in a .jsonl",
        ),
        ("d.csv", b"prompt\na\n", r"neither a .jsonl nor a .parquet file nor a hub id"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_rows(str(tmp_path / name), prompt_column="prompt")


@pytest.mark.parametrize("source", ["absent.jsonl", "absent.parquet"])
def test_a_file_that_is_not_there_says_so(source: str) -> None:
    with pytest.raises(DataError, match=rf"dataset file {source} cannot be read: .*{source}"):
        load_rows(source, prompt_column="prompt")


@pytest.mark.parametrize("source", ["absent", "folder/data/absent", "folder/absent.csv"])
def test_a_source_of_no_known_kind_is_refused(source: str) -> None:
    with pytest.raises(DataError, match=f"dataset '{source}' is neither"):
        load_rows(source, prompt_column="prompt")


def test_a_hub_data_set_that_cannot_be_had_is_a_data_error() -> None:
    with pytest.raises(
        DataError, match=r"dataset 'owner/absent' cannot be had from the hub: .*pass a .jsonl"
    ):
        load_rows("owner/absent", prompt_column="prompt")


def test_a_hub_data_set_that_does_not_exist_is_no_reason_for_a_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*arguments: Any, **options: Any) -> Any:
        raise datasets.exceptions.DatasetNotFoundError("no such data set")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(DataError, match="dataset 'owner/name' cannot be read: no such data set"):
        load_hub_rows("owner/name")


def test_rows_of_the_hub_stop_at_the_number_asked_for(hub: Callable[..., None]) -> None:
    hub({"train": [{"prompt": str(i)} for i in range(9)]})
    assert len(load_hub_rows("owner/name", max_rows=4)) == 4
    hub({"train": [{"prompt": str(i)} for i in range(9)]})
    assert len(load_rows("owner/name", prompt_column="prompt")) == 9
