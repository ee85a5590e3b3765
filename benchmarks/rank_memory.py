"""Time and peak memory of the effective rank of many vectors, from the files that a run of the diagnostic leaves.

    python benchmarks/rank_memory.py --rows 200000 --width 3584 --folder /tmp/rank   # 2.9 GB of files

Vectors are random, 100 of each question and 16 questions in a file, as `realvr diagnose rank` writes visual tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from pathlib import Path

import numpy as np

from realvr.diagnostics.rank import cloud_of
from realvr.diagnostics.states import StateFiles

QUESTION, BATCH, GIB = 100, 16, 2**30


def peak() -> float:
    """GiB of this process at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--folder", type=Path, required=True, help="for the files, which are removed afterwards")
    options = parser.parse_args()
    files, rng = StateFiles(options.folder / "rank-states"), np.random.default_rng(0)
    names = [f"q{n}" for n in range(options.rows // QUESTION)]
    try:
        for place in range(0, len(names), BATCH):
            own = names[place : place + BATCH]
            rows = [rng.standard_normal((QUESTION, options.width), dtype=np.float32) for _ in own]
            files.write(place, own, {}, {"visual": rows})
        size = sum(file.stat().st_size for file in files.folder.iterdir())
        before, begun, used = peak(), time.perf_counter(), time.process_time()
        found = cloud_of(files, names, "visual")
        assert found is not None
        seconds, used = time.perf_counter() - begun, time.process_time() - used
    finally:
        shutil.rmtree(files.folder, ignore_errors=True)
    told = {name: found[name] for name in ("rows", "width", "rank90", "pr")}
    told |= {"files_gb": round(size / 1e9, 2), "seconds": round(seconds, 1), "cpu_seconds": round(used, 1)}
    print(json.dumps(told | {"gib_before": round(before, 2), "peak_gib": round(peak(), 2)}))


if __name__ == "__main__":
    main()
