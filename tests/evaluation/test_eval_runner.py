"""The runner with responders that are no models: what is asked, kept, resumed and exchanged, against plain Python."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eval_cases import Constant, Oracle, Speaker, keys, lines, load_all, make_world, own_latents
from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError
from realvr.evaluation.ablation import donors
from realvr.evaluation.questions import Questions, load
from realvr.evaluation.responder import Plan, Reply, Request
from realvr.evaluation.run_folder import claim
from realvr.evaluation.runner import EvalSettings, evaluate

TOTAL = 6 + 10 + 12 + 5


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def benches(world: dict[str, Path]) -> list[Questions]:
    return load_all(world)


@pytest.fixture(scope="module")
def finished(benches: list[Questions], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, not to be written to."""
    out = tmp_path_factory.mktemp("finished") / "run"
    evaluate(Constant("<answer>A</answer>"), benches, out, batch=4)
    return out


def test_an_oracle_is_right_everywhere_under_every_condition(benches: list[Questions], tmp_path: Path) -> None:
    summary = evaluate(Oracle(), benches, tmp_path, batch=4)
    found = lines(tmp_path)
    assert len(found) == len(set(keys(found))) == 5 * TOTAL
    assert all(row["correct"] for row in found)
    assert Counter((row["condition"], row["latents"]) for row in found) == {
        ("own", 3): TOTAL,
        ("own", 0): TOTAL,
        ("mean", 3): TOTAL,
        ("other", 3): TOTAL,
        ("noise", 3): TOTAL,
    }
    assert {name: entry["headline"] for name, entry in summary["benches"].items()} == dict.fromkeys(
        ("mini-mmvp", "mini-blink", "mini-hrbench-4k", "mini-mme-realworld"), 100.0
    )
    assert json.loads((tmp_path / "summary.json").read_text())["benches"].keys() == summary["benches"].keys()


def test_a_constant_scores_what_plain_counting_says(finished: Path, benches: list[Questions]) -> None:
    found = [row for row in lines(finished) if (row["condition"], row["latents"]) == ("own", 3)]
    truth = {(bench.bench, item.id): item for bench in benches for item in bench.samples}
    right: dict[str, list[bool]] = defaultdict(list)
    for row in found:
        item = truth[row["bench"], row["question"]]
        assert (row["answer"], row["choices"], row["task"]) == (item.answer, item.choices, item.task)
        assert row["question_text"] == item.question != ""
        assert row["correct"] == (item.answer == "A") and row["extracted"] == "A" and row["error"] is None
        right[row["bench"]].append(item.answer == "A")
    summary = json.loads((finished / "summary.json").read_text())["benches"]
    for name in ("mini-mmvp", "mini-mme-realworld"):
        assert summary[name]["headline"] == pytest.approx(100 * sum(right[name]) / len(right[name]))
    tasks: dict[str, list[bool]] = defaultdict(list)
    for row in (row for row in found if row["bench"] == "mini-blink"):
        tasks[row["task"]].append(row["correct"])
    macro = sum(sum(values) / len(values) for values in tasks.values()) / 5
    assert summary["mini-blink"]["headline"] == pytest.approx(100 * macro)
    assert summary["mini-mmvp"]["n"] == 6 and summary["mini-hrbench-4k"]["n"] == 12


def test_an_empty_answer_is_a_parse_failure_and_counts(benches: list[Questions], tmp_path: Path) -> None:
    summary = evaluate(Constant(""), benches[:1], tmp_path, EvalSettings(ablation=False))
    assert [(row["extracted"], row["correct"], row["text"]) for row in lines(tmp_path)] == [(None, False, "")] * 6
    assert summary["benches"]["mini-mmvp"]["n"] == 6 and summary["benches"]["mini-mmvp"]["headline"] == 0


def test_mean_and_other_latents_are_what_the_words_say(benches: list[Questions], tmp_path: Path) -> None:
    oracle = Oracle()
    evaluate(oracle, benches, tmp_path, batch=4)
    for bench in benches:
        images = {item.id: {image.content_hash() for image in item.images} for item in bench.samples}
        own = {item.id: own_latents(item.id, 3) for item in bench.samples}
        mean = torch.stack(list(own.values())).double().mean(0)
        used = []
        for item in bench.samples:
            given_mean, given_other, _ = oracle.given[item.task, item.id]
            assert torch.allclose(given_mean.double(), mean, atol=1e-6)
            (donor,) = (name for name, latents in own.items() if torch.equal(latents, given_other))
            assert not images[donor] & images[item.id], f"{item.id} got the latents of {donor}, same image"
            pair = {row.id: row.pair for row in bench.samples}
            assert pair[donor] is None or pair[donor] != item.pair
            used.append(donor)
        assert sorted(used) == sorted(own)  # everyone's latents are used once


def ask(name: str, image: str, **fields: object) -> Sample:
    return Sample.ask(name, [ImageRef.from_bytes(image, image.encode())], "What?", "A", **fields)


def test_donors_where_one_image_has_most_questions() -> None:
    found = donors([*(ask(f"a{k}", "a") for k in range(7)), ask("b", "b"), ask("c", "c")])
    assert {name[0] for name in (found[f"a{k}"] for k in range(7))} <= {"b", "c"}
    assert found["b"] != "b" and found["c"] != "c"
    assert donors([ask("x", "a"), ask("y", "a")]) == {}
    # a chain of shared images is one group: x-y share a, y-z share b through a pair
    chain = [
        ask("x", "a"),
        ask("y", "a", pair="p"),
        ask("z", "b", pair="p"),
        ask("v", "c"),
        ask("w", "d"),
        ask("u", "e"),
    ]
    found = donors(chain)
    assert not {found["x"], found["y"], found["z"]} & {"x", "y", "z"}
    assert donors(chain) == found and any(donors(chain, seed) != found for seed in range(1, 5))


def test_a_set_about_one_image_has_no_other_condition(tmp_path: Path, world: dict[str, Path]) -> None:
    picture = (world["mmvp"] / "MMVP Images" / "1.png").read_bytes()
    same = [Sample.ask(str(k), [ImageRef.from_bytes("p", picture)], "What?", "A", choices=["x", "y"]) for k in range(3)]
    evaluate(Oracle(), [Questions("mine", same)], tmp_path)
    assert Counter(row["condition"] for row in lines(tmp_path)) == {"own": 6, "mean": 3, "noise": 3}


class Patient(Oracle):
    """Stops the run, as a kill would, when it has been asked ``after`` times."""

    def __init__(self, after: int) -> None:
        super().__init__("speaker")
        self.after = after

    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        if len(self.sizes) >= self.after:
            raise KeyboardInterrupt
        return super().reply(requests, plans)


@pytest.mark.parametrize("after", [0, 3, 9, 12])
def test_a_stopped_run_goes_on_and_ends_the_same(benches: list[Questions], tmp_path: Path, after: int) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    evaluate(Oracle(), benches, whole, batch=4)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Patient(after), benches, stopped, batch=4)
    kept = len(lines(stopped))
    second = Oracle()
    evaluate(second, benches, stopped, batch=4)
    assert lines(stopped) == lines(whole)
    assert second.answers == 5 * TOTAL - kept  # nothing is asked twice
    third = Oracle()
    evaluate(third, benches, stopped, batch=4)
    assert third.answers == 0


def test_a_file_cut_at_any_byte_is_completed(finished: Path, benches: list[Questions], tmp_path: Path) -> None:
    whole = (finished / "predictions.jsonl").read_bytes()
    random.seed(3)
    for cut in [0, 1, len(whole) - 1, *random.sample(range(len(whole)), 12)]:
        out = tmp_path / str(cut)
        shutil.copytree(finished, out)
        (out / "predictions.jsonl").write_bytes(whole[:cut])
        if cut % 2:
            shutil.rmtree(out / "latents" / "mini-blink")  # lost latents are computed again
        evaluate(Constant("<answer>A</answer>"), benches, out, batch=4)
        assert lines(out) == lines(finished)


def test_parts_of_other_processes_are_taken_over(finished: Path, benches: list[Questions], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    rows = (out / "predictions.jsonl").read_text().splitlines(keepends=True)
    (out / "predictions.jsonl").write_text("".join(rows[:20]))
    (out / "predictions.rank0.jsonl").write_text("".join(rows[15:60]))
    (out / "predictions.rank2.jsonl").write_text("".join(rows[70:90]) + rows[90][:31])
    asked = Constant("<answer>A</answer>")
    evaluate(asked, benches, out, batch=1)
    assert lines(out) == lines(finished) and not list(out.glob("predictions.rank*"))
    assert asked.answers == len(rows) - 80


def test_another_evaluation_is_kept_out(finished: Path, benches: list[Questions], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    said = Constant("<answer>A</answer>")
    with pytest.raises(UserError, match=r'settings.policy was "strict", now "lvr"'):
        evaluate(said, benches, out, EvalSettings(policy="lvr"))
    with pytest.raises(UserError, match=r"benches.mini-mmvp.questions was 6, now 4"):
        fewer = Questions("mini-mmvp", benches[0].samples[:4], path=benches[0].path, format="mmvp", rows=6)
        evaluate(said, [fewer, *benches[1:]], out)
    with pytest.raises(UserError, match=r"settings.latents was \[3, 0\], now \[3\]"):
        evaluate(said, benches, out, EvalSettings(ablation=False))
    record = json.loads((out / "eval.json").read_text())
    first = record | {"responder": record["responder"] | {"path": "runs/a/final", "weights": "2df7"}}
    (out / "eval.json").write_text(json.dumps(first))
    for path, words in (("mini", "model was runs/a/final, now mini"), ("runs/a/final", "weights of runs/a/final are")):
        other = first | {"responder": first["responder"] | {"path": path, "name": "other", "weights": "9c01"}}
        with pytest.raises(UserError, match=words) as caught:
            claim(out, other)
        assert "2df7" not in str(caught.value) and "responder" not in str(caught.value)
    (out / "eval.json").unlink()
    with pytest.raises(UserError, match=r"holds predictions.jsonl without eval.json"):
        evaluate(said, benches, out)


class Small(Oracle):
    """A GPU that holds two prompts."""

    room = 2

    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        if len(requests) > self.room:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return super().reply(requests, plans)


def test_batches_are_halved_when_memory_runs_out(
    benches: list[Questions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = Small(), Oracle()
    evaluate(small, benches, tmp_path / "small", batch=6)
    evaluate(large, benches, tmp_path / "large", batch=6)
    assert lines(tmp_path / "small") == lines(tmp_path / "large")
    assert max(small.sizes) == 2 and max(large.sizes) == 6
    assert small.given.keys() == large.given.keys()
    for key, spans in large.given.items():
        assert all(torch.equal(one, two) for one, two in zip(small.given[key], spans, strict=True))
    assert capsys.readouterr().err.count("out of GPU memory") == 2  # 6, then 3, then 2 for good
    small.room = 0
    with pytest.raises(UserError, match="mini-mmvp, question 1: the GPU's memory does not suffice for one question"):
        evaluate(small, benches, tmp_path / "none")


def test_a_question_that_cannot_be_asked_stays_in_the_denominator(world: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "MMVP"
    shutil.copytree(world["mmvp"], folder)
    (folder / "MMVP Images" / "3.png").write_bytes((folder / "MMVP Images" / "3.png").read_bytes()[:60])
    oracle = Oracle()
    summary = evaluate(oracle, [load("mmvp", folder)], tmp_path / "out", batch=4)
    found = lines(tmp_path / "out")
    bad = [row for row in found if row["question"] == "3"]
    assert len(found) == 30 and len(bad) == 5
    for row in bad:
        assert row["finish"] == "error" and not row["correct"] and "3.png" in row["error"] and row["extracted"] is None
    assert all(row["correct"] for row in found if row["question"] != "3")
    assert summary["benches"]["mini-mmvp"]["n"] == 6
    assert summary["benches"]["mini-mmvp"]["headline"] == pytest.approx(100 * 5 / 6)
    mean = torch.stack([own_latents(str(k), 3) for k in (1, 2, 4, 5, 6)]).mean(0)
    assert torch.allclose(oracle.given["mmvp", "1"][0], mean, atol=1e-6)  # the mean of those that there are
    exchanged = donors([row for row in load("mmvp", folder).samples if row.id != "3"])
    for question, donor in exchanged.items():
        assert torch.equal(oracle.given["mmvp", question][1], own_latents(donor, 3))


def test_without_a_donor_only_the_exchange_is_missing(world: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "MMVP"
    shutil.copytree(world["mmvp"], folder)
    for number in (3, 4, 5, 6):  # one pair is left, and a pair does not exchange within itself
        (folder / "MMVP Images" / f"{number}.png").unlink()
    summary = evaluate(Oracle(), [load("mmvp", folder)], tmp_path / "out", batch=4)
    right = Counter(row["condition"] for row in lines(tmp_path / "out") if row["correct"])
    assert right == {"own": 4, "mean": 2, "noise": 2}
    errors = {row["error"] for row in lines(tmp_path / "out") if row["condition"] == "other" and row["question"] < "3"}
    assert errors == {"no question about another image could be asked: nothing to exchange"}
    assert summary["benches"]["mini-mmvp"]["ablation"]["mean"]["difference"] == 0


class Rolling(Oracle):
    """Remembers the seeds of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.rolled: dict[tuple[Any, ...], set[int]] = {}

    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        for request in requests:
            self.rolled.setdefault((request.sample.task, request.sample.id), set()).add(request.seed)
        return super().reply(requests, plans)


def test_every_question_has_seeds_of_its_own(benches: list[Questions], tmp_path: Path) -> None:
    found = []
    for batch in (2, 5):
        responder = Rolling()
        evaluate(responder, benches[:2], tmp_path / str(batch), EvalSettings(seeds=(0, 1)), batch=batch)
        found.append(responder.rolled)
    assert found[0] == found[1]  # the same in whatever batch, and under every condition
    seeds = [seed for some in found[0].values() for seed in some]
    assert len(found[0]) == 16 and len(seeds) == len(set(seeds)) == 32


class Hasty(Speaker):
    """Cannot take one of the prompts, as where it is longer than the context."""

    def say(self, request: Request) -> str:
        return "<answer>B</answer>"

    def _one(self, request: Request, plan: Plan, row: int) -> Reply:
        if request.sample.id == "2":
            return Reply("", finish="error", error="too long")
        return super()._one(request, plan, row)


def test_an_error_of_the_responder_is_recorded_under_every_condition(benches: list[Questions], tmp_path: Path) -> None:
    evaluate(Hasty(), benches[:1], tmp_path, batch=3)
    errors = {row["question"]: row["error"] for row in lines(tmp_path) if row["error"]}
    assert errors == {"2": "too long"} and len(lines(tmp_path)) == 30


def test_budgets(benches: list[Questions], tmp_path: Path) -> None:
    def conditions(name: str, **settings: Any) -> Counter[tuple[str, int]]:
        evaluate(Oracle(), benches[:1], tmp_path / name, EvalSettings(**settings))
        return Counter((row["condition"], row["latents"]) for row in lines(tmp_path / name))

    sweep = conditions("sweep", latents=(0, 2, 3, 5))
    assert sweep == {("own", k): 6 for k in (0, 2, 3, 5)} | {("mean", 3): 6, ("other", 3): 6, ("noise", 3): 6}
    exchanged = {(condition, 5): 6 for condition in ("mean", "other", "noise")}
    assert conditions("one", latents=(5,)) == {("own", 5): 6, ("own", 0): 6} | exchanged
    assert conditions("far", latents=(2, 5)) == {("own", 2): 6, ("own", 5): 6, ("own", 0): 6}
    assert conditions("none", latents=(0,)) == {("own", 0): 6}
    assert conditions("seeds", ablation=False, seeds=(0, 1, 2)) == {("own", 3): 18}
    plain = Oracle()
    plain.latents = 0
    for latents in (None, (4,)):
        with pytest.raises(UserError, match="evaluate it with --latents 0, or train Stage 1 first"):
            evaluate(plain, benches[:1], tmp_path / "plain", EvalSettings(latents=latents))
