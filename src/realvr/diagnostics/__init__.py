"""Questions asked of a latent: measure, summarise, draw. One file a diagnostic; see docs/diagnostics.md."""

from realvr.diagnostics.base import DIAGNOSTICS, Diagnostic
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, Samples, Shown, Skip
from realvr.diagnostics.run import diagnose
from realvr.diagnostics.settings import DiagnoseSettings

__all__ = [
    "DIAGNOSTICS",
    "Diagnostic",
    "DiagnosticSettings",
    "Highlight",
    "Needs",
    "DiagnoseSettings",
    "Samples",
    "Shown",
    "Skip",
    "diagnose",
]
