"""What a checkpoint remembers of its training: limits on visual tokens and K, from Stage 1 through Stage 2 to eval."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from realvr.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.cli import main
from realvr.errors import UserError
from realvr.evaluation.model_responder import prompt_hash
from realvr.training import packaged
from realvr.training.configuration import load_settings
from stage_runs import LATENTS, config_file, configure, make, run, with_markers, world, write

LOW, HIGH = 6, 20
"""Visual tokens of the budget; the pictures below have far more."""


def visual_tokens(backbone: Backbone, size: tuple[int, int]) -> int:
    return backbone.processor(Image.new("RGB", size, "teal")).tokens


def stock_tokens(backbone: Backbone, size: tuple[int, int], low: int, high: int) -> int:
    """What the stock processor makes of the picture under a budget, which it counts in pixels."""
    stock = backbone.processor.stock
    side = (stock.patch_size * stock.merge_size) ** 2
    fresh = Qwen2VLImageProcessorPil(patch_size=stock.patch_size, merge_size=stock.merge_size)
    bounds = {"shortest_edge": low * side, "longest_edge": high * side}
    grid = fresh(images=[Image.new("RGB", size, "teal")], size=bounds, return_tensors="pt")["image_grid_thw"][0]
    return int(grid.prod()) // stock.merge_size**2


@pytest.fixture(scope="module")
def stage_one(plain: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Stage-1 model that was trained with a budget."""
    out = tmp_path_factory.mktemp("remembered") / "sft"
    run("sft", configure("sft", plain, data, out, model={"min_tokens": LOW, "max_tokens": HIGH}))
    return out / "final"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A question about a picture far above the budget."""
    return write(world(2, size=420), tmp_path_factory.mktemp("large"))


# ---------------------------------------------------------------------- limits on visual tokens


def test_a_budget_goes_from_stage_one_through_stage_two_to_eval(
    plain: Path, stage_one: Path, data: Path, large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stage 2 lowers the maximum and keeps Stage 1's minimum; eval asks with both, and says where it does not."""
    run("rl", configure("rl", stage_one, data, tmp_path / "rl", model={"max_tokens": 12}))
    capsys.readouterr()
    resolved = yaml.safe_load((tmp_path / "rl" / "settings.yaml").read_text())["model"]
    assert (resolved["min_tokens"], resolved["max_tokens"], resolved["latents"]) == (LOW, 12, LATENTS)
    final = tmp_path / "rl" / "final"

    def evaluate(out: str, *flags: str) -> tuple[str, str]:
        arguments = ["eval", str(final), "--bench", f"own={large}", "--out", str(tmp_path / out), "--max-new", "2"]
        assert main([*arguments, "--no-ablation", "--device", "cpu", "--latents", "0", *flags]) == 0
        first = json.loads((tmp_path / out / "predictions.jsonl").read_text().splitlines()[0])
        return first["prompt"], capsys.readouterr().err

    def prompt(high: int) -> str:
        """Hash of the first prompt with its picture at ``high`` tokens, by a model that remembers no limits."""
        backbone = Backbone.load(plain, device="cpu", min_tokens=LOW, max_tokens=high)
        sample = world(2, size=420)[0]
        images = [backbone.processor(image.open()) for image in sample.images]
        assert [image.tokens for image in images] == [stock_tokens(backbone, (420, 420), LOW, high)]
        return prompt_hash(backbone.prompt(conversation(sample, images)))

    asked, notes = evaluate("as-trained")
    assert asked == prompt(12) and "config.json" not in notes
    asked, notes = evaluate("other", "--max-tokens", "40")
    assert asked == prompt(40) != prompt(12)
    assert f"note: config.json of {final} says max_tokens = 12; max_tokens = 40 is used here" in notes


def test_the_same_picture_has_as_many_visual_tokens_in_training_as_after_it(
    stage_one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "large.png"
    Image.new("RGB", (700, 420), "teal").save(picture)
    wanted = stock_tokens(Backbone.load(stage_one, device="cpu"), (700, 420), LOW, HIGH)

    def ask(*flags: str) -> tuple[int, str]:
        assert main(["ask", str(stage_one), str(picture), "What?", "--json", "--max-new", "1", *flags]) == 0
        told = capsys.readouterr()
        return json.loads(told.out)["visual_tokens"][0], told.err

    tokens, notes = ask()
    assert tokens == wanted <= HIGH and "realvr: note" not in notes
    tokens, notes = ask("--max-tokens", "60", "--latents", "2")
    assert tokens == stock_tokens(Backbone.load(stage_one, device="cpu"), (700, 420), LOW, 60) > HIGH
    assert f"says max_tokens = {HIGH}; max_tokens = 60 is used here" in notes and f"trained with K = {LATENTS}" in notes
    _, notes = ask("--latents", "0")
    assert f"was trained with K = {LATENTS}; K = 0 was chosen explicitly" in notes


@pytest.mark.parametrize("verb", ["counterfactual", pytest.param("exchange", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_pairs_are_asked_as_in_training_unless_told_otherwise(
    verb: str, stage_one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = write(world(4, split="counterfactual"), tmp_path / "data")

    def ask(out: str, *flags: str) -> tuple[str, str]:
        assert main([verb, str(stage_one), str(pairs), "--out", str(tmp_path / out), "--max-new", "1", *flags]) == 0
        settings = json.loads((tmp_path / out / f"{verb}_settings.json").read_text())
        return settings["model"]["images"], capsys.readouterr().err

    images, notes = ask("same")
    assert (
        images.startswith(f"{LOW} to {HIGH} visual tokens")
        and "config.json" not in notes
        and "trained with" not in notes
    )
    images, notes = ask("other", "--min-tokens", "9", "--latents", "2")
    assert images.startswith(f"9 to {HIGH} visual tokens")
    assert f"says min_tokens = {LOW}; min_tokens = 9 is used here" in notes
    assert f"was trained with K = {LATENTS}; K = 2 was chosen explicitly" in notes


def test_a_bound_given_alone_moves_the_other_out_of_its_way(stage_one: Path) -> None:
    both = f"says min_tokens = {LOW}, max_tokens = {HIGH}; min_tokens = 30, max_tokens = 30 are used here"
    with pytest.warns(UserWarning, match=both):
        low = Backbone.load(stage_one, device="cpu", min_tokens=30)
    assert (low.processor.min_tokens, low.processor.max_tokens) == (30, 30)
    with pytest.warns(UserWarning, match=f"max_tokens = {HIGH}; min_tokens = 4, max_tokens = 4 are used here"):
        high = Backbone.load(stage_one, device="cpu", max_tokens=4)
    assert (high.processor.min_tokens, high.processor.max_tokens) == (4, 4)
    with pytest.raises(UserError, match="minimum 9 is over maximum 3"):
        Backbone.load(stage_one, device="cpu", min_tokens=9, max_tokens=3)


def test_tiles_are_remembered(build_tiny: Callable[[str], Path], data: Path, tmp_path: Path) -> None:
    model = build_tiny("internvl3")
    size = (400, 300)
    per_tile = Backbone.load(model, device="cpu").processor.tokens_per_tile
    assert per_tile is not None
    assert visual_tokens(Backbone.load(model, device="cpu"), size) == 13 * per_tile
    run("sft", configure("sft", model, data, tmp_path / "sft", model={"max_tiles": 4}))
    few = Backbone.load(tmp_path / "sft" / "final", device="cpu")
    assert 2 * per_tile <= visual_tokens(few, size) <= 5 * per_tile
    Backbone.load(model, device="cpu", tiles=False).save(tmp_path / "one")
    assert visual_tokens(Backbone.load(tmp_path / "one", device="cpu"), size) == per_tile
    with pytest.warns(UserWarning, match="tiles = False; tiles = True is used here"):
        assert visual_tokens(Backbone.load(tmp_path / "one", device="cpu", tiles=True), size) == 13 * per_tile
    with pytest.warns(UserWarning, match="gemma3 ignores max_tiles"):
        Backbone.load(build_tiny("gemma3"), device="cpu", max_tiles=4)


@pytest.mark.parametrize("tiles", [True, False])
def test_tiles_that_a_family_does_not_have_are_noted(tiles: bool, untrained: Path, data: Path, tmp_path: Path) -> None:
    raw = configure("sft", untrained, data, tmp_path / "run", model={"tiles": tiles})
    with pytest.warns(UserWarning, match=r"qwen2.5-vl ignores tiles: it cuts no image into tiles"):
        run("sft", raw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Backbone.load(tmp_path / "run" / "final", device="cpu")  # what was ignored is not remembered


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (3, "realvr is 3"),
        ({"latents": "many"}, "realvr.latents is 'many'"),
        ({"latents": 3, "images": [1]}, r"realvr.images is \[1\]"),
        ({"latents": 3, "images": {"max_tokens": 0}}, "realvr.images.max_tokens is 0"),
        ({"latents": 3, "images": {"tiles": "no"}}, "realvr.images.tiles is 'no'"),
    ],
)
def test_a_damaged_note_is_named(note: Any, message: str, untrained: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(untrained, tmp_path / "model")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"realvr": note}))
    with pytest.raises(UserError, match=message):
        Backbone.load(broken, device="cpu")


@pytest.mark.parametrize(("size", "stock"), [((4000, 3000), 3328), ((7680, 4320), 2304), ((1344, 1344), 2560)])
def test_the_papers_internvl_settings_keep_its_cap(size: tuple[int, int], stock: int) -> None:
    """Token counts of the released processor settings: tiles of 448 pixels with 256 tokens, at most 12, a thumbnail."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    from realvr.families import FAMILIES
    from realvr.imaging.processing import ImageProcessor

    released = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=12
    )
    picture = Image.new("RGB", size)
    chosen = load_settings("rl", "paper/internvl3-8b-rl").model
    free = ImageProcessor(FAMILIES["internvl3"], released, 256)
    capped = ImageProcessor(FAMILIES["internvl3"], released, 256, max_tiles=chosen.max_tiles)
    by_hand = released(images=[picture], crop_to_patches=True, max_patches=9, return_tensors="pt")["pixel_values"]
    assert free(picture).tokens == stock
    assert capped(picture).tokens == 256 * len(by_hand) <= 2560


# ---------------------------------------------------------------------- K


def test_k_of_stage_two_is_that_of_stage_one(untrained: Path, data: Path, tmp_path: Path) -> None:
    raw = configure("rl", untrained, data, tmp_path)
    del raw["model"]["latents"]
    task, settings, _ = make("rl", raw)
    assert settings.model.latents == LATENTS
    assert task.collect(0).microbatches[0].latents_BKD.shape[1] == LATENTS


def test_a_file_with_another_k_is_refused_and_a_flag_overrides_it(
    untrained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = configure("rl", untrained, data, tmp_path / "run", model={"latents": 5})
    config = config_file(raw, tmp_path / "mine.yaml")
    assert main(["train", "rl", str(config)]) == 2
    told = capsys.readouterr().err
    assert f"{config}: model.latents is 5, but {untrained} was trained with K = {LATENTS}" in told
    assert "--model.latents 5" in told and not (tmp_path / "run").exists()
    assert main(["train", "rl", str(config), "--model.latents", "2"]) == 0
    told = capsys.readouterr().err
    assert f"note: config.json of {untrained} says K = {LATENTS}; K = 2 is used here" in told
    assert Backbone.load(tmp_path / "run" / "final", device="cpu").latents == 2


def test_no_stage_two_configuration_fixes_k() -> None:
    files = packaged.names("rl")
    assert len(files) >= 8
    for path in files:
        assert load_settings("rl", path).model.latents is None, path
        assert load_settings("rl", path, ["--method", "direct"]).model.latents == 0, path


def test_direct_refuses_a_checkpoint_of_stage_one(
    untrained: Path, plain: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = configure("rl", untrained, data, tmp_path / "run")
    del raw["model"]["latents"]
    config = config_file(raw, tmp_path / "mine.yaml")
    assert main(["train", "rl", str(config), "--method", "direct"]) == 2
    told = capsys.readouterr().err
    assert f"model.path: {untrained} went through Stage 1 (K = {LATENTS})" in told and "--model.path" in told
    control = with_markers(plain, tmp_path / "direct-sft", latents=0)
    for allowed in (plain, control):
        task, settings, engine = make("rl", raw | {"method": "direct", "model": {"path": str(allowed)}})
        assert settings.model.latents == 0 and task.backbone.latents == 0
    without = ["--method", "custom", "--lambda-ev", "0", "--model.latents", "0"]
    assert main(["train", "rl", str(config), *without]) == 0  # the way out that the message names


def test_switches_for_tiles_still_work(tmp_path: Path) -> None:
    config = config_file(configure("sft", tmp_path / "m", tmp_path / "d", tmp_path / "o"), tmp_path / "c.yaml")
    for flags, wanted in (
        ([], None),
        (["--model.no-tiles"], False),
        (["--model.tiles", "--optim.lr", "1e-4"], True),
        (["--model.tiles"], True),
        (["--model.tiles", "False"], False),
    ):
        assert load_settings("sft", config, flags).model.tiles is wanted, flags
