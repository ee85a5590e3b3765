"""Pairs, protocols and numbers without a model: responders with known answers, records with known rates."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pair_cases import Says, oracle, stubborn, world_pairs, world_samples
from realvr.data.export import write
from realvr.data.sample import ImageRef
from realvr.diagnostics.counterfactual import Counterfactual
from realvr.diagnostics.counterfactual_summary import csv_rows, record_key, report, summarise_pairs
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean, rate
from realvr.diagnostics.pairs import first_of_each, pair_up, read_pairs, unrelated
from realvr.diagnostics.run import measure_all
from realvr.errors import UserError
from realvr.runs.folder import RunFolder
from realvr.runs.journal import Journal, read_records

EDITS = ["color_change", "object_removal", "shape_swap", "spatial_swap"]


def asked(responder: Says, pairs: Any, folder: Path, batch: int = 8, **settings: Any) -> dict[str, Any]:
    diagnostic = Counterfactual.configure(settings)
    journal = Journal(folder / "counterfactual.jsonl", record_key)
    measure_all(diagnostic, Model(responder, latents=0), pairs, journal, batch)
    return diagnostic.summarise(journal.records)


# ---------------------------------------------------------------------- reading pairs


def test_pairs_come_from_a_file_edit_by_edit(tmp_path: Path) -> None:
    found = world_samples(8)
    random.Random(0).shuffle(found)  # neither the order of pairs nor that of views matters
    write(iter(found), "jsonl", tmp_path / "samples.jsonl")
    pairs, told = read_pairs(tmp_path / "samples.jsonl", limit=3)
    assert told.lines() == [] and len(pairs) == 12
    assert {edit: sum(pair.edit == edit for pair in pairs) for edit in EDITS} == dict.fromkeys(EDITS, 3)
    for pair in pairs:
        assert pair.original.tags["view"] == "original" and pair.edited.tags["view"] == "edited"
        assert pair.changed == (pair.original.tags["changed"] == "yes")
        assert pair.original.question == pair.edited.question


def test_what_is_no_pair_is_counted_and_named() -> None:
    found = world_samples(6)
    lone = replace(found[0], pair=None)
    wrong = [replace(sample, tags={**sample.tags, "changed": "no"}) for sample in found[2:4]]
    assert found[2].tags["changed"] == "yes"
    other = [found[4], replace(found[5], choices=found[5].choices[::-1])]
    twice = [found[6], replace(found[7], tags={**found[7].tags, "view": "original"})]
    unread = [found[8], replace(found[9], answer="E")]
    pairs, told = pair_up([lone, *wrong, *other, *twice, *unread, *found[11:]])
    names = [sample.pair for sample in found]
    assert told.single == [lone.id]
    assert told.contradictions == [names[2]] and pairs[0].id == names[2] and pairs[0].changed
    assert told.different == [names[4]]
    assert told.incomplete == [names[6], names[10]]
    assert told.unreadable == [names[8]]
    assert len(told.lines()) == 5 and len(pairs) == 24 - 5


def test_a_picture_that_is_not_there_takes_no_pair_away(tmp_path: Path) -> None:
    write(world_samples(2), "jsonl", tmp_path / "samples.jsonl")
    whole, _ = read_pairs(tmp_path / "samples.jsonl")
    picture = whole[0].edited.images[0].path
    assert picture is not None
    picture.unlink()
    pairs, report = read_pairs(tmp_path / "samples.jsonl")
    assert [pair.id for pair in pairs] == [pair.id for pair in whole] and not any(report.counts().values())
    found = asked(Says(oracle), pairs, tmp_path)["protocols"]["separate"]["all"]
    assert found["errors"] == 1 and found["pairs"] == len(whole)
    assert found["parse_coverage"]["count"] == found["parse_coverage"]["of"] - 1 == 2 * len(whole) - 1


def test_files_without_pairs_are_refused(tmp_path: Path) -> None:
    plain = [replace(sample, pair=None) for sample in world_samples(1)]
    write(iter(plain), "jsonl", tmp_path / "plain.jsonl")
    with pytest.raises(UserError, match="no counterfactual pair found.*8 samples have no pair"):
        read_pairs(tmp_path / "plain.jsonl")
    with pytest.raises(UserError, match="--limit is 0"):
        read_pairs(tmp_path / "plain.jsonl", limit=0)


def test_controls_are_a_derangement() -> None:
    pairs = world_pairs(5)
    for count in (2, 3, 7, 20):
        controls = [control.id for control in unrelated(pairs[:count]) if control is not None]
        assert sorted(controls) == sorted(pair.id for pair in pairs[:count])
        assert all(pair.id != control for pair, control in zip(pairs, controls, strict=False))
    assert unrelated(pairs[:1]) == [None] and unrelated([]) == []


def test_a_control_shows_another_scene() -> None:
    """Four edits of the same five scenes: half way round the list stands the same scene again."""
    pairs = world_pairs(5)[:20]
    shared = [
        replace(pair, original=replace(pair.original, images=pairs[n % 5].original.images))
        for n, pair in enumerate(pairs)
    ]
    for n, control in enumerate(unrelated(shared)):
        assert control is not None and control.original.images != shared[n].original.images
    two = replace(pairs[0], original=replace(pairs[0].original, images=pairs[0].original.images * 2))
    assert unrelated([two, pairs[1], pairs[2]])[0] is None  # nobody else shows two pictures


# ---------------------------------------------------------------------- responders with known answers


def test_an_oracle_flips_perfectly_and_a_constant_never(tmp_path: Path) -> None:
    pairs = world_pairs(12)
    (tmp_path / "oracle").mkdir()
    (tmp_path / "constant").mkdir()
    perfect = asked(Says(oracle), pairs, tmp_path / "oracle", batch=5)
    assert set(perfect["protocols"]) == {"two-turn/none", "separate"} and perfect["distances"] is None
    for found in perfect["protocols"].values():
        assert list(found["edits"]) == EDITS
        for numbers in (*found["edits"].values(), found["all"]):
            assert numbers["unchanged"] > 0 and numbers["changed"] + numbers["unchanged"] == numbers["pairs"]
            for name in ("original_accuracy", "edited_accuracy", "prediction_change", "strict_correct_flip"):
                assert numbers[name]["rate"] == 1.0 and numbers[name]["of"] == numbers["changed"]
            assert numbers["false_flip"]["rate"] == 0.0 and numbers["false_flip"]["of"] == numbers["unchanged"]
            assert numbers["parse_coverage"]["count"] == 2 * numbers["pairs"]
            assert numbers["model_flip"]["rate"] == numbers["should_flip"]["rate"]
        assert found["macro"]["strict_correct_flip"] == {"edits": 4, "rate": 1.0, "low": 1.0, "high": 1.0}
    same = asked(Says(lambda request: "<answer>A</answer>"), pairs, tmp_path / "constant")
    numbers = same["protocols"]["two-turn/none"]["all"]
    changed = [pair for pair in pairs if pair.changed]
    assert numbers["prediction_change"]["count"] == numbers["model_flip"]["count"] == 0
    assert numbers["strict_correct_flip"]["count"] == numbers["false_flip"]["count"] == 0
    assert numbers["original_accuracy"]["count"] == sum(pair.original.answer == "A" for pair in changed) > 0
    assert numbers["edited_accuracy"]["count"] == sum(pair.edited.answer == "A" for pair in changed) > 0


def test_the_first_exchange_is_in_context_in_two_turns_only(tmp_path: Path) -> None:
    pairs = world_pairs(8)
    found = asked(Says(stubborn), pairs, tmp_path)["protocols"]
    anchored, free = found["two-turn/none"]["all"], found["separate"]["all"]
    assert anchored["original_accuracy"]["rate"] == free["original_accuracy"]["rate"] == 1.0
    assert anchored["edited_accuracy"]["count"] == anchored["model_flip"]["count"] == 0
    assert free["edited_accuracy"]["rate"] == free["strict_correct_flip"]["rate"] == 1.0


def test_the_second_turn_shows_the_edited_picture_with_the_same_question(tmp_path: Path) -> None:
    pairs = world_pairs(1)
    conversations = []

    def listen(request: Any) -> str:
        conversations.append(request.turns)
        return "well"

    asked(Says(listen), pairs, tmp_path, protocol=("two-turn",))
    assert [len(turns) for turns in conversations] == [1] * 4 + [3] * 4
    for pair, first, second in zip(pairs, conversations[:4], conversations[4:], strict=True):
        assert [turn.role for turn in second] == ["user", "assistant", "user"]
        assert second[0].text == second[2].text == first[0].text and second[1].text == "well"
        assert pair.original.question in second[2].text
        assert second[0].images[0].tobytes() == pair.original.images[0].open().tobytes()
        assert second[2].images[0].tobytes() == pair.edited.images[0].open().tobytes()


def test_a_picture_that_cannot_be_read_stays_in_the_denominator(tmp_path: Path) -> None:
    pairs = [pair for pair in world_pairs(3) if pair.changed][:4]
    broken = replace(pairs[1].edited, images=[ImageRef.from_path(tmp_path / "gone.png")])
    lost = replace(pairs[2].original, images=[ImageRef.from_bytes("bad", b"no image")])
    pairs[1], pairs[2] = replace(pairs[1], edited=broken), replace(pairs[2], original=lost)
    found = asked(Says(oracle), pairs, tmp_path, batch=4)["protocols"]
    for name, right in (("two-turn/none", 2), ("separate", 3)):  # no second turn after a first that failed
        numbers = found[name]["all"]
        assert numbers["original_accuracy"]["count"] == 3 and numbers["original_accuracy"]["of"] == 4
        assert numbers["edited_accuracy"]["count"] == right and numbers["strict_correct_flip"]["count"] == 2
    assert found["two-turn/none"]["all"]["errors"] == 3 and found["separate"]["all"]["errors"] == 2
    lines = read_records(tmp_path / "counterfactual.jsonl", record_key)
    assert "gone.png" in lines[1]["errors"][1] and "first turn" in lines[2]["errors"][1]


# ---------------------------------------------------------------------- records with known rates


def record(number: int, truths: str, answers: tuple[str | None, str | None], edit: str = "e") -> dict[str, Any]:
    return {
        "pair": f"{edit}-{number}",
        "edit": edit,
        "protocol": "two-turn",
        "first_span": "keep",
        "truths": list(truths),
        "extracted": list(answers),
        "errors": [None, None],
    }


def published(counts: dict[str, int], edit: str) -> list[dict[str, Any]]:
    """Records of one row of tab:complete-counterfactual, from its counts; answers A → B on C, A → A on U."""
    inside, only_0 = counts["C"], counts["A0"] - counts["F"]
    only_1 = counts["A1"] - counts["F"]
    moved = counts["change"] - counts["F"]  # changes that are not correct flips: A to C
    kinds: list[tuple[str | None, str | None]] = [("A", "B")] * counts["F"]
    kinds += [("A", "C")] * moved + [("A", "A")] * (only_0 - moved) + [("B", "B")] * only_1
    kinds += [("C", "C")] * (inside - len(kinds))
    failed = 2 * (inside + counts["U"]) - counts["parsed"]
    for place in range(failed):  # failures among those that are wrong anyway
        kinds[-1 - place] = ("C", None)
    still: list[tuple[str | None, str | None]] = [("A", "D")] * counts["false"] + [("A", "A")] * (
        counts["U"] - counts["false"]
    )
    rows = [record(n, "AB", kind, edit) for n, kind in enumerate(kinds)]
    return rows + [record(inside + n, "AA", kind, edit) for n, kind in enumerate(still)]


COUNTS = ("C", "U", "A0", "A1", "change", "F", "false", "parsed")
ROWS = {  # Direct under the first edit and ReaLVR under the last, as printed
    "color_change": ((442, 70, 335, 311, 271, 237, 8, 1022), "75.8 70.4 61.3 53.6 11.4 99.8"),
    "spatial_swap": ((435, 77, 360, 336, 334, 297, 5, 1024), "82.8 77.2 76.8 68.3 6.5 100.0"),
}
NAMES = ["original_accuracy", "edited_accuracy", "prediction_change", "strict_correct_flip"]
NAMES += ["false_flip", "parse_coverage"]


def test_the_denominators_are_those_of_the_published_table() -> None:
    counted = {edit: dict(zip(COUNTS, counts, strict=True)) for edit, (counts, _) in ROWS.items()}
    found = summarise_pairs([row for edit, counts in counted.items() for row in published(counts, edit)])
    edits = found["protocols"]["two-turn/keep"]["edits"]
    for edit, (_, printed) in ROWS.items():
        assert " ".join(f"{100 * edits[edit][name]['rate']:.1f}" for name in NAMES) == printed
        assert [edits[edit][name]["count"] for name in NAMES] == [
            counted[edit][key] for key in ("A0", "A1", "change", "F", "false", "parsed")
        ]
    assert f"{100 * edits['color_change']['should_flip']['rate']:.2f}" == "86.33"  # tab:diag-counterfactual
    assert f"{100 * edits['spatial_swap']['should_flip']['rate']:.2f}" == "84.96"
    macro = found["protocols"]["two-turn/keep"]["macro"]["false_flip"]
    assert macro["rate"] == pytest.approx((8 / 70 + 5 / 77) / 2) and macro["edits"] == 2
    assert macro["low"] < macro["rate"] < macro["high"]
    assert "| two-turn/keep | color_change | 442 / 70 | 75.8 (335) |" in report(found, "x")
    lines = [row for row in csv_rows(found) if row["edit"] == "color_change" and row["number"] == "false_flip"]
    assert [(row["count"], row["of"]) for row in lines] == [(8, 70)]


def test_parse_failures_are_wrong_and_no_change() -> None:
    rows = [
        record(0, "AB", ("A", None)),  # right, then unreadable: no flip, no change
        record(1, "AB", (None, "B")),  # reaches the edited answer without a readable first
        record(2, "AB", ("b", "a")),  # a change, both wrong; case does not matter
        record(3, "AA", (None, "B")),  # no false flip
        record(4, "AA", ("A", "B")),  # a false flip
    ]
    numbers = summarise_pairs(rows)["protocols"]["two-turn/keep"]["edits"]["e"]
    assert (numbers["changed"], numbers["unchanged"]) == (3, 2)
    expected = {"original_accuracy": (1, 3), "edited_accuracy": (1, 3), "prediction_change": (1, 3)}
    expected |= {"strict_correct_flip": (0, 3), "false_flip": (1, 2), "parse_coverage": (7, 10)}
    expected |= {"should_flip": (3, 5), "model_flip": (2, 5), "correct_flip_of_all": (1, 5)}
    expected |= {"correct_flip_of_changed": (1, 3)}
    assert {name: (numbers[name]["count"], numbers[name]["of"]) for name in expected} == expected


@pytest.mark.parametrize("truths", ["AA", "AB"])
def test_an_empty_side_is_null(truths: str) -> None:
    found = summarise_pairs([record(0, truths, ("A", "B"))])
    numbers = found["protocols"]["two-turn/keep"]
    empty = "strict_correct_flip" if truths == "AA" else "false_flip"
    assert numbers["edits"]["e"][empty] == {"count": 0, "of": 0, "rate": None, "low": None, "high": None}
    assert numbers["macro"][empty]["rate"] is None
    assert "–" in report(found, "x") and json.dumps(found) and csv_rows(found)
    assert summarise_pairs([]) == {"protocols": {}, "distances": None}


def test_wilson_bounds_solve_their_equation() -> None:
    for count, of in ((3, 10), (50, 70), (1, 512)):
        found = rate(count, of)
        for bound in (found["low"], found["high"]):  # |p̂ - p| = z sqrt(p (1 - p) / n)
            assert abs(count / of - bound) == pytest.approx(1.959964 * (bound * (1 - bound) / of) ** 0.5, rel=1e-5)
    assert rate(0, 9)["low"] == 0.0 and rate(9, 9)["high"] == 1.0
    assert 0 < rate(0, 9)["high"] < 0.35  # the exact one-sided bound of "none of nine"


def test_bootstrap_intervals_of_means() -> None:
    values = [float(n % 7) for n in range(600)]
    found = mean(values)
    deviation = (sum((v - found["mean"]) ** 2 for v in values) / len(values)) ** 0.5
    half = (found["high"] - found["low"]) / 2
    assert half == pytest.approx(1.96 * deviation / len(values) ** 0.5, rel=0.08)
    assert mean([4.0, 4.0]) == {"mean": 4.0, "low": 4.0, "high": 4.0, "pairs": 2} and mean([])["mean"] is None


# ---------------------------------------------------------------------- files


def test_an_interrupted_run_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    pairs = first_of_each(world_pairs(3), 2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    asked(Says(oracle), pairs, whole, batch=3)
    text = (whole / "counterfactual.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    assert len(lines) == 16
    (cut / "counterfactual.jsonl").write_text("".join(lines[:8]) + lines[8][:40])  # a kill within a line
    again = Says(oracle)
    asked(again, pairs, cut, batch=3)
    # Batch 1 is complete; batch 2 lacks its second variant for one pair and some of the first; batch 3 lacks all.
    assert sorted((cut / "counterfactual.jsonl").read_text().splitlines(True)) == sorted(lines)
    assert sum(again.batches) < 24
    asked(again := Says(oracle), pairs, cut, batch=3)
    assert again.batches == []


def test_a_kill_may_cut_through_a_character(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    text = [{"pair": "a", "text": "größer"}, {"pair": "b", "text": "\ud83d"}, {"pair": "c", "text": "größer"}]
    journal = Journal(path, lambda row: row["pair"])
    journal.add(text)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"\xc3") + 1])
    again = Journal(path, lambda row: row["pair"])
    assert again.done == {"a", "b"}
    again.add(text)
    assert path.read_bytes() == whole and read_records(path, lambda row: row["pair"]) == text


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"pair": "a"}\n{oops\n')
    with pytest.raises(UserError, match="r.jsonl, line 2"):
        Journal(path, lambda row: row["pair"])


def test_a_folder_keeps_to_its_settings(tmp_path: Path) -> None:
    RunFolder(tmp_path).claim("s.json", {"model": {"path": "a"}, "limit": None})
    RunFolder(tmp_path).claim("s.json", {"model": {"path": "a"}, "limit": None})
    with pytest.raises(UserError, match='model.path was "a", now "b".*--out'):
        RunFolder(tmp_path).claim("s.json", {"model": {"path": "b"}, "limit": None})
