"""A results file is read whole or refused, with the field that does not fit."""

from __future__ import annotations

import json

import pytest
from results_factory import make_ladder

from harness.schema import load_result
from oppo_kit.errors import StateError


def test_a_written_result_comes_back(tmp_path) -> None:
    result = make_ladder()
    (tmp_path / "result.json").write_text(result.model_dump_json())
    assert load_result(tmp_path) == load_result(tmp_path / "result.json") == result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values | {"schema_version": 99}, "has schema_version 99, this release reads 1"),
        (lambda values: [values], "has schema_version None"),
        (lambda values: values | {"colour": "red"}, "does not fit schema version 1: colour: Extra inputs"),
        (lambda values: values | {"command": None}, "does not fit schema version 1: command"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message) -> None:
    values = json.loads(make_ladder().model_dump_json())
    (tmp_path / "result.json").write_text(json.dumps(change(values)))
    with pytest.raises(StateError, match=message):
        load_result(tmp_path)


def test_a_step_time_that_is_no_number_is_refused(tmp_path) -> None:
    values = json.loads(make_ladder().model_dump_json())
    values["runners"]["trl"]["runs"][0]["steps"][0]["step_s"] = "NaN"
    (tmp_path / "result.json").write_text(json.dumps(values))
    with pytest.raises(
        StateError, match=r"runners.trl.runs.0.steps.0.step_s: Input should be a finite number"
    ):
        load_result(tmp_path)


def test_truncated_missing_and_foreign_files_are_refused(tmp_path) -> None:
    file = tmp_path / "result.json"
    with pytest.raises(StateError, match="has no result.json: a benchmark that did not end, or no benchmark"):
        load_result(tmp_path)
    with pytest.raises(StateError, match="cannot read results from .*: No such file or directory"):
        load_result(file)
    (tmp_path / "steps.jsonl").touch()
    with pytest.raises(StateError, match="is the folder of a training run, whose steps are in .*steps.jsonl"):
        load_result(tmp_path)
    file.write_text(make_ladder().model_dump_json()[:500])
    with pytest.raises(StateError, match="does not fit schema version 1: the file: Invalid JSON"):
        load_result(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StateError, match="it is no UTF-8 text"):
        load_result(tmp_path)
