"""What the training code puts into a Stage-2 batch, against an oracle of its own: every method, three families.

The texts are scripted: a run between two updates on the same rollouts resumes from saved ones, and these hold every
kind of reply that matters. Everything else is the real task on a real file. Three steps of four prompts cover all rows;
from the second on the bank holds the prototypes of the earlier ones.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import naive_stage2 as naive
import stage_runs
from golden_cases import CaseImage, make_image
from pair import gradients
from realvr.training.method import METHODS as TRAINED

pytest.importorskip("math_verify", reason="math-verify judges free answers (pip install math-verify)")
import batch_oracle
from batch_oracle import METHODS, Json, Oracle, Prototype

K, BATCH, GROUP, NEGATIVES = stage_runs.LATENTS, 4, 5, 6
PICTURES = {"a.png": (84, 56), "b.png": (200, 40), "c.png": (63, 130), "d.png": (57, 60), "e.png": (120, 120)}
COLORS = ["red", "green", "blue"]


def block(*answers: str) -> list[str]:
    return [f"<answer>{answer}</answer>" for answer in answers]


def boxes(*found: tuple[int, list[float]]) -> list[Json]:
    return [{"image": image, "xyxy": xyxy} for image, xyxy in found]


def shows(*turns: list[int]) -> list[Json]:
    """User turns that show these images, with replies between them."""
    said: list[Json] = []
    for number, images in enumerate(turns):
        said += [{"role": "assistant", "text": "I see."}] if number else []
        said.append({"role": "user", "text": f"Question {number}?", "images": images})
    return said


# Each row with the five replies that were sampled for it.
ROWS: list[tuple[Json, list[str]]] = [
    (
        {
            "id": "options",
            "images": ["a.png"],
            "choices": COLORS,
            "answer": "B",
            "boxes": boxes((0, [0.4, 0.1, 0.9, 0.45])),
        },
        [*block("B"), "It is green: <answer>green</answer>", *block("C", "Blue."), "<answer>B</answer>, I think"],
    ),
    (
        {"id": "number", "images": ["c.png"], "answer": "0.5", "boxes": boxes((0, [0.1, 0.55, 0.6, 0.93]))},
        [*block("1/2", "0.25", "\\frac{1}{2}", "2"), "one half"],
    ),
    (
        {"id": "words", "images": ["d.png"], "answer": "a red circle", "boxes": boxes((0, [0.62, 0.0, 1.0, 0.31]))},
        [*block("A  Red circle.", "two gray circles", "Two Gray Circles", "a square"), "".join(block("a", "b"))],
    ),
    (
        {"id": "swapped", "images": ["a.png", "b.png"], "turns": shows([1, 0]), "answer": "yes"}
        | {"boxes": boxes((0, [0.7, 0.6, 0.95, 0.9]))},
        block("yes", "yes", "yes", "yes", "yes"),
    ),
    (
        {"id": "two turns", "images": ["d.png", "c.png", "b.png"], "turns": shows([0, 2], [1, 0]), "answer": "left"}
        | {"boxes": boxes((0, [0.1, 0.1, 0.2, 0.4]), (2, [0.83, 0.05, 0.99, 0.99]))},
        [*block("left", "right"), "right", *block("above", "left ")],
    ),
    (
        {
            "id": "same picture",
            "images": ["a.bmp"],
            "choices": COLORS,
            "answer": "A",
            "boxes": boxes((0, [0.0, 0.7, 0.3, 0.98])),
        },
        [*block("(A)", "B", "green", "yellow"), "B <answer> </answer>"],
    ),
    (
        {"id": "turned", "images": ["turned.png"], "answer": "3"},
        [*block("3.0", "4", "four", "-3"), "<answer>3"],
    ),
    (
        {"id": "whole", "images": ["b.png"], "answer": "12 cm"},
        block("12 cm", "12cm", "1.2", "no idea", "12 CM"),
    ),
    (
        {"id": "several boxes", "images": ["e.png"], "answer": "north"}
        | {"boxes": boxes((0, [0.05, 0.05, 0.52, 0.3]), (0, [0.4, 0.2, 0.9, 0.61]))},
        [*block("south", "north"), "so <answer>north</answer> or <answer>south</answer>", *block(" . ", "east")],
    ),
    (
        {"id": "thin box", "images": ["b.png", "e.png"], "answer": "7", "boxes": boxes((1, [0.51, 0.02, 0.513, 0.97]))},
        block("7", "8", "9", "8", "07"),
    ),
    (
        {"id": "no reply", "images": ["c.png"], "answer": "up", "boxes": boxes((0, [0.0, 0.0, 0.4, 0.2]))},
        ["up", "", "<answer></answer>", "</answer>up<answer>", "it is up"],
    ),
    (
        {"id": "all wrong", "images": ["e.png", "d.png"], "choices": ["one", "two"], "answer": "A"}
        | {"boxes": boxes((1, [0.3, 0.35, 0.7, 0.8]), (0, [0.9, 0.9, 1.0, 1.0]))},
        [*block("B", "two", "three"), "B", "<answer>B</answer> <answer>B</answer>"],
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and pictures; one picture comes in three files."""
    out = tmp_path_factory.mktemp("oracle")
    for number, (name, (width, height)) in enumerate(PICTURES.items()):
        make_image(CaseImage(width, height, number)).save(out / name)
    with Image.open(out / "a.png") as image:
        image.save(out / "a.bmp")
        lying = Image.Exif()
        lying[0x0112] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(out / "turned.png", exif=lying)
    lines = [json.dumps({"question": "Question?"} | row) for row, _ in ROWS]
    (out / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return out


@dataclass
class Bench:
    """One family: its checkpoints, the oracle, and where the data stands before each step."""

    plain: Path
    marked: Path
    folder: Path
    oracle: Oracle
    states: list[Json]
    names: list[list[str]]

    def task(self, method: str, out: Path, **changes: Any) -> Any:
        model = {"path": str(self.plain if method == "direct" else self.marked)}
        model |= {"latents": 0 if method == "direct" else K}
        optim = {"batch": BATCH, "microbatch": 2}
        settings = {"negatives": NEGATIVES, "group": GROUP, "updates_per_rollout": 2, "method": method} | changes
        raw = stage_runs.configure(
            "rl", self.marked, self.folder / "rows.jsonl", out, model=model, optim=optim, **settings
        )
        return stage_runs.make("rl", raw)[0]

    def rollouts(self, step: int, task: Any) -> list[Json]:
        """The scripted replies to the prompts of a step, as a run saves them; latents and log-probabilities are any."""
        random = torch.Generator().manual_seed(step)
        count = 0 if task.name == "direct" else K
        end = self.oracle.tokenizer.eos_token_id
        found = []
        for start in range(0, BATCH, 2):
            groups = []
            for name in self.names[step][start : start + 2]:
                ids = [
                    [*self.oracle.tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in TEXTS[name]
                ]
                logp = [(-4 * torch.rand(len(each), generator=random)).tolist() for each in ids]
                facts = zip(TEXTS[name], ids, logp, strict=True)
                groups.append([{"text": t, "ids": i, "logprobs": p, "finish": "eos"} for t, i, p in facts])
            latents = torch.randn(2, count, task.backbone.width, generator=random)
            found.append({"completions": groups, "latents": latents, "temperature": 1.0})
        return found

    def batch(self, step: int, task: Any, **known: Any) -> list[Any]:
        """What the training code makes of them. ``known`` stands in for parts of the state before the step."""
        state = self.states[step] | {"rollouts": self.rollouts(step, task), "after": self.states[step + 1]}
        task.load_state_dict(state | known)
        micro = task.collect(1).microbatches
        assert [name for part in micro for name in part.names] == self.names[step]
        return micro

    def rows(self, step: int) -> list[Json]:
        return [DATA[name] for name in self.names[step]]


DATA = {row["id"]: row for row, _ in ROWS}
TEXTS = {row["id"]: texts for row, texts in ROWS}


@pytest.fixture(scope="module", params=["qwen2.5-vl", "internvl3", "gemma3"])
def bench(
    request: pytest.FixtureRequest,
    folder: Path,
    build_tiny: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Bench:
    plain = build_tiny(request.param)
    marked = stage_runs.with_markers(plain, tmp_path_factory.mktemp("marked"))
    found = Bench(plain, marked, folder, Oracle(marked, folder), [], [])
    scout = found.task("realvr", tmp_path_factory.mktemp("scout"), updates_per_rollout=1)
    found.states.append(scout.state_dict())
    for step in range(len(ROWS) // BATCH):
        found.names.append([name for micro in scout.collect(step).microbatches for name in micro.names])
        found.states.append(scout.state_dict())
    assert sorted(name for names in found.names for name in names) == sorted(DATA)
    return found


# ---------------------------------------------------------------------- the batch


def places(rows: list[Json], micro: list[Any]) -> Iterator[tuple[int, Json, Any, int]]:
    """Place in the global batch, data row, microbatch, row in it."""
    place = 0
    for part in micro:
        for row in range(len(part.names)):
            yield place, rows[place], part, row
            place += 1


def check_batch(
    oracle: Oracle,
    rows: list[Json],
    texts: list[list[str]],
    earlier: list[Json],
    micro: list[Any],
    weights: tuple[float, float] = (1.0, 1.0),
    which: str = "all",
) -> None:
    """Everything that enters the batch for these rows and replies; the bank holds the prototypes of ``earlier``."""
    own, bank = ([evidence(oracle, row, which) for row in some] for some in (rows, earlier))
    for place, row, part, b in places(rows, micro):
        expected = batch_oracle.advantages(batch_oracle.rewards(texts[place], row, weights))
        np.testing.assert_allclose(part.advantages_BG[b].numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=row["id"])
        answers = batch_oracle.answers(texts[place], row, oracle.tokenizer)
        size = part.answers_BYS.shape[-1]
        for y in range(part.answers_BYS.shape[1]):
            ids, content = (answers[y].ids, answers[y].content) if y < len(answers) else ([], [])
            about = f"{row['id']}: answer {y}"
            assert part.answers_real_BYS[b, y].tolist() == [s < len(ids) for s in range(size)], about
            assert part.answers_BYS[b, y, : len(ids)].tolist() == ids, about
            assert part.content_BYS[b, y].nonzero()[:, 0].tolist() == content, about
        assert part.wrong_BY[b].tolist() == [y < len(answers) for y in range(1, part.answers_BYS.shape[1])]
        np.testing.assert_allclose(part.positive_BD[b].numpy(), own[place].vector, rtol=1e-4, atol=1e-5)
        drawn = part.negatives_BMD[b][part.valid_BM[b]].double().numpy()
        batch_oracle.check_negatives(place, own, bank, list(drawn), part.valid_BM.shape[1])
        assert not part.negatives_BMD[b][~part.valid_BM[b]].any()
        assert part.prompts_total == len(rows)


def evidence(oracle: Oracle, row: Json, which: str) -> Prototype:
    """``p`` of all boxes of a row, of its last, or of each latent's own."""
    given = row.get("boxes") or []
    if which == "all" or not given:
        found = oracle.prototype(row)
        return found if which != "per-slot" else Prototype(np.stack([found.vector] * K), found.pictures)
    if which == "last":
        return oracle.prototype(row | {"boxes": given[-1:]})
    each = [oracle.prototype(row | {"boxes": [given[t] if t < len(given) else given[-1]]}) for t in range(K)]
    return Prototype(np.stack([one.vector for one in each]), each[0].pictures)


def check_step(
    bench: Bench, step: int, micro: list[Any], weights: tuple[float, float] = (1.0, 1.0), which: str = "all"
) -> None:
    rows = bench.rows(step)
    earlier = [row for before in range(step) for row in bench.rows(before)]
    assert all(part.valid_BM.shape[1] == NEGATIVES for part in micro)
    check_batch(bench.oracle, rows, [TEXTS[row["id"]] for row in rows], earlier, micro, weights, which)


@pytest.mark.parametrize("method", METHODS)
def test_the_batch_is_the_oracles(bench: Bench, method: str, tmp_path: Path) -> None:
    task = bench.task(method, tmp_path)
    for step in range(len(bench.names)):
        micro = bench.batch(step, task)
        check_step(bench, step, micro)
        saved = [rolled["latents"] for rolled in bench.rollouts(step, task)]
        assert all(torch.equal(part.latents_BKD, latents) for part, latents in zip(micro, saved, strict=True))


def test_other_reward_weights(bench: Bench, tmp_path: Path) -> None:
    task = bench.task("realvr", tmp_path, rewards={"accuracy": 2.0, "format": 0.5})
    check_step(bench, 1, bench.batch(1, task), (2.0, 0.5))


@pytest.mark.parametrize("which", ["last", "per-slot"])
def test_other_boxes_as_evidence(bench: Bench, which: str, tmp_path: Path) -> None:
    """Positives and negatives alike; every step meets rows with several boxes, and the bank holds what came before."""
    task = bench.task("realvr", tmp_path, evidence_boxes=which)
    for step in range(len(bench.names)):
        micro = bench.batch(step, task, bank=task.bank.state_dict())  # of the earlier steps, with such evidence too
        check_step(bench, step, micro, which=which)


def test_replies_that_were_really_sampled(trained: Path, data: Path, tmp_path: Path) -> None:
    """Nothing scripted: a model after Stage 1 answers in the right form, and not always rightly."""
    rows = {row["id"]: row for row in map(json.loads, data.read_text().splitlines())}
    raw = stage_runs.configure("rl", trained, data, tmp_path, group=6, max_new=24, updates_per_rollout=2)
    task, _, _ = stage_runs.make("rl", raw)
    micro = task.collect(0).microbatches
    saved = [group for rolled in task.state_dict()["rollouts"] for group in rolled["completions"]]
    texts = [[one["text"] for one in group] for group in saved]
    shown = [rows[name] for part in micro for name in part.names]
    check_batch(Oracle(trained, data.parent), shown, texts, [], micro)
    found = [batch_oracle.rewards(group, row) for group, row in zip(texts, shown, strict=True)]
    assert any(len(set(group)) > 1 for group in found), "some replies are better than others"
    assert any(part.wrong_BY.any() for part in micro), "and some answer wrongly"


def test_every_method_is_known_to_the_oracle() -> None:
    assert set(METHODS) == {method.name for method in TRAINED if method.stage == "rl"} - {"custom"}


def test_the_rows_tell_mistakes_apart(bench: Bench) -> None:
    """A guard: each rule that a batch could break makes a difference in these rows."""
    rewards = {name: batch_oracle.rewards(TEXTS[name], row) for name, row in DATA.items()}
    assert rewards["options"] == [2, 2, 1, 1, 1] and rewards["number"] == [2, 1, 2, 1, 0]
    assert rewards["no reply"] == [0] * 5 and rewards["swapped"] == [2] * 5
    wrong = {
        name: [one.text for one in batch_oracle.answers(TEXTS[name], row, bench.oracle.tokenizer)[1:]]
        for name, row in DATA.items()
    }
    assert (
        wrong["options"] == ["C"] and wrong["number"] == ["0.25", "2"] and wrong["swapped"] == wrong["no reply"] == []
    )
    assert wrong["words"] == ["two gray circles", "a square"] and wrong["turned"] == ["4", "four", "-3"]
    own = {name: bench.oracle.prototype(row) for name, row in DATA.items()}
    assert own["options"].pictures == own["same picture"].pictures == own["turned"].pictures
    for name in ("swapped", "two turns", "thin box"):
        other = bench.oracle.prototype(DATA[name] | {"boxes": []}).vector
        assert not np.allclose(own[name].vector, other, rtol=1e-2), "the box matters"


def test_the_oracle_knows_nothing_of_the_package() -> None:
    tree = ast.parse(Path(batch_oracle.__file__).read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names |= {str(n.args[0].value) for n in ast.walk(tree) if isinstance(n, ast.Call) and _imports(n)}
    assert names and not [
        name for name in names if name.split(".")[0] in ("realvr", "tests", "reference", "naive_stage2")
    ]
    assert "realvr" not in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}


def _imports(call: ast.Call) -> bool:
    """Whether a call imports a module by a name that is written there."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name in ("import_module", "__import__") and bool(call.args) and isinstance(call.args[0], ast.Constant)


# ---------------------------------------------------------------------- the step


def example(bench: Bench, row: Json, part: Any, b: int, group: list[Json]) -> naive.Example:
    """The oracle's batch for the naive reference; of ours only the prompt, and which negatives chance has drawn."""
    oracle = bench.oracle
    answers = batch_oracle.answers(TEXTS[row["id"]], row, oracle.tokenizer)
    first = sum(len(oracle.shown(DATA[name])) for name in part.names[:b])
    images = part.batch.images[first : first + len(oracle.shown(row))]
    grids = [image.grid for image in images]
    merge = getattr(oracle.processor, "merge_size", None)
    return naive.Example(
        prompt=part.batch.ids_BT[b][part.batch.real_BT[b]],
        completions=[torch.tensor(one["ids"]) for one in group],
        latents=part.latents_BKD[b],
        advantages=batch_oracle.advantages(batch_oracle.rewards(TEXTS[row["id"]], row)),
        old_logp=[torch.tensor(one["logprobs"]) for one in group],
        answers=[torch.tensor(one.ids) for one in answers],
        content=[torch.tensor([j in one.content for j in range(len(one.ids))]) for one in answers],
        positive=torch.from_numpy(oracle.prototype(row).vector).float(),
        negatives=list(part.negatives_BMD[b][part.valid_BM[b]]),
        pixels=torch.cat([image.pixels for image in images]),
        grid_thw=torch.tensor([[1, g.rows * merge, g.cols * merge] for g in grids]) if merge else None,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bench", ["qwen2.5-vl"], indirect=True)
def test_the_step_on_this_batch_is_the_papers(bench: Bench, method: str, tmp_path: Path) -> None:
    """From data rows and texts to loss and gradients: the oracle's batch through the naive reference."""
    task = bench.task(method, tmp_path)
    micro = bench.batch(1, task)
    changes = {name: value for name, value in METHODS[method].items() if name != "latents"}
    options = naive.Options(temperature=1.0, max_new=task.config.max_new, **changes)
    markers = naive.Markers(*vars(task.backbone.markers).values())
    stock = naive_model(bench, task)
    groups = [group for rolled in bench.rollouts(1, task) for group in rolled["completions"]]
    examples = [example(bench, row, part, b, groups[place]) for place, row, part, b in places(bench.rows(1), micro)]
    right = naive.Naive(stock, markers, options, task.backbone.forbidden_ids().tolist()).run(examples)
    loss = sum(task.module(part)[0] for part in micro)
    assert float(loss.detach()) == pytest.approx(float(right.loss.detach()), rel=1e-4)
    found, wanted = gradients(task.backbone.model, loss), gradients(stock, right.loss)
    scale = sum(float(g.square().sum()) for g in wanted.values()) ** 0.5
    assert scale > 0
    assert sum(float((found[n] - g).square().sum()) for n, g in wanted.items()) ** 0.5 <= 1e-3 * scale


def naive_model(bench: Bench, task: Any) -> Any:
    """A stock model with the weights that the task trains."""
    from reference import load

    stock = load(bench.plain if task.name == "direct" else bench.marked)
    if task.name == "direct":  # markers were added when it was loaded
        stock.resize_token_embeddings(task.backbone.model.get_input_embeddings().weight.shape[0])
        stock.load_state_dict(task.backbone.model.state_dict())
    return stock
