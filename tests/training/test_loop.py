"""The loop, the engine and checkpoints in one process, on a real network with real files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stage_runs
from realvr.errors import UserError
from realvr.training import memory, tracking
from realvr.training.configuration import KINDS
from realvr.training.dry_run import dry_run
from realvr.training.engine import start_engine
from realvr.training.engine.ddp import DDP
from realvr.training.loop import train
from training_task import Options, RegressionTask, example, make_settings, run


def lines(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out)]


def weights(out: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in load_file(out / "final/model.safetensors").values()])


def test_training_learns_and_leaves_a_whole_run_behind(tmp_path: Path) -> None:
    assert run(out=str(tmp_path), steps=60, settings={"log": {"tensorboard": True}}) == 0
    found = lines(tmp_path)
    assert [line["step"] for line in found] == list(range(1, 61))
    assert sum(losses(tmp_path)[-10:]) < 0.5 * sum(losses(tmp_path)[:10])
    assert {"loss", "error", "reward", "lr", "grad_norm", "tokens", "tokens_per_s", "peak_memory_gib"} <= found[
        0
    ].keys()
    assert found[0]["tokens"] == 32
    assert [row["step"] for row in lines(tmp_path, "completions.jsonl")] == [1, *range(5, 61, 5)]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000056", "step-000060"]
    assert list((tmp_path / "tensorboard").iterdir())
    card = (tmp_path / "final/README.md").read_text()
    assert "steps: 60" in card and f"| loss | {found[-1]['loss']:.6g} |" in card
    assert not list(tmp_path.glob(".final*"))


def test_a_finished_run_can_be_started_again_or_prolonged(tmp_path: Path) -> None:
    options = {"out": str(tmp_path), "settings": {"optim": {"schedule": "constant", "lr": 0.02}}, "noise": True}
    for steps in (4, 4, 9):
        assert run(steps=steps, **options) == 0
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 10))
    whole = {**options, "out": str(tmp_path / "whole")}
    assert run(steps=9, **whole) == 0
    assert losses(tmp_path) == losses(tmp_path / "whole")
    assert torch.equal(weights(tmp_path), weights(tmp_path / "whole"))


@pytest.mark.parametrize("unfinished", [False, True])
def test_steps_below_those_done_are_refused_and_nothing_is_rewritten(unfinished: bool, tmp_path: Path) -> None:
    """Settings and card go on saying how the model was trained; so many steps as are done end an unfinished run."""
    run(out=str(tmp_path), steps=8)
    if unfinished:  # as after a kill: checkpoints, and no final model
        shutil.rmtree(tmp_path / "final")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    with pytest.raises(UserError, match=r"optim\.steps is 5, but .* has done 8 steps: give 8 to write"):
        run(out=str(tmp_path), steps=5)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == before
    assert (tmp_path / "final").exists() is not unfinished
    assert run(out=str(tmp_path), steps=8) == 0
    card = (tmp_path / "final/README.md").read_text()
    assert not [name for name in ("time", "seconds", "prepare_s") if f"| {name} |" in card] and "| loss |" in card
    assert len(lines(tmp_path)) == 8 and "steps: 8" in (tmp_path / "final/README.md").read_text()


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_accumulation_gives_the_same_run(clip: float, tmp_path: Path) -> None:
    for size in (8, 4, 1):
        run(out=str(tmp_path / str(size)), microbatch=size, settings={"optim": {"clip": clip, "lr": 0.02}})
    for size in (4, 1):
        assert losses(tmp_path / str(size)) == pytest.approx(losses(tmp_path / "8"), abs=1e-12)
        assert torch.allclose(weights(tmp_path / str(size)), weights(tmp_path / "8"), atol=1e-12)


def test_one_step_is_clipped_adamw(tmp_path: Path) -> None:
    """Against plain torch: the loss of the whole batch, the norm, the clip, the decay groups and the rate."""
    settings = {"optim": {"clip": 0.5, "lr": 0.02, "weight_decay": 0.3, "warmup": 0}, "log": {"parts_every": 1}}
    run(out=str(tmp_path), steps=1, settings=settings)
    task = RegressionTask(Options(out=""), start_engine(cpu=True))
    net = task.module.net
    matrices, rest = [net[0].weight, net[3].weight], [net[0].bias, net[1].weight, net[1].bias, net[3].bias]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], lr=0.02
    )
    x, y = zip(*(example(i) for i in range(8)), strict=True)
    predicted = net(torch.stack(x)).squeeze(-1)
    parts = {"fit": (predicted - torch.stack(y)).square().mean(), "size": 0.1 * predicted.square().mean()}
    record = lines(tmp_path)[0]
    for name, part in parts.items():
        gradients = torch.autograd.grad(part, net.parameters(), retain_graph=True)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
        assert record[f"grad_norm/{name}"] == pytest.approx(norm, rel=1e-12)
    sum(parts.values(), torch.zeros(())).backward()
    assert record["loss"] == pytest.approx(sum(part.item() for part in parts.values()), rel=1e-12)
    assert record["grad_norm"] == pytest.approx(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5).item(), rel=1e-12)
    plain.step()
    for name, tensor in load_file(tmp_path / "final/model.safetensors").items():
        assert torch.allclose(tensor, net.state_dict()[name], atol=1e-12), name


def test_measuring_parts_changes_nothing(tmp_path: Path) -> None:
    for every in (0, 1):
        run(out=str(tmp_path / str(every)), noise=True, settings={"log": {"parts_every": every}})
    assert losses(tmp_path / "0") == losses(tmp_path / "1")
    assert "grad_norm/fit" not in lines(tmp_path / "0")[0] and "grad_norm/size" in lines(tmp_path / "1")[3]


# ---------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("problem", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped(problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(out=str(tmp_path), steps=6, bad={"3": problem}, settings={"checkpoint": {"every": 1, "keep": 9}})
    before, after = (load_file(tmp_path / f"checkpoints/step-00000{n}/model.safetensors") for n in (3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before if name != "calls")
    moved = load_file(tmp_path / "checkpoints/step-000005/model.safetensors")
    assert not torch.equal(moved["net.0.weight"], after["net.0.weight"])
    assert [int(found["updates"]) for found in (before, after, moved)] == [3, 3, 4]  # what after_update has counted
    assert [line["skipped"] for line in lines(tmp_path)] == [0, 0, 0, 1, 1, 1]
    assert (lines(tmp_path)[3]["loss"] is None) == (problem == "loss")
    text = " ".join(capsys.readouterr().err.split())
    assert "step 4: the loss or its gradient is not finite" in text
    assert ("examples row-26, row-27)" if problem == "loss" else "examples row-24, row-25, row-26") in text


def test_too_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    bad = dict.fromkeys(["1", "2", "4", "5", "6"], "loss")  # two in a row are borne, three are not
    with pytest.raises(UserError, match=r"stopped at step 7: 3 steps in a row .* row-50, row-51; lower optim.lr"):
        run(out=str(tmp_path), bad=bad)
    assert len(lines(tmp_path)) == 7


def test_the_count_of_bad_steps_survives_a_resume(tmp_path: Path) -> None:
    run(out=str(tmp_path), steps=4, bad={"2": "loss", "3": "loss"})
    with pytest.raises(UserError, match="stopped at step 5"):
        run(out=str(tmp_path), steps=8, bad={"4": "loss"})


# ---------------------------------------------------------------------- resuming


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    run(out=str(tmp_path), steps=4)
    with pytest.raises(
        UserError, match=r"step-000004 belongs to other settings: run.seed was 0, is 1; optim.lr was 0.02, is 0.5"
    ):
        run(out=str(tmp_path), steps=8, seed=1, settings={"optim": {"lr": 0.5}})
    assert run(out=str(tmp_path), steps=8, settings={"log": {"every": 3}, "checkpoint": {"keep": 5}}) == 0
    model = {"fast_vision": False, "fused_layers": True}  # the same numbers up to rounding
    assert run(out=str(tmp_path), steps=10, settings={"model": model}) == 0


def test_resume_never_and_by_path(tmp_path: Path) -> None:
    never = {"checkpoint": {"resume": "never", "every": 4, "keep": 9}}
    assert run(out=str(tmp_path), steps=8, settings=never) == 0
    with pytest.raises(UserError, match="already holds a run"):
        run(out=str(tmp_path), steps=8, settings=never)
    with pytest.raises(UserError, match=r"is not a checkpoint .* has step-000004, step-000008"):
        run(out=str(tmp_path), steps=8, settings={"checkpoint": {"resume": "elsewhere"}})
    old = str(tmp_path / "checkpoints/step-000004")
    with pytest.raises(UserError, match="step-000008 is newer than"):
        run(out=str(tmp_path), steps=8, settings={"checkpoint": {"resume": old}})
    assert run(out=str(tmp_path / "other"), steps=8, settings={"checkpoint": {"resume": old}}) == 0
    assert losses(tmp_path / "other") == losses(tmp_path)[4:]


def test_a_damaged_checkpoint_and_another_model_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(out=str(tmp_path), steps=4)
    with pytest.raises(UserError, match="step-000004"):
        run(out=str(tmp_path), steps=8, width=17)
    run_file = tmp_path / "checkpoints/step-000004/run.json"
    text = run_file.read_text()
    run_file.write_text(text.replace('"frozen": "', '"frozen": "x'))
    with pytest.raises(UserError, match="the frozen weights differ"):
        run(out=str(tmp_path), steps=8)
    run_file.write_text(text.replace('"world": 1', '"world": 2'))
    monkeypatch.setattr(DDP, "elastic", False)  # an engine whose files fit one number of ranks
    with pytest.raises(UserError, match="written by 2 processes, this run has 1.*continue on 2, or export the model"):
        run(out=str(tmp_path), steps=8)
    monkeypatch.undo()
    run_file.write_text(text)
    (run_file.parent / "optimizer.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"step-000004: optimizer.safetensors is not the file .* Remove the folder"):
        run(out=str(tmp_path), steps=8)


def test_leftovers_of_a_killed_write_are_removed(tmp_path: Path) -> None:
    run(out=str(tmp_path), steps=4)
    leftover = tmp_path / "checkpoints/.step-000008.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    run(out=str(tmp_path), steps=5)
    assert not leftover.exists()


def test_records_of_lost_steps_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    assert tracking.truncate(path, 2) == {"step": 2}
    assert path.read_text() == '{"step": 1, "loss": 2}\n{"step": 2}\n'
    assert tracking.truncate(tmp_path / "absent.jsonl", 2) == {}


# ---------------------------------------------------------------------- dry run, contract


def test_dry_run_trains_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, engine = Options(out=str(tmp_path / "run")), start_engine(cpu=True)
    task = RegressionTask(options, engine)
    before = [parameter.clone() for parameter in task.module.parameters()]
    assert dry_run(task, make_settings(options), engine) == 0
    text = capsys.readouterr().out
    assert "microbatches per step and rank: 4" in text and "microbatch.x: float64 (2, 4)" in text
    assert "optimizer: 0.000 GiB" in text and "lr: 0.02" in text
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(a, b) for a, b in zip(before, task.module.parameters(), strict=True))


def test_no_microbatch_is_an_error_not_a_hang(tmp_path: Path) -> None:
    class Empty(RegressionTask):
        def collect(self, step: int) -> Any:
            prepared = super().collect(step)
            prepared.microbatches = []
            return prepared

    options, engine = Options(out=str(tmp_path)), start_engine(cpu=True)
    with pytest.raises(RuntimeError, match="same number of microbatches"):
        train(Empty(options, engine), make_settings(options), engine)


def test_a_state_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    class Odd(RegressionTask):
        def state_dict(self) -> dict[str, Any]:
            return {"engine": self.engine}

    options, engine = Options(out=str(tmp_path)), start_engine(cpu=True)
    with pytest.raises(TypeError, match="JSON values and tensors, not DDP"):
        train(Odd(options, engine), make_settings(options), engine)


def test_the_advice_on_memory_names_settings() -> None:
    """Only those that the training has, the model knows, and that are not in force yet."""
    few = {"optim": {"microbatch": 1}}
    sft = stage_runs.configure("sft", Path("m"), Path("d"), Path("o"))
    rl = stage_runs.configure("rl", Path("m"), Path("d"), Path("o"))
    base = stage_runs.configure("base", Path("m"), Path("d"), Path("o"), **few)

    def advice(kind: str, raw: dict[str, Any], **model: Any) -> str:
        return memory.advice(KINDS[kind].model_validate(raw | {"model": raw["model"] | model}))

    cheap, dear = "lower optim.microbatch", "set lora.rank, or take a smaller model"
    assert re.fullmatch(rf"{cheap}, set (method.)?gradient_checkpointing true, {dear}", advice("sft", sft))
    least = rl | {"lora": {"rank": 4}, "memory": "checkpointed"} | {"optim": rl["optim"] | few["optim"]}
    together = "set method.rollout_batch 1, or take a smaller model"  # Gemma: no limit on visual tokens
    assert advice("rl", least | {"fast_decode": "off"}) == together
    assert advice("rl", least | {"fast_decode": "static"}) == f"set method.release_decode true, {together}"
    assert advice("rl", least | {"fast_decode": "static", "release_decode": True}) == together
    found = advice("rl", least | {"fast_decode": "off", "rollout_batch": 4})
    assert found == "lower method.rollout_batch, or take a smaller model"
    assert advice("rl", least | {"fast_decode": "off", "rollout_batch": 1}) == "take a smaller model"
    assert advice("base", base, max_tokens=64) == "lower model.max_tokens, or take a smaller model"
    assert advice("base", base, tiles=True, max_tiles=9) == "lower model.max_tiles, or take a smaller model"
