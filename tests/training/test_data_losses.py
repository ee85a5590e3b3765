"""Rows that training cannot use are counted before the first step and as they are drawn, and too many stop the run."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from realvr.cli import main
from realvr.data.sample import Box
from stage_runs import command, config_file, configure, environment, lines, run, start, world, write

GOOD, BAD = 9, 150


def mixed_file(folder: Path, good: int = GOOD, bad: int = BAD) -> Path:
    """One picture; ``good`` rows with a box in fractions and ``bad`` rows with the same box in its 64 x 64 pixels."""
    (sample,) = world(1)
    sample = dataclasses.replace(sample, boxes=[Box(0, (0.25, 0.25, 0.75, 0.5))], meta={})
    data = write([sample], folder)
    row = json.loads(data.read_text())
    rows = [row | {"id": f"fractions-{number}"} for number in range(good)]
    pixels = [{"image": 0, "xyxy": [16, 16, 48, 32]}]
    rows += [row | {"id": f"pixels-{number}", "boxes": pixels} for number in range(bad)]
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return data


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "data.json").read_text())


@pytest.mark.parametrize("kind", ["sft", "rl", "base"])
def test_too_many_unreadable_rows_stop_the_run(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = mixed_file(tmp_path / "data")
    out = tmp_path / "run"
    config = str(config_file(configure(kind, trained, data, out), tmp_path / "config.yaml"))
    assert main(["train", kind, config]) == 2
    said = capsys.readouterr().err
    assert said.count("9 of 159 rows usable") == 1, "in the error, and not in a line before it"
    assert "9 of 159 rows usable" in said and "150 box_in_pixels" in said and "row 10" in said
    for way in ("--data.sources.0.boxes pixels", f"realvr data check {data} --quarantine", "--data.max-dropped 0.95"):
        assert way in said
    assert "Traceback" not in said and not (out / "metrics.jsonl").exists()


def test_a_file_of_no_known_format_names_the_setting(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the flag of ``realvr data``, which training does not have; held-out questions have no such setting."""
    data, odd = write(world(4), tmp_path / "data"), tmp_path / "odd.jsonl"
    odd.write_text('{"what": 1}\n')
    raw = configure("sft", trained, data, tmp_path / "run")
    flags = (["--data.sources.0.path", str(odd)], ["--validation.path", str(odd)])
    said = []
    for flag in flags:
        assert main(["train", "sft", str(config_file(raw, tmp_path / "config.yaml")), *flag]) == 2
        said.append(capsys.readouterr().err)
    assert f"{odd}: keys what fit no format; name one with --data.sources.0.format" in said[0]
    assert f"validation.path: {odd}: keys what fit no format; write it as one of docs/data.md" in said[1]


def test_what_is_left_out_is_printed_and_written(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under ``policy: skip``, which is the default, and with the ways out that the message names."""
    data = mixed_file(tmp_path / "data")
    config = str(config_file(configure("sft", trained, data, tmp_path / "rest"), tmp_path / "config.yaml"))
    assert main(["train", "sft", config, "--data.max-dropped", "0.95"]) == 0
    assert "9 of 159 rows usable, 9 with evidence boxes; dropped: 150 box_in_pixels" in capsys.readouterr().err
    (source,) = record(tmp_path / "rest")["sources"]
    assert (source["rows"], source["usable"], source["with_boxes"]) == (159, 9, 9)
    assert source["dropped"] == {"box_in_pixels": 150} and "row 10" in source["first"]["box_in_pixels"]
    flags = ["--data.sources.0.boxes", "auto", "--run.out", str(tmp_path / "auto")]
    assert main(["train", "sft", config, *flags]) == 0
    assert "159 of 159 rows usable, 159 with evidence boxes (9 rows in fractions, 150 rows in pixels)" in (
        capsys.readouterr().err
    )
    (source,) = record(tmp_path / "auto")["sources"]
    assert source["usable"] == 159 and source["boxes_read_as"] == {"fractions": 9, "pixels": 150}


def test_one_bad_source_is_not_hidden_by_a_large_good_one(trained: Path, tmp_path: Path) -> None:
    good, bad = mixed_file(tmp_path / "good", 150, 0), mixed_file(tmp_path / "bad", 2, 3)
    raw = configure("sft", trained, good, tmp_path / "run")
    raw["data"]["sources"].append({"path": str(bad)})
    config = str(config_file(raw, tmp_path / "config.yaml"))
    assert main(["train", "sft", config]) == 2
    assert main(["train", "sft", config, "--data.sources.1.weight", "0"]) == 0


def test_missing_images_are_known_before_the_first_step(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = world(8)
    data = write(found, tmp_path / "data")
    names = [json.loads(line)["images"][0] for line in data.read_text().splitlines()]
    (data.parent / names[3]).unlink()
    raw = configure("sft", trained, data, tmp_path / "run", optim={"steps": 3})
    assert all(line["data/rejected_per_rank"] == 0 for line in run("sft", raw))
    (source,) = record(tmp_path / "run")["sources"]
    assert source["usable"] == 7 and source["dropped"] == {"image_missing": 1}
    assert f"{data}, row 4" in source["first"]["image_missing"]
    for name in names[:3]:
        (data.parent / name).unlink()
    capsys.readouterr()
    config = str(config_file(configure("sft", trained, data, tmp_path / "half"), tmp_path / "config.yaml"))
    assert main(["train", "sft", config]) == 2
    assert "4 of 8 rows usable" in (said := capsys.readouterr().err) and "--data.sources.0.images FOLDER" in said


def test_exactly_the_allowed_share_may_be_dropped(trained: Path, tmp_path: Path) -> None:
    """In floating point 1 - 7 / 10 is above 0.3. `data check` and training agree."""
    data = mixed_file(tmp_path / "data", 7, 3)
    config = str(config_file(configure("sft", trained, data, tmp_path / "run"), tmp_path / "config.yaml"))
    assert main(["data", "check", str(data), "--max-dropped", "0.3"]) == 0
    assert main(["train", "sft", config, "--data.max-dropped", "0.3"]) == 0


def test_the_check_that_is_named_reads_as_training_does(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the source's own switches it would list other rows, for other reasons."""
    data = mixed_file(tmp_path / "data")
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    absolute = [row | {"images": [str(data.parent / row["images"][0])]} for row in rows]
    moved = tmp_path / "rows.d" / "rows.jsonl"
    moved.parent.mkdir()
    moved.write_text("".join(json.dumps(row) + "\n" for row in absolute))
    raw = configure("sft", trained, moved, tmp_path / "run")
    raw["data"]["sources"][0]["images"] = "/"
    assert main(["train", "sft", str(config_file(raw, tmp_path / "config.yaml"))]) == 2
    named = capsys.readouterr().err.split("`")[1]
    quarantine = tmp_path / "bad.jsonl"
    words = [str(quarantine) if word == "bad.jsonl" else word for word in shlex.split(named)]
    assert words[:3] == ["realvr", "data", "check"] and main(words[1:]) == 1
    listed = [json.loads(line)["reason"] for line in quarantine.read_text().splitlines()]
    assert listed == ["box_in_pixels"] * BAD


@pytest.mark.parametrize(("kind", "limit"), [("sft", "pack_tokens"), ("rl", "max_prompt")])
@pytest.mark.parametrize(("rows", "drawn"), [(3, range(4, 40)), (300, range(200, 240))])
def test_a_run_without_a_row_that_fits_says_what_to_change(
    kind: str, limit: str, rows: int, drawn: range, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Soon, too: a large source is not encoded to its end first."""
    data = mixed_file(tmp_path / "data", rows, 0)
    config = str(config_file(configure(kind, trained, data, tmp_path / "run"), tmp_path / "config.yaml"))
    assert main(["train", kind, config, f"--{limit.replace('_', '-')}", "8"]) == 2
    said = capsys.readouterr().err
    assert "too_long" in said and f"raise method.{limit}" in said and f"{data}, row" in said and "{" not in said
    encoding = record(tmp_path / "run")["encoding"]
    assert encoding["drawn"] in drawn and encoding["rejected"] == {"too_long": encoding["drawn"]}


def damage(data: Path, count: int) -> None:
    """Cut the pictures of the first rows short: they are there, but cannot be decoded."""
    for line in data.read_text().splitlines()[:count]:
        picture = data.parent / json.loads(line)["images"][0]
        picture.write_bytes(picture.read_bytes()[:80])


@pytest.mark.parametrize("kind", ["sft", "base"])
def test_rows_that_fail_when_encoded_stop_the_run_once_enough_were_drawn(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(world(8), tmp_path / "data")
    damage(data, 3)
    optim = {"steps": 60, "batch": 24, "microbatch": 24}
    raw = configure(kind, trained, data, tmp_path / "run", optim=optim, data={"keep_encoded": True})
    config = str(config_file(raw, tmp_path / "config.yaml"))
    assert main(["train", kind, config]) == 2
    said = capsys.readouterr().err
    assert "unreadable_image" in said and "data.max_dropped allows 20.0%" in said and "realvr data check" in said
    encoding = record(tmp_path / "run")["encoding"]
    assert encoding["drawn"] >= 200 and 0.3 < encoding["rejected"]["unreadable_image"] / encoding["drawn"] < 0.45
    assert str(data) in encoding["first"]["unreadable_image"]
    steps = lines(tmp_path / "run")
    assert 0 < len(steps) < 60  # it went on until there was enough to judge by
    if len(steps) > 1:
        assert steps[-2]["data/drawn"] < 200


def test_counts_of_drawn_rows_survive_a_resume(trained: Path, tmp_path: Path) -> None:
    """A window of rows that is filled again after a kill must not be counted twice."""
    data = write(world(8), tmp_path / "data")
    damage(data, 1)
    whole = configure("sft", trained, data, tmp_path / "whole", optim={"steps": 4}, pack_tokens=256)
    run("sft", whole)
    cut = configure("sft", trained, data, tmp_path / "cut", optim={"steps": 2}, pack_tokens=256)
    run("sft", cut)
    run("sft", cut | {"optim": cut["optim"] | {"steps": 4}})
    names = ("data/drawn", "data/rejected_per_rank")
    found = [[line[name] for name in names] for line in lines(tmp_path / "cut")]
    assert found == [[line[name] for name in names] for line in lines(tmp_path / "whole")] and found[-1][1] > 0
    encoding = [record(tmp_path / name)["encoding"] for name in ("cut", "whole")]
    assert encoding[0] == encoding[1] and encoding[0]["step"] == 4


@pytest.mark.slow
def test_two_ranks_agree_on_what_is_missing(trained: Path, tmp_path: Path) -> None:
    data = write(world(8), tmp_path / "data")
    (data.parent / json.loads(data.read_text().splitlines()[5])["images"][0]).unlink()
    raw = configure("rl", trained, data, tmp_path / "run", optim={"batch": 2, "microbatch": 1})
    done = start(command("rl", config_file(raw, tmp_path / "config.yaml"), ranks=2))
    assert done.stderr.count("7 of 8 rows usable") == 1
    (line,) = lines(tmp_path / "run")
    assert line["data/drawn"] == 2 and record(tmp_path / "run")["encoding"]["drawn"] == 2


# ---------------------------------------------------------------------- edited data


@pytest.mark.slow
def test_edited_data_is_noticed_on_resume(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(world(6), tmp_path / "data")
    out = tmp_path / "run"
    raw = configure("sft", trained, data, out, optim={"steps": 10_000}, checkpoint={"every": 1, "keep": 1})
    config = str(config_file(raw, tmp_path / "config.yaml"))
    process = Forked.of(command("sft", Path(config)), environment=environment())
    process.until(lambda: bool(list((out / "checkpoints").glob("step-*"))))
    process.kill()
    done = max(int(path.name.split("-")[1]) for path in (out / "checkpoints").glob("step-*"))
    more = ["train", "sft", config, "--optim.steps", str(done + 1)]
    text = data.read_text()
    data.write_text(text.replace('"question": "', '"question": "Look. ', 1))
    capsys.readouterr()
    assert main(more) == 2
    said = capsys.readouterr().err
    assert f"{data} was edited" in said and "--checkpoint.changed-data accept" in said
    data.write_text(text)  # restored: the same content at another time is the same data
    assert main(more) == 0 and len(lines(out)) == done + 1
    data.write_text("".join(text.splitlines(keepends=True)[1:]))  # a row less: another order, too
    assert main([*more[:-1], str(done + 2)]) == 2
    assert main([*more[:-1], str(done + 2), "--checkpoint.changed-data", "accept"]) == 0
    assert "going on with what is there now" in capsys.readouterr().err and len(lines(out)) == done + 2
    assert main([*more[:-1], str(done + 3)]) == 0  # the new checkpoint knows the new data


def test_edited_images_are_noticed_on_resume(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(world(6), tmp_path / "data")
    names = [json.loads(line)["images"][0] for line in data.read_text().splitlines()]
    raw = configure("rl", trained, data, tmp_path / "run", optim={"steps": 1})
    config = str(config_file(raw, tmp_path / "config.yaml"))
    assert main(["train", "rl", config]) == 0
    more = ["train", "rl", config, "--optim.steps", "2"]
    kept = tmp_path / "kept.png"
    changed = data.parent / names[2]
    shutil.copy2(changed, kept)
    shutil.copy(data.parent / names[0], changed)
    capsys.readouterr()
    assert main(more) == 2
    said = capsys.readouterr().err
    assert str(changed) in said and names[0] not in said and "--checkpoint.changed-data accept" in said
    shutil.copy(kept, changed)  # its bytes, at another time
    assert main(more) == 2
    assert f"{changed} was written again (same size" in capsys.readouterr().err
    shutil.copy2(kept, changed)  # with its time
    assert main(more) == 0
