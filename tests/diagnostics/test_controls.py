"""Controls of the latents: every condition against stock models over whole sequences, the summary, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE, difference, tolerance
from pair_reference import greedy, question
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import Sample
from realvr.diagnostics import Samples, Shown
from realvr.diagnostics.controls import ControlsTest
from realvr.diagnostics.controls_summary import CONDITIONS, condition_of, summarise_controls
from realvr.diagnostics.measuring.controls import Bench, ControlOptions, control_records
from realvr.diagnostics.measuring.replacing import Replacing
from realvr.diagnostics.model import Model
from realvr.evaluation.ablation import matched_noise
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling
from realvr.latent.span import score
from realvr.widgets import tables_of
from realvr.world.splits import Recipe, samples

K, NEW = 3, 2
DECODED = ("noise", "dummies", "image-hidden", "latents-only")
OPTIONS = ControlOptions(tuple(CONDITIONS), ". ?", sampling=Sampling(temperature=0.0, max_new=NEW))


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def trails(count: int) -> list[Sample]:
    return list(samples(Recipe("trails", seed=3, count=count)))


def model_of(backbone: Backbone, latents: int = K) -> Model:
    return Model(ModelResponder(backbone, OPTIONS.sampling), latents)


# ---------------------------------------------------------------------- stock forwards


@contextmanager
def veiled(stock: Any, hidden_TT: Tensor | None) -> Iterator[None]:
    """Stock attention that also hides these (query, key) pairs: added to the mask that the stock code made."""
    if hidden_TT is None:
        yield
        return

    def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs["attention_mask"]
        assert mask is not None and mask.dtype.is_floating_point
        size = mask.shape[-1]
        least = torch.finfo(mask.dtype).min
        return args, kwargs | {"attention_mask": mask.masked_fill(hidden_TT[:size, :size], least)}

    layers = stock.model.language_model.layers
    hooks = [layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def hidden_pairs(sequence: reference.Sequence, queries: Sequence[int], more: int = 20) -> Tensor:
    """(query, key) pairs with a query among these columns, or among further ones, and a visual token as the key."""
    length = sequence.ids.shape[1]
    pairs = torch.zeros(length + more, length + more, dtype=torch.bool, device=DEVICE)
    image = torch.nn.functional.pad(sequence.image[0], (0, more))
    for query in (*queries, *range(length, length + more)):
        pairs[query] = image
    return pairs


def references(pair: Any, begun: reference.Sequence, own_KD: Tensor, given: dict[str, Tensor]) -> dict[str, Any]:
    """The sequence under each condition, and the pairs that are hidden in it."""
    markers = pair.ours.markers
    spliced = pair.splice(begun, own_KD[None])
    both = pair.column(1, markers.start), pair.column(1, markers.end)
    end = spliced.ids.shape[1] - 1
    text = [c for c in range(begun.ids.shape[1]) if not bool(begun.image[0, c])]
    dots = pair.ours.tokenizer(". ?", add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[dots[place % len(dots)] for place in range(K)]], device=DEVICE)
    dummies_KD = pair.stock.model.get_input_embeddings()(ids)[0]
    found: dict[str, Any] = {
        "free": (spliced, None),
        "sham": (spliced, None),
        "repeated": (pair.splice(begun, own_KD.mean(0).expand(1, K, -1)), None),
        "dummies": (pair.splice(begun, dummies_KD[None]), None),
        "removed": (reference.append(pair.stock, begun, torch.cat(both, dim=1)), None),
        "no-span": (begun, None),
        "image-hidden": (spliced, hidden_pairs(spliced, [end])),
        "latents-only": (spliced, hidden_pairs(spliced, [*text, end])),
    }
    return found | {name: (pair.splice(begun, span[None]), None) for name, span in given.items()}


def test_every_condition_is_the_stock_model_on_that_span(pair: Any) -> None:
    """Hidden states behind the span, log-probabilities of what follows, and replies, of two questions in one batch."""
    chosen = trails(2)
    model = model_of(pair.ours)
    replacing = Replacing(model, chosen)
    reading = model.read(chosen)
    records = control_records(pair.ours, reading, replacing, OPTIONS)
    bench = Bench(pair.ours, reading, replacing, OPTIONS)
    begun = [pair.begin([pair.ours.prompt([question(sample)])]) for sample in chosen]
    own = [pair.think(sequence, K)[1][0] for sequence in begun]
    ids = pair.ours.tokenizer("<answer>B</answer>", add_special_tokens=False)["input_ids"]
    follow = torch.tensor([ids], device=DEVICE)
    states = {name: bench.state(name) for name in CONDITIONS}
    logps = {name: score(pair.ours, state, follow.expand(2, -1)[:, None])[0][:, 0] for name, state in states.items()}
    for row, (sample, record) in enumerate(zip(chosen, records, strict=True)):
        noise = matched_noise(own[row].cpu(), 0, sample.id).to(own[row])
        assert torch.allclose(noise.norm(dim=-1), own[row].norm(dim=-1), rtol=1e-3)
        given = {"noise": noise, "another": own[1 - row], "position-mean": (own[0] + own[1]) / 2}
        sequences = references(pair, begun[row], own[row], given)
        assert set(sequences) == set(CONDITIONS) == set(record["texts"]) and record["donor"] == chosen[1 - row].id
        last = {}
        for name, (sequence, hidden_TT) in sequences.items():
            with veiled(pair.stock, hidden_TT):
                whole = reference.hidden(pair.stock, reference.append(pair.stock, sequence, follow))[0]
                said = greedy(pair, sequence, NEW) if row == 0 and name in DECODED else None
            before, last[name] = whole[-len(ids) - 1 : -1], whole[-len(ids) - 1]
            right = pair.stock.lm_head(before).log_softmax(-1).gather(-1, follow[0][:, None])[:, 0]
            assert difference(states[name].last_BD[row], last[name]) < tolerance(1e-4), name
            assert difference(logps[name][row], right) < tolerance(1e-4), name
            assert said is None or record["texts"][name] == pair.ours.tokenizer.decode(said), name
        for name in CONDITIONS:  # a guard of the above: the conditions are far apart
            if name not in ("free", "sham"):
                assert difference(last[name], last["free"]) > 30 * tolerance(1e-4), name


def test_a_latent_span_of_one(build_tiny: Callable[[str], Path]) -> None:
    """K = 1: the own mean is the latent itself, and nothing else breaks."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    model = model_of(backbone, 1)
    chosen = trails(2)
    test = ControlsTest.configure({})
    test.prepare(model, chosen)
    records = list(test.measure(model, Samples(chosen)))
    assert all(record["texts"]["repeated"] == record["texts"]["free"] for record in records)
    assert summarise_controls(records, ".", 0)["latents"] == 1


def test_what_a_question_does_not_have_is_left_out(build_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a picture nothing can be hidden; a question alone has no other to take latents from."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    model = model_of(backbone)
    (shown,) = trails(1)
    blind = Sample.ask("words", [], "Two and two?", "4")
    test = ControlsTest.configure({"conditions": ("another", "image-hidden", "latents-only")})
    test.prepare(model, [shown])
    (alone,) = test.measure(model, Samples([shown]))
    assert set(alone["texts"]) == {"free", "image-hidden", "latents-only"} and alone["donor"] is None
    test.prepare(model, [shown, blind])
    first, second = test.measure(model, Samples([shown, blind]))
    assert set(second["texts"]) == {"free", "another"} and second["donor"] == shown.id
    assert set(first["texts"]) == {"free", "another", "image-hidden", "latents-only"}
    summary = test.summarise([first, second])
    hidden = condition_of(summary, "image-hidden")
    assert hidden is not None and hidden["questions"] == 1 and summary["guessing"]["pairs"] == 1
    (note,) = [line for line in test.notes([first, second], summary, 2) if "image hidden" in line]
    assert "1 of 2 questions do not have it" in note


# ---------------------------------------------------------------------- the summary


def record(id: str, truth: str, group: str = "", **said: str | None) -> dict[str, Any]:
    extracted = {name.replace("_", "-"): answer for name, answer in said.items()}
    texts = {name: f"<answer>{answer}</answer>" for name, answer in extracted.items()}
    return {"id": id, "latents": 4, "truth": truth, "choices": ["red", "blue", "pink", "gray"]} | {
        "extracted": extracted,
        "texts": texts,
        "group": group,
        "error": None,
    }


def test_the_summary_by_hand() -> None:
    records = [
        record("1", "A", free="A", sham="A", another="B", no_span=None),
        record("2", "B", free="B", sham="B", another="B", no_span="B"),
        record("3", "C", free="D", sham="D", another="C", no_span=None),
        record("4", "D", free=None, sham=None, another="A", no_span="A"),
        {"id": "5", "error": "gone.png: no such file"},
    ]
    records[3]["texts"]["sham"] = "something else"
    summary = ControlsTest().summarise(records)
    found = {one["condition"]: one for one in summary["conditions"]}
    assert list(found) == ["free", "sham", "another", "no-span"] and summary["questions"] == 4
    assert summary["errors"] == 1 and summary["guessing"]["mean"] == 0.25
    assert summary["sham"]["equal_replies"]["count"] == 3
    free, another, none = found["free"], found["another"], found["no-span"]
    assert (free["accuracy"]["count"], free["readable"]["count"], free["accuracy"]["of"]) == (2, 3, 4)
    assert free["accuracy_readable"]["rate"] == 2 / 3
    assert (another["accuracy"]["count"], another["readable"]["rate"]) == (2, 1.0)
    assert another["difference"]["mean"] == 0.0 and another["difference"]["low"] < 0 < another["difference"]["high"]
    assert (another["changed"]["count"], another["changed"]["of"]) == (2, 3)
    assert (none["accuracy"]["count"], none["readable"]["count"]) == (1, 2) and none["difference"]["mean"] == -0.25
    assert (none["changed"]["count"], none["changed"]["of"]) == (0, 1)
    assert [line for line in ControlsTest().notes(records, summary, 5) if "1 of 4 replies change" in line]


def test_groups_by_a_tag() -> None:
    """Sorted as numbers; a question without the tag counts in the whole only."""
    records = [
        record("1", "A", "10", free="A", another="B"),
        record("2", "A", "2", free="A"),
        record("3", "A", "2", free="B"),
        record("4", "A", free="A", another="A"),
    ]
    summary = ControlsTest.configure({"by": "steps"}).summarise(records)
    assert list(summary["groups"]) == ["2", "10"] and summary["by"] == "steps"
    (free,) = summary["groups"]["2"]
    assert (free["accuracy"]["count"], free["accuracy"]["of"]) == (1, 2)
    assert [one["condition"] for one in summary["groups"]["10"]] == ["free", "another"]
    table = list(tables_of(ControlsTest().drawn([Shown("a model", summary)])))[-1]
    assert list(table.header) == ["arm", "span", "2", "10"] and [len(row) for row in table.rows] == [4, 4]
    assert getattr(table.rows[1][2], "text", None) == "–"


def test_nothing_right_everything_right_nothing_at_all() -> None:
    """No NaN in any of them; a rate without a denominator is null."""
    wrong = [record(str(n), "A", free="B", another=None) for n in range(3)]
    right = [record(str(n), "A", free="A", another="A") for n in range(3)]
    for records in (wrong, right, [], [{"id": "1", "error": "broken"}]):
        summary = ControlsTest().summarise(records)
        json.dumps(summary, allow_nan=False)
        assert ControlsTest().drawn([Shown("a model", summary), Shown("another", summary, 1)])
    figure = ControlsTest().figure([Shown("a model", summary)])
    assert figure is not None and [axes.texts[0].get_text() for axes in figure.axes] == ["none", "none"]
    another = condition_of(ControlsTest().summarise(wrong), "another")
    assert another is not None and another["accuracy_readable"]["rate"] is None and another["changed"]["of"] == 0


def test_the_figure_has_bars_marks_and_both_models() -> None:
    summary = ControlsTest().summarise([record("1", "A", free="A", sham="A", another="B", no_span=None)])
    figure = ControlsTest().figure([Shown("one", summary), Shown("two", summary, 1)])
    assert figure is not None
    above, below = figure.axes
    assert len(above.patches) == len(below.patches) == 2 * 4
    levels = [line.get_segments()[0][0][1] for line in above.collections if len(line.get_segments()) == 1][-8:]
    assert sorted(levels) == [0, 0, 100, 100, 100, 100, 100, 100]  # only without a span nothing can be read
    words = [text.get_text() for text in above.get_legend().get_texts()]
    assert {"one", "two", "readable", "guessing"} <= set(words)
    assert [label.get_text() for label in below.get_xticklabels()] == [
        CONDITIONS[name] for name in ("free", "sham", "another", "no-span")
    ]


def test_the_panel_of_a_case() -> None:
    panel = ControlsTest().panel(record("1", "A", free="A", another=None))
    assert panel is not None
    (facts,) = panel.parts
    assert facts.as_json()["rows"][0][:2] == ["own latents", "A"] and facts.as_json()["rows"][1][1] == "–"
    assert ControlsTest().panel({"id": "1", "error": "broken"}) is None


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [("--conditions", "thoughts", "there is no 'thoughts'"), ("--dummy", "", "--dummy is empty")],
)
def test_settings_that_mean_nothing_are_refused(
    option: str, value: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(iter(trails(1)), "jsonl", tmp_path / "data.jsonl")
    command = ["diagnose", "controls", "mini", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*command, option, value, "--device", "cpu"]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "out" / "controls.jsonl").exists()


def test_a_run_of_the_packaged_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its answers come from the latents; a model without a span is refused."""
    write(iter(trails(12)), "jsonl", tmp_path / "data.jsonl")
    command = ["diagnose", "controls", "mini", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*command, "--conditions", "sham", "another", "latents-only", "--device", "cpu"]) == 0
    summary = json.loads((tmp_path / "out" / "controls.json").read_text())
    found = {one["condition"]: one for one in summary["conditions"]}
    assert found["free"]["accuracy"]["count"] >= 10 and found["sham"]["changed"]["count"] == 0
    assert found["another"]["changed"]["count"] >= 6 and found["another"]["readable"]["rate"] == 1
    assert found["latents-only"]["accuracy"]["count"] >= 10
    assert (tmp_path / "out" / "controls.svg").stat().st_size and (tmp_path / "out" / "controls.png").stat().st_size
    capsys.readouterr()
    assert main([*command[:2], "mini-base", *command[3:], "--device", "cpu"]) == 2
    assert "no trained latent span" in capsys.readouterr().err
