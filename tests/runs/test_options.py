"""Values of options that cannot be read, through the command line that users type."""

from __future__ import annotations

import pytest

from realvr.cli.dispatch import main
from realvr.runs.options import expected

PICTURE = ["ask", "mini", "x.png", "What?"]
WRONG = {
    "number": ([*PICTURE, "--latents", "abc"], "--latents is 'abc': a whole number is expected (realvr ask --help"),
    "one word": (["data", "check", "x", "--max-dropped=lots"], "--max-dropped is 'lots': a number is expected"),
    "the last": (
        ["plan", "--backbone", "all", "--gpus", "8", "--gpus", "1.5"],
        "--gpus is '1.5': a whole number is expected",
    ),
    "underscore": ([*PICTURE, "--max_new", "2x"], "--max-new is '2x': a whole number"),
    "choice": (["plan", "--gpu", "H200", "--stage", "foo"], "--stage is 'foo': sft or rl is expected (realvr plan"),
    "no value": ([*PICTURE, "--latents"], "--latents needs a value: a whole number is expected"),
    "no word": (["eval", "mini", "--latents"], "--latents needs a value (realvr eval --help"),
    "two": (["train", "rl", "own/rl", "--optim.betas", "a", "b"], "--optim.betas is 'a b': 2 numbers are expected"),
    "one of two": (["train", "rl", "own/rl", "--optim.betas", "1"], "--optim.betas is '1': 2 numbers are expected"),
    "a setting": (["train", "rl", "own/rl", "--optim.lr", "abc"], "--optim.lr is 'abc': a number is expected"),
    "a diagnostic": (["diagnose", "walk", "mini", "x", "--out", "o", "--limit", "2.5"], "--limit is '2.5': a whole"),
    "a positional": (
        ["ask", "--model", "mini", "x"],
        "--model is no option: MODEL stands without a flag, realvr ask MO",
    ),
    "unneeded": ([*PICTURE, "--model=mini"], "--model is no option: MODEL stands without a flag"),
    "out": (["world", "make", "--out", "x"], "--out is no option: OUT stands without a flag, realvr world make OUT"),
    "a suite": (["diagnose", "--model", "mini", "--data", "x"], "--model is no option: MODEL stands without a flag"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_one_line_with_option_value_and_what_is_allowed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args, line = WRONG[name]
    assert main(args) == 2
    out, said = capsys.readouterr()
    assert said.startswith(f"realvr: error: {line}") and said.count("\n") == 1 and not out


def test_an_unknown_option_keeps_its_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*PICTURE, "--latent", "3"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "--latent" in said and "--latents" in said


def test_placeholders_in_words() -> None:
    assert expected("{None}|INT") == "a whole number"
    assert expected("{None,drop,rename}") == "drop or rename"
    assert expected("{True,False}|{auto}") == "true, false or auto"
    assert expected("{None}|INT|{all}") == "a whole number or all"
    assert expected("NAME=PATH") == "NAME=PATH"
    assert expected("[INT [INT ...]]") == "whole numbers"
    assert expected("FLOAT FLOAT") == "2 numbers"
    assert expected("PATH [PATH ...]") == "paths"
    assert expected("STR") == expected("[STR [STR ...]]") == ""
    assert expected("INT STR") == "INT STR"
    assert expected("{a,b} [{a,b} ...]") == "{a,b} [{a,b} ...]"
