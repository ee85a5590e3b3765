"""``realvr ask --show`` from the command line to pixels, and what it refuses."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from realvr.backbone import Backbone, Turn
from realvr.cli import main
from realvr.data.export import write
from realvr.data.reading import read
from realvr.latent.drawing import PATH, PUT
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import Sampling
from realvr.world.splits import Recipe, samples

QUESTION = "What color is the circle?"
MARGIN, EDGE = 18, 16
"""White around the drawing, and beside the picture for the numbers of rows and columns."""


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    image = Image.new("RGB", (48, 48), (216, 208, 196))
    ImageDraw.Draw(image).ellipse((25, 9, 38, 22), fill=(30, 60, 220))
    image.save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def test_the_packaged_model_draws_its_walk(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cells in the JSON and on the picture are those of a slow computation, one product at a time."""
    target = tmp_path / "new" / "walk.png"
    words = ["ask", "mini", str(picture), QUESTION, "--device", "cpu"]
    assert main([*words, "--show", str(target), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main([*words, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert "walk" not in plain and {name: result[name] for name in plain if name != "seconds"} == {
        name: value for name, value in plain.items() if name != "seconds"
    }

    backbone = Backbone.load("mini", device="cpu")
    text = f"{QUESTION}\nPut the final answer inside <answer> and </answer>."
    prompt = backbone.prompt([Turn("user", text, [Image.open(picture)])])
    done = rollout(backbone, [prompt], sampling=Sampling(temperature=0.0, max_new=4))
    tokens = backbone.encode_images(prompt.images).features_ND.double().numpy()
    cells = []
    for z in done.latents_BKD[0].double().numpy():
        cosines = [float(z @ v / np.linalg.norm(z) / np.linalg.norm(v)) for v in tokens]
        best = int(np.argmax(cosines))
        cells.append((best // 6 + 1, best % 6 + 1, cosines[best]))
    assert len(cells) == backbone.latents == len(result["walk"])
    for row, (step, expected) in zip(result["walk"], enumerate(cells, 1), strict=True):
        assert (row["step"], row["picture"], row["row"], row["column"]) == (step, 1, *expected[:2])
        assert row["cosine"] == pytest.approx(expected[2], abs=1e-3)

    drawn = Image.open(target)
    assert result["show"] == str(target)
    visited = {(row, column) for row, column, _ in cells}
    for row, column in visited:
        place = (int(MARGIN + EDGE + (column - 0.5) * 96), int(MARGIN + EDGE + (row - 0.5) * 96))
        assert drawn.getpixel(place) == PATH


def test_a_latent_that_is_put_somewhere_is_seen_there(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both walks side by side: its own, and the one that goes on from the cell that was put."""
    target = tmp_path / "both.png"
    words = ["ask", "mini", str(picture), QUESTION, "--device", "cpu", "--json", "--show", str(target)]
    assert main([*words, "--put", "3=6,2"]) == 0
    result = json.loads(capsys.readouterr().out)
    own, steered = result["walk"], result["put"]["walk"]
    assert steered[:2] == own[:2] and len(steered) == len(own)
    assert steered[2] == {"step": 3, "picture": 1, "row": 6, "column": 2, "cosine": 1.0}
    drawn = np.asarray(Image.open(target)).astype(int)
    half = (drawn.shape[1] - 14) // 2
    left, right = drawn[:, :half], drawn[:, -half:]
    y, x = 24 + MARGIN + EDGE + 5.5 * 96, MARGIN + EDGE + 1.5 * 96  # a title of 24 pixels above
    assert tuple(right[int(y), int(x)]) == PUT
    assert (np.abs(right - PUT).sum(-1) == 0).any() and not (np.abs(left - PUT).sum(-1) == 0).any()


def test_several_pictures_and_other_formats(
    picture: Path, tmp_path: Path, build_tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiled model on a wide and a small picture; without --json a line says where the drawing is."""
    torch.manual_seed(0)
    wide = tmp_path / "wide.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 120, 3), dtype=np.uint8)).save(wide)
    model = Backbone.load(build_tiny("internvl3"), device="cpu", latents=3).save(tmp_path / "model")
    for name, kind in (("walk.jpg", "JPEG"), ("walk.WEBP", "WEBP")):
        target = tmp_path / name
        words = ["ask", str(model), str(wide), str(picture), "Same?", "--device", "cpu", "--max-new", "2"]
        assert main([*words, "--show", str(target)]) == 0
        assert f"walk of the latents drawn into {target}" in capsys.readouterr().out
        assert Image.open(target).format == kind and Image.open(target).width > 700


def test_what_it_refuses(
    picture: Path, tmp_path: Path, build_tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = str(build_tiny("internvl3"))
    good = str(tmp_path / "walk.png")
    cases = {
        "must end in one of .png": ["mini", str(picture), "What?", "--show", str(tmp_path / "walk.txt")],
        "is a folder: name a file in it": ["mini", str(picture), "What?", "--show", str(tmp_path)],
        "a file is where a folder should be": ["mini", str(picture), "What?", "--show", str(picture / "walk.png")],
        "--latents 0 asks for none": ["mini", str(picture), "What?", "--latents", "0", "--show", good],
        "none is given": ["mini", "What?", "--show", good],
        "was not trained with latent slots, so there is no walk": [bare, str(picture), "What?", "--show", good],
    }
    for expected, words in cases.items():
        assert main(["ask", *words, "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1
    assert not Path(good).exists()
    assert main(["ask", bare, str(picture), "What?", "--latents", "2", "--show", good, "--max-new", "1"]) == 0
    assert Path(good).exists()  # slots that were asked for are shown, with the note that they are untrained
    assert "markers are untrained" in capsys.readouterr().err


def test_a_sheet_of_several_walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script behind the picture in the README: one panel for each number of arrows, spread over all of them."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "walk_sheet.py"))
    data = tmp_path / "samples.jsonl"
    write(samples(Recipe("trails", seed=2, count=24)), "jsonl", data)
    every = list(read(data))
    lengths = sorted({int(sample.tags["arrows"]) for sample in every})
    picked = script["chosen"](every, "arrows", 3)
    assert [int(sample.tags["arrows"]) for sample in picked] == [lengths[0], lengths[len(lengths) // 2], lengths[-1]]
    assert picked[0] == next(sample for sample in every if sample.tags["arrows"] == str(lengths[0]))
    assert script["chosen"](every, "no such tag", 2) == every[:2]
    target = tmp_path / "sheet.png"
    monkeypatch.setattr("sys.argv", ["walk_sheet.py", "mini", str(data), str(target), "--count", "3", "--columns", "2"])
    script["main"]()
    drawn = Image.open(target)
    assert drawn.width > 2 * 400 and drawn.height > 2 * 400  # two columns, two rows
