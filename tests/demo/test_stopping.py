"""A demo that is asked to stop: also where Python drops the exception that the signal raised."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

from realvr.demo.plan import steps_of
from realvr.demo.run import _SigtermStops, demo_settings
from realvr.demo.team import run_steps


class Signals:
    """Sends SIGTERM to this process from its finalizer, where an exception is only printed."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_finalizer_is_not_lost(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with _SigtermStops() as stops:
        stops.check()
        found: Signals | None = Signals()
        found = None  # here the exception is dropped
        gc.collect()
        assert found is None
        with pytest.raises(KeyboardInterrupt):
            run_steps(tmp_path, steps_of(demo_settings(quick=True)), 1, check=stops.check)
    assert signal.getsignal(signal.SIGTERM) is before and not (tmp_path / "logs").exists()
