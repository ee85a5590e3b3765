"""Stage 1 (LVR-SFT) as a task for the loop: packed rows from the mixture, teacher-forced evidence in the slots."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from realvr.backbone.backbone import Backbone
from realvr.backbone.loading import trained_latents
from realvr.data.mixture import Mixture
from realvr.data.packing import PackedStream
from realvr.data.sample import Sample
from realvr.data.wording import response_text, spelled_out
from realvr.errors import UserError
from realvr.training.adapters import Adapters
from realvr.training.dropping import ENOUGH, over, too_many
from realvr.training.examples import Encoder, all_of, share_of_batch
from realvr.training.sft_step import SftBatch, SftExample, SftStep, pack_rows
from realvr.training.sources import TrainingData, training_data
from realvr.training.task import Collected, Ranks

FEW_BOXES = 0.1
"""Share of rows with evidence boxes below which a notice is printed."""
WINDOW = 64  # examples considered together when rows are packed; their pixels are in memory meanwhile


class _Encoded:
    """The mixture, encoded on the way; resumes where the mixture does."""

    def __init__(self, samples: Mixture[Sample], encoder: Encoder, settings: Any) -> None:
        self.samples = samples
        self.encoder = encoder
        self.settings = settings

    def __iter__(self) -> Iterator[SftExample]:
        fruitless, draws = 0, self.encoder.draws
        for sample in self.samples:
            draws.drawn += 1
            example = self.encoder.sequence(sample)
            if example is not None:
                fruitless = 0
                yield example
                continue
            fruitless += 1
            lost = fruitless >= ENOUGH and over(draws, self.settings.data.max_dropped)
            if lost or fruitless > self.samples.epoch_size:
                raise too_many(draws, self.settings, f"after {fruitless:,} rows without a usable one")

    def state_dict(self) -> dict[str, Any]:
        # With the counts: rows of a window that is filled again after a kill are drawn again too.
        return {**self.samples.state_dict(), "counts": self.encoder.draws.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples.load_state_dict(state)
        if "counts" in state:  # not in checkpoints of earlier versions
            self.encoder.draws.load_state_dict(state["counts"])


class SftTask:
    """One optimizer step is ``optim.batch`` packed rows, dealt out over the ranks; packing is done by each rank."""

    term_names = ("next_token", "reconstruction")

    def __init__(self, backbone: Backbone, settings: Any, ranks: Ranks, data: TrainingData) -> None:
        self.backbone, self.settings, self.ranks, self.data = backbone, settings, ranks, data
        self.share = share_of_batch(settings, ranks)
        self.adapters = Adapters(backbone, settings.lora, markers=backbone.latents > 0)
        self.module = SftStep(
            backbone,
            settings.reconstruction_weight,
            settings.reconstruction_reduction,
            settings.gradient_checkpointing,
        )
        backbone.spell_out = settings.spell_out
        respond = spelled_out if settings.spell_out else response_text
        self.encoder = Encoder(backbone, settings.pack_tokens, settings.data.keep_encoded, respond)
        self.draws = self.encoder.draws
        self.samples = data.mixture(settings, ranks.rank, ranks.world)
        self.stream = PackedStream(_Encoded(self.samples, self.encoder, settings), len, settings.pack_tokens, WINDOW)
        self._rows: Iterator[Any] | None = None

    def collect(self, step: int) -> Collected:
        optim = self.settings.optim
        if self._rows is None:
            if self.settings.data.workers and not self.encoder.kept:
                self.encoder.encode_all(all_of(self.samples), self.settings.data.workers, sequences=True)
            self._rows = iter(self.stream)
        rows = [next(self._rows).items for _ in range(self.share)]
        generator = torch.Generator().manual_seed((self.settings.run.seed * 1_000_003 + step) * 4099 + self.ranks.rank)
        micro = [
            pack_rows(
                self.backbone,
                rows[i : i + optim.microbatch],
                jitter=self.settings.position_jitter,
                hidden_ratio=self.settings.hide_image_ratio,
                generator=generator,
            )
            for i in range(0, len(rows), optim.microbatch)
        ]
        own = (sum(len(m.labels_M) for m in micro), sum(len(m.slot_example_N.unique()) for m in micro))
        tokens, targets = (float(sum(values)) for values in zip(*self.ranks.gather_objects(own), strict=True))
        for batch in micro:
            batch.tokens_total, batch.targets_total = max(tokens, 1.0), max(targets, 1.0)
            batch.to(self.backbone.device)
        return Collected(micro, self._metrics(micro))

    def _metrics(self, micro: list[SftBatch]) -> Any:
        device = self.backbone.device
        one = torch.ones((), device=device)
        used = torch.tensor(float(sum(int(batch.real_RT.sum()) for batch in micro)), device=device)
        room = torch.tensor(float(sum(batch.real_RT.numel() for batch in micro)), device=device)
        examples = torch.tensor(float(sum(batch.examples for batch in micro)), device=device)
        return {
            "data/row_fill": (used, room),
            "data/examples_per_rank": (examples, one),
            **self.draws.metrics(device, self.ranks.world),
            "tokens": (used, one / self.ranks.world),
        }

    def after_update(self) -> None:
        """Nothing moves with the parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self._rows = None

    def export(self, directory: Path) -> None:
        self.adapters.export(self.backbone, directory)

    def close(self) -> None:
        """Nothing goes on behind this task's back."""


def build_task(settings: Any, ranks: Ranks) -> SftTask:
    """Load the model that ``settings`` names and make its Stage-1 task."""
    data = training_data(settings, ranks)  # first: files that cannot be used must not cost the loading of a model
    _check_evidence(settings, data, ranks)
    return SftTask(load_backbone(settings, ranks), settings, ranks, data)


def _check_evidence(settings: Any, data: TrainingData, ranks: Ranks) -> None:
    """Latents learn from rows with evidence boxes alone: refuse data without any, warn where there are few."""
    chosen = settings.model.latents
    if chosen == 0 or (chosen is None and trained_latents(settings.model.path) == 0):  # Direct-SFT: no span
        return
    sources = [found for found, source in zip(data.census.sources, settings.data.sources, strict=True) if source.weight]
    boxes, rows = (sum(getattr(found, name) for found in sources) for name in ("with_boxes", "usable"))
    if not boxes and not settings.allow_no_evidence:
        raise UserError(
            f"none of the {rows:,} rows of {', '.join(found.path for found in sources)} has an evidence box, so the "
            "latents would learn nothing: add boxes (docs/data.md), train the control without latents "
            "(--model.latents 0), or go on all the same (--allow-no-evidence)"
        )
    if boxes < FEW_BOXES * rows and ranks.rank == 0:
        warnings.warn(
            f"{boxes:,} of {rows:,} rows ({boxes / rows:.1%}) have evidence boxes: the latents learn from these alone",
            stacklevel=2,
        )


def load_backbone(settings: Any, ranks: Ranks, announce: bool = True) -> Backbone:
    """The model of a ``ModelSettings`` on this rank's device. What the settings left to the checkpoint is filled in, so
    that the records of the run say what it was trained with."""
    model = settings.model
    if model.tf32:
        torch.set_float32_matmul_precision("high")
    backbone = Backbone.load(
        model.path,
        dtype=model.dtype,
        device=ranks.device,
        latents=model.latents,
        min_tokens=model.min_tokens,
        max_tokens=model.max_tokens,
        tiles=model.tiles,
        max_tiles=model.max_tiles,
        announce=announce and ranks.rank == 0,
    )
    found = backbone.processor.limits.note() | {"latents": backbone.latents}
    settings.model = model.model_copy(update=found)
    return backbone
