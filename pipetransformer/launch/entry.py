"""The command line of the entries: ``python main_cv.py CONFIG [key=value ...]``, alone or as a rank of torchrun.

Whatever goes wrong ends here. Alone, the cause is the last line on stderr; under torchrun it goes to the launcher,
which shows the one of the rank that failed first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipetransformer.config import Config, load_config
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import Parser
from pipetransformer.process import failure, shutdown

ENTRIES = {
    "image_classification": "main_cv.py",
    "text_classification": "main_tc.py",
    "question_answering": "main_qa.py",
}
_PEER_WAIT_SECONDS = 2.0


def main(task: str | None = None, argv: Sequence[str] | None = None) -> int:
    """Train as the configuration says and return the exit code: 0, 2 for a user's mistake, 1 for any other failure.

    Args:
        task: the task of the entry, which the configuration must have; None for any.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_guarded(lambda: _train(_configuration(task, arguments)))


def run_guarded(body: Callable[[], None]) -> int:
    """Run ``body`` as the job of this process and return the exit code; signals and exceptions end it with one line.

    Note: a process that fails and has peers does not return from here, see ``process.shutdown.leave``.
    """
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    try:
        with shutdown.installed(parent=launcher, before_leaving=_tell_interruption) as signals:
            exit_code = _attempt(body, signals=signals)
    except shutdown.Interrupted as interrupted:
        exit_code = interrupted.exit_code
        if launcher is None:
            print(f"interrupted by {interrupted.signal.name}", file=sys.stderr)
            if interrupted.outcome:
                print(interrupted.outcome, file=sys.stderr)
        else:
            _tell_interruption(interrupted.signal, interrupted)
    if exit_code and _has_peers():
        sys.stdout.flush()
        sys.stderr.flush()
        shutdown.leave(exit_code)
    return exit_code


def _train(config: Config) -> None:
    # Note: torch takes seconds to import; a mistake in the configuration is told before.
    from pipetransformer.process.world import close_world, init_world
    from pipetransformer.trainer import Trainer

    if config.run.private:
        os.umask(0o077)
    world = init_world(timeout_seconds=config.run.timeout)
    trainer: Trainer | None = None
    try:
        trainer = Trainer(config, world)
        trainer.run()
    except BaseException as error:
        if world.size == 1:  # no peer can keep it waiting, and a caller in this process may try again
            close_world()
            is_told_by_launcher = "TORCHELASTIC_RUN_ID" in os.environ
            if trainer is not None and isinstance(error, shutdown.Interrupted) and not is_told_by_launcher:
                error.outcome = error.outcome or kept_line(trainer.report.folder.path)
        raise
    close_world()
    if world.rank == 0:
        _tell_places(trainer.report.folder.path, config)


def _tell_places(run_dir: Path, config: Config) -> None:
    """Where everything is, and the next command."""
    from pipetransformer.run.page import read_history, write_report
    from pipetransformer.run.tracking import say

    report = run_dir / "report.html"
    which = "final" if config.model.save == "final" else "best"
    told = [("run", str(run_dir)), (f"{which} model", str(run_dir / "model" / which))]
    if config.log.report:
        try:
            write_report([read_history(run_dir)], report)
            told.append(("report", str(report)))
        except Exception as error:  # no page may end a job that has trained well
            told.append(("report", f"not written ({failure.cause_line(error)})"))
    if config.log.wandb == "offline" and (found := sorted((run_dir / "wandb").glob("offline-run-*"))):
        told.append(("dashboard", f"wandb sync {found[-1]}"))
    told.append(("next", f"pipetransformer predict {run_dir} DATA"))
    for name, place in told:
        say(f"{name:11}  {place}")


def kept_line(run_dir: Path) -> str:
    """What an interrupted run has kept, and the way on."""
    from pipetransformer.run.folder import complete_checkpoints

    kept = complete_checkpoints(run_dir)
    if (run_dir / "summary.json").is_file():
        return f"its steps were done: {run_dir} is complete"
    if not kept:
        return f"no checkpoint is kept in {run_dir}; begin it again with run.overwrite=true"
    return f"step {int(kept[-1].name[-8:])} is kept; go on with run.id={run_dir.name} run.resume=true"


def _configuration(task: str | None, arguments: Sequence[str]) -> Config:
    parser = Parser(prog=ENTRIES.get(task or "", "train"), description=f"Train: {(task or '').replace('_', ' ')}.")
    parser.add_argument("config", metavar="CONFIG", help="YAML file; its keys are documented in docs/config.md")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="override, e.g. train.epochs=3")
    parsed = parser.parse_args(arguments)
    config = load_config(parsed.config, parsed.overrides)
    if task is not None and config.task != task:
        other = ENTRIES.get(config.task, "pipetransformer.train, from Python")
        raise UserError(f"task: {config.task} is not for {ENTRIES[task]}; use {other}")
    return config


def _attempt(body: Callable[[], None], *, signals: shutdown.Signals) -> int:
    try:
        body()
    except Exception as error:
        if signals.interruption is not None:
            raise signals.interruption from None
        if isinstance(error, ModuleNotFoundError):
            package = (error.name or "").partition(".")[0]
            error = UserError(f"{package} is missing; run 'sh setup.sh', then use .venv/bin/python or activate .venv")
        followed, began = _is_peer_failure(error), time.monotonic()
        silent = _silent_nodes(error) if followed else []
        if followed:  # the launcher sees the rank that failed first, and ends this one
            time.sleep(max(0.0, _PEER_WAIT_SECONDS - (time.monotonic() - began)))
        _tell(failure.describe(error, followed=followed, silent=silent))
        return 2 if isinstance(error, UserError) else 1
    return 0


def _tell(report: failure.Failure) -> None:
    if not _left(report):
        print(f"{report.details}error: {report.line}", file=sys.stderr)


def _tell_interruption(number: signal.Signals, error: shutdown.Interrupted | None = None) -> None:
    """To the launcher, if there is one."""
    if error is None:
        _left(failure.interrupted(number))
    elif error.is_ours:
        _left(failure.interrupted(number, trace=error.__traceback__, outcome=error.outcome))


def _left(report: failure.Failure) -> bool:
    """Leaves the report to the launcher. Returns whether there is one."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        failure.write_report(Path(error_file), rank=int(os.environ["RANK"]), report=report)
    return bool(error_file)


def _is_peer_failure(error: Exception) -> bool:
    if isinstance(error, UserError) or "torch.distributed" not in sys.modules:
        return False
    from pipetransformer.adapter import is_peer_failure

    return is_peer_failure(error)


def _silent_nodes(error: Exception) -> list[int]:
    """The nodes without an answer, where there are several."""
    is_alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if is_alone or not _has_peers() or not failure.is_timeout(failure.cause_line(error)):
        return []
    from pipetransformer.adapter import silent_nodes

    return silent_nodes(seconds=_PEER_WAIT_SECONDS)


def _has_peers() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1
