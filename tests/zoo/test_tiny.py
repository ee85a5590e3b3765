"""Small checkpoints: complete, stock, reproducible, and rendering prompts as the released models do."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

from realvr.errors import UserError
from realvr.families import FAMILIES, MARKERS
from realvr.zoo import tiny

REAL_TOKENIZER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "qwen2_5_vl_tokenizer"

ONE_IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What is it?\n"}]}]
DIALOGUE = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Compare."}]},
    {"role": "assistant", "content": " Same. "},
    {"role": "user", "content": "Sure?"},
]

_QWEN_ONE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|> What is it?\n<|im_end|>\n<|im_start|>assistant\n"
)
_QWEN_DIALOGUE = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|image_pad|><|vision_end|>Compare."
    "<|im_end|>\n<|im_start|>assistant\n Same. <|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
)
RENDERED = {
    "qwen2.5-vl": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + _QWEN_ONE,
        _QWEN_DIALOGUE,
    ),
    "qwen3-vl": (_QWEN_ONE, _QWEN_DIALOGUE),
    "qwen3-vl-moe": (_QWEN_ONE, _QWEN_DIALOGUE),
    "internvl3": (
        "<|im_start|>user\n<IMG_CONTEXT>\n What is it?\n<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<IMG_CONTEXT>\n<IMG_CONTEXT>\nCompare.<|im_end|>\n"
        "<|im_start|>assistant\n Same. <|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "gemma3": (
        "<bos><start_of_turn>user\n<start_of_image>What is it?<end_of_turn>\n<start_of_turn>model\n",
        "<bos><start_of_turn>user\nBe brief.\n\n<start_of_image><start_of_image>Compare.<end_of_turn>\n"
        "<start_of_turn>model\nSame.<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n",
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {family: tiny.build(family, "tiny", root / family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture
def directory(directories, family):
    return directories[family.name]


def image_inputs(family, directory, tokenizer, image):
    """Inputs of a stock forward for one image and a question, the placeholder expanded by hand."""
    module, _, name = family.image_processor.partition(":")
    processor = getattr(import_module(module), name).from_pretrained(directory)
    tiling = {"crop_to_patches": True} if family.name == "internvl3" else {}
    pixels = processor(images=[image], return_tensors="pt", **tiling)
    if "image_grid_thw" in pixels:
        count = int(pixels["image_grid_thw"].prod()) // 4
    else:
        tokens = json.loads((directory / "processor_config.json").read_text())["image_seq_length"]
        count = tokens * pixels["pixel_values"].shape[0]
    text = tokenizer.apply_chat_template(ONE_IMAGE, tokenize=False, add_generation_prompt=True)
    text = text.replace(family.placeholder, family.before + family.image_token * count + family.after)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    is_image = (ids == tokenizer.convert_tokens_to_ids(family.image_token)).long()
    assert int(is_image.sum()) == count
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels["pixel_values"]}
    if "image_grid_thw" in pixels:
        return {**inputs, "image_grid_thw": pixels["image_grid_thw"], "mm_token_type_ids": is_image}, count
    if family.name == "gemma3":
        inputs["token_type_ids"] = is_image
    return inputs, count


VISUAL_TOKENS = {"qwen2.5-vl": 6, "qwen3-vl": 6, "qwen3-vl-moe": 6, "internvl3": 28, "gemma3": 16}


def test_stock_forward_sees_the_image(family, directory):
    model, info = AutoModelForImageTextToText.from_pretrained(
        directory, local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(model).__module__.startswith("transformers.")
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    outputs = []
    for color in ("red", "blue"):
        inputs, count = image_inputs(family, directory, tokenizer, Image.new("RGB", (84, 56), color))
        assert count == VISUAL_TOKENS[family.name]
        with torch.no_grad():
            outputs.append(model.eval()(**inputs, output_hidden_states=True, use_cache=False))
    red, blue = outputs
    assert red.logits.isfinite().all()
    assert (red.logits[0, -1] - blue.logits[0, -1]).abs().max() > 1e-2
    last = red.hidden_states[-1][0]
    assert torch.cosine_similarity(last[-1], last[-2], dim=0) < 0.95  # neighbours differ: the model is not degenerate


def test_attention_is_not_uniform(family, directory):
    model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs, _ = image_inputs(family, directory, tokenizer, Image.linear_gradient("L").resize((84, 56)).convert("RGB"))
    with torch.no_grad():
        rows = [weights[0, :, -1] for weights in model(**inputs, output_attentions=True).attentions]  # (H, T) each
    for row in rows:
        seen = row > 0
        assert (row.amax(-1) * seen.sum(-1)).min() > 1.2  # uniform attention would give 1


def test_loading_is_silent(family, directory, caplog, recwarn):
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()  # whatever another test has left
    transformers.logging.enable_propagation()
    try:
        AutoModelForImageTextToText.from_pretrained(directory)
        AutoTokenizer.from_pretrained(directory)
        module, _, name = family.image_processor.partition(":")
        getattr(import_module(module), name).from_pretrained(directory)
    finally:
        transformers.logging.disable_propagation()
        transformers.logging.set_verbosity(verbosity)
    said = {record.getMessage() for record in caplog.records}
    if family.name == "internvl3":  # as for the released files: their configuration does not say that nothing is tied
        assert len(said) == 1 and "so we will NOT tie them" in said.pop()
    assert not said
    assert [str(warning.message) for warning in recwarn] == []


def test_embedding_rows(family, directory):
    config = AutoConfig.from_pretrained(directory)
    length, rows = len(AutoTokenizer.from_pretrained(directory)), config.get_text_config().vocab_size
    assert config.image_token_id < length
    if family.name == "internvl3":  # the released tokenizer has 151,675 entries for 151,674 rows
        assert rows == length - 1
    else:
        assert rows >= length + len(MARKERS)


def test_configuration_states_what_released_ones_state(family, directory):
    """Whether the output layer is tied: Qwen's files say so at the top, the others nowhere."""
    raw = json.loads((directory / "config.json").read_text())
    assert ("tie_word_embeddings" in raw) == family.name.startswith("qwen")
    assert "tie_word_embeddings" not in raw["text_config"]
    model = AutoModelForImageTextToText.from_pretrained(directory)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (family.name == "gemma3")


def test_shapes_keep_what_breaks(family, directory):
    config = AutoConfig.from_pretrained(directory)
    text = config.get_text_config()
    assert (text.num_attention_heads, text.num_key_value_heads) == (4, 2)
    section = text.rope_parameters.get("mrope_section")
    assert section is None or sum(section) == text.hidden_size // text.num_attention_heads // 2
    if family.name == "gemma3":
        assert config.mm_tokens_per_image < text.sliding_window < 32
        assert set(text.layer_types) == {"sliding_attention", "full_attention"}
    if family.name == "qwen3-vl-moe":
        assert text.num_experts_per_tok < text.num_experts
        assert text.hidden_size not in (text.moe_intermediate_size, 2 * text.moe_intermediate_size)  # not square
    assert sum(path.stat().st_size for path in directory.iterdir()) < 2_000_000


def test_tokenizer_round_trip(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ("The answer is (B).", "  spaces\n\nand\ttabs ", "Où? 東京 👩‍🚀", "don't 123"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("The answer is", add_special_tokens=False)) <= 4  # real merges, not bytes
    assert not set(MARKERS) & set(tokenizer.get_vocab())


def test_special_tokens_are_single_ids(family, directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = ("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<pad>")
    if family.name != "gemma3":
        chat = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    for token in (*chat, *family.never_sampled):
        ids = tokenizer.encode(token, add_special_tokens=False)
        assert len(ids) == 1 and tokenizer.decode(ids, skip_special_tokens=True) == ""
    stops = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    expected = {"<eos>", "<end_of_turn>"} if family.name == "gemma3" else {"<|im_end|>", "<|endoftext|>"}
    assert {tokenizer.convert_ids_to_tokens(token) for token in stops} == expected


def test_gemma_opens_plain_text_with_bos(directories):
    tokenizer = AutoTokenizer.from_pretrained(directories["gemma3"])
    assert tokenizer("Hi").input_ids[0] == tokenizer.bos_token_id


def test_template_renders(family, directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for conversation, expected in zip((ONE_IMAGE, DIALOGUE), RENDERED[family.name], strict=True):
        assert tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True) == expected
    closed = tokenizer.apply_chat_template(ONE_IMAGE, tokenize=False)
    assert RENDERED[family.name][0].startswith(closed) and closed.endswith(("<|im_end|>\n", "<end_of_turn>\n"))


@pytest.mark.parametrize("conversation", [ONE_IMAGE, DIALOGUE, [{"role": "user", "content": " plain\n"}]])
@pytest.mark.parametrize("open_reply", [True, False])
def test_qwen_template_equals_the_released_one(directories, conversation, open_reply):
    settings = REAL_TOKENIZER / "tokenizer_config.json"
    if not settings.is_file():
        pytest.skip(f"the released Qwen2.5-VL tokenizer is not at {REAL_TOKENIZER}")
    released = json.loads(settings.read_text())["chat_template"]
    tokenizer = AutoTokenizer.from_pretrained(directories["qwen2.5-vl"])
    ours, theirs = (
        tokenizer.apply_chat_template(
            conversation, chat_template=template, tokenize=False, add_generation_prompt=open_reply
        )
        for template in (None, released)
    )
    assert ours == theirs


def test_same_seed_same_bytes(family, directory, tmp_path):
    state = torch.get_rng_state()
    again = tiny.build(family.name, "tiny", tmp_path / "again")
    other = tiny.build(family.name, "tiny", tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for path in directory.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    assert (other / "model.safetensors").read_bytes() != (directory / "model.safetensors").read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "other"]  # no scratch folder left behind


def test_stock_tokenizer_class(directory):
    assert isinstance(AutoTokenizer.from_pretrained(directory), PreTrainedTokenizerFast)


def test_errors(tmp_path):
    with pytest.raises(UserError, match=r"unknown model family 'llava': choose one of qwen2.5-vl, .*gemma3"):
        tiny.build("llava", "tiny", tmp_path / "a")
    with pytest.raises(UserError, match=r"unknown model size '7B': choose one of tiny"):
        tiny.build("gemma3", "7B", tmp_path / "a")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=r"is not empty: choose a new or empty directory"):
        tiny.build("gemma3", "tiny", tmp_path)
    with pytest.raises(UserError, match=r"file is a file"):
        tiny.build("gemma3", "tiny", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    assert tiny.build("gemma3", "tiny", tmp_path / "empty") == tmp_path / "empty"
