"""The core of the adapters for other harnesses, without a harness: its replies are those of `realvr eval`."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eval_cases import lines
from realvr.backbone.types import Turn
from realvr.cli import main
from realvr.errors import UserError
from realvr.evaluation.processes import Ranks
from realvr.integrations.arguments import Decoding, MissingHarness, ModelArguments, decoding
from realvr.integrations.harness import HarnessModel, Question, turn
from realvr.integrations.vlmevalkit import SingleQuestions

ROOT = Path(__file__).parents[2]
PLAIN: dict[str, Any] = {"max_new_tokens": 192}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    """Seven trails: two about one picture under two names, and one whose picture is broken."""
    folder = tmp_path_factory.mktemp("world")
    assert main(["world", "make", str(folder), "--split", "trails", "--count", "7", "--workers", "1"]) == 0
    file = folder / "trails" / "samples.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    first, twin, broken = (file.parent / found[number]["images"][0] for number in (0, 3, 5))
    shutil.copy(first, twin)
    broken.write_bytes(broken.read_bytes()[:40])
    return file, found


@pytest.fixture(scope="module")
def evaluated(rows: tuple[Path, Rows], tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What `realvr eval` records about them, four questions at a time."""
    out = tmp_path_factory.mktemp("eval")
    command = ["eval", "mini", "--bench", f"mine={rows[0]}", "--latents", "8,4", "--batch", "4", "--out", str(out)]
    assert main(command) == 0
    return lines(out)


def worded(row: dict[str, Any]) -> str:
    """A question as `realvr eval` puts it, written out here."""
    options = [f"({letter}) {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True)]
    return "\n".join([row["question"], *options, "Answer with the letter of the option inside <answer> and </answer>."])


def questions(rows: tuple[Path, Rows], repeat: int = 0) -> list[Question]:
    file, found = rows

    def turns(row: dict[str, Any]) -> Callable[[], list[Turn]]:
        return lambda: [turn("user", [("image", file.parent / row["images"][0]), ("text", worded(row))])]

    return [Question(row["id"], turns(row), repeat) for row in found]


def recorded(evaluated: Rows, condition: str, latents: int) -> Rows:
    name = "own" if condition == "none" else condition
    return [row for row in evaluated if (row["condition"], row["latents"]) == (name, latents)]


@pytest.mark.parametrize(
    ("condition", "latents"), [("own", 8), ("own", 4), ("none", 0), ("mean", 8), ("other", 8), ("noise", 8)]
)
def test_replies_equal_those_of_realvr_eval(
    rows: tuple[Path, Rows],
    evaluated: Rows,
    condition: str,
    latents: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"pretrained": "mini", "condition": condition, "batch_size": 4} | ({"latents": 4} if latents == 4 else {})
    model = HarnessModel(ModelArguments.parse(given))
    found = model.replies("mine", questions(rows), decoding(model.arguments, PLAIN))
    wanted = recorded(evaluated, condition, latents)
    assert [row["question"] for row in wanted] == [row["id"] for row in rows[1]]
    assert [reply.text for reply in found] == [row["text"] for row in wanted]
    assert [reply.error is not None for reply in found] == [row["error"] is not None for row in wanted]
    assert [reply.prompt for reply in found] == [row["prompt"] for row in wanted]
    noted = capsys.readouterr().err
    assert re.search(r"mine: 1 of 7 questions could not be asked; the first: .*trails/5\.png", noted)
    assert ("K = 4 was chosen explicitly" in noted) == (latents == 4)


def test_the_conditions_can_be_told_apart(evaluated: Rows) -> None:
    """Otherwise the test above would not notice which of them the core asks under."""
    texts = {
        (condition, latents): tuple(row["text"] for row in recorded(evaluated, condition, latents))
        for condition, latents in [("own", 8), ("own", 4), ("own", 0), ("mean", 8), ("other", 8), ("noise", 8)]
    }
    assert len(set(texts.values())) == len(texts)


def test_a_repeat_is_sampled_as_another_seed(rows: tuple[Path, Rows], tmp_path: Path) -> None:
    options = ["--no-ablation", "--temperature", "6", "--seeds", "2", "--max-new", "12", "--batch", "7"]
    assert main(["eval", "mini", "--bench", f"mine={rows[0]}", "--out", str(tmp_path), *options]) == 0
    model = HarnessModel(ModelArguments.parse({"pretrained": "mini", "max_new": "12", "batch_size": "7"}))
    task = {"max_new_tokens": 64, "do_sample": True, "temperature": 6.0}
    for seed in (0, 1):
        found = model.replies("mine", questions(rows, repeat=seed), decoding(model.arguments, task))
        wanted = [row["text"] for row in lines(tmp_path) if row["seed"] == seed]
        assert [reply.text for reply in found] == wanted
    assert len({tuple(row["text"] for row in lines(tmp_path) if row["seed"] == seed) for seed in (0, 1)}) == 2


def test_one_question_at_a_time_as_vlmevalkit_asks(rows: tuple[Path, Rows], evaluated: Rows) -> None:
    file, found = rows
    single = SingleQuestions(pretrained="mini", max_new=192)
    message = [
        {"type": "image", "value": str(file.parent / found[1]["images"][0])},
        {"type": "text", "value": worded(found[1])},
    ]
    wanted = recorded(evaluated, "own", 8)
    assert single.answer(message, "MMVP") == wanted[1]["text"]
    message[0]["value"] = str(file.parent / found[5]["images"][0])
    with pytest.raises(UserError, match=r"trails/5\.png"):
        single.answer(message)
    with pytest.raises(UserError, match="condition=mean needs the latents of all questions, and VLMEvalKit asks one"):
        SingleQuestions(pretrained="mini", condition="mean")


def test_what_only_a_whole_set_can_give_is_refused_elsewhere(rows: tuple[Path, Rows]) -> None:
    arguments = ModelArguments("mini", condition="other")
    with pytest.raises(UserError, match="condition=other needs the latents of all questions, and 2 processes share"):
        HarnessModel(arguments, Ranks(0, 2))
    one = [questions(rows)[number] for number in (0, 3)]
    with pytest.raises(UserError, match="mine: all questions are about the same picture"):
        HarnessModel(arguments).replies("mine", one, decoding(arguments, PLAIN))


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "no model named: give pretrained=CHECKPOINT"),
        ({"pretrained": "mini", "latent": 8}, "there is no model argument latent; there are pretrained, latents, cond"),
        ({"pretrained": "mini", "latents": -1}, "latents=-1: the number of latent slots cannot be negative"),
        ({"pretrained": "mini", "latents": "many"}, "latents=many: Input should be a valid integer"),
        ({"pretrained": "mini", "condition": "nois"}, "condition=nois: Input should be 'own', 'none', 'mean', 'other'"),
        ({"pretrained": "mini", "condition": "none", "latents": 8}, "condition=none asks for no span, and latents=8"),
        ({"pretrained": "mini", "condition": "mean", "latents": 0}, "condition=mean fills the span, and latents=0"),
        ({"pretrained": "mini", "batch_size": "0"}, "batch_size=0: at least one question"),
        ({"pretrained": "mini", "max_new": 0}, "max_new=0: at least one token"),
        ({"pretrained": "mini", "stop_at_answer": "perhaps"}, "stop_at_answer=perhaps: Input should be a valid bool"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        ModelArguments.parse(given)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_arguments_come_as_texts_and_numbers() -> None:
    given = {"pretrained": 7, "latents": "4", "batch_size": "auto", "stop_at_answer": False, "device": None}
    assert ModelArguments.parse(given) == ModelArguments("7", latents=4, stop_at_answer=False)


def test_k_is_that_of_the_checkpoint_unless_another_is_asked_for() -> None:
    assert ModelArguments("m").slots(8) == 8 and ModelArguments("m", latents=3).slots(8) == 3
    assert ModelArguments("m").slots(0) == 0 and ModelArguments("m", condition="none").slots(8) == 0
    assert ModelArguments("m", latents=0).slots(None) == 0
    for arguments, trained in ((ModelArguments("m"), None), (ModelArguments("m", latents=4), 0)):
        with pytest.raises(UserError, match="m was not trained with latent slots: give latents=0"):
            arguments.slots(trained)
    with pytest.raises(UserError, match="m was trained with K = 0: it has no span that condition=noise could fill"):
        ModelArguments("m", condition="noise").slots(0)


def test_generation_settings_of_a_task() -> None:
    plain = ModelArguments("mini")

    def how(**task: Any) -> Decoding:
        return decoding(plain, task)

    assert how().sampling.temperature == 0 and how().sampling.max_new == 192 and how().sampling.stop == "</answer>"
    assert how(max_new_tokens=16).sampling.max_new == 16
    assert decoding(ModelArguments("mini", max_new=99), {"max_new_tokens": 16}).sampling.max_new == 99
    assert decoding(ModelArguments("mini", stop_at_answer=False), {}).sampling.stop is None
    assert how(temperature=0.7, do_sample=False).sampling.temperature == 0
    assert how(temperature=0.7).sampling.temperature == 0.7 and how(do_sample=True).sampling.temperature == 1
    sampled = how(temperature=0.7, do_sample=True, top_p=0.9, top_k=20).sampling
    assert (sampled.top_p, sampled.top_k) == (0.9, 20)
    assert how(temperature=0, do_sample=False, top_p=0, num_beams=1).sampling.top_p == 1  # as many tasks write it
    assert how(num_beams=1, use_cache=True).ignored == () and how(num_beams=3).ignored == ("num_beams=3",)
    assert how(until=["ASSISTANT:", "\n\n"]).cut("one\n\ntwo ASSISTANT: three") == "one\n\ntwo "
    assert how(until="stop").cut("go on") == "go on" and how(until=None).until == ()


def test_notes_tell_what_is_not_obeyed_and_what_was_cut(
    rows: tuple[Path, Rows], capsys: pytest.CaptureFixture[str]
) -> None:
    model = HarnessModel(ModelArguments("mini"))
    how = decoding(model.arguments, {"max_new_tokens": 2, "num_beams": 3})
    for _ in range(2):
        model.replies("mine", questions(rows)[:2], how)
    noted = capsys.readouterr().err
    assert noted.count("mine: these generation settings are not used: num_beams=3") == 1
    assert "mine: 2 of 2 replies ended at the limit of 2 new tokens; max_new=N gives them more" in noted


def test_pictures_stand_before_the_text_and_are_named_in_it() -> None:
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    made = turn("user", [("image", red), ("text", "Is it like "), ("image", blue), ("text", "?")], shown=2)
    assert made.images == [red, blue] and made.text == "Is it like image 4?"
    with pytest.raises(UserError, match="the question holds video: models of realvr read text and images only"):
        turn("user", [("video", "a.mp4"), ("text", "What happens?")])


# ---------------------------------------------------------------------- harnesses that are not there


def test_a_missing_lmms_eval_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmms_eval", None)
    monkeypatch.delitem(sys.modules, "realvr.integrations.lmms_eval", raising=False)
    with pytest.raises(MissingHarness) as error:
        importlib.import_module("realvr.integrations.lmms_eval")
    line = str(error.value)
    assert 'pip install "realvr[lmms-eval]"' in line and "\n" not in line
    assert isinstance(error.value, UserError) and isinstance(error.value, ImportError)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(name.startswith("lmms-eval") for name in extras["lmms-eval"])


def test_a_missing_vlmevalkit_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vlmeval", None)
    with pytest.raises(MissingHarness, match="clone https://github.com/open-compass/VLMEvalKit"):
        importlib.import_module("realvr.integrations.vlmevalkit").RealVR  # noqa: B018


def test_the_entry_point_is_light() -> None:
    """lmms-eval loads it whenever it starts, whichever model it is to run."""
    code = "import sys, realvr.integrations, realvr.integrations.arguments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lmms_eval.models"]
    module, _, name = declared["realvr"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_model_arguments_in_the_docs_exist() -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text()
    found = re.findall(r"^    lmms-eval (.*)$", text, re.MULTILINE)
    assert len(found) >= 4
    for command in found:
        words = shlex.split(command)
        given = dict(pair.split("=", 1) for pair in words[words.index("--model_args") + 1].split(","))
        given.pop("id_column", None)
        ModelArguments.parse(given | {"batch_size": words[words.index("--batch_size") + 1]})
