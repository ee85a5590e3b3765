"""What every Stage-1 method has: packed rows from the mixture, adapters, and a state that survives a kill."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from realvr.backbone.automatic import is_on
from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.loading import DEFAULT_LATENTS, trained_latents
from realvr.data.mixture import Mixture
from realvr.data.packing import PackedStream
from realvr.data.sample import Sample
from realvr.data.wording import response_text, spelled_out
from realvr.errors import UserError
from realvr.imaging.types import ImageInput
from realvr.training import lanes
from realvr.training.adapters import Adapters
from realvr.training.dropping import ENOUGH, Draws, over, too_many
from realvr.training.examples import Encoder, all_of
from realvr.training.features import KeptFeatures
from realvr.training.lanes import Lane
from realvr.training.method import Method, Run
from realvr.training.metrics import on_device
from realvr.training.sections import Automatic
from realvr.training.settings import SftSettings, TrainSettings
from realvr.training.sft_batch import SftBatch, SftExample, pack_rows
from realvr.training.sources import TrainingData
from realvr.training.targets import EvidenceConfig, refusal
from realvr.training.task import Metrics, Ranks

FEW_BOXES = 0.1
"""Share of rows with evidence boxes below which a notice is printed."""
WINDOW = 64  # examples considered together when rows are packed; their pixels are in memory meanwhile


class PackedConfig(EvidenceConfig):
    """Packed rows."""

    may_change: ClassVar[tuple[str, ...]] = ("gradient_checkpointing", "variable_length", "allow_no_evidence")
    pack_tokens: int = Field(default=4096, ge=1)
    """Length of a packed row; no example is longer."""
    position_jitter: int = Field(default=0, ge=0)
    """Largest random gap in the position ids around the latent span, so that another K works at inference. Not in the
    paper; 0 is off."""
    hide_image_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of examples whose text cannot see the image, so that answers must be read from the latents. Not in the
    paper; 0 is off."""
    spell_out: bool = False
    """Multiple choice: teach the answer in words before its letter, as base training does. Small models name what they
    see before they can match it with an option. The checkpoint remembers it: Stage 2 and latent exchange read an answer
    out in the same form. Not in the paper."""
    gradient_checkpointing: bool = True
    """Recompute the decoder layers in the backward pass instead of keeping their activations. Exact."""
    variable_length: Automatic = "auto"
    """Attend inside each example of a packed row by itself instead of through a mask over the whole row: the same
    numbers up to rounding, with less work. Rows whose image is hidden from text, and models whose image tokens attend
    both ways (Gemma 3), keep the mask. ``auto``: on an NVIDIA GPU in 16 bits, unless the model is a mixture of experts
    or the engine shards it."""
    allow_no_evidence: bool = False
    """Train with latents although no row has an evidence box. The latents then learn nothing."""

    @override
    def memory_advice(self) -> list[str]:
        return [] if self.gradient_checkpointing else ["set method.gradient_checkpointing true"]


PC = TypeVar("PC", bound=PackedConfig)


class EncodedSamples:
    """The mixture, encoded on the way; resumes where the mixture does."""

    def __init__(self, samples: Mixture[Sample], encoder: Encoder, settings: TrainSettings) -> None:
        self.samples, self.encoder, self.settings = samples, encoder, settings
        self.draws = Draws()

    def __iter__(self) -> Iterator[SftExample]:
        fruitless, draws = 0, self.draws
        for sample in self.samples:
            draws.drawn += 1
            self.encoder.draws = draws
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
        """Position in the data, with the counts of rows that were left out."""
        # With the counts: rows of a window that is filled again after a kill are drawn again too.
        return {**self.samples.state_dict(), "counts": self.draws.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.samples.load_state_dict(state)
        if "counts" in state:  # not in checkpoints of earlier versions
            self.draws.load_state_dict(state["counts"])


class PackedLane:
    """Packed rows of one lane."""

    def __init__(self, lane: Lane, source: EncodedSamples, budget: int) -> None:
        self.lane, self.source = lane, source
        self.stream = PackedStream(source, len, budget, WINDOW)
        self._rows: Iterator[Any] | None = None

    def take(self, size: int) -> list[list[Sequence[SftExample]]]:
        """The rows of the next step, cut into microbatches."""
        self._rows = self._rows or iter(self.stream)
        rows = [next(self._rows).items for _ in range(self.lane.rows)]
        return [rows[i : i + size] for i in range(0, len(rows), size)]


class PackedMethod(Method[SftSettings, PC, SftBatch]):
    """One optimizer step is ``optim.batch`` packed rows. Each rank packs its own (`Lane`)."""

    stage = "sft"
    auxiliary: int = 0
    """Targets of each example that take up no slots, for a model without latents."""

    def __init__(self, backbone: Backbone, config: PC) -> None:
        super().__init__(backbone, config)
        self.features = KeptFeatures(backbone)

    @override
    def begin(self, run: Run[SftSettings]) -> None:
        super().begin(run)
        c, settings = self.config, run.settings
        self.adapters = Adapters(self.backbone, settings.lora, markers=self.backbone.latents > 0)
        self.backbone.spell_out = c.spell_out
        if is_on(c.variable_length) and self.backbone.two_way_images and run.ranks.rank == 0:
            family = self.backbone.family.name
            print(f"realvr: note: {family} keeps the mask of packed rows: its images attend both ways", file=sys.stderr)
        respond = spelled_out if c.spell_out else response_text
        keep = settings.data.keep_encoded
        self.encoder = Encoder(self.backbone, c.pack_tokens, keep, respond, c, self.auxiliary)
        self._open(run.ranks.world)

    def _open(self, count: int) -> None:
        """Begin to read the lanes of this rank."""
        self.lanes: list[PackedLane] = []
        for lane in lanes.lanes_of(self.ranks, self.settings.optim, count):
            samples = self.data.mixture(self.settings, lane.number, count)
            encoded = EncodedSamples(samples, self.encoder, self.settings)
            self.lanes.append(PackedLane(lane, encoded, self.config.pack_tokens))
        self._count()

    def _count(self) -> None:
        """Sum up what was drawn; one lane counts by itself."""
        own = [each.source.draws for each in self.lanes if each.lane.counts]
        self.draws = own[0] if len(own) == 1 else Draws()
        for draws in own if len(own) > 1 else ():
            self.draws.add(draws)

    # ------------------------------------------------------------------ the words of `collect`

    def take(self, step: int) -> list[SftBatch]:
        """This rank's microbatches of the next step: packed rows, still in main memory."""
        data = self.settings.data
        if (data.workers or data.keep_features) and not self.encoder.kept:
            self.encoder.encode_all(all_of(self.lanes[0].source.samples), data.workers, sequences=True)
            if data.keep_features:
                self.features.fill(self.encoder.images())
        found: list[SftBatch] = []
        for each in self.lanes:
            generator = each.lane.generator(self.settings.run.seed, step)
            # Those of other ranks as well: the random numbers of a lane come one after the other.
            made = [self.pack(rows, generator) for rows in each.take(self.settings.optim.microbatch)]
            found += made[each.lane.own]
        self._count()
        return found

    def pack(self, rows: Sequence[Sequence[SftExample]], generator: torch.Generator) -> SftBatch:
        """Rows as tensors, still in main memory."""
        c = self.config
        return pack_rows(
            self.backbone,
            rows,
            jitter=c.position_jitter,
            hidden_ratio=c.hide_image_ratio,
            generator=generator,
            variable_length=is_on(c.variable_length),
        )

    def encode_images(self, images: tuple[ImageInput, ...]) -> VisualTokens:
        """Frozen visual tokens: computed here, or looked up with ``data.keep_features``."""
        return self.features(images) if len(self.features) else self.backbone.encode_images(images)

    def target_states(self, hidden_RTD: Tensor, b: SftBatch) -> tuple[Tensor, Tensor]:
        """What is trained to be each target (N, D), and which come first in their span (N,)."""
        # One position before each slot, which is never in column 0.
        row_N, column_N = b.slot_N2.unbind(-1)
        return hidden_RTD[row_N, column_N - 1], b.slot_first_N

    def total(self, *own: float) -> list[float]:
        """Counts over all ranks, at least 1: what the losses of the step are divided by."""
        return [max(float(sum(each)), 1.0) for each in zip(*self.ranks.gather_objects(own), strict=True)]

    def row_metrics(self, batches: Sequence[SftBatch]) -> Metrics:
        """How full the rows are, and how many examples they hold. Call it while they are in main memory."""
        device = self.backbone.device
        one = torch.ones((), device=device)
        used = on_device(float(sum(int(batch.real_RT.sum()) for batch in batches)), device)
        room = on_device(float(sum(batch.real_RT.numel() for batch in batches)), device)
        examples = on_device(float(sum(batch.examples for batch in batches)), device)
        return {
            "data/row_fill": (used, room),
            "data/examples_per_rank": (examples, one),
            **self.draws.metrics(device, self.ranks.world),
            "tokens": (used, one / self.ranks.world),
        }

    # ------------------------------------------------------------------ state

    @override
    def state_dict(self) -> dict[str, Any]:
        found = {each.lane.number: {"stream": each.stream.state_dict()} for each in self.lanes}
        return lanes.rank_state(found, self.lanes[0].lane.lanes, self.ranks.world)

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        found, count = lanes.own_states(state, self.ranks.rank, self.ranks.world)
        self._open(count)
        for each in self.lanes:
            each.stream.load_state_dict(found[each.lane.number]["stream"])
        self._count()

    @override
    def redistribute(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return lanes.redistribute(states, self.ranks, self.settings.optim)

    @override
    def export(self, directory: Path) -> None:
        self.adapters.export(self.backbone, directory)

    @classmethod
    def targets_each(cls, settings: SftSettings) -> int:
        """Most targets that an example with a span of fixed length has: K."""
        chosen = settings.model.latents
        latents = trained_latents(settings.model.path) if chosen is None else chosen
        return DEFAULT_LATENTS if latents is None else latents

    @classmethod
    def check_data(cls, settings: SftSettings, data: TrainingData, ranks: Ranks) -> None:
        """Refuse data of which too many rows would be left out for their boxes. Latents learn from rows with boxes
        alone: refuse data without any, warn where there are few."""
        latents = cls.targets_each(settings)
        _check_boxes(settings, data, latents, ranks.rank == 0)
        if latents == 0:  # Direct-SFT: no span
            return
        sources = [
            found for found, source in zip(data.census.sources, settings.data.sources, strict=True) if source.weight
        ]
        boxes, rows = (sum(getattr(found, name) for found in sources) for name in ("with_boxes", "usable"))
        config = settings.method
        if not boxes and not (isinstance(config, PackedConfig) and config.allow_no_evidence):
            raise UserError(
                f"none of the {rows:,} rows of {', '.join(found.path for found in sources)} has an evidence box, so "
                "the latents would learn nothing: add boxes (docs/data.md), train the control without latents "
                "(--method direct-sft), or go on all the same (--allow-no-evidence)"
            )
        if boxes < FEW_BOXES * rows and ranks.rank == 0:
            warnings.warn(
                f"{boxes:,} of {rows:,} rows ({boxes / rows:.1%}) have evidence boxes: the latents learn from these "
                "alone",
                stacklevel=2,
            )


def _check_boxes(settings: SftSettings, data: TrainingData, latents: int, first: bool) -> None:
    """Print how many rows of each source will be left out for their boxes; stop where these are too many."""
    config = settings.method
    if not isinstance(config, EvidenceConfig):
        return
    for name, samples in data.samples.items():
        draws = Draws(len(samples), what="are left out for their boxes")
        for sample in samples:
            if (refused := refusal(config, sample, latents)) is not None:
                draws.reject(refused[0], f"{sample.source or sample.id}: {refused[1]}")
        if not draws.rejected or not data.weights[name]:
            continue
        if draws.rejected.total() > settings.data.max_dropped * draws.drawn:
            raise too_many(draws, settings, f"before the first step, {name}")
        if first:
            where = "; ".join(draws.first.values())
            print(f"data: {name}: {draws.line()} (first: {where})", file=sys.stderr, flush=True)
