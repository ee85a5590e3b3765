"""``realvr eval`` with real models of every family: real processes, kills, several processes, wrong input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import outside
from eval_cases import keys, lines, make_world
from realvr import models
from realvr.backbone import Backbone, Turn
from realvr.backbone.automatic import Where
from realvr.cli import main
from realvr.errors import UserError
from realvr.evaluation.ablation import donors, matched_noise
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.questions import load
from realvr.evaluation.runner import EvalSettings, evaluate
from realvr.latent import span as engine
from realvr.latent.group_rollout import decode
from realvr.latent.sampling import Sampling
from realvr.runs.lock import hold

LATENTS = 2
SHORT = Sampling(temperature=0.0, max_new=6)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def model(build_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with latent markers, as Stage 1 leaves it."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu", latents=LATENTS)
    return backbone.save(tmp_path_factory.mktemp("models") / "model")


def arguments(model: Path, world: dict[str, Path], out: Path, *more: str) -> list[str]:
    bench = ["--bench", f"mmvp={world['mmvp']}", "--bench", f"hrbench-4k={world['hrbench-4k']}"]
    return ["eval", str(model), *bench, "--out", str(out), "--max-new", "6", "--device", "cpu", *more]


@pytest.fixture(scope="module")
def finished(model: Path, world: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run in this process, not to be written to."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main(arguments(model, world, out, "--batch", "2")) == 0
    return out


def test_ignored_generation_defaults_are_noted(
    model: Path, world: dict[str, Path], finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen2.5-VL's released defaults: greedy answers are the same with and without them, and the run says so."""
    plain = json.loads((finished / "eval.json").read_text())
    assert "ignored_generation_defaults" not in plain["responder"]
    penalised = Path(shutil.copytree(model, tmp_path / "model"))
    file = penalised / "generation_config.json"
    released = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 1e-6}
    file.write_text(json.dumps(json.loads(file.read_text()) | released))
    assert main(arguments(penalised, world, tmp_path / "run", "--batch", "2")) == 0
    said = capsys.readouterr().err
    assert "repetition_penalty = 1.05, do_sample = True, temperature = 1e-06" in said
    assert said.count("generation defaults that are not used here") == 1
    record = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert record["responder"]["ignored_generation_defaults"] == released
    texts = [[row["text"] for row in lines(folder)] for folder in (finished, tmp_path / "run")]
    assert texts[0] == texts[1]


# ---------------------------------------------------------------------- every family, against the engine by hand


def by_hand(backbone: Backbone, row: Any, given: torch.Tensor | None, latents: int) -> tuple[str, torch.Tensor]:
    """One question alone, from the engine's functions: (text, latents of the span)."""
    options = [f"({letter}) {choice}" for letter, choice in zip("AB", row.choices, strict=True)]
    text = "\n".join([row.question, *options, "Answer with the letter of the option inside <answer> and </answer>."])
    prompt = backbone.prompt([Turn("user", text, [Image.open(row.images[0].path).convert("RGB")])])
    with torch.no_grad():
        state, _ = engine.prefill(backbone, backbone.batch([prompt]))
        if given is None:
            state, span = engine.think(backbone, state, latents)
        else:
            state, _ = engine.splice(backbone, state, given[None])
            span = given[None]
        return decode(backbone, state, 1, SHORT)[0][0].text, span[0]


def test_every_condition_equals_the_engine_by_hand(marked: Path, world: dict[str, Path], tmp_path: Path) -> None:
    backbone = Backbone.load(marked, dtype=torch.float32, device="cpu", latents=LATENTS)
    questions = load("mmvp", world["mmvp"])
    evaluate(ModelResponder(backbone, SHORT, path=str(marked)), [questions], tmp_path, batch=4)
    found = {(row["question"], row["condition"], row["latents"]): row["text"] for row in lines(tmp_path)}
    assert len(found) == 30
    own = {row.id: by_hand(backbone, row, None, LATENTS) for row in questions.samples}
    mean = torch.stack([span for _, span in own.values()]).mean(0)
    other = donors(questions.samples)
    for row in questions.samples:
        assert found[row.id, "own", LATENTS] == own[row.id][0]
        assert found[row.id, "own", 0] == by_hand(backbone, row, None, 0)[0]
        assert found[row.id, "mean", LATENTS] == by_hand(backbone, row, mean, LATENTS)[0]
        assert found[row.id, "other", LATENTS] == by_hand(backbone, row, own[other[row.id]][1], LATENTS)[0]
        noise = matched_noise(own[row.id][1], 0, row.id)
        assert found[row.id, "noise", LATENTS] == by_hand(backbone, row, noise, LATENTS)[0]
    different = {name for name in own if len({found[key] for key in found if key[0] == name}) > 1}
    assert different, "no condition changes any answer: the test shows nothing"


# ---------------------------------------------------------------------- batches, sampling, processes, kills


def test_answers_do_not_depend_on_the_batch(
    finished: Path, model: Path, world: dict[str, Path], tmp_path: Path
) -> None:
    for batch in ("1", "5"):
        assert main(arguments(model, world, tmp_path / batch, "--batch", batch)) == 0
        assert lines(tmp_path / batch) == lines(finished)


def test_answers_do_not_depend_on_how_they_are_decoded(
    finished: Path,
    model: Path,
    world: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In static shapes, and as CUDA graphs, for which there is no device here."""
    for mode in ("static", "graph"):
        assert main(arguments(model, world, tmp_path / mode, "--batch", "5", "--fast-decode", mode)) == 0
        assert lines(tmp_path / mode) == lines(finished)
        assert capsys.readouterr().err.count("CUDA graphs need a CUDA device") == (mode == "graph")
    ways, plain = [], Backbone.load

    def loading(*args: Any, **options: Any) -> Backbone:
        ways.append((options["fast_vision"], options["fused_layers"]))
        return plain(*args, **options)

    monkeypatch.setattr(Backbone, "load", loading)
    assert main(arguments(model, world, tmp_path / "ways", "--batch", "5", "--fused-layers", "--no-fast-vision")) == 0
    assert lines(tmp_path / "ways") == lines(finished) and ways == [(False, True)]


def test_an_evaluation_says_and_records_fused_layers(
    finished: Path,
    model: Path,
    world: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``auto`` is off on this CPU; where it is on, the record says so, and an evaluation begun without goes on."""
    assert "layers" not in json.loads((finished / "eval.json").read_text())["versions"]
    monkeypatch.setattr(Where, "takes", lambda self, name: True)
    for flags, fused, said in (([], True, 1), (["--no-fused-layers"], False, 0), (["--fused-layers", "on"], True, 0)):
        out = tmp_path / "-".join(["out", *flags])
        assert main(arguments(model, world, out, "--batch", "5", *flags)) == 0
        assert lines(out) == lines(finished)
        assert (json.loads((out / "eval.json").read_text())["versions"].get("layers") == "fused") is fused
        assert capsys.readouterr().err.count("note: fast paths: fused layers\n") == said
    assert main(arguments(model, world, tmp_path / "out---no-fused-layers", "--batch", "5")) == 0
    with pytest.raises(SystemExit):
        main(arguments(model, world, tmp_path / "odd", "--fused-layers", "quick"))


def test_sampled_answers_depend_on_the_seed_alone(model: Path, world: dict[str, Path], tmp_path: Path) -> None:
    questions = load("mmvp", world["mmvp"])
    backbone = Backbone.load(model, dtype=torch.float32, device="cpu")
    responder = ModelResponder(backbone, Sampling(temperature=0.9, max_new=6), path=str(model))
    for name, batch in (("one", 1), ("four", 4)):
        evaluate(responder, [questions], tmp_path / name, EvalSettings(ablation=False, seeds=(0, 1, 2)), batch=batch)
    found = lines(tmp_path / "one")
    assert found == lines(tmp_path / "four") and len(set(keys(found))) == 18
    texts = {question: {row["text"] for row in found if row["question"] == question} for question in "123456"}
    assert all(len(said) > 1 for said in texts.values())


def count(out: Path) -> int:
    """Whole lines of predictions."""
    return sum(file.read_bytes().count(b"\n") for file in out.glob("predictions*.jsonl"))


def wait_until_free(out: Path) -> None:
    """Until no process holds the folder any more."""
    deadline = time.monotonic() + 30
    while True:
        try:
            with hold(out, "test"):
                return
        except UserError:
            assert time.monotonic() < deadline, "processes outlive the one that started them"
            time.sleep(0.05)


@pytest.mark.slow
def test_a_run_survives_kills_and_changes_of_the_number_of_processes(
    finished: Path, model: Path, world: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    one = arguments(model, world, out, "--batch", "2")
    two = arguments(model, world, out, "--batch", "1", "--processes", "2")
    process = outside.start(*one, plugin=None)
    process.until(lambda: count(out) >= 4)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = count(out)
    assert 4 <= kept < 90

    process = outside.start(*two, plugin=None)  # the killed parent takes its processes along
    process.until(lambda: count(out) >= kept + 4)
    process.signal(signal.SIGKILL)
    process.wait()
    wait_until_free(out)
    assert len(list(out.glob("predictions.rank*.jsonl"))) == 2

    assert main(one) == 0
    found = lines(out)
    assert found == lines(finished) and len(set(keys(found))) == 90
    assert not list(out.glob("predictions.rank*")) and not list(out.rglob("*.tmp"))
    assert (out / "summary.json").read_bytes() == (finished / "summary.json").read_bytes()


def test_ctrl_c_says_how_to_go_on(
    finished: Path, model: Path, world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        while count(tmp_path) < 6:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    args = arguments(model, world, tmp_path, "--batch", "2")
    sender = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C
    try:
        sender.start()
        assert main(args) == 130
        sender.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert "the same command goes on from there" in capsys.readouterr().err
    assert 6 <= count(tmp_path) < 90
    assert main(args) == 0
    assert lines(tmp_path) == lines(finished)


@pytest.mark.slow
def test_two_processes_equal_one(finished: Path, model: Path, world: dict[str, Path], tmp_path: Path) -> None:
    outside.run(*arguments(model, world, tmp_path, "--batch", "2", "--processes", "2"), plugin=None)
    assert lines(tmp_path) == lines(finished) and not list(tmp_path.glob("predictions.rank*"))
    shares = {rank: list((tmp_path / "latents").glob(f"*/r{rank}-*.safetensors")) for rank in (0, 1)}
    held = {
        rank: [(file.parent.name, name) for file in files for name in load_file(file)] for rank, files in shares.items()
    }
    assert [len(set(held[rank])) for rank in (0, 1)] == [10, 8]  # nine batches of two: five and four
    assert not set(held[0]) & set(held[1])  # nobody does the work of another


# ---------------------------------------------------------------------- several checkpoints


def test_several_checkpoints_are_summarised_together(
    model: Path, world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in "01":
        shutil.copytree(model, tmp_path / f"seed{seed}" / "final")
    out = tmp_path / "out"
    models = [str(tmp_path / f"seed{seed}" / "final") for seed in "01"]
    options = ["--bench", f"mmvp={world['mmvp']}", "--no-ablation", "--max-new", "3", "--device", "cpu"]
    assert main(["eval", *models, *options, "--limit", "4", "--out", str(out)]) == 0
    for seed in "01":
        assert len(lines(out / f"seed{seed}-final")) == 4
    summary = json.loads((out / "summary.json").read_text())
    assert summary["checkpoints"] == ["seed0-final", "seed1-final"]
    assert (out / "summary.md").exists() and (out / "summary.csv").exists()
    said = capsys.readouterr()
    assert "seed0-final" in said.out and "mini-mmvp" in said.out and "MMVP" not in said.out
    assert "is drawn by the embedded world; it is called mini-mmvp" in said.err


# ---------------------------------------------------------------------- wrong input


def test_a_budget_other_than_the_trained_one_is_said(
    model: Path, world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--bench", f"mmvp={world['mmvp']}", "--latents", "5", "--max-new", "1", "--limit", "2"]
    assert main(["eval", str(model), *options, "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "was trained with K = 2; K = 5 was chosen explicitly" in capsys.readouterr().err
    assert {row["latents"] for row in lines(tmp_path)} == {5, 0}


def test_a_checkpoint_trained_without_a_span_is_asked_without_one(
    build_tiny: Any, world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu", latents=0)
    direct = str(backbone.save(tmp_path / "direct"))  # as `realvr train base` leaves it: markers, and K = 0
    bench = ["--bench", f"mmvp={world['mmvp']}", "--max-new", "2", "--limit", "2", "--device", "cpu"]
    assert main(["eval", direct, *bench, "--out", str(tmp_path / "out")]) == 0
    assert "was trained with K = 0: it answers without a span" in capsys.readouterr().err
    assert [(row["condition"], row["latents"]) for row in lines(tmp_path / "out")] == [("own", 0)] * 2
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["trained_latents"] == 0 and summary["benches"]["mini-mmvp"]["ablation"] == {}
    assert "latents" not in (tmp_path / "out" / "summary.md").read_text()
    assert main(["eval", direct, *bench, "--latents", "4", "--out", str(tmp_path / "four")]) == 2
    assert "direct: the model was not trained with latent slots" in capsys.readouterr().err


def test_a_model_without_markers_is_refused_before_its_weights_are_read(
    build_tiny: Any, world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(build_tiny("qwen2.5-vl"), model)
    (model / "model.safetensors").write_bytes(b"no weights")
    assert main(["eval", str(model), "--bench", f"mmvp={world['mmvp']}", "--out", str(tmp_path / "out")]) == 2
    assert f"{model}: the model was not trained with latent slots: evaluate it with --latents 0" in (
        capsys.readouterr().err
    )


def test_wrong_input_is_one_line(
    model: Path, build_tiny: Any, world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = ["--bench", f"mmvp={world['mmvp']}"]
    out = ["--out", str(tmp_path / "out")]
    cases = {
        "without markers": ([str(build_tiny("qwen2.5-vl")), *bench, "--device", "cpu"], "evaluate it with --latents 0"),
        "no benchmark": ([str(model)], "no benchmark named"),
        "no such file": ([str(model), "--bench", "blink=nowhere"], "nowhere does not exist; BLINK is expected as"),
        "no such model": ([str(tmp_path / "none"), *bench], "none does not exist"),
        "twice": ([str(model), *bench, *bench], "mmvp is named twice"),
        "same model twice": ([str(model), str(model), *bench], "is named twice"),
        "seeds": ([str(model), *bench, "--seeds", "3"], "greedy decoding has no seeds"),
        "policy": ([str(model), *bench, "--policy", "lax"], "'lax' is not an extraction policy"),
        "latents": ([str(model), *bench, "--latents", "2,-4"], "write a number of latent slots"),
        "temperature": ([str(model), *bench, "--temperature", "-1"], "temperature is -1"),
        "processes": ([str(model), *bench, "--processes", "0"], "--processes is 0"),
        "sharded": ([str(model), *bench, "--sharded", "--processes", "2"], "--sharded is one process with all GPUs"),
        "sharded device": ([str(model), *bench, "--sharded", "--device", "cpu"], "leave out --device"),
        "limit": ([str(model), *bench, "--limit", "0"], "--limit is 0"),
        "subtask": ([str(model), *bench, "--blink-tasks", "x"], "no subtask 'x'"),
        "images": ([str(model), *bench, "--images", f"blink={tmp_path}"], "blink, which is no --bench"),
    }
    if not torch.cuda.is_available():
        cases["sharded without a GPU"] = ([str(model), *bench, "--sharded"], "over the GPUs of this machine, and there")
    for name, (args, expected) in cases.items():
        code = main(["eval", *args, *out])
        said = [line for line in capsys.readouterr().err.strip().splitlines() if "realvr: note:" not in line]
        assert code == 2 and len(said) == 1 and expected in said[0], f"{name}: {code} {said}"
        assert not (tmp_path / "out" / "predictions.jsonl").exists(), name


def test_a_reply_ends_with_its_answer_unless_told_otherwise(world: dict[str, Path], tmp_path: Path) -> None:
    if not (Path(models.__file__).parent / "mini" / "config.json").is_file():
        pytest.skip("the packaged checkpoints are not in this checkout")
    options = ["--bench", f"mini-mmvp={world['mmvp']}", "--no-ablation", "--max-new", "24", "--device", "cpu"]
    assert main(["eval", "mini", *options, "--out", str(tmp_path / "on")]) == 0
    assert main(["eval", "mini", *options, "--no-stop-at-answer", "--out", str(tmp_path / "off")]) == 0
    on, off = lines(tmp_path / "on"), lines(tmp_path / "off")
    assert {row["finish"] for row in on} == {"stop"} and "stop" not in {row["finish"] for row in off}
    for one, two in zip(on, off, strict=True):
        assert one["text"].endswith("</answer>") and two["text"].startswith(one["text"])
        assert two["new_tokens"] > one["new_tokens"]  # the end token at least
