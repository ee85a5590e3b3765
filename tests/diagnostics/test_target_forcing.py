"""Target forcing: on small models of every family against stock models, its numbers by hand, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import reference
from helpers import difference, tolerance
from pair_cases import world_samples
from pair_reference import question
from realvr.data.boxes import prompt_boxes, target_tokens
from realvr.data.sample import Box, Sample
from realvr.diagnostics.forcing import Forcing, ForcingSettings
from realvr.diagnostics.measuring.targets import targets_of
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown
from realvr.errors import UserError
from realvr.evaluation.model_responder import ModelResponder
from realvr.imaging.types import Grid

K = 4


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def cases() -> list[Sample]:
    """A trail of three boxes, one box, and none."""
    trail, one, none = [sample for sample in world_samples(2) if sample.tags["view"] == "original"][:3]
    places = [(0.1, 0.1, 0.2, 0.2), (0.8, 0.8, 0.9, 0.9), (0.8, 0.1, 0.9, 0.2)]
    return [
        replace(trail, id="trail", boxes=[Box(0, xyxy) for xyxy in places]),
        replace(one, id="one", boxes=[Box(0, (0.05, 0.05, 0.95, 0.45))]),
        replace(none, id="none", boxes=[]),
    ]


def forced_by_stock(pair: Any, sample: Sample, targets_KD: torch.Tensor, count: int) -> torch.Tensor:
    """z_1 … z_K of the stock model, the first ``count`` replaced by their targets, one position at a time."""
    sequence = pair.begin([pair.ours.prompt([question(sample)])])
    sequence = reference.append(pair.stock, sequence, pair.column(1, pair.ours.markers.start))
    found = []
    for step in range(K):
        own = reference.hidden(pair.stock, sequence)[:, -1]
        z = targets_KD[None, step].to(own) if step < count else own
        found.append(z[0])
        sequence = reference.append(pair.stock, sequence, pair.column(1, pair.ours.markers.slot), embeds=z[:, None])
    return torch.stack(found)


def by_hand(pair: Any, sample: Sample) -> tuple[str, torch.Tensor]:
    """Targets as the guide words them."""
    (image,) = pair.ours.prompt([question(sample)]).images
    features = pair.ours.encode_images([image]).features_ND
    if not sample.boxes:
        return "image", features.mean(0, keepdim=True).expand(K, -1)
    if len(sample.boxes) > 1:
        tokens = []
        rows, cols = image.grid.rows * image.grid.tile_rows, image.grid.cols * image.grid.tile_cols
        for box in sample.boxes:  # the cell in which the centre lies, tile by tile
            x, y = (box.xyxy[0] + box.xyxy[2]) / 2, (box.xyxy[1] + box.xyxy[3]) / 2
            row, col = int(y * rows), int(x * cols)
            tile = (row // image.grid.rows) * image.grid.tile_cols + col // image.grid.cols
            inside = (row % image.grid.rows) * image.grid.cols + col % image.grid.cols
            tokens.append(tile * image.grid.rows * image.grid.cols + inside)
        return "boxes", features[[*tokens, tokens[-1]]]
    tokens = target_tokens([box.xyxy for box in sample.boxes], image.grid).tolist()
    return "evidence", features[[*tokens[:K], *[tokens[-1]] * (K - len(tokens))]]


def test_schedules_are_those_of_the_stock_model(pair: Any) -> None:
    """Three kinds of targets in one batch; every latent of every schedule, and nothing is left to err with all of them
    forced."""
    chosen = cases()
    model = Model(ModelResponder(pair.ours), K)
    records = {record["id"]: record for record in Forcing().measure(model, Samples(chosen))}
    for sample in chosen:
        kind, targets = by_hand(pair, sample)
        record = records[sample.id]
        assert record["error"] is None and record["target"] == kind
        assert list(record["schedules"]) == ["0", "1", "2", "4"]
        assert record["schedules"]["4"]["mse"] == [0.0] * K
        assert record["schedules"]["4"]["cosine"] == pytest.approx([1.0] * K)
        for count in (0, 2) if sample.id == "trail" else (2,):
            z = forced_by_stock(pair, sample, targets, count).double()
            right, found = targets.double(), record["schedules"][str(count)]
            assert found["mse"] == pytest.approx((z - right).square().mean(-1).tolist(), abs=tolerance(2e-4), rel=1e-3)
            cosine = torch.nn.functional.cosine_similarity(z, right, dim=-1)
            assert found["cosine"] == pytest.approx(cosine.tolist(), abs=tolerance(2e-5))
            assert found["mse"][:count] == [0.0] * count and min(found["mse"][count:]) > 0
        if kind == "image":
            assert found["nearest"] == [None] * K and record["others"] is None
        else:
            assert found["nearest"][:2] == [True, True]
        sequence = pair.splice(pair.begin([pair.ours.prompt([question(sample)])]), targets[None])
        before = reference.hidden(pair.stock, sequence)[0, -K - 2 : -2].double()
        told = torch.tensor(record["predicted"]["mse"])
        assert difference(told, (before - targets.double()).square().mean(-1)) < tolerance(1e-3)


def scores(mse: list[float], cosine: list[float], nearest: list[bool | None]) -> dict[str, Any]:
    return {"mse": mse, "cosine": cosine, "nearest": nearest}


def record(name: str, free: list[float], forced: list[float], kind: str = "boxes", cut: bool = False) -> dict[str, Any]:
    hits: list[bool | None] = [value > 0.5 for value in free]
    schedules = {
        "0": scores([1 - value for value in free], free, hits),
        "1": scores([1 - value for value in forced], forced, [True, *hits[1:]]),
        "2": scores([0.0, 0.0], [1.0, 1.0], [True, True]),
    }
    more = {"distinct": 2, "cut": cut, "predicted": schedules["0"], "others": 0.1}
    return {"id": name, "target": kind, "schedules": schedules, **more, "error": None}


def test_numbers_by_hand_and_kinds_of_targets_apart() -> None:
    """Forcing raises the cosine over all latents by itself; the rest tells whether it helps."""
    records = [record("1", [0.2, 0.4], [1.0, 0.6]), record("2", [0.0, 0.6], [1.0, 0.4], cut=True)]
    records += [record("3", [0.9, 0.9], [1.0, 0.9], "image"), {"id": "4", "error": "gone"}]
    summary = Forcing().summarise(records)
    assert summary["errors"] == 1 and summary["latents"] == 2 and set(summary["targets"]) == {"boxes", "image"}
    free, one, both = summary["targets"]["boxes"]["schedules"]
    assert [row["forced"] for row in (free, one, both)] == [0, 1, 2]
    assert free["cosine"]["mean"] == pytest.approx(0.3) and one["cosine"]["mean"] == pytest.approx(0.75)
    assert one["rest_cosine"]["mean"] == pytest.approx(0.5) == one["rest_free_cosine"]["mean"]
    assert one["rest_free_nearest"]["mean"] == 0.5 and one["nearest"]["mean"] == 0.75
    assert both["rest_cosine"]["mean"] is None and both["mse"]["mean"] == 0 and both["cosine"]["mean"] == 1
    assert [step["mean"] for step in free["steps"]] == pytest.approx([0.1, 0.5])
    told = "\n".join(Forcing().notes(records, summary, 4))
    assert "1 questions have no evidence boxes: their target is the mean of all visual tokens" in told
    assert "1 of 2 questions have more boxes than 2 latents" in told
    table = Forcing().side_by_side([Shown("m", summary)])
    assert "the mean of all visual tokens: no boxes" in table and "free-running" in table
    panel = Forcing().panel(records[0])
    assert panel is not None and len(panel.parts) == 2 and Forcing().panel(records[-1]) is None


def test_the_figure_has_three_panels_with_lines_and_nothing_gives_none() -> None:
    summary = Forcing().summarise([record("1", [0.2, 0.4], [1.0, 0.6]), record("2", [0.0, 0.6], [1.0, 0.4])])
    figure = Forcing().figure([Shown("a", summary), Shown("b", summary, 1)])
    assert figure is not None and [len(ax.lines) for ax in figure.axes] == [6, 6, 4]
    nothing = Forcing().summarise([{"id": "1", "error": "gone"}])
    assert nothing == {"latents": 0, "targets": {}, "errors": 1} and Forcing().figure([Shown("a", nothing)]) is None
    assert Forcing().drawn([Shown("a", nothing)])


def test_how_many_are_forced() -> None:
    def counts(latents: int, forced: str | None = None) -> tuple[int, ...]:
        return Forcing(ForcingSettings(forced=forced)).counts(latents)

    assert counts(16) == (4, 8, 16) and counts(8) == (2, 4, 8) and counts(3) == (1, 3) and counts(1) == (1,)
    assert counts(8, "3,1") == (1, 3)
    with pytest.raises(UserError, match="--forced 9: at most K = 8"):
        Forcing(ForcingSettings(forced="4,9")).settle(Model(None, 8))  # type: ignore[arg-type]
    for wrong in ("0", "two", "1.5"):
        with pytest.raises(UserError, match="--forced"):
            Forcing.configure({"forced": wrong})


def test_more_evidence_than_latents_is_cut_and_counted_and_no_picture_is_refused() -> None:
    class Shows:
        """A prompt as targets need it."""

        def __init__(self, *grids: Grid) -> None:
            self.images = [type("Image", (), {"grid": grid}) for grid in grids]

    trail, one, _ = cases()
    features = torch.arange(32.0).reshape(16, 2)
    found = targets_of(trail, Shows(Grid(4, 4)), features, 2, "auto")  # type: ignore[arg-type]
    assert found.cut and found.tokens == [0, 3]  # thinned to the first and the last
    found = targets_of(one, Shows(Grid(4, 4)), features, 3, "auto")  # type: ignore[arg-type]
    assert found.cut and found.tokens == [0, 1, 2] and found.kind == "evidence"
    assert np.array_equal(found.vectors_KD.numpy(), features[:3].numpy())
    found = targets_of(trail, Shows(Grid(4, 4)), features, 4, "evidence")  # type: ignore[arg-type]
    assert found.tokens == [0, 3, 15, 15] and found.distinct == 3
    assert len(prompt_boxes(trail)) == 3
    with pytest.raises(UserError, match="no picture"):
        targets_of(
            replace(one, boxes=[], images=[], turns=[replace(one.turns[0], images=())]), Shows(), features, 2, "auto"
        )  # type: ignore[arg-type]
