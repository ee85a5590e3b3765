"""TensorBoard files, written line by line.

torch's own writer uses a thread, which prints a traceback when the disk is full.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from realvr.runs.files import naming


class TensorBoard:
    """Scalars of one run. Those of earlier files from step ``first`` on are superseded."""

    def __init__(self, folder: Path, first: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{first}"
        self._file = self.path.open("wb")
        self._writer = RecordWriter(self._file)
        start = Event(step=first, session_log=SessionLog(status=SessionLog.START))
        self._write(Event(file_version="brain.Event:2"), start)

    def add(self, step: int, values: dict[str, float]) -> None:
        """The scalars of one step."""
        self._write(*(Event(step=step, summary=scalar(name, value)) for name, value in values.items()))

    def _write(self, *events: Event) -> None:
        with naming(self.path):
            for event in events:
                event.wall_time = time.time()
                self._writer.write(event.SerializeToString())
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
