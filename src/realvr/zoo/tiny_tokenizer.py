"""A byte-level BPE tokenizer for small checkpoints, trained on a page of English in milliseconds.

Training in place, rather than shipping a vocabulary, keeps the repository free of binary files; the result is the same
bytes every time. It has real merges, so that a token is not a character and a marker may fall inside a word, and it
carries the special strings of its family under the names stock transformers processors look for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from realvr.backbone.templates import CHAT_TEMPLATES

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

MERGED_VOCABULARY = 700
"""Entries before the special tokens: 256 bytes and the merges of the corpus."""

CORPUS = (
    "What color is the small circle to the left of the large square?",
    "How many triangles are there in the image? There are three triangles in the image.",
    "Is the red cube above or below the blue sphere? Answer with a single word.",
    "The answer is yes. The answer is no. The answer is left. The answer is right. The answer is above.",
    "Which object is closest to the camera: the green cylinder, the yellow cone, or the purple ring?",
    "Look at the region inside the box before you answer the question. Think about what the region shows.",
    "Describe the picture in one short sentence, then say which part of the picture you looked at.",
    "Please answer the question using the letter of the correct option: (A) red, (B) green, (C) blue, (D) yellow.",
    "The answer is (A). The answer is (B). The answer is (C). The answer is (D).",
    "There is a large orange star in the top right corner and a small gray square at the bottom.",
    "Does the shape on the left have the same size as the shape on the right?",
    "Compare the two images. What has changed between the first image and the second image?",
    "The cell in the middle is a red blood cell, and the dark one next to it is a white blood cell.",
    "What is written on the sign behind the person with the black umbrella?",
    "The visual evidence for the answer lies near the center of the image, not at the border.",
    "Let me look again. First, I find the object. Second, I read its color. Therefore, the answer is blue.",
    "You are a helpful assistant. You are given an image and a question about the image.",
    "Nothing else is visible behind the other objects, because the background is white everywhere.",
    "Where is the cat? The cat is sitting under the table, between the chair and the window.",
    "Count the objects: one, two, three, four, five, six, seven, eight, nine, ten. Numbers: 0 1 2 3 4 5 6 7 8 9.",
    "What would happen if the circle were removed? Then only the square and the triangle would remain.",
    "It doesn't matter which one you choose; they're all the same, aren't they? I don't think so.",
)

# The pattern by which the Qwen tokenizers cut text before merging: contractions, words with their leading space,
# single digits, punctuation, line breaks, other white space.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# For models that must learn from nothing: answer tags and lone capitals (the letters of options) are whole tokens of
# their own, so that "(A)" and "<answer>A</answer>" share the token A.
_PLAIN_WORDS = r"</?answer>|\p{Lu}(?!\p{Ll})| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}<]+|<|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Specials:
    """Special tokens of a family: ``first`` take ids 0, 1, ...; ``last`` follow the merged vocabulary."""

    last: tuple[str, ...]
    eos: str
    pad: str
    stop: tuple[str, ...]
    """Tokens that end generation."""
    first: tuple[str, ...] = ()
    bos: str | None = None
    named: dict[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer that the stock processor of the family reads."""


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML_STOP = ("<|im_end|>", "<|endoftext|>")
_QWEN = Specials(
    last=(*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
    stop=_CHATML_STOP,
)

SPECIALS: dict[str, Specials] = {
    "qwen2.5-vl": _QWEN,
    "qwen3-vl": _QWEN,
    "qwen3-vl-moe": _QWEN,
    "internvl3": Specials(
        last=(*_CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        eos="<|im_end|>",
        pad="<|endoftext|>",
        stop=_CHATML_STOP,
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "gemma3": Specials(
        first=("<pad>", "<eos>", "<bos>", "<unk>"),
        last=("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        stop=("<eos>", "<end_of_turn>"),
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
}


def _train(specials: Specials, compose: bool, corpus: Sequence[str], words: str) -> Tokenizer:
    """Byte-level BPE over ``corpus``, cut into ``words``; ``compose`` normalises text to NFC first."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    if compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED_VOCABULARY + len(specials.first),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials.first],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials.last])
    if specials.bos is not None:  # as Gemma's own does: plain encoding opens with <bos>, a rendered chat has its own
        bos = (specials.bos, tokenizer.token_to_id(specials.bos))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{specials.bos} $A", pair=f"{specials.bos} $A {specials.bos}:1 $B:1", special_tokens=[bos]
        )
    return tokenizer


def build_tokenizer(family: str, corpus: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a small checkpoint of ``family``, chat template included, without the latent markers.

    With a ``corpus`` of its own it is made to be learned with: see ``_PLAIN_WORDS``.
    """
    from transformers import PreTrainedTokenizerFast

    specials = SPECIALS[family]
    texts, words = (CORPUS, _WORDS) if corpus is None else (corpus, _PLAIN_WORDS)
    return PreTrainedTokenizerFast(
        tokenizer_object=_train(specials, family != "gemma3", texts, words),
        bos_token=specials.bos,
        eos_token=specials.eos,
        pad_token=specials.pad,
        extra_special_tokens=dict(specials.named),
        chat_template=CHAT_TEMPLATES[family],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
