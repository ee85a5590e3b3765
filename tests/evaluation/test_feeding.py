"""Pictures are prepared while the model answers: in `eval` and in diagnostics, with slow pictures of our own."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eval_cases import Oracle, lines
from realvr.backbone import Backbone
from realvr.data.sample import ImageRef, Sample
from realvr.diagnostics.counterfactual import Counterfactual
from realvr.diagnostics.model import Model
from realvr.diagnostics.pairs import Pair
from realvr.diagnostics.parts import Samples
from realvr.diagnostics.run import measure_all
from realvr.evaluation.asking import ImageLoader, Waiting, prefetch
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.processes import Ranks
from realvr.evaluation.questions import Questions
from realvr.evaluation.responder import Plan, Reply, Request
from realvr.evaluation.runner import EvalSettings, evaluate
from realvr.imaging.ahead import Ahead
from realvr.imaging.processing import picture_hash
from realvr.latent.sampling import Sampling
from realvr.runs.journal import Journal


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (56, 56), (number * 40 % 256, 90, 200 - number))


def samples(count: int, each: int = 1) -> list[Sample]:
    """Questions about pictures of their own, the third of which is damaged."""
    found = []
    for number in range(count):
        refs = [ImageRef.from_image(f"p{number}.{k}", picture(number * each + k)) for k in range(each)]
        if number == 2:
            refs[0] = ImageRef.from_bytes("p2.0", b"no picture at all")
        found.append(Sample.ask(f"q{number}", refs, "Which?", "A", choices=("red", "blue")))
    return found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, threading.Event]]:
    """Who has opened which picture: an event for each id."""
    found: dict[str, threading.Event] = {}
    original = ImageRef.open

    def slow(ref: ImageRef) -> Image.Image:
        time.sleep(0.01)
        try:
            return original(ref)
        finally:
            found.setdefault(ref.id, threading.Event()).set()

    monkeypatch.setattr(ImageRef, "open", slow)
    yield found


class Patient(Oracle):
    """Answers a batch when the pictures of the next one have been opened."""

    def __init__(self, opened: dict[str, threading.Event], size: int, last: int) -> None:
        super().__init__()
        self.opened, self.size, self.last = opened, size, last
        self.overlapped = 0

    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        number = max(int(request.sample.id[1:]) for request in requests)
        coming = min((number // self.size + 2) * self.size - 1, self.last)
        if coming > number:
            event = self.opened.setdefault(f"p{coming}.0", threading.Event())
            assert event.wait(20), f"p{coming}.0 was not prepared while the batch before it was answered"
            self.overlapped += 1
        return super().reply(requests, plans)


def test_evaluation_prepares_the_next_batch_while_the_model_answers(
    opened: dict[str, threading.Event], tmp_path: Path
) -> None:
    """Every batch sees the last picture of the next one opened before it is answered; records and errors as ever."""
    questions = Questions("mmvp", [replace(s, pair=f"{i // 2}") for i, s in enumerate(samples(11))])
    responder = Patient(opened, size=4, last=10)
    evaluate(responder, [questions], tmp_path / "run", EvalSettings(ablation=False), batch=4, show=False)
    assert responder.overlapped == 2
    found = lines(tmp_path / "run")
    assert [row["question"] for row in found] == [sample.id for sample in questions.samples]
    assert [row["question"] for row in found if row["error"]] == ["q2"]
    assert "p2.0" in found[2]["error"]
    assert found[0]["pictures"] == [picture_hash(picture(0))]
    timing = json.loads((tmp_path / "run" / "timing.json").read_text())
    assert 0 < timing["waited"] <= timing["seconds"]
    assert timing["gpu_wait"] == pytest.approx(timing["waited"] / timing["seconds"])
    before = (tmp_path / "run" / "timing.json").read_bytes()
    evaluate(responder, [questions], tmp_path / "run", EvalSettings(ablation=False), batch=4, show=False)
    assert (tmp_path / "run" / "timing.json").read_bytes() == before, "a run that asks nothing has no time of its own"


def test_waiting_counts_pictures_not_answers(opened: dict[str, threading.Event]) -> None:
    """Slow pictures for a fast model are nearly all of the time; for a slow model nearly none."""
    shares = []
    for answering in (0.0, 0.1):
        waiting, chosen = Waiting(), samples(9)[3:]
        for _ in prefetch([[one] for one in chosen], ImageLoader(None), waiting):
            time.sleep(answering)
        shares.append(waiting.share)
    assert shares[0] > 0.5 > 0.3 > shares[1]


def test_questions_that_share_a_picture_open_it_once(opened: dict[str, threading.Event]) -> None:
    made: list[Any] = []
    shared = ImageRef.from_image("shared", picture(1))
    asked = [Sample.ask(f"q{i}", [shared], "Which?", "A", choices=("red", "blue")) for i in range(8)]
    loader = ImageLoader(lambda image: made.append(image) or len(made))
    batches = list(prefetch([asked[:4], asked[4:]], loader))
    assert [item.images for batch in batches for item in batch] == [[1]] * 8


def test_pictures_that_come_again_are_opened_once_and_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a batch and across two, with more pictures in between than are remembered."""
    opened: list[tuple[str, str]] = []
    inner = ImageRef.open

    def noted(ref: ImageRef) -> Image.Image:
        opened.append((ref.id, threading.current_thread().name.split("_")[0]))
        return inner(ref)

    monkeypatch.setattr(ImageRef, "open", noted)
    refs = {name: ImageRef.from_image(name, picture(number)) for number, name in enumerate("ABCDEF")}
    asked = [Sample.ask(f"q{i}", [refs[name]], "Which?", "A") for i, name in enumerate("ABCDAAEBFC")]
    found = [item for batch in prefetch([asked[:5], asked[5:]], ImageLoader(None)) for item in batch]
    assert sorted(opened) == [(name, "pictures") for name in "ABCDEF"]
    assert [item.pictures for item in found] == [(picture_hash(picture("ABCDEF".index(c))),) for c in "ABCDAAEBFC"]


def test_a_question_with_one_bad_picture_does_not_hold_up_the_rest(opened: dict[str, threading.Event]) -> None:
    """Its good pictures are never asked for; there is room for the next ones all the same."""
    found = [item for batch in prefetch([[one] for one in samples(6, each=3)], ImageLoader(None)) for item in batch]
    assert [bool(item.error) for item in found] == [False, False, True, False, False, False]
    assert all(len(item.pictures) == 3 for item in found if not item.error)


def test_leaving_early_ends_the_threads(opened: dict[str, threading.Event]) -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), closing(prefetch([[s] for s in samples(50)], ImageLoader(None))) as batches:
        next(batches)
        raise KeyboardInterrupt
    assert threading.active_count() == before and len(opened) < 25


class Watching(ModelResponder):
    """A model that answers the first batch when a picture of the second was opened."""

    def __init__(self, backbone: Backbone, opened: dict[str, threading.Event], coming: str) -> None:
        super().__init__(backbone, Sampling(temperature=0.0, max_new=2))
        self.event, self.seen = opened.setdefault(coming, threading.Event()), False

    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        self.seen = self.event.wait(20)
        return super().reply(requests, plans)


@pytest.mark.parametrize("family", ["qwen2.5-vl"], indirect=True)
def test_diagnostics_prepare_the_next_batch_while_the_model_answers(
    backbone: Backbone, opened: dict[str, threading.Event], tmp_path: Path
) -> None:
    """Counterfactual pairs: overlap, an error that stays with its pair, and the records of asking batch by batch."""
    views = [replace(view, pair=f"pair{i // 2}", answer="AB"[i % 2]) for i, view in enumerate(samples(12))]
    pairs = [Pair("color", *views[i : i + 2]) for i in range(0, 12, 2)]
    responder = Watching(backbone, opened, coming="p7.0")
    model = Model(responder, 2)
    diagnostic = Counterfactual()
    journal = Journal(tmp_path / "counterfactual.jsonl", diagnostic.key, 0, 1)
    before = threading.active_count()
    measure_all(diagnostic, model, pairs, journal, 2)
    assert responder.seen, "nothing was prepared while the first batch was answered"
    assert backbone._ahead is None and threading.active_count() == before
    plain = Counterfactual()
    plain.settle(model)
    expected = [record for k in range(0, 6, 2) for record in plain.measure(model, Samples(pairs[k : k + 2]))]
    assert journal.records == expected
    assert {record["pair"] for record in journal.records if any(record["errors"])} == {"pair1"}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads each `Ahead` was given, on a machine of 48 cores."""
    given: list[int] = []
    begin = Ahead.__init__

    def noted(self: Ahead[Any, Any], *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        given.append(self._pool._max_workers)

    monkeypatch.setattr(Ahead, "__init__", noted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)), raising=False)
    return given


MACHINES = [(None, None, 4), ("16", "8", 3), ("16", "1", 4), ("16", None, 1), ("4", "99", 4)]
"""Processes of all, those of this machine, and the threads of each: half of 48 cores over the latter, 4 at most."""


@pytest.mark.parametrize(("world", "here", "expected"), MACHINES)
@pytest.mark.parametrize("family", ["qwen2.5-vl"], indirect=True)
def test_threads_share_the_cores_of_their_machine(
    world: str | None,
    here: str | None,
    expected: int,
    backbone: Backbone,
    threads: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen processes on two machines: eight share the cores of one, in an evaluation and in a diagnostic."""
    for name, value in (("RANK", world and "0"), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", here)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    ranks = Ranks.from_environment()
    assert ranks.world == int(world or 1) and ranks.local_world <= ranks.world
    monkeypatch.setattr(Ranks, "barrier", lambda self: None)
    questions = Questions("mmvp", [replace(s, pair=f"{i // 2}") for i, s in enumerate(samples(4))])
    evaluate(Oracle(), [questions], tmp_path / "run", EvalSettings(ablation=False), batch=4, show=False, ranks=ranks)
    views = [replace(view, pair="pair", answer="AB"[i]) for i, view in enumerate(samples(2))]
    diagnostic, model = Counterfactual(), Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=1)), 1)
    journal = Journal(tmp_path / "counterfactual.jsonl", diagnostic.key, 0, 1)
    measure_all(diagnostic, model, [Pair("color", *views)], journal, 1, ranks)
    assert threads == [expected] * 2
