"""``realvr env``: what this machine offers."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass

from realvr.training.environment import survey


@dataclass(frozen=True)
class EnvCommand:
    """Options of ``realvr env``.

    Args:
        json: Print one JSON object instead of tables.
    """

    json: bool = False


def env(settings: EnvCommand) -> int:
    """Print versions, devices and training engines found on this machine.

    Examples:
      realvr env
      realvr env --json
    """
    sections = survey()
    if settings.json:
        print(json_module.dumps(sections, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, section in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for name, value in section.items():
            table.add_row(name, str(value) if value is not None else "[dim]not installed[/dim]")
        console.print(table, "")
    return 0
