"""Peak memory and time of ``realvr data check`` on a large HR-Bench-style TSV.

    PYTHONPATH=src python benchmarks/data_memory.py [--megabytes 500] [--folder DIR]

Writes a TSV of 8K JPEG photographs in base64 (several MB a row, four option cycles each), then checks it in a fresh
process and prints one JSON line. Exits with 1 if the peak exceeds 400 MB or torch was imported.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

LIMIT_MB = 400
HEADER = "index\tquestion\tanswer\tcategory\tA\tB\tC\tD\tcycle_category\timage\n"

CHECK = """
import json, resource, sys
from pathlib import Path
from realvr.cli.data import CheckCommand, check
code = check(CheckCommand([Path(sys.argv[1])], json=True))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"exit": code, "peak_mb": round(peak, 1), "torch": "torch" in sys.modules}))
"""


def photograph(seed: int) -> str:
    """A noisy 7680 x 4320 JPEG in base64: noise makes the file as large as a real photograph."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (1080, 1920, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((7680, 4320), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=88)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def make(path: Path, megabytes: int) -> int:
    """Write the file; returns the number of rows."""
    rows = 0
    with path.open("w") as file:
        file.write(HEADER)
        while file.tell() < megabytes * 1e6:
            image = photograph(rows)
            for cycle in range(4):
                options = "\t".join(f"option {(k + cycle) % 4}" for k in range(4))
                file.write(f"{rows}\tWhat is it?\t{'ABCD'[cycle]}\tsingle\t{options}\t{cycle}\t{image}\n")
                rows += 1
    return rows


def main() -> int:
    """Make the file, check it in a fresh process, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=None, help="where the file is written")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "hr_bench_8k.tsv"
        rows = make(path, arguments.megabytes)
        size = path.stat().st_size / 1e6
        source = str(Path(__file__).resolve().parents[1] / "src")
        start = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-c", CHECK, str(path)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": source},
            check=True,
        )
        seconds = time.perf_counter() - start
    checked, measured = (json.loads(line) for line in run.stdout.splitlines()[-2:])
    result = {"file_mb": round(size, 1), "rows": rows, "ok": checked["ok"], "seconds": round(seconds, 1), **measured}
    print(json.dumps(result))
    good = measured["peak_mb"] < LIMIT_MB and not measured["torch"] and measured["exit"] == 0 and checked["ok"] == rows
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
