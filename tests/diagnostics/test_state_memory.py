"""Numbers over the states of all samples: what is alive does not grow with the samples."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live_memory import LiveMemory
from optional import need_package
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.probing import Probed
from realvr.diagnostics.rank import Rank
from realvr.diagnostics.similarity import Similarity
from realvr.diagnostics.states import StateFiles
from realvr.diagnostics.variation import Variation
from realvr.maths.variation import unit

WIDTH, BATCH, K = 128, 4, 64
FEW, MANY = 32, 96
"""Each half has more than the 1,024 rows that are taken together."""


def states(name: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What a diagnostic keeps of one question."""
    sizes = {
        "rank": {"visual": 100, "latents": K},
        "similarity": {"latents": K, "dummies": K, "ordinary": K, "context": 1},
        "variation": {"units": K + 1},
    }
    return {kind: unit(rng.normal(size=(rows, WIDTH))).astype(np.float32) for kind, rows in sizes[name].items()}


KINDS: dict[str, type[Diagnostic]] = {
    "rank": Rank,
    "similarity": Similarity,
    "variation": Variation,
}
ABOUT: dict[str, Any] = {"group": "a", "latents": K, "visual": 100, "of": 2560, "off_diagonal": 0.0, "maximum": 0.0}
ABOUT |= {"adjacent": dict.fromkeys(("latents", "dummies", "ordinary"), 0.0), "error": None}


def peak(name: str, count: int, folder: Path) -> int:
    """Most bytes of arrays and tensors while a run of so many questions is summed up from its files."""
    files, rng = StateFiles(folder / f"{name}-states"), np.random.default_rng(0)
    names = [f"q{n}" for n in range(count)]
    for place in range(0, count, BATCH):
        own = names[place : place + BATCH]
        rows = [states(name, rng) for _ in own]
        parts = {key: [one[key] for one in rows] for key in rows[0]}
        if name == "variation":
            files.write(place, own, {key: np.stack(each) for key, each in parts.items()})
        else:
            files.write(place, own, {}, parts)
    diagnostic = KINDS[name]()
    summary = diagnostic.summarise([{"id": one, "picture": one, **ABOUT} for one in names])
    with LiveMemory() as alive:
        tracemalloc.start()
        diagnostic.extend(summary, {}, folder)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return alive.peak + most


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_three_times_the_questions_take_no_more_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for names and a few numbers of each question: at most a twentieth of what its vectors have in float64."""
    for place in ("numbers.RESAMPLES", "variation.SHUFFLES"):
        monkeypatch.setattr(f"realvr.diagnostics.{place}", 2)
    peak(name, BATCH, tmp_path / "first")  # imports
    few, many = (peak(name, count, tmp_path / str(count)) for count in (FEW, MANY))
    vectors = 8 * sum(rows.size for rows in states(name, np.random.default_rng(0)).values())
    assert many - few < 0.05 * vectors * (MANY - FEW)


def test_a_bootstrap_of_clusters_has_one_working_copy() -> None:
    """The exception: probes and clusters need all vectors at once. However many draws, there is one copy of them, and
    for a moment the one that scikit-learn takes for their variance."""
    need_package("sklearn")
    rows = np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32)
    probed = Probed(rows, np.repeat(["a", "b"], 100), [str(n) for n in range(200)])
    probed.bootstrap(1)  # imports
    copy, peaks = 8 * rows.size, []
    for draws in (1, 4):
        tracemalloc.start()
        probed.bootstrap(draws)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert copy < peaks[0] < 2.2 * copy and peaks[1] < 2.2 * copy
    tracemalloc.start()
    probed.linear()
    peak_of_probe = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_of_probe < 5 * copy  # as docs/diagnostics.md says
