"""The command line as a user meets it: real processes, exit codes, one-line errors, no torch where none is needed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from realvr.backbone import Backbone
from realvr.cli import COMMANDS, main
from realvr.cli.dispatch import settings_type


def run(*args: str | Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "realvr", *map(str, args)] if code is None else [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "model"
    done = run("new", "--family", "qwen3-vl", "--size", "tiny", directory)
    assert done.returncode == 0, done.stderr
    assert str(directory) in done.stdout
    return directory


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "picture.png"
    Image.new("RGB", (96, 64), (200, 30, 30)).save(path)
    return path


def test_an_option_before_the_command_is_told_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plugin", "mine.py", "diagnose"]) == 2
    assert capsys.readouterr().err.startswith("realvr: error: --plugin: options stand after the command (")


def test_help_lists_every_command_with_examples() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
    assert "examples:" in done.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_explains_itself_without_heavy_imports(name: str) -> None:
    code = (
        "import sys\nfrom realvr.cli import main\n"
        f"try:\n    main({[*name.split(), '--help']!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        # Settings of a method stand in its file, beside its tensors.
        f"assert {name.startswith('train')} or 'torch' not in sys.modules, 'torch was imported'\n"
        "assert 'transformers' not in sys.modules, 'transformers was imported'\n"
    )
    done = run(code=code)
    assert done.returncode == 0, done.stderr
    assert f"realvr {name}" in done.stdout.split("Examples:")[1]


@pytest.mark.parametrize("name", [name for name, one in COMMANDS.items() if not one.raw])
def test_help_is_whole_sentences(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No backticks, no default that is nothing, and no line broken where tyro keeps one: before a dash or a digit."""
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    text = capsys.readouterr().out
    options = text.split("Examples:")[1]
    assert "`" not in options and "(default: )" not in options
    command = COMMANDS[name]
    kind = settings_type(getattr(importlib.import_module(command.module), command.function))
    assert kind is not None
    for described in kind.__mro__:
        for line in (described.__doc__ or "").partition("Args:")[2].splitlines():
            assert not line.startswith(" " * 12) or line.strip()[0].isalpha(), f"{described.__name__}: {line}"


def test_env_reports_versions_devices_and_engines() -> None:
    import torch
    import transformers

    found = json.loads(run("env", "--json").stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["transformers"] == transformers.__version__
    assert "cpu" in found["devices"]
    assert any("DDP" in engine for engine in found["engines"])
    assert transformers.__version__ in run("env").stdout


def test_ask_prints_the_answer_and_json_has_the_promised_keys(model: Path, picture: Path) -> None:
    options = ("--latents", "3", "--max-new", "6", "--device", "cpu")
    plain = run("ask", model, picture, "What colour?", *options)
    assert plain.returncode == 0, plain.stderr
    done = run("ask", model, picture, "What colour?", *options, "--json")
    result = json.loads(done.stdout)
    assert plain.stdout.strip() == result["answer"]
    assert result["latents"] == 3 and len(result["latent_norms"]) == 3
    assert result["finish_reason"] in ("eos", "stop", "length")
    assert isinstance(result["text"], str) and result["seconds"] > 0
    assert "untrained" in done.stderr  # the markers of a new model were never trained: said, but not on stdout


def test_ask_without_latents_has_no_span(model: Path, picture: Path) -> None:
    options = ("--latents", "0", "--max-new", "4", "--device", "cpu", "--json")
    result = json.loads(run("ask", model, picture, picture, "Same?", *options).stdout)
    assert result["latent_norms"] == [] and len(result["visual_tokens"]) == 2


def test_ask_takes_the_first_answer_block() -> None:
    from realvr.answers import PARSERS

    assert PARSERS["ask"].read("so <answer> B </answer> and <answer>C</answer>", ()) == "B"
    assert PARSERS["ask"].read("  no block ", ()) == "no block"


def errors(tmp_path: Path, model: Path, picture: Path) -> dict[str, tuple[tuple[str | Path, ...], str]]:
    text, truncated, empty = tmp_path / "notes.png", tmp_path / "cut.png", tmp_path / "empty.png"
    text.write_text("not an image")
    truncated.write_bytes(picture.read_bytes()[:-30])
    empty.write_bytes(b"")
    thin = tmp_path / "thin.png"
    Image.new("RGB", (900, 1)).save(thin)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llava"}))
    question = "What?"
    return {
        "missing model": (("ask", tmp_path / "nope", picture, question), "nope does not exist"),
        "unsupported model": (("ask", other, picture, question), "supported are qwen2.5-vl"),
        "missing image": (("ask", model, tmp_path / "no.png", question), "no.png does not exist"),
        "not an image": (("ask", model, text, question), "notes.png"),
        "truncated image": (("ask", model, truncated, question), "cut.png"),
        "empty image": (("ask", model, empty, question), "empty.png"),
        "negative latents": (("ask", model, picture, question, "--latents", "-1"), "--latents is -1"),
        "negative temperature": (("ask", model, picture, question, "--temperature", "-1"), "temperature is -1"),
        "no question": (("ask", model), "no question"),
        "image for a question": (("ask", model, picture), "picture.png is a file, and no question follows it"),
        "thin image": (("ask", model, thin, question, "--device", "cpu"), "thin.png (900x1)"),
        "no place to write": (("new", "--family", "gemma3", picture / "x"), "cannot be written"),
        "no such place": (("new", "--family", "gemma3", "/proc/x"), "/proc/x cannot be written"),
        "an empty place": (("eval", model, "--bench", "x=y", "--out", ""), "--out is empty: name a folder"),
        "an empty run": (("train", "rl", "x.yaml", "--run.out="), "--run.out is empty"),
        "prompt too long": (("ask", model, picture, "#9?" * 20000, "--device", "cpu"), "context"),
        "unknown dtype": (("ask", model, picture, question, "--dtype", "int3"), "int3"),
        "unknown device": (("ask", model, picture, question, "--device", "toaster"), "toaster"),
        "unknown family": (("new", "--family", "bert", tmp_path / "x"), "qwen2.5-vl"),
        "unknown size": (("new", "--family", "gemma3", "--size", "huge", tmp_path / "x"), "huge"),
        "directory in use": (("new", "--family", "gemma3", model), "not empty"),
        "unknown command": (("axk",), "did you mean 'ask'"),
    }


def test_wrong_input_is_one_line_and_exit_code_2(
    tmp_path: Path, model: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (args, expected) in errors(tmp_path, model, picture).items():
        code = main([str(arg) for arg in args])
        out, message = capsys.readouterr()
        message = message.strip()
        assert code == 2, f"{name}: exit code {code}\n{message}"
        assert expected in message, f"{name}: {message}"
        assert len(message.splitlines()) == 1 and message.startswith("realvr: error: "), f"{name}: {message}"
        assert out == "", name


def test_an_error_in_a_real_process_has_no_traceback(model: Path, tmp_path: Path) -> None:
    done = run("ask", model, tmp_path / "no.png", "What?")
    assert done.returncode == 2
    assert done.stderr.strip() == f"realvr: error: image {tmp_path / 'no.png'} does not exist"


def test_unknown_option_is_exit_code_2(model: Path, picture: Path) -> None:
    done = run("ask", model, picture, "What?", "--latent", "3")
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_warning_is_one_line(tmp_path: Path, picture: Path) -> None:
    assert run("new", "--family", "gemma3", tmp_path / "gemma").returncode == 0
    done = run("ask", tmp_path / "gemma", picture, "?", "--max-new", "1", "--latents", "0", "--max-tokens", "9")
    assert done.stderr == "realvr: note: gemma3 ignores a visual-token budget: 16 visual tokens per image\n"


def test_every_family_answers_through_the_path_of_ask(backbone: Backbone, picture: Path) -> None:
    from realvr.evaluation.ask import answer
    from realvr.latent.sampling import Sampling

    found = answer(backbone, [picture], "What colour is the circle?", 2, Sampling(temperature=0.0, max_new=3))
    assert found["family"] == backbone.family.name
    assert len(found["latent_norms"]) == 2 and all(norm > 0 for norm in found["latent_norms"])
    assert 1 <= found["new_tokens"] <= 3 and sum(found["visual_tokens"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["benchmarks", "--plugin", "FILE"], "defines no method, benchmark or diagnostic"),
        (["benchmarks", "--json", "--markdown"], "choose one"),
        (["benchmarks", "MMVP"], "did you mean 'mmvp'"),
        (["ask", "mini", "What colour?", "--expected", " "], "--expected is empty"),
        (["eval", "mini", "--bench", "mmvp=FILE", "--tasks", "mmvp=paper", "--out", "OUT"], "mmvp is evaluated whole"),
    ],
)
def test_small_mistakes_are_named(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REALVR_PLUGINS", "")
    file = tmp_path / "empty.py"
    file.write_text("VALUE = 1\n")
    given = [item.replace("FILE", str(file)).replace("OUT", str(tmp_path / "out")) for item in arguments]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
