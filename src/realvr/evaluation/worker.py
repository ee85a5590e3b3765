"""One process of ``realvr eval --processes N``: the settings come as JSON, the rank from the environment."""

from __future__ import annotations

import sys

from realvr.runs.launching import serve


def share(text: str) -> None:
    """Do the share of this process."""
    from realvr.evaluation.checkpoints import evaluate_share
    from realvr.evaluation.settings import EvaluateSettings

    evaluate_share(EvaluateSettings.from_json(text))


if __name__ == "__main__":
    serve(share, sys.argv[1])
