"""Result files: what is read is what was written, and what is damaged is one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired

import pytest
from typing_extensions import TypedDict

from realvr.errors import UserError
from realvr.runs.records import ResultFile, Text


class Row(TypedDict):
    value: float
    ends: list[float | None]


class Table(TypedDict):
    version: int
    rows: dict[Text, Row]
    note: NotRequired[Text]


def _no_empty(content: Table) -> None:
    if not content["rows"]:
        raise ValueError("no row")


TABLE = ResultFile(Table, "realvr count", "count again", version=2, check=_no_empty)


def good() -> dict[str, Any]:
    return {"new": 1, "version": 2, "rows": {"a": {"value": 1, "ends": [0.5, None], "later": "x"}}}


def test_what_was_written_is_read_with_all_keys_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    TABLE.dump(file, good())  # type: ignore[arg-type]
    read = TABLE.load(file)
    assert json.dumps(read) == json.dumps(good())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": None}, "not what realvr writes (rows: "),
        ({"rows": {"a": {"value": "1", "ends": []}}}, "(rows.a.value: "),
        ({"rows": {"a": {"value": 1.0, "ends": [True]}}}, "(rows.a.ends.0"),
        ({"rows": {"a": {"value": 1.0}}}, "(rows.a.ends: "),
        ({"rows": {}}, "(no row)"),
        ({"version": 3}, "version 3, written by a newer realvr; this one reads up to 2"),
        ({"version": "2"}, "(version: "),
    ],
)
def test_damage_is_one_line_with_the_place(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(good() | change))
    with pytest.raises(UserError) as error:
        TABLE.load(file)
    text = str(error.value)
    assert text.startswith(f"{file}: ") and said in text and "\n" not in text
    assert text.endswith("count again") or "newer" in text


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 100_000, '{"version": 2}', "\xff"])
def test_what_is_no_such_file_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=str(file)):
        TABLE.load(file)
    with pytest.raises(UserError, match="cannot be read"):
        TABLE.load(tmp_path / "nothing.json")


def test_a_missing_part_names_the_command_that_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text('{"version": 2}')
    with pytest.raises(UserError, match="has no 'rows', so it is not what realvr count writes"):
        TABLE.load(file)


def test_a_wrong_content_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        TABLE.dump(tmp_path / "table.json", {"version": 2, "rows": {"a": {"value": 1.0}}})  # type: ignore[typeddict-item]
    assert not list(tmp_path.iterdir())


def test_half_a_surrogate_pair_in_a_name_is_kept(tmp_path: Path) -> None:
    content = good() | {"rows": {"\ud800": {"value": 0.0, "ends": []}}, "note": "\udcff"}
    TABLE.dump(tmp_path / "table.json", content)  # type: ignore[arg-type]
    assert TABLE.load(tmp_path / "table.json") == content
