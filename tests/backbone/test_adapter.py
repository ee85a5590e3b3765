"""The adapter against stock transformers: logits, visual tokens, positions, saving, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from helpers import (
    DEVICE,
    DTYPE,
    SIZES,
    ask,
    conversations,
    difference,
    load_stock,
    mixed_prompts,
    patch_grids,
    picture,
    stock_inputs,
    tolerance,
)
from realvr.backbone import FAMILIES, Backbone, Grid, ImageInput, Prompt, Turn
from realvr.backbone.batch import Batch
from realvr.backbone.positions import mrope_positions
from realvr.backbone.vision import patch_positions, window_order
from realvr.errors import UserError
from realvr.families import MARKERS
from realvr.latent import prefill

exact_tokens = pytest.mark.skipif(torch.float32 != DTYPE, reason="the best token is a toss-up in half precision")


@torch.no_grad()
def logits_of(backbone: Backbone, prompts: list[Prompt], batch: Batch | None = None) -> Tensor:
    _, hidden = prefill(backbone, backbone.batch(prompts) if batch is None else batch)
    return backbone.logits(hidden)


@torch.no_grad()
def stock_logits(model: Any, backbone: Backbone, prompts: list[Prompt]) -> Tensor:
    return model(**stock_inputs(backbone, prompts)).logits


def gap(backbone: Backbone, mine: Tensor, theirs: Tensor) -> float:
    """Largest difference of logits (…, V). In half precision a router close to a tie sends a few tokens to another
    expert, between eager and SDPA attention of stock transformers too: there, the largest over nine tokens in ten."""
    if "moe" not in backbone.family.name or DTYPE not in (torch.bfloat16, torch.float16):
        return difference(mine, theirs)
    per_token = (mine.double() - theirs.double()).abs().amax(-1).flatten()
    return float(per_token.quantile(0.9, interpolation="lower"))


# ---------------------------------------------------------------------- prefill


@pytest.mark.parametrize("case", list(conversations()))
def test_prefill_equals_the_stock_forward(backbone: Backbone, stock: Any, case: str) -> None:
    prompt = backbone.prompt(conversations()[case])
    reference = stock_logits(stock, backbone, [prompt])
    assert gap(backbone, logits_of(backbone, [prompt]), reference) <= tolerance(1e-5)
    assert reference.std() > 0.1  # logits that do not vary would agree whatever we do


@exact_tokens
def test_another_image_and_shifted_positions_are_noticed(backbone: Backbone, stock: Any) -> None:
    prompt = backbone.prompt(ask(0))
    reference = stock_logits(stock, backbone, [prompt])
    other = backbone.prompt([Turn("user", ask(0)[0].text, [picture(6)])])  # same size, another content
    assert torch.equal(other.ids, prompt.ids)
    assert difference(logits_of(backbone, [other]), reference) > 1e-2
    batch = backbone.batch([prompt])
    first = int(batch.image_BT[0].nonzero()[0, 0])
    later = torch.arange(len(prompt), device=batch.positions.device) >= first
    shifted = replace(batch, positions=batch.positions + later)  # rotary positions are relative: shift one part only
    assert difference(logits_of(backbone, [prompt], shifted), reference) > 1e-3


def test_a_padded_batch_equals_each_example_alone(backbone: Backbone, stock: Any) -> None:
    prompts = mixed_prompts(backbone)
    assert len({len(prompt) for prompt in prompts}) == len(prompts)
    batch = backbone.batch(prompts)
    with torch.no_grad():
        state, hidden = prefill(backbone, batch)
        together = backbone.logits(hidden)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            single, _ = prefill(backbone, backbone.batch([prompt]))
        mine = together[row, -len(prompt) :]
        assert gap(backbone, mine, logits_of(backbone, [prompt])[0]) <= tolerance(1e-5)
        assert gap(backbone, mine, stock_logits(stock, backbone, [prompt])[0]) <= tolerance(1e-5)
        assert gap(backbone, state.last_BD[row][None], single.last_BD[:1]) <= tolerance(1e-5)
        assert state.next_B[row] == single.next_B[0]
    assert not together.isnan().any()  # padding rows included


# ---------------------------------------------------------------------- vision


def relative(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a part of the largest value: visual tokens have no scale of their own."""
    return difference(mine, theirs) / float(theirs.abs().max())


def all_images(backbone: Backbone) -> list[ImageInput]:
    return [backbone.processor(picture(number)) for number in range(len(SIZES))]


@torch.no_grad()
def stock_features(stock: Any, backbone: Backbone, images: list[ImageInput]) -> tuple[Tensor, list[Tensor]]:
    """Visual tokens (N, D) and deepstack features of the plain model."""
    pixels = torch.cat([image.pixels for image in images]).to(DEVICE, DTYPE)
    if not backbone.family.name.startswith("qwen"):
        return stock.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output.flatten(0, 1), []
    grids = patch_grids(backbone, images).to(DEVICE)
    out = stock.model.get_image_features(pixels, image_grid_thw=grids, return_dict=True)
    deep = getattr(out, "deepstack_features", None) or []
    return torch.cat(out.pooler_output), [x if isinstance(x, Tensor) else torch.cat(x) for x in deep]


def test_visual_tokens_of_mixed_sizes_equal_the_stock_ones(backbone: Backbone, stock: Any) -> None:
    images = all_images(backbone)
    seen = backbone.encode_images(images)
    features, deepstack = stock_features(stock, backbone, images)
    assert relative(seen.features_ND, features) <= tolerance(1e-6)
    assert len(seen.deepstack) == len(deepstack) == (2 if "qwen3" in backbone.family.name else 0)
    for mine, theirs in zip(seen.deepstack, deepstack, strict=True):
        assert relative(mine, theirs) <= tolerance(1e-6)
    assert [len(part) for part in seen.per_image()] == [image.tokens for image in images]
    assert features.std() > 0.05
    if backbone.family.variable_grid:
        assert len({image.tokens for image in images}) > 2
    if backbone.family.name == "qwen2.5-vl":  # windows of 2 x 2 tokens: whole ones, and ones cut on either side
        odd = {(image.grid.rows % 2, image.grid.cols % 2) for image in images}
        assert {(0, 1), (1, 0)} <= odd or (1, 1) in odd


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_visual_tokens_of_one_image_equal_the_stock_ones(backbone: Backbone, stock: Any, number: int) -> None:
    images = [all_images(backbone)[number]]
    assert relative(
        backbone.encode_images(images).features_ND, stock_features(stock, backbone, images)[0]
    ) <= tolerance(1e-6)


def tower(backbone: Backbone) -> torch.nn.Module:
    return backbone.core.visual if hasattr(backbone.core, "visual") else backbone.core.vision_tower


def test_equal_images_are_encoded_once(backbone: Backbone) -> None:
    first, second = (backbone.processor(picture(number)) for number in (0, 1))
    again = backbone.processor(picture(0))
    sizes: list[int] = []

    def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes.append(len(args[0] if args else kwargs["pixel_values"]))

    hook = tower(backbone).register_forward_pre_hook(count, with_kwargs=True)
    try:
        seen = backbone.encode_images([first, second, again, second])
        turns = [*ask(0), Turn("assistant", "Red."), *ask(0, text="And now?")]
        with torch.no_grad():
            prefill(backbone, backbone.batch([backbone.prompt(turns), backbone.prompt(ask(0))]))
    finally:
        hook.remove()
    assert sizes == [len(first.pixels) + len(second.pixels), len(first.pixels)]
    parts = seen.per_image()
    assert [len(part) for part in parts] == [image.tokens for image in (first, second, again, second)]
    assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])
    alone = backbone.encode_images([second]).features_ND
    assert relative(parts[1], alone) <= tolerance(1e-6)


def test_vision_gets_no_gradient(fresh: Backbone) -> None:
    batch = fresh.batch([fresh.prompt(ask(0, 1))])
    _, hidden = prefill(fresh, batch)
    fresh.logits(hidden).logsumexp(-1).sum().backward()
    vision = [p for module in fresh.vision_modules() for p in module.parameters()]
    assert vision and all(p.grad is None and not p.requires_grad for p in vision)
    names = {id(p) for p in vision}
    missing = [n for n, p in fresh.model.named_parameters() if id(p) not in names and p.grad is None]
    assert missing == []
    for p in vision:
        p.requires_grad_(True)
    assert not fresh.encode_images(batch.images).features_ND.requires_grad
    assert fresh.encode_images(batch.images, train=True).features_ND.requires_grad


GRIDS = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(grids=GRIDS, merge=st.integers(1, 3))
def test_patch_positions_equal_the_stock_ones(grids: list[tuple[int, int]], merge: int) -> None:
    patches = torch.tensor(grids) * merge
    thw = torch.cat([torch.ones(len(grids), 1, dtype=torch.long), patches], dim=1)
    assert torch.equal(patch_positions(patches, merge), get_vision_position_ids(thw, merge))


@settings(deadline=None, max_examples=100)
@given(grids=GRIDS, merge=st.integers(1, 3), side=st.integers(1, 4))
def test_window_order_equals_the_stock_one(grids: list[tuple[int, int]], merge: int, side: int) -> None:
    tokens = torch.tensor(grids)
    thw = torch.cat([torch.ones(len(grids), 1, dtype=torch.long), tokens * merge], dim=1)
    index, boundaries = get_vision_window_index(thw, merge, window_size=side * merge * 14, patch_size=14)
    order, sizes = window_order(tokens, side)
    assert torch.equal(order, index)
    assert torch.equal((sizes * merge**2).cumsum(0), boundaries[1:].long())


# ---------------------------------------------------------------------- positions

ROWS = st.lists(
    st.tuples(
        st.integers(1, 4),  # text before the first image
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)), max_size=3),  # image, text after
    ),
    min_size=1,
    max_size=4,
)


def random_prompts(backbone: Backbone, rows: list[Any]) -> list[Prompt]:
    """Prompts of ordinary ids and images of the given grids; positions do not look at pixels."""
    prompts = []
    for before, images in rows:
        ids, inputs = [5] * before, []
        for height, width, after in images:
            grid = Grid(height, width, merge=2)
            ids += [backbone.image_id] * grid.tokens + [7] * after
            inputs.append(ImageInput(torch.empty(0), grid, f"{height}x{width}", ""))
        prompts.append(Prompt(torch.tensor(ids), tuple(inputs)))
    return prompts


@settings(deadline=None, max_examples=60)
@given(rows=ROWS)
def test_positions_equal_the_stock_ones(backbone: Backbone, stock: Any, rows: list[Any]) -> None:
    prompts = random_prompts(backbone, rows)
    batch = backbone.batch(prompts)
    mask = batch.real_BT.long()
    if not backbone.mrope:
        for row, prompt in enumerate(prompts):
            assert batch.positions[row, -len(prompt) :].tolist() == list(range(len(prompt)))
            assert batch.next_B[row] == len(prompt)
        return
    grids = [image for prompt in prompts for image in prompt.images]
    expected, _ = stock.model.get_rope_index(
        batch.ids_BT,
        (batch.ids_BT == backbone.image_id).int(),
        image_grid_thw=patch_grids(backbone, grids).to(DEVICE) if grids else None,
        attention_mask=mask,
    )
    for row, prompt in enumerate(prompts):
        theirs = expected[:, row, -len(prompt) :]
        assert torch.equal(batch.positions[:, row, -len(prompt) :], theirs)
        assert batch.next_B[row] == theirs.max() + 1


def test_positions_of_a_turned_image_differ() -> None:
    """Control of the test above: rows and columns exchanged are not the same positions."""
    image = torch.ones(1, 6, dtype=torch.bool)
    wide, tall = (mrope_positions(image, image, [Grid(r, c)])[0] for r, c in ((2, 3), (3, 2)))
    assert not torch.equal(wide, tall)


# ---------------------------------------------------------------------- saving and loading


def test_saved_and_loaded_logits_are_the_same(backbone: Backbone, saved: Path) -> None:
    again = Backbone.load(saved, dtype=DTYPE, device=DEVICE)
    prompts = mixed_prompts(backbone)
    for mine, theirs in zip(prompts, mixed_prompts(again), strict=True):
        assert torch.equal(mine.ids, theirs.ids)
    assert torch.equal(logits_of(backbone, prompts), logits_of(again, prompts))


def test_markers_are_added_once(checkpoint: Path, family: str, tmp_path: Path) -> None:
    tokens_before = len(AutoTokenizer.from_pretrained(checkpoint))
    rows_before = load_stock(checkpoint).get_input_embeddings().weight.shape[0]
    first = Backbone.load(checkpoint, dtype=DTYPE, device=DEVICE, latents=5)
    assert first.markers_added
    first.save(tmp_path / "one")
    second = Backbone.load(tmp_path / "one", dtype=DTYPE, device=DEVICE)
    assert not second.markers_added
    second.save(tmp_path / "two")
    third = Backbone.load(tmp_path / "two", dtype=DTYPE, device=DEVICE)
    # InternVL's tokenizer has an entry more than there are rows; the others have rows to spare.
    rows = rows_before + 4 if family == "internvl3" else rows_before
    for one in (first, second, third):
        markers = (one.markers.start, one.markers.slot, one.markers.end)
        assert markers == (tokens_before, tokens_before + 1, tokens_before + 2)
        assert markers == tuple(one.tokenizer.convert_tokens_to_ids(list(MARKERS)))
        assert len(one.tokenizer) == tokens_before + 3
        assert one.model.get_input_embeddings().weight.shape[0] == rows
        assert one.model.lm_head.weight.shape[0] == one.model.lm_head.out_features == rows
        assert one.text_config.vocab_size == rows
        assert one.latents == 5
    for name in ("one", "two"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        ids = dict(zip(("start", "slot", "end"), range(tokens_before, tokens_before + 3), strict=True))
        images = {
            "gemma3": {},
            "internvl3": {"tiles": True, "max_tiles": 12},
        }.get(family, {"min_tokens": first.processor.min_tokens, "max_tokens": first.processor.max_tokens})
        assert config["realvr"] == {"latents": 5, "markers": ids, "images": images}
    assert torch.equal(first.embed(torch.tensor([first.markers.start], device=DEVICE)),
                       third.embed(torch.tensor([third.markers.start], device=DEVICE)))  # fmt: skip


def test_adding_markers_leaves_every_other_row_alone(checkpoint: Path, backbone: Backbone) -> None:
    before = load_stock(checkpoint)
    tokens = len(AutoTokenizer.from_pretrained(checkpoint))
    known = min(tokens, before.lm_head.out_features)  # InternVL's last token has no row, and gets a new one
    for old, new in (
        (before.get_input_embeddings(), backbone.model.get_input_embeddings()),
        (before.lm_head, backbone.model.lm_head),
    ):
        assert torch.equal(old.weight[:known], new.weight[:known])
        fresh_rows = new.weight[known : tokens + 3]
        assert difference(fresh_rows, old.weight[:known].mean(0).expand(len(fresh_rows), -1)) <= tolerance(1e-6)


def test_k_is_8_by_default_and_can_be_chosen(checkpoint: Path, saved: Path) -> None:
    assert Backbone.load(checkpoint, device=DEVICE).latents == 8
    assert Backbone.load(saved, device=DEVICE).latents == 8
    with pytest.warns(UserWarning, match="says K = 8; K = 0 is used here"):
        assert Backbone.load(saved, device=DEVICE, latents=0).latents == 0


def test_a_saved_checkpoint_loads_in_plain_transformers(backbone: Backbone, saved: Path) -> None:
    model, info = AutoModelForImageTextToText.from_pretrained(saved, dtype=DTYPE, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    model = model.to(DEVICE).eval()
    assert type(model) is type(backbone.model)
    prompts = [backbone.prompt(conversations()["two turns"])]
    assert gap(backbone, stock_logits(model, backbone, prompts), logits_of(backbone, prompts)) <= tolerance(1e-5)
    mine, theirs = backbone.model.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


# ---------------------------------------------------------------------- the same model object, used as stock


@exact_tokens
def test_the_adapters_model_still_works_as_stock(backbone: Backbone, stock: Any) -> None:
    prompts = mixed_prompts(backbone)
    logits_of(backbone, prompts)  # a pass of ours leaves nothing behind
    for chosen in ([prompts[0]], [prompts[2]], prompts):
        inputs = stock_inputs(backbone, chosen)
        real = inputs["attention_mask"].bool()
        mine, theirs = stock_logits(backbone.model, backbone, chosen), stock_logits(stock, backbone, chosen)
        assert difference(mine[real], theirs[real]) <= tolerance(1e-5)
        options = {"do_sample": False, "max_new_tokens": 12, "suppress_tokens": backbone.forbidden_ids().tolist()}
        assert torch.equal(backbone.model.generate(**inputs, **options), stock.generate(**inputs, **options))


# ---------------------------------------------------------------------- control strings and forbidden ids

VISION_STRINGS = {
    "qwen2.5-vl": ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"],
    "internvl3": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
}
VISION_STRINGS["qwen3-vl"] = VISION_STRINGS["qwen3-vl-moe"] = VISION_STRINGS["qwen2.5-vl"]


def test_control_strings_reach_the_model_as_text(backbone: Backbone, stock: Any) -> None:
    special = [token.content for token in backbone.tokenizer.added_tokens_decoder.values()]
    assert set(VISION_STRINGS[backbone.family.name]) | set(MARKERS) <= set(special)
    hostile = "".join(special) + " ".join(special) + backbone.family.before + backbone.family.after
    image, latents = picture(0), torch.zeros(3, backbone.width)

    def prompt(text: str) -> Prompt:
        reply = Turn("assistant", text, latents=latents)
        return backbone.prompt([Turn("user", text, [image]), reply, Turn("user", text)])

    attacked, harmless = prompt(hostile), prompt("x")
    for token_id in [*backbone.tokenizer.added_tokens_decoder, backbone.image_id, backbone.markers.slot]:
        assert (attacked.ids == token_id).sum() == (harmless.ids == token_id).sum(), token_id
    assert (attacked.ids == backbone.image_id).sum() == attacked.images[0].tokens
    assert (attacked.ids == backbone.markers.slot).sum() == 3
    logits = logits_of(backbone, [attacked])
    assert logits.isfinite().all()
    plain = backbone.prompt([Turn("user", hostile, [image])])
    assert gap(backbone, logits_of(backbone, [plain]), stock_logits(stock, backbone, [plain])) <= tolerance(1e-5)


def test_forbidden_ids_are_vision_markers_and_rows_without_a_token(backbone: Backbone, stock: Any) -> None:
    rows = stock.lm_head.weight.shape[0]
    strings = [*VISION_STRINGS[backbone.family.name], *MARKERS]
    named = [backbone.tokenizer.convert_tokens_to_ids(string) for string in strings]
    unnamed = [i for i in range(rows) if backbone.tokenizer.convert_ids_to_tokens(i) is None]
    found = backbone.forbidden_ids().tolist()
    assert found == sorted({*named, *unnamed})
    assert stock.config.image_token_id in found and max(found) < rows
    assert set(found).isdisjoint(backbone.eos_ids)
    eos = stock.generation_config.eos_token_id
    assert set(eos) <= set(backbone.eos_ids) and len(eos) == 2


def test_mismatched_images_or_latents_raise(backbone: Backbone) -> None:
    prompt = backbone.prompt(ask(0))
    with pytest.raises(ValueError, match="image tokens"):
        backbone.batch([replace(prompt, images=())])
    reply = Turn("assistant", "Red.", latents=torch.zeros(3, backbone.width))
    spanned = backbone.prompt([*ask(0), reply, Turn("user", "Sure?")])
    for latents in ((), (torch.zeros(2, backbone.width),)):
        with pytest.raises(ValueError, match="latent"):
            backbone.batch([replace(spanned, latents=latents)])


def test_inputs_of_another_model_or_batch_are_refused(backbone: Backbone) -> None:
    """``masked_scatter`` would take the first numbers of a source that is too long, without a word."""
    batch, more = backbone.batch([backbone.prompt(ask(0))]), backbone.prompt(ask(0, 1)).images
    for images in (more, ()):
        with pytest.raises(ValueError, match="not those of the batch"):
            backbone.embed_batch(batch, backbone.encode_images(images))
    with pytest.raises(ValueError, match="not those of the batch"):
        backbone.embed_batch(backbone.batch([backbone.prompt(ask(text="None here."))]), backbone.encode_images(more))
    reply = Turn("assistant", "Red.", latents=torch.zeros(3, 2 * backbone.width))
    wide = backbone.batch([backbone.prompt([Turn("user", "Which?"), reply, Turn("user", "Sure?")])])
    with pytest.raises(ValueError, match=f"width {2 * backbone.width}, the model has {backbone.width}"):
        backbone.embed_batch(wide, backbone.encode_images(()))


# ---------------------------------------------------------------------- bad input


def refuses(path: str | Path, *words: str, **options: Any) -> None:
    """Loading fails with one line that contains ``words``."""
    with pytest.raises(UserError) as caught:
        Backbone.load(path, device="cpu", **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def test_a_missing_path_a_file_and_an_empty_directory(tmp_path: Path) -> None:
    refuses(tmp_path / "absent", str(tmp_path / "absent"), "does not exist")
    refuses("./absent", "./absent", "does not exist")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    refuses(file, str(file), "is a file")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuses(empty, str(empty), "config.json")
    refuses("minni", "minni does not exist; did you mean mini?", "a hub id (OWNER/NAME)", "mini-direct")
    refuses("qwerty", "qwerty does not exist; MODEL is a directory")


def test_a_run_in_place_of_its_model(tmp_path: Path) -> None:
    """Each folder of a run that is no model says which one is, or how it comes to be."""
    run, state = tmp_path / "run", tmp_path / "run/checkpoints/step-000004"
    state.mkdir(parents=True)
    (run / "settings.yaml").write_text("run: {}\n")
    (state / "rank-0.json").write_text("{}")
    for path in (run, run / "final"):
        refuses(path, f"{run} has no final model yet: the run is not finished")
    refuses(run / "best", "has no best model", "checkpoint.keep_best")
    refuses(state, "a checkpoint of a run", f"{run} has no final model yet", "--export")
    (run / "best").mkdir()
    (run / "best/config.json").write_text("{}")
    refuses(run, f"its best model so far is {run / 'best'}")
    (run / "final").mkdir()
    (run / "final/config.json").write_text("{}")
    refuses(run, f"{run} is a run: its model is {run / 'final'}")
    refuses(state, f"the run's model is {run / 'final'}", "--export")


@pytest.mark.parametrize("text", ["{", "[]", "null", "{}", '{"model_type": 3}'])
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refuses(tmp_path, str(tmp_path))


@pytest.mark.parametrize("model_type", ["llava", "bert", "made_up"])
def test_an_unsupported_architecture(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    refuses(tmp_path, str(tmp_path), f"'{model_type}'", *FAMILIES)


@pytest.mark.parametrize(
    ("pattern", "word"),
    [("*.safetensors", "weights"), ("preprocessor_config.json", "image processor"), ("tokenizer*", "tokenizer")],
)
def test_a_missing_file(broken: Path, pattern: str, word: str) -> None:
    removed = [file.unlink() for file in broken.glob(pattern)]
    assert removed
    refuses(broken, str(broken), word)


def test_damaged_weights(broken: Path) -> None:
    file = next(broken.glob("*.safetensors"))
    whole = file.read_bytes()
    for damaged in (b"", b"not a safetensors file", whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        refuses(broken, str(broken))


def test_weights_that_lack_a_tensor(broken: Path) -> None:
    """Stock loading fills what is missing with random numbers and only warns."""
    from safetensors.torch import load_file, save_file

    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    refuses(broken, str(broken))


def test_damaged_tokenizer_and_processor(broken: Path) -> None:
    processor = broken / "preprocessor_config.json"
    whole = processor.read_text()
    processor.write_text("{")
    refuses(broken, str(broken))
    processor.write_text(whole)
    (broken / "tokenizer.json").write_text("{")
    refuses(broken, str(broken), "tokenizer")


def test_configurations_of_a_wrong_type(broken: Path) -> None:
    config, processor = broken / "config.json", broken / "preprocessor_config.json"
    whole, settings = json.loads(config.read_text()), processor.read_text()
    for value in (3, whole["text_config"] | {"hidden_size": "wide"}):
        config.write_text(json.dumps(whole | {"text_config": value}))
        refuses(broken, str(broken), "configuration")
    config.write_text(json.dumps(whole))
    processor.write_text("[]")
    refuses(broken, str(processor), "a JSON object is expected")
    processor.write_text('{"size": {"height": "a", "width": 1}, "patch_size": "a"}')
    refuses(broken, str(broken), "image processor configuration")
    processor.write_text(settings)
    Backbone.load(broken, device="cpu")


def test_weights_of_another_shape_name_a_tensor(broken: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = json.loads((broken / "config.json").read_text())
    for name in {"intermediate_size", "moe_intermediate_size"} & set(config["text_config"]):
        config["text_config"][name] += 8
    (broken / "config.json").write_text(json.dumps(config))
    refuses(broken, str(broken), "shape", "layers.0.mlp")
    assert "MISMATCH" not in capfd.readouterr().err


def test_stored_tensors_without_a_place_are_noticed(broken: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = next(broken.glob("*.safetensors"))
    save_file(load_file(file) | {"model.left_over": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.warns(UserWarning, match="1 stored tensors are not used, among them .*left_over"):
        Backbone.load(broken, device="cpu")


def test_negative_latents(checkpoint: Path) -> None:
    refuses(checkpoint, "-1", "latents", latents=-1)
