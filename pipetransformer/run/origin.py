"""The origin of a run: a new start, a checkpoint, or the plans of a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipetransformer.config import Config
from pipetransformer.config.calendar import Calendar
from pipetransformer.engine import Engine
from pipetransformer.freeze import AutoFreeze
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.pipe.planner.answers import Choice
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run.checkpoint import CheckpointStore
from pipetransformer.run.folder import RunFolder
from pipetransformer.run.job import Job
from pipetransformer.run.replay import read_plans


class Origin:
    """The origin of a run, the same on every rank: the one that the configuration asks for.

    Attributes:
        checkpoint: the checkpoint to continue from; None without one.
        state: the JSON part of this checkpoint; empty without one.
        replayed: plans of a recorded run by step, taken instead of decisions; empty in any other run.

    Raises:
        UserError: if there is nothing to resume or replay, or if it belongs to another job.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        *,
        folder: RunFolder,
        checkpoints: CheckpointStore,
        calendar: Calendar,
        world: World,
    ) -> None:
        run, numbering = config.run, job.chain.numbering
        self._checkpoints, self._shard, self._world = checkpoints, config.dp.shard, world
        self.checkpoint: Path | None = None
        self.state: Mapping[str, Any] = {}
        self.replayed: Mapping[int, ParallelPlan] = {}
        # A run that is over may have no checkpoint any more, as its settings say.
        keeps_none = config.checkpoint.keep == 0 or config.checkpoint.every is None
        is_over = folder.ended_at == calendar.total_steps and keeps_none and checkpoints.latest() is None
        if run.resume and not is_over:
            self.checkpoint, self.state = checkpoints.resumable(numbering=numbering)
        if run.replay:
            self.replayed = read_plans(run.replay, world=world, numbering=numbering, total_steps=calendar.total_steps)

    def enter(self, engine: Engine, *, autofreeze: AutoFreeze, autopipe: AutoPipe) -> tuple[int, Choice | None]:
        """Collective. Takes the engine to the first plan, or to the state of the checkpoint.

        Returns:
            The number of steps done, and AutoPipe's choice of the plan; None where it has made none.
        """
        if self.checkpoint is not None:
            step, choice = int(self.state["step"]), self._fit(autopipe)
            engine.forget()
            optimizer_state = self._checkpoints.load(self.checkpoint, state=self.state, engine=engine)
            autofreeze.load_state_dict(self.state["freeze"])
            engine.enter(self._plan.sharing(self._shard), state=optimizer_state)
            return step, choice
        if self.replayed:
            engine.enter(self.replayed[0])
            return 0, None
        choice = autopipe.first_plan()
        engine.enter(choice.plan)
        return 0, choice

    @property
    def _plan(self) -> ParallelPlan:
        """The plan of the checkpoint."""
        plan: ParallelPlan = self.state["plan"]
        return plan

    def _fit(self, autopipe: AutoPipe) -> Choice | None:
        """Where the checkpoint is of another number of ranks, or its plan takes too much memory: gives it a plan for
        those of now, and takes them for the holders of its optimizer state. They read what others wrote, by name.
        Returns the choice; None where there is none."""
        old, size, choice = self._plan, self._world.size, None
        has_ranks = old.world_size == size and self._world.local_size % old.pp == 0
        if has_ranks and (self.replayed or not autopipe.exceeds(old, untouched=self.state["untouched"])):
            return None
        step = int(self.state["step"])
        if self.replayed:
            plan = self.replayed[max(at for at in self.replayed if at < step or at == 0)]
        else:
            choice = autopipe.resumed_plan(old, step=step, untouched=self.state["untouched"])
            plan = choice.plan
        active = plan.state_ranks()
        holders = {unit: active.get(unit, range(unit % size, unit % size + 1)) for unit in self.state["state_holders"]}
        self.state = {**self.state, "plan": plan, "state_holders": holders}
        return choice

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

    @property
    def cached_at_start(self) -> bool:
        """Whether no step had trained the units before the cache's boundary when it was filled."""
        return self.checkpoint is None or bool(self.state.get("cached_at_start"))
