"""realvr: train, evaluate and look inside latent visual reasoning in vision-language models.

The names below are imported on first use: ``import realvr`` loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from realvr.lazy import lazy_names

if TYPE_CHECKING:
    from realvr.backbone.backbone import Backbone
    from realvr.backbone.types import Turn
    from realvr.data.reading import read
    from realvr.data.sample import Sample
    from realvr.diagnostics.base import DIAGNOSTICS
    from realvr.diagnostics.run import diagnose
    from realvr.diagnostics.settings import DiagnoseSettings
    from realvr.errors import UserError
    from realvr.evaluation.ask import AskSettings, ask
    from realvr.evaluation.benchmark import BENCHMARKS
    from realvr.evaluation.checkpoints import evaluate
    from realvr.evaluation.finished import CompareSettings, ScoreSettings, compare_runs, score
    from realvr.evaluation.settings import EvaluateSettings
    from realvr.latent.group_rollout import rollout
    from realvr.latent.recurrence import trajectory
    from realvr.latent.sampling import Sampling
    from realvr.report.settings import ReportSettings, write_report
    from realvr.training.configuration import load_settings
    from realvr.training.method import METHODS
    from realvr.training.run import train

__version__ = "0.1.0"

_HOME = {
    "AskSettings": "realvr.evaluation.ask",
    "BENCHMARKS": "realvr.evaluation.benchmark",
    "Backbone": "realvr.backbone.backbone",
    "CompareSettings": "realvr.evaluation.finished",
    "DIAGNOSTICS": "realvr.diagnostics.base",
    "DiagnoseSettings": "realvr.diagnostics.settings",
    "EvaluateSettings": "realvr.evaluation.settings",
    "METHODS": "realvr.training.method",
    "ReportSettings": "realvr.report.settings",
    "Sample": "realvr.data.sample",
    "Sampling": "realvr.latent.sampling",
    "ScoreSettings": "realvr.evaluation.finished",
    "Turn": "realvr.backbone.types",
    "UserError": "realvr.errors",
    "ask": "realvr.evaluation.ask",
    "compare_runs": "realvr.evaluation.finished",
    "diagnose": "realvr.diagnostics.run",
    "evaluate": "realvr.evaluation.checkpoints",
    "load_settings": "realvr.training.configuration",
    "read": "realvr.data.reading",
    "rollout": "realvr.latent.group_rollout",
    "score": "realvr.evaluation.finished",
    "train": "realvr.training.run",
    "trajectory": "realvr.latent.recurrence",
    "write_report": "realvr.report.settings",
}

__all__ = [
    "AskSettings",
    "BENCHMARKS",
    "Backbone",
    "CompareSettings",
    "DIAGNOSTICS",
    "DiagnoseSettings",
    "EvaluateSettings",
    "METHODS",
    "ReportSettings",
    "Sample",
    "Sampling",
    "ScoreSettings",
    "Turn",
    "UserError",
    "__version__",
    "ask",
    "compare_runs",
    "diagnose",
    "evaluate",
    "load_settings",
    "read",
    "rollout",
    "score",
    "train",
    "trajectory",
    "write_report",
]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
