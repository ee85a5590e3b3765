"""One rank that loads a model under an engine and writes down how much memory of its own that took.

``torchrun … load_memory.py ENGINE SMALL LARGE OUT``: the small model first, so that imports and buffers do not count.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from realvr.training.engine import start_engine
from realvr.training.models import load_backbone
from realvr.training.sections import ModelSettings


def own_bytes() -> int:
    """Memory of this process that is no mapped file: those pages belong to the page cache."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def main() -> None:
    engine_name, small, large, out = sys.argv[1:]
    engine = start_engine(cpu=True, engine=engine_name)

    def load(path: str) -> int:
        settings: Any = SimpleNamespace(model=ModelSettings(path=path, dtype="float32"))  # all that it looks at
        backbone = load_backbone(settings, engine, announce=False)
        return sum(engine.held_numbers(p) * p.element_size() for p in backbone.model.parameters())

    load(small)
    base, peak, done = own_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    held = load(large)
    done.set()
    thread.join()
    engine.barrier()
    found = {"rank": engine.rank, "peak": peak - base, "held": held}
    (Path(out) / f"rank-{engine.rank}.json").write_text(json.dumps(found))  # lines of two ranks may run together
    engine.exit(0)


if __name__ == "__main__":
    main()
