"""One process of ``realvr eval --processes N``: the arguments come as JSON, the rank from the environment."""

from __future__ import annotations

import os
import sys
import threading
import time

from realvr.runs.guard import guarded


def _end_with(parent: int) -> None:
    """End when the starting process has died, even by a kill: nobody else would stop this one."""
    while os.getppid() == parent:
        time.sleep(0.02)
    os._exit(1)


def main(text: str) -> int:
    """Run one share; the exit code."""
    from realvr.evaluation.checkpoints import evaluate_share
    from realvr.evaluation.settings import EvaluateSettings

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def work() -> int:
        try:
            evaluate_share(EvaluateSettings.from_json(text))
            return 0
        except KeyboardInterrupt:
            return 130  # the process that started this one says it

    return guarded(work)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: a process group that waits for a failed process must not hold this one up
