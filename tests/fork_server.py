"""``realvr`` in processes that need not import torch again: forks of one that has imported it and done nothing else.

A fork has the locks of its parent but not its threads: a lock that one of them held stays closed for ever. A process
that runs tests has threads (of pools, of pytest-xdist, of linear algebra), so it forks nothing itself. It starts this
file once, which has none, and asks it over a socket, in lines of JSON: a request for each process; answers with its id,
and with its exit code once it has ended. With the socket all of it ends.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

CRASHED = 70
"""Exit code where an exception left ``main``."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
HEAVY = (
    "accelerate",
    "peft",
    "realvr.training.run",
    "realvr.training.engine",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.internvl.modeling_internvl",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
)
"""What verbs import when they are used."""


def serve(link: socket.socket) -> None:
    """Fork on request until the other end is closed."""
    bell, knock = os.pipe()
    for end in (bell, knock):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(knock)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests, running = link.makefile("rb"), set()
    try:
        while True:
            ready, _, _ = select.select([link, bell], [], [])
            if bell in ready:
                os.read(bell, 4096)
                for pid, code in _ended():
                    running.discard(pid)
                    answer(link, pid=pid, code=code)
            if link in ready:
                line = requests.readline()  # one at a time: who asks waits for the answer
                if not line:
                    return
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (link.fileno(), bell, knock):
                        os.close(end)
                    child(json.loads(line))
                running.add(pid)
                answer(link, pid=pid)
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def answer(link: socket.socket, **values: int) -> None:
    link.sendall(json.dumps(values).encode() + b"\n")


def _ended() -> list[tuple[int, int]]:
    found = []
    with suppress(ChildProcessError):
        while (each := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((each[0], os.waitstatus_to_exitcode(each[1])))
    return found


def child(request: dict[str, Any]) -> NoReturn:
    """Become what was asked for (`forked.Forked`)."""
    code = CRASHED
    try:
        os.setsid()
        for number, path in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(path, os.O_WRONLY), number)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")  # as Python opens it
        faulthandler.enable()  # SIGABRT prints the stacks
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["home"])
        args = request["args"]
        if request["what"] == "program":
            os.execvp(args[0], args)
        for name, value in request["constants"].items():
            module, _, constant = name.rpartition(".")
            setattr(sys.modules[module], constant, value)
        if request["file_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
        if request["more_memory"] is not None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + request["more_memory"],) * 2)
        if request["what"] == "script":
            sys.argv, code = args, 0
            sys.path.insert(0, os.path.dirname(args[0]))
            runpy.run_path(args[0], run_name="__main__")
        else:
            sys.argv = ["realvr", *args]
            code = importlib.import_module("realvr.cli").main(args)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        code = CRASHED
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                if stream is not None:
                    stream.flush()
        os._exit(code)


def main() -> None:
    os.environ.update(ONE_THREAD)
    for each in importlib.import_module("realvr.cli").COMMANDS.values():
        importlib.import_module(each.module)
    for name in HEAVY:
        importlib.import_module(name)
    if importlib.util.find_spec("deepspeed"):
        importlib.import_module("deepspeed")  # accelerate does it wherever a model is written
    sys.modules["torch"].set_num_threads(1)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"{len(tasks)} threads: forks would not be safe"
    link = socket.socket(fileno=int(sys.argv[1]))
    answer(link, pid=os.getpid())
    serve(link)


if __name__ == "__main__":
    main()
