"""One damaged row costs that row and no other, wherever the damage lies in it."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from realvr.data import json_list
from realvr.data.export import write
from realvr.data.readers.base import ReadOptions
from realvr.data.reading import Report, read
from realvr.data.sample import Sample

UNCHECKED = ReadOptions(check_images="none")


def layout_file(layout: str, name: str, samples: list[Sample], folder: Path) -> Path:
    """Samples in a layout, as a file whose rows can be told apart by their text."""
    if layout == "hr-bench":
        samples = [replace(s, choices=s.choices[:4], answer="B", category="cross") for s in samples]
    write(samples, layout, folder / name, strict=False)
    return folder / name / "Questions.csv" if layout == "mmvp" else folder / name


def damaged(row: bytes) -> list[bytes]:
    """The row with each mark of its structure removed in turn, and with such a mark put before every third byte."""
    cut = [row[:k] + row[k + 1 :] for k in range(len(row)) if row[k : k + 1] in b'"{}[]:,\\\t']
    return cut + [row[:k] + extra + row[k:] for extra in (b'"', b"{", b"}", b"[", b"]") for k in range(0, len(row), 3)]


def survivors(file: Path, layout: str) -> tuple[dict[str, str], Report]:
    report = Report()
    found = {s.id: repr((s.turns, s.choices, s.answer, s.boxes)) for s in read(file, layout, UNCHECKED, report)}
    assert report.rows == report.ok + sum(report.dropped.values())
    return found, report


@pytest.mark.parametrize(
    ("layout", "indent"), [("visual-cot", None), ("lvr", None), ("lvr", 2), ("mme-realworld", None), ("jsonl", None)]
)
def test_any_damage_to_one_element_of_a_list_costs_no_other(
    layout: str, indent: int | None, five_options: list[Sample], tmp_path: Path
) -> None:
    short = [
        replace(s, id=f"id{s.id}", turns=[replace(s.turns[0], text=f'Is "{s.id}" {{red}}?')]) for s in five_options[:4]
    ]
    file = layout_file(layout, "x.json", short, tmp_path)
    text = file.read_text()
    rows = json.loads(text) if layout != "jsonl" else [json.loads(line) for line in text.splitlines()]
    parts = [json.dumps(row, indent=indent).encode() for row in rows]
    file.write_bytes(b"[" + b",\n".join(parts) + b"]\n")
    whole, report = survivors(file, layout)
    assert len(whole) == report.rows == 4
    names = list(whole)
    for victim in (0, 2):
        neighbours = {name: whole[name] for name in names if name != names[victim]}
        for changed in damaged(parts[victim]):
            content = b",\n".join([*parts[:victim], changed, *parts[victim + 1 :]])
            file.write_bytes(b"[" + content + b"]\n")
            found, report = survivors(file, layout)
            lost = {name: text for name, text in neighbours.items() if found.get(name) != text}
            assert not lost and 4 <= report.rows <= 5, f"{changed!r} cost {list(lost)}: {report.examples}"


@pytest.mark.parametrize(("layout", "name"), [("mmvp", "folder"), ("hr-bench", "x.tsv"), ("mme-realworld", "x.tsv")])
def test_any_damage_to_one_row_of_a_table_costs_no_other(
    layout: str, name: str, five_options: list[Sample], tmp_path: Path
) -> None:
    file = layout_file(layout, name, five_options, tmp_path)
    text = file.read_text()
    reader = csv.reader(io.StringIO(text), delimiter="," if layout == "mmvp" else "\t")
    ends = [reader.line_num for _ in reader]  # a record may span lines
    lines = text.encode().split(b"\n")
    before, row, after = (b"\n".join(lines[a:b]) for a, b in ((0, ends[2]), (ends[2], ends[3]), (ends[3], None)))
    whole, report = survivors(file, layout)
    assert len(whole) == report.rows == 6
    neighbours = {sample: text for position, (sample, text) in enumerate(whole.items()) if position != 2}
    for changed in damaged(row[:120]):
        file.write_bytes(b"\n".join([before, changed + row[120:], after]))
        found, report = survivors(file, layout)
        lost = [sample for sample, text in neighbours.items() if found.get(sample) != text]
        assert not lost and 6 <= report.rows <= 6 + row.count(b"\n"), f"{changed!r} cost {lost}: {report.examples}"


def lvr_row(number: int) -> bytes:
    turns = [{"from": "human", "value": "<image>\nQ?"}, {"from": "gpt", "value": f"<answer>{number}</answer>"}]
    return json.dumps({"id": f"r{number}", "image": "a.png", "conversations": turns}).encode()


def lvr(folder: Path, content: bytes) -> tuple[list[str], Report]:
    (folder / "x.json").write_bytes(content)
    found, report = survivors(folder / "x.json", "lvr")
    return list(found), report


def test_two_damaged_rows_side_by_side_are_two(tmp_path: Path) -> None:
    rows = [lvr_row(k) for k in range(6)]
    rows[2] = rows[2].replace(b'"id"', b'"id', 1)
    rows[3] = rows[3].replace(b'"value": "<image>', b'"value": <image>', 1)
    found, report = lvr(tmp_path, b"[" + b", ".join(rows) + b"]")
    assert found == ["r0", "r1", "r4", "r5"] and report.dropped == {"json_invalid": 2}


def test_the_first_row_is_damaged_and_the_second_begins_differently(tmp_path: Path) -> None:
    rows = [json.loads(lvr_row(k)) for k in range(4)]
    rows[1] = {"conversations": rows[1]["conversations"], "image": "a.png", "id": "r1"}
    parts = [json.dumps(row).encode() for row in rows]
    parts[0] = parts[0].replace(b"a.png", b'a"png')
    found, report = lvr(tmp_path, b"[" + b", ".join(parts) + b"]")
    assert found == ["r1", "r2", "r3"] and report.dropped == {"json_invalid": 1}


def test_brackets_that_the_list_lost_or_gained(tmp_path: Path) -> None:
    rows = [lvr_row(k) for k in range(4)]
    names = ["r0", "r1", "r2", "r3"]
    assert lvr(tmp_path, b", ".join(rows) + b"]")[0] == names  # no opening bracket
    found, report = lvr(tmp_path, b"[" + b", ".join(rows))  # no closing one
    assert found == names and report.dropped == {"row_truncated": 1}
    found, report = lvr(tmp_path, b"[" + b", ".join(rows[:2]) + b"]\n[" + b", ".join(rows[2:]) + b"]")  # two lists
    assert found == names and set(report.dropped) == {"json_invalid"}
    found, report = lvr(tmp_path, b"[" + rows[0] + b"], " + b", ".join(rows[1:]) + b"]")
    assert found == names and report.dropped == {"json_invalid": 1}
    assert lvr(tmp_path, b"[" + b" ".join(rows) + b"]")[0] == names  # no commas
    assert lvr(tmp_path, b"\n".join(rows))[0] == names  # lines under the name of a list
    broken = b"\n".join(json.dumps(json.loads(row), indent=1).encode() for row in rows)
    assert lvr(tmp_path, broken)[0] == names  # objects over several lines


@pytest.mark.parametrize("line", ["[]", '["id", "images"]', '[{"role": "user"}]', "[1, 2]", "null"])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_line_that_is_no_object_costs_no_other(line: str, place: int, tmp_path: Path) -> None:
    rows = [json.dumps({"id": str(n), "images": ["a.png"], "question": "Q?", "answer": "x"}) for n in range(4)]
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join([*rows[:place], line, *rows[place:]]) + "\n")
    report = Report()
    found = list(read(file, "jsonl", ReadOptions(check_images="none"), report))
    assert [sample.id for sample in found] == ["0", "1", "2", "3"]
    assert report.rows == 5 and report.dropped == {"row_malformed": 1}
    assert f"row {place + 1}:" in report.examples["row_malformed"]


def test_a_list_that_ends_inside_a_row(tmp_path: Path) -> None:
    rows = [lvr_row(k) for k in range(4)]
    for length in range(1, len(rows[3])):
        found, report = lvr(tmp_path, b"[" + b",".join(rows[:3]) + b"," + rows[3][:length])
        closed = rows[3][:length].endswith(b"]")  # might as well be the end of the list
        reason = "json_invalid" if closed else "row_truncated"
        assert found == ["r0", "r1", "r2"] and report.dropped == {reason: 1}, rows[3][:length]


def test_damage_is_passed_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing quote in the first of 20,000 rows must not put the file into memory."""
    monkeypatch.setattr(json_list, "CHUNK", 4096)
    held: list[int] = []
    real = json_list._Window.more

    def more(window: json_list._Window) -> bool:
        again = real(window)
        held.append(len(window.text))
        return again

    monkeypatch.setattr(json_list._Window, "more", more)
    rows = [lvr_row(k) for k in range(20_000)]
    rows[0] = rows[0].replace(b'"id"', b'"id', 1)
    rows[10_000] = rows[10_000].replace(b'"}]}', b"", 1)
    found, report = lvr(tmp_path, b"[" + b",".join(rows) + b"]")
    assert len(found) == 19_998 and report.dropped == {"json_invalid": 2}
    assert max(held) < 300_000 < (tmp_path / "x.json").stat().st_size


def test_a_quote_left_open_in_a_table_costs_no_later_row(tmp_path: Path) -> None:
    """Seventeen rows further on a quoted cell closes it, or seems to."""
    lines = ["Index,Question,Options,Correct Answer"]
    lines += [f"{k},Is it {k}?,(a) Yes (b) No,(a)" for k in range(1, 41)]
    endings = {20: '20,"Is it, well, 20?",(a) Yes (b) No,(a)', 23: '23,Is it 23?,(a) Yes (b) No,(a)"'}
    for ending, text in endings.items():
        changed = list(lines)
        changed[ending] = text
        for opened in (
            '3,"Is it 3?,(a) Yes (b) No,(a)',
            '3,Is it 3?,(a) Yes (b) No,"(a)',
            '"3,Is it 3?,(a) Yes (b) No,(a)',
        ):
            changed[3] = opened
            (tmp_path / "Questions.csv").write_text("\n".join(changed) + "\n")
            found, report = survivors(tmp_path / "Questions.csv", "mmvp")
            rest = {str(k) for k in range(1, 41)} - {"3", str(ending)}
            assert rest <= set(found) and report.rows == 40, (opened, text)


def test_a_quoted_cell_may_span_lines(tmp_path: Path) -> None:
    rows = ['1,"Is it\n2, 3, or\n4?","(a) Yes\n(b) No",(b)\r', "2,Q?,(a) x (b) y,(a)", ",,,"]
    (tmp_path / "Questions.csv").write_text("\n".join(["Index,Question,Options,Correct Answer", *rows]) + "\n")
    first, second = read(tmp_path / "Questions.csv", "mmvp", UNCHECKED)
    assert (first.question, first.choices, first.answer) == ("Is it\n2, 3, or\n4?", ["Yes", "No"], "B")
    assert second.question == "Q?"
