"""A run as its files tell it. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipetransformer.errors import UserError
from pipetransformer.run.tracking.events import read_events

TIMELINE = "timeline.json"
_TRAINING = ("steps", "transition", "advance", "probe", "guard")
"""Events whose seconds are training time."""
_TOLD = (
    *("probe", "freeze_decision", "guard", "held", "transition"),
    *("cache_declined", "not_saved", "skipped", "resume"),
)
"""Events that the page tells one by one."""


@dataclass(frozen=True, slots=True)
class Point:
    """Some steps, or an evaluation, behind so many steps and seconds of training; ``figures`` as in events.jsonl."""

    step: int
    train_s: float
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A plan, and the reason for it, from a step on."""

    step: int
    train_s: float
    plan: Mapping[str, Any]
    reason: str


@dataclass(slots=True)
class History:
    """What has happened in a run.

    Attributes:
        run_id: its id.
        folder: its folder.
        config: its configuration, as YAML.
        summary: the content of ``summary.json``; empty where it has not ended.
        total_steps: number of steps that it was to take.
        steps: the training, a point every ``log.every`` steps.
        evaluations: all of them.
        plans: the plans, the first one first.
        told: (step, event, its content) of decisions, guards, refusals and the like, in order.
        drawn: a real step of each plan, as ``run/timeline.py`` writes it: its name, and the pieces of work of it.
    """

    run_id: str
    folder: Path
    config: str
    summary: dict[str, Any] = field(default_factory=dict)
    total_steps: int = 0
    steps: list[Point] = field(default_factory=list)
    evaluations: list[Point] = field(default_factory=list)
    plans: list[PlanChange] = field(default_factory=list)
    told: list[tuple[int, str, Mapping[str, Any]]] = field(default_factory=list)
    drawn: list[tuple[str, list[Mapping[str, Any]]]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return int(self.plans[0].plan["num_blocks"]) if self.plans else 0

    @property
    def best(self) -> Point | None:
        """The best evaluation; one without a number is the worst."""
        by = self.best_by

        def rank(point: Point) -> float:
            return -math.inf if math.isnan(point.figures[by]) else float(point.figures[by])

        return max(self.evaluations, key=rank, default=None)

    @property
    def best_by(self) -> str:
        """The name of the metric that the best weights are kept by: the one that is wanted, or the first."""
        names = self.evaluations[0].figures if self.evaluations else ()
        wanted = (yaml.safe_load(self.config).get("train") or {}).get("best_by")
        if wanted in names:
            return str(wanted)
        return next((name for name in names if name != "loss"), "loss")

    def frozen_at(self, step: int) -> int:
        """The number of frozen blocks in the step behind ``step`` steps."""
        return int(next((c.plan["frozen"] for c in reversed(self.plans) if c.step <= step), 0))


def read_history(run_dir: Path) -> History:
    """Reads the files of a run. What a resumption has done again is left out.

    Raises:
        UserError: there is no run.
    """
    path = run_dir / "events.jsonl"
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such folder; give that of a run")
    if not path.is_file():
        raise UserError(f"{run_dir}: holds no events.jsonl; give the folder of a run")
    try:
        config = (run_dir / "config.yaml").read_text(encoding="utf-8")
        summary = run_dir / "summary.json"
        found = History(run_dir.name, run_dir, config)
        found.summary = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
        train_s, found.drawn = 0.0, _drawn_steps(run_dir / TIMELINE)
        for event in read_events(path):
            train_s = _take(found, event, train_s)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run_dir}: its files cannot be read ({type(error).__name__}: {error})") from error
    return found


def _drawn_steps(path: Path) -> list[tuple[str, list[Mapping[str, Any]]]]:
    if not path.is_file():
        return []
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError):  # cut off by a full disk
        return []
    names = {event["pid"]: event["args"]["name"] for event in told if event["name"] == "process_name"}
    return [(name, [e for e in told if e["ph"] == "X" and e["pid"] == number]) for number, name in names.items()]


def _take(found: History, event: Mapping[str, Any], train_s: float) -> float:
    """Adds an event. Returns the seconds of training so far."""
    kind, step = event["event"], int(event.get("step") or 0)
    if kind in _TRAINING:
        train_s += float(event["seconds"])
    if kind == "resume":
        found.steps = [point for point in found.steps if point.step <= step]
        found.evaluations = [point for point in found.evaluations if point.step <= step]
        found.plans = [change for change in found.plans if change.step <= step]
        found.told = [told for told in found.told if told[0] <= step]
        train_s = found.steps[-1].train_s if found.steps else 0.0
    elif kind == "run":
        found.total_steps = int(event["total_steps"])
    elif kind == "steps":
        found.steps.append(Point(step, train_s, _numbers(event)))
    elif kind == "evaluation":
        train_s = float(event["train_s"])  # exact, where the sum of seconds lacks what lies between events
        found.evaluations.append(Point(step, train_s, _numbers(event["metrics"])))
    elif kind == "plan":
        found.plans.append(PlanChange(step, train_s, event["plan"], event["reason"]))
    if kind in _TOLD:
        found.told.append((step, kind, _numbers(event)))
    return train_s


def _numbers(value: Any) -> Any:
    """JSON has no infinity and no NaN: the log has words for them (``to_plain``)."""
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
