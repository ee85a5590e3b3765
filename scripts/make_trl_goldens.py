"""Record what TRL's GRPO makes of a few tensors, for ``realvr.maths.grpo`` to be held against where TRL is missing.

    python scripts/make_trl_goldens.py [--output tests/golden/trl_grpo.json]

Run it where the version of TRL named in ``tests/trl_oracle.py`` is installed; the cases stand there too.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import trl_oracle  # noqa: E402


def record(name: str) -> dict[str, Any]:
    """Inputs and results of one case. The inputs are kept because a seed means other numbers in another torch."""
    case = trl_oracle.tensors(name)
    inputs = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in case.items()}
    return {"inputs": inputs, **{reduction: trl_oracle.loss(case, reduction) for reduction in trl_oracle.REDUCTIONS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "golden" / "trl_grpo.json")
    output: Path = parser.parse_args().output
    if version("trl") != trl_oracle.VERSION:
        raise SystemExit(f"the goldens are those of TRL {trl_oracle.VERSION}, but {version('trl')} is installed")
    golden = {
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "advantages": {
            "rewards": trl_oracle.REWARDS,
            "scaled": trl_oracle.advantages(True),
            "unscaled": trl_oracle.advantages(False),
        },
        **{name: record(name) for name in trl_oracle.CASES},
    }
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in golden.items())
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # one line per case
    print(f"{output}: {len(trl_oracle.CASES)} cases, {len(trl_oracle.REDUCTIONS)} reductions")


if __name__ == "__main__":
    main()
