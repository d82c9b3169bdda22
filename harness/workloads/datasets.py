"""Rows from a hub id, a JSONL file or a parquet file. Knows no task and no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from oppo_kit.data import INPUT_IDS
from oppo_kit.errors import DataError, did_you_mean

_SUFFIXES = (".jsonl", ".parquet")


def load_rows(source: str, *, prompt_column: str) -> list[dict[str, Any]]:
    """All rows of a data set of the user's.

    Args:
        source: a ``.jsonl`` or ``.parquet`` file, or a hub id, of which the ``train`` split is read.
        prompt_column: must be there, unless the rows are ``input_ids``.

    Raises:
        DataError: it is not there, cannot be read, has no rows, or lacks the column.
    """
    path = Path(source)
    if path.suffix in _SUFFIXES:
        rows = list(_jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path))
    elif path.exists() or source.count("/") != 1 or path.suffix in (".json", ".csv", ".txt"):
        hint = "; write it as JSONL, one object per line, in a .jsonl file" if path.suffix == ".json" else ""
        raise DataError(
            f"dataset {source!r} is neither a .jsonl nor a .parquet file nor a hub id (owner/name){hint}"
        )
    else:
        try:
            rows = load_hub_rows(source)
        except ConnectionError as error:
            raise DataError(
                f"dataset {source!r} cannot be had from the hub: {error}; pass a .jsonl or .parquet file"
            ) from error
    if not rows:
        raise DataError(f"dataset {source!r} has no rows")
    columns = sorted({str(name) for row in rows for name in row})
    if prompt_column not in columns and INPUT_IDS not in columns:
        raise DataError(
            f"dataset {source!r} has no column {prompt_column!r}; set prompt_column; "
            f"{did_you_mean(prompt_column, columns)}"
        )
    return rows


def load_hub_rows(
    hub_id: str,
    config: str | None = None,
    *,
    split: str = "train",
    data_dir: str | None = None,
    max_rows: int | None = None,
) -> list[dict[str, Any]]:
    """Rows of a data set on the hub; with ``max_rows`` the first so many, without downloading the rest.

    Raises:
        DataError: it does not exist or cannot be read.
        ConnectionError: the hub cannot be reached and nothing is cached.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        loaded = load_dataset(hub_id, config, split=split, data_dir=data_dir, streaming=max_rows is not None)
        return [dict(row) for row in islice(loaded, max_rows)]
    except ConnectionError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"dataset {hub_id!r} cannot be read: {error}; pass a .jsonl or .parquet file instead"
        ) from error


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(
                        f"{path}, line {number}: {type(row).__name__} instead of an object with columns"
                    )
                yield row
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"dataset file {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {number} is not JSON ({error}); write one object per line") from error


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"dataset file {path} cannot be read: {error}") from error
