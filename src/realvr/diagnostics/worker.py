"""One process of a diagnostic on several: the run comes as JSON, the rank from the environment."""

from __future__ import annotations

import json
import sys

from realvr.diagnostics.run import diagnose_share, share_from_json
from realvr.diagnostics.suite import Suite, suite_share
from realvr.runs.launching import serve


def share(text: str) -> None:
    """Do the share of this process."""
    content = json.loads(text)
    if "suite" in content:
        suite_share(Suite.from_json(content["suite"]))
    else:
        diagnose_share(*share_from_json(text))


if __name__ == "__main__":
    serve(share, sys.argv[1])
