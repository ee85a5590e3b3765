"""Chat templates, rendered within limits.

A chat template is a program that comes with a checkpoint. transformers runs it in Jinja's sandbox, which keeps it from
files and objects but not from looping for hours or filling the memory. Here a template that is not one of ours runs in
a process of its own, with limits on time, memory and output. That process does nothing but what stock
``apply_chat_template`` does. Texts are not among what a template is shown (see ``prompts.py``), so conversations of one
shape are rendered once.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

from realvr.backbone.templates import CHAT_TEMPLATES
from realvr.families import Stock

SECONDS = 10.0
"""Longest time for one conversation; the released templates take milliseconds."""
CHARACTERS = 2_000_000
"""Longest result: about a context of 512k tokens."""
MEMORY = 512 << 20
"""Bytes that rendering may add to what the process has at its start."""
_START_SECONDS = 120.0


class TemplateError(ValueError):
    """A template that cannot render a conversation, with the reason."""


def render(tokenizer: Stock, messages: list[dict[str, Any]], generation_prompt: bool) -> str:
    """What ``tokenizer.apply_chat_template(messages, tokenize=False)`` gives; ``TemplateError`` where it fails."""
    try:
        template = tokenizer.get_chat_template()
        variables = {name: _plain(value) for name, value in tokenizer.special_tokens_map.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise TemplateError(str(error)) from error
    if not isinstance(template, str):
        raise TemplateError(f"it is {type(template).__name__}, not text")
    request = [template, messages, generation_prompt, variables]
    answer = _answer(json.dumps(request), template in CHAT_TEMPLATES.values())
    if "error" in answer:
        raise TemplateError(answer["error"])
    return answer["text"]


@lru_cache(maxsize=4096)
def _answer(request: str, own: bool) -> dict[str, str]:
    """``{"text": …}`` or ``{"error": …}``; both are kept, so that a slow template is not tried for every row."""
    return _rendered(request) if own else _process(request)


def _plain(value: object) -> str | list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else str(value)


def _rendered(request: str) -> dict[str, str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    template, messages, generation_prompt, variables = json.loads(request)
    try:
        done: Any = render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=generation_prompt, **variables
        )
        text = done[0][0]
        text.encode()
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # whatever the template does
        return {"error": " ".join(f"{error or type(error).__name__}".split())[:300]}
    if len(text) > CHARACTERS:
        return {"error": f"it writes more than {CHARACTERS:,} characters"}
    return {"text": text}


class _Process:
    """The process that renders: started when it is first needed, replaced when it had to be stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._inherited: list[Any] = []

    def __call__(self, request: str) -> dict[str, str]:
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()
            try:
                answer = self._exchange(request, SECONDS)
            except BaseException:  # an interrupt must not leave an answer behind for the next question
                self.stop()
                raise
            if answer is None:
                self.stop()
                return {"error": f"it runs for more than {SECONDS:g} s or ends its process"}
            return json.loads(answer)

    def forget(self) -> None:
        """In a forked process: that of the parent is not to be talked to or waited for, and a lock may be held."""
        self._inherited.append(self._child)
        self._lock, self._child = threading.Lock(), None

    def _start(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "realvr.backbone.rendering"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # an interrupt on the terminal is for us, not for it
        )
        if self._exchange(None, _START_SECONDS) is None:
            self.stop()
            raise RuntimeError("the process that renders chat templates does not start")

    def _exchange(self, request: str | None, seconds: float) -> str | None:
        """Send a line and read one; None where none comes in time."""
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        timer = threading.Timer(seconds, child.kill)
        timer.daemon = True
        timer.start()
        try:
            if request is not None:
                child.stdin.write(request + "\n")
                child.stdin.flush()
            return child.stdout.readline() or None
        except OSError:
            return None
        finally:
            timer.cancel()

    def stop(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


_process = _Process()
atexit.register(_process.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forget)


def _limit_memory() -> None:
    """Leave MEMORY beyond what the process has mapped; where the system has no such limit, time alone bounds it."""
    try:
        import resource
        from pathlib import Path

        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    except (ImportError, OSError, ValueError):
        return


def _serve() -> None:
    """Answer requests, one per line, until the other side is gone."""
    import transformers.utils.chat_template_utils  # noqa: F401  before memory is limited

    _limit_memory()
    print(json.dumps({"text": "ready"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_rendered(line)), flush=True)


if __name__ == "__main__":
    _serve()
