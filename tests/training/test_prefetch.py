"""Encoding ahead of the loop, and keeping what was encoded, change no number."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from realvr.backbone.backbone import Backbone
from realvr.errors import UserError
from realvr.training import loop
from realvr.training.prefetch import parallel_map, prefetch
from realvr.zoo.tiny import build
from stage_runs import LATENTS, configure, environment, make, numbers, run, world, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3-vl", "tiny", tmp_path_factory.mktemp("model") / "new")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions, and two-turn dialogues over two pictures, twice as long."""
    return write(world(6) + world(6, split="sequels"), tmp_path_factory.mktemp("data"))


def settings(model: Path, file: Path, out: Path, /, **changes: Any) -> dict[str, Any]:
    optim = {"steps": 4, "batch": 6, "microbatch": 3}
    return configure("base", model, file, out, optim=optim, position_jitter=4, caption_ratio=0.5, **changes)


def test_results_come_in_order_with_their_notes() -> None:
    orders = [(f"note {i}", i) for i in range(7)]
    for workers in (0, 2):
        made = list(prefetch(lambda order: order**2, iter(orders), workers))
        assert made == [((f"note {i}", i), i * i) for i in range(7)]


def test_workers_change_no_number(model: Path, data: Path, tmp_path: Path) -> None:
    plain = run("base", settings(model, data, tmp_path / "a"))
    ahead_of_time = run("base", settings(model, data, tmp_path / "b", data={"workers": 2}))
    assert numbers(plain) == numbers(ahead_of_time)


def test_a_run_with_workers_resumes_where_the_loop_was_not_where_they_were(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """At step 2 the workers have drawn the data of later steps; a resumed run must draw them again."""
    whole = run("base", settings(model, data, tmp_path / "a"))
    task, found, engine = make("base", settings(model, data, tmp_path / "b", data={"workers": 2}))
    task.collect(0)
    task.collect(1)
    state = task.state_dict()
    again, _, _ = make("base", settings(model, data, tmp_path / "c", data={"workers": 2}))
    again.load_state_dict(state)
    names = [name for batch in again.collect(2).microbatches for name in batch.names]
    task.close()
    again.close()
    other, _, _ = make("base", settings(model, data, tmp_path / "d"))
    for step in range(2):
        other.collect(step)
    assert names == [name for batch in other.collect(2).microbatches for name in batch.names]
    assert len(whole) == 4 and found.data.workers == 2 and engine.world == 1


@pytest.mark.parametrize("kind", ["sft", pytest.param("base", marks=pytest.mark.slow)])
def test_keeping_encoded_examples_changes_no_number(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    optim = {"steps": 5, "batch": 6, "microbatch": 3}  # 30 draws of 12 examples
    found = [
        run(kind, configure(kind, model, data, tmp_path / str(keep), optim=optim, data={"keep_encoded": keep}))
        for keep in (False, True)
    ]
    assert numbers(found[0]) == numbers(found[1])


def test_a_kept_example_is_not_encoded_again(model: Path, data: Path, tmp_path: Path) -> None:
    task, _, _ = make("base", settings(model, data, tmp_path, data={"keep_encoded": True}))
    for step in range(2):
        task.collect(step)
    first = dict(task.rows.kept)
    for step in range(2, 4):
        task.collect(step)
    assert len(first) == 12 and all(task.rows.kept[name] is rows for name, rows in first.items())


def test_everything_is_encoded_at_the_start_by_the_workers(model: Path, data: Path, tmp_path: Path) -> None:
    """In other processes: this one only hears the results."""
    task, _, _ = make("base", settings(model, data, tmp_path, data={"keep_encoded": True, "workers": 2}))
    task.rows._encode = lambda sample: (_ for _ in ()).throw(ZeroDivisionError(sample.id))
    with pytest.raises(RuntimeError, match="(?s)a process that encodes examples failed.*ZeroDivisionError: "):
        task.collect(0)
    task, _, _ = make("base", settings(model, data, tmp_path, data={"keep_encoded": True, "workers": 2}))
    task.collect(0)
    task.close()
    assert len(task.rows.kept) == 12


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_other_stages_keep_everything_from_the_start_too(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    Backbone.load(str(model), dtype="float32", latents=LATENTS).save(start)
    raw = configure(kind, start, data, tmp_path / "run", data={"keep_encoded": True, "workers": 2})
    task, _, _ = make(kind, raw)
    here: list[str] = []
    for name in ("_sequence", "_prompt"):
        plain = getattr(task.encoder, name)
        setattr(task.encoder, name, lambda sample, plain=plain: (here.append(sample.id), plain(sample))[1])
    task.collect(0)
    assert task.encoder.kept == 12 and here == []  # the processes that encoded had a list of their own


def test_processes_end_with_a_loop_that_is_killed() -> None:
    """Nobody reads what they have to say, and nobody tells them to stop."""
    code = (
        "import time, torch\n"
        "from realvr.training.prefetch import parallel_map\n"
        "made = parallel_map(lambda item: torch.zeros(100_000), range(1000), 3)\n"
        "next(made)\n"
        "import multiprocessing\n"
        "print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    children = [int(pid) for pid in process.stdout.readline().split()]
    assert len(children) == 3
    process.kill()
    process.wait()
    process.stdout.close()
    end = time.monotonic() + 20
    while (left := [pid for pid in children if _alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:  # they hold the pipes of whoever started this test
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_ends_its_workers(model: Path, data: Path, tmp_path: Path) -> None:
    task, found, engine = make("base", settings(model, data, tmp_path, data={"workers": 2}))
    assert loop.train(task, found, engine) == 0
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("base", "sft")), "rl"])
def test_encoding_at_the_start_changes_no_number(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    optim = {"steps": 3, "batch": 6, "microbatch": 3}
    start = tmp_path / "start"
    Backbone.load(str(model), dtype="float32", latents=LATENTS).save(start)  # Stage 2 wants a model with a span
    found = [
        run(kind, configure(kind, start, data, tmp_path / str(len(extra)), optim=optim, data=extra))
        for extra in ({}, {"keep_encoded": True, "workers": 2})
    ]
    assert numbers(found[0]) == numbers(found[1])


def test_made_at_once_keeps_order_values_and_errors() -> None:
    def squared(item: int) -> Any:
        if item == 9:
            raise UserError("nine is refused")
        return {"square": torch.tensor([item**2]), "none": torch.empty(0, 3), "flag": torch.tensor([True, False])}

    for workers in (1, 3, 20):
        found = list(parallel_map(squared, list(range(8)), workers))
        assert [int(each["square"]) for each in found] == [i * i for i in range(8)]
        assert found[0]["none"].shape == (0, 3) and found[0]["flag"].dtype == torch.bool
    with pytest.raises(UserError, match="nine is refused"):
        list(parallel_map(squared, list(range(12)), 4))
    assert list(parallel_map(squared, [], 4)) == []


def test_unusable_examples_are_counted(model: Path, data: Path, tmp_path: Path) -> None:
    broken = write(world(12), tmp_path / "broken")
    pictures = sorted((tmp_path / "broken").rglob("*.png"))
    pictures[3].write_bytes(b"nothing")
    for extra in ({}, {"keep_encoded": True, "workers": 2}):
        raw = settings(model, broken, tmp_path / f"run{len(extra)}", data=extra)
        steps = run("base", raw | {"optim": {"steps": 2, "batch": 12, "microbatch": 6}})
        assert [step["data/rejected_per_rank"] for step in steps] == [1.0, 2.0]


def test_a_step_of_unusable_examples_stops_with_their_reason(model: Path, data: Path, tmp_path: Path) -> None:
    broken = write(world(4), tmp_path / "broken")
    for picture in sorted((tmp_path / "broken").rglob("*.png")):
        picture.write_bytes(b"nothing")
    task, found, engine = make("base", settings(model, broken, tmp_path / "run"))
    with pytest.raises(UserError, match="could not be encoded: 6 unreadable_image"):
        loop.train(task, found, engine)


def test_stacked_images_come_back_equal(model: Path, data: Path, tmp_path: Path) -> None:
    task, _, _ = make("base", settings(model, data, tmp_path))
    (first, *_) = task.collect(0).microbatches
    before = first.rows.images
    first.rows.stack_images()
    assert first.rows.images == () and first.rows.stacked is not None
    first.rows.unstack_images()
    assert [image.key for image in before] == [image.key for image in first.rows.images]
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(before, first.rows.images, strict=True))


@pytest.mark.slow
def test_the_norm_of_visual_tokens_is_held_at_one(model: Path, data: Path, tmp_path: Path) -> None:
    """Against a computation from the features themselves; and it falls when it is trained on."""
    raw = settings(model, data, tmp_path, feature_norm_weight=1.0, next_token_weight=0, caption_weight=0)
    raw["dense_weight"], raw["optim"] = 0, raw["optim"] | {"steps": 8, "lr": 3e-3}
    task, found, engine = make("base", raw)
    batches = task.collect(0).microbatches
    pixels = [task.backbone.encode_images(batch.rows.images).features_ND.double() for batch in batches]
    errors = torch.cat([(x.pow(2).mean(-1).sqrt() - 1) ** 2 for x in pixels])
    loss = sum(task.module(batch)[0] for batch in batches)
    assert float(loss) == pytest.approx(float(errors.mean()), rel=1e-4)
    again, found, engine = make("base", raw)
    assert loop.train(again, found, engine) == 0
    losses = [json.loads(line)["loss/feature_norm"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.5 * losses[0]


def test_visual_tokens_of_a_picture_are_kept_apart(model: Path, data: Path, tmp_path: Path) -> None:
    """The penalty against a loop over all pairs of tokens of each picture; and it falls."""
    raw = settings(model, data, tmp_path, spread_weight=1.0, next_token_weight=0, caption_weight=0, dense_weight=0)
    task, _, _ = make("base", raw)
    batches = task.collect(0).microbatches
    each = []
    for batch in batches:
        with torch.no_grad():
            for tokens in task.backbone.encode_images(batch.rows.images).per_image():
                pairs = [(i, j) for i in range(len(tokens)) for j in range(len(tokens)) if i != j]
                cosines = [float(torch.cosine_similarity(tokens[i], tokens[j], dim=0)) for i, j in pairs]
                each.append(sum(max(cosine - 0.5, 0.0) ** 2 for cosine in cosines) / len(cosines))
    loss = sum(task.module(batch)[0] for batch in batches)
    assert float(loss) == pytest.approx(sum(each) / len(each), rel=1e-4) and float(loss) > 0
    again, found, engine = make("base", raw)
    assert loop.train(again, found, engine) == 0
    losses = [json.loads(line)["loss/spread"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_stages_that_encode_themselves_refuse_workers_alone(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.workers needs data.keep_encoded"):
        make(kind, configure(kind, model, data, tmp_path, data={"workers": 1}))


@pytest.mark.slow
def test_kept_features_are_those_of_the_tower_and_survive_a_resume(model: Path, data: Path, tmp_path: Path) -> None:
    optim = {"steps": 4, "batch": 6, "microbatch": 3}
    start = tmp_path / "start"
    Backbone.load(str(model), dtype="float32", latents=LATENTS).save(start)

    def raw(name: str, **keep: object) -> dict[str, object]:
        kept = {"keep_encoded": True, "workers": 1, **keep}
        return configure("sft", start, data, tmp_path / name, optim=optim, data=kept, checkpoint={"every": 2})

    plain = run("sft", raw("plain"))
    kept = run("sft", raw("kept", keep_features=True))
    assert [row["loss"] for row in kept] == pytest.approx([row["loss"] for row in plain], rel=1e-5)
    shutil.copytree(tmp_path / "kept", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "final")
    shutil.rmtree(max((tmp_path / "again" / "checkpoints").iterdir()))
    again = run("sft", raw("again", keep_features=True))
    assert [row["loss"] for row in again] == [row["loss"] for row in kept]
    task, _, _ = make("sft", raw("towers", keep_features=True))
    task.backbone.encode_images = lambda images: (_ for _ in ()).throw(ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        task.collect(0)  # the tower is asked once, at the start


@pytest.mark.parametrize("kind", ["base", "rl"])
def test_features_are_kept_in_stage_1_alone(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.keep_features is for Stage 1"):
        make(kind, configure(kind, model, data, tmp_path, data={"keep_encoded": True, "keep_features": True}))
    with pytest.raises(ValueError, match="data.keep_features needs data.keep_encoded and data.workers"):
        make("sft", configure("sft", model, data, tmp_path, data={"keep_features": True}))
