"""A job outside the trainer that enters one plan after another and runs steps of it, made of the trainer's parts."""

from __future__ import annotations

from pipetransformer.cache import ActivationStore
from pipetransformer.config import Config
from pipetransformer.engine.executor import StepInput
from pipetransformer.engine.feed import Feed
from pipetransformer.engine.layout import Layout, initial_ownership, move
from pipetransformer.engine.objective import Objective
from pipetransformer.engine.step import Stepper
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run.job import Job

__all__ = ["PlanSteps"]


class PlanSteps:
    """One rank's share. ``enter`` and ``leave`` are collective, as steps are.

    Attributes:
        layout: of the plan that was entered last.
    """

    def __init__(self, job: Job, config: Config, *, world: World) -> None:
        self._job, self._config, self._world = job, config, world
        self.objective = Objective(job.datasets["train"].kind, label_smoothing=0.0, device=world.device)
        self.stepper = Stepper(job.chain, config.train, objective=self.objective, rank=world.rank, needs_norms=False)
        self.layout: Layout | None = None
        self._ownership = initial_ownership(job.chain, world)

    def enter(self, plan: ParallelPlan) -> Layout:
        """Moves the job there, if it is elsewhere; recomputation is the configuration's."""
        if self.layout is None or self.layout.plan != plan:
            self.layout, _ = move(
                self.layout, plan, ownership=self._ownership, chain=self._job.chain, train=self._config.train,
                world=self._world, objective=self.objective, keep_frozen_state=False,
                recompute=self._config.pipe.recompute,
            )  # fmt: skip
            self._job.chain.train()  # blocks that are frozen no more are still in eval mode
        return self.layout

    def feed(self, plan: ParallelPlan, *, store: ActivationStore | None = None) -> Feed:
        """What brings this rank its share of batches under ``plan``."""
        data, num_workers = self._job.datasets["train"], self._config.data.num_workers
        return Feed(self._job.chain, data, plan, rank=self._world.rank, store=store, num_workers=num_workers)

    def run(self, feed: Feed, batch: StepInput, *, step: int = 0, lr: float = 0.0) -> None:
        """A step of the plan that was entered, optimizer included."""
        assert self.layout is not None
        self.stepper.run(self.layout, feed, batch, step=step, lr=lr)

    def backward(self, batch: StepInput) -> None:
        """The gradients of a step, summed over the replicas; no optimizer."""
        assert self.layout is not None
        self.objective.begin(step=0, global_count=batch.global_count)
        self.layout.reducer.begin(num_microbatches=self.layout.plan.num_microbatches)
        self.layout.executor.train(batch)
        self.layout.reducer.finish()

    def leave(self) -> None:
        """Every rank holds the whole model again, without optimizer state, as measurements before training find it."""
        if self.layout is not None:
            self.enter(ParallelPlan(0, 1, self._world.size, (), 1, "1f1b", None, self._job.chain.num_blocks)).close()
            self.layout = None
            self._ownership.state.clear()
