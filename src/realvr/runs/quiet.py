"""Keeps a library's progress bars out of logs and pipes."""

from __future__ import annotations

import sys


def quiet_transformers(always: bool = False) -> None:
    """Switch transformers' progress bars off where nobody watches them."""
    from transformers.utils import logging

    if always or not sys.stderr.isatty():
        logging.disable_progress_bar()
