"""The tracker: event log, bar, dashboard and summary of a run, behind one object."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipetransformer.config import Config
from pipetransformer.errors import UserError
from pipetransformer.run.tracking.events import EventLog
from pipetransformer.run.tracking.progress import Progress
from pipetransformer.run.tracking.render import render
from pipetransformer.run.tracking.summary import Summary, write_json
from pipetransformer.run.tracking.tensorboard import TensorBoard
from pipetransformer.run.tracking.wandb_run import WandbRun


class Tracker:
    """The outlets of a run. Every rank has a tracker and calls it alike; those of other ranks than 0 lead nowhere.

    Args:
        config: the resolved configuration.
        run_dir: folder of the run; it must exist.
        run_id: id of the run.

    Attributes:
        line: prints a fact with its figures, above the bar.
        step: moves the bar; see ``Progress.update``. The first call needs ``total_steps``.
    """

    def __init__(self, config: Config, *, rank: int, run_dir: Path, run_id: str) -> None:
        is_first = rank == 0
        self._run_dir = run_dir if is_first else None
        self._events = EventLog(run_dir / "events.jsonl" if is_first else Path(os.devnull))
        self._progress = Progress(quiet=not is_first)
        self.line, self.step = self._progress.line, self._progress.update
        mode = config.log.wandb if is_first else "disabled"
        self._wandb_run = WandbRun(config, run_dir=run_dir, run_id=run_id, mode=mode, report=self.line)
        self._boards: list[WandbRun | TensorBoard] = [self._wandb_run]
        if is_first and config.log.tensorboard:
            self._boards.append(TensorBoard(run_dir / "tensorboard"))

    def metrics(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Logs to the dashboards; see ``WandbRun.log``. ``step`` must never be less than in the call before."""
        for board in self._boards:
            board.log(metrics, step=step)

    def evaluation(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """The same, of an evaluation: the best value of a metric is the one of the table of runs."""
        self._wandb_run.keep_best(metrics)
        self.metrics(metrics, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A table on the dashboard."""
        self._wandb_run.table(name, columns, rows)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Appends to ``events.jsonl``; see ``EventLog.write``. A first event that is lost is told."""
        before = self._events.num_lost
        self._events.write(kind, **fields)
        if self._events.num_lost > before == 0:
            self.line(f"warning: events.jsonl cannot be written ({self._events.reason}); some events are missing there")

    def predictions(self, answers: Mapping[str, str]) -> None:
        """Writes ``predictions.json``: answers by question id, in the format of SQuAD's official scorer."""
        if self._run_dir is None:
            return
        try:
            write_json(self._run_dir / "predictions.json", answers)
        except UserError as error:
            self.line(f"warning: {error}; the answers are those of an evaluation before")

    def summarise(self, summary: Summary) -> None:
        """Writes ``summary.json`` and shows it, on the dashboard too; the bar ends."""
        self._progress.close()
        if self._run_dir is not None:
            write_json(self._run_dir / "summary.json", summary)
        self._wandb_run.conclude(summary.figures())
        self._progress.show(render(summary))

    def close(self, *, exit_code: int = 0) -> None:
        """Ends all outlets, after success (exit code 0) or failure. May be called twice."""
        self._progress.close()
        for board in self._boards:
            board.finish(exit_code=exit_code)
        self._events.close()
