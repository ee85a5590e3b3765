"""LoRA in Stage 1 trains the markers' rows of both embeddings: against gradients of the full tables, through a kill,
the export and Stage 2."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import reference
from helpers import difference, load_stock, stock_inputs
from realvr.backbone import Backbone
from realvr.errors import UserError
from realvr.training import loop
from stage_runs import configure, lines, make, numbers, run, weights, world

NAME = "marker_rows"
LORA = {"rank": 4, "alpha": 8.0}
DOUBLE = {"dtype": "float64"}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def start(
    request: pytest.FixtureRequest, build_tiny: Callable[[str], Path], tmp_path_factory: Any
) -> tuple[Path, bool]:
    """A tiny model whose head is the embedding, and one whose head is not."""
    tied = bool(request.param)
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype="float64", device="cpu")
    model = backbone.model
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = tied
    folder = tmp_path_factory.mktemp("start") / str(request.param)
    model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    backbone.processor.stock.save_pretrained(folder)
    again = Backbone.load(folder, dtype="float64", device="cpu").model
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == tied
    return folder, tied


def tables(task: Any) -> tuple[Any, Any]:
    return task.backbone.model.get_input_embeddings(), task.backbone.model.lm_head


def ids_of(task: Any) -> list[int]:
    markers = task.backbone.markers
    return [markers.start, markers.slot, markers.end]


def test_gradients_are_those_of_the_full_tables(start: tuple[Path, bool], data: Path, tmp_path: Path) -> None:
    """Fresh adapters change nothing, so the full model's gradients of these rows are the reference."""
    model, tied = start
    full, *_ = make("sft", configure("sft", model, data, tmp_path / "a", model=DOUBLE))
    ours, settings, engine = make("sft", configure("sft", model, data, tmp_path / "b", model=DOUBLE, lora=LORA))
    (first, *_), (second, *_) = full.collect(0).microbatches, ours.collect(0).microbatches
    wanted, found = full.module(first)[0], ours.module(second)[0]
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    wanted.backward(), found.backward()
    rows = ids_of(ours)
    (embedding, head), (their_embedding, their_head) = tables(ours), tables(full)
    # The reference moves with its own input: markers are read and predicted.
    assert their_embedding.weight.grad[rows[0]].abs().max() > 1e-6
    assert difference(getattr(embedding, NAME).grad, their_embedding.weight.grad[rows]) < 1e-12
    if tied:
        assert not hasattr(head, NAME)
    else:
        assert their_head.weight.grad[rows].abs().min() > 0
        assert difference(getattr(head, NAME).grad, their_head.weight.grad[rows]) < 1e-12
    for table in (embedding, head):
        assert table.weight.grad is None and not table.weight.requires_grad


def test_a_gradient_agrees_with_finite_differences(start: tuple[Path, bool], data: Path, tmp_path: Path) -> None:
    model, tied = start
    task, *_ = make("sft", configure("sft", model, data, tmp_path, model=DOUBLE, lora=LORA))
    reference.widen_norms(task.backbone.model)
    (micro, *_) = task.collect(0).microbatches
    task.module(micro)[0].backward()
    embedding, head = tables(task)
    for table in (embedding,) if tied else (embedding, head):
        rows = getattr(table, NAME)
        for row, column in itertools.product((0, 2), (0, 7)):
            slope = rows.grad[row, column].item()
            losses = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    rows[row, column] += step
                    losses.append(task.module(micro)[0].item())
                    rows[row, column] -= step
            assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("family", ["gemma3", "internvl3", "qwen3-vl-moe"])
def test_every_kind_of_embedding(family: str, build_tiny: Callable[[str], Path], data: Path, tmp_path: Path) -> None:
    """Gemma scales inside its embedding, InternVL's table grows, experts get no adapter."""
    model = build_tiny(family)
    full, *_ = make("sft", configure("sft", model, data, tmp_path / "a"))
    ours, *_ = make("sft", configure("sft", model, data, tmp_path / "b", lora=LORA))
    (first, *_), (second, *_) = full.collect(0).microbatches, ours.collect(0).microbatches
    for task, micro in ((full, first), (ours, second)):
        task.module(micro)[0].backward()
    wanted = tables(full)[0].weight.grad[ids_of(full)]
    assert difference(getattr(tables(ours)[0], NAME).grad, wanted) < 1e-4 * float(wanted.abs().max())


def stored(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_the_export_has_the_trained_rows_and_no_other(start: tuple[Path, bool], data: Path, tmp_path: Path) -> None:
    """The exported model is plain, gives the same logits, and its tables differ from the start in three rows only."""
    model, tied = start
    raw = configure("sft", model, data, tmp_path / "run", model=DOUBLE, lora=LORA, optim={"steps": 3, "lr": 1e-2})
    task, settings, engine = make("sft", raw)
    before = weights(task)
    assert loop.train(task, settings, engine) == 0
    after = weights(task)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in moved if "lora_" not in name} == {name for name in before if name.endswith(NAME)}
    assert sum(name.endswith(NAME) for name in before) == (1 if tied else 2)

    final = Backbone.load(tmp_path / "run" / "final", dtype="float64", device="cpu")
    assert (final.model.lm_head.weight is final.model.get_input_embeddings().weight) == tied
    names = stored(tmp_path / "run" / "final")
    assert not any("lora" in name or NAME in name for name in names)
    assert ("lm_head.weight" in names) != tied
    rows = ids_of(task)
    fresh = Backbone.load(model, dtype="float64", device="cpu")
    for was, now in ((fresh.model.get_input_embeddings(), final.model.get_input_embeddings()),
                     (fresh.model.lm_head, final.model.lm_head)):  # fmt: skip
        changed = (was.weight != now.weight).any(-1).nonzero().flatten().tolist()
        # `<|lvr|>` is never read or predicted: with a head of its own its input row has nothing to learn from.
        assert set(changed) <= set(rows) and {rows[0], rows[2]} <= set(changed)
    inputs = stock_inputs(task.backbone, [task.encoder.sequence(sample).prompt for sample in world(2)])
    assert torch.isin(inputs["input_ids"], torch.tensor(rows)).any()
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        plain = load_stock(tmp_path / "run" / "final")(**inputs).logits
        ours = task.backbone.model(**inputs | {"pixel_values": inputs["pixel_values"].double()}).logits
        start_logits = load_stock(model)(**inputs).logits
    assert difference(ours[real], plain[real]) < 1e-4 < difference(plain[real][:, rows], start_logits[real][:, rows])


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_rows(start: tuple[Path, bool], data: Path, tmp_path: Path) -> None:
    model, _ = start

    def settings(out: str, steps: int) -> dict[str, Any]:
        optim = {"steps": steps, "lr": 1e-2}
        return configure(
            "sft", model, data, tmp_path / out, model=DOUBLE, lora=LORA, optim=optim, checkpoint={"every": 2}
        )

    whole = run("sft", settings("whole", 4))
    run("sft", settings("cut", 2))
    shutil.rmtree(tmp_path / "cut" / "final")
    assert numbers(run("sft", settings("cut", 4))) == numbers(whole)
    ours, theirs = stored(tmp_path / "cut" / "final"), stored(tmp_path / "whole" / "final")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    kept = load_file(tmp_path / "cut" / "checkpoints" / "step-000004" / "model.safetensors")
    assert any(name.endswith(NAME) for name in kept) and sum(t.numel() for t in kept.values()) < 1e5


def test_stage_two_with_adapters_starts_from_the_trained_rows(
    start: tuple[Path, bool], data: Path, tmp_path: Path
) -> None:
    """Its adapters leave the rows as Stage 1 left them: the policy that the KL refers to is the model without them."""
    model, _ = start
    optim = {"steps": 2, "lr": 1e-2}
    run("sft", configure("sft", model, data, tmp_path / "sft", model=DOUBLE, lora=LORA, optim=optim))
    stage_one = tmp_path / "sft" / "final"
    raw = configure("rl", stage_one, data, tmp_path / "rl", model=DOUBLE, lora=LORA, beta=0.1, optim=optim)
    task, settings, engine = make("rl", raw)
    assert not any(name.endswith(NAME) for name, _ in task.backbone.model.named_parameters())
    assert loop.train(task, settings, engine) == 0
    assert lines(tmp_path / "rl")[0]["policy/kl"] == pytest.approx(0, abs=1e-9)
    first, second = (
        Backbone.load(folder, dtype="float64", device="cpu").model for folder in (stage_one, tmp_path / "rl" / "final")
    )
    assert torch.equal(first.get_input_embeddings().weight, second.get_input_embeddings().weight)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_what_is_trained_stays_small(start: tuple[Path, bool], data: Path, tmp_path: Path) -> None:
    """Three rows of one or two tables, in one optimizer group without weight decay for the embedding's."""
    model, tied = start
    task, settings, engine = make("sft", configure("sft", model, data, tmp_path, lora=LORA))
    engine.prepare(task.module, settings.optim)
    trained = {name: p for name, p in task.module.named_parameters() if p.requires_grad}
    rows = {name: p for name, p in trained.items() if name.endswith(NAME)}
    assert all("lora_" in name or name in rows for name in trained)
    assert [tuple(p.shape) for p in rows.values()] == [(3, task.backbone.width)] * (1 if tied else 2)
    own = id(getattr(tables(task)[0], NAME))
    decay = {id(p): group["weight_decay"] for group in engine._optimizer.param_groups for p in group["params"]}
    assert decay[own] == 0
    size = sum(p.numel() * p.element_size() for p in trained.values())
    assert engine.estimate(task.module, settings.optim)["gradients"] == size


def test_controls_without_a_span_and_odd_targets(start: tuple[Path, bool], data: Path, tmp_path: Path) -> None:
    model, _ = start
    task, *_ = make("sft", configure("sft", model, data, tmp_path, model={"latents": 0}, lora=LORA))
    assert not any(name.endswith(NAME) for name, _ in task.backbone.model.named_parameters())
    odd = LORA | {"targets": ["q_proj", "embed_tokens"]}
    with pytest.raises(UserError, match="lora.targets names the token embedding"):
        make("sft", configure("sft", model, data, tmp_path, lora=odd))
