"""The live view of a run, and the files that it leaves behind. No torch."""

from __future__ import annotations

from pipetransformer.run.tracking.events import EventLog, read_events, to_plain
from pipetransformer.run.tracking.names import evaluation_metrics, position
from pipetransformer.run.tracking.progress import Progress, say
from pipetransformer.run.tracking.render import render
from pipetransformer.run.tracking.summary import CacheBytes, CacheUse, Summary, Transition
from pipetransformer.run.tracking.tracker import Tracker
from pipetransformer.run.tracking.wandb_run import WandbRun

__all__ = [
    "CacheBytes",
    "CacheUse",
    "EventLog",
    "Progress",
    "Summary",
    "Tracker",
    "Transition",
    "WandbRun",
    "evaluation_metrics",
    "position",
    "read_events",
    "render",
    "say",
    "to_plain",
]
