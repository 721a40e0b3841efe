"""The tracker: event log, bar, dashboard and summary of a run, behind one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetransformer.run.tracking.events import EventLog
from pipetransformer.run.tracking.progress import Progress, ProgressFields
from pipetransformer.run.tracking.render import render
from pipetransformer.run.tracking.summary import Summary, write_json
from pipetransformer.run.tracking.wandb_run import WandbRun

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class _Outlets:
    run_dir: Path
    events: EventLog
    progress: Progress
    wandb_run: WandbRun


class Tracker:
    """The outlets of a run. Every rank has a tracker from ``for_rank`` and calls it alike; only rank 0's does work."""

    def __init__(self, outlets: _Outlets | None) -> None:
        self._outlets = outlets

    @classmethod
    def for_rank(
        cls,
        rank: int,
        *,
        run_dir: Path,
        run_id: str,
        wandb: str,
        project: str,
        name: str | None,
        config: Mapping[str, Any],
        resumed: bool,
    ) -> Tracker:
        """The tracker of ``rank``.

        Args:
            run_dir: folder of the run; it must exist.
            run_id: id of the run.
            wandb: mode of the dashboard: offline, online or disabled.
            project: project on the dashboard.
            name: name of the run on the dashboard; None for its id.
            config: the resolved configuration, shown on the dashboard.
            resumed: whether the run is resumed.
        """
        if rank != 0:
            return cls(None)
        events = EventLog(run_dir / "events.jsonl")
        progress = Progress()
        wandb_run = WandbRun(
            run_dir=run_dir,
            run_id=run_id,
            mode=wandb,
            project=project,
            name=name,
            config=config,
            resumed=resumed,
            report=progress.line,
        )
        return cls(_Outlets(run_dir=run_dir, events=events, progress=progress, wandb_run=wandb_run))

    def event(self, kind: str, /, **fields: Any) -> None:
        """Appends to ``events.jsonl``; see ``EventLog.write``."""
        if self._outlets:
            self._outlets.events.write(kind, **fields)

    def line(self, text: str) -> None:
        """Prints a fact with its figures, above the bar."""
        if self._outlets:
            self._outlets.progress.line(text)

    def step(self, global_step: int, **fields: Unpack[ProgressFields]) -> None:
        """Moves the bar; see ``Progress.update``. The first call needs ``total_steps``."""
        if self._outlets:
            self._outlets.progress.update(global_step, **fields)

    def metrics(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Logs to the dashboard, by the names of ``names.py``. ``step`` must never be less than in the call before."""
        if self._outlets:
            self._outlets.wandb_run.log(metrics, step=step)

    def predictions(self, answers: Mapping[str, str]) -> None:
        """Writes ``predictions.json``: answers by question id, in the format of SQuAD's official scorer."""
        if self._outlets:
            write_json(self._outlets.run_dir / "predictions.json", answers)

    def summarise(self, summary: Summary) -> None:
        """Writes ``summary.json`` and shows it; the bar ends."""
        if self._outlets:
            self._outlets.progress.close()
            summary.write(self._outlets.run_dir / "summary.json")
            self._outlets.progress.show(render(summary))

    def close(self, *, exit_code: int = 0) -> None:
        """Ends all outlets, after success (exit code 0) or failure. May be called twice."""
        if self._outlets:
            self._outlets.progress.close()
            self._outlets.wandb_run.finish(exit_code=exit_code)
            self._outlets.events.close()
