"""The origin of a run: a new start, a checkpoint, or the plans of a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipetransformer.config import Config
from pipetransformer.config.calendar import Calendar
from pipetransformer.engine import Engine
from pipetransformer.freeze import AutoFreeze
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run.checkpoint import CheckpointStore
from pipetransformer.run.job import Job
from pipetransformer.run.replay import read_plans


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a run, the same on every rank.

    Attributes:
        checkpoints: the checkpoints of the run.
        checkpoint: the checkpoint to continue from; None without one.
        state: the JSON part of this checkpoint; empty without one.
        replayed: plans of a recorded run by step, taken instead of decisions; empty in any other run.
    """

    checkpoints: CheckpointStore
    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    replayed: Mapping[int, ParallelPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, *, job: Job, checkpoints: CheckpointStore, calendar: Calendar, world: World) -> Origin:
        """The origin that the configuration asks for.

        Raises:
            UserError: if there is nothing to resume or replay, or if it belongs to another job.
        """
        run, numbering, total_steps = config.run, job.chain.numbering, calendar.total_steps
        checkpoint, state = checkpoints.resumable(numbering=numbering) if run.resume else (None, {})
        replayed: Mapping[int, ParallelPlan] = {}
        if run.replay:
            replayed = read_plans(run.replay, world=world, numbering=numbering, total_steps=total_steps)
        return cls(checkpoints, checkpoint, state, replayed)

    def enter(self, engine: Engine, *, autofreeze: AutoFreeze, autopipe: AutoPipe) -> tuple[int, dict[str, object]]:
        """Collective. Takes the engine to the first plan, or to the state of the checkpoint.

        Returns:
            The number of steps done, and the figures behind the choice of the plan, by name.
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
        """Whether the plans are those of a recorded run."""
        return bool(self.replayed)

    @property
    def reason(self) -> str:
        """The reason of the first plan, for its event."""
        return "start" if self.checkpoint is None else "resume"

    def refill_path(self, cached: int | None) -> Sequence[int]:
        """The boundaries of the advance passes that fill the cache as it was at the checkpoint, in order.

        Where the stored type is narrower than that of the computation, values were rounded at each boundary. So the
        cache must pass the same ones.

        Args:
            cached: boundary of the cache at the checkpoint, in blocks; None for no cache.
        """
        if cached is None:
            return ()
        return [*(boundary for boundary in self.state.get("cache", ()) if boundary < cached), cached]
