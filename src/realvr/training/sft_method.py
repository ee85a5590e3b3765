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

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.loading import DEFAULT_LATENTS, trained_latents
from realvr.data.mixture import Mixture
from realvr.data.packing import PackedStream
from realvr.data.sample import Sample
from realvr.data.wording import response_text, spelled_out
from realvr.errors import UserError
from realvr.imaging.types import ImageInput
from realvr.training.adapters import Adapters
from realvr.training.dropping import ENOUGH, Draws, over, too_many
from realvr.training.examples import Encoder, all_of
from realvr.training.features import KeptFeatures
from realvr.training.method import Method, Run
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

    may_change: ClassVar[tuple[str, ...]] = ("gradient_checkpointing", "allow_no_evidence")
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
        """Position in the data, with the counts of rows that were left out."""
        # With the counts: rows of a window that is filled again after a kill are drawn again too.
        return {**self.samples.state_dict(), "counts": self.encoder.draws.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.samples.load_state_dict(state)
        if "counts" in state:  # not in checkpoints of earlier versions
            self.encoder.draws.load_state_dict(state["counts"])


class PackedMethod(Method[SftSettings, PC, SftBatch]):
    """One optimizer step is ``optim.batch`` packed rows, dealt out over the ranks; packing is done by each rank."""

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
        respond = spelled_out if c.spell_out else response_text
        keep = settings.data.keep_encoded
        self.encoder = Encoder(self.backbone, c.pack_tokens, keep, respond, c, self.auxiliary)
        self.draws = self.encoder.draws
        self.samples = run.data.mixture(settings, run.ranks.rank, run.ranks.world)
        encoded = EncodedSamples(self.samples, self.encoder, settings)
        self.stream = PackedStream(encoded, len, c.pack_tokens, WINDOW)
        self._rows: Iterator[Any] | None = None

    # ------------------------------------------------------------------ the words of `collect`

    def take_rows(self) -> list[list[Sequence[SftExample]]]:
        """This rank's packed rows of the next step, cut into microbatches."""
        data, size = self.settings.data, self.settings.optim.microbatch
        if self._rows is None:
            if (data.workers or data.keep_features) and not self.encoder.kept:
                self.encoder.encode_all(all_of(self.samples), data.workers, sequences=True)
                if data.keep_features:
                    self.features.fill(self.encoder.images())
            self._rows = iter(self.stream)
        rows = [next(self._rows).items for _ in range(self.share)]
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def pack(self, rows: Sequence[Sequence[SftExample]], generator: torch.Generator) -> SftBatch:
        """Rows as tensors, still in main memory."""
        c = self.config
        return pack_rows(
            self.backbone, rows, jitter=c.position_jitter, hidden_ratio=c.hide_image_ratio, generator=generator
        )

    def encode_images(self, images: tuple[ImageInput, ...]) -> VisualTokens:
        """Frozen visual tokens: computed here, or looked up with ``data.keep_features``."""
        return self.features(images) if len(self.features) else self.backbone.encode_images(images)

    def target_states(self, hidden_RTD: Tensor, b: SftBatch) -> tuple[Tensor, Tensor]:
        """What is trained to be each target (N, D), and which come first in their span (N,)."""
        # One position before each slot, which is never in column 0.
        return hidden_RTD[b.slot_RT.roll(-1, dims=1)], ~b.slot_RT.roll(1, dims=1)[b.slot_RT]

    def generator(self, step: int) -> torch.Generator:
        """Random numbers of a step on this rank."""
        return torch.Generator().manual_seed((self.settings.run.seed * 1_000_003 + step) * 4099 + self.ranks.rank)

    def total(self, *own: float) -> list[float]:
        """Counts over all ranks, at least 1: what the losses of the step are divided by."""
        return [max(float(sum(each)), 1.0) for each in zip(*self.ranks.gather_objects(own), strict=True)]

    def row_metrics(self, batches: Sequence[SftBatch]) -> Metrics:
        """How full the rows are, and how many examples they hold."""
        device = self.backbone.device
        one = torch.ones((), device=device)
        used = torch.tensor(float(sum(int(batch.real_RT.sum()) for batch in batches)), device=device)
        room = torch.tensor(float(sum(batch.real_RT.numel() for batch in batches)), device=device)
        examples = torch.tensor(float(sum(batch.examples for batch in batches)), device=device)
        return {
            "data/row_fill": (used, room),
            "data/examples_per_rank": (examples, one),
            **self.draws.metrics(device, self.ranks.world),
            "tokens": (used, one / self.ranks.world),
        }

    # ------------------------------------------------------------------ state

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self._rows = None

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
