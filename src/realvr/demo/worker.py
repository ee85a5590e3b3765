"""One process of the demo: reads names of steps from standard input, does them, answers with a line of JSON each.

``python -m realvr.demo.worker FOLDER``. It ends when its input does, in the middle of a step as well: when the demo was
killed, nothing may keep writing while the next one runs.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any

from realvr.demo.files import read_settings
from realvr.demo.plan import DemoSettings, Step, steps_of
from realvr.demo.steps import Interrupted, perform
from realvr.errors import explained


def main(folder: str) -> int:
    """Do steps until the input ends."""
    os.chdir(folder)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a verb prints goes to the log
    wanted: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_listen, args=(wanted,), daemon=True).start()
    settings = read_settings(Path("."))
    steps = {step.name: step for step in steps_of(settings)}
    _quiet()
    while (name := wanted.get()) is not None:
        _answer(answers, _do(steps[name], settings))
    return 0


def _listen(wanted: queue.Queue[str | None]) -> None:
    for line in sys.stdin:
        wanted.put(line.strip() or None)
    os._exit(1)  # a regular end is an empty line; without one the demo is gone


def _quiet() -> None:
    """One thread, no network, no bars; Ctrl-C reaches the demo, which then asks us to stop by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    from realvr.runs.quiet import quiet_transformers

    torch.set_num_threads(1)
    quiet_transformers(always=True)


def _do(step: Step, settings: DemoSettings) -> dict[str, Any]:
    begun, cpu = time.monotonic(), time.process_time()
    print(f"--- {step.name}", file=sys.stderr, flush=True)
    try:
        perform(step, settings)
        outcome: dict[str, Any] = {"ok": True}
    except Interrupted:
        outcome = {"ok": False, "stopped": True}
    except Exception as error:  # said in one line by the demo; the log has the rest
        found = explained(error)
        if found is None:
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}" if found is None else str(found)
        outcome = {"ok": False, "error": text, "internal": found is None}
    seconds, used = time.monotonic() - begun, time.process_time() - cpu
    return {"step": step.name, **outcome, "seconds": round(seconds, 2), "cpu_seconds": round(used, 2)}


def _answer(target: IO[str], content: dict[str, Any]) -> None:
    target.write(json.dumps(content) + "\n")
    target.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
