"""Conversations to ids: equal to stock for ordinary text, deaf to control strings in user text."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from realvr.backbone.prompts import PromptEncoder, tail
from realvr.backbone.types import Prompt, Turn
from realvr.errors import UserError
from realvr.families import FAMILIES, MARKERS, Family
from realvr.imaging.processing import ImageProcessor
from realvr.zoo.tiny import build

REAL_TOKENIZER = Path(__file__).parents[3] / "shared" / "data" / "qwen2_5_vl_tokenizer"
REAL = "real qwen2.5-vl"
CONTROL = sorted(
    {name for family in FAMILIES.values() for name in (*family.never_sampled, family.placeholder, family.image_token)}
    | {*MARKERS, "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>"}
)
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))
OTHER = Image.fromarray(np.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=np.uint8))

Make = Callable[[str], PromptEncoder]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Encoder by family name, of a tiny checkpoint with the latent markers added, or of the real Qwen tokenizer."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, PromptEncoder] = {}

    def build_encoder(name: str) -> PromptEncoder:
        from transformers import AutoConfig, AutoTokenizer

        if name == REAL and not REAL_TOKENIZER.is_dir():
            pytest.skip(f"the released Qwen2.5-VL tokenizer is not at {REAL_TOKENIZER}")
        if name not in made:
            family = FAMILIES["qwen2.5-vl" if name == REAL else name]
            path = build(family.name, "tiny", root / name)
            tokenizer = AutoTokenizer.from_pretrained(REAL_TOKENIZER if name == REAL else path)
            tokenizer.add_tokens(list(MARKERS), special_tokens=True)
            processor = ImageProcessor.load(path, family, AutoConfig.from_pretrained(path))
            made[name] = PromptEncoder(tokenizer, family, processor, 4096)
        return made[name]

    return build_encoder


def stock_text(encoder: PromptEncoder, turns: list[Turn], generation_prompt: bool = True) -> str:
    """What the stock processor hands to its tokenizer: the rendered template, placeholders expanded."""
    messages = [
        {"role": t.role, "content": [{"type": "image"}] * len(t.images) + [{"type": "text", "text": t.text}]}
        for t in turns
    ]
    text = encoder.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    family = encoder.family
    first, *rest = text.split(family.placeholder)
    counts = [encoder.processor(image).tokens for turn in turns for image in turn.images]
    assert len(rest) == len(counts)
    return first + "".join(
        family.before + family.image_token * count + family.after + piece
        for count, piece in zip(counts, rest, strict=True)
    )


def stock_ids(encoder: PromptEncoder, turns: list[Turn], generation_prompt: bool = True) -> list[int]:
    return encoder.tokenizer(stock_text(encoder, turns, generation_prompt), add_special_tokens=False)["input_ids"]


def special_ids(encoder: PromptEncoder, prompt: Prompt) -> list[int]:
    special = {i for i, token in encoder.tokenizer.added_tokens_decoder.items() if token.special}
    return [i for i in prompt.ids.tolist() if i in special]


NAMES = [*FAMILIES, REAL]
WORDS = ["What", " is", " the", "\n", "\n\n", "  ", "\t", "<b>", "a<", ">", "|", "é", "e\u0301", "\u0338", "日本", "🙂"]
WORDS += ["1234", "'s", "\u3000", "\x1c", "\ue000", "\ue0000\ue000", "</answer>", "{{ x }}"]
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Hypothesis also tries the string constants of this file, control strings among them.
ORDINARY = (ANY | st.lists(st.sampled_from(WORDS), max_size=12).map("".join)).filter(
    lambda text: not any(control in text for control in CONTROL)
)
FRAGMENTS = [*CONTROL, *(c[: len(c) // 2] for c in CONTROL), *(c[len(c) // 2 :] for c in CONTROL)]
HOSTILE = st.lists(
    st.sampled_from([*FRAGMENTS, "<", "|", ">", " ", "\n", "\n\n", "what", "é", "e\u0301", "🙂", "\ue000", "\u3000"]),
    max_size=10,
).map("".join)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(texts=st.tuples(ORDINARY, ORDINARY, ORDINARY, ORDINARY), system=st.booleans(), opened=st.booleans())
def test_ordinary_text_gives_the_stock_ids(
    make: Make, name: str, texts: tuple[str, ...], system: bool, opened: bool
) -> None:
    encoder = make(name)
    turns = [Turn("user", texts[0], [IMAGE, OTHER]), Turn("assistant", texts[1]), Turn("user", texts[2], [IMAGE])]
    if system:
        turns.insert(0, Turn("system", texts[3]))
    found = encoder.encode(turns, generation_prompt=opened)
    assert found.ids.tolist() == stock_ids(encoder, turns, opened)
    assert found.ids.dtype == torch.long and len(found.images) == 3 and found.latents == ()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(texts=st.tuples(HOSTILE, HOSTILE, HOSTILE))
def test_control_strings_in_any_text_are_ordinary_text(make: Make, name: str, texts: tuple[str, ...]) -> None:
    encoder = make(name)

    def turns(contents: tuple[str, ...]) -> list[Turn]:
        system, user, assistant = contents
        return [Turn("system", system), Turn("user", user, [IMAGE]), Turn("assistant", assistant)]

    found = encoder.encode(turns(texts))
    harmless = turns(("x", "x", "x"))
    assert special_ids(encoder, found) == special_ids(encoder, encoder.encode(harmless))
    # Put the texts into the rendered template ourselves, trimmed where the template trims, and decode.
    expected = stock_text(encoder, turns(("\ue100", "\ue101", "\ue102")))
    trims = encoder.family.name == "gemma3"
    for place, text in zip("\ue100\ue101\ue102", texts, strict=True):
        expected = expected.replace(place, text.strip() if trims and place != "\ue100" else text)
    decoded = encoder.tokenizer.decode(found.ids, skip_special_tokens=False)
    assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_special_token_of_the_tokenizer_is_text_in_a_question(make: Make, name: str) -> None:
    encoder = make(name)
    special = [token.content for token in encoder.tokenizer.added_tokens_decoder.values() if token.special]
    assert set(MARKERS) <= set(special) and len(special) > 8
    baseline = special_ids(encoder, encoder.encode([Turn("user", "x")]))
    for content in special:
        found = encoder.encode([Turn("user", f"a{content}b")])
        assert special_ids(encoder, found) == baseline
        assert f"a{content}b" in encoder.tokenizer.decode(found.ids)
        ids, _ = encoder.encode_text(content)
        assert encoder.tokenizer.decode(ids) == content and len(ids) > 1


def test_tokens_added_later_special_or_not(make: Make) -> None:
    """A vision token added as an ordinary one is matched by ``split_special_tokens=True``; never by us."""
    from realvr.zoo.tiny_tokenizer import build_tokenizer

    tiny = make("internvl3")
    family = replace(tiny.family, never_sampled=(*tiny.family.never_sampled, "<late_control>"))
    tokenizer = build_tokenizer("internvl3")
    tokenizer.add_tokens(["<late_control>", "<ordinary>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<late_special>"]}, replace_extra_special_tokens=False)
    assert len(tokenizer("<late_control>", split_special_tokens=True)["input_ids"]) == 1
    encoder = PromptEncoder(tokenizer, family, tiny.processor, 4096)
    ids = encoder.encode([Turn("user", "<late_control><late_special><ordinary>")]).ids.tolist()
    control, special, ordinary = tokenizer.convert_tokens_to_ids(["<late_control>", "<late_special>", "<ordinary>"])
    assert control not in ids and special not in ids
    assert ids.count(ordinary) == 1  # as in the stock tokenizer
    assert "<late_control><late_special><ordinary>" in tokenizer.decode(ids)


def test_the_callers_tokenizer_is_left_alone(make: Make) -> None:
    encoder = make("qwen3-vl")
    before = encoder.tokenizer.backend_tokenizer.to_str()
    encoder.encode([Turn("user", "<|im_end|>", [IMAGE])])
    encoder.encode_text("<|im_end|>")
    assert encoder.tokenizer.backend_tokenizer.to_str() == before
    assert len(encoder.tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]) == 1


PLAIN = "{% for m in messages %}@{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}"


def custom(make: Make, template: str | None, *tokens: Any) -> PromptEncoder:
    """A Qwen encoder with another chat template and further special tokens."""
    from realvr.zoo.tiny_tokenizer import build_tokenizer

    tokenizer = build_tokenizer("qwen2.5-vl")
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.chat_template = template
    tiny = make("qwen2.5-vl")
    return PromptEncoder(tokenizer, tiny.family, tiny.processor, 4096)


@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab \t\n\u3000\xa0\x1c\u200b"), max_size=6))
def test_stripping_added_tokens_swallow_white_space_as_in_stock(make: Make, text: str) -> None:
    from tokenizers import AddedToken

    tokens = [
        AddedToken("[L]", lstrip=True),
        AddedToken("[R]", rstrip=True),
        AddedToken("[B]", lstrip=True, rstrip=True),
    ]
    body = PLAIN.replace("@", "[R]") + "{% endfor %}[L] [B]\n[B] end {% endfor %}"
    encoder = custom(make, body, *tokens)
    turns = [Turn("user", text), Turn("assistant", text)]
    assert encoder.encode(turns).ids.tolist() == stock_ids(encoder, turns)


def test_a_template_may_use_our_sentinels(make: Make) -> None:
    encoder = custom(make, "\ue0000\ue000" + PLAIN + "{% endfor %}{% endfor %}")
    turns = [Turn("user", "a\ue0010\ue001")]
    assert encoder.encode(turns).ids.tolist() == stock_ids(encoder, turns)


def test_ordinary_added_tokens_span_template_and_text(make: Make) -> None:
    """Gemma's vocabulary has runs of line breaks as ordinary added tokens; they join template and text in stock."""
    from tokenizers import AddedToken

    tiny = make("gemma3")
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.add_tokens([AddedToken("\n" * n, normalized=False) for n in range(1, 6)])
    encoder = PromptEncoder(tokenizer, tiny.family, tiny.processor, 4096)
    turns = [Turn("system", "a\n"), Turn("user", "\nb", [IMAGE, IMAGE]), Turn("assistant", "c\n\n"), Turn("user", "d")]
    found = encoder.encode(turns).ids.tolist()
    assert found == stock_ids(encoder, turns)
    assert tokenizer.convert_tokens_to_ids("\n" * 4) in found  # two images: "\n\n" after one, "\n\n" before the next
    assert tokenizer.convert_tokens_to_ids("\n" * 5) in found  # "a\n" + "\n\n" + "\n\n"


def test_gemma_against_the_stock_processor(make: Make) -> None:
    """The one family whose stock processor runs without torchvision."""
    from transformers import Gemma3Processor

    encoder = make("gemma3")
    stock = Gemma3Processor(
        encoder.processor.stock, encoder.tokenizer, chat_template=encoder.tokenizer.chat_template, image_seq_length=16
    )
    messages = [
        {"role": "system", "content": [{"type": "text", "text": " Be brief. "}]},
        {"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "\nWhat is it? "}]},
    ]
    expected = stock.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    found = encoder.encode([Turn("system", " Be brief. "), Turn("user", "\nWhat is it? ", [IMAGE])])
    assert found.ids.tolist() == expected["input_ids"][0]
    assert torch.equal(found.images[0].pixels, torch.as_tensor(np.array(expected["pixel_values"])))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reply", ["left", " left \n", ""])
def test_latents_come_before_the_reply(make: Make, name: str, reply: str) -> None:
    encoder = make(name)
    latents = torch.randn(3, 8)
    turns = [Turn("user", "Where?", [IMAGE]), Turn("assistant", reply, latents=latents), Turn("user", "Sure?")]
    written = "<|lvr_start|><|lvr|><|lvr|><|lvr|><|lvr_end|>" + reply
    found = encoder.encode(turns)
    assert found.ids.tolist() == stock_ids(encoder, [turns[0], Turn("assistant", written), turns[2]])
    assert len(found.latents) == 1 and found.latents[0] is latents


@pytest.mark.parametrize("name", NAMES)
def test_no_latents_write_no_markers(make: Make, name: str) -> None:
    encoder = make(name)
    turns = [Turn("user", "Where?"), Turn("assistant", "left", latents=torch.zeros(0, 8))]
    found = encoder.encode(turns)
    assert found.ids.tolist() == stock_ids(encoder, turns)
    assert found.latents == ()


@pytest.mark.parametrize("name", NAMES)
def test_saved_ids_continue_the_live_conversation(make: Make, name: str) -> None:
    """Odd but possible samples: the ids of a reply that no encoder would choose, kept exactly."""
    encoder = make(name)
    first = encoder.encode([Turn("user", "Where?", [IMAGE])])
    reply = [i for char in "the left" for i in encoder.encode_text(char)[0]]
    assert reply != encoder.encode_text("the left")[0]
    latents = torch.randn(2, 8)
    start, slot, end = encoder.tokenizer.convert_tokens_to_ids(list(MARKERS))
    live = torch.cat([first.ids, torch.tensor([start, slot, slot, end, *reply])])
    seen = Prompt(live, first.images, (latents,))
    turns = [
        Turn("user", "Where?", [IMAGE]),
        Turn("assistant", "ignored", latents=latents, ids=reply),
        Turn("user", "Sure?", [OTHER]),
    ]
    whole = encoder.encode(turns)
    rest = encoder.encode(turns, continue_from=seen)
    assert torch.equal(torch.cat([live, rest.ids]), whole.ids)
    assert [i.key for i in rest.images] == [encoder.processor(OTHER).key] and rest.latents == ()
    assert torch.equal(encoder.encode(turns, continue_from=len(live)).ids, rest.ids)
    # A reply saved with its end-of-turn token is the same conversation.
    closing = {"gemma3": "<end_of_turn>"}.get(name, "<|im_end|>")
    turns[1].ids = [*reply, encoder.tokenizer.convert_tokens_to_ids(closing)]
    assert torch.equal(encoder.encode(turns).ids, whole.ids)
    turns[1].ids = []
    assert encoder.encode(turns).ids.tolist() == whole.ids[: len(live) - len(reply)].tolist() + rest.ids.tolist()


def test_tail_refuses_what_is_not_a_continuation(make: Make) -> None:
    encoder = make("qwen2.5-vl")
    image_id, slot_id = encoder.image_token_id, encoder.tokenizer.convert_tokens_to_ids("<|lvr|>")
    latents = torch.ones(3, 8)
    turns = [Turn("user", "Where?", [IMAGE]), Turn("assistant", "left", latents=latents), Turn("user", "b", [OTHER])]
    prompt = encoder.encode(turns)
    ids = prompt.ids.tolist()
    for token, what in ((image_id, "inside an image"), (slot_id, "inside a latent span")):
        with pytest.raises(UserError, match=what):
            tail(prompt, ids.index(token) + 1, image_id, slot_id)
        assert tail(prompt, ids.index(token), image_id, slot_id).ids[0] == token
    at_latents = tail(prompt, ids.index(slot_id), image_id, slot_id)
    assert len(at_latents.latents) == 1 and len(at_latents.images) == 1
    with pytest.raises(UserError, match="fewer than"):
        tail(prompt, len(prompt) + 1, image_id, slot_id)
    with pytest.raises(UserError, match="differ at token"):
        tail(prompt, encoder.encode([Turn("user", "What?", [IMAGE])]), image_id, slot_id)
    with pytest.raises(UserError, match="images are different"):
        tail(prompt, encoder.encode([Turn("user", "Where?", [OTHER])]), image_id, slot_id)
    for other in (replace(prompt, latents=(latents * 2,)), replace(prompt, latents=())):
        with pytest.raises(UserError, match="latents are different"):
            tail(prompt, other, image_id, slot_id)
    assert len(tail(prompt, prompt, image_id, slot_id)) == 0


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(text=HOSTILE)
@example(text="e\u0301 >\u0338 \u1112\u1161\u11ab")  # a normaliser that composes leaves gaps in the offsets
def test_offsets_of_plain_text_cover_it(make: Make, name: str, text: str) -> None:
    ids, offsets = make(name).encode_text(text)
    assert len(ids) == len(offsets)
    covered = {i for start, stop in offsets for i in range(start, stop)}
    assert covered == set(range(len(text)))
    assert [start for start, _ in offsets] == sorted(start for start, _ in offsets)


def refuses(encoder: PromptEncoder, turns: list[Turn], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        encoder.encode(turns)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_longer_than_the_context(make: Make, name: str) -> None:
    encoder = make(name)
    turns = [Turn("user", "Where?", [IMAGE])]
    prompt = encoder.encode(turns)
    exact = PromptEncoder(encoder.tokenizer, encoder.family, encoder.processor, len(prompt))
    assert len(exact.encode(turns)) == len(prompt)
    short = PromptEncoder(encoder.tokenizer, encoder.family, encoder.processor, len(prompt) - 1)
    message = (
        rf"prompt has {len(prompt)} tokens \({prompt.images[0].tokens} of them visual\), .* {len(prompt) - 1}: shorten"
    )
    refuses(short, turns, message)


def test_bad_conversations(make: Make, tmp_path: Path) -> None:
    encoder = make("qwen2.5-vl")
    refuses(encoder, [Turn("user", "a", [tmp_path / "gone.png"])], r"gone\.png does not exist")
    refuses(encoder, [], "conversation is empty")
    refuses(encoder, [Turn("user", "a", latents=torch.zeros(1, 4))], r"turn 1 \(user\): only an assistant")
    refuses(encoder, [Turn("system", "a", ids=[1])], r"turn 1 \(system\): only an assistant")
    refuses(encoder, [Turn("tool", "a")], "role is not one of")  # type: ignore[arg-type]
    refuses(encoder, [Turn("assistant", "a", latents=torch.zeros(4))], r"shape \(4,\)")
    refuses(encoder, [Turn("assistant", "a", ids=[encoder.image_token_id])], "visual or latent token")
    refuses(encoder, [Turn("user", "a\ud800")], "lone surrogate at character 1")
    with pytest.raises(UserError, match="lone surrogate"):
        encoder.encode_text("\udfff")


def test_templates_that_lose_or_repeat(make: Make) -> None:
    image = "{% if p['type'] == 'image' %}<|image_pad|>{% endif %}"
    end = "{% endfor %}{% endfor %}"
    asked = [Turn("user", "a", [IMAGE])]
    refuses(custom(make, None), asked, "no chat template")
    refuses(custom(make, PLAIN + end), asked, r"wrote 0 image placeholders for 1 images \(1 in turn 1 \(user\)\)")
    refuses(custom(make, PLAIN + image + image + end), asked, "wrote 2 image placeholders for 1 images")
    refuses(custom(make, "<|image_pad|>" + PLAIN + end), [Turn("user", "a")], "wrote 1 .* for 0 images .none given")
    twice = PLAIN.replace("{{ p['text'] }}", "{{ p['text'] }}{{ p['text'] }}")
    refuses(custom(make, twice + image + end), asked, r"text of turn 1 \(user\) 2 times")
    refuses(custom(make, "nothing"), asked, r"text of turn 1 \(user\) 0 times")
    refuses(custom(make, "{{ raise_exception('not\ntoday') }}"), asked, "refuses this conversation .*not today")
    text_only = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    refuses(custom(make, text_only), asked, "refuses this conversation")
    user_only = PLAIN + image.replace("'image' %", "'image' and m['role'] == 'user' %") + end
    refuses(custom(make, user_only), [*asked, Turn("assistant", "b", [OTHER])], r"1 in turn 2 \(assistant\)")
    refuses(make("gemma3"), [Turn("system", "a", [IMAGE]), Turn("user", "b")], r"chat template .*system")


def test_tokenizers_that_do_not_fit(make: Make) -> None:
    from realvr.zoo.tiny_tokenizer import build_tokenizer

    encoder = make("qwen2.5-vl")
    gemma: Family = FAMILIES["gemma3"]
    with pytest.raises(UserError, match="no <image_soft_token> token: it is not a gemma3 tokenizer"):
        PromptEncoder(encoder.tokenizer, gemma, encoder.processor, 100)
    without_markers = PromptEncoder(build_tokenizer("qwen2.5-vl"), encoder.family, encoder.processor, 4096)
    refuses(without_markers, [Turn("assistant", "a", latents=torch.zeros(1, 4))], "no <.lvr_start.> token")
    with pytest.raises(UserError, match="not a fast tokenizer"):
        PromptEncoder(object(), encoder.family, encoder.processor, 100)
