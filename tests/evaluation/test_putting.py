"""``realvr ask --put``: what it accepts, and the second reply is the model's with that visual token in its span."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from realvr.backbone import Backbone, Turn
from realvr.cli import main
from realvr.errors import UserError
from realvr.evaluation.ask import INSTRUCTION
from realvr.evaluation.putting import Put, parse_puts
from realvr.latent import prefill, rollout, think
from realvr.latent.sampling import GREEDY

QUESTION = "What color is the circle?"


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four quarters of different colors."""
    path = tmp_path_factory.mktemp("put") / "picture.png"
    image = Image.new("RGB", (48, 48))
    for number, color in enumerate(((200, 30, 30), (30, 30, 200), (20, 160, 40), (230, 200, 20))):
        image.paste(color, (24 * (number % 2), 24 * (number // 2), 24 * (number % 2) + 24, 24 * (number // 2) + 24))
    image.save(path)
    return path


def ask(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(["ask", *map(str, arguments), "--device", "cpu"])
    found = capsys.readouterr()
    return code, found.out, found.err


# ---------------------------------------------------------------------- what is written


def test_places_are_read() -> None:
    assert parse_puts(["4=2,5"], 1) == [Put(4, 0, cell=(1, 4), text="4=2,5")]
    assert parse_puts(["4 = 3:2, 5"], 3)[0].image == 2
    assert parse_puts(["6=.5,0,1,0.25", "2=1,1"], 1) == [
        Put(2, 0, cell=(0, 0), text="2=1,1"),
        Put(6, 0, box=(0.5, 0.0, 1.0, 0.25), text="6=.5,0,1,0.25"),
    ]
    assert [str(put) for put in parse_puts(["4=2,5", "5=0,0,0.5,1"], 1)] == [
        "z_4 at row 2, column 5",
        "z_5 at box 0,0,0.5,1",
    ]
    assert parse_puts([], 0) == []


@pytest.mark.parametrize(
    ("texts", "images", "words"),
    [
        (["4"], 1, "write STEP=ROW,COL"),
        (["4=2"], 1, "write STEP=ROW,COL"),
        (["4=2,5,1"], 1, "write STEP=ROW,COL"),
        (["4=2,x"], 1, "write STEP=ROW,COL"),
        (["4=1.5,2"], 1, "write STEP=ROW,COL"),
        (["four=1,2"], 1, "write STEP=ROW,COL"),
        (["4=nan,0,1,1"], 1, "write STEP=ROW,COL"),
        (["-1=1,2"], 1, "write STEP=ROW,COL"),
        (["0=1,2"], 1, "counted from 1"),
        (["4=0.5,0,0.2,1"], 1, "fractions from 0 to 1"),
        (["4=10,10,20,20"], 1, "fractions from 0 to 1"),
        (["4=1,2"], 2, "shows 2 pictures; name one, counted from 1: 4=1:1,2"),
        (["4=3:1,2"], 2, "there is no picture 3"),
        (["4=0:1,2"], 2, "there is no picture 0"),
        (["4=1,2"], 0, "shows no picture"),
        (["4=1,2", "4=2,2"], 1, "step 4 is replaced already"),
    ],
)
def test_what_cannot_be_put_is_named(texts: list[str], images: int, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_puts(texts, images)
    assert words in str(caught.value) and texts[-1] in str(caught.value) and "\n" not in str(caught.value)


# ---------------------------------------------------------------------- what is answered


def test_the_reply_is_the_models_with_that_token_in_its_span(picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The visual token at row 5, column 2 of the 6 x 6 grid is number 4 * 6 + 1, whichever way it is named."""
    code, out, _ = ask(capsys, "mini", picture, QUESTION, "--put", "2=5,2", "--json", "--expected", "red")
    found = json.loads(out)
    assert code == 0
    backbone = Backbone.load("mini", device="cpu")
    prompt = backbone.prompt([Turn("user", f"{QUESTION}\n{INSTRUCTION}", [Image.open(picture)])])
    assert (prompt.images[0].grid.rows, prompt.images[0].grid.cols) == (6, 6)
    with torch.no_grad():
        batch = backbone.batch([prompt])
        token_D = backbone.encode_images(batch.images).features_ND[4 * 6 + 1]
        state, _ = prefill(backbone, batch)
        _, moved = think(backbone, state, interventions={2: token_D})
    right = rollout(backbone, [prompt], sampling=GREEDY, interventions={2: token_D}).completions[0][0]
    free = rollout(backbone, [prompt], sampling=GREEDY)
    assert found["put"]["latent_norms"] == pytest.approx(moved[0].norm(dim=-1).tolist(), abs=1e-4)
    assert found["latent_norms"] == pytest.approx(free.latents_BKD[0].norm(dim=-1).tolist(), abs=1e-4)
    assert found["latent_norms"] != found["put"]["latent_norms"]
    assert (found["put"]["text"], found["text"]) == (right.text, free.completions[0][0].text)
    assert found["put"]["places"][0] | {"box": None} == {
        "step": 2, "image": 1, "box": None, "name": "z_2 at row 5, column 2"
    }  # fmt: skip
    assert {"correct", "answer"} <= found.keys() and {"correct", "answer"} <= found["put"].keys()
    _, boxed, _ = ask(
        capsys, "mini", picture, QUESTION, "--put", f"2={1.2 / 6},{4.2 / 6},{1.8 / 6},{4.8 / 6}", "--json"
    )
    assert json.loads(boxed)["put"]["latent_norms"] == found["put"]["latent_norms"]


def test_both_replies_are_printed(picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "mini", picture, picture, QUESTION, "--put", "2=2:5,2", "--put", "4=1:0,0,0.5,1")
    _, alone, _ = ask(capsys, "mini", picture, picture, QUESTION)
    named = "z_2 at row 5, column 2 of picture 2, z_4 at box 0,0,0.5,1 of picture 1"
    assert code == 0 and out.startswith(f"without: {alone}with {named}: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mini", "--put", "99=1,1"], "--put: there is no step 99; the span has K = "),
        (["mini", "--put", "4=1,1", "--latents", "3"], "--put: there is no step 4; the span has K = 3"),
        (["mini", "--put", "4=1,1", "--latents", "0"], "there is no latent span (K = 0)"),
        (["mini-base", "--put", "4=1,1"], "mini-base has no trained latent span (K = 0)"),
        (["mini", "--put", "2=7,1"], "--put 2=7,1: row 7, column 1 lies outside the picture: it has 6 x 6"),
        (["mini", "--put", "2=0,1"], "--put 2=0,1: row 0, column 1 lies outside the picture: it has 6 x 6"),
    ],
)
def test_a_model_or_picture_that_lacks_the_place(
    picture: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, error = ask(capsys, arguments[0], picture, QUESTION, *arguments[1:])
    assert code == 2 and out == "" and words in error
    assert error.startswith("realvr: error: ") and error.count("\n") == 1
