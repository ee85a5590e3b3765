"""Keeps what libraries say about themselves out of logs and pipes."""

from __future__ import annotations

import os
import sys


def quiet_transformers(always: bool = False) -> None:
    """Switch transformers' progress bars off where nobody watches them."""
    from transformers.utils import logging

    if always or not sys.stderr.isatty():
        logging.disable_progress_bar()


def quiet_deepspeed() -> None:
    """Transformers imports deepspeed, where it is installed, when it saves a model; without a GPU it would warn."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
