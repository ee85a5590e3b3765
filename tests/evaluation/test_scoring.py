"""Scores of hand-made predictions, a recomputation with plain loops, and properties."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from realvr.data import ImageRef, read
from realvr.errors import UserError
from realvr.evaluation.aggregation import aggregate
from realvr.evaluation.benchmark import benchmark_of
from realvr.evaluation.records import Prediction
from realvr.evaluation.rules import units
from realvr.evaluation.scoring import summarise


def row(bench: str, question: int | str, right: bool, **fields: Any) -> Prediction:
    base = {"condition": "own", "latents": 8, "seed": 0, "answer": "A", "choices": ["x", "y"], "new_tokens": 3}
    letter = "A" if right else "B"
    made = {"text": f"<answer>{letter}</answer>", "extracted": letter, "correct": right}
    return Prediction(bench, str(question), **(base | made | fields))


def one(rows: list[Prediction], **options: Any) -> dict[str, Any]:
    (entry,) = summarise(rows, **({"trained_latents": 8, "resamples": 200} | options))["benches"].values()
    return entry


def test_mmvp() -> None:
    right = [True, True, True, False, False, False]  # pairs: both, one, none
    entry = one([row("mmvp", n, ok, pair=str(n // 2)) for n, ok in enumerate(right)])
    assert entry["headline"] == 50.0
    assert entry["metrics"]["pair"] == pytest.approx(100 / 3)
    assert entry["metrics"]["pairs"] == 3
    low, high = entry["metrics"]["pair_ci"]
    assert low == 0.0 and 60 < high <= 100


def test_half_a_pair_is_no_pair() -> None:
    entry = one([row("mmvp", n, True, pair=str(n // 2)) for n in range(3)])
    assert (entry["metrics"]["pair"], entry["metrics"]["pairs"], entry["n"]) == (100.0, 1, 3)


def test_blink_is_a_macro_mean() -> None:
    rows = [row("blink", f"c{n}", n < 1, task="Counting") for n in range(4)]
    rows += [row("blink", f"j{n}", n < 3, task="Jigsaw") for n in range(4)]
    rows += [row("blink", f"q{n}", True, task="IQ_Test") for n in range(2)]
    entry = one(rows)
    assert entry["headline"] == pytest.approx((25 + 75 + 100) / 3)
    assert entry["metrics"]["micro"] == 60.0
    assert entry["metrics"]["subtasks"]["Jigsaw"] == {"accuracy": 75.0, "n": 4}


def test_hrbench_is_a_mean_over_cycles() -> None:
    right = {"0": [1, 1, 0], "1": [1, 0, 0], "2": [0, 0, 0]}  # question 0 is single, 1 and 2 are cross
    rows = [
        row("hrbench-4k", f"{cycle}{n}", bool(ok), cycle=cycle, category="single" if n == 0 else "cross")
        for cycle, answers in right.items()
        for n, ok in enumerate(answers)
    ]
    # One cycle with fewer rows: the mean over cycles is then not the mean over rows.
    rows.append(row("hrbench-4k", "30", True, cycle="3", category="single"))
    entry = one(rows)
    assert entry["headline"] == pytest.approx((200 / 3 + 100 / 3 + 0 + 100) / 4)
    assert entry["metrics"]["single"] == pytest.approx((100 + 100 + 0 + 100) / 4)
    assert entry["metrics"]["cross"] == pytest.approx((50 + 0 + 0) / 3)
    assert entry["metrics"]["cycles"]["0"] == {"all": pytest.approx(200 / 3), "single": 100.0, "cross": 50.0}


def test_cycles_of_a_question_are_one_unit() -> None:
    options = [["1", "2", "3", "4"], ["1", "2", "3", "4"], ["red", "blue", "green", "white"]]
    rows = [
        row("hrbench-8k", 10 * cycle + n, True, cycle=str(cycle), choices=texts[cycle:] + texts[:cycle])
        for cycle in range(4)
        for n, texts in enumerate(options)
    ]
    found = units(benchmark_of("hrbench-8k").rule, rows)
    groups: dict[str, list[str]] = {}
    for question, unit in found.items():
        groups.setdefault(unit, []).append(question)
    assert sorted(sorted(group, key=int) for group in groups.values()) == [
        ["0", "10", "20", "30"],
        ["1", "11", "21", "31"],
        ["2", "12", "22", "32"],
    ]


def test_mme_realworld() -> None:
    cells = {("Perception", "OCR"): (3, 4), ("Perception", "Monitoring"): (0, 2), ("Reasoning", "OCR"): (1, 2)}
    rows = [
        row("mme-realworld-lite", f"{task}{subtask}{n}", n < right, task=task, tags={"subtask": subtask})
        for (task, subtask), (right, total) in cells.items()
        for n in range(total)
    ]
    entry = one(rows)
    assert entry["headline"] == 50.0
    assert entry["metrics"]["avg_c"] == pytest.approx((75 + 0 + 50) / 3)
    assert entry["metrics"]["tasks"]["Perception"] == {"accuracy": 50.0, "avg_c": 37.5, "n": 6}
    assert entry["metrics"]["subtasks"]["Reasoning/OCR"] == {"accuracy": 50.0, "n": 2}


def test_rules_look_where_the_readers_write(tmp_path: Path) -> None:
    """Real files through the real readers: MME-RealWorld's subtasks, and the rotations of an HR-Bench question."""
    image = ImageRef.from_image("a.png", Image.new("RGB", (8, 8)))
    (tmp_path / "a.png").write_bytes(image.read())
    raw = {"Question_id": "q", "Image": "a.png", "Text": "?", "Answer choices": ["(A) x", "(B) y"], "Ground truth": "A"}
    raw |= {"Task": "Perception", "Subtask": "OCR", "Category": "sign"}
    (tmp_path / "mme.json").write_text(json.dumps([raw]))
    (sample,) = read(tmp_path / "mme.json")
    entry = one([row("mme-realworld", "q", True, task=sample.task, category=sample.category, tags=sample.tags)])
    assert list(entry["metrics"]["subtasks"]) == ["Perception/OCR"]

    texts = ["1", "2", "3", "4"]
    lines = ["index\tquestion\tanswer\tcategory\tA\tB\tC\tD\tcycle_category\timage"]
    cell = base64.b64encode(image.read()).decode()
    for n, cycle in ((n, cycle) for n in range(3) for cycle in range(4)):
        options = "\t".join(texts[cycle:] + texts[:cycle])
        lines.append(f"{4 * n + cycle}\tHow many {n}?\tA\tsingle\t{options}\t{cycle}\t{cell}")
    (tmp_path / "hr_bench_4k.tsv").write_text("\n".join(lines) + "\n")
    rows = [
        row("hrbench-4k", s.id, True, category=s.category, cycle=s.cycle, choices=s.choices)
        for s in read(tmp_path / "hr_bench_4k.tsv")
    ]
    found = units(benchmark_of("hrbench-4k").rule, rows)
    assert len(found) == 12
    assert all(found[str(4 * n)] == found[str(4 * n + cycle)] for n in range(3) for cycle in range(4))
    assert len(set(found.values())) == 3


def test_failures_stay_in_the_denominator() -> None:
    rows = [row("validation", 0, True), row("validation", 1, False)]
    rows.append(row("validation", 2, False, text="hm", extracted=None))
    rows.append(row("validation", 3, False, text="", extracted=None, error="image unreadable", new_tokens=0))
    entry = one(rows, expected={"validation": 5})
    assert entry["headline"] == 25.0
    assert (entry["n"], entry["parse_failures"], entry["errors"], entry["coverage"]) == (4, 1, 1, 50.0)
    assert entry["mean_new_tokens"] == 3.0
    assert entry["status"] == "incomplete 4/5" and entry["complete"] is False
    assert one(rows, expected={"validation": 4})["status"] == "complete"


def test_another_policy_reads_the_texts_again() -> None:
    rows = [row("validation", 0, True, text="Answer: B", answer="B", choices=["p", "q"])]
    assert one(rows, policy="strict")["headline"] == 100.0
    entry = one(rows, policy="mme-official")
    assert (entry["headline"], entry["policy"]) == (0.0, "mme-official")
    failed = [row("validation", 0, False, text="", error="no image", extracted=None)]
    assert one(failed, policy="mme-official")["coverage"] == 0.0, "a question never asked has no answer to read"
    with pytest.raises(UserError):
        one(rows, policy="nonsense")


def test_ablation() -> None:
    own, none = [1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 0]
    rows = [row("validation", n, bool(ok)) for n, ok in enumerate(own)]
    rows += [row("validation", n, bool(ok), latents=0) for n, ok in enumerate(none)]
    rows += [row("validation", n, True, condition="other") for n in range(8)]
    entry = one(rows)
    cell = entry["ablation"]["none"]
    assert (entry["headline"], cell["headline"], cell["difference"]) == (75.0, 25.0, -50.0)
    assert (cell["only_first"], cell["only_second"], cell["common"]) == (5, 1, 8)
    assert cell["p"] == pytest.approx(2 * (1 + 6) / 64)
    low, high = cell["difference_ci"]
    assert low < -50 < high < 1
    assert entry["ablation"]["other"]["difference"] == 25.0
    assert set(entry["ablation"]) == {"none", "other"}


def test_a_difference_is_drawn_question_by_question() -> None:
    """The same six of twelve right: no draw makes a difference. One more right: none makes it worse."""
    own = [row("validation", n, n % 2 == 0) for n in range(12)]
    same = [row("validation", n, n % 2 == 0, condition="mean") for n in range(12)]
    more = [row("validation", n, n % 2 == 0 or n == 1, condition="other") for n in range(12)]
    cells = one([*own, *same, *more])["ablation"]
    assert cells["mean"]["difference_ci"] == [0.0, 0.0]
    low, high = cells["other"]["difference_ci"]
    assert low == 0.0 and high > 100 / 12


def test_direct_model_and_missing_trained_k() -> None:
    direct = summarise([row("mmvp", n, True, latents=0) for n in range(4)], trained_latents=0, resamples=50)
    assert direct["benches"]["mmvp"]["headline"] == 100.0 and direct["benches"]["mmvp"]["ablation"] == {}
    other = one([row("mmvp", n, True, latents=k) for n in range(4) for k in (0, 4)])
    assert other["latents"] == 4 and "none" in other["ablation"]


def five(latents: int = 8, condition: str = "own", right: int = 3, lite: bool = True) -> list[Prediction]:
    names = ["mmvp", "blink", "hrbench-4k", "hrbench-8k", "mme-realworld-lite" if lite else "mme-realworld"]
    return [
        row(name, n, n < right + number % 2, latents=latents, condition=condition)
        for number, name in enumerate(names)
        for n in range(10)
    ]


def test_five_task_mean_needs_all_five() -> None:
    summary = summarise([*five(), *five(0, right=1), *five(condition="mean")[:40]], trained_latents=8, resamples=100)
    means = summary["five_task_mean"]
    assert means["own"]["mean"] == pytest.approx((30 + 40 + 30 + 40 + 30) / 5)
    assert means["none"]["difference"] == pytest.approx(-20.0)
    assert "mean" not in means, "only four of the five"
    whole = [row("mme-realworld", n, True) for n in range(10)]  # beside the Lite set, which is the paper's
    both = summarise([*five(), *whole], trained_latents=8, resamples=50)["five_task_mean"]["own"]
    assert both["mean"] == pytest.approx(34.0) and both["tasks"][-1] == "mme-realworld-lite"
    assert "five_task_mean" not in summarise(five()[10:], trained_latents=8, resamples=50)
    wrong_k = [replace(r, latents=4) if r.bench == "mmvp" else r for r in five()]
    assert "five_task_mean" not in summarise(wrong_k, trained_latents=8, resamples=50)


def test_sweep_as_in_the_paper() -> None:
    scores = {"mmvp": {0: 5, 4: 7, 8: 6}, "blink": {0: 2, 4: 3, 8: 6}}
    rows = [
        row(name, n, n < right, latents=k)
        for name, by_k in scores.items()
        for k, right in by_k.items()
        for n in range(10)
    ]
    sweep = summarise(rows, trained_latents=8, resamples=50)["sweep"]
    assert sweep["rows"]["mmvp"] == {"0": pytest.approx(-10), "4": pytest.approx(10), "8": 0.0}
    assert sweep["mean"] == {"0": pytest.approx(-25), "4": pytest.approx(-10), "8": 0.0}
    assert sweep["best"] == {"mmvp": 4, "blink": 8}
    assert sweep["oracle"] == pytest.approx(5.0)


def test_a_sweep_over_a_subset_compares_the_subset() -> None:
    rows = [row("mmvp", n, n < 5) for n in range(10)] + [row("mmvp", n, n < 4, latents=4) for n in range(5)]
    cell = one(rows)["sweep"]["4"]
    assert (cell["headline"], cell["difference"], cell["common"]) == (80.0, pytest.approx(-20.0), 5)


def test_decoding_seeds() -> None:
    right = {0: 4, 1: 6, 2: 8}
    rows = [row("validation", n, n < ok, seed=seed) for seed, ok in right.items() for n in range(10)]
    entry = one(rows)
    assert entry["headline"] == pytest.approx(60.0)
    assert entry["std"] == pytest.approx(20.0)
    assert entry["n"] == 10 and entry["replies"] == 30
    low, high = entry["ci"]
    assert high - low > 30, "thirty replies to ten questions are ten observations"


def test_aggregate() -> None:
    summaries = {
        str(extra): summarise([*five(right=extra), *five(0, right=1)], trained_latents=8, resamples=50)
        for extra in (3, 4, 8)
    }
    total = aggregate(summaries)
    assert total["benches"]["mmvp"]["mean"] == pytest.approx(50.0)
    assert total["benches"]["mmvp"]["std"] == pytest.approx((700) ** 0.5)
    assert total["five_task_mean"]["own"]["values"] == {
        "3": pytest.approx(34),
        "4": pytest.approx(44),
        "8": pytest.approx(84),
    }
    assert total["five_task_mean"]["none"]["difference"]["mean"] == pytest.approx(14 - 54)
    assert aggregate({"3": summaries["3"]})["benches"]["mmvp"]["std"] is None


def random_rows(seed: int) -> list[Prediction]:
    rng = random.Random(seed)
    rows = []
    for bench, count in (("mmvp", 20), ("blink", 33), ("hrbench-4k", 24), ("mme-realworld", 31), ("mine", 7)):
        for n in range(count):
            fields = {
                "task": rng.choice(["t", "u", "v"]) if bench != "mmvp" else "mmvp",
                "category": ("single", "cross")[n % 6 < 3],
                "pair": str(n // 2),
                "cycle": str(n % 4),
                "tags": {"subtask": rng.choice("abc")},
            }
            for condition, latents in (("own", 8), ("own", 0), ("mean", 8)):
                rows.append(row(bench, n, rng.random() < 0.6, condition=condition, latents=latents, **fields))
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_against_plain_loops(seed: int) -> None:
    """Every headline and the main metrics again, with nothing but loops over the rows."""
    rows = random_rows(seed)
    summary = summarise(rows, trained_latents=8, resamples=20)

    def share(some: list[Prediction]) -> float:
        right = 0
        for item in some:
            if item.correct:
                right += 1
        return 100 * right / len(some)

    def mean_by(some: list[Prediction], key: Any) -> float:
        total, names = 0.0, sorted({key(item) for item in some})
        for name in names:
            total += share([item for item in some if key(item) == name])
        return total / len(names)

    by_key = {"blink": lambda r: r.task, "hrbench-4k": lambda r: r.cycle}
    for bench, entry in summary["benches"].items():
        mine = [r for r in rows if r.bench == bench]
        for condition, latents, got in (
            ("own", 8, entry),
            ("own", 0, entry["ablation"]["none"]),
            ("mean", 8, entry["ablation"]["mean"]),
        ):
            cell = [r for r in mine if (r.condition, r.latents) == (condition, latents)]
            expected = mean_by(cell, by_key[bench]) if bench in by_key else share(cell)
            assert got["headline"] == pytest.approx(expected)
        own = [r for r in mine if (r.condition, r.latents) == ("own", 8)]
        none = {r.question: r.correct for r in mine if (r.condition, r.latents) == ("own", 0)}
        assert entry["ablation"]["none"]["only_first"] == sum(r.correct and not none[r.question] for r in own)
        if bench == "mmvp":
            both = sum(own[n].correct and own[n + 1].correct for n in range(0, 20, 2))
            assert entry["metrics"]["pair"] == pytest.approx(10 * both)
        if bench == "hrbench-4k":
            single = [r for r in own if r.category == "single"]
            assert entry["metrics"]["single"] == pytest.approx(mean_by(single, lambda r: r.cycle))
        if bench == "mme-realworld":
            assert entry["metrics"]["avg_c"] == pytest.approx(mean_by(own, lambda r: (r.task, r.tags["subtask"])))


@settings(max_examples=15, deadline=None)
@given(order=st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(order: random.Random) -> None:
    rows = random_rows(7)
    shuffled = rows + rows[:10]
    order.shuffle(shuffled)
    expected, got = (summarise(some, trained_latents=8, resamples=20) for some in (rows, shuffled))
    assert json.dumps(expected, sort_keys=True) == json.dumps(got, sort_keys=True)


def test_inferred_latents() -> None:
    rows = [row("mmvp", n, True, latents=k) for n in range(2) for k in (0, 4, 20)]
    assert summarise(rows, resamples=10)["trained_latents"] == 20
    rows += [row("mmvp", n, True, latents=4, condition="mean") for n in range(2)]
    assert summarise(rows, resamples=10)["trained_latents"] == 4
