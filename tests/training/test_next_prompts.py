"""Prompts that threads encode ahead of a Stage-2 step: what is drawn, counted, saved, raised stays the same."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from realvr.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.data.mixture import Mixture
from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError
from realvr.training import loop
from realvr.training.configuration import KINDS
from realvr.training.dropping import EMPTY_ANSWER, TOO_LONG, UNREADABLE_IMAGE
from realvr.training.dry_run import dry_run
from realvr.training.engine.ddp import DDP
from realvr.training.examples import Encoder
from realvr.training.prompts import PromptBatch, PromptStream
from realvr.training.rl_method import RolloutMethod
from realvr.training.run import train
from stage_runs import configure, lines, make, numbers, run, world, write

LIMIT, THREADS = 256, 3
DRAWN_BY = "drawn by"
"""How threads that draw are named here."""


class Ranks:
    """One of several ranks, which are threads."""

    def __init__(self, rank: int, world: int, said: list[Any], all_there: threading.Barrier) -> None:
        self.rank, self.world, self.said, self.all_there = rank, world, said, all_there

    def gather_objects(self, value: Any) -> list[Any]:
        assert threading.current_thread().name.startswith(DRAWN_BY), "a thread that prepares has asked the other ranks"
        self.said[self.rank] = value
        self.all_there.wait(60)
        found = list(self.said)
        self.all_there.wait(60)
        return found


def several(count: int) -> list[Ranks]:
    said, all_there = [None] * count, threading.Barrier(count)
    return [Ranks(rank, count, said, all_there) for rank in range(count)]


@pytest.fixture(scope="module")
def backbone(trained: Path) -> Backbone:
    return Backbone.load(trained, dtype="float32")


def good(count: int = 9) -> list[Sample]:
    return world(count)


def thin(sample: Sample) -> Sample:
    """About a picture for which Qwen has no grid."""
    return dataclasses.replace(sample, images=[ImageRef.from_image("thin.png", Image.new("RGB", (3, 700)))])


def mixed() -> list[Sample]:
    """A picture that is cut short and one that is too thin, a question and a picture that are too long, an empty
    answer; six good rows."""
    found = world(10)
    cut = ImageRef.from_bytes("cut", found[1].images[0].read()[:80])
    found[1], found[6] = dataclasses.replace(found[1], images=[cut]), thin(found[6])
    turn = dataclasses.replace(found[3].turns[-1], text="Where? " * 300)
    found[3] = dataclasses.replace(found[3], turns=[turn])
    found[4] = dataclasses.replace(found[4], answer="", choices=[])
    (large,) = world(1, seed=5, size=448)
    return [*found, large]


def stream(
    samples: Sequence[Sample], backbone: Backbone, ranks: Any, threads: int, batch: int = 6, keep: bool = False
) -> PromptStream:
    raw = configure("rl", Path("model"), Path("data"), Path("out"), optim={"batch": batch, "microbatch": 1})
    settings = KINDS["rl"].model_validate(raw)
    return PromptStream(Mixture({"all": samples}), Encoder(backbone, LIMIT, keep), settings, ranks, threads)


def settled(prompts: PromptStream) -> int:
    """Wait until all that was begun is made; how many prompts wait."""
    if prompts._next is None:
        return 0
    made = [future for _, future in prompts._next._made.values()]
    assert not wait(made, 60).not_done
    return len(made)


def facts(batches: list[PromptBatch]) -> list[Any]:
    """All of a step's share: samples, places, ids, and pictures by their content."""
    return [
        (
            batch.place,
            [sample.id for sample in batch.samples],
            [
                (prompt.ids.tolist(), [(image.key, image.picture) for image in prompt.images])
                for prompt in batch.prompts
            ],
        )
        for batch in batches
    ]


def state(prompts: PromptStream) -> Any:
    """What of it a checkpoint holds."""
    return prompts.samples.state_dict(), prompts.encoder.draws.state_dict()


def drive(prompts: PromptStream, steps: int) -> list[Any]:
    """Each step, and the state behind it while prompts of the next one wait."""
    found = []
    for _ in range(steps):
        taken = facts(prompts.take())
        assert settled(prompts) == 0, "those of this step are held twice"
        prompts.prepare()
        assert settled(prompts) <= prompts.settings.optim.batch // prompts.ranks.world, "more than one share ahead"
        found.append((taken, state(prompts)))
    prompts.close()
    return found


def on_all(job: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items), thread_name_prefix=DRAWN_BY) as pool:
        return list(pool.map(job, items))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_is_drawn_counted_and_saved(ranks: int, keep: bool, backbone: Backbone) -> None:
    """Over several epochs, with samples that cannot be used; a rank then takes what another one has encoded."""
    samples, steps = mixed(), 6

    def all_steps(threads: int) -> list[list[Any]]:
        each = [stream(samples, backbone, rank, threads, keep=keep) for rank in several(ranks)]
        return on_all(lambda prompts: drive(prompts, steps), each)

    plain, ahead = all_steps(0), all_steps(THREADS)
    assert ahead == plain
    last = [found[-1][1][1] for found in plain]
    rejected = {reason for draws in last for reason in draws["rejected"]}
    assert rejected == {TOO_LONG, UNREADABLE_IMAGE, EMPTY_ANSWER}
    assert plain[0][-1][1][0]["position"] > 3 * len(samples)


def test_a_picture_without_a_grid_is_counted_and_named(backbone: Backbone) -> None:
    """It ended the run."""
    (sample,), encoder = world(1), Encoder(backbone, LIMIT)
    sample = dataclasses.replace(thin(sample), id="row 7", source=None)
    assert encoder.prompt(sample) is None and encoder.rejected == {UNREADABLE_IMAGE: 1}
    said = encoder.draws.first[UNREADABLE_IMAGE]
    assert said.startswith("row 7: image thin.png (3x700): size 3x700 cannot be processed")


def by_thread(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of every prompt that is encoded from now on."""
    names: list[str] = []
    inner = Encoder._prompt

    def noted(self: Encoder, sample: Sample) -> Prompt | None:
        names.append(threading.current_thread().name.split("_")[0])
        return inner(self, sample)

    monkeypatch.setattr(Encoder, "_prompt", noted)
    return names


def test_what_was_prepared_is_used(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: None) -> None:
        (rank,) = several(1)
        prompts = stream(good(8), backbone, rank, THREADS, batch=4)  # a share never holds a sample twice
        prompts.take()
        prompts.prepare()
        assert settled(prompts) == 4 and sorted(names) == [DRAWN_BY] * 4 + ["prompts"] * 4
        for _ in range(3):
            prompts.take()
            prompts.prepare()
            assert settled(prompts) == 4
        prompts.close()

    names = by_thread(monkeypatch)
    on_all(run, [None])
    assert sorted(names) == [DRAWN_BY] * 4 + ["prompts"] * 16


def test_what_is_in_memory_is_not_prepared(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    names, samples = by_thread(monkeypatch), good(6)
    on_all(lambda rank: drive(stream(samples, backbone, rank, THREADS, batch=4, keep=True), 8), several(1))
    assert len(names) == len(samples)
    assert names.count("prompts") == 2  # four were drawn first; the two others were the next


def test_a_position_that_was_loaded_finds_other_samples_prepared(backbone: Backbone) -> None:
    """What waits belongs to samples, not to a place in the order."""

    def run(rank: Any) -> None:
        prompts = stream(good(), backbone, rank, THREADS, batch=4)
        prompts.take()
        before = prompts.samples.state_dict()
        second = facts(prompts.take())
        prompts.prepare()
        settled(prompts)
        prompts.samples.load_state_dict(before)
        assert facts(prompts.take()) == second
        prompts.close()

    on_all(run, several(1))


class Worse(BaseException):
    """Not even an Exception."""


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, UserError, Worse])
def test_what_fails_in_a_thread_alone_changes_nothing(
    error: type[BaseException], backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, failed = mixed(), []
    plain = on_all(lambda rank: drive(stream(samples, backbone, rank, 0), 3), several(1))

    def fail(self: Encoder, sample: Sample) -> None:
        failed.append(sample.id)
        raise error("only here")

    monkeypatch.setattr(Encoder, "prompt_aside", fail)
    assert on_all(lambda rank: drive(stream(samples, backbone, rank, THREADS), 3), several(1)) == plain
    assert failed


def test_an_error_appears_when_its_sample_is_drawn(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = good()

    def steps_until(threads: int) -> tuple[int, str]:
        (rank,) = several(1)
        prompts, bad = stream(samples, backbone, rank, threads, batch=4), list(Mixture({"all": samples}, epochs=1))[6]
        inner, before = Encoder._prompt, len(met)

        def noted(self: Encoder, sample: Sample) -> Prompt | None:
            if sample is bad:
                met.append(threading.current_thread().name.split("_")[0])
                raise ZeroDivisionError("in the second step")
            return inner(self, sample)

        def run(_: None) -> tuple[int, str]:
            for step in range(5):
                try:
                    prompts.take()
                    prompts.prepare()
                    settled(prompts)
                except ZeroDivisionError as error:
                    return step, str(error)
            return -1, ""

        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "_prompt", noted)
            found = on_all(run, [None])[0]
        prompts.close()
        assert met[before:] == ["prompts", DRAWN_BY][0 if threads else 1 :]
        return found

    met: list[str] = []
    assert steps_until(THREADS) == steps_until(0) == (1, "in the second step")


def preparing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prompts_")]


def gone() -> bool:
    for thread in preparing():
        thread.join(20)
    return not preparing()


def test_closing_waits_for_nothing_and_ends_the_threads(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, inner = threading.Semaphore(0), threading.Event(), Encoder.prompt_aside
    met: list[str] = []

    def slow(self: Encoder, sample: Sample) -> Prompt | None:
        met.append(sample.id)
        begun.release()
        assert go_on.wait(60)
        return inner(self, sample)

    def run(rank: Any) -> None:
        prompts = stream(good(), backbone, rank, 2)
        prompts.take()
        prompts.prepare()
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60)
        prompts.close()
        assert len(preparing()) == 2 and len(met) == 2, "closing has waited for a picture"
        go_on.set()
        assert gone() and len(met) == 2, "what was not begun is not made any more"
        assert len(prompts.take()) == 6  # as without threads
        prompts.prepare()
        assert not preparing()
        prompts.close()

    monkeypatch.setattr(Encoder, "prompt_aside", slow)
    try:
        on_all(run, several(1))
    finally:
        go_on.set()


# ---------------------------------------------------------------------- whole runs


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the method use so many threads, as it would on a GPU."""
    return lambda count: monkeypatch.setattr(RolloutMethod, "_threads", lambda self, run: count)


def test_threads_are_for_gpus_and_not_beside_processes(trained: Path, data: Path, tmp_path: Path) -> None:
    (task, settings, engine), used = make("rl", configure("rl", trained, data, tmp_path)), RolloutMethod._threads
    assert task.prompts._next is None

    def count(device: str, workers: int = 0) -> int:
        method: Any = SimpleNamespace(backbone=SimpleNamespace(device=torch.device(device)))
        settings.data.workers = workers
        return used(method, SimpleNamespace(settings=settings, ranks=engine))  # type: ignore[arg-type]

    assert count("cuda:0") >= 1 and count("cpu") == count("cuda:0", workers=2) == 0


def test_threads_share_the_cores_of_their_machine(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen processes on two machines of 48 cores: eight share the cores of one."""

    class OneOfSixteen(DDP):
        world = 16

    settings, engine = KINDS["rl"].model_validate(configure("rl", trained, data, tmp_path)), OneOfSixteen(cpu=True)
    method: Any = SimpleNamespace(backbone=SimpleNamespace(device=torch.device("cuda:0")))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)), raising=False)

    def count() -> int:
        return RolloutMethod._threads(method, SimpleNamespace(settings=settings, ranks=engine))  # type: ignore[arg-type]

    for said, processes, threads in (("8", 8, 3), ("1", 1, 4), (None, 16, 1), ("99", 16, 1)):
        if said is None:
            monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        else:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
        assert (engine.local_world, count()) == (processes, threads)


@pytest.mark.parametrize(("updates", "ahead"), [(1, ["prompts"] * 8), (2, ["prompts"] * 4)])
def test_nothing_is_prepared_that_no_step_follows_for(
    updates: int,
    ahead: list[str],
    threaded: Callable[[int], None],
    trained: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three steps, or of two rollouts, the last one; of a dry run, the first one."""
    threaded(THREADS)
    raw = configure("rl", trained, data, tmp_path / "run", optim={"steps": 3}, updates_per_rollout=updates)
    for dry, expected in ((True, []), (False, ahead)):
        with monkeypatch.context() as patch:
            names = by_thread(patch)
            assert train(KINDS["rl"].model_validate(raw), dry=dry, cpu=True) == 0
        assert gone() and [name for name in names if name == "prompts"] == expected
        assert len(names) == 4 + len(expected)


@pytest.mark.parametrize("threads", [0, THREADS])
@pytest.mark.parametrize(("updates", "kept"), [(1, [0, 0, 0, 0]), (2, [0, 4, 0, 4]), (4, [0, 4, 4, 4])])
def test_no_more_prompts_are_held_than_are_needed(
    updates: int,
    kept: list[int],
    threads: int,
    threaded: Callable[[int], None],
    trained: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pixels that are alive: before each step those of a batch that it uses again, when it ends those of its own batch;
    and those of the next batch, where threads prepare it. ``kept`` is the first without the next."""
    pixels: list[weakref.ref[torch.Tensor]] = []
    inner = Encoder._prompt

    def noted(self: Encoder, sample: Sample) -> Prompt | None:
        made = inner(self, sample)
        assert made is not None
        pixels.extend(weakref.ref(image.pixels) for image in made.images)
        return made

    def alive() -> int:
        settled(task.prompts)
        return sum(each() is not None for each in pixels)

    monkeypatch.setattr(Encoder, "_prompt", noted)
    threaded(threads)
    raw = configure("rl", trained, data, tmp_path / "run", optim={"steps": 4}, updates_per_rollout=updates)
    task, settings, engine = make("rl", raw)
    before, after, collect = list[int](), list[int](), task.collect
    monkeypatch.setattr(task, "collect", lambda step: (before.append(alive()), collect(step))[1])
    monkeypatch.setattr(task, "after_update", lambda: after.append(alive()))
    assert loop.train(task, settings, engine) == 0
    ahead = [4 if threads and step - step % updates + updates < 4 else 0 for step in range(4)]
    assert after == [4 + waiting for waiting in ahead]
    assert before == [own + waiting for own, waiting in zip(kept, [0, *ahead], strict=False)]
    assert alive() == 0


def test_a_run_and_its_resume_have_the_numbers_of_a_run_without(
    threaded: Callable[[int], None], trained: Path, tmp_path: Path
) -> None:
    data = write(mixed(), tmp_path / "data")
    changes: dict[str, Any] = {"max_prompt": LIMIT, "checkpoint": {"every": 2}, "data": {"max_dropped": 1.0}}

    def settings(name: str, steps: int) -> dict[str, Any]:
        raw = configure("rl", trained, data, tmp_path / name, optim={"steps": steps}, **changes)
        return raw | {"data": raw["data"] | changes["data"]}

    whole = run("rl", settings("whole", 4))
    threaded(THREADS)
    run("rl", settings("cut", 2))
    assert gone()
    run("rl", settings("cut", 4))
    assert gone()
    assert numbers(lines(tmp_path / "cut")) == numbers(whole) and whole[-1]["data/rejected_per_rank"] > 0


def test_runs_that_fail_or_only_describe_end_their_threads(
    threaded: Callable[[int], None], trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threaded(2)
    assert dry_run(*make("rl", configure("rl", trained, data, tmp_path / "dry"))) == 0
    assert gone()
    made = make("rl", configure("rl", trained, data, tmp_path / "run", optim={"steps": 3}))
    seen: list[int] = []

    def fail() -> None:
        seen.append(len(preparing()))
        raise UserError("no more")

    monkeypatch.setattr(made[0], "after_update", fail)
    with pytest.raises(UserError, match="no more"):
        loop.train(*made)
    assert seen[0] > 0 and gone()
