"""The loop. Where a decision is due, four controllers are asked in this order:

AutoFreeze  gradient norms            -> n, how many leading blocks are frozen now
AutoPipe    n, measured layer costs   -> ParallelPlan(n, pp, dp, boundaries, microbatches, schedule, cached)
AutoDP      old plan, new plan        -> transfers; the same ranks re-meshed in place
AutoCache   n, sample ids             -> activations at the freeze boundary, read instead of computed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from pipetransformer.cache import AutoCache
from pipetransformer.config import Config
from pipetransformer.config.calendar import Agenda
from pipetransformer.data import Batch, epoch_batches
from pipetransformer.engine.evaluate import NotFinite, evaluate_splits
from pipetransformer.engine.feed import Feed
from pipetransformer.engine.layout import Layout, Move, initial_ownership, move
from pipetransformer.engine.objective import Objective
from pipetransformer.engine.optim import OptimizerState, learning_rate
from pipetransformer.engine.step import PhaseSeconds, Probe, Stepper
from pipetransformer.freeze import AutoFreeze
from pipetransformer.pipe.controller import Planning
from pipetransformer.pipe.planner.choice import AutoPipe, Choice
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World, device_memory, led_by
from pipetransformer.run.checkpoint import CheckpointStore, gather_weights, job_identity, save_model
from pipetransformer.run.guards import Guards
from pipetransformer.run.job import build_job, check_layout, find_run_folder, read_plans
from pipetransformer.run.report import Report
from pipetransformer.run.totals import reset_peak_memory

__all__ = ["Trainer"]


class Trainer:
    """Trains one job on this rank; every rank of ``world`` makes one and calls ``run``.

    Args:
        probe: called with (step, local gradients by name) after the reduction and before clipping.
        timed: measure unit costs and static layouts before training. Only a run that replays its plans can do without;
            it then has no compute floor.

    Raises:
        UserError: for every mistake in the configuration or the files it names.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        probe: Probe | None = None,
        timed: bool = True,
    ) -> None:
        started = perf_counter()
        train = config.train
        self.config, self.world, self.timed = config, world, timed
        folder = find_run_folder(config)
        job = build_job(config, world, lead=partial(led_by, world.rank - world.local_rank))
        self.chain, self.built, self.datasets = job.chain, job.built, job.datasets
        self.train_data = self.datasets["train"]
        check_layout(config, world_size=world.size, local_size=world.local_size, num_units=self.chain.num_units)
        batches_per_epoch = len(self._train_batches(0))
        self.agenda = Agenda(batches_per_epoch, train.epochs, train.eval_every, config.checkpoint.every)
        self.total_steps = self.agenda.total_steps
        numbering, num_blocks = self.chain.numbering, self.chain.num_blocks
        self.checkpoints = CheckpointStore(folder.path / "checkpoints", world=world, keep=config.checkpoint.keep)
        self.identity = job_identity(
            train, total_steps=self.total_steps, num_nodes=world.num_nodes, training_data=self.train_data
        )
        self.resumable = (
            self.checkpoints.resumable(identity=self.identity, numbering=numbering) if config.run.resume else None
        )
        self.replayed = (
            read_plans(config.run.replay, world=world, numbering=numbering, total_steps=self.total_steps)
            if config.run.replay
            else None
        )
        self.autofreeze = AutoFreeze.of(config.freeze, num_blocks=num_blocks, batches_per_epoch=batches_per_epoch)
        self.autopipe = AutoPipe.of(
            config,
            num_blocks=num_blocks,
            world_size=world.size,
            local_size=world.local_size,
            device_memory=device_memory(world.device),
        )
        self.autocache = AutoCache(
            config.cache,
            chain=self.chain,
            datasets=self.datasets,
            rank=world.rank,
            local_rank=world.local_rank,
            local_size=world.local_size,
            num_nodes=world.num_nodes,
            advance_rows=-(-train.batch_size // world.size),
        )
        self.planning = Planning(
            config, autopipe=self.autopipe, autocache=self.autocache, agenda=self.agenda, world=world
        )
        self.objective = Objective(self.train_data.kind, label_smoothing=train.label_smoothing, device=world.device)
        self.guards = Guards(self.objective, rank=world.rank, checkpoints=self.checkpoints)
        self.stepper = Stepper(
            self.chain,
            train,
            objective=self.objective,
            rank=world.rank,
            probe=probe,
            needs_norms=self.autofreeze.needs_norms,
        )
        self.ownership = initial_ownership(self.chain, world)
        self.keep_frozen_state = self.replayed is not None or self.autofreeze.may_unfreeze
        self.layout: Layout | None = None
        self.feeds: dict[str, Feed] = {}
        self.step = 0
        metric = next(data for split, data in self.datasets.items() if split != "train").metric_names[0]
        self.report = Report(
            config, world, folder=folder, total_steps=self.total_steps, started=started, best_by=metric
        )

    def run(self) -> None:
        """Trains to the end and leaves the run's folder as design.md says."""
        exit_code = 1
        try:
            if self.timed:
                self.report.measures()
                self._calibrate()
            self._start()
            while self.step < self.total_steps:
                self._decide()
                self._run_steps(self.agenda.next_pause(self.step, self._decision_is_due))
                if self.agenda.evaluation_is_due(self.step):
                    self._evaluate()
                if self.agenda.checkpoint_is_due(self.step):
                    self._save_checkpoint()
            self._finish()
            exit_code = 0
        finally:
            self.feeds.clear()
            self.autocache.close()
            self.report.close(exit_code)

    # ---- the controllers -------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Asks the controllers where a decision is due, and takes the job to the plan that they come to."""
        start, booked = perf_counter(), self.report.totals.train_s
        if self.replayed is not None:
            plan = self.replayed.get(self.step, self._plan)
            if plan != self._plan:
                self._enter(plan, reason="replayed", evidence={})
        elif self.autofreeze.due(self.step):
            self._decide_live()
        self.report.spent_deciding(perf_counter() - start - (self.report.totals.train_s - booked))

    def _decide_live(self) -> None:
        norm_sums, num_steps = self.stepper.take_norms(self._layout)
        self.autofreeze.observe(norm_sums, num_steps=num_steps)
        decision = self.autofreeze.decide(self.step, frozen=self._plan.frozen)
        self.report.decided(decision)
        now = self._plan.frozen
        most = min(decision.frozen, self.autopipe.max_frozen(self._plan))
        has_news = self.planning.remeasure()
        # Every rank holds the prefix: under pipe.memory_limit a longer one may fit in no layout.
        candidates = range(most, now, -1) if most > now else range(most, min(most + 1, now))
        choice = next((choice for frozen in candidates if (choice := self._choose(frozen)) is not None), None)
        frozen = now if choice is None else choice.plan.frozen
        if frozen < decision.frozen:
            why = (
                "the pipeline that is kept needs a unit for each stage"
                if frozen == most
                else "no layout fits in memory"
            )
            self.report.held(self.step, frozen=frozen, wanted=decision.frozen, reason=why)
        reason: str = self.config.freeze.policy
        if most == now and has_news:
            choice, reason = self.planning.replan(step=self.step, current=self._plan), "measured"
        if choice is not None:
            self._enter(choice.plan, reason=reason, evidence={"choice": choice})

    def _choose(self, frozen: int) -> Choice | None:
        return self.planning.choose(frozen, step=self.step, current=self._plan)

    def _enter(self, plan: ParallelPlan, *, reason: str, evidence: dict[str, object]) -> None:
        """Takes the job to ``plan`` (AutoDP) and the cache to its boundary (AutoCache)."""
        old = self._plan
        self.feeds.clear()
        self.stepper.settle_norms(self._layout)
        self.autocache.follow(plan.frozen)
        plan = self._with_cache(plan)
        self.report.adopts(self.step, plan, reason=reason, evidence=evidence)
        moved = self._move(plan)
        self.report.moved(self.step, self.epoch, old, plan, moved, reason=reason)
        if plan.cached is not None and plan.cached != self.autocache.boundary:
            self._advance(plan.cached)
        self._open_feeds()
        self.planning.entered()

    def _with_cache(self, plan: ParallelPlan) -> ParallelPlan:
        """``plan`` with the cache's memory reserved, or without a cache where that is declined; told once."""
        if plan.cached is not None and self.autocache.reserve():
            plan = replace(plan, cached=None)
        if plan.frozen and self.autocache.declined:
            self.report.declined(self.step, self.autocache.declined)
        return plan

    def _advance(self, boundary: int, *, refill: bool = False) -> None:
        advance = self.autocache.advance(boundary)
        self.report.advanced(self.step, boundary, advance, num_bytes=self.autocache.num_bytes, refill=refill)

    def _move(self, plan: ParallelPlan, state: OptimizerState | None = None) -> Move:
        self.layout, moved = move(
            self.layout,
            plan,
            ownership=self.ownership,
            chain=self.chain,
            train=self.config.train,
            world=self.world,
            objective=self.objective,
            keep_frozen_state=self.keep_frozen_state,
            state=state,
            recompute=self.config.pipe.recompute,
        )
        return moved

    # ---- training and evaluation -----------------------------------------------------------------------------------

    def _run_steps(self, stop: int) -> None:
        """Optimizer steps up to ``stop``, all in one epoch and under one plan."""
        layout, feed, plan, report, clock = self._layout, self.feeds["train"], self._plan, self.report, perf_counter
        train, epoch, log_every, guards = self.config.train, self.epoch, self.config.log.every, self.guards
        position = self.step % self.agenda.batches_per_epoch
        batches = self._train_batches(epoch)[position : position + stop - self.step]
        incoming = feed.batches(batches, epoch=epoch)
        self.chain.train()
        on_cpu = self.world.device.type == "cpu"
        flushed = start = clock()
        for batch_plan in batches:
            waiting = clock()
            batch = next(incoming)
            self.stepper.seconds.data += clock() - waiting
            lr = learning_rate(train, step=self.step, total_steps=self.total_steps)
            self.stepper.run(layout, feed, batch, step=self.step, lr=lr)
            self.step += 1
            read_bytes = self.autocache.read_bytes(batch_plan.ids) if batch.enters else 0
            report.stepped(plan, batch, read_bytes=read_bytes)
            report.progressed(self.step, epoch=epoch, plan=plan)
            is_pause = self.step % log_every == 0 or self.step == stop
            if on_cpu:  # a GPU need not be waited for after every step
                guards.check_loss()
            if is_pause:
                guards.check_losses()
                now = clock()
                report.flush(
                    self.step, plan=plan, objective=self.objective, phases=self.stepper.seconds, seconds=now - flushed
                )
                self.planning.spent(self.stepper.seconds)
                self.stepper.seconds = PhaseSeconds()
                flushed = clock()
        incoming.close()
        self.planning.trained(plan, batches)
        guards.check_weights(layout.parameters.values(), last_step=self.step - 1)
        report.totals.add_train(clock() - start)
        if self.agenda.ends_epoch(self.step):
            report.totals.end_epoch(len(self.train_data))

    def _evaluate(self) -> None:
        """Measures every evaluation split; keeps the weights if they are the best so far."""
        start = perf_counter()
        self.chain.train(False)
        try:
            metrics = evaluate_splits(
                self._layout,
                self.feeds,
                self.datasets,
                self.objective,
                batch_size=self.config.train.batch_size,
                num_nodes=self.world.num_nodes,
            )
        except NotFinite as error:
            what = "the evaluation loss is not finite"
            raise self.guards.diverged(self.step - 1, rank=error.rank, what=what) from None
        epoch = self.agenda.epoch(self.step - 1)
        seconds = perf_counter() - start
        predictions = self.datasets["eval"].predictions
        if self.report.evaluated(self.step, epoch=epoch, metrics=metrics, seconds=seconds, predictions=predictions):
            self._save_model("best")

    # ---- beginning, pausing, ending --------------------------------------------------------------------------------

    def _calibrate(self) -> None:
        self.planning.calibrate(
            self.chain,
            self.train_data,
            batches=self._train_batches(0),
            stepper=self.stepper,
            enter_plan=self._enter_untrained,
        )
        self.objective.clear()

    def _enter_untrained(self, plan: ParallelPlan) -> tuple[Move, Layout, Feed]:
        moved = self._move(plan)
        self._open_feeds()
        self.chain.train()
        return moved, self._layout, self.feeds["train"]

    def _start(self) -> None:
        """Enters the first plan, or the one of the checkpoint that is resumed; what is refused has left no trace."""
        evidence: dict[str, object] = {}
        if self.resumable is not None:
            self._restore(*self.resumable)
        elif self.replayed is not None:
            self._move(self.replayed[0])
        else:
            choice = self.planning.first()
            evidence = {"choice": choice}
            self._move(choice.plan)
        self.report.open()
        plan = self._with_cache(self._plan)
        if plan != self._plan:
            self._move(plan)
        if self.planning.calibration is not None:
            self.report.calibrated(self.planning.calibration)
        if self.resumable is not None:
            checkpoint, state = self.resumable
            self.report.restore(state["report"], step=self.step, resumed_from=checkpoint.name)
        self.report.adopts(self.step, self._plan, reason="resume" if self.resumable else "start", evidence=evidence)
        for boundary in self._refill_path():
            self._advance(boundary, refill=True)
        self._open_feeds()
        reset_peak_memory(self.world.device)
        self.report.trains(self._plan)
        if self.autofreeze.never_freezes(self.total_steps):
            self.report.never_freezes()

    def _refill_path(self) -> Sequence[int]:
        """The boundaries that the cache must be carried through again, to hold what it held at the checkpoint."""
        cached = self._plan.cached
        if cached is None:
            return ()
        path = self.resumable[1]["cache"] if self.resumable is not None else ()
        return [*(boundary for boundary in path if boundary < cached), cached]

    def _restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        if self.layout is not None:
            self.layout.close()
            self.layout = None
        self.ownership = initial_ownership(self.chain, self.world)
        self.chain.materialize(range(self.chain.num_units))
        plan, optimizer_state = self.checkpoints.load(
            checkpoint, state=state, chain=self.chain, train=self.config.train, ownership=self.ownership
        )
        self.step = state["step"]
        self.autofreeze.load_state_dict(state["freeze"])
        self._move(plan, optimizer_state)

    def _decision_is_due(self, step: int) -> bool:
        """A replay's plans need no policy, but where one is adopted there may be a decision of the policy's, too."""
        return (self.replayed is not None and step in self.replayed) or self.autofreeze.due(step)

    def _save_checkpoint(self) -> None:
        norm_sums, num_steps = self.stepper.take_norms(self._layout)
        self.autofreeze.observe(norm_sums, num_steps=num_steps)
        state = {
            "step": self.step,
            "identity": self.identity,
            "freeze": self.autofreeze.state_dict(),
            "cache": self.autocache.path,
            "report": self.report.state_dict(),
        }
        path = self.checkpoints.save(
            self.step, layout=self._layout, chain=self.chain, ownership=self.ownership, state=state
        )
        self.report.saved(self.step, path)

    def _save_model(self, name: str) -> None:
        weights = gather_weights(self.chain, self.ownership, world=self.world)
        if weights is not None:
            save_model(self.built, self.report.folder.path / "model" / name, weights)

    def _finish(self) -> None:
        self._save_model("final")
        self.report.finish(steps=self.step)
        self._layout.close()

    # ---- small things ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self.agenda.epoch(self.step)

    @property
    def _layout(self) -> Layout:
        assert self.layout is not None
        return self.layout

    @property
    def _plan(self) -> ParallelPlan:
        return self._layout.plan

    def _train_batches(self, epoch: int) -> Sequence[Batch]:
        train = self.config.train
        return epoch_batches(
            self.train_data.lengths,
            batch_size=train.batch_size,
            seed=train.seed,
            epoch=epoch,
            num_nodes=self.world.num_nodes,
        )

    def _open_feeds(self) -> None:
        self.feeds = {
            split: Feed(
                self.chain,
                data,
                self._plan,
                rank=self.world.rank,
                store=self.autocache.store(split),
                num_workers=self.config.data.num_workers,
            )
            for split, data in self.datasets.items()
        }
