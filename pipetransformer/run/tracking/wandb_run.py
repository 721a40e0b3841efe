"""The run on Weights & Biases: one for each job, offline by default."""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipetransformer.config import Config
from pipetransformer.process.files import write_whole
from pipetransformer.run.tracking.events import to_plain

_ONLINE_INIT_SECONDS = 30
_UPLOAD_SECONDS = 60.0
_ID_FILE = "wandb-id.txt"
_FAILED_UPLOAD_SECONDS = 3.0  # a failed job must end within ten seconds


class WandbRun:
    """Logs to ``run_dir/wandb``. After a failure of wandb, the training continues without it.

    wandb's id is the run's id and some random letters, which ``run_dir`` keeps. Online, a resumed job continues the
    same run. Offline, it writes one more segment of it, which ``wandb sync --append`` joins. With ``mode="disabled"``,
    wandb is never imported.

    Args:
        config: the resolved configuration, shown on the dashboard.
        mode: offline, online or disabled.
        report: called with one line after a failure of wandb.
    """

    def __init__(self, config: Config, *, run_dir: Path, run_id: str, mode: str, report: Callable[[str], None]) -> None:
        self._report = report
        self._run: Any = None
        self._defined = set[str]()
        if mode == "disabled":
            return
        try:
            import wandb

            with _no_prompt():
                self._run = wandb.init(
                    mode=mode,  # type: ignore[arg-type]
                    dir=str(run_dir),
                    id=_own_id(run_dir, run_id, is_resumed=bool(config.run.resume)),
                    project=config.log.project,
                    name=config.log.name or run_id,
                    group=config.log.group,
                    tags=list(config.log.tags) or None,
                    job_type=config.log.job_type,
                    config=config.model_dump(mode="json"),
                    resume="allow" if config.run.resume and mode == "online" else None,
                    settings=wandb.Settings(
                        console="off",
                        silent=True,
                        init_timeout=_ONLINE_INIT_SECONDS,
                        x_disable_stats=not config.log.system,  # its monitor outlives a killed job by seconds
                    ),
                )
                self._run.define_metric("train_seconds")
        except Exception as error:  # no error of a dashboard may end the job
            self._give_up("could not start", error)

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Logs metrics by name after ``step`` steps."""
        if self._run is None:
            return
        try:
            self._run.log(to_plain(metrics), step=step)
        except Exception as error:  # as above: its service process may have died
            self._give_up(f"stopped at step {step}", error)

    def keep_best(self, metrics: Mapping[str, Any]) -> None:
        """The table of runs shows the best value of these metrics, and their curves stand over seconds of training."""
        new = [name for name in metrics if name.startswith(("Test/", "Evaluation ")) and name not in self._defined]
        self._defined.update(new)
        if self._run is None:
            return
        try:
            for name in new:
                best = "min" if "loss" in name.lower() else "max"
                self._run.define_metric(name, step_metric="train_seconds", summary=best)
        except Exception as error:  # as above
            self._give_up("stopped", error)

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A table, once, at the end."""
        if self._run is None:
            return
        try:
            import wandb

            cells = [[value if isinstance(value, (int, float, str)) else str(value) for value in row] for row in rows]
            self._run.log({name: wandb.Table(columns=list(columns), data=cells)})
        except Exception as error:  # as above
            self._give_up("stopped", error)

    def conclude(self, figures: Mapping[str, Any]) -> None:
        """The figures of a whole run, for the table of runs."""
        if self._run is None:
            return
        try:
            self._run.summary.update(to_plain(figures))
        except Exception as error:  # as above
            self._give_up("stopped", error)

    def finish(self, *, exit_code: int = 0) -> None:
        """Flushes, marks the run as finished or failed, and ends wandb's service process.

        Note: without a network, wandb would wait for ever for the rest of the upload. So it gets a limited time.
        """
        if self._run is None:
            return
        limit = _FAILED_UPLOAD_SECONDS if exit_code else _UPLOAD_SECONDS
        thread = threading.Thread(target=self._finish, args=(self._run, exit_code), name="wandb-finish", daemon=True)
        thread.start()
        thread.join(limit)
        if thread.is_alive():
            self._report(f"wandb has not uploaded everything in {limit:.0f} s; `wandb sync` does the rest")
        self._run = None

    def _finish(self, run: Any, exit_code: int) -> None:
        import wandb

        try:
            run.finish(exit_code=exit_code)
            wandb.teardown(exit_code=exit_code)
        except Exception as error:  # as above
            self._give_up("could not finish", error)

    def _give_up(self, what: str, error: Exception) -> None:
        self._run = None
        lines = str(error).splitlines() or [type(error).__name__]
        self._report(f"wandb {what}: {lines[0]}; the run goes on without it")


def _own_id(run_dir: Path, run_id: str, *, is_resumed: bool) -> str:
    """The run's id in wandb's project, kept in its folder: other machines may give runs of their own the same id."""
    named, file = re.sub(r"[^A-Za-z0-9_.-]", "-", run_id), run_dir / _ID_FILE
    if is_resumed:  # runs of older versions have none of their own
        return file.read_text().strip() if file.is_file() else named
    found = f"{named}-{secrets.token_hex(4)}"
    write_whole(file, f"{found}\n")
    return found


@contextmanager
def _no_prompt() -> Iterator[None]:
    """Hides standard input. Without a key, wandb would ask for one there, and all ranks would wait; now it raises."""
    stdin = sys.stdin
    with open(os.devnull, encoding="ascii") as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = stdin
