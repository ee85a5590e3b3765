"""The command line: a table of verbs, one module each."""

from realvr.cli.dispatch import COMMANDS, main

__all__ = ["COMMANDS", "main"]
