"""Whole steps, tries and evaluations of the speed benchmark, where memory does not suffice: what failed is let go."""

from __future__ import annotations

import gc
import json
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import speed_evaluation
import speed_kit
import speed_passes
import speed_sections
import speed_sizes
import speed_steps
from realvr.errors import UserError
from realvr.training import loop
from realvr.training.thin_lora import ThinLinear
from speed_kit import Bench, DoesNotFit, OutOfTime, about, text_tokens
from speed_results import Results, Timing
from speed_sizes import FULL, SMALL

CPU = torch.device("cpu")
PRESET = "tiny:qwen2.5-vl"


@pytest.fixture
def made(tmp_path: Path) -> Bench:
    results = Results(tmp_path / "speed.json", about(SMALL, PRESET, CPU, torch.float32, 1), resume=False)
    return Bench(PRESET, CPU, torch.float32, SMALL, 1, time.monotonic() + 600, results)


def shortage(*given: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


# ---------------------------------------------------------------------- whole steps


def test_nothing_of_a_step_that_did_not_fit_is_held_by_the_next_try(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, engine, optimizer and gradients of microbatches of 2 are gone when those of 1 are built."""
    failed: list[weakref.ref[Any]] = []
    alive: list[list[Any]] = []
    step, build = loop.train_step, speed_kit.model

    def train_step(run: loop.Run) -> None:
        if run.settings.optim.microbatch == 1:
            return step(run)
        held = [run, run.task, run.engine, run.engine.module, run.task.backbone.model]
        failed.extend(map(weakref.ref, held))
        run.engine.backward = shortage  # type: ignore[method-assign]
        return step(run)

    def model(*given: Any) -> Any:
        if failed:
            alive.append([type(each()).__name__ for each in failed if each() is not None])
        return build(*given)

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(speed_kit, "model", model)
    gc.disable()  # but for the collection that comes before a retry
    try:
        _, facts = speed_steps.rl_step(made, 0, SMALL.answer)
    finally:
        gc.enable()
    assert len(failed) == 5 and alive == [[]]
    assert facts["microbatch"] == 1


def test_a_step_that_fits_in_no_microbatch_says_so_and_other_errors_stay(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train_step", shortage)
    with pytest.raises(DoesNotFit, match=r"fits in no microbatch of \[2, 1\]"):
        speed_steps.rl_step(made, 0, SMALL.answer)

    def wrong(run: object) -> None:
        raise UserError("optim.lr: memory has nothing to do with it")

    monkeypatch.setattr(loop, "train_step", wrong)
    with pytest.raises(UserError, match="nothing to do with it"):
        speed_steps.rl_step(made, 0, SMALL.answer - 1)
    for answer in (SMALL.answer, SMALL.long_answer):  # is known, and not tried again
        with pytest.raises(DoesNotFit, match=r"fits in no microbatch of \[2, 1\]"):
            speed_steps.rl_step(made, 0, answer)


def test_microbatches_and_memory_mode_of_whole_steps(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int]] = []

    def steps(bench: Bench, rank: int, microbatch: int, answer: int) -> None:
        tried.append((rank, microbatch))

    monkeypatch.setattr(speed_steps, "_steps", steps)

    def sizes_tried(rank: int, **changes: Any) -> list[int]:
        tried.clear()
        made.misfits.clear()
        made.sizes = replace(FULL, **changes)
        with pytest.raises(DoesNotFit):
            speed_steps.rl_step(made, rank, 64)
        assert {found for found, _ in tried} == {rank}
        return [size for _, size in tried]

    assert sizes_tried(0) == [4, 2, 1] and sizes_tried(16) == [8, 4, 2, 1]
    assert sizes_tried(0, microbatch=8) == [8, 4, 2, 1] and sizes_tried(16, microbatch=2) == [8, 4, 2, 1]
    assert sizes_tried(16, lora_microbatch=2) == [2, 1] and sizes_tried(0, lora_microbatch=2) == [4, 2, 1]
    assert sizes_tried(0, microbatch=3) == [2, 1]  # all prompts are in them
    made.sizes = SMALL
    settings = speed_steps.rl_settings(made, Path("d"), Path("o"), 0, 1, 4)
    assert settings.method.memory == "checkpointed-prefill"  # type: ignore[union-attr]
    for text, memory, share in (("cached", "cached", 1.0), ("checkpointed-prefill 0.5", "checkpointed-prefill", 0.5)):
        made.sizes = replace(SMALL, memory=text)
        method: Any = speed_steps.rl_settings(made, Path("d"), Path("o"), 0, 1, 4).method
        assert (method.memory, method.recompute) == (memory, share)
    for text in ("half", "cached abc", "cached 0.5", "checkpointed 0", "checkpointed-prefill 2", "checkpointed nan"):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            speed_sizes.memory_mode(text)


def test_how_many_adapters_run_in_kernels(made: Bench) -> None:
    backbone = made.backbone(2)
    layers = [module for module in backbone.model.modules() if isinstance(module, ThinLinear)]
    assert speed_passes.kernel_layers(backbone) == f"0 of {len(layers)}" == f"0 of {7 * backbone.layers}"
    for layer in layers[:3]:
        layer.kernels = backbone.device
    assert speed_passes.kernel_layers(backbone) == f"3 of {len(layers)}"


def test_lora_is_measured_in_two_memory_modes_unless_one_is_named(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str | None, int | None]] = []
    full: set[str | None] = set()

    def rl_step(bench: Bench, rank: int, answer: int) -> tuple[Timing, dict[str, Any]]:
        memory = bench.sizes.memory
        tried.append((memory, bench.sizes.lora_microbatch))
        if memory in full:
            raise DoesNotFit("in no microbatch")
        return Timing([3.0 - len(tried)], None), {"memory": memory}

    monkeypatch.setattr(speed_steps, "rl_step", rl_step)
    made.sizes = FULL
    speed_steps.lora_step(made)
    assert tried == [(None, None), ("cached", None)] and made.sizes is FULL
    assert made.results.value("lora_step_seconds_cached") == 1.0
    tried.clear()
    made.sizes = replace(FULL, memory="checkpointed-prefill 0.5", lora_microbatch=2)
    speed_steps.lora_step(made)
    assert tried == [("checkpointed-prefill 0.5", 2)]
    full.add("cached")  # there is no room for it: what was measured stays, and nothing has failed
    made.sizes = FULL
    speed_steps.lora_step(made)
    assert tried[1:] == [(None, None), ("cached", None)] and made.sizes is FULL and not made.results.failed


def test_ratios_of_a_step_need_one_of_this_run(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that an earlier process has measured, perhaps with other code, is measured again."""
    made.results.put("rl_step_seconds", 1e-9, parts={"encode": 0.0, "optimizer": 0.0})
    resumed = Results(made.results.path, made.results.content["about"], resume=True)
    assert made.results.of_this_run("rl_step_seconds") and not resumed.of_this_run("rl_step_seconds")
    made.results = resumed
    speed_kit.ceilings(made)
    speed_steps.step_ratios(made)
    mine, theirs = made.results.value("rl_step_seconds"), made.results.inputs("step_ratio_paper")
    assert mine is not None and mine > 1e-6
    assert theirs["seconds"] == pytest.approx(mine, rel=1e-4)
    assert made.results.value("step_ratio_paper") == pytest.approx(theirs["baseline_seconds"] / mine, rel=1e-3)
    monkeypatch.setattr(speed_steps, "rl_step", lambda *_: pytest.fail("measured twice"))
    speed_steps.step_ratios(made)


def test_whole_steps_have_as_much_text_as_the_other_prompts(made: Bench) -> None:
    wanted = text_tokens(made.prompts(1)[0])
    assert made.text_tokens == wanted == pytest.approx(SMALL.text, abs=8)
    _, facts = speed_steps.rl_step(made, 0, SMALL.answer)
    assert facts["text_tokens"] == wanted
    for more in (100, 149, 150, 151):
        asked = speed_steps.question(made.backbone(), speed_steps.picture(0, 112, 84), 1, more)
        assert _text(made, asked) == more


def _text(made: Bench, asked: str) -> int:
    from realvr.backbone.samples import conversation
    from realvr.data.sample import ImageRef, Sample

    sample = Sample.ask("", [ImageRef("")], asked, "A", choices=speed_steps.CHOICES)
    return text_tokens(made.backbone().prompt(conversation(sample, [speed_steps.picture(1, 112, 84)])))


def test_steps_begin_on_a_fresh_model(made: Bench) -> None:
    before = weakref.ref(made.backbone())
    with speed_steps.stage2(made, SMALL.rank, 1, SMALL.answer):
        assert before() is None


# ---------------------------------------------------------------------- the train part


def test_the_mode_that_needs_most_is_tried_first_and_nothing_is_held_between_tries(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[weakref.ref[Any]] = []
    shares: list[float] = []
    whole, clear = speed_passes.TrainPass.__call__, Bench.clear

    class Watched(speed_passes.TrainPass):
        def __init__(self, *given: Any) -> None:
            assert all(run() is None for run in runs)
            super().__init__(*given)
            runs.append(weakref.ref(self))
            shares.append(self.method.config.recompute)

        def __call__(self) -> torch.Tensor:
            if self.method.config.memory == "cached" and len(self.batches) == 1:
                shortage()
            return whole(self)

    held: list[bool] = []

    def watched_clear(bench: Bench) -> None:
        held.extend(run() is not None for run in runs)
        clear(bench)

    monkeypatch.setattr(speed_passes, "TrainPass", Watched)
    monkeypatch.setattr(Bench, "clear", watched_clear)
    made.options = replace(made.options, span="recorded")
    assert speed_passes.best_mode(made) is not None
    assert not any(held)
    tries = made.results.inputs("train_part_tries")["tries"]
    ways = [(each["memory"], each["microbatch"]) for each in tries]
    # Larger microbatches may make up for some recomputation. What recomputes more in the same ones does not.
    assert ways == [("cached", 2), ("cached", 1), ("checkpointed-prefill 0.25", 2)]
    assert shares == [1, 1, 0.25]
    assert tries[0]["error"] == "does not fit" and tries[1]["span_counts"] == {"plain": 4}  # no graphs on a CPU
    made.sizes = replace(SMALL, microbatch=1)
    speed_passes.best_mode(made)
    tries = made.results.inputs("train_part_tries")["tries"]
    assert [(each["memory"], each["microbatch"]) for each in tries] == [("cached", 1)]


def test_where_no_mode_fits_the_other_names_of_the_section_are_measured(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = speed_passes.cut
    monkeypatch.setattr(
        speed_passes, "cut", lambda bench, prompts, *rest: shortage() if prompts > 1 else cut(bench, prompts, *rest)
    )
    with pytest.raises(DoesNotFit, match="no memory mode"):
        speed_passes.train_part(made)
    assert made.results.value("train_part_tries") is None and "evidence_overhead_1_full" in made.results
    made.deadline = time.monotonic() - 1
    with pytest.raises(OutOfTime):
        speed_passes.best_mode(made)


def test_generate_one_by_one_where_one_call_does_not_fit(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    one = speed_sections.generate_seconds
    monkeypatch.setattr(
        speed_sections,
        "generate_seconds",
        lambda bench, given, **how: shortage() if len(given) > 1 else one(bench, given),
    )
    speed_sections.against_generate(made)
    inputs = made.results.inputs("decode_vs_generate_2")
    assert inputs["taken"].startswith("one by one") and inputs["baseline_seconds"] == inputs["one_by_one_seconds"]


# ---------------------------------------------------------------------- evaluation


def test_waiting_is_what_the_package_writes(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Path] = []
    evaluate = speed_evaluation.evaluate

    def watched(responder: Any, benches: Any, out: Path, *given: Any, **options: Any) -> Any:
        found = evaluate(responder, benches, out, *given, **options)
        runs.append(out)
        if out.name == "files":
            (out / "timing.json").write_text(json.dumps({"seconds": 8.0, "waited": 2.0, "gpu_wait": 0.25}))
        return found

    monkeypatch.setattr(speed_evaluation, "evaluate", watched)
    speed_evaluation.evaluation(made)
    assert [out.name for out in runs] == ["warm", "files"]
    assert made.results.value("eval_gpu_wait") == 0.25 and "ready_seconds" not in made.results.inputs("eval_gpu_wait")
    assert "timing.json" in made.results.inputs("eval_gpu_wait")["definition"]
    made.ready = True
    speed_evaluation.evaluation(made)
    assert [out.name for out in runs[2:]] == ["warm", "files", "ready"]
    assert made.results.inputs("eval_gpu_wait")["ready_seconds"] > 0
