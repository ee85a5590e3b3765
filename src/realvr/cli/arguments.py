"""Arguments that several verbs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import tyro

from realvr.answers import POLICIES

Policy = Annotated[str | None, tyro.conf.arg(metavar="|".join(POLICIES))]
"""An extraction policy, by name."""
NONE = "(default: none)"
"""Where the default is an empty list, which tyro shows as nothing."""
Columns = Annotated[Sequence[str], tyro.conf.arg(metavar="NAME=COLUMN …", help_behavior_hint=NONE)]
