"""What a run tells while it works, and what it leaves behind. None of this imports torch."""

from __future__ import annotations

from pipetransformer.tracking.events import EventLog, read_events, to_plain
from pipetransformer.tracking.names import evaluation_metrics, train_metrics
from pipetransformer.tracking.progress import Progress, ProgressFields
from pipetransformer.tracking.render import render
from pipetransformer.tracking.summary import CacheBytes, CacheUse, Summary, Transition
from pipetransformer.tracking.tracker import Tracker
from pipetransformer.tracking.wandb_run import WandbRun

__all__ = [
    "CacheBytes",
    "CacheUse",
    "EventLog",
    "Progress",
    "ProgressFields",
    "Summary",
    "Tracker",
    "Transition",
    "WandbRun",
    "evaluation_metrics",
    "read_events",
    "render",
    "to_plain",
    "train_metrics",
]
