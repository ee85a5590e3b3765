"""``make`` and ``show``: real layouts on disk, read back by the real readers as the same samples."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import realvr
from realvr.cli import world
from realvr.data import ReadOptions, read, write
from realvr.data.detect import detect
from realvr.errors import UserError
from realvr.world import making
from realvr.world.making import layout_path, parse_size
from realvr.world.splits import SPLITS, Recipe, samples

SOURCE = str(Path(realvr.__file__).parents[1])


def make(*values, **options):
    """``realvr world make``."""
    return world.make(world.MakeCommand(*values, **options))


def show(*values, **options):
    """``realvr world show``."""
    return world.show(world.ShowCommand(*values, **options))


STRICT = ReadOptions(policy="strict", check_images="decode")
COUNTS = {"vstar": 3, "hrbench-4k": 2, "hrbench-8k": 1, "mmvp": 6, "counterfactual": 4}


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def comparable(sample, layout):
    """What a sample says, less what the layout has no place for."""
    content = sample.content()
    if layout in ("virl39k", "mmvp", "blink", "hr-bench", "mme-realworld", "vstar"):
        content.pop("boxes")
    more = {
        "mmvp": (sample.id, sample.pair),
        "blink": (sample.id, sample.task),
        "hr-bench": (sample.id, sample.category, sample.cycle),
        "mme-realworld": (sample.id, sample.task, sample.category),
        "vstar": (sample.id, sample.task, sample.category),
        "visual-cot": (sample.id,),
        "lvr": (sample.id,),
        "virl39k": (sample.id, sample.category),
        "jsonl": (sample.id, sample.task, sample.category, sample.tags, sample.pair, sample.cycle, sample.meta),
    }[layout]
    return content, more


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_comes_back_equal_through_its_real_layout(name, tmp_path):
    count = COUNTS.get(name, 8)
    assert make(tmp_path, [name], seed=2, count=count, workers=1) == 0
    made = list(samples(Recipe(name, seed=2, count=count)))
    layout = SPLITS[name].layout
    path = layout_path(name, tmp_path / name)
    assert detect(path).name == layout
    again = list(read(path, layout, STRICT))
    assert [comparable(sample, layout) for sample in again] == [comparable(sample, layout) for sample in made]
    own = list(read(tmp_path / name / "samples.jsonl", "jsonl", STRICT))
    assert [comparable(sample, "jsonl") for sample in own] == [comparable(sample, "jsonl") for sample in made]


@pytest.mark.parametrize(
    ("name", "layout", "file"),
    [
        ("train-boxes", "lvr", "lvr.json"),
        ("hrbench-4k", "hr-bench", "hr.parquet"),
        ("mme-realworld", "mme-realworld", "mme.tsv"),
        ("mme-realworld", "mme-realworld", "mme.parquet"),
        ("vstar", "vstar", "vstar.parquet"),
        ("train-plain", "lvr", "lvr.json"),
        ("validation", "visual-cot", "cot.json"),
    ],
)
def test_other_layouts_that_can_hold_a_split(name, layout, file, tmp_path):
    made = list(samples(Recipe(name, seed=4, count=COUNTS.get(name, 8))))
    write(made, layout, tmp_path / file)
    again = list(read(tmp_path / file, layout, STRICT))
    drop = layout in ("hr-bench", "mme-realworld", "vstar")
    for one, two in zip(made, again, strict=True):
        a, b = one.content(), two.content()
        if drop:
            a.pop("boxes"), b.pop("boxes")
        assert a == b


@pytest.mark.parametrize("name", ["train-boxes", "blink", "counterfactual", "mmvp", "train-plain"])
def test_same_seed_same_bytes_on_disk_whatever_the_workers(name, tmp_path):
    for folder, workers in (("one", 1), ("two", 2)):
        make(tmp_path / folder, [name], seed=9, count=5, workers=workers)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    make(tmp_path / "one", [name], seed=9, count=5, workers=1)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    make(tmp_path / "three", [name], seed=10, count=5, workers=1)
    assert tree(tmp_path / "three") != tree(tmp_path / "one")


def test_formats_can_be_chosen(tmp_path):
    make(tmp_path / "j", ["mmvp"], count=2, format="jsonl", workers=1)
    make(tmp_path / "r", ["mmvp"], count=2, format="real", workers=1)
    assert not (tmp_path / "j/mmvp/MMVP").exists() and not (tmp_path / "r/mmvp/samples.jsonl").exists()
    assert (tmp_path / "r/mmvp/MMVP/Questions.csv").exists()


def test_recipe_is_kept_and_another_one_refused(tmp_path):
    make(tmp_path, ["mmvp"], count=2, seed=1, workers=1)
    assert json.loads((tmp_path / "mmvp/recipe.json").read_text())["seed"] == 1
    with pytest.raises(UserError, match=r"another way \(seed was 1, now 2; count was 2, now 3\)"):
        make(tmp_path, ["mmvp"], count=3, seed=2, workers=1)
    (tmp_path / "blink").mkdir()
    (tmp_path / "blink/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        make(tmp_path, ["blink"], count=5, workers=1)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        make(tmp_path / "file", ["mmvp"], count=1, workers=1)
    with pytest.raises(UserError, match="sheet"):
        show(tmp_path / "file/sheet.png", "mmvp", limit=1)


@pytest.mark.parametrize("bad", ["big", "12x", "-4", "1e3"])
def test_sizes_are_checked(bad):
    with pytest.raises(UserError, match="size"):
        parse_size(bad)


def test_sizes_in_words():
    assert [parse_size(text) for text in ("64", "640x480", "4k", "8K", None)] == [
        (64, 64),
        (640, 480),
        (3840, 2160),
        (7680, 4320),
        None,
    ]


@pytest.mark.parametrize("name", ["curriculum", "blink", "counterfactual", "dialogues", "mme-realworld"])
def test_show_draws_a_sheet(name, tmp_path):
    target = tmp_path / "deep" / "sheet.png"
    assert show(target, name, limit=5, columns=3) == 0
    with Image.open(target) as sheet:
        assert sheet.width == 900 and sheet.height > 400


def test_the_sheet_is_what_its_name_says(tmp_path):
    for name in ("sheet.txt", "sheet"):
        with pytest.raises(UserError, match=rf"{name}: the name of the picture must end in one of \.png, \.jpg"):
            show(tmp_path / name, limit=2)
    with pytest.raises(UserError, match="is a folder: name a file in it"):
        show(tmp_path, limit=2)
    assert show(tmp_path / "sheet.jpg", limit=2) == 0
    assert (tmp_path / "sheet.jpg").read_bytes()[:3] == b"\xff\xd8\xff" and not (tmp_path / "sheet.txt").exists()


def test_an_interrupted_split_says_how_it_goes_on(tmp_path, monkeypatch, capsys):
    """Ctrl-C while pictures are drawn; the same command then makes what an uninterrupted one makes."""

    def stop_after_three(recipe, workers):
        for number, sample in enumerate(samples(recipe, workers)):
            if number == 3:
                raise KeyboardInterrupt
            yield sample

    with monkeypatch.context() as context:
        context.setattr(making, "samples", stop_after_three)
        assert make(tmp_path / "w", ["mmvp"], count=6, workers=1) == 130
    said = capsys.readouterr().err
    assert "interrupted; run the same command to finish it" in said and str(tmp_path / "w") in said
    with pytest.raises(UserError, match="count was 6, now 2"):
        make(tmp_path / "w", ["mmvp"], count=2, workers=1)
    for folder in ("w", "whole"):
        assert make(tmp_path / folder, ["mmvp"], count=6, workers=1) == 0
    assert tree(tmp_path / "w") == tree(tmp_path / "whole")


def test_unknown_split_and_format_are_named(tmp_path):
    with pytest.raises(UserError, match="coco"):
        make(tmp_path, ["coco"])
    with pytest.raises(UserError, match="zip"):
        make(tmp_path, ["mmvp"], format="zip")


def test_the_world_needs_no_torch():
    code = "import sys, realvr.cli.world\nsys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SOURCE}).returncode == 0


def test_a_refused_recipe_leaves_the_folder_free(tmp_path: Path) -> None:
    """The size is found to be impossible only when the first picture is drawn."""
    out = tmp_path / "w"
    with pytest.raises(UserError, match="no visible object fits"):
        make(out, ("hrbench-4k",), "100", count=2, workers=1)
    assert not (out / "hrbench-4k").exists()
    assert make(out, ("hrbench-4k",), "100", count=2, workers=1, resize_pixels=48**2, patch=6) == 0
