"""Held-out questions during training: what they measure, that they leave the run alone, and the best model."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forked import Forked
from helpers import load_stock, stock_inputs
from realvr.backbone import Backbone
from realvr.backbone.samples import answer_tokens, conversation
from realvr.backbone.types import Prompt
from realvr.cli import main
from realvr.data import read
from realvr.errors import UserError
from realvr.report.find import find
from realvr.report.training import training
from realvr.training import held_out, loop
from realvr.training.best import Best
from realvr.training.checkpoints import Progress
from realvr.training.sections import VALIDATION_METRICS, ValidationSettings
from realvr.training.validation import validation_of
from stage_runs import (
    column,
    command,
    config_file,
    configure,
    environment,
    lines,
    make,
    numbers,
    run,
    start,
    weights,
    world,
    write,
)

MINI = {"rl": "mini", "sft": "mini-base", "base": "mini-base"}
HELD = 12
RUINOUS = {"lr": 4e-3, "warmup": 4}
"""A learning rate that grows until it ruins the model: every validation is worse than the one before."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(world(8, size=48), tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(world(HELD, seed=5, size=48), tmp_path_factory.mktemp("held"))


def small(kind: str, data: Path, out: Path, held: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Settings of a short run of a packaged model, validated after every second step."""
    raw = configure(kind, Path(MINI[kind]), data, out, **{"optim": {"steps": 4, "lr": 1e-4}} | changes)
    raw["model"] |= {"path": MINI[kind], "latents": 8}  # base training teaches no span, whatever is said here
    if held is not None:
        asked = {"path": str(held), "every": 2, "batch": 4, "max_new": 24}
        raw["validation"] = asked | changes.get("validation", {})
    return raw


RANDOM_REWARD = """
import random

import numpy as np
import torch


def odd(text, sample):
    return random.random() + np.random.rand() + float(torch.rand(()))
"""


def told(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run without its clocks."""
    return [{k: v for k, v in line.items() if k != "validation/seconds"} for line in numbers(lines(out))]


def without_validation(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if "validation" not in name} for line in numbers(found)]


# ---------------------------------------------------------------------- the run is left alone


@pytest.mark.parametrize(
    "kind", ["sft", "rl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("base", "lora"))]
)
def test_a_validated_run_is_the_same_run(kind: str, data: Path, held: Path, tmp_path: Path) -> None:
    """Metrics and weights bit for bit: generators, dropout and gradients are as they were."""
    changes: dict[str, Any] = {}
    if kind == "lora":  # dropout draws random numbers, and so does a reward, in training and in validation
        (tmp_path / "odd.py").write_text(RANDOM_REWARD)
        kind, changes = "rl", {"lora": {"rank": 2, "dropout": 0.2}}
        changes["rewards"] = {"accuracy": 1.0, f"{tmp_path / 'odd.py'}:odd": 0.1}
    trained, metrics = [], []
    for name, questions in (("plain", None), ("validated", held)):
        best = {"checkpoint": {"every": 0, "keep_best": "validation/loss"}} if questions else {}
        task, settings, engine = make(kind, small(kind, data, tmp_path / name, questions, **changes, **best))
        assert loop.train(task, settings, engine) == 0
        trained.append(weights(task))
        metrics.append(lines(tmp_path / name))
    assert without_validation(metrics[0]) == without_validation(metrics[1])
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    measured = ["validation/accuracy" in line for line in metrics[1]]
    assert measured == [False, True, False, True]
    assert not list((tmp_path / "validated").glob(".validation*"))


def test_dropout_is_off_while_validating(data: Path, held: Path, tmp_path: Path) -> None:
    """Batches do not matter, which masks of dropout would; and the modes of all modules are put back."""
    found = []
    for batch in (3, 12):
        changes = {"lora": {"rank": 2, "dropout": 0.5}, "validation": {"batch": batch}}
        task, settings, engine = make("rl", small("rl", data, tmp_path / "run", held, **changes))
        engine.prepare(task.module, settings.optim)
        with torch.no_grad():  # adapters begin at zero, where dropout changes nothing
            for name, parameter in task.backbone.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
        validation = validation_of(task, settings, engine)
        assert validation is not None
        modes = [module.training for module in task.backbone.model.modules()]
        found.append(validation(1))
        assert [module.training for module in task.backbone.model.modules()] == modes and any(modes)
        assert torch.is_grad_enabled()
    assert found[0].metrics["validation/loss"] == pytest.approx(found[1].metrics["validation/loss"], rel=1e-4)
    assert [reply["text"] for reply in found[0].replies] == [reply["text"] for reply in found[1].replies]


# ---------------------------------------------------------------------- what is measured


def test_the_values_are_those_of_realvr_eval(data: Path, held: Path, tmp_path: Path) -> None:
    """The exported model, loaded by another command and asked the same questions: answers, accuracy, effects."""
    reward = tmp_path / "mine.py"
    reward.write_text("def words(text, sample):\n    return len(text.split())\n")
    rewards = {"rewards": {"accuracy": 1.0, f"{reward}:words": 0.5}}
    out = tmp_path / "run"
    asked_for = {"effects": True, "by": "kind"}
    raw = small("rl", data, out, held, **rewards, validation=asked_for)
    raw["data"]["keep_encoded"] = True
    found = run("rl", raw)[-1]
    folder = tmp_path / "eval"
    flags = ["--max-new", "24", "--batch", "4", "--out", str(folder), "--device", "cpu", "--dtype", "float32"]
    assert main(["eval", str(out / "final"), "--bench", f"mine={held}", *flags]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    bench = summary["benches"]["mine"]
    assert found["validation/accuracy"] == pytest.approx(bench["headline"] / 100)
    assert found["validation/readable"] == pytest.approx(bench["coverage"] / 100)
    for name in ("help", "dependence_other", "dependence_noise"):
        assert found[f"validation/{name}"] == pytest.approx(summary["effects"][name]["points"] / 100), name
    asked = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    own = {row["question"]: row for row in asked if row["condition"] == "own" and row["latents"] == 8}
    replies = [row for row in lines(out, "validation.jsonl") if row["step"] == 4]
    assert len(replies) == len(own) == HELD
    for reply in replies:
        same = ("text", "extracted", "correct", "answer")
        assert {name: reply[name] for name in same} == {name: own[reply["id"]][name] for name in same}
    kinds = {row["tags"]["kind"] for row in own.values()}
    by_kind = {kind: [row["correct"] for row in own.values() if row["tags"]["kind"] == kind] for kind in kinds}
    curves = {f"validation/accuracy/kind={kind}": sum(right) / len(right) for kind, right in by_kind.items()}
    assert len(curves) > 2 and curves == {name: found[name] for name in found if "accuracy/kind" in name}
    by_hand = [row["correct"] + 0.5 * len(row["text"].split()) for row in own.values()]
    assert found["validation/reward"] == pytest.approx(sum(by_hand) / HELD)
    assert found["validation/reward/mine.py:words"] == pytest.approx(
        sum(len(row["text"].split()) for row in own.values()) / HELD
    )


def test_the_loss_is_that_of_a_stock_model(data: Path, held: Path, tmp_path: Path) -> None:
    """Mean negative log-likelihood of the right answer, from stock transformers over whole sequences."""
    out = tmp_path / "run"
    found = run("base", small("base", data, out, held))[-1]
    backbone, stock = Backbone.load(out / "final", dtype=torch.float32, device="cpu"), load_stock(out / "final")
    losses = []
    for sample in read(held):
        prompt = backbone.prompt(conversation(sample, [image.open() for image in sample.images]))
        answer, _ = answer_tokens(backbone, sample.answer, sample.choices)
        whole = Prompt(torch.cat([prompt.ids, torch.tensor(answer)]), prompt.images)
        with torch.no_grad():
            logp = stock(**stock_inputs(backbone, [whole])).logits[0].log_softmax(-1)
        losses.append(-sum(float(logp[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)) / len(answer))
    assert found["validation/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_a_question_that_cannot_be_asked_counts_as_wrong(data: Path, tmp_path: Path) -> None:
    held = write(world(4, seed=5, size=48), tmp_path / "held")
    rows = [json.loads(line) for line in held.read_text().splitlines()]
    images = rows[0].get("images") or [rows[0]["image"]]
    name = images[0] if isinstance(images[0], str) else images[0]["path"]
    (held.parent / name).write_bytes(b"not a picture")
    found = run("base", small("base", data, tmp_path / "run", held, optim={"steps": 1}))[-1]
    assert found["validation/errors"] == 1.0 and found["validation/accuracy"] <= 0.75
    assert found["validation/readable"] <= 0.75 and math.isfinite(found["validation/loss"])
    broken = [row for row in lines(tmp_path / "run", "validation.jsonl") if "error" in row]
    assert len(broken) == 1 and broken[0]["reward"] == 0 and broken[0]["loss"] is None


def test_the_same_questions_every_time(tmp_path: Path) -> None:
    path = write(world(30, seed=5, size=48), tmp_path / "held")

    def chosen(**changes: Any) -> list[str]:
        found = held_out.held_out_questions(ValidationSettings(path=str(path), **changes))
        assert found is not None
        return [sample.id for sample in found.samples]

    ten = chosen(n=10)
    assert len(ten) == 10 and ten == chosen(n=10) and ten != chosen(n=10, seed=1)
    assert set(ten) < set(chosen(n=20)) < set(chosen(n=30)) == set(chosen(n=1000))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(reversed(lines)) + "\n")
    assert set(chosen(n=10)) == set(ten), "the order of the file does not matter"


def test_pairs_stay_together(tmp_path: Path) -> None:
    path = write(world(4, seed=1, split="counterfactual", size=48), tmp_path / "held")
    found = held_out.held_out_questions(ValidationSettings(path=str(path), n=5))
    assert found is not None and len(found) == 4
    assert all(sum(s.pair == other.pair for other in found.samples) == 2 for s in found.samples)


@pytest.mark.slow
def test_ranks_in_lockstep_answer_everything(data: Path, held: Path, tmp_path: Path) -> None:
    """Where parameters are sharded every rank must pass through the model equally often."""
    found = []
    for name, lockstep in (("free", False), ("lockstep", True)):
        task, settings, engine = make("rl", small("rl", data, tmp_path / name, held, optim={"steps": 2}))
        type(engine).lockstep, before = lockstep, type(engine).lockstep
        try:
            assert loop.train(task, settings, engine) == 0
        finally:
            type(engine).lockstep = before
        found.append(told(tmp_path / name))
    assert found[0] == found[1]


def test_ranks_of_one_machine_share_its_cores(
    data: Path, held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen ranks on two machines, each with its own questions or, in lockstep, with all of them."""
    task, settings, engine = make("rl", small("rl", data, tmp_path, held))
    validation = validation_of(task, settings, engine)
    assert validation is not None and validation._shares().local_world == 1
    monkeypatch.setattr(type(engine), "world", 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for lockstep, among in ((False, 16), (True, 1)):
        monkeypatch.setattr(type(engine), "lockstep", lockstep)
        shares = validation._shares()
        assert (shares.world, shares.local_world) == (among, 8)


@pytest.mark.slow
def test_curves_of_validations_are_in_the_report(data: Path, held: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("sft", small("sft", data, out, held, checkpoint={"keep_best": "validation/accuracy"}))
    results = find([out])
    assert [arm.name for arm in results.arms] == ["run"], "best/ is no result of its own"
    shown = [title for widget in training(results).widgets for title, _ in getattr(widget, "figures", ())]
    assert "Held-out accuracy" in shown and "Held-out reward" in shown


# ---------------------------------------------------------------------- processes


def killed(arguments: list[str], ready: Callable[[], bool]) -> None:
    """Start a run and kill it at a moment."""
    process = Forked.of(arguments, environment=environment())
    process.until(ready)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


KILLED: dict[str, Any] = {
    "validation": {"batch": 1},
    "checkpoint": {"every": 1, "keep": 1, "keep_best": "validation/loss"},
}


@pytest.fixture(scope="module")
def whole(data: Path, held: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run("rl", small("rl", data, out, held, **KILLED))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["during", "between"])
def test_a_killed_run_ends_as_if_it_had_not_been(
    moment: str, whole: Path, data: Path, held: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    config = config_file(small("rl", data, cut, held, **KILLED), tmp_path / "cut.yaml")

    def ready() -> bool:
        path = cut / "metrics.jsonl"
        after_three = path.exists() and path.read_bytes().count(b"\n") == 3
        return after_three and (moment == "between" or (cut / ".validation" / "predictions.jsonl").exists())

    killed(command("rl", config), ready)
    assert len(lines(cut)) == 3
    start(command("rl", config))

    assert told(cut) == told(whole)
    assert (cut / "validation.jsonl").read_text() == (whole / "validation.jsonl").read_text()
    for folder in ("best", "final"):
        assert same_weights(cut / folder, whole / folder)
    names = [sorted(p.name for p in (out / "checkpoints").iterdir()) for out in (cut, whole)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_two_ranks_validate_as_one(data: Path, held: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "optim": {"steps": 2, "batch": 4, "microbatch": 1},
        "validation": {"every": 1, "effects": True},
        "checkpoint": {"every": 0, "keep_best": "validation/loss"},
        "model": {"dtype": "float64"},
    }
    config = config_file(small("rl", data, tmp_path / "two", held, **changes), tmp_path / "two.yaml")
    start(command("rl", config, ranks=2))
    run("rl", small("rl", data, tmp_path / "one", held, **changes))
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    for first, second in zip(one, two, strict=True):
        for name in first:
            if name.startswith("validation/") and name != "validation/seconds":
                assert second[name] == pytest.approx(first[name], rel=1e-5), name
    texts = [[(row["id"], row["text"]) for row in lines(tmp_path / n, "validation.jsonl")] for n in ("one", "two")]
    assert texts[0] == texts[1] and len(texts[0]) == 2 * HELD
    assert (tmp_path / "two" / "best" / "README.md").exists()


# ---------------------------------------------------------------------- the best model


def same_weights(first: Path, second: Path) -> bool:
    one, two = (load_file(next(folder.glob("*.safetensors"))) for folder in (first, second))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_the_best_model_survives_a_run_that_gets_worse(data: Path, held: Path, tmp_path: Path) -> None:
    """best/ stays that of the first validation, and so does its checkpoint, although one is kept."""
    ruinous = {"optim": RUINOUS | {"steps": 4}, "validation": {"every": 1}}
    keep = {"checkpoint": {"every": 1, "keep": 1, "keep_best": "validation/loss"}}
    out, once = tmp_path / "run", tmp_path / "once"
    found = column(run("base", small("base", data, out, held, **ruinous, **keep)), "validation/loss")
    assert min(found) == found[0] < found[-1]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000001", "step-000004"]
    run("base", small("base", data, once, held, **ruinous | {"optim": RUINOUS | {"steps": 1}}))
    assert same_weights(out / "best", once / "final") and not same_weights(out / "best", out / "final")
    assert "validation/loss" in (out / "best" / "README.md").read_text()


@pytest.mark.slow
def test_the_best_value_is_remembered_over_a_resume(data: Path, held: Path, tmp_path: Path) -> None:
    """The second half is worse than the first: a run that forgot would call its first validation the best."""
    out = tmp_path / "run"
    changes: dict[str, Any] = {"validation": {"every": 1}, "checkpoint": {"every": 1, "keep_best": "validation/loss"}}
    run("base", small("base", data, out, held, **changes, optim=RUINOUS | {"steps": 1}))
    before = (out / "best" / "README.md").read_bytes()
    found = run("base", small("base", data, out, held, **changes, optim=RUINOUS | {"steps": 3}))
    assert column(found, "validation/loss")[0] == min(column(found, "validation/loss"))
    assert (out / "best" / "README.md").read_bytes() == before
    assert (out / "checkpoints" / "step-000001").is_dir()


def test_other_questions_begin_again(data: Path, held: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A value measured on other questions is no rival."""
    out = tmp_path / "run"
    changes: dict[str, Any] = {"checkpoint": {"every": 1, "keep_best": "validation/loss"}}
    for steps, asked in ((1, {"every": 1}), (2, {"every": 1, "n": 4})):
        optim = RUINOUS | {"steps": steps}
        run("base", small("base", data, out, held, **changes, optim=optim, validation=asked))
    printed = capfd.readouterr().err
    assert "was measured otherwise: it does not count any more" in " ".join(printed.split())
    assert same_weights(out / "best", out / "final")


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("validation/accuracy", [0.5, 0.5, 0.4, 0.6, 0.6], [1, 4]),
        ("validation/loss", [2.0, 2.0, 3.0, 1.0, math.nan, 1.0], [1, 4]),
        ("validation/accuracy", [math.nan, 0.0], [2]),
    ],
)
def test_the_better_value_wins_and_ties_keep_the_earlier(metric: str, values: list[float], best: list[int]) -> None:
    progress = Progress()
    chosen, found = Best(metric, "these questions", progress), []
    for step, value in enumerate(values, 1):
        progress.step = step
        if chosen.better({metric: value}):
            found.append(step)
    assert found == best and progress.best is not None and progress.best["step"] == best[-1]


def test_a_metric_that_was_not_measured_is_named() -> None:
    with pytest.raises(UserError, match="validation/dependence_other cannot be measured"):
        Best("validation/dependence_other", "", Progress(step=1)).better({"validation/accuracy": 0.5})


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"validation": {"path": "nowhere.jsonl"}}, "validation.path: nowhere.jsonl does not exist"),
        ({"validation": {"every": 0}}, "validation.every"),
        ({"validation": {"every": -3}}, "validation.every"),
        ({"validation": {"n": 0}}, "validation.n"),
        ({"validation": {"by": "arrows"}}, "has the tag 'arrows'; they have kind, withheld"),
        (
            {"checkpoint": {"keep_best": "accuracy"}},
            "no metric is called 'accuracy': choose one of validation/acc",
        ),
        ({"validation": None, "checkpoint": {"keep_best": "validation/loss"}}, "give validation.path"),
        ({"checkpoint": {"keep_best": "validation/help"}}, "validation.effects: true"),
        (
            {"checkpoint": {"keep_best": "validation/help"}, "validation": {"effects": True}},
            "needs latents, and this run trains a model without them",
        ),
    ],
)
def test_settings_that_make_no_sense(
    changes: dict[str, Any], words: str, data: Path, held: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = small("base", data, tmp_path / "run", held, **{k: v for k, v in changes.items() if v is not None})
    if changes.get("validation", {}) is None:
        del raw["validation"]
    assert main(["train", "base", str(config_file(raw, tmp_path / "c.yaml"))]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert words in error and "Traceback" not in error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_files_without_a_usable_question(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write(world(2, seed=5, size=48), tmp_path / "empty")
    rows = [json.loads(line) | {"answer": ""} for line in empty.read_text().splitlines()]
    empty.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gone = write(world(2, seed=5, size=48), tmp_path / "gone")
    for picture in gone.parent.rglob("*.png"):
        picture.unlink()
    for path, words in ((empty, "no question that can be asked"), (gone, "no question whose images can be read")):
        raw = small("base", data, tmp_path / "run", path)
        assert main(["train", "base", str(config_file(raw, tmp_path / "c.yaml"))]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert f"validation.path: {path}" in error and words in error


def test_training_on_the_held_out_file_prints_a_notice(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"optim": {"steps": 1}, "validation": {"max_new": 4}}
    run("base", small("base", data, tmp_path / "same", data, **one))
    assert "validation.path is also data.sources.0.path" in " ".join(capsys.readouterr().err.split())
    copy = data.with_name("copy.jsonl")
    copy.write_text("".join(data.read_text().splitlines(keepends=True)[:3]))
    run("base", small("base", data, tmp_path / "copy", copy, **one))
    assert "3 of the 3 questions of validation.path are also in the training data" in capsys.readouterr().err
    other = write(world(3, seed=9, size=48), tmp_path / "other")
    run("base", small("base", data, tmp_path / "clean", other, **one))
    assert "also" not in capsys.readouterr().err


def test_the_page_names_every_metric_and_which_values_are_better() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `validation/")]
    for metric, better in VALIDATION_METRICS.items():
        assert any(f"`{metric}`" in row and row.endswith(f"| {better} |") for row in rows), metric
