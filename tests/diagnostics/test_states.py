"""Hidden states beside the records: rows come back in order, whatever cut the batches had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from realvr.diagnostics.states import StateFiles
from realvr.errors import UserError


def rows(ids: list[int]) -> np.ndarray:
    return np.array([[number, number + 0.5] for number in ids], dtype=np.float32)


def test_rows_come_back_in_any_order_and_one_file_at_a_time(tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "x-states")
    for place in (4, 0):
        files.write(place, [f"s/{n}" for n in range(place, place + 4)], {"mean": rows(list(range(place, place + 4)))})
    wanted = ["s/6", "s/1", "s/5", "s/0"]
    assert (files.rows(wanted, "mean") == rows([6, 1, 5, 0])).all()
    found = list(files.batches(wanted, "mean"))
    assert [own for own, _ in found] == [["s/1", "s/0"], ["s/6", "s/5"]]
    assert (found[1][1] == rows([6, 5])).all()


def test_a_sample_in_two_files_counts_once(tmp_path: Path) -> None:
    """As a run leaves it that was continued with smaller batches."""
    files = StateFiles(tmp_path / "x-states")
    files.write(0, ["a", "b"], {"mean": rows([0, 1])})
    files.write(1, ["b"], {"mean": rows([9])})
    assert (files.rows(["a", "b"], "mean") == rows([0, 9])).all()


def test_missing_and_damaged_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "x-states")
    files.write(0, ["a"], {"mean": rows([0])})
    with pytest.raises(UserError, match=r"states of 1 of 2 samples are missing \(first: b\); delete x\.jsonl"):
        files.rows(["a", "b"], "mean")
    (tmp_path / "x-states" / "000000.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match=r"000000\.safetensors: damaged .* delete it and x\.jsonl"):
        StateFiles(tmp_path / "x-states").rows(["a"], "mean")


def test_rows_that_do_not_fit_the_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mean: 1 rows for 2 samples"):
        StateFiles(tmp_path / "x-states").write(0, ["a", "b"], {"mean": rows([0])})


def test_several_rows_of_each_sample_come_back_in_the_order_of_the_files(tmp_path: Path) -> None:
    """Samples with different numbers of rows, and one with none; a sample in two files counts once."""
    files = StateFiles(tmp_path / "x-states")
    own = {"a": [0, 1], "b": [], "c": [2], "d": [3, 4, 5]}
    files.write(2, ["c", "d"], {}, {"z": [rows(own["c"]), rows(own["d"])]})
    files.write(0, ["a", "b", "c"], {}, {"z": [rows(own["a"]), rows(own["b"]).reshape(0, 2), rows([9, 9])]})
    found = list(files.several(["d", "a", "b", "c"], "z"))
    assert [name for name, _ in found] == ["a", "b", "d", "c"]
    assert all(len(part) == len(own[name]) and (part == rows(own[name]).reshape(-1, 2)).all() for name, part in found)
    with pytest.raises(ValueError, match="z: 1 rows for 2 samples"):
        files.write(0, ["a", "b"], {}, {"z": [rows([0])]})
