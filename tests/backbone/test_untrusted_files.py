"""Files of a checkpoint that are damaged or written to do harm: one line that names them, in bounded time."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from realvr.backbone import Backbone, Turn, rendering
from realvr.backbone.templates import CHAT_TEMPLATES
from realvr.cli import main
from realvr.errors import UserError

RELEASED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "released"
FAMILY = "qwen3-vl"


@pytest.fixture
def broken(build_tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint to break."""
    return Path(shutil.copytree(build_tiny(FAMILY), tmp_path / "model"))


def ask(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """``realvr ask`` on this checkpoint ends with exit code 2 and one line, which is returned."""
    from PIL import Image

    picture = tmp_path / "picture.png"
    Image.new("RGB", (56, 56), "red").save(picture)
    capsys.readouterr()
    code = main(["ask", str(model), str(picture), "What is it?", "--latents", "0", "--device", "cpu"])
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("Loading", "Writing"))]
    assert code == 2 and len(said) == 1, said
    return said[0]


# ---------------------------------------------------------------------- chat templates

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(x='a') %}{% for i in range(@) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
    "{{ messages[0].content[0].text }}"
)
HARMFUL = {
    "{% for i in range(10**9) %}x{% endfor %}": "Range too big",
    NESTED: "it runs for more than 1 s",
    DOUBLING.replace("@", "60"): "MiB of memory",
    DOUBLING.replace("@", "22"): "it writes more than 2,000,000 characters",
    "{{ 'a' * 10**11 }}": "MiB of memory",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{% if": "",
    "{{ raise_exception('not today') }}": "not today",
}


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 1.0)


@pytest.mark.parametrize(("template", "reason"), HARMFUL.items(), ids=range(len(HARMFUL)))
def test_a_harmful_template_ends_in_one_line(
    broken: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    reason: str,
) -> None:
    if template == NESTED:  # the others end by themselves, on a busy machine not within a second
        monkeypatch.setattr(rendering, "SECONDS", 1.0)
    (broken / "chat_template.jinja").write_text(template)
    begun = time.monotonic()
    line = ask(broken, tmp_path, capsys)
    assert str(broken) in line and "the chat template cannot be used" in line and reason in line
    assert time.monotonic() - begun < 60


@pytest.mark.usefixtures("one_second")
def test_a_template_that_loops_later_is_stopped_too(broken: Path) -> None:
    """Harmless when the checkpoint is loaded; the process is replaced, and other conversations still render."""
    whole = CHAT_TEMPLATES[FAMILY]
    (broken / "chat_template.jinja").write_text("{% if messages | length > 1 %}" + NESTED + "{% endif %}" + whole)
    backbone = Backbone.load(broken, device="cpu")
    once = [Turn("user", "Which?")]
    expected = backbone.prompt(once).ids.tolist()
    long = [*once, Turn("assistant", "This."), Turn("user", "Sure?")]
    begun = time.monotonic()
    for _ in range(60):  # tried once, remembered
        with pytest.raises(UserError, match=r"refuses this conversation \(.*\): it runs for more than 1 s"):
            backbone.prompt(long)
    assert time.monotonic() - begun < 30
    assert backbone.prompt([Turn("user", "Why?")]).ids.tolist()[:3] == expected[:3]


def test_a_template_of_others_renders_as_in_stock(build_tiny: Callable[[str], Path]) -> None:
    """In its own process: special tokens, filters, exceptions and characters of any plane as in stock transformers."""
    tokenizer = AutoTokenizer.from_pretrained(build_tiny("gemma3"))
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ m['content'][0]['text'] | trim | upper }}\n"
        "{%- if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{% if add_generation_prompt %}é東👩‍🚀{% endif %}"
    )
    messages = [
        {"role": role, "content": [{"type": "text", "text": f" {text}\n"}]}
        for role, text in (("user", "a"), ("assistant", "ü\ue000"), ("user", '"q"'), ("user", "never"))
    ]
    for prompt in (False, True):
        stock = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert rendering.render(tokenizer, messages, prompt) == stock
    tokenizer.chat_template = {"tools": "a"}
    with pytest.raises(rendering.TemplateError):
        rendering.render(tokenizer, messages, True)


def _numbered(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": f"{number}"}]}]


def _render_in_child(tokenizer: Any, queue: Any) -> None:
    queue.put([rendering.render(tokenizer, _numbered(n), True) for n in range(40, 45)])


def test_threads_and_forked_processes_get_their_own_answers(build_tiny: Callable[[str], Path]) -> None:
    import multiprocessing
    from concurrent.futures import ThreadPoolExecutor

    tokenizer = AutoTokenizer.from_pretrained(build_tiny(FAMILY))
    tokenizer.chat_template = "<{{ messages[0].content[0].text }}>"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: rendering.render(tokenizer, _numbered(n), True), range(40)))
    assert found == [f"<{n}>" for n in range(40)]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_render_in_child, args=(tokenizer, queue))
    child.start()
    assert queue.get() == [f"<{n}>" for n in range(40, 45)]
    child.join(30)
    assert child.exitcode == 0
    assert rendering.render(tokenizer, _numbered(99), True) == "<99>"


# ---------------------------------------------------------------------- Thinking variants

SMALL_THINKING = CHAT_TEMPLATES[FAMILY].replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")


@pytest.mark.parametrize("style", ["small", "released"])
def test_a_thinking_variant_is_refused_by_name(broken: Path, tmp_path: Path, style: str) -> None:
    template = SMALL_THINKING
    if style == "released":
        file = RELEASED / "Qwen3-VL-30B-A3B-Thinking" / "chat_template.json"
        if not file.is_file():
            pytest.skip(f"the released files are not here ({RELEASED})")
        template = json.loads(file.read_text())["chat_template"]
    assert "<think>\\n" in template
    (broken / "chat_template.jinja").write_text(template)
    named = broken.rename(tmp_path / "Qwen3-VL-30B-A3B-Thinking")
    with pytest.raises(UserError, match=r"opens every reply with <think>.*; use Qwen3-VL-30B-A3B-Instruct$"):
        Backbone.load(named, device="cpu")
    with pytest.raises(UserError, match=r"<think>.*; use the Instruct variant of this model$"):
        Backbone.load(named.rename(tmp_path / "mine"), device="cpu")


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct"])
def test_released_instruct_templates_continue_over_turns(broken: Path, name: str) -> None:
    """Loaded, equal to stock, and a second turn continues the first."""
    file = RELEASED / name / "chat_template.json"
    if not file.is_file():
        pytest.skip(f"the released files are not here ({RELEASED})")
    (broken / "chat_template.jinja").write_text(json.loads(file.read_text())["chat_template"])
    backbone = Backbone.load(broken, device="cpu")
    first = [Turn("user", "Which one?")]
    seen = backbone.prompt(first)
    stock = AutoTokenizer.from_pretrained(broken).apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "Which one?"}]}], add_generation_prompt=True
    )
    assert seen.ids.tolist() == list(stock["input_ids"] if hasattr(stock, "keys") else stock)
    turns = [*first, Turn("assistant", "The left."), Turn("user", "Sure?")]
    assert len(backbone.prompt(turns, continue_from=seen))


# ---------------------------------------------------------------------- JSON

DEEP = "[" * 200_000
SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "preprocessor_config.json", "config.json")


@pytest.mark.parametrize("file", [*SMALL_FILES, "tokenizer.json"])
@pytest.mark.parametrize("text", ["{", '{"a": 1', "[]", "3", "", DEEP, '{"a": ' + DEEP, "\udcff"])
def test_damaged_json_names_the_file(broken: Path, file: str, text: str) -> None:
    (broken / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as caught:
        Backbone.load(broken, device="cpu")
    message = str(caught.value)
    assert str(broken / file) in message and "\n" not in message and len(message) < 500
    assert "copy it from the original model" in message


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json"])
def test_a_truncated_file_through_the_command(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    whole = (broken / file).read_bytes()
    (broken / file).write_bytes(whole[: len(whole) // 2])
    assert str(broken / file) in ask(broken, tmp_path, capsys)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("tokenizer.json", {"model": 3}),
    ("tokenizer.json", {"model": None}),
    ("tokenizer.json", {"added_tokens": {"a": 1}}),
    ("tokenizer.json", {"added_tokens": [{"id": -1, "content": 5}]}),
    ("tokenizer.json", {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}}),
    ("tokenizer.json", {"version": "none"}),
    ("tokenizer_config.json", {"extra_special_tokens": 3}),
    ("tokenizer_config.json", {"eos_token": ["a"]}),
    ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
    ("generation_config.json", {"eos_token_id": "end"}),
    ("generation_config.json", {"eos_token_id": [[1], {}]}),
    ("preprocessor_config.json", {"patch_size": 0}),
    ("preprocessor_config.json", {"size": []}),
    ("config.json", {"text_config": {"hidden_size": 0}}),
    ("config.json", {"text_config": {"num_hidden_layers": 10**9}}),
    ("config.json", {"text_config": {"num_hidden_layers": -1}}),
    ("config.json", {"vision_config": {"depth": 10**12}}),
    ("config.json", {"text_config": {"hidden_size": 10**7}}),
    ("config.json", {"text_config": {"intermediate_size": 10**9}}),
    ("config.json", {"text_config": {"vocab_size": 10**13}}),
    ("config.json", {"text_config": {"hidden_act": "made-up"}}),
    ("config.json", {"text_config": {"rope_parameters": 3}}),
    ("config.json", {"image_token_id": "a"}),
    ("config.json", {"vision_config": {"num_heads": 0}}),
]


@pytest.mark.parametrize(("file", "fields"), WRONG, ids=[f"{file}-{fields}" for file, fields in WRONG])
def test_fields_of_a_wrong_type_or_size(broken: Path, file: str, fields: dict[str, Any]) -> None:
    content = json.loads((broken / file).read_text())
    for name, value in fields.items():
        inner = content.get(name)
        nested = file == "config.json" and isinstance(inner, dict) and isinstance(value, dict)
        content[name] = inner | value if nested else value
    (broken / file).write_text(json.dumps(content))
    begun = time.monotonic()
    with pytest.raises(UserError) as caught:
        Backbone.load(broken, device="cpu").prompt([Turn("user", "Hi")])
    assert "\n" not in str(caught.value) and time.monotonic() - begun < 30
