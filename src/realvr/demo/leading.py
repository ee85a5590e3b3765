"""The first lines of a demo: templates of ``arms.yaml``, filled with the numbers that it names.

A template is a format string over the findings: ``{walk[nearest][rate]:%}``. Beside Python's own formats there are
``%`` (a share as percent, ``97 %``), ``ci`` and ``ci%`` (both ends of an interval, in percent and as shares). A number
that was not measured is a dash.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from realvr.demo.choice import choice
from realvr.runs.files import Json
from realvr.widgets import DASH


def at(content: Json, place: Sequence[str]) -> Json:
    """What stands at a place among numbers; None where there is no such place."""
    for key in place:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def findings(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The numbers that lead, by name."""
    return {
        name: {key: at(summary, place) for key, place in places.items()} for name, places in choice().findings.items()
    }


def leading(found: Mapping[str, dict[str, Any]]) -> list[str]:
    """The first lines, in words."""
    return [Words().vformat(text, (), found) for text in choice().leading]


class Words(string.Formatter):
    """Format strings over numbers, of which some may not be there."""

    @override
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        first, _, rest = field_name.partition("[")
        value: Any = kwargs[first]
        for key in rest.removesuffix("]").split("][") if rest else ():
            value = None if value is None else value[int(key) if isinstance(value, list) else key]
        return value, first

    @override
    def format_field(self, value: Json, format_spec: str) -> str:
        if value is None or value == [None, None]:
            return DASH
        if format_spec in ("ci", "ci%"):
            low, high = (end * (100 if format_spec == "ci%" else 1) for end in value)
            return f"[{low:.0f}, {high:.0f}]"
        return f"{100 * value:.0f} %" if format_spec == "%" else str(super().format_field(value, format_spec))
