"""Arguments that several verbs share."""

from __future__ import annotations

from typing import Annotated

import tyro

from realvr.answers import POLICIES

Policy = Annotated[str | None, tyro.conf.arg(metavar="|".join(POLICIES))]
"""An extraction policy, by name."""
