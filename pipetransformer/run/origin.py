"""The origin of a run: nothing, a checkpoint, or the plans of a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetransformer.config.calendar import Calendar
from pipetransformer.engine import Engine
from pipetransformer.freeze import AutoFreeze
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run.checkpoint import CheckpointStore
from pipetransformer.run.job import Job
from pipetransformer.run.replay import read_plans

if TYPE_CHECKING:
    from pipetransformer.config import Config

__all__ = ["Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Found before anything is built on it; every rank finds the same.

    Attributes:
        checkpoints: of the run.
        checkpoint: the one to go on from, or None.
        state: its JSON part; empty without one.
        replayed: plans to be taken instead of decisions, by step; empty where decisions are new.
    """

    checkpoints: CheckpointStore
    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    replayed: Mapping[int, ParallelPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, *, job: Job, checkpoints: CheckpointStore, calendar: Calendar, world: World) -> Origin:
        """Raises UserError where there is nothing to resume or replay, or it belongs to another job."""
        run, numbering, total_steps = config.run, job.chain.numbering, calendar.total_steps
        checkpoint, state = checkpoints.resumable(numbering=numbering) if run.resume else (None, {})
        replayed: Mapping[int, ParallelPlan] = {}
        if run.replay:
            replayed = read_plans(run.replay, world=world, numbering=numbering, total_steps=total_steps)
        return cls(checkpoints, checkpoint, state, replayed)

    def enter(self, engine: Engine, *, autofreeze: AutoFreeze, autopipe: AutoPipe) -> tuple[int, dict[str, object]]:
        """Collective. Takes the engine to the first plan, or to the checkpoint's with all that it held.

        Returns:
            Steps that are done, and the evidence for the plan.
        """
        if self.checkpoint is not None:
            engine.forget()
            plan, optimizer_state = self.checkpoints.load(self.checkpoint, state=self.state, engine=engine)
            autofreeze.load_state_dict(self.state["freeze"])
            engine.enter(plan, state=optimizer_state)
            return int(self.state["step"]), {}
        if self.is_replayed:
            engine.enter(self.replayed[0])
            return 0, {}
        choice = autopipe.first_plan()
        engine.enter(choice.plan)
        return 0, {"choice": choice}

    @property
    def is_replayed(self) -> bool:
        return bool(self.replayed)

    @property
    def reason(self) -> str:
        """Of the first plan."""
        return "start" if self.checkpoint is None else "resume"

    def refill_path(self, cached: int | None) -> Sequence[int]:
        """The boundaries that the cache must be carried through, to hold at ``cached`` what it held at the checkpoint:
        a store that is narrower than the computation has rounded at each."""
        if cached is None:
            return ()
        return [*(boundary for boundary in self.state.get("cache", ()) if boundary < cached), cached]
