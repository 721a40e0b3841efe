"""One checkpoint at a time on its way to the disk, beside training. It is complete or invisible.

checkpoints/step-00000120/    weights and optimizer state, in the format of torch.distributed.checkpoint (DCP); one of
                              its holders writes each tensor
                state.json    everything else: plan, progress, state of the freeze policy, totals
                sha256.json   digests of all files, which are compared before any is read
checkpoints/step-00000120.part/   the name while it is written; renamed after the last write of all ranks
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_threads
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from pipetransformer.adapter import CheckpointException, patient_group, save_tensors
from pipetransformer.errors import UserError, writing
from pipetransformer.process.collectives import begun, by_all, waited_for
from pipetransformer.process.files import write_whole
from pipetransformer.process.shutdown import cleaned_up
from pipetransformer.process.whereabouts import HERE, Whereabouts
from pipetransformer.process.world import World
from pipetransformer.run.checksums import digests_of, write_digests
from pipetransformer.run.folder import PART, complete_checkpoints

_LAST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a write.

    Attributes:
        step: number of steps done when it began.
        path: the folder of the checkpoint.
        seconds: those that training has waited for it.
        write_seconds: those of the write, beside training.
        error: the obstacle, if it could not be written; the checkpoint before is there then.
    """

    step: int
    path: Path
    seconds: float
    write_seconds: float
    error: UserError | None


class CheckpointWriter:
    """Writes checkpoints in a thread, so that training goes on meanwhile.

    DCP's own ``async_save`` is not used: its thread would keep a process that has failed from ending, and what follows
    the tensors, digests and the final name, belongs to the same thread.

    Args:
        folder: the folder of all checkpoints of the run.
        keep: number of complete ones that are kept; 0 for one until the run has ended.
        beside: whether training goes on meanwhile; else ``outcome`` waits.
    """

    def __init__(self, folder: Path, *, keep: int, beside: bool, world: World) -> None:
        self._folder, self._keep, self._beside, self._world = folder, keep, beside, world
        self._group: ProcessGroup | None = None
        self._write: _Write | None = None

    def begin(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Collective. Begins a checkpoint, behind the ``outcome`` of the one before.

        Args:
            step: number of steps done.
            tensors: those that this rank writes, by name; copied, as training changes them.
            record: what JSON can hold.
        """
        assert self._write is None, "one at a time"
        began = perf_counter()
        if self._world.size > 1 and self._group is None:
            self._group = patient_group(timeout=self._world.timeout)
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()} if self._beside else tensors
        final = self._folder / f"step-{step:08d}"
        task = _Task(final, dict(copies), json.dumps(record), self._group, max(1, self._keep), HERE.beside())
        answer = begun(partial(task.run, rank=self._world.rank))
        self._write = _Write(step, task, answer, seconds=perf_counter() - began)

    def outcome(self, *, wait: bool) -> Outcome | None:
        """The end of the last checkpoint begun, once; None if it has not come, or was told.

        Args:
            wait: whether all ranks, together, wait for it, as long as any rank's disk takes.
        """
        began, write = perf_counter(), self._write
        if wait or not (self._beside or write is None):
            waited_for(None if write is None else write.answer)
        if write is None or not write.answer.done():
            return None
        error: UserError | None = None
        try:
            write.answer.result()
        except UserError as told:
            error = told
        except BaseException:
            HERE.step, HERE.phase = write.step, write.task.here.phase  # its place is not that of the training
            raise
        self._write = None
        waited = write.seconds + perf_counter() - began
        return Outcome(write.step, write.task.final, waited, write.task.seconds, error)

    def close(self, *, has_ended: bool) -> None:
        """Not collective. Behind a failure: gives up what is not written within two seconds.

        Args:
            has_ended: whether the run has ended well.
        """
        if has_ended and not self._keep and self._world.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        write, self._write = self._write, None
        if write is not None:
            wait_for_threads([write.answer], timeout=_LAST_SECONDS)
            discard(write.task.part)


@dataclass(slots=True)
class _Task:
    """What the thread does. It is collective, over a group that no other thread uses; None for one rank.

    Attributes:
        final: the folder of the checkpoint.
        tensors: those that this rank writes, by name.
        record: the content of ``state.json``.
        keep: number of complete ones that are kept.
        here: the place of the thread.
        seconds: those that it took.
    """

    final: Path
    tensors: dict[str, Tensor]
    record: str
    group: ProcessGroup | None
    keep: int
    here: Whereabouts
    seconds: float = 0.0

    @property
    def part(self) -> Path:
        return self.final.with_name(self.final.name + PART)

    def run(self, *, rank: int) -> None:
        began = perf_counter()
        part = self.part
        self.here.enter("checkpoint write")
        with cleaned_up(lambda: discard(part)):
            by_all(lambda: self._prepare() if rank == 0 else None, group=self.group)
            try:
                save_tensors(self.tensors, part, group=self.group)
            except CheckpointException as error:
                raise UserError(f"checkpoint: {part} could not be written ({first_failure(error)})") from error
            self.tensors = {}
            everyone = by_all(lambda: _digests(part, f"__{rank}_*"), group=self.group)
            self.here.enter("checkpoint publish")
            by_all(lambda: self._publish(everyone) if rank == 0 else None, group=self.group)
        self.here.enter(None)
        self.seconds = perf_counter() - began

    def _prepare(self) -> None:
        for left_behind in self.final.parent.glob(f"*{PART}"):
            shutil.rmtree(left_behind, ignore_errors=True)
        with writing(self.part):
            self.part.mkdir(parents=True)

    def _publish(self, digests: Sequence[Mapping[str, str]]) -> None:
        part = self.part
        write_whole(part / "state.json", self.record)
        own = {**_digests(part, "state.json"), **_digests(part, ".metadata")}
        write_digests(part, {name: digest for each in (own, *digests) for name, digest in each.items()})
        discard(self.final)
        with writing(self.final):
            part.rename(self.final)
        for old in complete_checkpoints(self.final.parents[1])[: -self.keep]:
            discard(old)


@dataclass(frozen=True, slots=True)
class _Write:
    """A task under way.

    Attributes:
        step: number of steps done when it began.
        answer: its end.
        seconds: those that training has waited for it to begin.
    """

    step: int
    task: _Task
    answer: Future[None]
    seconds: float


def _digests(folder: Path, names: str) -> dict[str, str]:
    """Those of the files that fit a pattern. Raises UserError where one cannot be read."""
    with writing(folder):
        return digests_of(folder.glob(names))


def discard(folder: Path) -> None:
    """Deletes ``folder`` if it exists, safely against other ranks that use it at the same time.

    It is renamed first: then no rank can write into it, and a half-deleted folder does not look like a checkpoint.
    """
    doomed = folder.with_name(f"{folder.stem}.{os.getpid()}{PART}")
    with cleaned_up(partial(shutil.rmtree, doomed, ignore_errors=True)), contextlib.suppress(OSError):
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # once more at the end: a signal may interrupt this one


def first_failure(error: CheckpointException) -> str:
    """The first rank's failure in one line.

    Note: torch makes this error a BaseException, so that ``except Exception`` does not catch it, with a text of many
    lines.
    """
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
