"""What ``realvr data check`` says about the samples it could read."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from realvr.data.sample import Sample


@dataclass
class Statistics:
    """Running counts over samples; holds numbers, never samples."""

    samples: int = 0
    images: int = 0
    with_boxes: int = 0
    with_earlier_boxes: int = 0
    on_several_images: int = 0
    per_sample: Counter[int] = field(default_factory=Counter)
    areas: array[float] = field(default_factory=lambda: array("d"))
    letters: Counter[str] = field(default_factory=Counter)
    options: Counter[int] = field(default_factory=Counter)
    free: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)

    def add(self, sample: Sample) -> None:
        """Count one sample."""
        self.samples += 1
        self.images += len(sample.images)
        self.with_boxes += bool(sample.boxes)
        self.with_earlier_boxes += any(sample.earlier_boxes)
        self.on_several_images += len({box.image for box in sample.boxes}) > 1
        self.per_sample[len(sample.boxes)] += 1
        for box in sample.boxes:
            x0, y0, x1, y1 = box.xyxy
            self.areas.append((x1 - x0) * (y1 - y0))
        if sample.choices:
            self.letters[sample.answer] += 1
            self.options[len(sample.choices)] += 1
        else:
            self.free[sample.answer[:80]] += 1
        self.tasks[sample.task or sample.category or "-"] += 1

    def boxes(self) -> dict[str, Any]:
        """Number of boxes, in all and by sample, and how much of the image they cover."""
        summary: dict[str, Any] = {
            "samples_with_boxes": self.with_boxes,
            "boxes": len(self.areas),
            "per_sample": {str(boxes): samples for boxes, samples in sorted(self.per_sample.items())},
            "on_several_images": self.on_several_images,
            "samples_with_earlier_boxes": self.with_earlier_boxes,
        }
        if self.areas:
            values = np.frombuffer(self.areas)
            low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
            summary["area"] = {
                "min": float(values.min()),
                "p05": float(low),
                "median": float(middle),
                "mean": float(values.mean()),
                "p95": float(high),
                "max": float(values.max()),
            }
        return summary

    def answers(self) -> dict[str, Any]:
        """Balance of the answers: letters for multiple choice, the most frequent texts otherwise."""
        return {
            "multiple_choice": dict(sorted(self.letters.items())),
            "options": {str(count): number for count, number in sorted(self.options.items())},
            "free_distinct": len(self.free),
            "free_most_common": dict(self.free.most_common(10)),
        }
